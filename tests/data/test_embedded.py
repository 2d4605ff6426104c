import pytest

from curvcert.data import embedded
from curvcert.data.embedded import SHA256, read_embedded, verify_digest
from curvcert.errors import InvalidInput


@pytest.mark.parametrize("name", SHA256)
def test_reads_every_file_in_the_table(name: str) -> None:
    assert len(read_embedded(name)) > 10_000


@pytest.mark.parametrize("name", SHA256)
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: b"",
    ],
    ids=["truncated", "one bit altered", "empty"],
)
def test_refuses_a_damaged_file_by_name(name: str, damage) -> None:
    with pytest.raises(InvalidInput, match=rf"{name} is truncated or altered"):
        verify_digest(name, damage(read_embedded(name)))


def test_refuses_a_name_that_is_not_in_the_table() -> None:
    with pytest.raises(InvalidInput, match=r"digits\.safetensors"):
        read_embedded("../digits.py")


def test_names_a_file_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(embedded.SHA256, "gone.safetensors", "0" * 64)
    with pytest.raises(InvalidInput, match=r"gone\.safetensors is missing"):
        read_embedded("gone.safetensors")
