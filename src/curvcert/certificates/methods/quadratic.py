"""The quadratic certificate: networks to second order over a ball, with a proof of what that leaves out.

Small networks have Taylor models of order 2, whose radius is searched for with all pairs at once; where layers are too
wide for that, each sample has quadratic forms in l2 (`forms.py`).

Models are dear to make and quick to ask.  They are made once, a little beyond the radius that is known or that linear
relaxation proves, and lose nothing within a fifth of it; what they say of any radius is a proof.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from curvcert.activations.base import no_curvature
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.certificates.constants import Tables
from curvcert.certificates.methods.balls import PRECISION, Centres, Rises, decided_radii, largest_radii, parts_of
from curvcert.certificates.methods.forms import ByForms
from curvcert.certificates.methods.linear import require_small, shared_facts
from curvcert.certificates.methods.method import (
    AbstractCertificateMethod,
    AbstractStep,
    Question,
    Samples,
    reason_without_curvature,
)
from curvcert.errors import UnsupportedModule
from curvcert.memory import spare_elements
from curvcert.network import Network
from curvcert.network.nodes import ElementwiseNode, MaxPoolNode
from curvcert.propagation.analysis import covector_numbers
from curvcert.propagation.coordinates import Coordinates, coordinates
from curvcert.propagation.optimised import Optimised
from curvcert.propagation.reach import NetworkFacts
from curvcert.propagation.taylor import TaylorModels

AUTO_NUMBERS = 2**21
"""Covectors of all layers of one sample hold at most this many numbers where "auto" makes models."""

BEYOND = 1.15
"""How far beyond linear relaxation's radius, or the one that is known, models are made."""

MOST_GAIN = 2.5
"""Models are not made where linear relaxation does not prove the radius over this: they never gained as much."""

_ROUGH = 0.1
"""How near linear relaxation's radius needs to be known."""

_NEARLY = 1.15
"""Where models use up less than so much of a margin, numbers of its own may prove it."""

_BEYOND, _BEFORE = (1.06, 1.03), 2.0**-5
"""How far beyond what is proven such numbers are looked for, in turn; and how near that is known until the last."""

_ROUNDS, _FURTHER = 5, 1.3
"""How often models are made for one search at most, and how much further out each time."""

_CHUNK_ELEMENTS, _MATRICES = 2**24, 18
"""Numbers that models may take on a processor, and matrices that each output keeps."""


@final
@dataclass(frozen=True)
class QuadraticRadius(AbstractCertificateMethod):
    """Taylor models of order 2 over the ball; every activation needs a second derivative that is bounded."""

    name: str = "quadratic"
    way: str = "quadratic"
    in_auto: bool = True
    checkable: bool = False
    at_home_everywhere: bool = True

    def reason_to_skip(self, problem: Problem) -> str | None:
        """Apply to smooth networks."""
        return reason_without_curvature(problem)

    @property
    def tables(self) -> Tables:
        """It needs no constants."""
        return Tables()

    def steps(self, question: Question) -> Sequence[AbstractStep]:
        """Refuse kinks; make models where they are small enough, and in l2 forms of each sample elsewhere.

        "auto" makes forms on an accelerator alone, and of radii that are to be decided.
        """
        network = question.network
        require_smooth(network)
        reason, facts = Coordinates.reason_to_skip(network), shared_facts(question)
        if question.p != 2 or (reason is None and (question.alone or covector_numbers(facts) <= AUTO_NUMBERS)):
            if reason is not None:
                raise UnsupportedModule(reason)
            require_small(question, facts, AUTO_NUMBERS)
            return [_ByModels(facts, cost=38 if question.epsilons else 80)]
        if not question.alone and (network.device.type == "cpu" or not question.epsilons):
            raise UnsupportedModule("forms of each sample take seconds on a processor; ask for it by name")
        return [ByForms(facts)]


def require_smooth(network: Network) -> None:
    """Raise where an activation has no second derivative, or its curvature was not declared.

    Raises:
        UnsupportedActivation, UnsupportedModule: naming it.
    """
    for node in network.nodes:
        if isinstance(node, MaxPoolNode):
            raise UnsupportedModule(f"{node.name}: max-pooling has kinks, and no second derivative.")
        if isinstance(node, ElementwiseNode) and node.activation.curvature is None:
            raise no_curvature(node.activation)


@final
@dataclass(frozen=True, eq=False)
class _ByModels(AbstractStep):
    facts: NetworkFacts
    cost: int
    way: str = "quadratic"
    needs_gradients: bool = False

    def run(self, samples: Samples) -> None:
        question, known = samples.question, samples.known
        found = torch.where(samples.unbounded[:, None], known, torch.nan)
        size = max(1, spare_elements(samples.x.device, _CHUNK_ELEMENTS) // self._numbers)
        for index in parts_of(samples.open_, size):
            centres = Centres.about(self.facts, samples, index)
            found[index] = self._decided(centres, question) if question.epsilons else self._searched(centres, question)
        if not question.alone:
            # What it does not raise it is not named for.
            found = torch.where(found > known, found, torch.nan)
        samples.add("quadratic", found)
        if question.epsilons and not question.alone and question.p != 2:
            # Beside l2 no other method has been seen to prove what models at that very radius do not.
            samples.given_up |= samples.open_

    def _decided(self, centres: Centres, question: Question) -> Tensor:
        """Make models at every radius that is to be decided, where linear relaxation leaves a hope."""

        def rises(index: Tensor, radius: Tensor) -> Tensor:
            rise = torch.full_like(centres.margin[index], torch.inf)
            hope = self._hope(centres.part(index), radius).nonzero().flatten()
            if len(hope):
                part = centres.part(index[hope])
                rise[hope] = _models(part, radius[hope], part.margin).rise(radius[hope])
            share = centres.used_up(rise, index).amax(dim=1)
            nearly = ((share >= 1) & (share < _NEARLY)).nonzero().flatten()
            if len(nearly) and Optimised.apply_to(self.facts.network, self.facts.p):
                part, r = centres.part(index[nearly]), radius[nearly]
                rise[nearly] = Optimised(_models(part, r, part.margin), r, part.margin).rise(r)
            return rise

        return decided_radii(centres, question.epsilons, rises)

    def _searched(self, centres: Centres, question: Question) -> Tensor:
        """Make models once, and search with them."""
        found = torch.zeros_like(centres.margin)
        hope = torch.ones_like(centres.known) > 0 if question.alone else self._hope(centres, centres.guess)
        index = hope.nonzero().flatten()
        if len(index) == 0:
            return found
        part = centres.part(index)
        if question.alone:
            near = largest_radii(part, part.relaxed, _ROUGH).amin(dim=1)
            part = replace(part, guess=torch.where(near > 0, near, part.guess))
        found[index] = _largest(part)
        return found

    def _hope(self, centres: Centres, radius: Tensor) -> Tensor:
        """Whether linear relaxation comes near enough."""
        everything = torch.arange(len(radius), device=radius.device)
        return (centres.used_up(centres.relaxed(everything, radius / MOST_GAIN), everything) < 1).all(dim=1)

    @property
    def _numbers(self) -> int:
        network = self.facts.network
        return covector_numbers(self.facts) + _MATRICES * network.outputs * coordinates(network) ** 2


def _largest(centres: Centres) -> Tensor:
    """Make models and search with them; where they prove all that they serve, again with models further out."""
    found, radius = torch.zeros_like(centres.margin), BEYOND * centres.guess
    open_ = torch.arange(len(radius), device=radius.device)
    for _ in range(_ROUNDS):
        part, near = centres.part(open_), radius[open_]
        models = _models(part, near)
        part = replace(part, farthest=torch.minimum(part.farthest, models.most))
        found[open_] = torch.maximum(found[open_], _with_own_numbers(part, models, _rises(models, near)))
        reached = (found[open_].amin(dim=1) >= models.most) & (models.most < centres.farthest[open_])
        open_ = open_[reached]
        if len(open_) == 0:
            break
        radius[open_] = _FURTHER * models.most[reached]
        centres = replace(centres, guess=centres.guess.index_put((open_,), radius[open_]))
    return found


def _with_own_numbers(centres: Centres, models: TaylorModels, rises: Rises) -> Tensor:
    """Search with models, and then with numbers of their own for what is used up first."""
    if not Optimised.apply_to(centres.facts.network, centres.facts.p):
        return largest_radii(centres, rises)
    found, optimised = largest_radii(centres, rises, _BEFORE), None
    for beyond in _BEYOND:
        near = found.amin(dim=1)
        near = torch.where(near > 0, near, centres.guess)
        optimised = Optimised(models, torch.minimum(beyond * near, models.most), centres.margin, optimised)
        closer = replace(centres, known=torch.zeros_like(near), guess=near)
        found = torch.maximum(
            found, largest_radii(closer, _rises(optimised, near), PRECISION if beyond == _BEYOND[-1] else _BEFORE)
        )
    return found


def _rises(models: TaylorModels | Optimised, near: Tensor) -> Rises:
    """Return what models say of some samples, whose radii take the place of those that they were asked at."""
    return lambda index, radius: models.rise(near.index_put((index,), radius))[index]


def _models(centres: Centres, radius: Tensor, enough: Tensor | None = None) -> TaylorModels:
    return TaylorModels(centres.facts, centres.evaluation, centres.rows, radius, enough)
