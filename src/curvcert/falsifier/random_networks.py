"""Fresh random networks for an audit: small, of every kind of block and graph, with every activation of the table.

Besides Gaussian weights there are families on which bounds are nearly tight (diagonal maps, aligned chains of rank
one, orthogonal weights): there a wrong constant shows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from curvcert.activations import (
    ACTIVATIONS,
    Activation,
    celu,
    hardtanh,
    leaky_relu,
    softplus,
    torch_softplus,
)
from curvcert.falsifier.draws import Draw
from curvcert.falsifier.random_graphs import GRAPHS, random_graph
from curvcert.falsifier.random_products import Pool
from curvcert.network import AbstractBlock, Affine, Block, MaxPool, Network
from curvcert.network.nodes import ElementwiseNode
from curvcert.nn.sll import contracting_diagonal
from curvcert.operators import AbstractLinearMap, AveragePool2d, Conv2d, Dense, Diagonal, Identity, Reshape, Zero

SMOOTH: tuple[Activation, ...] = (
    *(act for act in ACTIVATIONS.values() if act.curvature is not None),
    softplus(5.0),
    softplus(3.0, centred=True),
    torch_softplus(2.0),
    celu(0.5),
)
KINKED: tuple[Activation, ...] = (
    *(act for act in ACTIVATIONS.values() if act.curvature is None),
    leaky_relu(0.3),
    hardtanh(-2.0, 0.5),
)


@dataclass(frozen=True, eq=False)
class RandomNetwork:
    """A network, the family that it is of, and the activations in it."""

    network: Network
    family: str
    activations: tuple[str, ...]


def random_network(draw: Draw) -> RandomNetwork:
    """Return a fresh network.

    >>> drawn = random_network(Draw.of(0, 0))
    >>> drawn.family in FAMILIES
    True
    """
    family = draw.pick.choice(list(FAMILIES))
    first = draw.pick.choice(SMOOTH if draw.pick.random() < 0.85 else KINKED)
    # Now and then the layers differ in their activations.
    pool = (first, draw.pick.choice(SMOOTH)) if draw.pick.random() < 0.2 else (first,)
    network = FAMILIES[family](draw, pool)
    names = dict.fromkeys(node.activation.name for node in network.nodes if isinstance(node, ElementwiseNode))
    return RandomNetwork(network, family, tuple(names))


def single_neuron(activation: Activation, weight: float) -> Network:
    """Return x -> phi(weight x), on which most bounds are exact.

    >>> from curvcert.activations import TANH
    >>> float(single_neuron(TANH, 2.0)(torch.zeros(1, 1)))
    0.0
    """
    W = Dense(torch.full((1, 1), weight, dtype=torch.float64))
    return Network.of_blocks((_plain(W, activation, torch.zeros(1, dtype=torch.float64)),))


def _dense(draw: Draw, pool: Pool) -> Network:
    """Gaussian layers, one to four deep, with a linear last layer half of the time."""
    widths = [draw.pick.randint(1, 6) for _ in range(draw.pick.randint(1, 4) + 1)]
    blocks: list[AbstractBlock] = [
        _biased(draw, Dense(draw.scaled(after, before)), pool) for before, after in pairwise(widths)
    ]
    return _read_out(draw, blocks)


def _orthogonal(draw: Draw, pool: Pool) -> Network:
    """Square layers that turn and scale, so that norms multiply without slack."""
    width = draw.pick.randint(2, 5)
    gain = draw.gain()
    layers = [torch.linalg.qr(draw.normal(width, width)).Q * gain for _ in range(draw.pick.randint(1, 3))]
    return _read_out(draw, [_biased(draw, Dense(W), pool, size=0.3) for W in layers])


def _diagonal(draw: Draw, pool: Pool) -> Network:
    """Neurons that do not meet before the last layer."""
    width = draw.pick.randint(1, 5)
    layers = [Diagonal(draw.gain() * draw.normal(width), (width,)) for _ in range(draw.pick.randint(1, 3))]
    return _read_out(draw, [_biased(draw, W, pool, size=0.3) for W in layers])


def _aligned(draw: Draw, pool: Pool) -> Network:
    """Rank-one layers, each reading just what the one before it writes: products of norms are nearly attained."""
    widths = [draw.pick.randint(1, 5) for _ in range(draw.pick.randint(2, 4))]
    sides = [torch.nn.functional.normalize(torch.ones(n, dtype=torch.float64), dim=0) for n in widths]
    gain = draw.gain()
    layers = [gain * torch.outer(after, before) for before, after in pairwise(sides)]
    return _read_out(draw, [_biased(draw, Dense(W), pool, size=0.0) for W in layers])


def _residual(draw: Draw, pool: Pool) -> Network:
    """Residual blocks, with a dense block before them half of the time."""
    width = draw.pick.randint(1, 4)
    blocks: list[AbstractBlock] = []
    if draw.pick.random() < 0.5:
        blocks.append(_biased(draw, Dense(draw.scaled(width, width)), pool))
    for _ in range(draw.pick.randint(1, 3)):
        inner = draw.pick.randint(1, 5)
        W, G = Dense(draw.scaled(inner, width)), Dense(0.5 * draw.scaled(width, inner))
        blocks.append(_block(draw, Identity((width,)), G, W, pool))
    return _read_out(draw, blocks)


def _contracting(draw: Draw, pool: Pool) -> Network:
    """SDP-based Lipschitz layers x - W' D phi(W x + b): 1-Lipschitz in l2 where slopes lie in [0, 1]."""
    width = draw.pick.randint(1, 4)
    blocks: list[AbstractBlock] = []
    for _ in range(draw.pick.randint(1, 3)):
        W = Dense(draw.scaled(draw.pick.randint(1, 5), width))
        diagonal = contracting_diagonal(W.weight @ W.weight.T, 0.3 * draw.normal(W.out_size))
        G = -1.0 * (W.T @ Diagonal(diagonal, W.out_shape))
        blocks.append(_block(draw, Identity((width,)), G, W, pool))
    return _read_out(draw, blocks)


def _convolutional(draw: Draw, pool: Pool) -> Network:
    """One or two convolutions with strides, padding, dilation or groups, and pooling half of the time."""
    channels, side = draw.pick.choice((1, 2)), draw.pick.randint(3, 4)
    shape: tuple[int, ...] = (channels, side, side)
    blocks: list[AbstractBlock] = []
    for _ in range(draw.pick.randint(1, 2)):
        conv = _conv(draw, shape)
        blocks.append(_biased(draw, conv, pool))
        shape = conv.out_shape
    if min(shape[1:]) >= 2 and draw.pick.random() < 0.5:
        if draw.pick.random() < 0.7:
            pooling = AveragePool2d(shape, (2, 2), (1, 1))
            blocks.append(Affine(pooling, torch.zeros(pooling.out_shape, dtype=torch.float64), "pooling"))
        else:
            blocks.append(MaxPool(shape, (2, 2), (1, 1), name="max-pooling"))
    shape = blocks[-1].out_shape
    size = math.prod(shape)
    last = Dense(draw.scaled(draw.pick.randint(2, 4), size)) @ Reshape(shape, (size,))
    blocks.append(Affine(last, 0.3 * draw.normal(*last.out_shape), "last"))
    return Network.of_blocks(tuple(blocks))


def _conv(draw: Draw, shape: tuple[int, ...]) -> Conv2d:
    groups = draw.pick.choice((1, shape[0]))
    kernel = draw.pick.randint(1, min(3, *shape[1:]))
    pad, circular = draw.pick.choice((0, 1)), draw.pick.random() < 0.2
    dilation = 2 if 2 * (kernel - 1) < min(shape[1:]) and draw.pick.random() < 0.3 else 1
    outputs = groups * draw.pick.randint(1, 2)
    return Conv2d(
        draw.scaled(outputs, shape[0] // groups, kernel, kernel),
        shape,
        stride=draw.pick.choice(((1, 1), (1, 1), (2, 1), (2, 2))),
        padding=((pad, draw.pick.choice((0, pad))), (pad, pad)),
        dilation=(dilation, dilation),
        groups=groups,
        padding_mode="circular" if circular else "zeros",
    )


FAMILIES: dict[str, Callable[[Draw, Pool], Network]] = {
    "dense": _dense,
    "orthogonal": _orthogonal,
    "diagonal": _diagonal,
    "aligned": _aligned,
    "residual": _residual,
    "contracting": _contracting,
    "convolutional": _convolutional,
    **{family: partial(random_graph, family=family) for family in GRAPHS},
}


def _plain(W: AbstractLinearMap, activation: Activation, b: Tensor) -> Block:
    H, G = Zero(W.in_shape, W.out_shape), Identity(W.out_shape)
    return Block(H, G, W, b, torch.zeros_like(b), activation, "plain")


def _biased(draw: Draw, W: AbstractLinearMap, pool: Pool, size: float = 1.0) -> Block:
    return _plain(W, draw.pick.choice(pool), size * draw.normal(*W.out_shape))


def _block(draw: Draw, H: AbstractLinearMap, G: AbstractLinearMap, W: AbstractLinearMap, pool: Pool) -> Block:
    b, c = draw.normal(*W.out_shape), 0.3 * draw.normal(*G.out_shape)
    return Block(H, G, W, b, c, draw.pick.choice(pool), "residual")


def _read_out(draw: Draw, blocks: list[AbstractBlock]) -> Network:
    """Return the blocks as a network: as they are now and then, otherwise with a last linear map in the last block."""
    network = Network.of_blocks(tuple(blocks))
    if draw.pick.random() < 0.25:
        return network
    return network.read_out(draw.scaled(draw.pick.choice((1, 2, 3, 3, 4)), network.outputs))
