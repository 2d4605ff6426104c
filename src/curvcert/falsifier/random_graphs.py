"""Fresh random graphs that are no chains, of the kinds that people build, for an audit."""

import math
from collections.abc import Callable

import torch

from curvcert.falsifier.draws import Draw
from curvcert.falsifier.random_products import PRODUCTS, Pool
from curvcert.network import MaxPool
from curvcert.network.builder import Value, concat, start
from curvcert.network.network import Network
from curvcert.network.rewriting.fusion import fused
from curvcert.nn.sll import contracting_diagonal
from curvcert.operators import AveragePool2d, Conv2d, Dense, Diagonal


def random_graph(draw: Draw, pool: Pool, family: str) -> Network:
    """Return a fresh network of one of `GRAPHS`: with a last linear map, but now and then without.

    >>> from curvcert.activations import TANH
    >>> random_graph(Draw.of(0, 0), (TANH,), "runge-kutta").is_chain
    False
    """
    first = _image(draw) if family == "images" else (draw.pick.randint(2, 4),)
    value = GRAPHS[family](draw, pool, start(first, torch.device("cpu")))
    if len(value.shape) > 1 or draw.pick.random() < 0.75:
        value = _dense(draw, value.reshaped((math.prod(value.shape),)), draw.pick.choice((1, 2, 3, 3, 4)))
    return Network(fused(value.builder.nodes, value.number))


def _dense(draw: Draw, value: Value, outputs: int) -> Value:
    weight = draw.scaled(outputs, value.shape[0])
    return value.linear(Dense(weight), 0.3 * draw.normal(outputs), "dense")


def _layer(draw: Draw, pool: Pool, value: Value, outputs: int | None = None) -> Value:
    outputs = draw.pick.randint(1, 4) if outputs is None else outputs
    return _activated(draw, pool, _dense(draw, value, outputs))


def _activated(draw: Draw, pool: Pool, value: Value) -> Value:
    activation = draw.pick.choice(pool)
    return value.activate(activation, activation.name)


def _branch(draw: Draw, pool: Pool, value: Value) -> Value:
    """Return up to two layers, then a linear map back to the shape of the value."""
    inner = value
    for _ in range(draw.pick.randint(1, 2)):
        inner = _layer(draw, pool, inner)
    return _dense(draw, inner, value.shape[0])


def _nested(draw: Draw, pool: Pool, x: Value) -> Value:
    """x + f(x + g(x)), once or twice."""
    for _ in range(draw.pick.randint(1, 2)):
        inner = x.plus(_branch(draw, pool, x), "inner")
        x = x.plus(_branch(draw, pool, _layer(draw, pool, inner, x.shape[0])), "outer")
    return x


def _densely_joined(draw: Draw, pool: Pool, x: Value) -> Value:
    """Every layer reads all that came before it, and each is cut out of a wider one."""
    for _ in range(draw.pick.randint(2, 4)):
        new = _activated(draw, pool, _layer(draw, pool, x, 4)).cut(0, draw.pick.randint(0, 1), 2)
        x = concat([x, new], 0, "joined")
    return x


def _u_shaped(draw: Draw, pool: Pool, x: Value) -> Value:
    """Down and up again, with a long skip at each size."""
    first = _layer(draw, pool, x, 4)
    second = _layer(draw, pool, first, 3)
    bottom = _layer(draw, pool, _layer(draw, pool, second), 3)
    up = _layer(draw, pool, concat([bottom, second], 0, "joined"), 4)
    return concat([up, first], 0, "joined")


def _input_convex(draw: Draw, pool: Pool, x: Value) -> Value:
    """Every layer reads the input too, and weights between layers are not negative."""
    z = _layer(draw, pool, x)
    for _ in range(draw.pick.randint(1, 3)):
        outputs = draw.pick.randint(1, 4)
        inner = z.linear(Dense(draw.scaled(outputs, z.shape[0]).abs()), name="inner")
        z = _activated(draw, pool, inner.plus(_dense(draw, x, outputs), "passthrough"))
    return z


def _runge_kutta(draw: Draw, pool: Pool, x: Value) -> Value:
    """One or two steps with one vector field, whose weights are used in every stage."""
    n, hidden, h = x.shape[0], draw.pick.randint(1, 4), draw.pick.uniform(0.1, 1.0)
    W, V, b = Dense(draw.scaled(hidden, n)), Dense(draw.scaled(n, hidden)), 0.3 * draw.normal(hidden)
    activation = draw.pick.choice(pool)

    def moved(value: Value, step: float, slope: Value) -> Value:
        return value.plus(slope.times(torch.tensor(step)), "stage")

    for _ in range(draw.pick.randint(1, 2)):
        slopes: list[Value] = []
        for step in (0.0, h / 2, h / 2, h):
            at = moved(x, step, slopes[-1]) if slopes else x
            slopes.append(at.linear(W, b).activate(activation, "field").linear(V))
        for weight, slope in zip((h / 6, h / 3, h / 3, h / 6), slopes, strict=True):
            x = moved(x, weight, slope)
    return x


def _ensemble(draw: Draw, pool: Pool, x: Value) -> Value:
    """Networks on views of one input, added up; a member may be there twice, with the same weights."""
    outputs, first = draw.pick.randint(1, 3), Dense(draw.scaled(4, x.shape[0]))
    views = [x, x.flipped((0,)), x.times(draw.normal(x.shape[0]))][: draw.pick.randint(2, 3)]
    members = [_dense(draw, _activated(draw, pool, view.linear(first)), outputs) for view in views]
    total = members[0]
    for member in members[1:]:
        total = total.plus(member, "ensemble")
    return total


def _recurrent(draw: Draw, pool: Pool, x: Value) -> Value:
    """A state that reads the input again at every step, with the same weights."""
    n = draw.pick.randint(1, 4)
    W, U, b = Dense(draw.scaled(n, n)), Dense(draw.scaled(n, x.shape[0])), 0.3 * draw.normal(n)
    activation = draw.pick.choice(pool)
    state = x.linear(U, b).activate(activation, "step")
    for _ in range(draw.pick.randint(1, 3)):
        state = state.linear(W).plus(x.linear(U, b), "sum").activate(activation, "step")
    return state


def _coupled(draw: Draw, pool: Pool, x: Value) -> Value:
    """Two parts that cross over: each is changed by what the other becomes, then joined again."""
    for _ in range(draw.pick.randint(1, 2)):
        half = x.shape[0] // 2
        left, right = x.cut(0, 0, half), x.cut(0, half, x.shape[0] - half)
        left = left.plus(_dense(draw, _layer(draw, pool, right), left.shape[0]), "left")
        right = right.plus(_dense(draw, _layer(draw, pool, left), right.shape[0]), "right")
        x = concat([right, left], 0, "joined")
    return x


def _contracting(draw: Draw, pool: Pool, x: Value) -> Value:
    """A block x - W' D phi(W x + b), which is 1-Lipschitz in l2 for slopes in [0, 1], under a long skip."""
    first = _layer(draw, pool, x, x.shape[0]) if draw.pick.random() < 0.5 else x
    W = Dense(draw.scaled(draw.pick.randint(1, 4), x.shape[0]))
    D = Diagonal(contracting_diagonal(W.weight @ W.weight.T, 0.3 * draw.normal(W.out_size)), W.out_shape)
    inner = _activated(draw, pool, first.linear(W, draw.normal(W.out_size)))
    block = first.plus(inner.linear(-1.0 * (W.T @ D)), "contraction")
    return x.plus(_layer(draw, pool, block, x.shape[0]), "skip")


def _tangled(draw: Draw, pool: Pool, x: Value) -> Value:
    """Every value reads two random earlier ones; some are activations, and all end in the output."""
    values = [x]
    for _ in range(draw.pick.randint(3, 7)):
        one, other = (draw.pick.choice(values) for _ in range(2))
        total = _dense(draw, one, 3).plus(_dense(draw, other, 3), "sum")
        values.append(_activated(draw, pool, total) if draw.pick.random() < 0.6 else total)
    total = _dense(draw, x, 3)
    for value in values[1:]:
        total = total.plus(_dense(draw, value, 3), "output")
    return total


def _images(draw: Draw, pool: Pool, x: Value) -> Value:
    """A residual block of two convolutions, then channels joined with their mirror images, and pooled."""
    channels = x.shape[0]

    def conv(value: Value, outputs: int) -> Value:
        weight = draw.scaled(outputs, value.shape[0], 3, 3)
        return value.linear(Conv2d(weight, value.shape, (1, 1), ((1, 1), (1, 1))), name="conv")

    branch = conv(_activated(draw, pool, conv(x, draw.pick.randint(1, 2))), channels)
    skip = _activated(draw, pool, x.plus(_activated(draw, pool, branch), "skip"))
    joined = concat([skip, x.flipped((2,))], 0, "joined")
    window = ((2, 2), (1, 1))
    if draw.pick.random() < 0.3:
        return joined.max_pool(MaxPool(joined.shape, *window, name="max-pooling"))
    return joined.linear(AveragePool2d(joined.shape, *window), name="pooling")


def _image(draw: Draw) -> tuple[int, ...]:
    return draw.pick.choice((1, 2)), draw.pick.randint(2, 3), draw.pick.randint(2, 3)


GRAPHS: dict[str, Callable[[Draw, Pool, Value], Value]] = {
    "nested residual": _nested,
    "densely joined": _densely_joined,
    "u-shaped": _u_shaped,
    "input-convex": _input_convex,
    "runge-kutta": _runge_kutta,
    "ensemble": _ensemble,
    "recurrent": _recurrent,
    "coupled": _coupled,
    "contracting graph": _contracting,
    "tangled": _tangled,
    "images": _images,
    **PRODUCTS,
}
