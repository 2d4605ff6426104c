"""Hunts for outputs beyond their bounds: every row is climbed, upward and downward, where it is about."""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvcert.bounds.outputs import Asked, asked_about, functionals
from curvcert.bounds.types import Interval
from curvcert.boxes import Box, BoxSides
from curvcert.errors import InvalidInput
from curvcert.falsifier.ascent import TINY, column, known, unblocked, within
from curvcert.falsifier.counterexample import Counterexample, replay
from curvcert.falsifier.findings import Findings, together
from curvcert.network import Network
from curvcert.norms import steepest_direction

_ELEMENTS = 2**22
_LOOKED_AT = 3
_FIRST, _SHRINKING = 1.5, 0.8
"""The first step, as a share of the radius or of the box's sides, and what every other one is of the one before."""


def falsify_outputs(
    interval: Interval,
    network: Network,
    at: Tensor | None = None,
    radius: float | Tensor | None = None,
    p: float = 2,
    box: BoxSides | Box | None = None,
    C: Tensor | None = None,
    c: Tensor | None = None,
    restarts: int = 3,
    steps: int = 15,
    seed: int = 0,
) -> Findings:
    """Hunt for a point at which an output leaves what `curvcert.output_bounds` said; nothing if the bounds are right.

    The arguments from `at` to `c` are those that the bounds were asked for with.  What a search finds beyond a bound
    counts once a replay with bounded rounding confirms it.

    >>> from dataclasses import replace
    >>> from curvcert.activations import TANH
    >>> from curvcert.bounds.outputs import output_bounds
    >>> from curvcert.falsifier.random_networks import single_neuron
    >>> net, box = single_neuron(TANH, 2.0), (-0.5, 1.0)
    >>> found = output_bounds(net, box=box)
    >>> falsify_outputs(found, net, box=box)
    Findings(2 checks: 2 output; 0 violations)
    >>> falsify_outputs(replace(found, upper=found.upper - 0.1), net, box=box).counterexamples[0].kind
    'output'
    """
    asked = asked_about(network, at, radius, p, box)
    rows, offset = functionals(network, C, c, len(asked.x))
    if interval.lower.shape != (len(asked.x), rows.shape[1]):
        shape = (len(asked.x), rows.shape[1])
        raise InvalidInput(
            f"Expected bounds of shape {shape}, got {tuple(interval.lower.shape)}. Pass what they were asked for with."
        )
    hunt = _Hunt(network, asked, restarts, steps, seed)
    sample, row = torch.ones_like(interval.lower, dtype=torch.bool).nonzero().unbind(dim=1)
    rows = rows.expand(len(asked.x), -1, -1)[sample, row]
    sides = (
        _Claims(sample, rows, offset[row], interval.upper[sample, row]),
        _Claims(sample, -rows, -offset[row], -interval.lower[sample, row]),
    )
    return together(hunt.attack(claims) for claims in sides)


@dataclass(frozen=True, eq=False)
class _Claims:
    """That u . f + offset is at most so much all over the region about a sample, one claim per row."""

    sample: Tensor
    u: Tensor
    offset: Tensor
    most: Tensor

    def part(self, index: Tensor) -> "_Claims":
        return _Claims(self.sample[index], self.u[index], self.offset[index], self.most[index])


@dataclass(frozen=True, eq=False)
class _Hunt:
    network: Network
    asked: Asked
    restarts: int
    steps: int
    seed: int

    def attack(self, claims: _Claims) -> Findings:
        """Climb every row; in pieces that bound the memory."""
        size = max(1, _ELEMENTS // (self.restarts * self.asked.x[0].numel()))
        index = torch.arange(len(claims.sample), device=claims.sample.device)
        found = [self._attacked(claims.part(part)) for part in index.split(size)]
        return together(found) + Findings({"output": len(index)}, {"output": len(index)})

    def _attacked(self, claims: _Claims) -> Findings:
        value, where, start = self._climbed(claims)
        beyond = value - claims.most
        worst = (beyond > 0).nonzero().flatten()
        worst = worst[beyond[worst].argsort(descending=True)][:_LOOKED_AT]
        examples = [self._example(claims, int(k), where[k]) for k in worst]
        refuted = tuple(example for example in examples if replay(example).refuted)
        room = claims.most - start
        share = ((value - start) / room.clamp(min=TINY))[room > 1e-9 * (1 + claims.most.abs())]
        closest = {"output": float(share.max())} if len(share) else {}
        return Findings(counterexamples=refuted, unconfirmed=len(examples) - len(refuted), closest=closest)

    def _climbed(self, claims: _Claims) -> tuple[Tensor, Tensor, Tensor]:
        """Return the largest value of every row that was met, where that was, and the value at the centre."""
        count, device = len(claims.sample), self.asked.x.device
        many = claims.part(torch.arange(count, device=device).repeat(self.restarts))
        asked = self.asked.part(many.sample)
        generator = torch.Generator().manual_seed(self.seed)
        noise = torch.randn(asked.x.shape, dtype=torch.float64, generator=generator).to(device).flatten(1)
        point, best, where = asked.x, torch.full_like(many.most, -torch.inf), asked.x
        start, _ = self._value(asked.x[:count], claims)
        for k in range(self.steps + 1):
            value, gradient = self._value(point, many)
            gradient = gradient if asked.sides is None else unblocked(gradient, point, asked.sides)
            better = value > best
            best, where = torch.where(better, value, best), torch.where(column(better, point), point, where)
            # The first starts go straight along the gradient, the others somewhere.
            first = torch.arange(len(noise), device=device) < count
            direction = torch.where(first[:, None], known(gradient, noise), noise) if k == 0 else known(gradient, noise)
            point = _moved(asked, point, direction, _FIRST * _SHRINKING ** max(0, k - 1))
        best, index = best.reshape(self.restarts, count).max(dim=0)
        where = where.reshape(self.restarts, count, *self.asked.x.shape[1:])
        return best, where[index, torch.arange(count, device=device)], start

    def _value(self, point: Tensor, claims: _Claims) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            point = point.detach().requires_grad_()
            value = (self.network(point).flatten(1) * claims.u).sum(dim=1) + claims.offset
            (gradient,) = torch.autograd.grad(value.sum(), point)
        return value.detach(), gradient.flatten(1)

    def _example(self, claims: _Claims, k: int, point: Tensor) -> Counterexample:
        sample = claims.sample[k : k + 1]
        asked = self.asked.part(sample)
        largest = torch.finfo(torch.float64).max
        return Counterexample(
            kind="output",
            source="output_bounds",
            network=self.network,
            x=asked.x[0],
            y=point,
            covector=claims.u[k],
            p=asked.p,
            scope="global",
            centre=asked.x[0],
            radius=largest if asked.radius is None else float(asked.radius[0]),
            claimed=float(claims.most[k]),
            offset=float(claims.offset[k]),
            box=None if asked.sides is None else Box(asked.sides[0][0].cpu(), asked.sides[1][0].cpu()),
        )


def _moved(asked: Asked, point: Tensor, direction: Tensor, share: float) -> Tensor:
    """Return points a step further, brought back to where the claims are about."""
    if asked.radius is not None:
        step = steepest_direction(direction, asked.p) * (share * asked.radius)[:, None]
        point = within(point + step.reshape(point.shape), asked.x, asked.radius, asked.p)
    if asked.sides is not None:
        lower, upper = asked.sides
        if asked.radius is None:
            point = point + direction.sign().reshape(point.shape) * share * (upper - lower)
        # The box holds the centre, so that this leads out of no ball.
        point = torch.minimum(torch.maximum(point, lower), upper)
    return point
