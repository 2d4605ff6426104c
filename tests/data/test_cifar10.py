import os
from pathlib import Path

import pytest
import torch

from curvcert.data import cifar10, load_cifar10
from curvcert.data.cifar10 import parse_records
from curvcert.errors import InvalidInput
from tests.data.official_sets import published, random_bytes, records

IMAGES, LABELS = random_bytes(6, 3, 32, 32), random_bytes(6, seed=1) % 10


@pytest.fixture
def small_set(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The content of two training batches of three images, which are taken for the published ones."""
    contents = {f"data_batch_{k + 1}.bin": records(IMAGES[3 * k :][:3], LABELS[3 * k :][:3]) for k in range(2)}
    monkeypatch.setitem(cifar10.FILES, "train", tuple(published(*item) for item in contents.items()))
    return contents


@pytest.mark.parametrize("where", [".", "cifar-10-batches-bin"])
def test_reads_the_batches_in_order_where_they_are(small_set, tmp_path: Path, where: str) -> None:
    (tmp_path / where).mkdir(exist_ok=True)
    for name, content in small_set.items():
        (tmp_path / where / name).write_bytes(content)
    data = load_cifar10("train", tmp_path, download=False)
    assert torch.equal(data.images, IMAGES)
    assert torch.equal(data.labels, LABELS.long())
    assert data.max_value == 255


def test_a_truncated_batch_is_refused_by_name(small_set, tmp_path: Path) -> None:
    for name, content in small_set.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "data_batch_2.bin").write_bytes(small_set["data_batch_2.bin"][:-3073])
    with pytest.raises(InvalidInput, match=r"data_batch_2\.bin is truncated or altered"):
        load_cifar10("train", tmp_path)


def test_a_pixel_is_where_the_format_puts_it() -> None:
    pixels = bytearray(3072)
    pixels[1024 * 2 + 32 * 5 + 7] = 99  # blue, row 5, column 7
    images, labels = parse_records(bytes([9, *pixels]), "batch")
    assert images.nonzero().tolist() == [[0, 2, 5, 7]]
    assert int(images[0, 2, 5, 7]) == 99
    assert labels.tolist() == [9]


@pytest.mark.parametrize(
    "content",
    [b"", records(IMAGES, LABELS)[:-1], records(IMAGES, LABELS + 10)],
    ids=["empty", "truncated", "labels past 9"],
)
def test_what_is_no_batch_is_refused_by_name(content: bytes) -> None:
    with pytest.raises(InvalidInput, match="some-file is truncated or altered"):
        parse_records(content, "some-file")


@pytest.mark.skipif("CURVCERT_DATA" not in os.environ, reason="needs the real files: CURVCERT_DATA names no folder")
@pytest.mark.parametrize(("split", "count"), [("train", 5000), ("test", 1000)])
def test_the_published_set(split, count: int) -> None:
    data = load_cifar10(split, download=False)
    assert data.images.shape == (10 * count, 3, 32, 32)
    assert data.labels.bincount().tolist() == [count] * 10
