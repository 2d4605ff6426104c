"""What a Lipschitz bound is asked for: a network, read out as needed, norms and a scope."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeVar, cast

import torch
from torch import Tensor

from curvcert.bounds.types import SIDES, Anchor, Ball, Global, Scope, Side
from curvcert.errors import InvalidInput
from curvcert.network import Network
from curvcert.network.evaluation import Evaluation, evaluate_with_error
from curvcert.norms import conjugate, validate_p
from curvcert.operators import AbstractLinearMap, NormBounds
from curvcert.operators.norm_rule import AbstractNorms, R

Pair = tuple[int, int] | Literal["all"] | None
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Problem:
    """A network whose outputs are bounded as one vector (p -> q), or each as a scalar of its own.

    `squeeze` drops the dimension of the scalars: one logit, or one pair.  `side` is the one from which curvatures of
    scalars are bounded, and `most_work` how much a search for LipSDP's multipliers may take on for them: none where a
    checker has to prove them again.
    """

    network: Network
    p: float
    q: float
    scope: Scope
    scalars: bool = False
    squeeze: bool = False
    norms: NormBounds = field(default_factory=NormBounds)
    side: Side = "both"
    most_work: float = 0.0
    evaluated: Evaluation | None = field(default=None, repr=False)
    """The network at the points of the scope, where that is known already."""
    _known: dict[str, object] = field(default_factory=dict, init=False, repr=False)

    def once(self, name: str, compute: Callable[[], T]) -> T:
        """Return what `compute` gave when this name was first asked for; a name belongs to one kind of value.

        What is kept holds in every scope; what holds from one side alone has the side in its name.
        """
        if name not in self._known:
            self._known[name] = compute()
        return cast(T, self._known[name])

    def over(self, scope: Scope, evaluated: Evaluation | None = None) -> "Problem":
        """Return the same question about another scope, with all that is known of it."""
        other = replace(self, scope=scope, evaluated=evaluated)
        object.__setattr__(other, "_known", self._known)
        return other

    def seen_from(self, side: Side) -> "Problem":
        """Return the same question about one side of the curvature, with all that is known of it."""
        other = replace(self, side=side)
        object.__setattr__(other, "_known", self._known)
        return other

    def final_norm(self, op: AbstractLinearMap, norms: AbstractNorms[R]) -> Tensor:
        """Return the p -> q norm of a last map, or the norm of each of its rows as a functional."""
        if self.scalars:
            return norms.row_norms(op, conjugate(self.p)).flatten()
        return norms.norm(op, self.p, self.q)

    def inner_norm(self, op: AbstractLinearMap, norms: AbstractNorms[R]) -> Tensor:
        """Return the p -> p norm of a map inside the network."""
        return norms.norm(op, self.p, self.p)

    def shaped(self, value: Tensor) -> Tensor:
        """Return a result without the dimension that a single scalar does not need."""
        return value.squeeze(-1) if self.squeeze else value

    def over_samples(self, value: Tensor) -> Tensor:
        """Return a global result repeated for every sample of the scope."""
        if isinstance(self.scope, Global):
            return value
        return value.expand(len(self.scope.x), *value.shape)

    def __post_init__(self) -> None:
        if self.evaluated is not None and not torch.equal(self.evaluated.values[0].value, self.anchor):
            raise InvalidInput("The evaluation of a problem is that of the points of its scope.")

    @cached_property
    def evaluation(self) -> Evaluation:
        """The network at the points of an anchored or local scope."""
        if self.evaluated is not None:
            return self.evaluated
        return evaluate_with_error(self.network, self.anchor, self.norms)

    @cached_property
    def anchor(self) -> Tensor:
        """The points of an anchored or local scope, in float64."""
        if isinstance(self.scope, Global):
            raise InvalidInput("This method needs the point that it is anchored at: pass at=x.")
        return self.scope.x


def outputs_of(pairs: Problem, network: Network) -> Problem:
    """Return the question for every output of a network, each a scalar, given that for its pairs, once."""
    return pairs.once("outputs", lambda: Problem(network, pairs.p, pairs.p, Global(), scalars=True, norms=pairs.norms))


def all_pairs(network: Network, p: float) -> Problem:
    """Return the question for every difference of two outputs, each a scalar, over all inputs."""
    return make_problem(network, p, None, None, None, "all", None)


def make_problem(
    network: Network,
    p: float,
    q: float | None,
    at: Tensor | None,
    radius: float | Tensor | None,
    pair: Pair,
    logit: int | None,
    side: Side = "both",
) -> Problem:
    """Validate the arguments of `lipschitz` and `curvature` and read the network out."""
    if not isinstance(network, Network):
        raise InvalidInput(
            f"Expected a Network, got {type(network).__name__}. Make one with curvcert.trace(model, example_input)."
        )
    if network.live:
        raise InvalidInput(
            "This network is over parameters in training, for estimates only. Bound a copy: curvcert.trace(model, x)."
        )
    if side not in SIDES:
        raise InvalidInput(f"side is one of {', '.join(SIDES)}, got {side!r}.")
    if side != "both" and pair is None and logit is None and network.outputs > 1:
        raise InvalidInput(f"A curvature from {side} is that of a scalar. Pass pair=(i, j), pair='all' or logit=i.")
    read = network.for_bounds
    if at is not None and radius is not None:
        # Over balls, products are scaled by how far their factors move there.
        read = network.for_bounds_about(network.require_batch(at).detach())
    return replace(_question(read, p, q, at, radius, pair, logit), side=side)


def _question(
    network: Network,
    p: float,
    q: float | None,
    at: Tensor | None,
    radius: float | Tensor | None,
    pair: Pair,
    logit: int | None,
) -> Problem:
    p = validate_p(p)
    q = p if q is None else validate_p(q, "q")
    scope = _scope(network, at, radius)
    if pair is not None and logit is not None:
        raise InvalidInput("Pass pair or logit, not both.")
    if logit is not None:
        return Problem(network.logit(_output(network, logit)), p, q, scope, scalars=True, squeeze=True)
    if pair is None:
        # A single output is a scalar, for which q does not matter.
        single = network.outputs == 1
        return Problem(network, p, q, scope, scalars=single, squeeze=single)
    if isinstance(pair, str) and pair == "all":
        return Problem(network.all_differences(), p, q, scope, scalars=True)
    if not (isinstance(pair, tuple) and len(pair) == 2):
        raise InvalidInput(f"pair is two different outputs (i, j), or 'all', got {pair!r}.")
    i, j = (_output(network, k) for k in pair)
    if i == j:
        raise InvalidInput(f"pair is two different outputs (i, j), or 'all', got {pair!r}: the same one twice.")
    return Problem(network.difference(i, j), p, q, scope, scalars=True, squeeze=True)


def _output(network: Network, i: int) -> int:
    """Return the number of an output, counted from 0."""
    if isinstance(i, bool) or not isinstance(i, int):
        raise InvalidInput(f"An output is named by its number, an int, got {i!r}.")
    if not -network.outputs <= i < network.outputs:
        raise InvalidInput(f"Output {i} does not exist: this network has {network.outputs} outputs.")
    return i % network.outputs


def _scope(network: Network, at: Tensor | None, radius: float | Tensor | None) -> Scope:
    if at is None:
        if radius is not None:
            raise InvalidInput("A radius needs its centre: pass at=x as well.")
        return Global()
    x = network.require_batch(at).detach().to(network.device)
    if radius is None:
        return Anchor(x)
    try:
        r = torch.as_tensor(radius, dtype=torch.float64, device=x.device).detach()
    except (TypeError, ValueError, RuntimeError):
        raise InvalidInput(f"radius is one number, or one per sample, got {radius!r}.") from None
    if r.dim() > 1 or (r.dim() == 1 and len(r) != len(x)):
        raise InvalidInput(f"radius is one number, or one per sample ({len(x)}), got shape {tuple(r.shape)}.")
    if not bool(((r >= 0) & torch.isfinite(r)).all()):
        raise InvalidInput("radius must be finite and at least 0.")
    return Ball(x, r.expand(len(x)))
