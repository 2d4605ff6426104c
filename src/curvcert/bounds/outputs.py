"""`curvcert.output_bounds`: proven lower and upper values of the outputs over a ball, a box, or their cut."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.problem import make_problem
from curvcert.bounds.types import Ball, Interval
from curvcert.boxes import Box, BoxSides
from curvcert.errors import InvalidInput
from curvcert.memory import spare_elements
from curvcert.network import Network
from curvcert.network.evaluation import Evaluation, evaluate_with_error
from curvcert.operators import NormBounds
from curvcert.propagation.linear_relaxation import Relaxed
from curvcert.propagation.reach import NetworkFacts
from curvcert.propagation.regions import AbstractRegion, region_of
from curvcert.propagation.taylor import TaylorModels, models_cost
from curvcert.rounding import UNIT_ROUNDOFF, Upper, gamma, next_down, next_up

_CHUNK_ELEMENTS = 2**22
"""Numbers that the rows of the samples in hand may take on their way to the input, on a processor."""

_MODELS_COST = 2**20
"""What `models_cost` may be for Taylor models to be made as well."""


@torch.no_grad()
def output_bounds(
    network: Network,
    at: Tensor | None = None,
    radius: float | Tensor | None = None,
    p: float = 2,
    box: BoxSides | Box | None = None,
    C: Tensor | None = None,
    c: Tensor | None = None,
) -> Interval:
    """Bound every output, or every row of C f + c, over a ball about x, over a box, or over their cut: provably.

    By linear relaxation of every layer over the range that it can reach (`propagation.linear_relaxation`), and over
    balls, for small smooth networks, by Taylor models of order 2 as well (`propagation.taylor`), rounding included.
    The bounds are about the network in real arithmetic, and about a module that departs from it where torch's own
    activation does.

    Args:
        network: from `curvcert.trace` or `curvcert.load_onnx`; kinks are welcome.
        at: the centres of the balls, with the batch dimension.
        radius: of the balls, one number or one per sample.
        p: their norm, 1 <= p <= inf.
        box: (lo, hi), each a number or a tensor of an input's or of the batch's shape.  It must contain `at`; without
            `at`, a box for each sample of a batch, or one.
        C: rows of functionals, (rows, outputs), or (batch, rows, outputs) for rows of each sample's own.
        c: what is added, (rows,).

    Returns:
        Lower and upper values of shape (batch, outputs), or (batch, rows).

    >>> from torch import nn
    >>> from curvcert.network import trace
    >>> model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)).eval()
    >>> for parameter, value in zip(model.parameters(), (2.0, 0.0, 1.0, 1.0), strict=True):
    ...     _ = parameter.data.fill_(value)
    >>> output_bounds(trace(model, torch.zeros(1, 1)), box=(torch.tensor([-1.0]), torch.tensor([1.0])))
    Interval([1, 3], shape (1, 1))
    """
    asked = asked_about(network, at, radius, p, box)
    rows, offset = functionals(network, C, c, len(asked.x))
    return bounded_over(NetworkFacts(network.for_bounds, asked.p, NormBounds()), asked, rows, offset, _MODELS_COST)


def bounded_over(facts: NetworkFacts, asked: "Asked", rows: Tensor, offset: Tensor, most_cost: float) -> Interval:
    """Bound rows of the outputs, given what is known of the network's maps; Taylor models where they cost no more."""
    network = facts.network
    lower, upper = [], []
    for part in _parts(facts, rows, asked.x):
        evaluation = evaluate_with_error(network, asked.x[part], facts.norms)
        own = rows.expand(len(asked.x), -1, -1)[part]
        fall, rise = _changes(facts, evaluation, own, asked.part(part), most_cost)
        value, error = evaluation.output.value.flatten(1), evaluation.output.error.flatten(1)
        low, high = _functional_values(own, offset, value, error)
        lower.append(next_down(low - fall))
        upper.append(next_up(high + rise))
    return Interval(torch.cat(lower), torch.cat(upper), network.assumes)


@dataclass(frozen=True, eq=False)
class Asked:
    """Where outputs are bounded: in the p-balls about x, in boxes around them with these sides, or in both."""

    x: Tensor
    p: float
    radius: Tensor | None
    sides: tuple[Tensor, Tensor] | None

    @property
    def region(self) -> AbstractRegion:
        """The same as displacements of x."""
        return region_of(self.x, self.p, self.radius, self.sides)

    def part(self, index: Tensor) -> "Asked":
        """Return that of some of the samples."""
        radius = None if self.radius is None else self.radius[index]
        return Asked(
            self.x[index], self.p, radius, None if self.sides is None else (self.sides[0][index], self.sides[1][index])
        )


def asked_about(
    network: Network, at: Tensor | None, radius: float | Tensor | None, p: float, box: BoxSides | Box | None
) -> Asked:
    """Return where outputs are bounded; the arguments are those of `output_bounds`.

    Raises:
        InvalidInput: if that is nowhere, or makes no sense.
    """
    if at is None and radius is not None:
        raise InvalidInput("A radius needs its centre: pass at=x as well.")
    problem = make_problem(network, p, None, at, radius, None, None)
    if at is None and box is not None:
        lower, upper = _sides(network, box, None, False)
        return Asked(_middle(lower, upper), problem.p, None, (lower, upper))
    if radius is None and box is None:
        raise InvalidInput("output_bounds needs a region: pass at=x and radius=r, or box=(lo, hi), or all of them.")
    r = problem.scope.r if isinstance(problem.scope, Ball) else None
    return Asked(
        problem.anchor, problem.p, r, None if box is None else _sides(network, box, problem.anchor, r is not None)
    )


def _changes(
    facts: NetworkFacts, evaluation: Evaluation, rows: Tensor, asked: Asked, most_cost: float
) -> tuple[Tensor, Tensor]:
    """Bound how far rows of the outputs fall and rise, by linear relaxation and, where they cost little, by models."""
    network = facts.network
    shaped = rows.reshape(*rows.shape[:2], *network.out_shape)
    change = Relaxed(facts, evaluation, asked.region).change(len(network.nodes) - 1, shaped)
    if asked.radius is None or models_cost(network) > most_cost:
        return change.fall, change.rise
    # What holds in the whole ball holds in its cut with a box.
    both = TaylorModels(facts, evaluation, torch.cat([-rows, rows], dim=1), asked.radius).rise(asked.radius)
    fall, rise = both.split(rows.shape[1], dim=1)
    return torch.fmin(change.fall, fall), torch.fmin(change.rise, rise)


def _middle(lower: Tensor, upper: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(lower + (upper - lower) / 2, lower), upper)


def _sides(network: Network, box: BoxSides | Box, x: Tensor | None, cut: bool) -> tuple[Tensor, Tensor]:
    """Return the sides of a box, of a batch's shape; finite ones unless it is cut with a ball."""
    found = Box.of(box, network.in_shape)
    if not cut and not bool((found.lower.isfinite() & found.upper.isfinite()).all()):
        raise InvalidInput(f"A box without a ball has finite sides, got {found}. Pass at=x and radius=r as well.")
    shape = (len(found.lower) if found.per_sample else 1 if x is None else len(x), *network.in_shape)
    like = torch.empty(shape, dtype=torch.float64, device=network.device) if x is None else x
    lower, upper = found.sides(like)
    return lower.expand(shape), upper.expand(shape)


def functionals(network: Network, C: Tensor | None, c: Tensor | None, batch: int) -> tuple[Tensor, Tensor]:
    """Return C as (1 or batch, rows, outputs), and c; the arguments are those of `output_bounds`."""
    n = network.outputs
    eye = torch.eye(n, dtype=torch.float64, device=network.device)
    rows = eye if C is None else torch.as_tensor(C).detach().to(eye)
    rows = rows[None] if rows.dim() == 2 else rows
    if rows.dim() != 3 or rows.shape[2] != n or len(rows) not in (1, batch) or not bool(rows.isfinite().all()):
        raise InvalidInput(
            f"C is finite, of shape (rows, {n}) or ({batch}, rows, {n}), got {tuple(torch.as_tensor(C).shape)}."
        )
    offset = torch.zeros(rows.shape[1]).to(eye) if c is None else torch.as_tensor(c).detach().to(eye)
    if offset.shape != rows.shape[1:2] or not bool(offset.isfinite().all()):
        raise InvalidInput(f"c is finite, one number per row of C ({rows.shape[1]}), got shape {tuple(offset.shape)}.")
    return rows, offset


def _parts(facts: NetworkFacts, rows: Tensor, x: Tensor) -> Iterator[Tensor]:
    """Yield numbers of samples, as many at a time as the memory holds."""
    numbers = rows.shape[1] * facts.numbers_behind(len(facts.network.nodes) - 1)
    size = max(1, spare_elements(x.device, _CHUNK_ELEMENTS) // numbers)
    yield from torch.arange(len(x), device=x.device).split(size)


def _functional_values(rows: Tensor, offset: Tensor, value: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Enclose C f(x) + c, (batch, rows) each, given f(x) with its error."""
    at = (rows @ value[:, :, None]).squeeze(2) + offset
    weights = Upper(rows.abs())
    size = (weights @ value.abs()[:, :, None])[:, :, 0] + offset.abs()
    off = (weights @ error[:, :, None])[:, :, 0]
    slack = (off + size * gamma(value.shape[1] + 2)).bound + 2 * UNIT_ROUNDOFF * at.abs()
    return next_down(at - slack), next_up(at + slack)
