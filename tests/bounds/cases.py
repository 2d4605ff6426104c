"""Networks as data: every case meets every norm, scope and target."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvcert.activations import ACTIVATIONS, RELU, TANH, Activation, elu, leaky_relu, softplus
from curvcert.network import AbstractBlock, Affine, Block, Network, trace
from curvcert.operators import Dense, Identity, Zero

F64 = torch.float64

ROWS: dict[str, Activation] = dict(ACTIVATIONS) | {
    act.name: act for act in (leaky_relu(3.0), leaky_relu(-0.5), elu(-1.5), softplus(30.0))
}
"""The table, and slopes in [1, 3], [-0.5, 1] and [-1.5, 1]."""


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def feed_forward(widths: tuple[int, ...], activation: Activation, seed: int = 0, gain: float = 1.2) -> Network:
    """Dense layers with an activation after each but the last."""
    blocks = []
    for k in range(len(widths) - 2):
        W = Dense(gain * randn(widths[k + 1], widths[k], seed=seed + 3 * k) / widths[k] ** 0.5)
        last = k == len(widths) - 3
        G = Dense(gain * randn(widths[-1], widths[-2], seed=seed + 1) / widths[-2] ** 0.5)
        b = randn(widths[k + 1], seed=seed + 3 * k + 2)
        blocks.append(_block(W, b, activation, G if last else None, f"layer{k}"))
    return Network.of_blocks(tuple(blocks))


def residual(width: int, inner: int, activation: Activation, seed: int = 0, depth: int = 2) -> Network:
    """Blocks x + G Phi(W x + b), and a linear read-out in the last of them."""
    blocks: list[AbstractBlock] = []
    for k in range(depth):
        W = 0.8 * randn(inner, width, seed=seed + 5 * k) / width**0.5
        G = 0.8 * randn(width, inner, seed=seed + 5 * k + 1) / width**0.5
        b, c = randn(inner, seed=seed + 5 * k + 2), torch.zeros(width, dtype=F64)
        blocks.append(Block(Identity((width,)), Dense(G), Dense(W), b, c, activation, f"residual{k}"))
    last = blocks[-1].read_out(Dense(randn(3, width, seed=seed + 99)))
    assert last is not None
    return Network.of_blocks((*blocks[:-1], last))


def _block(W: Dense, b: Tensor, activation: Activation, G: Dense | None, name: str) -> Block:
    outer = Identity(W.out_shape) if G is None else G
    c = torch.zeros(outer.out_shape, dtype=F64)
    return Block(Zero(W.in_shape, outer.out_shape), outer, W, b, c, activation, name)


def linear(outputs: int, inputs: int, seed: int = 0) -> Network:
    return Network.of_blocks(
        (Affine(Dense(randn(outputs, inputs, seed=seed)), torch.zeros(outputs, dtype=F64), "linear"),)
    )


def one_dimensional(w: float, activation: Activation, b: float = 0.0) -> Network:
    """phi(w x + b)."""
    W = Dense(torch.full((1, 1), w, dtype=F64))
    return Network.of_blocks((_block(W, torch.full((1,), b, dtype=F64), activation, None, "only"),))


def convolutional(pool: str) -> Network:
    """Two convolutions with a stride, a pooling and a linear layer, traced from a module."""
    torch.manual_seed(0)
    pooling = {"max": nn.MaxPool2d(2), "overlapping max": nn.MaxPool2d(3, 1, 1), "average": nn.AvgPool2d(2)}[pool]
    activation = nn.Tanh() if pool == "average" else nn.ReLU()
    features = 16 if pool == "overlapping max" else 4
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), activation, pooling, nn.Conv2d(3, 4, 2, 2), activation, nn.Flatten(),
        nn.Linear(features, 3),
    )  # fmt: skip
    return trace(model.double().eval(), torch.zeros(1, 2, 4, 4, dtype=F64))


@dataclass(frozen=True)
class Case:
    """A named network."""

    name: str
    make: Callable[[], Network]


CASES = [
    Case("shallow tanh", lambda: feed_forward((4, 6, 3), TANH)),
    Case("deep gelu", lambda: feed_forward((3, 5, 4, 5, 3), ACTIVATIONS["gelu"], seed=7)),
    Case("deep sin", lambda: feed_forward((3, 4, 4, 2), ACTIVATIONS["sin"], seed=3)),
    Case("relu", lambda: feed_forward((4, 8, 5, 3), RELU, seed=5)),
    Case("slopes in [1, 3]", lambda: feed_forward((3, 4, 4, 2), leaky_relu(3.0), seed=2)),
    Case("slopes in [-0.5, 1]", lambda: feed_forward((3, 4, 4, 2), leaky_relu(-0.5), seed=4)),
    Case("one output", lambda: feed_forward((5, 6, 1), TANH, seed=8)),
    Case("narrow middle", lambda: feed_forward((6, 1, 6, 3), TANH, seed=9)),
    Case("residual tanh", lambda: residual(4, 5, TANH)),
    Case("residual silu", lambda: residual(3, 4, ACTIVATIONS["silu"], seed=6)),
    Case("linear", lambda: linear(3, 5)),
    Case("conv with average pooling", lambda: convolutional("average")),
    Case("conv with max-pooling", lambda: convolutional("max")),
    Case("conv with overlapping max-pooling", lambda: convolutional("overlapping max")),
]
IDS = [case.name for case in CASES]
