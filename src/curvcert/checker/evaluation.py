r"""Margins and gradients at the inputs, by the checker's own forward and backward pass, with their rounding bounded.

Forward, an error travels entry by entry through |A| and as a whole through the norm of A; the smaller counts.
Backward, a computed covector is off by at most :math:`\eta` in the 2-norm: through a map by :math:`\|A\| \eta` and
rounding, through an activation by :math:`s \eta + \|\delta \circ g\|`, s the largest slope and :math:`\delta` bounding
the error of the slopes; what the readers of a value send back is added up.
"""

from dataclasses import dataclass

import numpy as np

from curvcert.checker.contraction import Contraction, contractions
from curvcert.checker.model import Activated, Affine, Input, Map, Model
from curvcert.checker.outward import (
    TINY,
    Array,
    Enclosed,
    U,
    frobenius,
    gamma,
    lengths,
    up,
)
from curvcert.checker.windows import Window


@dataclass(frozen=True, eq=False)
class Vector:
    """A computed vector, a bound on each entry's error and one on their 2-norm."""

    value: Array
    error: Array
    off: float


@dataclass(frozen=True, eq=False)
class Passed:
    """One input's way through the network: the value of every node."""

    values: tuple[Vector, ...]

    @property
    def outputs(self) -> Vector:
        """The computed logits."""
        return self.values[-1]


def forward(model: Model, x: Array) -> Passed:
    """Evaluate one input."""
    found: list[Vector] = []
    blocks = contractions(model)
    for k, node in enumerate(model.nodes):
        match node:
            case Input():
                found.append(Vector(x, np.zeros_like(x), 0.0))
            case Affine():
                found.append(_sum(node, found))
            case Activated():
                found.append(_activation(node, found[node.source]))
        if k in blocks:
            found[k] = _of_block(blocks[k], model, found)
    return Passed(tuple(found))


def _of_block(block: Contraction, model: Model, found: list[Vector]) -> Vector:
    """Bound the error of the end of a contracting block: what came in grows by its constant, what it adds by G."""
    activated = model.nodes[block.a]
    assert isinstance(activated, Activated)
    exact = [*found]
    for k in (block.x, activated.source, block.a, len(found) - 1):
        # What the node itself adds is what it is off by when what it reads is exact.
        exact[k] = Vector(found[k].value, np.zeros_like(found[k].error), 0.0)
    inner, outer = model.nodes[activated.source], model.nodes[len(found) - 1]
    assert isinstance(inner, Affine)
    assert isinstance(outer, Affine)
    z, a, end = _sum(inner, exact).off, _activation(activated, exact[activated.source]).off, _sum(outer, exact).off
    own = block.constant * found[block.x].off + block.G.norm * (activated.act.steepest * z + a) + end
    known = found[-1]
    return _vector(known.value, known.error, min(known.off, float(own * (1 + 32 * U))))


def _sum(node: Affine, found: list[Vector]) -> Vector:
    total = _image(node.terms[0].map, found[node.terms[0].source])
    for term in node.terms[1:]:
        image = _image(term.map, found[term.source])
        value = total.value + image.value
        rounding = U * np.abs(value)
        total = _vector(value, total.error + image.error + rounding, total.off + image.off + frobenius(rounding))
    if not node.offset.any() and not node.error.any():
        return total
    return _shifted(total, node.offset, node.error)


def _activation(node: Activated, z: Vector) -> Vector:
    value = node.act.value.function(z.value)
    own = node.act.value.error(value)
    steep = node.act.steepest
    return _vector(value, steep * z.error + own, steep * z.off + frobenius(own))


def _image(A: Map, x: Vector) -> Vector:
    if A is None:
        return x
    size = np.abs(x.value)
    local = gamma(A.terms + 2) * A.size_on(size) + A.error_on(size)
    local = up(local, len(x.value) + 4) + TINY
    error = local + up(A.size_on(x.error), len(x.value) + 4)
    return _vector(A.on(x.value), error, frobenius(local) + A.norm * x.off)


def _shifted(x: Vector, offset: Array, error: Array) -> Vector:
    value = x.value + offset
    local = U * np.abs(value) + error
    return _vector(value, x.error + local, x.off + frobenius(local))


def _vector(value: Array, error: Array, off: float) -> Vector:
    error, off = up(error, 8), float(off * (1 + 32 * U))
    off = min(off, frobenius(error))
    return Vector(value, np.minimum(error, off), off)


def margins(outputs: Vector, label: int, deviations: Array) -> Array:
    """Return lower bounds on f_label - f_i, infinity for the label itself."""
    gap = outputs.value[label] - outputs.value
    lost = outputs.error[label] + outputs.error + deviations + 2 * U * np.abs(gap)
    found: Array = gap - up(lost, 8)
    found[label] = np.inf
    return found


@dataclass(frozen=True, eq=False)
class Backed:
    """The computed gradients of f_i - f_label with respect to the value of every node, one row for each class.

    `drift[k]` bounds their error in the 2-norm, one number for each row.
    """

    gradients: tuple[Array, ...]
    drift: tuple[Array, ...]


def backward(model: Model, passed: Passed, rows: Array) -> Backed:
    """Carry the covectors `rows` back from the outputs."""
    count = len(model.nodes)
    g: list[Array | None] = [None] * count
    eta: list[Array] = [np.zeros(len(rows)) for _ in model.nodes]
    g[-1] = rows

    def send(source: int, arriving: Array, off: Array) -> None:
        known = g[source]
        total = arriving if known is None else known + arriving
        rounding = 0.0 if known is None else 2 * U * lengths(total, 2, 1)
        g[source], eta[source] = total, up(eta[source] + off + rounding, 8)

    for k in range(count - 1, 0, -1):
        node, here, off = model.nodes[k], g[k], eta[k]
        assert here is not None
        if isinstance(node, Affine):
            for term in node.terms:
                A = term.map
                if A is None:
                    send(term.source, here, off)
                else:
                    send(term.source, A.pulled(here), up(A.norm * off + _rounding(here, A), 8))
        elif isinstance(node, Activated):
            z = passed.values[node.source]
            slopes = node.act.first.function(z.value)
            gap = up(node.act.c * z.error + node.act.first.error(slopes))
            steep = node.act.steepest * (1 + 1e-9)
            spread = lengths(gap * here, 2, 1) + steep * off + 2 * U * steep * lengths(here, 2, 1)
            send(node.source, slopes * here, up(spread, 8))
    return Backed(tuple(one for one in g if one is not None), tuple(eta))


def _rounding(g: Array, A: Enclosed | Window) -> Array:
    size = gamma(A.terms + 2) * A.absolute + A.off
    return up(size * lengths(g, 2, 1), 8)


def gradient_norms(backed: Backed, dual: float) -> Array:
    """Bound the dual norms of the gradients; the drift's 2-norm is turned into the dual norm."""
    inputs = backed.gradients[0]
    spread = np.sqrt(inputs.shape[1]) * (1 + 1e-12) if dual == 1 else 1.0
    return up(lengths(inputs, dual, 1) + spread * backed.drift[0], 8)
