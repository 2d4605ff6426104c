import gzip
import os
from pathlib import Path

import pytest
import torch

from curvcert.data import load_mnist, mnist
from curvcert.data.mnist import parse_idx
from curvcert.errors import InvalidInput
from tests.data.official_sets import idx, published, random_bytes

IMAGES, LABELS = random_bytes(7, 28, 28), random_bytes(7, seed=1) % 10


@pytest.fixture
def small_set(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The content of a test set of seven images, which is taken for the published one."""
    contents = {"t10k-images-idx3-ubyte": idx(IMAGES), "t10k-labels-idx1-ubyte": idx(LABELS)}
    monkeypatch.setitem(mnist.FILES, "test", tuple(published(*item) for item in contents.items()))
    return contents


@pytest.mark.parametrize("where", [".", "MNIST/raw", "mnist"])
@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gz"])
def test_reads_the_files_where_they_are(small_set, tmp_path: Path, where: str, compressed: bool) -> None:
    folder = tmp_path / where
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in small_set.items():
        path = folder / (name + ".gz" * compressed)
        path.write_bytes(gzip.compress(content) if compressed else content)
    data = load_mnist("test", tmp_path, download=False)
    assert torch.equal(data.images, IMAGES[:, None])
    assert torch.equal(data.labels, LABELS.long())
    assert data.max_value == 255


def test_an_altered_file_is_refused_by_name(small_set, tmp_path: Path) -> None:
    for name, content in small_set.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(LABELS.flip(0)))
    with pytest.raises(InvalidInput, match="t10k-labels-idx1-ubyte is truncated or altered"):
        load_mnist("test", tmp_path)


@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 3, 4), (1, 1, 1, 6)])
def test_parses_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    array = random_bytes(*shape)
    assert torch.equal(parse_idx(idx(array), "array"), array)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0\0\x08",
        b"\0\0\x0d" + idx(IMAGES)[3:],
        b"\x1f\x8b\x08" + idx(IMAGES)[3:],
        idx(IMAGES)[:-1],
        idx(IMAGES) + b"\0",
        idx(IMAGES)[:10],
        b"\0\0\x08\x02" + b"\xff" * 8,
    ],
    ids=["empty", "no header", "floats", "gzip", "short", "long", "half a header", "enormous"],
)
def test_what_is_not_idx_is_refused_by_name(content: bytes) -> None:
    with pytest.raises(InvalidInput, match="some-file"):
        parse_idx(content, "some-file")


def test_the_tables_agree() -> None:
    files = [file for split in mnist.FILES.values() for file in split]
    assert {file.name for file in files} == set(mnist.COMPRESSED_SHA256)
    assert [file.size for file in files] == [16 + 60_000 * 784, 8 + 60_000, 16 + 10_000 * 784, 8 + 10_000]


@pytest.mark.skipif("CURVCERT_DATA" not in os.environ, reason="needs the real files: CURVCERT_DATA names no folder")
@pytest.mark.parametrize(
    ("split", "counts"),
    [
        ("train", [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]),
        ("test", [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]),
    ],
)
def test_the_published_set(split, counts: list[int]) -> None:
    data = load_mnist(split, download=False)
    assert data.images.shape == (sum(counts), 1, 28, 28)
    assert data.labels.bincount().tolist() == counts
