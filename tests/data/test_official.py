"""What is read is the published file, plain or compressed, in bounded memory, or it is refused by name."""

import gzip
import tracemalloc
from pathlib import Path

import pytest

from curvcert.data import data_folder
from curvcert.data.official import find_file, read_found, read_verified
from curvcert.errors import InvalidInput
from tests.data.official_sets import published

CONTENT = b"The content of a file that was published. " * 50
FILE = published("set.bin", CONTENT)


def _write(folder: Path, content: bytes, compressed: bool) -> Path:
    path = folder / ("set.bin.gz" if compressed else "set.bin")
    path.write_bytes(gzip.compress(content) if compressed else content)
    return path


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-1], f"got {len(CONTENT) - 1} bytes with SHA-256 [0-9a-f]{{64}}"),
        (lambda content: content[:-1] + bytes([content[-1] ^ 1]), f"got {len(CONTENT)} bytes with SHA-256"),
        (lambda content: content + b".", "more bytes than that"),
        (lambda content: b"", "got 0 bytes"),
    ],
    ids=["truncated", "one bit altered", "longer", "empty"],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, compressed: bool, damage, message: str) -> None:
    assert read_verified(_write(tmp_path, CONTENT, compressed), FILE) == CONTENT
    path = _write(tmp_path, damage(CONTENT), compressed)
    with pytest.raises(
        InvalidInput, match=rf"{path.name} is truncated or altered: expected .*{FILE.sha256}.*{message}"
    ):
        read_verified(path, FILE)


@pytest.mark.parametrize(
    "damage",
    [
        lambda packed: packed[: len(packed) // 2],
        lambda packed: packed[:-4],
        lambda packed: b"PK" + packed[2:],
        lambda packed: packed[:20] + bytes([packed[20] ^ 0xFF]) + packed[21:],
    ],
    ids=["half", "without its length", "another magic number", "one byte altered"],
)
def test_a_gzip_file_that_does_not_unpack_is_refused_by_name(tmp_path: Path, damage) -> None:
    path = tmp_path / "set.bin.gz"
    path.write_bytes(damage(gzip.compress(CONTENT)))
    with pytest.raises(InvalidInput, match=r"set\.bin\.gz is truncated or altered"):
        read_verified(path, FILE)


def test_a_decompression_bomb_is_refused_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "set.bin.gz"
    path.write_bytes(gzip.compress(bytes(1 << 20), mtime=0) * 64)  # 64 MiB from 64 KiB
    tracemalloc.start()
    with pytest.raises(InvalidInput, match="more bytes than that"):
        read_verified(path, FILE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_the_plain_file_comes_first_and_a_missing_one_is_named(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    with pytest.raises(
        InvalidInput, match=r"set\.bin or set\.bin\.gz in .*first, .*second, found neither.*CURVCERT_DATA"
    ):
        read_found(FILE, (first, second))
    _write(second, CONTENT, compressed=True)
    assert find_file(FILE, (first, second)) == second / "set.bin.gz"
    _write(second, CONTENT, compressed=False)
    assert find_file(FILE, (first, second)) == second / "set.bin"
    (first / "set.bin").mkdir()  # a folder is no file
    assert read_found(FILE, (first, second)) == CONTENT


def test_the_folder_is_the_argument_then_the_variable_then_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CURVCERT_DATA", "~/named")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_folder("given") == Path("given")
    assert data_folder() == tmp_path / "named"
    monkeypatch.delenv("CURVCERT_DATA")
    assert data_folder() == tmp_path / "cache" / "curvcert"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the XDG specification
    assert data_folder() == tmp_path / ".cache" / "curvcert"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_folder() == tmp_path / ".cache" / "curvcert"
