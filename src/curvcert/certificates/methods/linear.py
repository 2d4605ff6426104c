"""The linear certificate: linear relaxation over a ball, whose radius is searched for with all pairs at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from curvcert.bounds.lipschitz.analyses import unit_facts
from curvcert.certificates.constants import Tables
from curvcert.certificates.methods.balls import Centres, decided_radii, largest_radii, parts_of
from curvcert.certificates.methods.method import AbstractCertificateMethod, AbstractStep, Question, Samples
from curvcert.errors import UnsupportedModule
from curvcert.memory import spare_elements
from curvcert.propagation.analysis import covector_numbers
from curvcert.propagation.reach import NetworkFacts

AUTO_NUMBERS = 2**21
"""Covectors of all layers of one sample hold at most this many numbers where "auto" takes linear relaxation along."""

_CHUNK_ELEMENTS = 2**22


@final
@dataclass(frozen=True)
class LinearRadius(AbstractCertificateMethod):
    """Linear relaxation of all layers over the ball; kinks are welcome."""

    name: str = "linear"
    way: str = "linear"
    in_auto: bool = True
    at_home_everywhere: bool = True

    @property
    def tables(self) -> Tables:
        """It needs no constants."""
        return Tables()

    def steps(self, question: Question) -> Sequence[AbstractStep]:
        """Prepare the norms of the layers; leave wide networks to the other methods where the best is asked for.

        One ball is cheap, and a search for the largest is not: where radii are to be decided it goes before constants
        with the sample fixed.
        """
        facts = shared_facts(question)
        require_small(question, facts, AUTO_NUMBERS)
        return [_ByRelaxation(facts, cost=35 if question.epsilons else 70)]


def shared_facts(question: Question) -> NetworkFacts:
    """Return what bounds over balls need of the maps, once for all methods that use it."""
    return unit_facts(question.outputs).maps


def require_small(question: Question, facts: NetworkFacts, most: int) -> None:
    """Leave wide networks to the other methods where the best of all is asked for.

    Raises:
        UnsupportedModule: if the covectors of all layers hold more numbers.
    """
    numbers = covector_numbers(facts)
    if not question.alone and numbers > most:
        raise UnsupportedModule(f"its covectors are {numbers:.2g} numbers (over {most}); ask for it by name")


@final
@dataclass(frozen=True, eq=False)
class _ByRelaxation(AbstractStep):
    facts: NetworkFacts
    cost: int
    way: str = "linear"
    needs_gradients: bool = False

    def run(self, samples: Samples) -> None:
        question, known = samples.question, samples.known
        found = torch.where(samples.unbounded[:, None], known, torch.nan)
        size = max(1, spare_elements(samples.x.device, _CHUNK_ELEMENTS) // self._numbers)
        for index in parts_of(samples.open_, size):
            centres = Centres.about(self.facts, samples, index)
            if question.epsilons:
                found[index] = decided_radii(centres, question.epsilons, centres.relaxed)
            else:
                found[index] = largest_radii(centres, centres.relaxed)
        if not question.alone:
            # What it does not raise it is not named for.
            found = torch.where(found > known, found, torch.nan)
        samples.add("linear", found)

    @property
    def _numbers(self) -> int:
        network = self.facts.network
        return network.outputs * self.facts.numbers_behind(len(network.nodes) - 1)
