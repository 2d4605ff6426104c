"""A search for gradients that move further than the local certificate allows, and the networks that it meets.

The gradient's change within a ball is climbed by projected normalised ascent, with autograd through the network's
values: nothing here knows the formulas of the certificate.  Every number returned is attained.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from curvcert.activations import ACTIVATIONS, ELU, Activation, softplus
from curvcert.bounds.lipschitz.analyses import at_points
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Global
from curvcert.certificates.shell import Layers, layers_of
from curvcert.certificates.shell.ball import over_balls
from curvcert.certificates.shell.centre import AtCentre, at_centres, pair_gradients
from curvcert.certificates.shell.gradient_change import GradientChange, gradient_change
from curvcert.certificates.shell.layers import reads_alone
from curvcert.network import Block, Network
from curvcert.norms import conjugate, steepest_direction, vector_norm
from curvcert.operators import AbstractLinearMap, Conv2d, Dense, Identity, Reshape, Zero

SMOOTH: dict[str, Activation] = {name: act for name, act in ACTIVATIONS.items() if act.curvature is not None} | {
    "softplus(5)": softplus(5.0),
    "elu": ELU,
}
"""Every activation with a curvature constant."""

ROUNDING = 1e-11
"""Relative rounding of a difference of computed gradients of a small network."""

_TINY = 1e-300


def random_dense(
    activation: Activation, generator: torch.Generator, widths: tuple[int, ...] = (4, 7, 6, 5, 3)
) -> Network:
    """Return dense layers with random weights, the last map in the last block's G."""
    sizes = pairwise(widths[:-1])
    blocks = [_plain(Dense(_normal(generator, after, before)), activation, generator) for before, after in sizes]
    G = Dense(_normal(generator, widths[-1], widths[-2]))
    return _with_outer(blocks, G)


def random_residual(activation: Activation, generator: torch.Generator, width: int = 4, inner: int = 6) -> Network:
    """Return a dense block, two residual blocks, and a linear read-out in the last of them."""
    first = _plain(Dense(_normal(generator, width, width)), activation, generator)
    blocks = [first]
    for _ in range(2):
        W, G = Dense(_normal(generator, inner, width)), Dense(0.5 * _normal(generator, width, inner))
        b, c = torch.randn(inner, generator=generator, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
        blocks.append(Block(Identity((width,)), G, W, b, c, activation, "residual"))
    return _with_outer(blocks, Dense(_normal(generator, 3, width)))


def random_convolutional(activation: Activation, generator: torch.Generator) -> Network:
    """Return two convolutions, the second with a stride, and a dense layer."""
    first = Conv2d(_normal(generator, 3, 1, 3, 3), (1, 4, 4), padding=((1, 1), (1, 1)))
    second = Conv2d(_normal(generator, 2, 3, 2, 2), (3, 4, 4), stride=(2, 2))
    blocks = [_plain(op, activation, generator) for op in (first, second)]
    return _with_outer(blocks, Dense(_normal(generator, 3, 8)) @ Reshape((2, 2, 2), (8,)))


def random_nearly_linear(activation: Activation, generator: torch.Generator) -> Network:
    """Return dense layers whose first ones hardly bend, as training for certificates makes them."""
    network = random_dense(activation, generator, (5, 9, 8, 6, 7, 3))
    first, second, *rest = network.blocks
    assert isinstance(first, Block)
    assert isinstance(second, Block)
    return Network.of_blocks(
        (replace(first, W=0.05 * first.W, b=0.05 * first.b), replace(second, b=0.1 * second.b), *rest)
    )


KINDS: dict[str, Callable[[Activation, torch.Generator], Network]] = {
    "dense": random_dense,
    "residual": random_residual,
    "conv": random_convolutional,
    "nearly linear": random_nearly_linear,
}


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Return weights with a norm of about 1.5 to 2.5, so that neurons bend and saturate."""
    return 1.3 * torch.randn(*shape, generator=generator, dtype=torch.float64) / math.sqrt(math.prod(shape[1:]))


def _plain(W: AbstractLinearMap, activation: Activation, generator: torch.Generator) -> Block:
    b = torch.randn(W.out_shape, generator=generator, dtype=torch.float64)
    return Block(Zero(W.in_shape, W.out_shape), Identity(W.out_shape), W, b, torch.zeros_like(b), activation, "plain")


def _with_outer(blocks: list[Block], G: AbstractLinearMap) -> Network:
    return Network.of_blocks((*blocks[:-1], blocks[-1].read_out(G)))


@dataclass(frozen=True, eq=False)
class Bounded:
    """Points with radii, and bounds on how far the gradient of each pair f_i - f_label moves within them."""

    network: Network
    x: Tensor
    label: Tensor
    others: Tensor
    t: Tensor
    p: float
    layers: Layers

    @staticmethod
    def at(network: Network, x: Tensor, t: Tensor, p: float = 2.0) -> "Bounded":
        """Take the predicted classes as labels."""
        logits = network(x).flatten(1)
        label = logits.argmax(dim=1)
        classes = torch.arange(network.outputs).expand(len(x), -1)
        others = classes[classes != label[:, None]].reshape(len(x), -1)
        pairs = Problem(network.all_differences(), p, p, Global(), scalars=True)
        return Bounded(network, x, label, others, t, p, layers_of(pairs, network))

    def variants(self) -> list[Layers]:
        """Return the layers with Jacobians from the first block on that may be, from each later one, and with none."""
        starts: list[int | None] = [None]
        for k, unit in enumerate(self.network.units):
            block = unit.block
            if not isinstance(block, Block) or block.is_residual or not reads_alone(self.network, k):
                break
            starts += [k] if k else []
            if not isinstance(block.G, Identity):
                break
        starts = starts if self.p == 2 else []
        return [self.layers, *(replace(self.layers, jacobians_from=start) for start in starts)]

    def change(self, layers: Layers | None = None) -> GradientChange:
        """Return the certificate's bounds, the pairs looked at together."""
        return self._change(layers or self.layers, self.others)

    def change_one_by_one(self, layers: Layers) -> GradientChange:
        """Return the bounds of every pair looked at alone, as the line certificate does."""
        found = [self._change(layers, other) for other in self.others.split(1, dim=1)]
        return GradientChange(
            *(torch.cat([getattr(one, kind) for one in found], 1) for kind in ("saturated", "linear"))
        )

    def _change(self, layers: Layers, others: Tensor) -> GradientChange:
        centres = self.centres(layers, others)
        ball = over_balls(centres, self.t, math.prod(self.network.in_shape))
        return gradient_change(ball, self.t, others.shape[1])

    def centres(self, layers: Layers, others: Tensor) -> list[AtCentre]:
        """Return what the certificate knows of every layer at the points."""
        at = at_points(layers.problem, self.x)
        return at_centres(layers, at, pair_gradients(at, self.label, others))

    def found(self, steps: int = 15, seed: int = 0) -> Tensor:
        """Return the largest change of each pair's gradient that ascent finds, (batch, pairs)."""
        pairs = self.others.shape[1]
        x, t = self.x.repeat_interleave(pairs, dim=0), self.t.repeat_interleave(pairs)
        i, j = self.others.flatten(), self.label.repeat_interleave(pairs)
        start = self._gradient(x.clone().requires_grad_(), i, j, create_graph=False)
        # A slope such as 1 - tanh^2 rounds as 1 does, however small it is.
        smooth = [layer for layer in self.layers.layers if layer.unit.activated is not None]
        absolute = 1e-15 * math.prod(float(layer.H + layer.G * layer.W) for layer in smooth)
        generator = torch.Generator().manual_seed(seed)
        step = torch.randn(x.shape, generator=generator, dtype=torch.float64) * _column(t, x)
        step, best = self._project(step, t), torch.zeros_like(t)
        for k in range(steps):
            point = (x + step).detach().requires_grad_()
            moved = self._gradient(point, i, j, create_graph=True) - start
            size = vector_norm(moved, conjugate(self.p), dim=1)
            rounding = ROUNDING * (start.abs().sum(dim=1) + moved.detach().abs().sum(dim=1)) + absolute
            best = torch.maximum(best, size.detach() - rounding)
            (ascent,) = torch.autograd.grad(size.sum(), point)
            direction = steepest_direction(ascent.nan_to_num(0.0).flatten(1), self.p).reshape(x.shape)
            step = self._project(step + direction * _column(t * 0.7 * 0.85**k, x), t)
        return best.reshape(len(self.x), pairs)

    def _gradient(self, point: Tensor, i: Tensor, j: Tensor, create_graph: bool) -> Tensor:
        with torch.enable_grad():
            logits = self.network(point).flatten(1)
            value = logits.gather(1, i[:, None]) - logits.gather(1, j[:, None])
            return torch.autograd.grad(value.sum(), point, create_graph=create_graph)[0].flatten(1)

    def _project(self, step: Tensor, t: Tensor) -> Tensor:
        length = vector_norm(step.flatten(1), self.p, dim=1)
        return step * _column((t / length.clamp(min=_TINY)).clamp(max=1.0), step)


def _column(per_row: Tensor, like: Tensor) -> Tensor:
    return per_row.reshape(-1, *(1,) * (like.dim() - 1))
