"""A network's constants while it trains: differentiable estimates of L and K, warm-started from step to step."""

from collections.abc import Mapping
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from curvcert.bounds.curvature.compositional import compositional_bound
from curvcert.bounds.curvature.unrolled_sizes import unrolled_sizes_bound
from curvcert.bounds.lipschitz.liplt import liplt_bound
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Global
from curvcert.losses.chain_constants import BlockBound, ChainConstants, as_chain
from curvcert.losses.contraction_constants import ContractionConstants, as_sll_stack
from curvcert.network import LiveNetwork, Network
from curvcert.operators.estimates import NormEstimates

CONSTANTS = ("lipschitz", "curvature", "pair_lipschitz", "pair_curvature")


class StepConstants(Protocol):
    """The constants of the parameters as they are at one step, each computed when it is first asked for.

    They are estimates: right for training, never for a certificate.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's parameters."""

    @property
    def lipschitz(self) -> Tensor:
        """The l2 Lipschitz constant of the whole network, by LipLT."""

    @property
    def curvature(self) -> Tensor:
        """The l2 curvature of the whole network, by the paper's Algorithm 1."""

    @property
    def pair_lipschitz(self) -> Tensor:
        """The Lipschitz constant of every f_i - f_j, a symmetric (classes, classes) table with zeros inside."""

    @property
    def pair_curvature(self) -> Tensor:
        """The curvature of every f_i - f_j by the unrolled bound, a symmetric (classes, classes) table."""


class GeneralStep:
    """The constants of any network at one step, by the recursions of `bounds`."""

    def __init__(self, network: Network, norms: Mapping[str, NormEstimates], block_bound: str) -> None:
        """Read constants of a live network; each has norms of its own, which resume in the order it asks for them."""
        self._norms, self._block_bounds = norms, [block_bound]
        self._whole = Problem(network, 2, 2, Global())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's parameters; the constants themselves are float64."""
        return self._whole.network.source_dtype

    @cached_property
    def _pairs(self) -> Problem:
        return Problem(self._whole.network.all_differences(), 2, 2, Global(), scalars=True)

    @cached_property
    def lipschitz(self) -> Tensor:
        """The l2 Lipschitz constant of the whole network, by LipLT."""
        return liplt_bound(self._whole, self._norms["lipschitz"]).value

    @cached_property
    def curvature(self) -> Tensor:
        """The l2 curvature of the whole network, by the paper's Algorithm 1."""
        return compositional_bound(self._whole, self._norms["curvature"], self._block_bounds).value

    @cached_property
    def pair_lipschitz(self) -> Tensor:
        """The Lipschitz constant of every f_i - f_j, a symmetric (classes, classes) table with zeros inside."""
        return self._table(liplt_bound(self._pairs, self._norms["pair_lipschitz"]).value)

    @cached_property
    def pair_curvature(self) -> Tensor:
        """The curvature of every f_i - f_j by the unrolled bound, a symmetric (classes, classes) table."""
        return self._table(unrolled_sizes_bound(self._pairs, self._norms["pair_curvature"], self._block_bounds).value)

    def _table(self, values: Tensor) -> Tensor:
        n = self._whole.network.outputs
        i, j = torch.triu_indices(n, n, offset=1, device=values.device)
        table = values.new_zeros(n, n).index_put((i, j), values)
        return table + table.T


class GeneralConstants(nn.Module):
    """Warm-started estimates of the constants of any network that `curvcert.trace` knows."""

    def __init__(self, network: LiveNetwork, block_bound: BlockBound, steps: int) -> None:
        """Take a network under training."""
        super().__init__()
        self._network, self._block_bound = network, block_bound
        self.norms = nn.ModuleDict({name: NormEstimates(steps) for name in CONSTANTS})

    def _estimates(self) -> dict[str, NormEstimates]:
        return {name: norms for name, norms in self.norms.items() if isinstance(norms, NormEstimates)}

    def restart(self) -> None:
        """Put all singular vectors back to their fixed start."""
        for norms in self._estimates().values():
            norms.restart()

    def forward(self) -> GeneralStep:
        """Return the constants of the parameters as they are now."""
        for norms in self._estimates().values():
            norms.start_step()
        return GeneralStep(self._network(), self._estimates(), self._block_bound)


class Constants(nn.Module):
    """Estimates of a module's constants, for losses: call it once a step, read what the loss needs.

    It holds the singular vectors that norms resume from (buffers, so that a checkpoint keeps them) and not the module.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Tanh())
    >>> _ = model[0].weight.data.fill_(3.0)
    >>> constants = Constants(model, torch.zeros(1, 1))
    >>> now = constants()
    >>> now.lipschitz.item(), round(now.curvature.item(), 6) == round(9 * 4 / 27**0.5, 6)
    (3.0, True)
    """

    def __init__(
        self, model: nn.Module, example_input: Tensor, block_bound: BlockBound = "product", steps: int = 1
    ) -> None:
        """Read a module's structure.

        Args:
            model: the module that is trained, of parts that `curvcert.trace` knows.
            example_input: gives the input's shape, batch dimension included.
            block_bound: how a layer's own curvature is bounded: "product" is cheap, "hadamard" tighter (in a plain
                chain for its dense layers; its convolutions keep the product).
            steps: power-iteration steps at each call.
        """
        super().__init__()
        self.source = _source(model, example_input, block_bound, steps)

    def restart(self) -> None:
        """Put all singular vectors back to their fixed start."""
        self.source.restart()

    def forward(self) -> StepConstants:
        """Return the constants of the parameters as they are now, differentiable in them."""
        now: StepConstants = self.source()
        return now


def _source(
    model: nn.Module, example_input: Tensor, block_bound: BlockBound, steps: int
) -> ChainConstants | ContractionConstants | GeneralConstants:
    """Return what estimates the constants fastest: plain chains and SLL stacks have rules of their own."""
    network = LiveNetwork(model, example_input)
    network().require_smooth()
    chain = as_chain(network()) if network.fixed else None
    if chain is not None:
        return ChainConstants(chain, block_bound, steps)
    stack = as_sll_stack(model, example_input)
    if stack is not None:
        return ContractionConstants(stack, block_bound, steps)
    return GeneralConstants(network, block_bound, steps)
