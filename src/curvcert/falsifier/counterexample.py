r"""A claim and the points that refute it; and how to tell, with rounding accounted for, whether they do.

Six kinds of claims, with u a functional of the outputs:

- lipschitz: :math:`|u \cdot (f(y) - f(x))| \le L \|y - x\|_p`;
- curvature: :math:`\|u \cdot (Df(y) - Df(x))\|_{p^*} \le K \|y - x\|_p`;
- bend: :math:`u \cdot (Df(y) - Df(x)) (y - x) \le K \|y - x\|_p^2`, a curvature from above; from below u is -u;
- radius: within r of x, in the p-norm, no rival reaches the label, or none inside a box;
- witness: y, at a distance of at most r from x, and inside the box if there is one, is not classified as the label;
- output: :math:`u \cdot f(y)` + offset is at most so much wherever y is within the radius of x, and inside a box.

What is computed for a replay comes with a bound on its rounding (`evaluate_with_error`, `at_points`): a claim is
refuted only if it is false whatever the rounding did.
"""

import math
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.analyses import at_points
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Global
from curvcert.boxes import Box
from curvcert.errors import InvalidInput
from curvcert.network import Network
from curvcert.network.evaluation import evaluate_with_error
from curvcert.norms import conjugate, vector_norm
from curvcert.rounding import UNIT_ROUNDOFF, Upper, gamma, norm_upper_bound_of_vectors

Kind = Literal["lipschitz", "curvature", "bend", "radius", "witness", "output"]
KINDS: tuple[Kind, ...] = ("lipschitz", "curvature", "bend", "radius", "witness", "output")
ScopeName = Literal["global", "anchor", "ball"]
SCOPES: tuple[ScopeName, ...] = ("global", "anchor", "ball")


@final
@dataclass(frozen=True, eq=False, repr=False)
class Counterexample:
    """A claim about a network, and two points that are said to refute it.

    Attributes:
        kind: "lipschitz", "curvature", "bend", "radius", "witness" or "output".
        source: who claimed it: the method, the scope, the activation.
        network: the network.
        x: the first point; for a certificate the sample.
        y: the second.
        covector: the functional u of the outputs, of a dual norm of at most 1 where the claim is about a vector.
        p: the norm of the inputs.
        scope: "global", "anchor" (x is the anchor) or "ball" (x and y lie in it).
        centre: the centre of the ball.
        radius: its radius.
        claimed: the constant, the radius, or the largest value.
        label: the certified class.
        rival: the class that the radius is about, -1 for all of them.
        box: what a claim about a certificate or an output is limited to.
        offset: what is added to u . f in a claim about an output.
    """

    kind: Kind
    source: str
    network: Network
    x: Tensor
    y: Tensor
    covector: Tensor
    p: float
    scope: ScopeName
    centre: Tensor
    radius: float
    claimed: float
    label: int = -1
    rival: int = -1
    box: Box | None = None
    offset: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.scope not in SCOPES:
            raise InvalidInput(f"A counterexample is one of {', '.join(KINDS)}, got {self.kind!r} ({self.scope!r}).")
        for name, point in (("x", self.x), ("y", self.y), ("centre", self.centre)):
            if tuple(point.shape) != self.network.in_shape or not bool(point.isfinite().all()):
                raise InvalidInput(
                    f"{name} is a finite point of shape {self.network.in_shape}, got {tuple(point.shape)}."
                )
        if tuple(self.covector.shape) != (self.network.outputs,) or not bool(self.covector.isfinite().all()):
            raise InvalidInput(f"The covector has {self.network.outputs} finite entries, got {self.covector.shape}.")
        if self.kind == "output" and not (math.isfinite(self.claimed) and math.isfinite(self.offset)):
            raise InvalidInput(f"A claim about an output is a number, got {self.claimed} and {self.offset}.")
        if not ((self.claimed >= 0 or self.kind == "output") and self.radius >= 0):
            raise InvalidInput(f"Claims and radii are nonnegative, got {self.claimed} and {self.radius}.")
        certificate = self.kind in ("radius", "witness")
        if certificate and not (0 <= self.label < self.network.outputs and -1 <= self.rival < self.network.outputs):
            raise InvalidInput(f"Classes lie in 0 .. {self.network.outputs - 1}, got {self.label} and {self.rival}.")

    def __repr__(self) -> str:
        return f"Counterexample({self.kind} in l{self.p:g}, claimed {self.claimed:.9g}, by {self.source})"


@final
@dataclass(frozen=True)
class Replay:
    """What a replay showed: whether the claim is refuted, by which number, and in words."""

    refuted: bool
    shown: float
    reason: str


@torch.no_grad()
def replay(example: Counterexample) -> Replay:
    """Compute anew, with rounding bounded, whether the points refute the claim.

    >>> from curvcert.activations import TANH
    >>> from curvcert.falsifier.random_networks import single_neuron
    >>> x, y = -torch.ones(1, dtype=torch.float64) / 100, torch.ones(1, dtype=torch.float64) / 100
    >>> network, u = single_neuron(TANH, 2.0), torch.ones(1, dtype=torch.float64)
    >>> wrong = Counterexample("lipschitz", "a guess", network, x, y, u, 2.0, "global", x, 0.0, claimed=1.9)
    >>> replay(wrong).reason
    'the quotient is 1.99973338, claimed was at most 1.9'
    >>> from dataclasses import replace
    >>> replay(replace(wrong, claimed=2.0)).refuted
    False
    """
    outside = _outside(example)
    if outside:
        return Replay(False, 0.0, outside)
    match example.kind:
        case "lipschitz":
            return _of_quotient(example, _rise_lower_bound(example))
        case "curvature":
            return _of_quotient(example, _change_lower_bound(example))
        case "bend":
            return _of_quotient(example, _bend_lower_bound(example))
        case "radius":
            return _of_radius(example)
        case "witness":
            return _of_witness(example)
        case "output":
            return _of_output(example)


def _outside(example: Counterexample) -> str:
    """Say why the points are not where the claim is about, if so."""
    if example.kind in ("radius", "witness", "output") or example.scope == "global":
        return ""
    if example.scope == "anchor":
        return "" if bool((example.x == example.centre).all()) else "x is not the anchor"
    reach = torch.maximum(
        _distance(example.x, example.centre, example.p), _distance(example.y, example.centre, example.p)
    )
    return "" if float(reach) <= example.radius else "the points are not in the ball"


def _of_quotient(example: Counterexample, shown: Tensor) -> Replay:
    refuted, value = bool(shown > example.claimed), float(shown)
    if refuted:
        return Replay(True, value, f"the quotient is {value:.9g}, claimed was at most {example.claimed:.9g}")
    return Replay(False, value, f"the quotient is {value:.9g}, within the claim of {example.claimed:.9g}")


def _rise_lower_bound(example: Counterexample) -> Tensor:
    last = evaluate_with_error(example.network, torch.stack([example.x, example.y])).output
    value, error, size = last.value.flatten(1), last.error.flatten(1), example.covector.abs()
    rise = ((value[1] - value[0]) * example.covector).sum().abs()
    rounding = (Upper(value.abs()).sum(0) * size).sum() * gamma(len(size) + 4)
    return _quotient_below(rise - ((Upper(error).sum(0) * size).sum() + rounding).bound, example)


def _gradients(example: Counterexample) -> tuple[Tensor, Tensor]:
    """Return the gradients of u . f at both points, one per row, and how far they are off together in the dual norm."""
    network = example.network.read_out(example.covector[None])
    problem = Problem(network, example.p, example.p, Global(), scalars=True)
    covectors = at_points(problem, torch.stack([example.x, example.y])).gradients
    if covectors is None:
        raise InvalidInput("A curvature claim needs a network with derivatives; this one has a max-pooling.")
    return covectors[0].value.flatten(1), covectors[0].drift.sum()


def _bend_lower_bound(example: Counterexample) -> Tensor:
    g, drift = _gradients(example)
    step, change = (example.y - example.x).flatten(), g[1] - g[0]
    rounding = (Upper(g.abs()).sum(0) * step.abs()).sum() * gamma(len(step) + 8)
    distance = _distance(example.x, example.y, example.p)
    along = (change * step).sum() - (Upper(drift) * distance + rounding).bound
    return torch.where(distance > 0, _quotient_below(along.clamp(min=0.0), example) / distance, 0.0)


def _change_lower_bound(example: Counterexample) -> Tensor:
    g, drift = _gradients(example)
    dual = conjugate(example.p)
    change = vector_norm(g[1] - g[0], dual) * (1 - gamma(2 * g.shape[1] + 64))
    size = Upper(norm_upper_bound_of_vectors(g, dual, 1)).sum()
    return _quotient_below(change - (size * (2 * UNIT_ROUNDOFF) + drift).bound, example)


def _quotient_below(rise: Tensor, example: Counterexample) -> Tensor:
    distance = _distance(example.x, example.y, example.p)
    return torch.where(distance > 0, rise / distance * (1 - 8 * UNIT_ROUNDOFF), 0.0)


def _distance(x: Tensor, y: Tensor, p: float) -> Tensor:
    """Return ||y - x||_p, rounded up."""
    return Upper(norm_upper_bound_of_vectors((y - x).flatten(), p, 0), 1).bound


def _of_radius(example: Counterexample) -> Replay:
    distance = float(_distance(example.x, example.y, example.p))
    if not distance <= example.claimed:
        return Replay(False, distance, f"the point is {distance:.9g} away, outside the radius")
    if _leaves_box(example):
        return Replay(False, distance, "the point is outside of the box")
    lead = float(_leads(example)[0])
    if lead >= 0:
        return Replay(
            True, lead, f"at distance {distance:.9g} a rival leads by {lead:.3g}, within {example.claimed:.9g}"
        )
    return Replay(False, lead, "no rival is proven to reach the label at that point")


def _of_witness(example: Counterexample) -> Replay:
    distance = vector_norm((example.y - example.x).flatten(), example.p) * (1 - gamma(2 * example.x.numel() + 64))
    if float(distance) > example.claimed:
        return Replay(True, float(distance), f"the witness is {distance:.9g} away, claimed was {example.claimed:.9g}")
    if _leaves_box(example):
        return Replay(True, float(distance), "the witness is outside of the box")
    lead = float(_leads(example)[1])
    if lead < 0:
        return Replay(True, lead, f"the witness is classified as the label, by {-lead:.3g}")
    return Replay(False, lead, "the witness is near enough, and not proven to be classified as the label")


def _of_output(example: Counterexample) -> Replay:
    distance = float(_distance(example.x, example.y, example.p))
    if not distance <= example.radius or _leaves_box(example):
        return Replay(False, distance, "the point is not where the claim is about")
    last = evaluate_with_error(example.network, example.y[None]).output
    value, error, u = last.value.flatten(), last.error.flatten(), example.covector
    shown = (u * value).sum() + example.offset
    size = (Upper(u.abs()) * value.abs()).sum() + abs(example.offset)
    shown = shown - ((Upper(u.abs()) * error).sum() + size * gamma(len(u) + 4)).bound
    if float(shown) > example.claimed:
        return Replay(True, float(shown), f"the value is {shown:.9g}, claimed was at most {example.claimed:.9g}")
    return Replay(False, float(shown), f"the value is {shown:.9g}, within the claim of {example.claimed:.9g}")


def _leaves_box(example: Counterexample) -> bool:
    return example.box is not None and not bool(example.box.contains(example.y[None]))


def _leads(example: Counterexample) -> Tensor:
    """Enclose by how much the rival, or the best of them, leads over the label at y."""
    last = evaluate_with_error(example.network, example.y[None]).output
    value, error = last.value.flatten(), last.error.flatten()
    lead, own = value - value[example.label], error[example.label]
    slack = (Upper(error) + own + 2 * UNIT_ROUNDOFF * lead.abs()).bound
    classes = torch.arange(len(value), device=value.device)
    others = classes != example.label
    if example.rival >= 0:
        others = others & (classes == example.rival)
    if not bool(others.any()):
        return value.new_full((2,), -torch.inf)
    return torch.stack([(lead - slack)[others].amax(), (lead + slack)[others].amax()])


def scaled_into_dual_ball(u: Tensor, q: float) -> Tensor:
    """Return a covector of a dual q-norm of at most 1, whatever the rounding."""
    size = norm_upper_bound_of_vectors(u, conjugate(q), 0)
    # The quotients round as well.
    return u / Upper(size, 4).bound.clamp(min=1e-300)
