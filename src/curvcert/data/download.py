"""Downloads with a digest and a progress bar, and the unpacking of an archive's named members.

A file appears under its final name once it is complete and its digest is the published one, never before.
"""

import gzip
import importlib
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import IO, cast

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from curvcert.data.official import OfficialFile, verified
from curvcert.errors import CurvcertError, InvalidInput
from curvcert.whole_files import write_whole

CHUNK = 1 << 16
TIMEOUT = 30.0
"""Seconds without a byte after which a connection is given up."""

TAR_OVERHEAD = 1 << 20
"""What an archive may hold beside its named members: headers, padding, a readme."""


class DownloadFailed(CurvcertError, OSError):
    """A file that could not be downloaded, or whose digest is not the published one."""


def download_file(url: str, sha256: str, path: Path) -> Path:
    """Download a file to `path` (http or https), with a progress bar on standard error.

    The digest is that of the bytes as they are sent.  A file already there with that digest is kept.

    Raises:
        DownloadFailed: if pooch is not installed, the connection fails or breaks off, or the digest is another one.
    """
    pooch = _import_pooch()
    headers = {"Accept-Encoding": "identity"}  # the digest is of the file, not of what a server makes of it
    with _progress() as progress:
        bar = _PoochBar(progress, path.name)
        downloader = pooch.HTTPDownloader(progressbar=bar, chunk_size=CHUNK, timeout=TIMEOUT, headers=headers)
        try:
            pooch.retrieve(url, f"sha256:{sha256}", fname=path.name, path=path.parent, downloader=downloader)
        except (OSError, ValueError) as error:
            raise DownloadFailed(
                f"Expected to download {url} with SHA-256 {sha256}, got: {error} "
                "Check the connection and try again, or bring the official files by other means, into a folder that "
                "--data-folder names (in Python, the folder that is passed to load)."
            ) from error
    return path


def extract_members(archive: Path, prefix: str, files: Iterable[OfficialFile], folder: Path) -> None:
    """Write the named members of a .tar.gz, `prefix/name` each, to `folder/name`, and nothing else.

    Only a regular file of exactly that name, the published size and the published digest is written;
    the names in the archive choose no path.  Reading stops at the size that the members can need.

    Raises:
        InvalidInput: if a member is missing or is not the published one, or the archive is damaged or too large.
    """
    wanted = {f"{prefix}/{file.name}": file for file in files}
    limit = sum(file.size for file in wanted.values()) + TAR_OVERHEAD
    try:
        with gzip.open(archive) as content, tarfile.open(fileobj=_limited(content, limit), mode="r|") as tar:
            for member in tar:
                file = wanted.get(member.name)
                if file is not None and member.isreg():
                    write_whole(folder / file.name, _member_content(tar, member, file, archive))
                    del wanted[member.name]
    except (EOFError, gzip.BadGzipFile, zlib.error, tarfile.TarError) as error:
        raise InvalidInput(f"{archive} is truncated or altered: {error} Delete it and download it again.") from error
    if wanted:
        raise InvalidInput(f"{archive} lacks {', '.join(sorted(wanted))}. Delete it and download it again.")


def _member_content(tar: tarfile.TarFile, member: tarfile.TarInfo, file: OfficialFile, archive: Path) -> bytes:
    stream = tar.extractfile(member)
    content = b"" if stream is None else stream.read(file.size + 1)
    return verified(content, file, archive / member.name)


def _import_pooch() -> ModuleType:
    try:
        return importlib.import_module("pooch")
    except ImportError as error:
        raise DownloadFailed(
            "Downloading needs pooch, which is not installed. Install it with: pip install 'curvcert[data]'"
        ) from error


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))


class _PoochBar:
    """The four names that pooch asks of a progress bar, drawn by rich."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress = progress
        self._task = progress.add_task(name, total=None)

    @property
    def total(self) -> float | None:
        return self._progress.tasks[self._task].total

    @total.setter
    def total(self, value: int) -> None:
        self._progress.update(self._task, total=value or None)

    def update(self, n: int) -> None:
        self._progress.advance(self._task, n)

    def reset(self) -> None:
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        self._progress.stop_task(self._task)


def _limited(stream: gzip.GzipFile, limit: int) -> IO[bytes]:
    return cast(IO[bytes], _Limited(stream, limit))  # read() is all that tarfile asks of a stream


class _Limited:
    """A stream that refuses to be read past a limit."""

    def __init__(self, stream: gzip.GzipFile, limit: int) -> None:
        self._stream, self._limit, self._left = stream, limit, limit

    def read(self, size: int) -> bytes:
        content = self._stream.read(size)
        self._left -= len(content)
        if self._left < 0:
            raise tarfile.ReadError(f"it unpacks to more than {self._limit} bytes.")
        return content
