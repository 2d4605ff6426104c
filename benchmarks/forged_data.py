"""Forged samples, labels and weights: arrays, files of torch.save, images of every format, and lists of images.

As in `benchmarks.forgeries`, each forger takes a valid file's bytes and a source of randomness.
"""

import io
import random
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.forgeries import _NUMBERS, _WORDS, Forge, _member, forged_arrays
from benchmarks.fuzzed_networks import small
from curvcert.cli.inputs import load_inputs
from curvcert.cli.models import ModelChoice, load_network

_SIZES = (0, 1, 2, 5, 255, 4096, 5792, 2**15, 2**16 - 1, 2**20, 2**31 - 1)


def array(content: bytes, draw: random.Random) -> bytes:
    """Forge an array: its header promises something else, or its numbers are others."""
    if draw.random() < 0.5:
        return _member(draw, "<f8", (3, 4))
    buffer = io.BytesIO()
    found = forged_arrays({"x": np.load(io.BytesIO(content))}, draw)
    np.save(buffer, next(iter(found.values()), np.zeros(0)))
    return buffer.getvalue()


def torch_file(content: bytes, draw: random.Random) -> bytes:
    """Forge a file of torch.save: tensors of every layout, other containers, another pickle, other records."""
    if draw.random() < 0.4:
        return _other_pickle(content, draw)
    held = torch.load(io.BytesIO(content), weights_only=True)
    inner = held.get("state_dict", held)
    for _ in range(draw.choice((0, 1, 1, 2))):
        name = draw.choice(sorted(inner, key=str) or ["x"])
        match draw.randrange(4):
            case 0:
                inner.pop(name, None)
            case 1:
                inner[draw.choice((*_WORDS[:20], "module.0.weight", 7, (1, 2), None))] = inner.pop(name, 0)
            case _:
                inner[name] = draw.choice(_TENSORS)(_tensor(inner.get(name)))
    buffer = io.BytesIO()
    torch.save(draw.choice(_CONTAINERS)(held), buffer)
    return buffer.getvalue()


def _tensor(value: Any) -> Tensor:
    return value if type(value) is Tensor and value.layout is torch.strided and value.numel() < 99 else torch.ones(2)


def _sparse(_: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), (2**40,))


_TENSORS: tuple[Callable[[Tensor], Any], ...] = (
    lambda value: value.half(), lambda value: value.double(), lambda value: value.bfloat16(), lambda value: 1 * value,
    lambda value: value.to(torch.complex64), lambda value: value.bool(), lambda value: value.to(torch.float8_e5m2),
    lambda value: value.to(torch.uint16), lambda value: value.to(torch.complex64).conj(), lambda value: value / 0,
    lambda value: torch.nn.Parameter(value.double()), lambda value: value.to_sparse(), _sparse,
    lambda value: torch.zeros(1).expand(2**40), lambda value: torch.zeros(1, 1).expand(2**12, 2**13),
    lambda value: torch.empty(2**40, device="meta"), lambda value: torch.zeros(0, 4), lambda value: torch.zeros(()),
    lambda value: torch.zeros((1,) * 60), lambda value: torch.zeros(3, 4, 2**10), lambda value: value[..., :1],
    lambda value: torch.quantize_per_tensor(value.float(), 0.1, 0, torch.qint8), lambda value: value.tolist(),
    lambda value: value.storage().untyped(), lambda value: bytearray(99), lambda value: np.zeros(3),
)  # fmt: skip
_CONTAINERS: tuple[Callable[[Any], Any], ...] = (
    *[lambda held: held] * 4, lambda held: {"state_dict": held}, lambda held: {"model": held, "epoch": 3},
    lambda held: list(held.values()), lambda held: tuple(held.values()), OrderedDict, lambda held: [held],
    lambda held: next(iter(held.values()), None), lambda held: {"x": held}, lambda held: [[[[[held]]]]], lambda _: {},
    lambda held: {"model_state_dict": {"state_dict": {"model": held}}}, lambda held: torch.nn.ReLU(),
)  # fmt: skip


def _doubled(depth: int) -> bytes:
    """Return a tuple that holds the one before twice, and so on: few bytes, and any number of entries."""
    return b")" + b"".join(b"r" + struct.pack("<I", k) + b"j" + struct.pack("<I", k) + b"\x86" for k in range(depth))


def _called(name: str, number: int) -> bytes:
    return f"c{name.replace(' ', chr(10))}\n".encode() + b"J" + struct.pack("<i", number) + b"\x85R"


def _greedy(draw: random.Random) -> bytes:
    """Return a pickle that asks torch's reader for much, and names nothing that it refuses."""
    depth = draw.choice((3, 20, 64, 3000))
    value = draw.choice(
        (
            _doubled(depth), b"]" * depth + b"a" * (depth - 1), b"(" * depth + b"t" * depth,
            *(_called(f"{name}", draw.choice((-1, 0, 2**27, 2**31 - 1))) for name in (
                "builtins bytearray", "builtins set", "torch Tensor", "torch FloatTensor", "torch Size", "torch device",
                "torch.storage UntypedStorage", "torch FloatStorage", "collections Counter", "collections OrderedDict",
                "torch.nn.parameter Parameter", "torch._utils _rebuild_meta_tensor_no_storage", "os system",
            )),
        )
    )  # fmt: skip
    name = b"X\x01\x00\x00\x00x"
    return b"\x80\x02}" + draw.choice((name + value, value + name, value + b"K\x01")) + b"s."


def _other_pickle(content: bytes, draw: random.Random) -> bytes:
    """Write the archive anew: with other numbers in its pickle, another pickle, or other records."""
    buffer = io.BytesIO()
    kind = draw.randrange(5)
    packing = zipfile.ZIP_DEFLATED if draw.random() < 0.1 else zipfile.ZIP_STORED
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w", packing) as new:
        for part in old.infolist():
            held, name = old.read(part), part.filename
            if name.endswith("data.pkl"):
                held = _greedy(draw) if kind < 2 else _other_numbers(held, draw) if kind < 4 else draw.randbytes(40)
            elif kind == 4 and draw.random() < 0.3:
                held = draw.choice((b"", held[:-1], held * 50, b"big", b"0"))
            if draw.random() < 0.97:
                new.writestr(zipfile.ZipInfo(name if draw.random() < 0.97 else "archive/../x"), held, packing)
    return buffer.getvalue()


def _other_numbers(held: bytes, draw: random.Random) -> bytes:
    """Return a pickle in which a few small numbers are others: sizes, strides, offsets and entries of storages."""
    places = [k for k in range(len(held) - 1) if held[k] == ord("K")]
    for k in sorted(draw.sample(places, min(len(places), draw.choice((1, 2, 4)))), reverse=True):
        number = draw.choice((0, 1, 2, 3, 5, 255, 2**15, 2**27, 2**31 - 1, -1, -(2**31)))
        held = held[:k] + b"J" + struct.pack("<i", number) + held[k + 2 :]
    return held


def png(content: bytes, draw: random.Random) -> bytes:
    """Forge a PNG: its pieces, with their sums made anew."""
    pieces, at = [], 8
    while at < len(content):
        size = int.from_bytes(content[at : at + 4], "big")
        pieces.append((content[at + 4 : at + 8], content[at + 8 : at + 8 + size]))
        at += 12 + size
    for _ in range(draw.choice((1, 1, 2))):
        k = draw.randrange(len(pieces))
        kind, held = pieces[k]
        match draw.randrange(5):
            case 0 | 1:
                sizes = [draw.choice((5, 4, *_SIZES)) for _ in "ab"]
                rest = bytes(
                    (draw.choice((8, 8, 16, 1, 3)), draw.choice((2, 0, 3, 4, 6, 9)), 0, 0, draw.choice((0, 1)))
                )
                pieces[0] = b"IHDR", struct.pack(">II", *sizes) + rest
            case 2:
                pieces[k] = kind, draw.choice((b"", held[:-1], held * 3, draw.randbytes(30)))
            case 3:
                much = zlib.compress(bytes(draw.choice((2**10, 2**26))))
                extra = draw.choice((b"zTXt", b"iCCP", b"iTXt", b"IDAT", b"PLTE", b"tRNS", b"acTL", b"fcTL", b"eXIf"))
                pieces.insert(draw.randrange(1, len(pieces) + 1), (extra, draw.choice((b"a\0\0", b"")) + much))
            case _:
                del pieces[k]
                pieces = pieces or [(b"IEND", b"")]
    sealed = (
        struct.pack(">I", len(held)) + kind + held + struct.pack(">I", zlib.crc32(kind + held)) for kind, held in pieces
    )
    return content[:8] + b"".join(sealed)


def jpeg(content: bytes, draw: random.Random) -> bytes:
    """Forge a JPEG: another size, or its scans again and again."""
    frame = content.index(b"\xff\xc2")
    if draw.random() < 0.8:
        sizes = struct.pack(">HH", *(draw.choice((4, 8, *(size for size in _SIZES if size < 2**16))) for _ in "ab"))
        content = content[: frame + 5] + sizes + content[frame + 9 :]
    if draw.random() < 0.8:
        first = draw.choice([k for k in range(frame, len(content)) if content[k : k + 2] == b"\xff\xda"])
        content = content[:first] + content[first:-2] * draw.choice((2, 30, 1000)) + content[-2:]
    if draw.random() < 0.3:
        k = draw.randrange(2, len(content))
        content = content[:k] + bytes((0xFF, draw.choice((0xC0, 0xC4, 0xDB, 0xDD, 0xE1, 0xEE, 0xFE)))) + content[k:]
    return content


def bitmap(content: bytes, draw: random.Random) -> bytes:
    """Forge a bitmap: fields of its header."""
    made = bytearray(content)
    for _ in range(draw.choice((1, 2, 3))):
        size, place = draw.choice((("<i", 18), ("<i", 22), ("<i", 10), ("<i", 14), ("<h", 28), ("<i", 30), ("<i", 46)))
        values = (0, 1, 3, 4, 8, 16, 32, 40, 108, -4, 4096, *((2**20, 2**31 - 1, -(2**31)) if size == "<i" else ()))
        struct.pack_into(size, made, place, draw.choice(values))
    return bytes(made) + bytes(draw.choice((0, 0, 2**20)))


def pixmap(content: bytes, draw: random.Random) -> bytes:
    """Forge a pixmap: words of its header."""
    words = [content[:2], b"4", b"5", b"255"]
    for _ in range(draw.choice((1, 2))):
        k = draw.randrange(4)
        kinds = (b"P1", b"P2", b"P3", b"P4", b"P5", b"P6", b"P7", b"Pf", b"PF", b"Py", b"P0CMYK")
        numbers = [str(n).encode() for n in (*_SIZES, -1, 65535, 0.5)]
        words[k] = draw.choice(kinds if k == 0 else (*numbers, b"#" * 10_000, b"9" * 5000))
    return b" ".join(words) + b"\n" + content[-60:] * draw.choice((1, 1, 50_000))


def labels(content: bytes, draw: random.Random) -> bytes:
    """Forge a table of labels, of images or without: another name or number, or many."""
    lines = content.decode().splitlines()
    words = (
        *_WORDS,
        *map(str, _NUMBERS),
        "a.png",
        "b.png",
        "../a.png",
        "labels.csv",
        ".",
        "\u0663",
        '"',
    )
    k = draw.randrange(len(lines))
    fields = lines[k].split(",")
    match draw.randrange(4):
        case 0:
            lines *= draw.choice((2, 50))
        case 1:
            lines.append(draw.choice(words))
        case _:
            fields[draw.randrange(len(fields))] = draw.choice(words)
            lines[k] = ",".join(fields)
    return "\n".join(lines).encode("utf-8", "replace")


Read = Callable[[Path], object]


def data_files(folder: Path) -> dict[str, tuple[Path, Forge, Read]]:
    """Write samples, labels and weights of every kind into a folder: each file, its forger and its reader."""
    draw = np.random.default_rng(0)
    x, y = draw.random((3, 4)), np.arange(3)
    plain, whole, text = folder / "x.npy", folder / "y.npy", folder / "y.txt"
    np.save(plain, x)
    np.save(whole, y)
    text.write_text("0\n1\n2\n")
    tensors, weights, checkpoint = folder / "data.pt", folder / "weights.pt", folder / "checkpoint.pt"
    torch.save({"x": torch.tensor(x), "y": torch.tensor(y)}, tensors)
    torch.save(small().state_dict(), weights)
    torch.save({"state_dict": dict(small().state_dict()), "epoch": 3, "betas": [(0.9, 0.99)] * 2}, checkpoint)

    def weighed(file: Path) -> object:
        return load_network(ModelChoice("benchmarks.fuzzed_networks:small", file, None, "4"))

    listed = folder / "listed"
    for name in "ab":
        _image(listed / f"{name}.png")
    table = listed / "labels.csv"
    table.write_text("file,label\na.png,0\nb.png,1\n")
    kept = str(plain)

    def shown(file: Path) -> object:
        return load_inputs(str(file.parents[1]))

    return {
        "array": (plain, array, lambda file: load_inputs(str(file), labels=whole)),
        "labels": (whole, array, lambda file: load_inputs(kept, labels=file)),
        "labels as text": (text, labels, lambda file: load_inputs(kept, labels=file)),
        "data of PyTorch": (tensors, torch_file, lambda file: load_inputs(str(file))),
        "weights of PyTorch": (weights, torch_file, weighed),
        "checkpoint of PyTorch": (checkpoint, torch_file, weighed),
        "list of images": (table, labels, lambda file: load_inputs(str(file.parent))),
        **{kind: (_image(folder / kind / "0" / f"image{end}"), forge, shown) for kind, end, forge in _IMAGES},
    }


_IMAGES = (("PNG", ".png", png), ("JPEG", ".jpg", jpeg), ("BMP", ".bmp", bitmap), ("PPM", ".ppm", pixmap))
DATA_KINDS = (
    "array", "labels", "labels as text", "data of PyTorch", "weights of PyTorch", "checkpoint of PyTorch",
    "list of images", *(kind for kind, *_ in _IMAGES),
)  # fmt: skip


def _image(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 3), np.uint8)
    Image.fromarray(pixels).save(path, progressive=True)  # which a JPEG alone knows
    return path
