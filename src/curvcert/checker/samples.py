"""The claims about one sample, one after another: what does not hold keeps no other claim from being checked."""

import hashlib
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from curvcert.checker.anchored import (
    anchored_curvatures,
    growth_seen,
    pairs_seen_block_by_block,
    slopes_seen,
    views_of,
)
from curvcert.checker.evaluation import Passed, backward, forward, gradient_norms, margins
from curvcert.checker.findings import (
    BALLS,
    CURVATURE,
    LINES,
    LIPSCHITZ,
    SEEN,
    Unproven,
    findings_of,
    require,
    require_proof,
)
from curvcert.checker.lipschitz import DUAL
from curvcert.checker.outward import Array, U, lengths, up
from curvcert.checker.radii import Point, proven_by_balls, proven_by_constants
from curvcert.checker.relaxation import Ball, Relaxation
from curvcert.checker.search import bends_more_than, misclassified_within, steeper_than
from curvcert.checker.tables import Tables, too_small
from curvcert.checker.verdict import CONTRADICTED, STATUSES, Finding
from curvcert.errors import UnsupportedModule

SLACK = 2.0**-30
"""What a saved certificate leaves for the rounding of a checker, relatively."""

_DISTANCE = 4 * SLACK
_NEARLY = 0.99
"""The share of a radius by lines that the checker's own prove at least."""

_CLEAR = 1e-6
"""Below this relative difference the comparison of two radii is left open."""


@dataclass(frozen=True)
class Judgement:
    """What is found about a sample, empty if all is proven, and whether its radius is; None without one."""

    findings: tuple[Finding, ...]
    radius: bool | None

    @property
    def worst(self) -> Finding | None:
        """The finding that the sample's status comes from."""
        return max(self.findings, key=lambda one: STATUSES.index(one.status), default=None)


def judged(tables: Tables, x: Array, k: int, label: int | None) -> Judgement:
    """Check every claim about sample k; `label` is the one that the user has for it, if any."""
    sample = _Sample(tables, x, k)
    wanted = bool(tables.claims.radius[k] > 0)
    begun = findings_of(lambda: sample.check_identity(label), sample.check_margin)
    if begun:
        return Judgement((*begun, *tables.findings), False if wanted else None)
    if not tables.claims.correct[k]:
        return Judgement((*tables.findings, *findings_of(sample.check_misclassified)), None)
    radius = findings_of(sample.check_radius)
    rest = findings_of(
        sample.check_method,
        sample.check_constants,
        sample.check_formulas,
        sample.check_order,
        sample.check_comparison,
        sample.check_witness,
    )
    return Judgement((*tables.findings, *rest, *radius), not radius if wanted else None)


class _Sample:
    """One sample's claims, and what the checker computes for them, each when it is first asked for."""

    def __init__(self, tables: Tables, x: Array, k: int) -> None:
        self.tables, self.facts, self.claims = tables, tables.facts, tables.claims
        self.x, self.k, self.label = x, k, int(tables.claims.label[k])
        self._point: Point | None = None
        self._K: Array | None = None
        self._L_seen: Array | None = None
        self._rises: dict[float, Array] = {}

    def check_identity(self, label: int | None) -> None:
        """Require the input and the label to be those of the certificate."""
        content = f"{list(self.x.shape)}".encode() + np.ascontiguousarray(self.x, "<f8").tobytes()
        same = hashlib.sha256(content).digest() == self.claims.inputs[self.k].tobytes()
        require(same, "the input is another one")
        require(
            label is None or label == self.label, f"the certificate is about class {self.label}, the label is {label}"
        )
        require(bool(np.isfinite(self.x).all()), "the input is not finite")
        require(
            self.cut is None or _holds(self.cut, self.x), "the input lies outside of the box that the radii are about"
        )

    @property
    def cut(self) -> tuple[Array, Array] | None:
        """The sides of the box that the balls are cut with; None where the radii are about whole balls."""
        return self.claims.sides(self.k) if self.claims.inside_box else None

    def needed(self, radius: Array | float) -> Array:
        """Return the radius of a whole ball that is enough for a claim.

        What holds in the ball holds in its cut with the box, and one that reaches the farthest corner holds it all.
        """
        if self.cut is None:
            return np.asarray(radius, np.float64)
        room = np.maximum(self.x - self.cut[0], self.cut[1] - self.x).reshape(-1)
        return np.minimum(radius, float(lengths(room[None], self.claims.p, 1)[0]) * (1 + 8 * U))

    def check_margin(self) -> None:
        """Require the margin to be no larger than it can be, and the class to be as told."""
        claims, k, own, m = self.claims, self.k, self.label, self.point.m
        logits, error = self.point.passed.outputs.value, self.point.passed.outputs.error
        ceiling = np.delete(logits[own] + error[own] - logits + error, own).min()
        if claims.threshold is not None:
            found = self.facts.first_output
            told = f"the threshold is claimed to be {claims.threshold!r}, the network's first output is "
            require(found == claims.threshold, told + ("no constant" if found is None else f"{found!r}"))
        claimed = float(claims.margin[k])
        small = claimed <= ceiling + 8 * U * abs(ceiling)
        require(small, f"the margin is claimed to be {claimed:.9g}, it is {ceiling:.9g}")
        if claims.correct[k]:
            require_proof(float(m.min()) > 0, "the margin at the input is not proven to be positive")
            return
        # What rounding leaves open may be called misclassified; what is clearly correct may not.
        tolerance = 1e-9 * (1 + float(np.abs(logits).max()))
        require(float(m.min()) <= tolerance, "a correctly classified sample is called misclassified")

    def check_misclassified(self) -> None:
        """Require nothing to be claimed for a misclassified sample."""
        claims, k = self.claims, self.k
        require(not any(value[k] > 0 for value in claims.radii.values()), "a misclassified sample has a radius")
        require(claims.proven_by[k] == {"misclassified"}, "a misclassified sample has a method")
        require(not claims.wins[k], "a misclassified sample has a curvature radius that wins")

    @property
    def point(self) -> Point:
        """The sample evaluated, with gradients of all differences; infinite ones where the network has kinks."""
        if self._point is None:
            passed = forward(self.facts.model, self.x.reshape(-1))
            self._point = self._looked_at(
                passed, margins(passed.outputs, self.label, self.facts.deviations[self.label])
            )
        return self._point

    def _looked_at(self, passed: Passed, m: Array) -> Point:
        classes, own = self.facts.model.classes, self.label
        others = np.arange(classes) != own
        if not self.facts.smooth:
            return Point(passed, None, own, m, np.full(classes, np.inf), others)
        backed = backward(self.facts.model, passed, np.eye(classes) - np.eye(classes)[own])
        return Point(passed, backed, own, m, gradient_norms(backed, DUAL[self.claims.p]), others)

    @property
    def K(self) -> Array:
        """The checker's own curvature constants for the label; anchored ones where the claimed ones need them.

        Infinite where none are claimed, or where there is no engine for them.
        """
        if self._K is None:
            self._K = self._curvatures()
        return self._K

    def _curvatures(self) -> Array:
        others, claimed = self.point.others, self.claims.K_used[self.k]
        none = np.full(self.facts.model.classes, np.inf)
        if np.isnan(claimed[others]).any() or not self.facts.smooth or self.claims.p != 2:
            return none
        try:
            own: Array = self.facts.K_above[self.label]
        except UnsupportedModule:
            return none
        backed = None if self.facts.model.wide else self.point.backed
        if backed is not None and too_small(claimed, own)[others].any():
            views = views_of(self.facts, self.point.passed)
            own = np.minimum(own, anchored_curvatures(self.facts, self.point.passed, backed, views, self.label))
        return own

    @property
    def L_seen(self) -> Array:
        """The checker's own Lipschitz constants for the label as seen from the input; never above the global ones."""
        if self._L_seen is None:
            facts, p = self.facts, self.claims.p
            L: Array = self.tables.L[self.label]
            if facts.model.wide:
                return L
            slopes = slopes_seen(facts, self.point.passed)
            # ||x||_2 <= n^(1/2 - 1/p) ||x||_p for p > 2, and ||x||_2 <= ||x||_1.
            for norm, factor in {p: 1.0, 2.0: float(up(np.sqrt(self.x.size))) if p == np.inf else 1.0}.items():
                growth = growth_seen(facts, slopes, norm)
                L = L if growth is None else np.minimum(L, up(factor * growth.pairs(self.label)))
                if norm == 2.0:
                    L = np.minimum(L, up(factor * pairs_seen_block_by_block(facts, slopes, self.label)))
            self._L_seen = L
        return self._L_seen

    def check_constants(self) -> None:
        """Require the curvature constants in use, and no gradient here to be longer than a Lipschitz constant."""
        label, others, claimed = self.label, self.point.others, self.claims.K_used[self.k]
        if self.tables.claims_L and self.point.backed is not None:
            steeper = steeper_than(self.point.backed, DUAL[self.claims.p], self.claims.L[label])
            require(not steeper[others].any(), "a gradient at the input is longer than the claimed Lipschitz constant")
        require(not np.nan_to_num(claimed[label]) > 0, "the label has a curvature constant beside itself")
        if np.isnan(claimed[others]).all():
            return
        self.facts.require_smooth()
        require(not np.isnan(claimed[others]).any(), "a curvature constant is missing")
        require_proof(self.claims.p == 2, "curvature constants are covered for p = 2 only", engine=False)
        short = too_small(claimed, self.K) & others
        if not short.any():
            return
        i = int(np.argmax(short))
        backed = self.point.backed
        bent = backed is not None and bends_more_than(
            self.facts, self.x.reshape(-1), backed, label, i, float(claimed[i])
        )
        text = f"K of class {i} is claimed to be {claimed[i]:.9g}, proven is {self.K[i]:.9g}"
        require(not bent, f"{text}, and near the input its gradient changes faster")
        require_proof(False, text, self.tables.known("K") and np.isfinite(self.K[i]))

    def check_formulas(self) -> None:
        """Require the radii that constants alone give."""
        none, K, L = np.full_like(self.K, np.inf), self.K, self.tables.L[self.label]
        by_formula = {"lipschitz": (none, L), "curvature": (K, none), "anchored": (K, none), "combined": (K, L)}
        if not np.isnan(self.claims.radius_by("anchored-lipschitz", self.k)):
            by_formula["anchored-lipschitz"] = none, self.L_seen
        for name, constants in by_formula.items():
            radius = self.claims.radius_by(name, self.k)
            if not np.isnan(radius):
                need = np.full_like(K, self.needed(radius))
                proven = proven_by_constants(self.point, need, *constants)
                text = f"the {name} radius {radius:.9g} is more than is proven"
                tables = {"lipschitz": "L", "anchored-lipschitz": "L", "combined": "KL"}.get(name, "K")
                self._require_radius(np.where(proven, 0.0, need), text, self._engine(tables, {name}))

    def _engine(self, tables: str, named: AbstractSet[str]) -> bool:
        """Whether the checker has rules as good as those that constants came by: else it cannot tell."""
        if self.facts.declared and not named <= LIPSCHITZ | {"lipschitz"}:
            return False  # a declaration may say more than the range of all slopes
        claimed = {"L": self.tables.claims_L, "K": not np.isnan(self.claims.K_used[self.k][self.point.others]).any()}
        own = {"L": self.tables.L[self.label], "K": self.K}
        return all(not claimed[name] or (self.tables.known(name) and np.isfinite(own[name]).all()) for name in tables)

    def _require_radius(self, open_: Array, text: str, engine: bool) -> None:
        """Stop unless no class is open up to a radius > 0: by a counterexample within it, or without a proof."""
        if not open_.any():
            return
        found = misclassified_within(self.facts, self.x.reshape(-1), self.label, open_, self.claims.p, self.cut)
        require(found is None, f"{text}, and class {found} reaches the label within it")
        require_proof(False, text, engine)

    def check_order(self) -> None:
        """Require no method's radius to be larger than the radius."""
        for name, value in self.claims.radii.items():
            require(not value[self.k] > self.claims.radius[self.k], f"the {name} radius is larger than the radius")
        require(bool(np.isinf(self.claims.pair_radius[self.k][self.label])), "the label's own pair has a finite radius")

    def check_radius(self) -> None:
        """Require that every class stays below the label up to its radius, by the kind of method that is named."""
        claims, k, facts, point = self.claims, self.k, self.facts, self.point
        named, shell = self._named
        balls = claims.p == 2 and facts.smooth
        require("misclassified" not in named, "a correct sample is called misclassified")
        lines = claims.p == 2 and (facts.smooth or facts.declared)
        require(lines or "line" not in named, "the method is called line, which is one of smooth networks in l2")
        pair = self.needed(claims.pair_radius[k])
        known = named <= LIPSCHITZ | SEEN | CURVATURE | (BALLS if claims.p == 2 else set())
        open_ = np.where(proven_by_constants(point, pair, *self.constants), 0.0, pair)
        if open_.any() and not np.isnan(claims.radius_by("anchored-lipschitz", k)):
            none = np.full_like(pair, np.inf)
            open_ = np.where(proven_by_constants(point, open_, none, self.L_seen), 0.0, open_)
        if balls and open_.any():
            # A line takes along what shells know: shells alone do not reach its radius.
            order = ("line", "shell") if "line" in named else ("shell", "line", "shell")
            kinds = tuple(kind for kind in order if kind == "line" or (shell and not facts.model.wide))
            open_ = np.where(proven_by_balls(facts, point, open_, self.constants, kinds), 0.0, open_)
            known &= not (facts.model.wide and named & BALLS)
        if open_.any() and LINES & claims.radii.keys() and not facts.model.wide:
            open_ = np.where(self._proven_by_relaxation(open_), 0.0, open_)
            # Lines are drawn anew, and others might prove a little more.
            near = self._proven_by_relaxation(_NEARLY * open_).all()
            known |= not near and named <= LIPSCHITZ | SEEN | CURVATURE | LINES
        i = int(np.argmax(open_ > 0))
        text = f"the radius {claims.pair_radius[k][i]:.9g} of class {i} is more than is proven"
        self._require_radius(open_, text, known and self._engine(self._tables_of(named), named))

    def _proven_by_relaxation(self, r: Array) -> NDArray[np.bool_]:
        """Return which classes lines prove up to r, 0 for one that is proven; from the first that fails on, none."""
        proven = r <= 0
        for radius in np.unique(r[~proven]):
            here = r == radius
            proven |= here & (self._risen(float(radius)) < self.point.m)
            if not proven[here].all():
                break
        return proven

    def _risen(self, radius: float) -> Array:
        """Bound how far every class rises above the label within a radius, and within the box if the balls are cut."""
        if radius not in self._rises:
            eye, model, x = np.eye(self.facts.model.classes), self.facts.model, self.x.reshape(-1)
            cut = None if self.cut is None else (self.cut[0].reshape(-1), self.cut[1].reshape(-1))
            ball = Ball.about(x, self.claims.p, radius, cut)
            found = Relaxation(model, self.point.passed, ball).rises(eye - eye[self.label])
            self._rises[radius] = np.where(self.point.others, found, -np.inf) if np.isfinite(radius) else found + np.inf
        return self._rises[radius]

    @property
    def constants(self) -> tuple[Array, Array]:
        """The checker's own K and L for the label."""
        return self.K, self.tables.L[self.label]

    def _tables_of(self, named: frozenset[str]) -> str:
        """Return the tables that methods take their constants from."""
        return ("L" if named & (LIPSCHITZ | SEEN) else "") + ("K" if named & CURVATURE else "")

    @property
    def _named(self) -> tuple[frozenset[str], bool]:
        """The names of the sample's methods, and whether it has a radius by shells."""
        return self.claims.proven_by[self.k], not np.isnan(self.claims.radius_by("shell", self.k))

    def check_method(self) -> None:
        """Require that the named kind of method proves the radius of the weakest classes, not some other kind.

        Every class has been proven before, each by the kind that reaches farthest; the name is that of the weakest.
        """
        (named, shell), pair = self._named, self.needed(self.claims.pair_radius[self.k])
        tables = self._tables_of(named)
        require_proof(
            bool(tables or named & (BALLS | LINES)),
            f"the radius is by {', '.join(sorted(named))[:80]}, which the checker has no rules for",
            engine=False,
        )
        if "line" in named:
            return  # it takes along what every other kind knows
        if "shell" in named:
            require(shell, "the method is called shell and there is no shell radius")
            return
        (K, L), none = self.constants, np.full_like(self.K, np.inf)
        radius = float(self.needed(self.claims.radius[self.k]))
        if named & LINES:
            rises = self._risen(radius)
            proven = (rises < self.point.m)[pair <= radius]
            require_proof(bool(proven.all()), "lines drawn anew do not prove the radius", engine=False)
            return
        L = self.L_seen if named & SEEN else L
        used = (K if "K" in tables else none), (L if "L" in tables else none)
        proven = proven_by_constants(self.point, np.where(pair <= radius, radius, 0.0), *used)
        text = "the radius is more than the method that it names proves"
        require_proof(bool(proven.all()), text, self._engine(tables, named))

    def check_comparison(self) -> None:
        """Recompute the paper's condition where it is said to hold; too close to call within a part in a million.

        Whether it is known is whether the file has both sides of it.
        """
        L, seen = (self.claims.radius_by(name, self.k) for name in ("lipschitz", "anchored-lipschitz"))
        shortest, rest, point = float(np.fmax(L, seen)), self.point.others, self.point
        used = self.claims.K_used[self.k][rest]
        known = not np.isnan(shortest) and not np.isnan(used).any()
        require(known == bool(self.claims.compared[self.k]), "what is compared is not what there is to compare")
        if not self.claims.wins[self.k]:
            return
        self.facts.require_smooth()
        left = used * shortest**2
        right = 2 * (point.m[rest] - point.g[rest] * shortest)
        clear = _CLEAR * (np.abs(left) + 2 * (point.m[rest] + point.g[rest] * shortest))
        require(bool((left <= right + clear).all()), "the curvature radius is said to win, and does not")

    def check_witness(self) -> None:
        """Require the witness of an attack radius to be misclassified, and as far as is told."""
        claimed = float(self.claims.attack_radius[self.k])
        if np.isinf(claimed):
            return
        witness, label = self.claims.witness(self.k), self.label
        if witness is None or not np.isfinite(witness).all():
            raise Unproven(CONTRADICTED, "an attack radius has no witness")
        low, high = _length((witness - self.x).reshape(-1), self.claims.p)
        sides = self.claims.sides(self.k)
        require(sides is None or _holds(sides, witness), "the witness lies outside of the box")
        near = low <= claimed <= high * (1 + _DISTANCE)
        require(near, f"the witness is at distance {high:.9g}, claimed is {claimed:.9g}")
        outputs = forward(self.facts.model, witness.reshape(-1)).outputs
        gap = outputs.value - outputs.value[label]
        doubt = outputs.error + outputs.error[label] + self.facts.deviations[label]
        require(bool((np.delete(gap + doubt, label) > 0).any()), "the witness is classified correctly")
        strictly = bool((np.delete(gap - doubt, label) > 0).any())
        require_proof(strictly, "the witness is a tie within the checker's rounding", engine=False)


def _holds(sides: tuple[Array, Array], x: Array) -> bool:
    return bool(((sides[0] <= x) & (x <= sides[1])).all())


def _length(v: Array, p: float) -> tuple[float, float]:
    """Enclose the p-norm of a difference of two vectors."""
    top = float(lengths(v[None], p, 1)[0]) * (1 + 4 * U)
    return top * (1 - 8 * (len(v) + 16) * U), top
