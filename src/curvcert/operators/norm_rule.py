"""The norm as an argument: a recursion written once gives a Bound or an Estimate.

A recursion asks an `AbstractNorms` for the norms of its maps and hands it the final number.  With
norms that are upper bounds the result is a `Bound`; with estimates it is an `Estimate`.
"""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from torch import Tensor

from curvcert.bounds.types import Bound, Estimate, LayerTerm, Scope
from curvcert.operators.base import AbstractLinearMap
from curvcert.operators.weighted import GRAM_SIZE

R = TypeVar("R", bound=Bound | Estimate)


class AbstractNorms(ABC, Generic[R]):
    """Norms of linear maps, all on one side of the truth, and the type of result they lead to."""

    @abstractmethod
    def norm(self, op: AbstractLinearMap, p: float, q: float) -> Tensor:
        """Return the p -> q norm of a map, a scalar tensor."""

    @abstractmethod
    def row_norms(self, op: AbstractLinearMap, r: float) -> Tensor:
        """Return the r-norms of the rows of a map, in its output shape."""

    @abstractmethod
    def hadamard(self, op: AbstractLinearMap) -> Tensor:
        r"""Return :math:`\sqrt{\lambda_{max}((AA^T)^{\circ 2})}`, a scalar tensor."""

    @abstractmethod
    def vectorised(self, G: AbstractLinearMap, W: AbstractLinearMap) -> Tensor:
        r"""Return :math:`\sqrt{\lambda_{max}((G^T G) \circ (WW^T))}`, a scalar tensor."""

    @abstractmethod
    def scaled_vectorised(self, G: AbstractLinearMap, W: AbstractLinearMap) -> Tensor | None:
        r"""Return :math:`\sqrt{\lambda_{max}(D^{-1} ((G^T G) \circ (WW^T)) D^{-1})} \|DW\|_2`, or None if too large.

        D is diagonal with the products of the norms of G's columns and W's rows.
        """

    @abstractmethod
    def bilinear(self, op: AbstractLinearMap, d: Tensor, p: float, gram_size: int = GRAM_SIZE) -> Tensor:
        r"""Return :math:`\sup \sum_l d_l |A_l a| |A_l b|` over the p-ball, one value for each d >= 0."""

    @abstractmethod
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
    ) -> R:
        """Return the final number as a result, made of at most 2**12 sums and products of norms."""
