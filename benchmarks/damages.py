"""Damaged copies of a file: to show that no reader crashes, runs code or believes what it reads."""

import random
from collections.abc import Callable, Iterator

Damage = Callable[[bytearray, random.Random], bytearray]


def mutations(content: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Yield damaged copies, none equal to the content: cut, flipped, stuffed, with NaN or with oversized lengths."""
    draw = random.Random(seed)
    for k in range(count):
        damaged = bytes(DAMAGES[k % len(DAMAGES)](bytearray(content), draw))
        yield damaged if damaged != content else content[:-1]


def _cut(content: bytearray, draw: random.Random) -> bytearray:
    return content[: draw.randrange(len(content))]


def _flip(content: bytearray, draw: random.Random) -> bytearray:
    for _ in range(draw.choice((1, 1, 4, 64))):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return content


def _flip_early(content: bytearray, draw: random.Random) -> bytearray:
    """Damage the first kilobytes, where lengths and headers are."""
    for _ in range(draw.choice((1, 2, 8))):
        content[draw.randrange(min(len(content), 4096))] = draw.randrange(256)
    return content


def _length(content: bytearray, draw: random.Random) -> bytearray:
    size = draw.choice((0, 1, 2**16, 2**24 + 1, 2**31, 2**40, 2**63, 2**64 - 1, draw.randrange(2 * len(content))))
    content[:8] = size.to_bytes(8, "little")
    return content


def _stuff(content: bytearray, draw: random.Random) -> bytearray:
    place = draw.randrange(len(content))
    content[place:place] = draw.randbytes(draw.choice((1, 8, 1000)))
    return content


def _nan(content: bytearray, draw: random.Random) -> bytearray:
    place = max(0, len(content) - 8 * draw.randrange(1, 2 + len(content) // 16))
    content[place : place + 8] = b"\x00\x00\x00\x00\x00\x00\xf8\x7f"
    return content


def _blank(content: bytearray, draw: random.Random) -> bytearray:
    start = draw.randrange(len(content))
    stop = min(len(content), start + draw.choice((1, 16, 4096)))
    content[start:stop] = bytes([draw.choice((0, 255))]) * (stop - start)
    return content


def _copy(content: bytearray, draw: random.Random) -> bytearray:
    """Overwrite one place with another, so that the pieces are well-formed and the whole is not."""
    size = draw.choice((2, 8, 64, 512))
    source, target = draw.randrange(len(content)), draw.randrange(len(content))
    piece = content[source : source + size]
    content[target : target + len(piece)] = piece
    return content


def _nested(content: bytearray, draw: random.Random) -> bytearray:
    """A header that is nothing but brackets."""
    header = b"[" * draw.choice((10, 10_000, 200_000)) if draw.random() < 0.5 else b'{"a":' * 50_000
    return bytearray(len(header).to_bytes(8, "little") + header + bytes(content[:100]))


DAMAGES: tuple[Damage, ...] = (_cut, _flip, _flip_early, _length, _stuff, _nan, _blank, _copy, _flip_early, _nested)
