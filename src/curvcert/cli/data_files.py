"""Files and folders that hold samples: how each kind is read, and its size looked at before anything is unpacked."""

import csv
import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, final

import numpy as np
from numpy.lib.format import read_array, read_array_header_1_0, read_array_header_2_0, read_magic
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from curvcert.cli.torch_files import read_torch_file
from curvcert.errors import InvalidFile, InvalidInput

LARGEST = 2**33
"""Bytes that the arrays of a file may take in float64, however large the file is."""

_ALWAYS = 2**28
_PACKED = 64
"""Bytes that they may always take, and by what factor a larger file may unpack: images of digits reach 30."""

_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".bmp": "BMP", ".pgm": "PPM", ".ppm": "PPM"}
_SCAN, _MOST_SCANS = b"\xff\xda", 100
"""What a scan of a JPEG begins with.  A progressive one has about ten; each may take 25 bytes, and all of the pixels'
time: 120 KB took eight seconds."""

_CHANNELS = {"L": 1, "RGB": 3}
LABELS = "labels.csv"

T = TypeVar("T")


@final
@dataclass(frozen=True, eq=False)
class Content:
    """What a file or folder holds: samples, their labels where it has them, and names of classes."""

    x: NDArray[Any]
    y: NDArray[Any] | None = None
    class_names: tuple[str, ...] = ()


def is_data_file(name: str) -> bool:
    """Whether this is the name of a file of samples, or a folder."""
    return Path(name).suffix.lower() in _READERS or Path(name).is_dir()


def read_data(path: Path, samples: int | None) -> Content:
    """Return the samples that a file or a folder holds; of a folder, only the first images are read.

    Raises:
        InvalidInput: if there is none.
        InvalidFile: if it is damaged, of another kind, or too large.
    """
    if path.is_dir():
        return _images(path, samples)
    return _read(path, _READERS[path.suffix.lower()])


def read_labels(path: Path) -> NDArray[Any]:
    """Return the labels that a .npy, .pt or text file holds, one per sample."""
    if path.suffix.lower() in (".txt", ".csv"):
        return _read(path, lambda path: np.array([_whole(line, path) for line in path.read_text().split()], np.int64))
    readers: dict[str, Callable[[Path], Content]] = {".npy": _npy, ".pt": _pt, ".pth": _pt}
    if path.suffix.lower() not in readers:
        raise InvalidInput(f"--labels is a .npy or .pt file, or a text with one whole number per line, got {path}.")
    return _read(path, readers[path.suffix.lower()]).x


def _read(path: Path, reader: Callable[[Path], T]) -> T:
    """Read a file; whatever a damaged one makes its reader raise has one name."""
    try:
        if not path.is_file():
            raise InvalidInput(f"{path}: no such file. {_MADE.get(path.suffix.lower(), '')}".rstrip())
        return reader(path)
    except InvalidInput:
        raise
    except Exception as error:  # whatever zipfile, zlib, numpy or torch raise
        reason = str(error).split("\n")[0][:200].rstrip(".") or type(error).__name__
        kind = path.suffix.lower()
        what = {".npz": " of plain arrays", ".npy": " of one plain array"}.get(kind, "")
        raise InvalidFile(f"{path} is not a {kind} file{what}: {reason}. {_MADE.get(kind, '')}".rstrip()) from error


def _npz(path: Path) -> Content:
    with zipfile.ZipFile(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        if not {"x", "y"} <= set(names):
            raise InvalidFile(
                f"{path} has the arrays {', '.join(names)[:200] or '(none)'}, expected x and y. {_MADE['.npz']}"
            )
        members = ("x.npy", "y.npy")
        _require_moderate(path, sum(_member_size(archive, name) for name in members), path.stat().st_size)
        x, y = (_member(archive, name) for name in members)
        return Content(x, y)


def _member_size(archive: zipfile.ZipFile, name: str) -> int:
    """Return the bytes that an array takes in float64.

    What bzip2 and LZMA hold is unpacked in pieces of any size, whatever the archive says: five kilobytes took 6 GB.
    """
    method = archive.getinfo(name).compress_type
    if method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is packed by method {method}, which numpy does not use")
    with archive.open(name) as stream:
        return _size(stream, name, archive.getinfo(name).file_size)  # type: ignore[arg-type]


def _member(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    with archive.open(name) as stream:
        return np.asarray(read_array(stream, allow_pickle=False))


def _npy(path: Path) -> Content:
    with path.open("rb") as stream:
        _require_moderate(path, _size(stream, path.name, path.stat().st_size), path.stat().st_size)
        stream.seek(0)
        return Content(np.asarray(read_array(stream, allow_pickle=False)))


def _size(stream: BinaryIO, name: str, length: int) -> int:
    """Return the bytes that an array takes in float64, from its header alone; `length` is that of header and array."""
    version = read_magic(stream)
    read_header = {(1, 0): read_array_header_1_0, (2, 0): read_array_header_2_0}.get(version)
    if read_header is None:
        raise ValueError(f"{name} has the version {version} of its format, which holds names of fields")
    shape, _, dtype = read_header(stream)
    held, count = length - stream.tell(), math.prod(shape)
    if dtype.hasobject or dtype.itemsize == 0 or dtype.itemsize * count != held:
        raise ValueError(f"{name} holds {held} bytes, its header promises {dtype} of shape {shape}")
    return max(8, dtype.itemsize) * count


def _require_moderate(path: Path, size: int, packed: int) -> None:
    """Raise if what a file or folder unpacks to would not fit: a few bytes can unpack to any number of them."""
    most = min(LARGEST, max(_ALWAYS, _PACKED * packed))
    if size > most:
        raise InvalidFile(f"{path} unpacks to {size} bytes, over the limit of {most}. Split it into several files.")


def _pt(path: Path) -> Content:
    """Read a tensor, a pair (x, y), or a dict with x and y."""
    held = read_torch_file(path)
    if isinstance(held, Mapping):
        if "x" not in held:
            names = ", ".join(f"{name!s:.40}" for name in held if isinstance(name, str))[:200] or "(none)"
            raise InvalidFile(f"{path} has the entries {names}, expected x and y. {_MADE['.pt']}")
        held = (held["x"], *([held["y"]] if "y" in held else []))
    tensors = tuple(held) if isinstance(held, tuple | list) else (held,)
    if not 1 <= len(tensors) <= 2 or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise InvalidFile(f"{path} holds no tensor of samples, and no pair of samples and labels. {_MADE['.pt']}")
    _require_moderate(path, sum(8 * tensor.numel() for tensor in tensors), path.stat().st_size)
    return Content(*(tensor.detach().numpy() for tensor in tensors))


def _images(folder: Path, samples: int | None) -> Content:
    """Read the images of a folder: with a labels.csv, or a folder per class.  Values are in [0, 1]."""
    paths, labels, names = _listed(folder) if (folder / LABELS).is_file() else _by_class(folder)
    paths, labels = paths[:samples], labels[:samples]
    shapes = {_shape(path) for path in paths}
    if len(shapes) != 1:
        sizes = ", ".join(sorted(" x ".join(map(str, shape)) for shape in shapes))
        raise InvalidInput(f"The images in {folder} are of different sizes, or grey and coloured: {sizes[:200]}.")
    _require_moderate(folder, 8 * len(paths) * math.prod(*shapes), sum(path.stat().st_size for path in paths))
    x = np.stack([_pixels(path) for path in paths]).transpose(0, 3, 1, 2).astype(np.float64, order="C")
    x /= 255  # in place: images of a small file may fill the memory that one may take
    return Content(x, np.array(labels, np.int64), names)


def _listed(folder: Path) -> tuple[list[Path], list[int], tuple[str, ...]]:
    """Return what labels.csv lists: lines of a file's name, a comma, and its label."""
    table = folder / LABELS
    rows = _read(table, lambda table: [row for row in csv.reader(table.read_text("utf-8-sig").splitlines()) if row])
    rows = rows[1:] if rows and rows[0][-1].strip() == "label" else rows
    if not rows or any(len(row) != 2 for row in rows):
        raise InvalidFile(f"{table} expects lines of a file's name and its label, such as cat.png,3.")
    strangers = [name for name, _ in rows if Path(name.strip()).is_absolute() or ".." in Path(name.strip()).parts]
    if strangers:
        raise InvalidFile(f"{table} names {strangers[0][:80]!r}, which is not in its own folder.")
    return [folder / name.strip() for name, _ in rows], [_whole(label, table) for _, label in rows], ()


def _by_class(folder: Path) -> tuple[list[Path], list[int], tuple[str, ...]]:
    """Return the images of every class in turn, so that the first few are of all classes.

    Folders that are named by numbers have those as their labels; others are numbered from 0 in alphabetical order.
    """
    names = sorted(part.name for part in folder.iterdir() if part.is_dir())
    numbered = all(name.isdecimal() for name in names)
    labels = [_whole(name, folder) for name in names] if numbered else range(len(names))
    found = [
        [(path, label) for path in sorted((folder / name).iterdir()) if _is_image(path)]
        for label, name in zip(labels, names, strict=True)
    ]
    pairs = [pair for pair in chain.from_iterable(zip_longest(*found)) if pair is not None]
    if not pairs:
        raise InvalidInput(
            f"{folder} holds no samples: expected a folder of images per class, or images and a {LABELS} with lines of "
            f"a file's name and its label. Images end in {', '.join(_FORMATS)}."
        )
    return [path for path, _ in pairs], [label for _, label in pairs], () if numbered else tuple(names)


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in _FORMATS


def _opened(path: Path) -> Image.Image:
    if not _is_image(path):
        raise InvalidInput(f"{path}: images end in {', '.join(_FORMATS)}.")
    return Image.open(path, formats=[_FORMATS[path.suffix.lower()]])


def _shape(path: Path) -> tuple[int, int, int]:
    """Return the height, width and channels of an image, from its header alone."""

    def read(path: Path) -> tuple[int, int, int]:
        scans = path.read_bytes().count(_SCAN) if _FORMATS.get(path.suffix.lower()) == "JPEG" else 0
        if scans > _MOST_SCANS:
            raise InvalidFile(f"{path} has {scans} scans, over the limit of {_MOST_SCANS}. Save it anew.")
        with _opened(path) as image:
            if image.mode not in _CHANNELS:
                raise InvalidInput(f"{path} is an image of mode {image.mode}. Convert it to grey (L) or RGB, 8 bits.")
            return image.height, image.width, _CHANNELS[image.mode]

    return _read(path, read)


def _pixels(path: Path) -> NDArray[np.uint8]:
    def read(path: Path) -> NDArray[np.uint8]:
        with _opened(path) as image:
            return np.asarray(image, np.uint8).reshape(image.height, image.width, -1)

    return _read(path, read)


def _whole(text: str, path: Path) -> int:
    if not text.strip().isdecimal() or len(text) > 12:
        raise InvalidFile(f"{path}: labels are whole numbers, counted from 0, got {text[:40]!r}.")
    return int(text)


_READERS: dict[str, Callable[[Path], Content]] = {".npz": _npz, ".npy": _npy, ".pt": _pt, ".pth": _pt}
KINDS: Sequence[str] = (*_READERS, "a folder of images")
_MADE = {
    ".npz": "Write it with numpy.savez(path, x=inputs, y=labels).",
    ".npy": "Write it with numpy.save(path, inputs).",
    ".pt": "Write it with torch.save({'x': inputs, 'y': labels}, path).",
    ".pth": "Write it with torch.save({'x': inputs, 'y': labels}, path).",
}
