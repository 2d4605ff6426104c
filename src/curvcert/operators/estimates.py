r"""Spectral norms estimated by power iteration: for training, never for a certificate.

Power iteration approaches the largest singular value from below and stops wherever it stops, so
its value is an `Estimate`, a type that nothing which certifies accepts.  It is cheap: a warm start
from the last training step makes one product with the map and one with its adjoint enough, and at
the singular pair (u, v) the gradient with respect to the map is the rank-one term
:math:`\partial\sigma / \partial W = u v^T`.
"""

import math

import torch
from torch import Tensor, nn

from curvcert.bounds.types import Estimate
from curvcert.errors import InvalidInput
from curvcert.operators.base import AbstractLinearMap, Shape
from curvcert.operators.dense import Dense


class PowerIteration(nn.Module):
    """One warm-started norm: a buffer with the leading right singular vector, refined at each call.

    The buffer is part of the state dict, so that a checkpoint resumes where it stopped.

    >>> norm = PowerIteration((2,), steps=50, dtype=torch.float64)
    >>> W = torch.tensor([[3.0, 0.0], [0.0, 1.0]], dtype=torch.float64, requires_grad=True)
    >>> estimate = norm(Dense(W))
    >>> estimate
    Estimate(~ 3, l2 -> l2, global, by power iteration)
    >>> estimate.value.backward()
    >>> W.grad.round(decimals=6).abs()
    tensor([[1., 0.],
            [0., 0.]], dtype=torch.float64)
    """

    v: Tensor

    def __init__(self, in_shape: Shape, steps: int = 1, dtype: torch.dtype = torch.float32) -> None:
        """Start from a fixed direction, so that a run does not depend on the global random state."""
        super().__init__()
        if steps < 1:
            raise InvalidInput(f"Power iteration needs at least one step, got {steps}.")
        self.steps = steps
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(math.prod(in_shape), generator=generator, dtype=torch.float64)
        self.register_buffer("v", (start / start.norm()).reshape(in_shape).to(dtype))

    def forward(self, op: AbstractLinearMap) -> Estimate:
        """Refine the singular pair and estimate the norm, differentiably in op's weights."""
        with torch.no_grad():
            v = self.v
            for _ in range(self.steps):
                v = _unit(op.adjoint(_unit(op.apply(v))))
            self.v.copy_(v)
            v, u = v.clone(), _unit(op.apply(v))
        value = _rank_one_norm(op.weight, u, v) if isinstance(op, Dense) else (u * op.apply(v)).sum()
        return Estimate(value, 2, 2, method="power iteration")


class _RankOneNorm(torch.autograd.Function):
    """u' W v, whose gradient in W is u v' and nothing else."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, weight: Tensor, u: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(u, v)
        return torch.dot(u, weight @ v)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        u, v = ctx.saved_tensors  # type: ignore[attr-defined]
        return torch.outer(gradient * u, v), None, None


def _rank_one_norm(weight: Tensor, u: Tensor, v: Tensor) -> Tensor:
    value: Tensor = _RankOneNorm.apply(weight, u, v)  # type: ignore[no-untyped-call]
    return value


def norm_estimate(op: AbstractLinearMap, steps: int = 100) -> Estimate:
    """Estimate the 2 -> 2 norm of a map by power iteration from a fixed start.

    >>> norm_estimate(Dense(torch.tensor([[3.0, 0.0], [0.0, -4.0]])))
    Estimate(~ 4, l2 -> l2, global, by power iteration)
    """
    iteration = PowerIteration(op.in_shape, steps, op.dtype).to(op.device)
    estimate: Estimate = iteration(op)
    return estimate


def _unit(x: Tensor) -> Tensor:
    """Return x / ||x||, or zero for x = 0."""
    unit: Tensor = x / torch.linalg.vector_norm(x).clamp(min=torch.finfo(x.dtype).tiny)
    return unit
