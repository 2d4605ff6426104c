"""Fresh random networks that multiply values, for an audit: gates, attention, norms, recurrent cells, quotients.

They are made by what both front ends call (`network/composed.py`), so an attack on them is one on what people trace.
"""

from collections.abc import Callable

import torch

from curvcert import activations
from curvcert.activations import Activation
from curvcert.falsifier.draws import Draw
from curvcert.network import composed
from curvcert.network.builder import Value
from curvcert.network.windows import along, reduced
from curvcert.operators import Dense

Pool = tuple[Activation, ...]
"""The activations that a network is made with."""


def gated(draw: Draw, pool: Pool, x: Value) -> Value:
    """A gate of one of the usual kinds, once or twice."""
    for _ in range(draw.pick.randint(1, 2)):
        n = draw.pick.randint(1, 3)
        value, gate = _dense(draw, x, n), _dense(draw, x, n)
        shut, kind = gate.activate(activations.SIGMOID, "gate"), draw.pick.randrange(5)
        if kind == 0:
            x = value.multiplied(_activated(draw, pool, gate), "gated")
        elif kind == 1:
            x = _activated(draw, pool, value).multiplied(gate.activate(activations.TANH, "tanh"), "bounded")
        elif kind == 2:
            x = value.plus(
                _activated(draw, pool, value).plus(value.negative(), "difference").multiplied(shut, "highway"), "sum"
            )
        elif kind == 3:
            mean = reduced(value, [0], True, True, "squeeze").activate(activations.SIGMOID, "excite")
            x = value.multiplied(mean.expanded(value.shape), "excited")
        else:
            x = composed.squared(_activated(draw, pool, value), "square").plus(gate, "sum")
    return x


def attention(draw: Draw, pool: Pool, x: Value) -> Value:
    """Attention among two or three tokens with a layer before it, or the shares of a softmax alone."""
    count, features = draw.pick.randint(2, 3), draw.pick.randint(1, 2)
    tokens = _activated(draw, pool, _dense(draw, x, count * features)).reshaped((count, features))
    q, k, v = (along(tokens, 1, draw.scaled(features, features), "map") for _ in range(3))
    scores = composed.matrix_product(q, k.permuted((1, 0)), "scores")
    shares = composed.softmax(scores, 1, "softmax")
    if draw.pick.random() < 0.3:
        return shares.reshaped((count * count,))
    return tokens.plus(composed.matrix_product(shares, v, "mixed"), "skip").reshaped((count * features,))


def normalised(draw: Draw, pool: Pool, x: Value) -> Value:
    """A layer, normalised with or without its mean, in one or two groups; now and then with a skip."""
    n, groups, eps = 2 * draw.pick.randint(1, 2), draw.pick.randint(1, 2), 10 ** draw.pick.uniform(-3, 0)
    value = _dense(draw, x, n)
    value = _activated(draw, pool, value) if draw.pick.random() < 0.5 else value
    parted = value.reshaped((groups, n // groups))
    centred = n > groups and draw.pick.random() < 0.5
    found = composed.normalised(parted, [1], eps, centred, "norm").reshaped((n,)).times(draw.normal(n))
    found = _activated(draw, pool, found) if draw.pick.random() < 0.5 else found
    return value.plus(found, "skip") if draw.pick.random() < 0.3 else found


def gated_recurrent(draw: Draw, pool: Pool, x: Value) -> Value:
    """A recurrent unit with gates, which reads the input at every step with the same weights."""
    n = draw.pick.randint(1, 3)
    reads, states = ([Dense(draw.scaled(n, size)) for _ in range(3)] for size in (x.shape[0], n))
    h = _activated(draw, pool, _dense(draw, x, n))
    for _ in range(draw.pick.randint(1, 2)):
        reset, update = (
            x.linear(reads[k]).plus(h.linear(states[k]), "gate").activate(activations.SIGMOID, "gate") for k in (0, 1)
        )
        new = x.linear(reads[2]).plus(reset.multiplied(h.linear(states[2]), "reset"), "sum")
        new = new.activate(activations.TANH, "new")
        h = new.plus(update.multiplied(h.plus(new.negative(), "difference"), "kept"), "state")
    return h


def quotients(draw: Draw, pool: Pool, x: Value) -> Value:
    """A quotient, a root, a logarithm or an exponential of layers, each inside its domain."""
    n = draw.pick.randint(2, 3)  # a softmax of one entry is a constant
    value, other = _activated(draw, pool, _dense(draw, x, n)), _dense(draw, x, n)
    size, one = composed.squared(other, "square"), torch.full((n,), draw.gain(), dtype=torch.float64)
    positive, kind = size.shift(one), draw.pick.randrange(5)
    if kind == 0:
        return composed.quotient(value, positive, "quotient")
    if kind == 1:
        return value.plus(positive.activate(activations.power(draw.pick.choice((0.5, -0.5, 1.5))), "root"), "sum")
    if kind == 2:
        return value.plus(positive.activate(activations.LOG, "log"), "sum")
    if kind == 3:
        return value.multiplied(other.activate(activations.TANH, "tanh").activate(activations.EXP, "exp"), "scaled")
    return composed.log_softmax(value.plus(other, "sum"), 0, "log-softmax")


def _dense(draw: Draw, value: Value, outputs: int) -> Value:
    return value.linear(Dense(draw.scaled(outputs, value.shape[0])), 0.3 * draw.normal(outputs), "dense")


def _activated(draw: Draw, pool: Pool, value: Value) -> Value:
    activation = draw.pick.choice(pool)
    return value.activate(activation, activation.name)


PRODUCTS: dict[str, Callable[[Draw, Pool, Value], Value]] = {
    "gated": gated,
    "attention": attention,
    "normalised": normalised,
    "gated recurrent": gated_recurrent,
    "quotients": quotients,
}
