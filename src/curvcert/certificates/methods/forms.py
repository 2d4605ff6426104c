r"""Radii by quadratic forms about each sample, one sample at a time: for layers too wide for Taylor models.

A form for all rivals together is made first, since what most of them need is little; those that it leaves open have
forms of their own, the nearest first.  Every radius that is tried is a proof of its own, or none.

*Approach.*  Let v be the direction of a rival's gradient, and :math:`a = v \cdot d`.  What a form about x loses in
other directions matters least where a is small, as the rival is lower there.  So it proves a part of the ball,
:math:`a \le a_1`, with the slope along v less by any :math:`\nu > 0`:

.. math:: \nu a_1 = m - \max_{|d| \le t} (g - \nu v) \cdot d + \tfrac12 d^T H d - \ldots

The rest of the ball lies within :math:`s = \sqrt{t^2 - a_1^2}` of :math:`c = x + a_1 v`, where an expansion about c
loses far less; and so on.  With :math:`e = d - a_1 v` it is :math:`|e|^2 + 2 a_1 v \cdot e \le s^2`, and so for any
multiplier :math:`\Lambda_1 \ge 0` of that, and :math:`\Lambda \ge \Lambda_1` of both,

.. math:: g_c \cdot e + \tfrac12 e^T H e \le \tfrac12 \Lambda s^2
          + \tfrac12 \|g_c - \Lambda_1 a_1 v\|^2_{(\Lambda I - H)^{-1}}.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.budget import checkpoint
from curvcert.certificates.methods.balls import Centres, largest_radii
from curvcert.certificates.methods.method import AbstractStep, Samples
from curvcert.certificates.radii import decided
from curvcert.network.evaluation import Evaluation, evaluate_with_error
from curvcert.propagation.expansion import Expansion
from curvcert.propagation.expansion_remainders import Ball
from curvcert.propagation.quadratic_forms import Form, Functions
from curvcert.propagation.reach import NetworkFacts
from curvcert.rounding import UNIT_ROUNDOFF, gamma, inflate, lengths

_STAGES = 4
"""Expansions along a gradient, at most."""

_NEAR = 1.25
"""A rival is near where its linear limit is less than so many radii."""

_PROGRESS = 0.15
"""Each proves at least this share of what is left of the way."""

_HELD = (0.0, 0.5, 0.8, 1.0)
"""Multipliers of the whole ball's radius that are tried, as shares of the slope over the radius."""

_CUTS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)
"""By how much the slope along the gradient is lessened, as shares of it."""

_ROOM = 2.0**-36
"""Room for the rounding of directions, relatively: thousands of times more than it takes."""


class Rivals:
    """The classes beside the label of one sample, as functions that rise above it or do not."""

    def __init__(self, facts: NetworkFacts, centre: Centres, losses: Tensor) -> None:
        """Expand the network about a single sample; `losses` are what margins lose for the module's deviation."""
        self.margin = centre.margin[0]
        self.others = self.margin.isfinite().nonzero().flatten().tolist()
        self._facts, self._centre, self._losses = facts, centre, losses
        self._expansion = Expansion(facts, centre.evaluation)
        self._functions = Functions(self._expansion, centre.rows[0])
        steep = torch.linalg.vector_norm(self._functions.gradient, dim=1)
        self.limits = torch.where(self.margin.isfinite(), self.margin / steep.clamp(min=1e-300), torch.inf)
        """No bound from here reaches further, (classes,)."""

    def decided(self, radii: Sequence[float]) -> Tensor:
        """Return the largest of the radii, in ascending order, within which each rival is proven to stay below."""
        radii = [r for r in radii if r < float(self.limits.min())]
        reached: dict[int, float] = {}
        open_ = sorted(self.others, key=lambda k: float(self.limits[k]))
        largest: Ball | None = None
        made: list[_Made] = []
        for r in reversed(radii):
            checkpoint()
            ball = Ball(self._expansion, r, larger=largest)
            largest = ball if largest is None else largest
            # What forms over larger balls say of this one costs next to nothing.
            for form in made:
                open_ = self._left(open_, form, ball)
            open_ = self._proven(open_, ball, made)
            for k in self.others:
                if k not in open_:
                    reached.setdefault(k, r)
            if not open_:
                break
        return self.margin.new_tensor([reached.get(k, 0.0) for k in range(len(self.margin))])

    def _proven(self, rivals: Sequence[int], ball: Ball, made: list["_Made"]) -> list[int]:
        """Prove what new forms can over a ball, and return the rivals that are left, the nearest first.

        A rival that is near decides most about the sample, and what a form for all says of it is seldom enough.
        """
        left = list(rivals)
        if left and float(self.limits[left[0]]) < _NEAR * ball.t:
            if not self._proven_alone(left[0], ball, made):
                return left
            left = left[1:]
        while len(left) > 1:
            made.append(_Made(tuple(left), Form(self._functions, left, ball)))
            before, left = len(left), self._left(left, made[-1], ball)
            if 2 * len(left) > before:
                break
        while left and self._proven_alone(left[0], ball, made):
            left = left[1:]
        return left

    def _proven_alone(self, rival: int, ball: Ball, made: list["_Made"]) -> bool:
        """Whether a form for one rival proves a ball, or expansions along its gradient do."""
        made.append(_Made((rival,), Form(self._functions, [rival], ball)))
        return not self._left([rival], made[-1], ball) or self._approached(rival, made[-1].form, ball)

    def _left(self, rivals: Sequence[int], made: "_Made", ball: Ball) -> list[int]:
        """Return the rivals that a form does not prove over a ball."""
        asked = [k for k in rivals if k in made.rivals]
        if not asked:
            return list(rivals)
        within = (made.form.rises(asked, [ball])[:, 0] < self.margin[asked]).tolist()
        proven = {k for k, below in zip(asked, within, strict=True) if below}
        return [k for k in rivals if k not in proven]

    def _approached(self, rival: int, form: Form, ball: Ball) -> bool:
        """Whether expansions further and further along a rival's gradient prove all of a ball."""
        x, t, rows = self._centre.x, ball.t, self._centre.rows[:, rival]
        g = self._functions.gradient[rival]
        v = g / torch.linalg.vector_norm(g).clamp(min=1e-300)
        function, margin, at, off = rival, self.margin[rival], 0.0, 0.0
        for _ in range(_STAGES):
            further = _proven_up_to(form, function, ball, v, at, t, margin, off)
            if further >= t:
                return True
            if not further >= at + _PROGRESS * (t - at):
                return False
            at = further
            # Nothing of the cut ball is further from the new point, which is rounded: far from 0 by more than v is.
            point = x + at * v.reshape(x.shape)
            off = float(((lengths(point) + at) * (2 * UNIT_ROUNDOFF)).bound)
            reach = math.sqrt(t * t - at * at) * (1 + _ROOM) + _ROOM * t + 2 * off
            evaluation = evaluate_with_error(self._facts.network, point, self._facts.norms)
            margin = self._margin_at(evaluation, rows)
            if float(margin) <= 0:
                return False
            expansion = Expansion(self._facts, evaluation)
            ball = Ball(expansion, reach)
            form, function = Form(Functions(expansion, rows), [0], ball), 0
        return False

    def _margin_at(self, evaluation: Evaluation, rows: Tensor) -> Tensor:
        """Return the margin at a point, rounded down."""
        row, last = rows.flatten(), evaluation.output
        gap = -(row * last.value.flatten()).sum()
        lost = (row.abs() * last.error.flatten()).sum() + self._losses[int(row.argmax())]
        return gap - inflate(
            lost + 4 * UNIT_ROUNDOFF * (row.abs() * last.value.flatten().abs()).sum(), gamma(len(row) + 8)
        )

    def risen(self, radius: float, largest: Ball) -> Tensor:
        """Bound how far each rival rises over a ball, (classes,); 0 for the label."""
        found = torch.zeros_like(self.margin)
        ball, some = (
            Ball(self._expansion, radius, larger=largest),
            sorted(self.others, key=lambda k: float(self.limits[k])),
        )
        found[some] = Form(self._functions, some, ball).rises(some, [ball])[:, 0]
        for k in some:
            if bool(found[k] >= self.margin[k]) and radius < float(self.limits[k]):
                found[k] = torch.minimum(found[k], Form(self._functions, [k], ball).rises([k], [ball])[0, 0])
        return found

    def ball(self, radius: float) -> Ball:
        """Return what is left out over a ball."""
        checkpoint()
        return Ball(self._expansion, radius)


@dataclass(frozen=True, eq=False)
class _Made:
    """A form, and the rivals that it serves."""

    rivals: tuple[int, ...]
    form: Form


def _proven_up_to(
    form: Form, function: int, ball: Ball, v: Tensor, at: float, t: float, margin: Tensor, astray: float
) -> float:
    """Return how far along v a cut ball is proven from the point at `at`; inf where that is all of it.

    The point may be `astray` by so much: with multipliers of no more than |g| for the cut, and |g| / t for the ball.
    """
    g = form.functions.gradient[function]
    steep = float((g * v).sum())
    if steep <= 0:
        return -math.inf
    held = torch.tensor([0.0] if at == 0 else [share * steep / t for share in _HELD], dtype=torch.float64)
    cuts = torch.tensor(_CUTS, dtype=torch.float64) * steep
    multiplier, cut = (each.flatten().to(g) for each in torch.meshgrid(held, cuts, indexing="ij"))
    slopes = g - (multiplier * at + cut)[:, None] * v
    # Multipliers that are rounded stand for themselves, slopes a little less exactly: that is a linear part of its own.
    reach = torch.tensor([ball.t], dtype=torch.float64, device=g.device)
    value = form.form.largest(slopes, reach, multiplier[:, None] * (1 + _ROOM))[:, 0]
    off = (_ROOM * (1 + at / t) * ball.t + 4 * astray) * torch.linalg.vector_norm(g)
    left = margin - value - form.fixed(ball)[function] - off
    if bool((left[cut == 0] > 0).any()):
        return math.inf
    found = torch.where(cut > 0, left / cut.clamp(min=1e-300), -torch.inf)
    return at + float(found.max()) * (1 - _ROOM)


@dataclass(frozen=True, eq=False)
class ByForms(AbstractStep):
    """The visit of the quadratic certificate to networks with wide layers."""

    facts: NetworkFacts
    cost: int = 95
    way: str = "quadratic"

    def run(self, samples: Samples) -> None:
        """Decide the radii that are asked for, or search for the largest."""
        question, known = samples.question, samples.known
        found = torch.where(samples.unbounded[:, None], known, torch.nan)
        wanted = samples.undecided if question.epsilons else samples.open_ & samples.could_gain
        for index in wanted.nonzero().flatten().split(1):
            centre = Centres.about(self.facts, samples, index)
            rivals = Rivals(self.facts, centre, question.deviations[samples.points.label[index[0]]])
            if question.epsilons:
                beyond, limit = float(centre.known[0]), float(samples.witnessed[index[0]])
                radii = [decided(eps) for eps in sorted(question.epsilons) if beyond < eps < limit]
                found[index] = rivals.decided(radii)[None]
            else:
                found[index] = self._searched(rivals, centre)
        if not question.alone:
            # What it does not raise it is not named for.
            found = torch.where(found > known, found, torch.nan)
        samples.add("quadratic", found)

    def _searched(self, rivals: Rivals, centre: Centres) -> Tensor:
        limit = float(rivals.limits.min())
        if not 0 < limit < float("inf"):
            return torch.zeros_like(centre.margin)
        largest = rivals.ball(limit)

        def rises(index: Tensor, radius: Tensor) -> Tensor:
            if float(radius) >= limit:
                return torch.full_like(centre.margin, torch.inf)
            return rivals.risen(float(radius), largest)[None]

        return largest_radii(centre, rises)
