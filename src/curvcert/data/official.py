"""The files of the official data sets: where they are looked for, and the digest that each must have."""

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from curvcert.errors import InvalidInput

FOLDER_VARIABLE = "CURVCERT_DATA"
"""The environment variable that names the folder of the data sets."""


@dataclass(frozen=True)
class OfficialFile:
    """A published file: its name, and the size and SHA-256 of its uncompressed content."""

    name: str
    size: int
    sha256: str


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of the data sets: the one given, else $CURVCERT_DATA, else the user's cache.

    The cache is $XDG_CACHE_HOME/curvcert, or ~/.cache/curvcert where that variable is empty or not absolute.

    >>> data_folder("sets").name
    'sets'
    """
    if folder is not None:
        return Path(folder).expanduser()
    if named := os.environ.get(FOLDER_VARIABLE):
        return Path(named).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "curvcert"


def find_file(file: OfficialFile, folders: Iterable[Path]) -> Path | None:
    """Return the first path that holds the file, plain or with .gz, or None.

    >>> find_file(OfficialFile("test_batch.bin", 1, ""), [Path("nowhere")]) is None
    True
    """
    candidates = (folder / (file.name + suffix) for folder in folders for suffix in ("", ".gz"))
    return next((path for path in candidates if path.is_file()), None)


def read_found(file: OfficialFile, folders: Iterable[Path]) -> bytes:
    """Return the verified content of the file from the first folder that holds it.

    Raises:
        InvalidInput: if none of the folders holds it, or it is truncated or altered.
    """
    folders = tuple(folders)
    path = find_file(file, folders)
    if path is None:
        raise InvalidInput(
            f"Expected {file.name} or {file.name}.gz in {', '.join(map(str, folders))}, found neither. "
            f"Put the official file there, name its folder (folder=..., or the environment variable "
            f"{FOLDER_VARIABLE}), or allow the download."
        )
    return read_verified(path, file)


def read_verified(path: Path, file: OfficialFile) -> bytes:
    """Return the uncompressed content of a plain or .gz file, once it is the published one.

    Never holds more than one byte beyond the published size, whatever the file claims or unpacks to.

    Raises:
        InvalidInput: if the file is truncated or altered.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            content = stream.read(file.size + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InvalidInput(_refusal(path, file, f"a gzip file that does not unpack ({error})")) from error
    return verified(content, file, path)


def verified(content: bytes, file: OfficialFile, source: Path) -> bytes:
    """Return the content, or raise with the name of its source if it is not the published one.

    >>> abc = OfficialFile("abc", 3, hashlib.sha256(b"abc").hexdigest())
    >>> verified(b"abc", abc, Path("here/abc"))
    b'abc'
    """
    if len(content) > file.size:
        raise InvalidInput(_refusal(source, file, "more bytes than that"))
    digest = hashlib.sha256(content).hexdigest()
    if digest != file.sha256:
        raise InvalidInput(_refusal(source, file, f"{len(content)} bytes with SHA-256 {digest}"))
    return content


def _refusal(path: Path, file: OfficialFile, got: str) -> str:
    return (
        f"{path} is truncated or altered: expected the {file.size} bytes of {file.name} with SHA-256 {file.sha256}, "
        f"got {got}. Delete it and load again, or put the official file in its place."
    )
