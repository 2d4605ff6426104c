"""Networks at which an audit aims: each makes some claims that are nearly attained, so that a wrong term shows.

Most are tiny.  On a line of one dimension an ascent cannot miss, and the terms of a bound that count there are those
that a fault would change; neurons in parallel, convolutions, skips and shared values come on top, each where a rule of
its own applies.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from curvcert.activations import ACTIVATIONS, SIN, TANH, Activation, leaky_relu
from curvcert.falsifier.audited import Audit
from curvcert.falsifier.bound_search import BoundKind
from curvcert.falsifier.random_networks import SMOOTH
from curvcert.falsifier.session import Asked, Session
from curvcert.network import MaxPool, Network, composed
from curvcert.network.builder import Value, concat, start
from curvcert.network.rewriting.fusion import fused
from curvcert.operators import Conv2d, Dense, Diagonal

INFINITY = math.inf
Rows = Sequence[Sequence[float]]
Layers = Sequence[tuple[Rows, Sequence[float]]]
"""Weights and offsets, one layer after another."""


def _asked(*norms: tuple[float, float], pair: bool = False) -> tuple[Asked, ...]:
    """Return questions for both kinds of bounds, in each pair of norms."""
    kinds: tuple[BoundKind, ...] = ("lipschitz", "curvature")
    return tuple(Asked(kind, p, q, "all" if pair else None) for kind in kinds for p, q in norms)


L2 = _asked((2, 2))
PAIRS = _asked((2, 2), pair=True)
USUAL = _asked((2, 2), (1, 1), (INFINITY, INFINITY))
MIXED = _asked((3, 3), (1.5, 1.5), (1, 2), (2, INFINITY), (INFINITY, 2), (2, 2))
FALLING = (Asked("lipschitz", logit=1), Asked("curvature", logit=1))
STEEP = tuple(asked for asked in USUAL if asked.kind == "lipschitz")


@dataclass(frozen=True, eq=False)
class Aim:
    """A network, and what is asked about it.

    Attributes:
        name: what it is there for.
        network: makes it.
        x: the samples that are certified; the first of them, evenly spread, are anchors and centres of balls.
        bounds: what is asked of `lipschitz` and `curvature`.
        norms: in which `certify` is asked.
        radii: of the balls, each about every anchor.
        anchors: how many; without any, bounds are asked globally only.
    """

    name: str
    network: Callable[[], Network]
    x: Tensor
    bounds: tuple[Asked, ...] = ()
    norms: tuple[float, ...] = ()
    radii: tuple[float, ...] = (0.1, 0.7)
    anchors: int = 5

    def attacks(self, session: Session) -> Iterator[Audit]:
        """Ask, and attack every answer."""
        anchors = self.x[:: -(-len(self.x) // self.anchors)] if self.anchors else self.x[:0]
        x = anchors.repeat(len(self.radii), *(1,) * (anchors.dim() - 1))
        r = torch.tensor(self.radii, dtype=torch.float64).repeat_interleave(len(anchors))
        for asked in self.bounds:
            if asked.kind == "lipschitz" or session.smooth:
                yield from session.bounds(asked, x, r)
        if not self.norms:
            return
        # One label is another class: what is misclassified has no radius.
        labels = session.network(self.x).flatten(1).argmax(dim=1)
        labels[-1] = (labels[-1] + 1) % session.network.outputs
        for p in self.norms:
            for method in session.applicable(p, dear=False) + session.applicable(p, dear=True):
                yield from session.certificate(method, p, self.x, labels)


def _tensor(rows: Sequence[float] | Rows) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def _line(points: int = 33, reach: float = 3.0) -> Tensor:
    """Return points along a line of one dimension."""
    return torch.linspace(-reach, reach, points, dtype=torch.float64)[:, None]


def _cloud(*shape: int, reach: float = 1.5) -> Tensor:
    """Return points of a space of several dimensions, the first 0."""
    noise = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))
    noise[0] = 0.0
    return reach * noise


def _input(*shape: int) -> Value:
    return start(shape, torch.device("cpu"))


def _made(value: Value) -> Network:
    return Network(fused(value.builder.nodes, value.number))


def _dense(value: Value, rows: Rows, offset: Sequence[float] | None = None) -> Value:
    return value.linear(Dense(_tensor(rows)), None if offset is None else _tensor(offset), "dense")


def _layer(value: Value, rows: Rows, activation: Activation, offset: Sequence[float] | None = None) -> Value:
    return _dense(value, rows, offset).activate(activation, activation.name)


def _chain(layers: Layers, activation: Activation, last: Rows | None = None) -> Network:
    """Return layers of weights and offsets, and a last linear map."""
    value = _input(len(layers[0][0][0]))
    for rows, offset in layers:
        value = _layer(value, rows, activation, offset)
    return _made(value if last is None else _dense(value, last))


def _classes(layers: Layers, activation: Activation, level: float) -> Network:
    """Return two classes, told apart by whether the first value of a chain is above a level."""
    value = _input(len(layers[0][0][0]))
    for rows, offset in layers:
        value = _layer(value, rows, activation, offset)
    width = value.shape[0] - 1
    return _made(_dense(value, [[0.5] + [0.0] * width, [-0.5] + [0.0] * width], [-level / 2, level / 2]))


def _scalar(*layers: tuple[float, float]) -> Layers:
    """Return layers of one neuron each, of a weight and an offset."""
    return [([[w]], [b]) for w, b in layers]


def _image(conv: Conv2d) -> Network:
    return _made(_input(*conv.in_shape).linear(conv, name="conv"))


def _kernel(*taps: float, outputs: int = 1, along: int = 0) -> Tensor:
    """Return a kernel with these taps along an axis, for one channel."""
    shape = (1, len(taps), 1) if along == 0 else (1, 1, len(taps))
    return _tensor(taps).reshape(shape).expand(outputs, *shape).contiguous()


def _neurons() -> Iterator[Aim]:
    """Neurons side by side, in several norms: they bend together, or against each other."""
    equal = [([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]], [0.0] * 3)]
    steep = [([[3.0, 0.0], [0.0, 0.5]], [0.3, 0.0])]
    against = [([[1.0, 0.5], [1.0, -0.5]], [0.6584789484624084, -0.6584789484624084])]
    deep = [([[1.0, 0.5], [-0.5, 2.0]], [0.3, -0.2]), ([[1.5, -0.5], [0.5, 1.0]], [0.1, 0.4])]
    yield Aim("equal neurons", partial(_chain, equal, TANH, [[1.0, 1.0, 1.0]]), _cloud(6, 2), USUAL)
    yield Aim("a steep and a flat neuron", partial(_chain, steep, TANH, [[0.2, 1.0]]), _cloud(6, 2), USUAL)
    for name, layers in {"neurons that bend against each other": against, "two layers of two neurons": deep}.items():
        last = [[1.0, -1.0], [-1.0, 0.5], [0.3, 0.3]]
        yield Aim(name, partial(_chain, layers, TANH, last), _cloud(17, 2), PAIRS, (2.0,))
    yield Aim("falling slopes", partial(_chain, _scalar((1.0, 0.1)), leaky_relu(-3.0)), _line(5), L2)


def _across(rows: Rows, last: Sequence[float]) -> Network:
    """Return two classes told apart by -0.2 + 0.1 x + what -cos of the first neurons adds, which is flat at 0."""
    x = _input(2)
    z = _layer(x, [*rows, [0.05, 0.0]], SIN, [-math.pi / 2] * len(rows) + [0.0])
    ends = [*last, 0.1 / 0.05]
    return _made(_dense(z, [[0.5 * end for end in ends], [-0.5 * end for end in ends]], [-0.1 + 0.5 * sum(last), 0.1]))


def _turning() -> Iterator[Aim]:
    """Flat gradients along one axis, and all that bends across it: what a line certificate pays for."""
    near = 0.05 * _cloud(5, 2)
    yield Aim("a saddle across the line", partial(_across, [[1.0, 1.0], [1.0, -1.0]], [0.5, -0.5]), near, (), (2.0,))
    yield Aim("a valley across the line", partial(_across, [[0.0, 1.0]], [1.0]), near, (), (2.0,))


def _residual(weights: Sequence[float], steps: Sequence[float]) -> Network:
    """Return x - W' D tanh(W x), of one neuron or of several that do not meet."""
    x = _input(len(weights))
    W, D = Dense(torch.diag(_tensor(weights))), Diagonal(_tensor(steps), (len(steps),))
    return _made(x.plus(x.linear(W).activate(TANH, "tanh").linear(-1.0 * (W.T @ D)), "skip"))


def _several_activations() -> Value:
    x = _input(1)
    return x.activate(TANH, "tanh").plus(x.activate(SIN, "sin"), "sum")


def _parts(pieces: int) -> Value:
    """Return a layer that is written as several nodes, whose pre-activations move together."""
    x = _input(2)
    return concat([_layer(x, [[1.0, 1.0]], TANH) for _ in range(pieces)], 0, "joined")


def _skips() -> Value:
    """Return classes behind a value that is read three times."""
    x = _input(2)
    z = _layer(x, [[1.0, 0.5], [0.5, -1.0]], TANH)
    inner = x.plus(_dense(z, [[1.0, 0.0], [0.3, 1.0]]), "inner")
    outer = inner.plus(_dense(_layer(inner, [[0.7, 0.2], [0.0, 1.0]], TANH), [[0.5, 0.0], [0.0, 0.5]]), "outer")
    return _dense(concat([outer, z], 0, "joined"), [[1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 0.0, -0.5], [0.2, 0.2, 0.0, 0.0]])


def _squares(factors: Sequence[float]) -> Value:
    """Factors times one tanh, squared: each square is as steep as its own factor can be."""
    return composed.squared(_dense(_layer(_input(1), [[1.0]], TANH), [[factor] for factor in factors]), "squares")


def _graphs() -> Iterator[Aim]:
    """Skips, values that are read several times, layers in several parts, and pooling whose windows overlap."""
    yield Aim("a skip that stretches", partial(_residual, [2.0], [0.75]), _line(9), L2)
    yield Aim("a skip that contracts", partial(_residual, [3.0, 1.0, 0.5], [0.1, 1.5, 4.0]), _cloud(6, 3), L2)
    yield Aim("a skip that adds", partial(_residual, [1.0], [-1.0]), _line(9), L2)
    yield Aim("two activations of a value", lambda: _made(_several_activations()), _line(9), L2)
    yield Aim("a layer in parts", lambda: _made(_parts(3)), _cloud(6, 2), USUAL)
    yield Aim("a sum of parts", lambda: _made(_dense(_parts(3), [[1.0, 1.0, 1.0]])), _cloud(6, 2), USUAL)
    yield Aim("skips around skips", lambda: _made(_skips()), _cloud(17, 2), PAIRS, (2.0,))
    yield Aim("squares of a small and a large factor", lambda: _made(_squares([0.1, 3.0])), _line(9), L2, anchors=0)
    pool = MaxPool((1, 3, 1), (2, 1), (1, 1), name="max-pooling")
    yield Aim("windows that overlap", lambda: _made(_input(1, 3, 1).max_pool(pool)), _cloud(6, 1, 3, 1), STEEP)


def _activations() -> Iterator[Aim]:
    """Every activation alone: on a neuron all constants are exact."""
    for activation in (*SMOOTH, *(a for a in ACTIVATIONS.values() if a.curvature is None)):
        network = partial(_chain, _scalar((1.5, 0.2)), activation)
        yield Aim(f"a neuron, {activation.name}", network, _line(reach=4.0), L2, radii=(0.4, 2.0))


def _lines() -> Iterator[Aim]:
    """Classes on a line: what a radius loses there, it loses to the terms of its method."""
    sigmoid, silu = ACTIVATIONS["sigmoid"], ACTIVATIONS["silu"]
    cases = (
        ("one neuron", _scalar((1.0, 0.0)), TANH, 0.3),
        ("one neuron", _scalar((1.0, 0.0)), SIN, 0.3),
        ("a steep neuron", _scalar((3.0, 0.4)), sigmoid, 0.6),
        ("two layers", _scalar((2.0, 0.3), (1.0, -0.2)), TANH, 0.3),
        ("two layers", _scalar((1.0, 0.3), (2.0, -0.2)), silu, 0.3),
        ("three layers", _scalar((1.2, 0.0), (1.5, 0.4), (1.5, -0.3)), TANH, 0.3),
    )
    for name, layers, activation, level in cases:
        network = partial(_classes, layers, activation, level)
        yield Aim(f"{name}, {activation.name}", network, _line(17), L2 + FALLING, (2.0,))
    valley = partial(_classes, _scalar((1.0, 0.0)), SIN, -0.98)
    yield Aim("a valley", valley, _tensor([[-1.5707963267948966], [-1.4], [-1.7]]), L2, (2.0,))


def _norms() -> Iterator[Aim]:
    """Linear networks, whose constants are norms of matrices, asked in many norms one after another."""
    wide = [[1.0, 2.0, -1.0, 0.5], [0.0, 1.0, 3.0, -2.0], [2.0, 0.0, 1.0, 1.0]]
    yield Aim("a matrix", lambda: _made(_dense(_input(4), wide)), _cloud(8, 4), MIXED, (1.0, 2.0, INFINITY, 3.0))
    ones = [([[1.0] * 3] * 4, [0.0] * 4), ([[0.5] * 4] * 2, [0.0] * 2)]
    yield Aim("aligned layers", partial(_chain, ones, TANH), _cloud(8, 3, reach=0.2), USUAL + MIXED)
    turn = torch.linalg.qr(_cloud(4, 4)[1:].T).Q.T
    rows = [*turn.tolist(), [0.0] * 4]
    yield Aim("a turn", lambda: _made(_dense(_input(4), rows)), _cloud(8, 4), MIXED)


def _convolutions() -> Iterator[Aim]:
    """Convolutions: their norms by matrices, by kernels, and on a torus, for images beyond explicit matrices."""
    pad = ((1, 1), (0, 0))
    convs = {
        "alternating taps on a torus": Conv2d(_kernel(1.0, -1.0), (1, 4, 1026), padding_mode="circular"),
        "taps in the padding": Conv2d(_kernel(1.0, 0.0, -1.0), (1, 2, 2050), padding=pad),
        "a stride on a torus": Conv2d(_kernel(1.0, 1.0, 1.0), (1, 6, 1730), stride=(2, 2), padding=pad),
        "windows that share a pixel": Conv2d(_kernel(1.0, 1.0), (1, 4, 2)),
        "groups": Conv2d(_tensor([1.0, 3.0]).reshape(2, 1, 1, 1), (2, 2, 2), groups=2),
    }
    for name, conv in convs.items():
        yield Aim(name, partial(_image, conv), _cloud(1, *conv.in_shape), STEEP[:1], anchors=0)


AIMS: tuple[Aim, ...] = (*_neurons(), *_turning(), *_graphs(), *_norms(), *_lines(), *_activations(), *_convolutions())
"""The aimed networks, in the order in which an audit meets them."""
