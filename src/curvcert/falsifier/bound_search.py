"""Hunts for what exceeds a Lipschitz or curvature bound: which ascents a scope calls for, and the comparison."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.problem import Pair, make_problem
from curvcert.bounds.types import Anchor, Ball, Bound, Global, Scope, Side
from curvcert.errors import InvalidInput
from curvcert.falsifier.ascent import Ascended, Rows, column, within
from curvcert.falsifier.counterexample import Counterexample, ScopeName, replay, scaled_into_dual_ball
from curvcert.falsifier.findings import Findings, together
from curvcert.falsifier.hessians import climb_hessians, climb_jacobian_changes
from curvcert.falsifier.slopes import climb_rises, climb_slopes
from curvcert.network import Network
from curvcert.norms import validate_p

BoundKind = Literal["lipschitz", "curvature"]

ROUNDING = 1e-9
"""How far, relatively, an ascended value is above a bound that counts as unconfirmed: far above its own rounding."""
ABSOLUTE_ROUNDING = 1e-10

_TOLD = 1e-3
_LOOKED_AT = 3
"""How many of the worst rows are replayed before a bound counts as unconfirmed."""
_REACHES = (1e-3, 1e-4, 1e-2, 1e-5, 1e-1, 1e-6)
"""How far apart, relative to the point, the two points are that stand for a derivative in a replay."""


@dataclass(frozen=True, eq=False)
class Target:
    """Functionals of the outputs, one per row; `free` if one row stands for the whole vector in the q-norm."""

    covectors: Tensor
    free: bool

    @staticmethod
    def of(network: Network, pair: Pair = None, logit: int | None = None) -> "Target":
        """Return what `pair` and `logit` of `lipschitz` and `curvature` mean.

        >>> from curvcert.activations import TANH
        >>> from curvcert.falsifier.random_networks import single_neuron
        >>> Target.of(single_neuron(TANH, 1.0))
        Target(covectors=tensor([[1.]], dtype=torch.float64), free=False)
        """
        make_problem(network, 2, None, None, None, pair, logit)
        eye = torch.eye(network.outputs, dtype=torch.float64, device=network.device)
        if logit is not None:
            return Target(eye[[logit]], free=False)
        if pair is None:
            return Target(torch.ones_like(eye[:1]), free=network.outputs > 1)
        pairs = combinations(range(network.outputs), 2) if pair == "all" else [pair]
        return Target(torch.stack([eye[i] - eye[j] for i, j in pairs]), free=False)


@dataclass(frozen=True, eq=False)
class Search:
    """Ascents of one sort: what was climbed, for which sample of the scope and which row of the target."""

    name: str
    ascended: Ascended
    sample: Tensor
    target: Tensor


@dataclass(frozen=True, eq=False)
class BoundSearch:
    """What to climb: slopes or curvature of a network in p -> q, for a target, over a scope.

    `ascents` is how many there are, at least, of every sort, spread over samples and target; a sample and row of the
    target has one at least.  `side` is that of a curvature.
    """

    network: Network
    kind: BoundKind
    p: float
    q: float
    target: Target
    scope: Scope
    ascents: int = 48
    steps: int = 10
    seed: int = 0
    side: Side = "both"

    def run(self) -> tuple[Search, ...]:
        """Climb whatever the scope calls for."""
        if self.kind == "lipschitz":
            if isinstance(self.scope, Anchor):
                return (self._search("rise", climb_rises(self._free_rows(), self.steps)),)
            return (self._search("slope", climb_slopes(self._point_rows(), self.steps)),)
        above = self.side != "both"
        at_points = self._search("hessian", climb_hessians(self._point_rows(), self.steps, above))
        if isinstance(self.scope, Ball):
            return (at_points,)
        changes = climb_jacobian_changes(self._free_rows(), isinstance(self.scope, Anchor), self.steps, above)
        return at_points, self._search("jacobian change", changes)

    def _search(self, name: str, ascended: Ascended) -> Search:
        sample, target, _ = self._indices
        return Search(name, ascended, sample, target)

    @property
    def _indices(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return each row's sample, target and start, numbered."""
        samples = 1 if isinstance(self.scope, Global) else len(self.scope.x)
        rows = len(self.target.covectors)
        starts = max(1, -(-self.ascents // (samples * rows)))
        grid = torch.cartesian_prod(torch.arange(samples), torch.arange(rows), torch.arange(starts))
        sample, target, start = grid.reshape(-1, 3).unbind(dim=1)
        return sample, target, start

    def _noise(self, salt: int, like: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 104729 * salt)
        shape = (len(like), *self.network.in_shape)
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    def _point_rows(self) -> Rows:
        """Start anywhere, at many distances from 0; at the anchors; or in the balls, their centres among the starts."""
        sample, target, start = self._indices
        noise = self._noise(1, sample)
        if isinstance(self.scope, Global):
            spread = 10 ** (2.2 * torch.linspace(0, 1, len(sample), dtype=torch.float64) - 1.5)
            centre, radius = noise * column(spread, noise), torch.full_like(spread, torch.inf)
            return self._rows(centre, centre, radius, target)
        centre = self.scope.x.cpu()[sample]
        if isinstance(self.scope, Anchor):
            return self._rows(centre, centre, torch.zeros(len(sample), dtype=torch.float64), target)
        radius = self.scope.r.cpu()[sample]
        begin = centre + noise * column(torch.where(start > 0, radius, 0.0), noise)
        return self._rows(within(begin, centre, radius, self.p), centre, radius, target)

    def _free_rows(self) -> Rows:
        """Start at many distances from the anchors, or from points anywhere."""
        sample, target, _ = self._indices
        noise = self._noise(2, sample)
        centre = self._noise(3, sample) * 1.5 if isinstance(self.scope, Global) else self.scope.x.cpu()[sample]
        reach = 10 ** (2.3 * torch.rand(len(sample), dtype=torch.float64, generator=self._generator) - 1.3)
        none = torch.full_like(reach, torch.inf)
        return self._rows(centre + noise * column(reach, noise), centre, none, target)

    @property
    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def _rows(self, start: Tensor, centre: Tensor, radius: Tensor, target: Tensor) -> Rows:
        # From below f is what -f is from above.
        device, u = self.network.device, self.target.covectors[target] * (-1 if self.side == "below" else 1)
        start, centre, radius = start.to(device), centre.to(device), radius.to(device)
        return Rows(self.network, self.p, self.q, start, centre, radius, u, self.target.free, self.seed)

    def compare(self, value: Tensor, searches: tuple[Search, ...], source: str) -> Findings:
        """Compare a bound's values with everything that was ascended."""
        return together(self._compared(value, search, source) for search in searches)

    def _compared(self, value: Tensor, search: Search, source: str) -> Findings:
        table = value.detach().reshape(-1, len(self.target.covectors))
        bound = table[search.sample if len(table) > 1 else torch.zeros_like(search.sample), search.target]
        found = search.ascended.value
        counts: dict[str, int] = {self.kind: len(found)}
        closest: dict[str, float] = {self.kind: _share(found, bound)}
        # Where a bound is attained, the search's own rounding may carry it above; a replay bounds its rounding.
        above = found > bound
        if not bool(above.any()):
            return Findings(counts, closest=closest)
        worst = torch.where(above, found / bound.clamp(min=1e-300), 0.0).argsort(descending=True)
        for row in worst[: min(_LOOKED_AT, int(above.sum()))].tolist():
            for example in self._examples(search, row, float(bound[row]), source):
                if replay(example).refuted:
                    return Findings(counts, counterexamples=(example,), closest=closest)
        beyond_rounding = bool((found > bound * (1 + ROUNDING) + ABSOLUTE_ROUNDING).any())
        closest = {kind: min(1.0, share) for kind, share in closest.items()}
        return Findings(counts, unconfirmed=int(beyond_rounding), closest=closest)

    def _examples(self, search: Search, row: int, claimed: float, source: str) -> Iterator[Counterexample]:
        """Yield pairs of points that may show in a replay what the ascent met."""
        found, scope = search.ascended, self.scope
        x, step, u = found.x[row], found.direction[row], found.covector[row]
        centre = x if isinstance(scope, Global) else scope.x[search.sample[row]]
        radius = float(scope.r[search.sample[row]]) if isinstance(scope, Ball) else 0.0
        names: dict[type, ScopeName] = {Global: "global", Anchor: "anchor", Ball: "ball"}
        example = Counterexample(
            kind=self.kind if self.side == "both" else "bend",
            source=source,
            network=self.network,
            x=x,
            y=x + step,
            covector=scaled_into_dual_ball(u, self.q) if self.target.free else u,
            p=self.p,
            scope=names[type(scope)],
            centre=centre,
            radius=radius,
            claimed=claimed,
        )
        if found.quotient:
            yield example
            return
        for reach in _REACHES:
            h = reach * (radius if isinstance(scope, Ball) else 1 + float(x.abs().max()))
            if isinstance(scope, Anchor):
                yield replace(example, y=x + h * step)
                yield replace(example, y=x - h * step)
                continue
            ends = torch.stack([x - h * step, x + h * step])
            if isinstance(scope, Ball):
                ends = within(ends, centre.expand_as(ends), x.new_full((2,), radius), self.p)
            yield replace(example, x=ends[0], y=ends[1])


def _share(found: Tensor, bound: Tensor) -> float:
    """Return the largest share of a bound that was reached; tiny ones, next to which rounding shows, are left out."""
    share = torch.where(bound > _TOLD, found / bound.clamp(min=_TOLD), 0.0)
    return float(share.amax())


def falsify_bound(
    bound: Bound,
    network: Network,
    kind: BoundKind,
    pair: Pair = None,
    logit: int | None = None,
    ascents: int = 64,
    steps: int = 20,
    seed: int = 0,
) -> Findings:
    """Hunt for points at which a network is steeper, or bends more, than a bound allows.

    Slopes and second derivatives are climbed anywhere, from the anchors or within the balls, as the bound's
    scope says; a value above the bound counts once a replay with bounded rounding confirms it.

    Args:
        bound: what `curvcert.lipschitz` or `curvcert.curvature` returned.
        network: the network that it was asked of.
        kind: "lipschitz" or "curvature": which of the two.
        pair: as it was asked for.
        logit: as it was asked for.
        ascents: how many, at least, of every sort.
        steps: of each ascent.
        seed: of the starts.

    >>> from curvcert.activations import TANH
    >>> from curvcert.bounds.lipschitz import lipschitz
    >>> from curvcert.falsifier.random_networks import single_neuron
    >>> network = single_neuron(TANH, 3.0)
    >>> falsify_bound(lipschitz(network), network, "lipschitz")
    Findings(64 checks: 64 lipschitz; 0 violations)
    >>> bool(falsify_bound(Bound(torch.tensor(2.9).double(), 2, 2), network, "lipschitz"))
    True
    """
    if kind not in ("lipschitz", "curvature"):
        raise InvalidInput(f"kind is 'lipschitz' or 'curvature', got {kind!r}.")
    if not isinstance(bound, Bound):
        raise InvalidInput(f"falsify_bound expects a Bound, got {type(bound).__name__}: only a bound claims anything.")
    target = Target.of(network, pair, logit)
    if bound.value.numel() % len(target.covectors):
        raise InvalidInput(
            f"The bound has {bound.value.numel()} values, the target {len(target.covectors)}: pass pair and logit as "
            "they were when the bound was computed."
        )
    p, q = validate_p(bound.p), validate_p(bound.q, "q")
    search = BoundSearch(network, kind, p, q, target, bound.scope, ascents, steps, seed, bound.side)
    if kind == "curvature":
        network.require_smooth()
    searches = search.run()
    found = search.compare(bound.value, searches, bound.method or "a bound")
    return found + Findings(searches={each.name: len(each.ascended.value) for each in searches})
