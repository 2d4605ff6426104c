r"""Residual blocks that contract: :math:`x + G\Phi(Wx + b)` with G near -W' D, in networks of large images."""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from curvcert.checker.chain import diagonal_between
from curvcert.checker.model import Activated, Affine, Model
from curvcert.checker.outward import Array, Enclosed, U, frobenius, plus, raised, up
from curvcert.checker.wide import columns_scaled, rows_scaled, transposed
from curvcert.checker.windows import Window


@dataclass(frozen=True, eq=False)
class Contraction:
    r"""A block :math:`x + G\Phi(Wx + b)`, slopes in [0, beta], G near -W' D: its own constant.

    With :math:`\rho = \|D^{1/2} W\|^2` that is :math:`\sqrt{1 + (\rho - 2/\beta)_+ \beta^2 \rho}`; what G differs
    from -W' D by comes on top.
    """

    x: int
    a: int
    W: Enclosed | Window
    G: Enclosed | Window
    d: Array
    constant: float


@lru_cache(maxsize=2)
def contractions(model: Model) -> dict[int, Contraction]:
    """Return the blocks of a network with kernels, by the values in which they end; none of one with matrices."""
    if not model.wide:
        return {}
    return {k: block for k in range(len(model.nodes)) if (block := _block_at(model, k)) is not None}


def _block_at(model: Model, k: int) -> Contraction | None:
    node = model.nodes[k]
    if not isinstance(node, Affine) or len(node.terms) != 2:
        return None
    skips = [term.source for term in node.terms if term.map is None]
    branch = [term for term in node.terms if term.map is not None]
    if len(skips) != 1:
        return None
    (x,), a, G = skips, branch[0].source, branch[0].map
    activated = model.nodes[a]
    z = model.nodes[activated.source] if isinstance(activated, Activated) else None
    if not isinstance(activated, Activated) or not isinstance(z, Affine) or activated.act.slope[0] < 0:
        return None
    if len(z.terms) != 1 or z.terms[0].source != x or z.terms[0].map is None or G is None:
        return None
    W, beta = z.terms[0].map, activated.act.slope[1]
    d = _diagonal(W, G)
    if d is None:
        return None
    off = raised(_difference(G, columns_scaled(transposed(W), -d)) * beta * W.norm, 8)
    rho = raised(rows_scaled(W, up(np.sqrt(d))).norm ** 2, 8)
    excess = max(0.0, rho - 2 / beta * (1 - 8 * U))
    return Contraction(x, a, W, G, d, raised(math.sqrt(1 + excess * beta * beta * rho) + off, 8))


def _diagonal(W: Enclosed | Window, G: Enclosed | Window) -> Array | None:
    """Return the d >= 0, one for each channel or row, that brings G nearest to -W' D, where it is near that at all."""
    if isinstance(W, Enclosed) and isinstance(G, Enclosed):
        return diagonal_between(None, G, W)
    if not isinstance(W, Window) or not isinstance(G, Window) or W.stencil.stride != (1, 1):
        return None
    back = transposed(W)
    assert isinstance(back, Window)
    if back.stencil.first != G.stencil.first or back.stencil.kernel.shape != G.stencil.kernel.shape:
        return None
    if (back.source, back.target) != (G.source, G.target):
        return None
    M = back.stencil.kernel
    squares = (M * M).sum(axis=(0, 2, 3))
    d = np.where(squares > 0, -(G.stencil.kernel * M).sum(axis=(0, 2, 3)) / np.where(squares > 0, squares, 1.0), 0.0)
    d = np.maximum(d, 0.0)
    rest = np.abs(G.stencil.kernel + M * d[None, :, None, None]).max()
    return d if rest <= 1e-9 * float(np.abs(G.stencil.kernel).max()) else None


def _difference(one: Enclosed | Window, other: Enclosed | Window) -> float:
    """Bound the 2-norm of the difference of two maps."""
    if isinstance(one, Enclosed) and isinstance(other, Enclosed):
        gap = plus(one, Enclosed(-other.value, other.error))
        return raised(frobenius(gap.value) + gap.off, 8)
    assert isinstance(one, Window)
    assert isinstance(other, Window)
    return Window(one.stencil.plus(other.stencil.times(-1.0)), one.source, one.target).absolute
