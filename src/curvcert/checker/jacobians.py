r"""The Jacobians at one input of every value that a block reads or gives, with bounds on how far they are off.

With a computed Jacobian X of what a block reads, off by at most e in the spectral norm, and slopes s in [a, b],

.. math:: J = W X, \qquad X' = H X + G \mathrm{diag}(s) J,

and every product adds :math:`\gamma \| |A| \| \|X\|_F`.  What was computed needs no error analysis of its own.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from curvcert.checker.evaluation import Passed, Vector
from curvcert.checker.facts import Facts
from curvcert.checker.growth import stacked_size
from curvcert.checker.outward import Array, Enclosed, U, frobenius, gamma, raised, spectral_norm, up
from curvcert.checker.pieces import Piece


@dataclass(frozen=True, eq=False)
class Jacobian:
    """A computed Jacobian, and a bound on its distance from the true one in the spectral norm."""

    X: Array
    off: float

    @cached_property
    def norm(self) -> float:
        """A bound on the true one's norm."""
        return raised(spectral_norm(Enclosed(self.X)) + self.off)


@dataclass(frozen=True, eq=False)
class Jacobians:
    """Those of what every block reads, stacked, of its pre-activation (None where it has none), and of its output."""

    read: list[Jacobian]
    z: list[Jacobian | None]
    given: list[Jacobian]


def jacobians_at(facts: Facts, passed: Passed) -> Jacobians:
    """Push the Jacobian of the input through the blocks."""
    values = {0: Jacobian(np.eye(facts.model.nodes[0].size), 0.0)}
    found = Jacobians([], [], [])
    for k, (piece, z) in enumerate(zip(facts.blocks.pieces, facts.neurons(passed), strict=True)):
        read = _stacked([values[source] for source in piece.sources])
        pushed, given = _through(facts, k, piece, z, read)
        values[piece.output] = given
        found.read.append(read)
        found.z.append(pushed)
        found.given.append(given)
    return found


def _stacked(parts: list[Jacobian]) -> Jacobian:
    if len(parts) == 1:
        return parts[0]
    return Jacobian(np.concatenate([part.X for part in parts]), stacked_size([part.off for part in parts], 2))


def _through(facts: Facts, k: int, piece: Piece, z: Vector | None, read: Jacobian) -> tuple[Jacobian | None, Jacobian]:
    part, width = facts.parts[k], frobenius(read.X)
    result, lost = np.zeros((piece.outputs, read.X.shape[1])), 0.0
    pushed: Jacobian | None = None
    if z is not None and piece.W is not None and piece.act is not None:
        rounding = (gamma(piece.W.terms + 2) * piece.W.absolute + piece.W.off) * width
        pushed = Jacobian(piece.W.value @ read.X, raised(part.W * read.off + rounding, 8))
        low, high = slopes_at(piece, z)
        slopes = 0.5 * (low + high)
        result = slopes[:, None] * pushed.X
        gap = float(up(0.5 * (high - low) + U).max())
        lost = piece.act.steepest * pushed.off + gap * frobenius(pushed.X) + U * frobenius(result)
        if piece.G is not None:
            rounding = (gamma(piece.G.terms + 2) * piece.G.absolute + piece.G.off) * frobenius(result)
            result, lost = piece.G.value @ result, part.G * lost + rounding
    if piece.H is not None:
        result = result + piece.H.value @ read.X
        lost += part.H * read.off + (gamma(piece.H.terms + 2) * piece.H.absolute + piece.H.off) * width
        lost += U * frobenius(result)
    return pushed, Jacobian(result, raised(lost, 16))


def slopes_at(piece: Piece, z: Vector) -> tuple[Array, Array]:
    """Enclose the slopes of a block's neurons at one input."""
    assert piece.act is not None
    return piece.act.first.over(z.value - z.error * (1 + 4 * U), z.value + z.error * (1 + 4 * U))
