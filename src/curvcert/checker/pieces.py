"""A network as blocks that each read one or several earlier values: what its bounds are written in."""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from curvcert.checker.activations import Activation
from curvcert.checker.model import pair_rows
from curvcert.checker.outward import Enclosed, Factor, columns_of, product, times


@dataclass(frozen=True, eq=False)
class Piece:
    """One block on flat vectors: H x + G phi(W x + b) + c, or H x + c where `act` is None.

    `None` stands for H = 0 and for G = I.  x holds the values that it reads, stacked: `sources` are their numbers, each
    once, and `sizes` their lengths.  `z`, `a` and `output` are the numbers of the nodes whose values are the
    pre-activation, the activation and the output.
    """

    sizes: tuple[int, ...]
    outputs: int
    H: Enclosed | None
    output: int
    G: Factor = None
    W: Enclosed | None = None
    act: Activation | None = None
    z: int = 0
    a: int = 0
    sources: tuple[int, ...] = ()

    @property
    def inputs(self) -> int:
        """How many numbers it reads."""
        return sum(self.sizes)

    def split(self, A: Enclosed) -> list[Enclosed]:
        """Return the part of a map of x that belongs to each value."""
        if len(self.sizes) == 1:
            return [A]
        ends = list(accumulate(self.sizes))
        return [columns_of(A, end - size, end) for end, size in zip(ends, self.sizes, strict=True)]


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of a network in an order in which each reads earlier ones, and its number of outputs.

    In a chain each reads the one before it, and no other.
    """

    pieces: tuple[Piece, ...]
    classes: int
    is_chain: bool

    @property
    def last(self) -> Piece:
        """The block with the outputs."""
        return self.pieces[-1]

    @cached_property
    def levels(self) -> list[tuple[int, ...]]:
        """The blocks with an activation, by their numbers: those of equal depth together, the shallowest first."""
        return [tuple(k for k in level if self.pieces[k].act is not None) for level in self._by_depth[1:]]

    @cached_property
    def order(self) -> list[list[int]]:
        """All blocks by depth, those without an activation before the first level included."""
        return self._by_depth

    @cached_property
    def _by_depth(self) -> list[list[int]]:
        depth = {0: 0}
        for piece in self.pieces:
            below = max(depth[source] for source in piece.sources)
            depth[piece.output] = below + (piece.act is not None)
        found: list[list[int]] = [[] for _ in range(max(depth.values()) + 1)]
        for k, piece in enumerate(self.pieces):
            found[depth[piece.output]].append(k)
        return found


def linked(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Return the blocks of a chain, each with the number of the value that it reads."""
    before = (0, *(piece.output for piece in pieces))
    return tuple(replace(piece, sources=(source,)) for piece, source in zip(pieces, before, strict=False))


def read_outs(blocks: Blocks, label: int | None) -> tuple[Enclosed, Enclosed, Enclosed | None]:
    """Return the rows of the pairs (see `pair_rows`), and them behind the last block's G and H."""
    rows, piece = Enclosed(pair_rows(blocks.classes, label)), blocks.last
    inner = rows if piece.act is None else times(rows, piece.G)
    assert inner is not None
    return rows, inner, None if piece.H is None else product(rows, piece.H)


def identity(size: int) -> Enclosed:
    """Return the identity as a matrix."""
    return Enclosed(np.eye(size))
