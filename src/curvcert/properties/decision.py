r"""Whether a network has a property: by bounds over boxes that are halved until they tell, and a search for a witness.

A case has no violating point in a box where one of its rows is false all over it: where :math:`c \cdot f` stays above
the row's limit, by bounds that account for rounding.  A witness counts where all rows of a case are proven to hold at
it, likewise.  What neither proves is unknown.  Numbers of a property are exact; boxes are rounded outward for a proof,
and a witness stands in the exact box, or, where no float does, its last digit covers a point that does.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, final

import torch
from torch import Tensor

from curvcert.bounds.outputs import Asked, bounded_over
from curvcert.bounds.types import Interval
from curvcert.errors import InvalidInput
from curvcert.network import Network
from curvcert.operators import NormBounds
from curvcert.propagation.reach import NetworkFacts
from curvcert.properties.property import Case, Property

Verdict = Literal["holds", "violated", "unknown"]

BOXES = 64
"""Boxes that are bounded at once."""

_MODELS_COST = 2.0**22
"""What Taylor models may cost, see `models_cost`."""

_CUBE = 0.5
"""Boxes whose shortest side is this share of the longest are bounded by models of the cube around them as well."""

_STARTS, _STEPS, _SHORT = 16, 40, 6
"""Starts and steps of the search for a witness before any box is halved, and its steps inside of the halves."""

_POINTS = 2**12
"""Points that climb at once, at most."""

_LARGEST = Fraction(2) ** 1000
"""Numbers of a property that are larger overflow on the way."""

_SHRINKING = 0.85
_TRIED = 4
"""Candidates for a witness that are tried of each search."""


@final
@dataclass(frozen=True, eq=False)
class Decision:
    """What was found of a property, and how.

    Attributes:
        verdict: "holds", "violated" or "unknown".
        reason: in words.
        boxes: how many boxes were bounded.
        witness: where it is violated, an input; or None.
        outputs: proven lower and upper values of the outputs there.
        in_own_arithmetic: whether the witness violates it too as computed in the dtype that the network came in.
    """

    verdict: Verdict
    reason: str
    boxes: int = 0
    witness: Tensor | None = None
    outputs: Interval | None = None
    in_own_arithmetic: bool = False


@torch.no_grad()
def decide(network: Network, wanted: Property, timeout: float = 60.0) -> Decision:
    """Decide a property of a network within about so many seconds.

    >>> from torch import nn
    >>> from curvcert.network import trace
    >>> from curvcert.properties.vnnlib import parsed
    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Tanh()).eval()
    >>> _ = model[0].weight.data.fill_(1.0), model[0].bias.data.zero_()
    >>> box = "(declare-const X_0 Real) (declare-const Y_0 Real) (assert (<= X_0 1)) (assert (>= X_0 0.5))"
    >>> net = trace(model, torch.zeros(1, 1))
    >>> decide(net, parsed(box + "(assert (<= Y_0 0.46))")).verdict
    'holds'
    >>> decide(net, parsed(box + "(assert (<= Y_0 0.47))")).verdict
    'violated'

    Raises:
        InvalidInput: if the property is about another number of inputs or outputs, or the time is none.
    """
    inputs = math.prod(network.in_shape)
    if (wanted.inputs, wanted.outputs) != (inputs, network.outputs):
        raise InvalidInput(
            f"The network has {inputs} inputs and {network.outputs} outputs, the property {wanted.inputs} and "
            f"{wanted.outputs}. Give the property of this network."
        )
    if not timeout > 0:
        raise InvalidInput(f"The timeout is a positive number of seconds, got {timeout}.")
    deadline, boxes = time.monotonic() + timeout, 0
    facts = NetworkFacts(network.for_bounds, math.inf, NormBounds())
    unknown: Decision | None = None
    for cases in _by_box(wanted.cases):
        found = _Search(facts, cases).decided(deadline)
        boxes += found.boxes
        if found.verdict == "violated":
            return found
        unknown = unknown or (found if found.verdict == "unknown" else None)
    if unknown is not None:
        return Decision("unknown", unknown.reason, boxes)
    return Decision("holds", f"proven over {boxes} {'box' if boxes == 1 else 'boxes'}", boxes)


def _by_box(cases: Sequence[Case]) -> list[list[Case]]:
    """Return the cases that are not empty, those of one box together."""
    groups: dict[tuple[object, object], list[Case]] = {}
    for case in cases:
        if not case.empty:
            groups.setdefault((case.lower, case.upper), []).append(case)
    return list(groups.values())


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows of all cases of a box, as floats: what rounding changed is bounded by `off`, `above` and `below`.

    Attributes:
        coefficients: (rows, outputs); `off` bounds what each is off.
        below: floats next to the limits, or equal to them, and `above`.
        strict: whether equality is no part of the row.
        case: the number of each row's case, of `cases`.
    """

    coefficients: Tensor
    off: Tensor
    below: Tensor
    above: Tensor
    strict: Tensor
    case: Tensor
    cases: int

    @staticmethod
    def of(cases: Sequence[Case], outputs: int, device: torch.device) -> "_Rows":
        rows = [row for case in cases for row in case.rows]
        coefficients = torch.zeros(len(rows), outputs, dtype=torch.float64)
        off = torch.zeros_like(coefficients)
        for k, row in enumerate(rows):
            for output, exact in row.coefficients.items():
                low, high = _around(exact)
                coefficients[k, output], off[k, output] = low, high - low
        ends = [_around(row.most) for row in rows]
        below, above = (torch.tensor([end[side] for end in ends], dtype=torch.float64) for side in (0, 1))
        number = torch.tensor([k for k, case in enumerate(cases) for _ in case.rows], dtype=torch.int64)
        strict = torch.tensor([row.strict for row in rows], dtype=torch.bool)
        sides = (below.to(device), above.to(device))
        return _Rows(coefficients.to(device), off.to(device), *sides, strict.to(device), number.to(device), len(cases))

    def of_cases(self, values: Tensor) -> Tensor:
        """Return the largest value of each case's rows, (batch, cases); -inf where it has none."""
        worst = torch.full((len(values), self.cases), -torch.inf, dtype=torch.float64, device=values.device)
        return worst.scatter_reduce(1, self.case.expand(len(values), -1), values, "amax")


class _Search:
    """What is known of the cases of one box."""

    def __init__(self, facts: NetworkFacts, cases: Sequence[Case]) -> None:
        network = facts.network
        self._facts, self._network, device = facts, network, network.device
        self._rows = _Rows.of(cases, network.outputs, device)
        ends = [(_around(low), _around(high)) for low, high in zip(cases[0].lower, cases[0].upper, strict=True)]
        sides = [[low[0] for low, _ in ends], [low[1] for low, _ in ends]]
        sides += [[high[0] for _, high in ends], [high[1] for _, high in ends]]
        shaped = [torch.tensor(side, dtype=torch.float64, device=device).reshape(network.in_shape) for side in sides]
        # Outward for proofs; inward for points, where floats are in the box.
        self._lower, self._inner_lower, self._inner_upper, self._upper = shaped
        self._generator = torch.Generator().manual_seed(0)

    def decided(self, deadline: float) -> Decision:
        """Bound the box, look for a witness, halve what is open; the deepest halves first."""
        boxes, open_ = 0, [(self._lower, self._upper)]
        while open_:
            part, open_ = open_[-BOXES:], open_[:-BOXES]
            lower, upper = (torch.stack(side) for side in zip(*part, strict=True))
            proven = self._proven(lower, upper)
            boxes += len(part)
            left = (~proven.all(dim=1)).nonzero().flatten()
            if len(left) == 0:
                continue
            lower, upper, doubtful = lower[left], upper[left], ~proven[left]
            found = self._witness(lower, upper, doubtful, first=boxes == 1)
            if found is not None:
                return Decision("violated", "proven at the witness", boxes, *found)
            if time.monotonic() > deadline:
                count = len(open_) + len(left)
                return Decision("unknown", f"the time is up, with {count} of {boxes + count} boxes open", boxes)
            halves = self._halved(lower, upper, doubtful)
            if halves is None:
                return Decision("unknown", "a box as small as floats are is neither proven nor violated", boxes)
            open_ += halves
        return Decision("holds", "proven", boxes)

    def _bounded(self, lower: Tensor, upper: Tensor, models: bool) -> tuple[Tensor, Tensor, Interval]:
        """Bound the rows over boxes from below and above, (batch, rows); and the outputs."""
        rows, n = self._rows, self._network.outputs
        middle = torch.minimum(torch.maximum(lower + (upper - lower) / 2, lower), upper)
        half = torch.maximum(upper - middle, middle - lower).flatten(1)
        cube = models and bool((half.amin(dim=1) >= _CUBE * half.amax(dim=1)).all())
        radius = half.amax(dim=1) * (1 + 2.0**-50) if cube else None
        C = torch.cat([rows.coefficients, torch.eye(n, dtype=torch.float64, device=middle.device)])[None]
        asked = Asked(middle, math.inf, radius, (lower, upper))
        found = bounded_over(self._facts, asked, C, torch.zeros_like(C[0, :, 0]), _MODELS_COST)
        outputs = Interval(found.lower[:, -n:], found.upper[:, -n:], found.assumes)
        size = torch.maximum(outputs.lower.abs(), outputs.upper.abs())
        off = torch.where(rows.off.any(), (size @ rows.off.T) * (1 + 2.0**-30), 0.0)
        low, high = found.lower[:, :-n] - off, found.upper[:, :-n] + off
        slack = torch.where(off > 0, 2.0**-51 * torch.maximum(low.abs(), high.abs()), 0.0)
        return low - slack, high + slack, outputs

    def _proven(self, lower: Tensor, upper: Tensor) -> Tensor:
        """Return in which boxes a case has no violating point: one of its rows is false all over, (batch, cases)."""
        rows = self._rows
        low, _, _ = self._bounded(lower, upper, models=True)
        false = torch.where(rows.strict, low >= rows.above, low > rows.above)
        return rows.of_cases(false.double()) > 0

    def _witness(
        self, lower: Tensor, upper: Tensor, doubtful: Tensor, first: bool
    ) -> tuple[Tensor, Interval, bool] | None:
        """Search the boxes for a point at which all rows of a case hold, provably."""
        box, case = doubtful.nonzero().unbind(dim=1)
        if not first:
            # One case of each box: that of the first doubt.
            case = doubtful.double().argmax(dim=1)
            box = torch.arange(len(case), device=case.device)
        times = max(1, min(_STARTS, _POINTS // len(box))) if first else 1
        box, case = box[:_POINTS].repeat(times), case[:_POINTS].repeat(times)
        centres = len(box) // times
        value, point = self._climbed(lower[box], upper[box], case, centres, _STEPS if first else _SHORT)
        for k in value.argsort()[:_TRIED].tolist():
            found = self._confirmed(point[k], int(case[k])) if value[k] <= 0 else None
            if found is not None:
                return found
        return None

    def _climbed(self, lower: Tensor, upper: Tensor, case: Tensor, centres: int, steps: int) -> tuple[Tensor, Tensor]:
        """Descend to where the rows of a case hold, so many times from a centre; return how far from it, and where."""
        share = torch.rand(lower.shape, dtype=torch.float64, generator=self._generator).to(lower)
        share[:centres] = 0.5
        point = self._inside(lower + share * (upper - lower))
        best, where, size = torch.full_like(case, torch.inf, dtype=torch.float64), point, 0.5
        for _ in range(steps + 1):
            value, gradient = self._away(point, case)
            better = value < best
            best = torch.where(better, value, best)
            where = torch.where(better.reshape(-1, *(1,) * (point.dim() - 1)), point, where)
            if bool((best < 0).any()):
                break
            moved = point - size * (upper - lower) * gradient.sign()
            point, size = self._inside(torch.minimum(torch.maximum(moved, lower), upper)), size * _SHRINKING
        return best, where

    def _inside(self, point: Tensor) -> Tensor:
        """Return points of the exact box, wherever a float is in it."""
        within = torch.minimum(torch.maximum(point, self._inner_lower), self._inner_upper)
        return torch.where(self._inner_lower <= self._inner_upper, within, point)

    def _away(self, point: Tensor, case: Tensor) -> tuple[Tensor, Tensor]:
        """Return how far the worst row of a case is from holding, as computed, and which way leads further."""
        rows = self._rows
        with torch.enable_grad():
            point = point.detach().requires_grad_()
            values = self._network(point).flatten(1) @ rows.coefficients.T - rows.below
            value = rows.of_cases(values).gather(1, case[:, None]).squeeze(1)
            if not value.requires_grad:
                return value.detach(), torch.zeros_like(point)
            (gradient,) = torch.autograd.grad(value.sum(), point, allow_unused=True)
        return value.detach(), torch.zeros_like(point) if gradient is None else gradient

    def _confirmed(self, point: Tensor, case: int) -> tuple[Tensor, Interval, bool] | None:
        """Return the point with its outputs, and whether float32, say, agrees, if all rows are proven to hold."""
        # Where no float is in the exact box, what is proven covers the last digit.
        beside = self._inner_lower > self._inner_upper
        lower = torch.where(beside | (point < self._inner_lower), self._lower, point)
        upper = torch.where(beside | (point > self._inner_upper), self._upper, point)
        _, high, outputs = self._bounded(lower[None], upper[None], models=False)
        rows, own = self._rows, self._rows.case == case
        true = torch.where(rows.strict, high[0] < rows.below, high[0] <= rows.below)
        if not bool(true[own].all()):
            return None
        values = self._network.in_source_dtype(point[None]).flatten(1).double() @ rows.coefficients.T
        return point, outputs, bool((values[0] <= rows.below)[own].all())

    def _halved(self, lower: Tensor, upper: Tensor, doubtful: Tensor) -> list[tuple[Tensor, Tensor]] | None:
        """Halve each box along the side that changes the doubtful row most; None where one is too small for that."""
        middle = lower + (upper - lower) / 2
        _, gradient = self._away(middle, doubtful.double().argmax(dim=1))
        gain = ((gradient.abs() + 1e-9 * gradient.abs().amax() + 1e-300) * (upper - lower)).flatten(1)
        gain = torch.where(((lower < middle) & (middle < upper)).flatten(1), gain, -1.0)
        side = gain.argmax(dim=1, keepdim=True)
        if bool((gain.gather(1, side) < 0).any()):
            return None
        cut = torch.zeros_like(gain, dtype=torch.bool).scatter(1, side, True).reshape(lower.shape)
        low, high = torch.where(cut, middle, upper), torch.where(cut, middle, lower)
        return [*zip(lower, low, strict=True), *zip(high, upper, strict=True)]


def _around(exact: Fraction) -> tuple[float, float]:
    """Return the floats next to a number, below and above; both are it where it is one.

    >>> _around(Fraction(1, 2)), _around(Fraction(1, 10))[0] < Fraction(1, 10) < _around(Fraction(1, 10))[1]
    ((0.5, 0.5), True)
    """
    if abs(exact) > _LARGEST:
        raise InvalidInput(f"A number of the property is beyond {float(_LARGEST):.3g} in size. Scale the property.")
    near = float(exact)
    if near == exact:
        return near, near
    return (near, math.nextafter(near, math.inf)) if near < exact else (math.nextafter(near, -math.inf), near)
