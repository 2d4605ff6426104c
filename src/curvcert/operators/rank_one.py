r"""Gradients of many norms at once: every norm adds a rank-one term to a weight's gradient, all in one product.

A norm :math:`\sigma = u^T A_1 \cdots A_r v` at its singular pair has the gradient :math:`(A_1 \cdots A_{k-1})^T u \,
(A_{k+1} \cdots A_r v)^T` in :math:`A_k`.  Left to autograd, each norm would write a full matrix for each weight that
it touches.  Here a norm only files its two vectors with the weight's `Ledger`; once all norms have done so, the
gradient is one product :math:`U^T \mathrm{diag}(g) V`.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from curvcert.operators.base import AbstractLinearMap, Composition, Transposed
from curvcert.operators.dense import Dense


@dataclass(eq=False)
class Ledger:
    """The rank-one terms that one weight has been charged with in a backward pass."""

    coefficients: list[Tensor] = field(default_factory=list)
    lefts: list[Tensor] = field(default_factory=list)
    rights: list[Tensor] = field(default_factory=list)

    def settle(self, like: Tensor) -> Tensor:
        """Return the sum of all terms, and start again."""
        if not self.coefficients:
            return torch.zeros_like(like)
        scaled = torch.stack(self.lefts) * torch.stack(self.coefficients)[:, None]
        total = scaled.T @ torch.stack(self.rights)
        self.coefficients, self.lefts, self.rights = [], [], []
        return total


class Ledgers:
    """One ledger for each weight of a step; autograd settles it after every norm that has filed with it."""

    def __init__(self) -> None:
        """Open the book."""
        self._open: dict[int, tuple[Tensor, Ledger, Tensor]] = {}

    def of(self, weight: Tensor) -> tuple[Ledger, Tensor]:
        """Return the ledger of a weight, and the token that ties norms to it in the graph."""
        if id(weight) not in self._open:
            ledger = Ledger()
            token: Tensor = _Settlement.apply(weight, ledger)  # type: ignore[no-untyped-call]
            self._open[id(weight)] = (weight, ledger, token)
        return self._open[id(weight)][1:]

    def charged(self, value: Tensor, terms: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
        """Return the value with a gradient: for each (weight, left, right), the term left right' in the weight."""
        entries = [(*self.of(weight), left, right) for weight, left, right in terms]
        filed = [(ledger, left, right) for ledger, _, left, right in entries]
        tokens = [token for _, token, _, _ in entries]
        charged: Tensor = _Charge.apply(value, filed, *tokens)  # type: ignore[no-untyped-call]
        return charged


class _Settlement(torch.autograd.Function):
    """A token that stands for a weight; its backward runs after all that depend on it, and settles the ledger."""

    @staticmethod
    def forward(ctx: FunctionCtx, weight: Tensor, ledger: Ledger) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.ledger = ledger  # type: ignore[attr-defined]
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return ctx.ledger.settle(weight), None  # type: ignore[attr-defined]


class _Charge(torch.autograd.Function):
    """A number whose gradient is filed with ledgers instead of being passed on."""

    @staticmethod
    def forward(ctx: FunctionCtx, value: Tensor, filed: list[tuple[Ledger, Tensor, Tensor]], *tokens: Tensor) -> Tensor:
        ctx.filed, ctx.count = filed, len(tokens)  # type: ignore[attr-defined]
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        for ledger, left, right in ctx.filed:  # type: ignore[attr-defined]
            ledger.coefficients.append(gradient)
            ledger.lefts.append(left)
            ledger.rights.append(right)
        return (None, None, *(gradient.new_zeros(()) for _ in range(ctx.count)))  # type: ignore[attr-defined]


def dense_chain(op: AbstractLinearMap) -> list[tuple[Tensor, bool]] | None:
    """Return the weights of a product of dense maps, first applied first, and whether each is transposed."""
    chain = []
    for factor in reversed(op.factors) if isinstance(op, Composition) else (op,):
        inner = factor.map if isinstance(factor, Transposed) else factor
        if not isinstance(inner, Dense):
            return None
        chain.append((inner.weight, isinstance(factor, Transposed)))
    return chain


def chain_terms(chain: list[tuple[Tensor, bool]], u: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return, for each weight of the product, the vectors left and right of its term in the gradient of u' A v."""
    rights = [v]
    for weight, transposed in chain[:-1]:
        rights.append((weight.T if transposed else weight) @ rights[-1])
    terms, left = [], u
    for (weight, transposed), right in zip(reversed(chain), reversed(rights), strict=True):
        terms.append((weight, right, left) if transposed else (weight, left, right))
        left = (weight if transposed else weight.T) @ left
    return terms
