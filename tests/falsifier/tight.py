"""Networks on which bounds are attained, or nearly so, and claims that are off by a twentieth."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from curvcert.activations import SIN, TANH, Activation
from curvcert.bounds.types import Bound
from curvcert.falsifier.random_networks import single_neuron
from curvcert.network import Affine, Block, Network
from curvcert.operators import AbstractLinearMap, Dense, Diagonal, Identity, Zero

SHORT = 0.95
BEND = -0.6584789484624084
"""Where tanh'' is largest."""


def tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def shortened(bound: Bound) -> Bound:
    """Return the bound with a norm, or c, taken as a twentieth too small."""
    return replace(bound, value=SHORT * bound.value)


def layer(W: AbstractLinearMap, activation: Activation) -> Block:
    zero = torch.zeros(W.out_shape, dtype=torch.float64)
    return Block(Zero(W.in_shape, W.out_shape), Identity(W.out_shape), W, zero, zero, activation)


def neuron() -> Network:
    return single_neuron(TANH, 3.0)


def linear_chain() -> Network:
    """Aligned linear maps of rank one: every operator norm multiplies exactly."""
    maps = [torch.ones(3, 2), torch.ones(4, 3), torch.ones(2, 4)]
    return Network.of_blocks(tuple(Affine(Dense(W.double()), torch.zeros(len(W), dtype=torch.float64)) for W in maps))


def diagonal() -> Network:
    """Neurons that do not meet: every p -> p norm is the largest entry."""
    return Network.of_blocks(tuple(layer(Diagonal(tensor(2.0, -1.0, 0.5), (3,)), TANH) for _ in range(2)))


def aligned() -> Network:
    """Layers of rank one without offsets: at 0 every slope is 1, and the norms multiply."""
    return Network.of_blocks(
        tuple(layer(Dense(torch.ones(n, m, dtype=torch.float64) / m), TANH) for m, n in ((3, 4), (4, 2)))
    )


def equal_neurons() -> Network:
    """A sum of equal neurons: they bend together."""
    W, G = Dense(torch.ones(3, 2, dtype=torch.float64)), Dense(torch.ones(1, 3, dtype=torch.float64))
    return Network.of_blocks((layer(W, TANH).read_out(G),))


def valley(activation: Activation = SIN, margin: float = 0.02) -> tuple[Network, Tensor]:
    """Return two classes with f_1 - f_0 = sin(x) + 1 - margin, and x = -pi/2 where its gradient is 0.

    The certified radius by the gradient and c = 1 is sqrt(2 margin); the true one is 1.0017 times that.
    """
    G = Dense(tensor(-0.5, 0.5)[:, None])
    block = layer(Dense(torch.ones(1, 1, dtype=torch.float64)), activation).read_out(G)
    return Network.of_blocks((replace(block, c=tensor(0.0, 1.0 - margin)),)), tensor(-math.pi / 2)[:, None]


def slope() -> tuple[Network, Tensor]:
    """Return two linear classes, and an input whose Lipschitz radius in l2 is exact: 1."""
    return Network.of_blocks((Affine(Dense(tensor(1.0, -1.0)[:, None]), torch.zeros(2, dtype=torch.float64)),)), tensor(
        1.0
    )[:, None]
