r"""Spectral norms estimated by power iteration: for training, never for a certificate.

Power iteration approaches the largest singular value from below and stops wherever it stops, so
its value is an `Estimate`, a type that nothing which certifies accepts.  It is cheap: a warm start
from the last training step makes one product with the map and one with its adjoint enough, and at
the singular pair (u, v) the gradient with respect to the map is the rank-one term
:math:`\partial\sigma / \partial W = u v^T`.
"""

import math
from collections.abc import Hashable

import torch
from torch import Tensor, nn

from curvcert.bounds.types import Estimate, LayerTerm, Scope
from curvcert.errors import InvalidInput
from curvcert.norms import conjugate, vector_norm
from curvcert.operators.base import (
    AbstractLinearMap,
    AbstractReordering,
    Identity,
    Reshape,
    Scaled,
    Shape,
    Zero,
    structure,
)
from curvcert.operators.conv import Conv2d
from curvcert.operators.dense import Dense
from curvcert.operators.norm_rule import AbstractNorms
from curvcert.operators.rank_one import Ledgers, chain_terms, dense_chain
from curvcert.operators.weighted import GRAM_SIZE

_FEW_ROWS = 256
"""Up to so many rows of a product are read by its adjoint instead of multiplying matrices."""


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
        self.register_buffer("v", torch.empty(in_shape, dtype=dtype))
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Put the vector back to its fixed start."""
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(self.v.numel(), generator=generator, dtype=torch.float64)
        self.v.copy_((start / start.norm()).reshape(self.v.shape))

    @torch.no_grad()
    def refine(self, op: AbstractLinearMap) -> tuple[Tensor, Tensor, Tensor]:
        """Refine the singular pair; return it, left and right, and the value u' A v."""
        v = self.v
        for _ in range(self.steps):
            v = _unit(op.adjoint(_unit(op.apply(v))))
        self.v.copy_(v)
        image = op.apply(v)
        return _unit(image), v, torch.linalg.vector_norm(image)

    def forward(self, op: AbstractLinearMap) -> Estimate:
        """Refine the singular pair and estimate the norm, differentiably in op's weights."""
        value = _differentiable(op, *self.refine(op), Ledgers())
        return Estimate(value, 2, 2, method="power iteration")


def _differentiable(op: AbstractLinearMap, u: Tensor, v: Tensor, value: Tensor, ledgers: Ledgers) -> Tensor:
    """Return the value u' A v with its gradient in A's weights: rank-one terms for dense maps, else by autograd."""
    chain = dense_chain(op)
    if chain is None:
        return (u * op.apply(v)).sum()
    with torch.no_grad():
        terms = chain_terms(chain, u, v)
    return ledgers.charged(value, terms)


def norm_estimate(op: AbstractLinearMap, steps: int = 100) -> Estimate:
    """Estimate the 2 -> 2 norm of a map by power iteration from a fixed start.

    >>> norm_estimate(Dense(torch.tensor([[3.0, 0.0], [0.0, -4.0]])))
    Estimate(~ 4, l2 -> l2, global, by power iteration)
    """
    iteration = PowerIteration(op.in_shape, steps, op.dtype).to(op.device)
    estimate: Estimate = iteration(op)
    return estimate


class NormEstimates(AbstractNorms[Estimate], nn.Module):
    """Norms for a recursion in training: warm-started power iterations, one for each norm that it asks for.

    The recursion asks for the same norms in the same order at every step, so the n-th new norm of a step
    resumes the n-th buffer.  Call `start_step` before each pass.  All buffers are in the state dict.

    >>> norms = NormEstimates(steps=50)
    >>> norms.start_step()
    >>> W = Dense(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
    >>> float(norms.norm(W, 2, 2))
    3.0
    """

    def __init__(self, steps: int = 1) -> None:
        """Start without buffers; each refinement takes this many steps."""
        nn.Module.__init__(self)
        self.steps = steps
        self.iterations = nn.ModuleList()
        self.start_step()

    def start_step(self) -> None:
        """Forget the values of the last pass, keep the singular vectors."""
        self._asked: dict[Hashable, tuple[AbstractLinearMap, Tensor]] = {}
        self._ledgers = Ledgers()
        self._next = 0

    def restart(self) -> None:
        """Put all singular vectors back to their fixed start."""
        for iteration in self.iterations:
            assert isinstance(iteration, PowerIteration)
            iteration.restart()

    def norm(self, op: AbstractLinearMap, p: float, q: float) -> Tensor:
        """Estimate the p -> q norm: 2 -> 2 by power iteration, others by norms of rows and columns."""
        if isinstance(op, Zero):
            return torch.zeros((), dtype=op.dtype, device=op.device)
        if isinstance(op, AbstractReordering) and p == q:
            return torch.ones((), dtype=op.dtype, device=op.device)
        if isinstance(op, Scaled):
            return abs(op.factor) * self.norm(op.map, p, q)
        key = (structure(op), p, q)
        if key not in self._asked:
            self._asked[key] = (op, self._estimate(op, p, q))
        return self._asked[key][1]

    def _estimate(self, op: AbstractLinearMap, p: float, q: float) -> Tensor:
        if p == 2 and q == 2:
            return self._refined(op)
        dual = conjugate(p)
        if math.isinf(q) and p == 2 and isinstance(op, Dense):
            return self._longest_row(op.weight)
        by_rows = vector_norm(self.row_norms(op, dual), q)
        by_columns = vector_norm(self.row_norms(op.T, q), dual)
        return torch.minimum(by_rows, by_columns)

    def _refined(self, op: AbstractLinearMap) -> Tensor:
        if self._next == len(self.iterations):
            self.iterations.append(PowerIteration(op.in_shape, self.steps, op.dtype).to(op.device))
        iteration = self.iterations[self._next]
        self._next += 1
        assert isinstance(iteration, PowerIteration)
        return _differentiable(op, *iteration.refine(op), self._ledgers)

    def _longest_row(self, weight: Tensor) -> Tensor:
        """Return the 2 -> inf norm of a matrix; its gradient is the longest row, made a unit, in its place."""
        with torch.no_grad():
            lengths = vector_norm(weight, 2, dim=1)
            index = lengths.argmax()
            left = torch.zeros_like(lengths).scatter(0, index[None], 1.0)
            right = _unit(weight.index_select(0, index[None])[0])
        return self._ledgers.charged(lengths.amax(), [(weight, left, right)])

    def row_norms(self, op: AbstractLinearMap, r: float) -> Tensor:
        """Return the r-norms of the rows; a convolution's border counts like its interior."""
        match op:
            case Dense():
                return vector_norm(op.weight, r, dim=1)
            case Conv2d():
                return vector_norm(op.weight.flatten(1), r, dim=1)[:, None, None].expand(op.out_shape)
            case Identity() | Reshape():
                return torch.ones(op.out_shape, dtype=op.dtype, device=op.device)
            case _ if op.out_size <= _FEW_ROWS:
                eye = torch.eye(op.out_size, dtype=op.dtype, device=op.device).reshape(-1, *op.out_shape)
                return vector_norm(op.adjoint(eye).flatten(1), r, dim=1).reshape(op.out_shape)
            case _:
                return vector_norm(op.as_matrix(), r, dim=1).reshape(op.out_shape)

    def hadamard(self, op: AbstractLinearMap) -> Tensor:
        """Estimate the root of the largest eigenvalue of (A A') squared entry by entry."""
        matrix = op.as_matrix()
        return _root_of_top((matrix @ matrix.T).square())

    def vectorised(self, G: AbstractLinearMap, W: AbstractLinearMap) -> Tensor:
        """Estimate the root of the largest eigenvalue of (G'G) o (WW')."""
        if isinstance(G, Identity):
            return self.row_norms(W, 2).amax()
        left, right = G.as_matrix(), W.as_matrix()
        return _root_of_top((left.T @ left) * (right @ right.T))

    def scaled_vectorised(self, G: AbstractLinearMap, W: AbstractLinearMap) -> Tensor | None:
        """Leave this refinement to certification."""
        return None

    def bilinear(self, op: AbstractLinearMap, d: Tensor, p: float, gram_size: int = GRAM_SIZE) -> Tensor:
        """Estimate the bilinear form with weights d >= 0: at p = 2 the largest eigenvalue of A' diag(d) A."""
        if p != 2:
            rows = self.row_norms(op, conjugate(p)).flatten()
            return (d.flatten(1) * rows.square()).sum(dim=1)
        with torch.no_grad():
            v = torch.ones(len(d), *op.in_shape, dtype=op.dtype, device=op.device)
            for _ in range(max(self.steps, 10)):
                v = op.adjoint(d * op.apply(v))
                v = v / torch.linalg.vector_norm(v.flatten(1), dim=1).clamp(min=torch.finfo(v.dtype).tiny).reshape(
                    -1, *(1,) * len(op.in_shape)
                )
        return (d * op.apply(v).square()).flatten(1).sum(dim=1)

    def result(
        self,
        value: Tensor,
        p: float,
        q: float,
        scope: Scope,
        method: str,
        per_layer: tuple[LayerTerm, ...] = (),
        assumes: tuple[str, ...] = (),
        skipped: tuple[str, ...] = (),
    ) -> Estimate:
        """Return the final number of a recursion as an Estimate."""
        return Estimate(value, p, q, scope, method, per_layer)


def _root_of_top(S: Tensor) -> Tensor:
    """Estimate the root of the largest eigenvalue of a symmetric matrix, with gradient 0 at S = 0."""
    with torch.no_grad():
        v = torch.linalg.eigh(S)[1][:, -1]
    top = torch.dot(v, S @ v)
    positive = top > 0
    return torch.where(positive, torch.where(positive, top, torch.ones_like(top)).sqrt(), torch.zeros_like(top))


def _unit(x: Tensor) -> Tensor:
    """Return x / ||x||, or zero for x = 0."""
    unit: Tensor = x / torch.linalg.vector_norm(x).clamp(min=torch.finfo(x.dtype).tiny)
    return unit
