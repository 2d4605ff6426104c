r"""How far a float64 evaluation can be from the network in real arithmetic.

Errors travel in two ways, and the smaller counts: coordinate by coordinate through the maps of
absolute values, and in the 2-norm through spectral norms, which grow far slower with depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from curvcert.activations import Activation, derivative_range
from curvcert.activations.declaration import ROUNDING as DECLARED_ROUNDING
from curvcert.budget import checkpoint
from curvcert.network.network import Network
from curvcert.network.nodes import AffineNode, ElementwiseNode, MaxPoolNode, ProductNode
from curvcert.network.rewriting.chain import Chain
from curvcert.network.sweeps import AbstractForward
from curvcert.operators import NormBounds
from curvcert.operators.magnitudes import absolute_image, rounding_length
from curvcert.rounding import TINY, UNIT_ROUNDOFF, Upper, gamma, norm_upper_bound_of_vectors


@dataclass(frozen=True, eq=False)
class Computed:
    """A computed batch with bounds on its error: coordinate by coordinate, and in the 2-norm."""

    value: Tensor
    error: Tensor
    error_norm: Tensor

    @property
    def flat(self) -> "Computed":
        """The same with values of one dimension."""
        return Computed(self.value.flatten(1), self.error.flatten(1), self.error_norm)

    def of_samples(self, index: Tensor) -> "Computed":
        """Return the same for some of the samples."""
        return Computed(self.value[index], self.error[index], self.error_norm[index])


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The computed value of every node."""

    network: Network
    values: tuple[Computed, ...]

    def of_samples(self, index: Tensor) -> "Evaluation":
        """Return the same for some of the samples."""
        return Evaluation(self.network, tuple(value.of_samples(index) for value in self.values))

    def read_out(self, network: Network, norms: NormBounds | None = None) -> "Evaluation":
        """Return that of a read-out of the network, which differs from it in its last nodes alone."""
        pairs = zip(self.network.nodes, network.nodes, strict=False)
        known = self.values[: len([None for _ in takewhile(lambda pair: pair[0] is pair[1], pairs)])]
        return Evaluation(network, tuple(_Evaluating(norms).sweep(network.nodes, self.values[0], known)))

    @property
    def output(self) -> Computed:
        """The value of the last node."""
        return self.values[-1]

    @property
    def states(self) -> tuple[Computed, ...]:
        """The input of every block of a chain, and the output."""
        return (self.values[0], *(self.values[link.output] for link in self._chain))

    @property
    def pre_activations(self) -> tuple[Computed | None, ...]:
        """The pre-activation of every block of a chain; None for a block without one."""
        return tuple(None if link.z is None else self.values[link.z] for link in self._chain)

    @property
    def _chain(self) -> Chain:
        return self.network.chain


def evaluate_with_error(network: Network, x: Tensor, norms: NormBounds | None = None) -> Evaluation:
    """Evaluate a batch, with proven bounds on what rounding did to every intermediate value.

    Without `norms` errors travel coordinate by coordinate only: no norm is computed, deep networks get more slack.

    >>> from curvcert.activations import TANH
    >>> from curvcert.network.builder import start
    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> network = Network(start((1,), one.device).activate(TANH, "tanh").builder.nodes)
    >>> 0 < float(evaluate_with_error(network, one).output.error) < 1e-14
    True
    """
    x = network.require_batch(x)
    start = Computed(x, torch.zeros_like(x), x.new_zeros(len(x)))
    return Evaluation(network, tuple(_Evaluating(norms).sweep(network.nodes, start)))


class _Evaluating(AbstractForward[Computed]):
    """Values with bounds on their errors."""

    def __init__(self, norms: NormBounds | None) -> None:
        self._norms = norms

    def affine(self, node: AffineNode, values: Sequence[Computed]) -> Computed:
        checkpoint()
        total, error = torch.zeros_like(node.offset), Upper(torch.zeros_like(node.offset))
        passed = Upper(values[0].value.new_zeros(len(values[0].value)))
        for term, x in zip(node.terms, values, strict=True):
            total = total + term.map.apply(x.value)
            # The product's own rounding, that of the running sum, and what came with x; only the last may use norms.
            local = absolute_image(term.map, x.value.abs()) * gamma(rounding_length(term.map) + 1)
            error = error + local + UNIT_ROUNDOFF * total.abs()
            passed = passed if self._norms is None else passed + Upper(x.error_norm) * self._norms.norm(term.map, 2, 2)
        total = total + node.offset
        error = error + UNIT_ROUNDOFF * total.abs()
        if node.offset_error is not None:
            error = error + node.offset_error
        norm = None if self._norms is None else passed + _norm(error.bound)
        for term, x in zip(node.terms, values, strict=True):
            error = error + absolute_image(term.map, x.error)
        return _computed(total, error, norm)

    def elementwise(self, node: ElementwiseNode, value: Computed) -> Computed:
        steepest: float | Tensor = max(map(abs, node.activation.slope))
        most = steepest
        if not node.activation.is_tame:
            # As steep as it is within the error.
            least, greatest = value.value - value.error, value.value + value.error
            # What overflowed can be anything.
            known = ~(least.isnan() | greatest.isnan())
            least, greatest = torch.where(known, least, -torch.inf), torch.where(known, greatest, torch.inf)
            low, high = derivative_range(node.activation, least, greatest)
            steepest = torch.maximum(low.abs(), high.abs())
            most = steepest.flatten(1).amax(dim=1)
        y = node.activation.value(value.value)
        local = Upper(_activation_error(node.activation, y), 2)
        norm = Upper(value.error_norm) * most + _norm(local.bound)
        return _computed(y, Upper(value.error) * steepest + local, norm)

    def max_pool(self, node: MaxPoolNode, value: Computed) -> Computed:
        # Each output is one of the inputs, or beside one by no more than the largest error.
        worst = value.error.flatten(1).amax(dim=1)
        y = node.pool.evaluate(value.value)
        return _computed(y, Upper(_spread(worst, y)), None)

    def product(self, node: ProductNode, left: Computed, right: Computed) -> Computed:
        # u'v' - uv = u (v' - v) + v (u' - u) + (u' - u)(v' - v), and the rounding of the product itself.
        y = left.value * right.value
        off, norm = Upper(left.error), Upper(left.error_norm)
        u, v = (factor.value.abs().flatten(1).amax(dim=1) for factor in (left, right))
        local = UNIT_ROUNDOFF * y.abs()
        error = off * right.value.abs() + (off + left.value.abs()) * right.error + local
        return _computed(y, error, norm * v + (norm + u) * right.error_norm + _norm(local))


def _activation_error(activation: Activation, value: Tensor) -> Tensor:
    """Bound the rounding of phi itself; a value that cancels (sin, GELU, softplus - log 2) errs absolutely."""
    if activation.profiles is not None:
        return activation.profiles[0].slack(value)
    return DECLARED_ROUNDING * (1 + value.abs())


def _computed(value: Tensor, found: Upper, norm: Upper | None) -> Computed:
    """Combine both bounds: no coordinate is off by more than the whole vector is.

    TINY stands for what underflow lost.  Where a value overflowed, nothing is known of the whole sample.
    """
    error = (found + TINY).bound
    size = _norm(error)
    # NaN or infinity in any coordinate shows here.
    total = size + value.abs().flatten(1).amax(dim=1)
    if norm is not None:
        size = torch.minimum(size, (norm + TINY * value[0].numel()).bound)
        total = total + size
    known = total < torch.inf
    size = torch.where(known, size, torch.inf)
    return Computed(
        value, torch.where(_spread(known, error), torch.minimum(error, _spread(size, error)), torch.inf), size
    )


def _norm(x: Tensor) -> Tensor:
    return norm_upper_bound_of_vectors(x.flatten(1), 2, 1)


def _spread(per_sample: Tensor, like: Tensor) -> Tensor:
    return per_sample.reshape(-1, *(1,) * (like.dim() - 1)).expand_as(like)
