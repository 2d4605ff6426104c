"""What a certificate method is: what it needs, what it prepares once, and the radii that it gives a batch.

Glossary:

- *question*: a network with all that is computed of it once, such as the constants of all pairs of classes.
- *samples*: a batch, and what is known of it so far; every step of a method adds to that.
- *step*: one visit of a method; its place in a plan is its cost, the cheapest first.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.problem import Problem, outputs_of
from curvcert.boxes import Box
from curvcert.certificates.constants import PairConstants, Tables
from curvcert.certificates.pointwise import Pointwise
from curvcert.network import Network
from curvcert.rounding import inflate

WORTHWHILE = 1e-3
"""A method runs where it could gain more than this, relative to the radius that is known."""

_CHECKERS_ROOM = 2.0**-28


@dataclass(frozen=True, eq=False)
class Question:
    """What is asked of a network, and what was computed of it once.

    Attributes:
        network: the classifier.
        p: the norm of the radii.
        epsilons: the radii to decide; none for the largest that are found.
        constants: Lipschitz and curvature constants of all pairs of classes, as far as the methods need them.
        deviations: what each pair's margin loses for the module's own departure from the network.
        pairs: the problem of all pairs, whose norms are shared.
        alone: whether one method was asked for by its name, rather than the best of all.
        elsewhere: asks for the best of all in another norm, of the methods that are wanted, and plans the answer.
    """

    network: Network
    p: float
    epsilons: tuple[float, ...]
    constants: PairConstants
    deviations: Tensor
    pairs: Problem
    alone: bool
    elsewhere: "Elsewhere"

    @property
    def outputs(self) -> Problem:
        """The problem of all classes, each a scalar, with the same norms."""
        return outputs_of(self.pairs, self.network)


class Samples:
    """A batch, and what is known of it so far.

    `L` and `K` are the constants in force for every class beside the label, (batch, classes), K from above and `below`
    from below; `anchored` says whether both have become those of the samples themselves.  `witnessed` is how far from
    each sample another class was found: no radius from there on can be decided.  `given_up` marks those of which no
    dearer method is expected to decide a radius that is still open.  `radii`
    holds what each way gave every class, inf at the label, NaN
    where it was not run; `names` what proved it, in words, `proven_by` the methods' names.  `box` is what the balls are
    cut with, None for whole balls: what holds in a ball holds in its cut, and a radius beyond the farthest corner is
    infinite.
    """

    def __init__(
        self, question: Question, x: Tensor, points: Pointwise, box: Box | None = None, witnessed: Tensor | None = None
    ) -> None:
        """Start with the constants of the question, and no radius."""
        self.question, self.x, self.points, self.box = question, x, points, box
        away = torch.full_like(points.margin[:, 0], torch.inf) if box is None else box.farthest(x, question.p)
        # A little beyond the corner, for a checker with a rounding of its own.
        self.farthest = inflate(away, _CHECKERS_ROOM)
        tables = question.constants
        self.L, self.K, self.below = (table[points.label] for table in (tables.L, tables.above, tables.above.T))
        self.anchored = False
        self.witnessed = torch.full_like(away, torch.inf) if witnessed is None else witnessed
        self.given_up = torch.zeros_like(points.correct)
        self.radii: dict[str, Tensor] = {}
        self.names: dict[str, str] = {}
        self.proven_by: dict[str, tuple[str, ...]] = {}

    def add(self, way: str, radii: Tensor, name: str = "", proven_by: tuple[str, ...] = ()) -> None:
        """Note the radii of every class by one way; those that are NaN throughout were not run.

        Without a name, and methods that it stands for, both are the way's.
        """
        radii = torch.where(radii >= self.farthest[:, None], torch.inf, radii)
        radii = radii.scatter(1, self.points.label[:, None], torch.inf)
        others = torch.ones_like(radii, dtype=torch.bool).scatter(1, self.points.label[:, None], False)
        if not bool(radii[others].isnan().all()):
            self.radii[way], self.names[way], self.proven_by[way] = radii, name or way, proven_by or (way,)

    @property
    def none(self) -> Tensor:
        """No radius of any class: NaN beside inf at the label."""
        return torch.full_like(self.points.margin, torch.nan).scatter(1, self.points.label[:, None], torch.inf)

    @property
    def known(self) -> Tensor:
        """The largest radius of every class, (batch, classes); 0 where none is known."""
        found = [value.nan_to_num(nan=0.0, posinf=torch.inf) for value in self.radii.values()]
        return torch.stack(found).amax(dim=0) if found else torch.zeros_like(self.points.margin)

    @property
    def limit(self) -> Tensor:
        """The linear limit min m / g of every sample, which no bound from the gradient at x exceeds."""
        return (self.points.margin / self.points.gradient_norm.clamp(min=1e-300)).amin(dim=1)

    @property
    def unbounded(self) -> Tensor:
        """The samples with an infinite radius already."""
        return self.points.correct & self.known.amin(dim=1).isinf()

    @property
    def open_(self) -> Tensor:
        """The samples whose radius could still be of use, whatever bounds it."""
        best = self.known.amin(dim=1)
        wanted = torch.ones_like(self.points.correct)
        if self.question.epsilons:
            wanted = torch.stack([(best < eps) & (eps < self.witnessed) for eps in self.question.epsilons]).any(dim=0)
        return wanted & self.points.correct & best.isfinite() & ~self.given_up

    @property
    def undecided(self) -> Tensor:
        """The samples that a bound from the gradient at x could serve: all correct ones, unless radii are given."""
        if not self.question.epsilons:
            return self.points.correct
        best, limit = self.known.amin(dim=1), self.limit
        useful = torch.zeros_like(self.points.correct)
        for eps in self.question.epsilons:
            useful |= (best < eps) & (limit >= eps) & (eps < self.witnessed)
        return useful & self.points.correct & ~self.given_up

    @property
    def could_gain(self) -> Tensor:
        """The samples to which a bound from the gradient at x could add enough to be worth its time."""
        return self.limit > self.known.amin(dim=1) * (1 + WORTHWHILE)


class AbstractStep(ABC):
    """One visit of a method to a batch: `way` is what its radii are listed as, the least `cost` goes first."""

    way: str
    cost: int
    needs_gradients: bool = True

    @abstractmethod
    def run(self, samples: Samples) -> None:
        """Add radii to what is known."""


class AbstractCertificateMethod(ABC):
    """A way to certified radii.

    `name` is what it is asked for by, `way` what its radii are listed as, `in_auto` whether it is part of "auto", and
    `at_home_everywhere` whether no other norm serves it better than the one that is asked for, `checkable` whether the
    independent checker has an engine for it, `dear` whether it does more for each sample than to look up constants or
    to compute anchored ones.
    """

    name: str
    way: str
    in_auto: bool = True
    at_home_everywhere: bool = False
    checkable: bool = True
    dear: bool = True

    def reason_to_skip(self, problem: Problem) -> str | None:
        """Say what the method needs and the pairs of classes of a network do not have, or None."""
        return None

    @property
    @abstractmethod
    def tables(self) -> Tables:
        """The constants that it needs."""

    @abstractmethod
    def steps(self, question: Question) -> Sequence[AbstractStep]:
        """Prepare its visits, once for all batches; none where "auto" does better without.

        Raises:
            UnsupportedModule, UnsupportedActivation, InvalidInput: where it does not apply, with the reason.
        """


def reason_without_curvature(problem: Problem) -> str | None:
    """Say that a method needs a curvature, or None for networks that have one."""
    return None if problem.network.is_smooth else "needs activations with a curvature"


Wanted = Callable[[AbstractCertificateMethod], bool]
Elsewhere = Callable[[float, tuple[float, ...], Wanted], tuple[Question, Sequence[AbstractStep]]]
