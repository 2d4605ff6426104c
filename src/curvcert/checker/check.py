r"""Verify a saved certificate, with nothing of what made it: from files to a verdict.

Every claim is an inequality, and every one is checked in the direction in which it could be false: a constant must not
be below the checker's own, a radius must not use up more of the margin than there is.  A claim that was lowered (a
smaller radius, a larger constant) is weaker and still true, so it passes.  With the gradient's norm at most
:math:`\min(g + Kt, L)` at distance t, a radius r is proven if for some q in [0, r]

.. math:: g q + K q^2 / 2 + L (r - q) < m,

m the margin; q near :math:`(L - g)/K` is the best, and any q gives a proof.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from curvcert.checker.anchored import anchored_curvatures, views_of
from curvcert.checker.claims import Claims, read_claims
from curvcert.checker.evaluation import (
    Backed,
    Passed,
    backward,
    forward,
    gradient_norms,
    margins,
)
from curvcert.checker.facts import Facts
from curvcert.checker.lines import by_lines
from curvcert.checker.lipschitz import DUAL
from curvcert.checker.model import read_model
from curvcert.checker.outward import Array, U, lengths, up
from curvcert.checker.shells import Pairs, centres, spent
from curvcert.checker.verdict import CANNOT, PROVEN, REFUSED, Verdict, uniform
from curvcert.errors import InvalidInput, UnsupportedModule

SLACK = 2.0**-30
"""What a saved certificate leaves for the rounding of a checker, relatively."""

_DISTANCE = 4 * SLACK
_CLEAR = 1e-6
"""Below this relative difference the comparison of two radii is left open."""

_EFFORTS = ((24, False, np.inf), (12, True, 1.5), (48, True, 1.05))
"""Shells, whether every norm is taken anew in each of them, and how near the margin a pair must be to be worth it."""

_LIPSCHITZ = {"product", "liplt", "lipsdp-recursion", "through l2"}
_CURVATURE = {"compositional", "unrolled", "crc", "anchored"}


def check_certificate(
    certificate: Path | str, model: Path | str, x: NDArray[np.floating], y: NDArray[np.integer] | None = None
) -> Verdict:
    """Verify a certificate file against a network file and the inputs that it is about.

    Args:
        certificate: what `Certificate.save` wrote.
        model: what `save_network` wrote.
        x: the inputs, with the batch dimension.
        y: the labels, if they are to be compared with the certificate's.

    Raises:
        InvalidFile: if a file is cut short, altered, of another kind or version, or contradicts itself.
        InvalidInput: if x or y do not have the shape of inputs or labels.

    >>> import tempfile, torch, curvcert
    >>> from torch import nn
    >>> from curvcert.network.network_file import save_network
    >>> net = curvcert.trace(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).eval(), torch.zeros(1, 2))
    >>> x = torch.ones(4, 2, dtype=torch.float64)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = curvcert.certify(net, x).save(f"{folder}/certificate")
    ...     _ = save_network(net, f"{folder}/network")
    ...     verdict = check_certificate(f"{folder}/certificate", f"{folder}/network", x.numpy())
    >>> verdict.holds, verdict.status
    (True, ('proven', 'proven', 'proven', 'proven'))
    """
    claims = read_claims(certificate)
    samples = len(claims.label)
    inputs = _inputs(x, claims)
    labels = None if y is None else _labels(y, samples)
    try:
        facts = Facts(read_model(model))
    except UnsupportedModule as why:
        return uniform(samples, CANNOT, f"the model has a part that is not covered: {why}")
    if facts.model.digest != claims.network:
        return uniform(samples, REFUSED, "the certificate is about another network")
    if facts.model.in_shape != claims.in_shape or facts.model.classes != len(claims.L):
        return uniform(samples, REFUSED, "the certificate's shapes are not the network's")
    if claims.assumes:
        return uniform(samples, CANNOT, "it rests on what a user declared about an activation")
    if claims.p not in DUAL:
        return uniform(samples, CANNOT, f"the checker covers p = 1, 2 and inf, not {claims.p:g}")
    with np.errstate(all="ignore"):
        tables = _Tables(facts, claims)
        found = [_sample(tables, claims, inputs[k], k, None if labels is None else labels[k]) for k in range(samples)]
    return Verdict(tuple(status for status, _ in found), tuple(reason for _, reason in found))


def evaluate_network(model: Path | str, x: NDArray[np.floating]) -> tuple[Array, Array]:
    """Return the outputs of a network file by the checker's own forward pass, and bounds on their errors.

    For comparing the file with the model that it is meant to hold.

    Raises:
        InvalidFile: if the file is cut short, altered, or does not describe a network.
        UnsupportedModule: if the network has a part that the checker does not cover.

    >>> import tempfile, torch, curvcert
    >>> from torch import nn
    >>> from curvcert.network.network_file import save_network
    >>> model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Tanh()).eval()
    >>> _ = model[0].weight.data.copy_(torch.tensor([[0.0], [1.0]]))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_network(curvcert.trace(model, torch.zeros(1, 1)), f"{folder}/network")
    ...     value, error = evaluate_network(path, np.ones((1, 1)))
    >>> value.round(6).tolist(), bool(error.max() < 1e-13)
    ([[0.0, 0.761594]], True)
    """
    facts = Facts(read_model(model))
    inputs = np.ascontiguousarray(x, np.float64)
    if inputs.shape[1:] != facts.model.in_shape:
        raise InvalidInput(f"The network takes inputs of shape {facts.model.in_shape}, got {inputs.shape[1:]}.")
    found = [forward(facts.model, one.reshape(-1)).outputs for one in inputs]
    return np.array([one.value for one in found]), np.array([one.error for one in found])


def _inputs(x: NDArray[np.floating], claims: Claims) -> Array:
    inputs = np.ascontiguousarray(x, np.float64)
    if inputs.shape != (len(claims.label), *claims.in_shape):
        raise InvalidInput(
            f"The certificate is about inputs of shape {(len(claims.label), *claims.in_shape)}, got {inputs.shape}."
        )
    return inputs


def _labels(y: NDArray[np.integer], samples: int) -> NDArray[np.integer]:
    labels = np.asarray(y)
    if labels.shape != (samples,) or labels.dtype.kind not in "iu":
        raise InvalidInput(f"Labels are {samples} whole numbers, got {labels.dtype} of shape {labels.shape}.")
    return labels


class _Unproven(Exception):
    """A claim that is not proven: its status and the reason."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def _refuse(holds: bool, reason: str, coverable: bool = True) -> None:
    """Stop with "refused" unless a claim holds, or with "cannot check" where the checker lacks the method."""
    if not holds:
        raise _Unproven(REFUSED if coverable else CANNOT, reason)


@dataclass(frozen=True, eq=False)
class _Tables:
    """The claimed tables of constants beside the checker's own; a fault there is one of every sample."""

    facts: Facts
    claims: Claims

    @cached_property
    def L(self) -> Array:
        """The checker's own Lipschitz table."""
        return self.facts.L(self.claims.p)

    @cached_property
    def fault(self) -> tuple[str, str] | None:
        """What is wrong with the claimed tables, with its status, or None."""
        for name, claimed, method in zip("LK", (self.claims.L, self.claims.K), self.claims.names, strict=True):
            if np.isnan(claimed[~np.eye(len(claimed), dtype=bool)]).all():
                if np.nan_to_num(np.diagonal(claimed)).any():
                    return REFUSED, f"the table {name} has a diagonal and nothing else"
                continue
            if name == "K" and self.claims.p != 2:
                return CANNOT, "curvature constants are covered for p = 2 only"
            if name == "K" and not self.facts.smooth:
                return REFUSED, "a network with kinks has no curvature constants"
            own = self.L if name == "L" else self.facts.K
            if not np.array_equal(claimed, claimed.T) or np.diagonal(claimed).any() or np.isnan(claimed).any():
                return REFUSED, f"the table {name} is not that of differences of classes"
            short = ~(claimed >= own)  # a NaN of ours is no proof
            if short.any():
                i, j = np.argwhere(short)[0]
                text = f"{name} of classes {i} and {j} is claimed to be {claimed[i, j]:.9g}, proven is {own[i, j]:.9g}"
                known = {"L": _LIPSCHITZ, "K": _CURVATURE}[name]
                return REFUSED if _family(method) <= known else CANNOT, text
        return None


def _family(method: str) -> set[str]:
    """Return the names of the methods that a certificate's own name for one puts together."""
    parts = method.replace(" with ", " / ").split(" / ")
    found = set()
    for part in parts:
        head, _, tail = part.partition(" through ")
        found |= {head.split(" (")[0].strip()} | ({"through l2"} if tail == "l2" else set())
    return found


@dataclass(frozen=True, eq=False)
class _Point:
    """The checker's own view of one sample."""

    passed: Passed
    backed: Backed | None
    m: Array
    g: Array
    others: NDArray[np.bool_]


def _sample(tables: _Tables, claims: Claims, x: Array, k: int, label: int | None) -> tuple[str, str]:
    try:
        _check_sample(tables, claims, x, k, label)
    except _Unproven as found:
        return found.status, str(found)
    return PROVEN, ""


def _check_sample(tables: _Tables, claims: Claims, x: Array, k: int, label: int | None) -> None:
    facts, own = tables.facts, int(claims.label[k])
    content = f"{list(x.shape)}".encode() + np.ascontiguousarray(x, "<f8").tobytes()
    _refuse(hashlib.sha256(content).digest() == claims.inputs[k].tobytes(), "the input is another one")
    _refuse(label is None or label == own, f"the certificate is about class {own}, the label is {label}")
    _refuse(bool(np.isfinite(x).all()), "the input is not finite")
    if tables.fault is not None:
        raise _Unproven(*tables.fault)
    passed = forward(facts.model, x.reshape(-1))
    m = margins(passed.outputs, own, facts.deviations[own])
    _check_margin(claims, passed, m, k)
    if not claims.correct[k]:
        _refuse(not any(value[k] > 0 for value in claims.radii.values()), "a misclassified sample has a radius")
        _refuse(claims.method[k] == "misclassified", "a misclassified sample has a method")
        _refuse(not claims.wins[k], "a misclassified sample has a curvature radius that wins")
        return
    point = _seen_from(facts, claims, passed, m, own)
    K = _check_constants(tables, claims, point, k)
    _check_radii(tables, claims, point, K, k)
    _check_comparison(tables, claims, point, K, k)
    _check_witness(facts, claims, x, k)


def _seen_from(facts: Facts, claims: Claims, passed: Passed, m: Array, own: int) -> _Point:
    """Add gradients to an evaluated sample; infinite ones where the network has kinks."""
    classes = facts.model.classes
    others = np.arange(classes) != own
    if not facts.smooth:
        return _Point(passed, None, m, np.full(classes, np.inf), others)
    rows = np.eye(classes) - np.eye(classes)[own]
    backed = backward(facts.model, passed, rows)
    return _Point(passed, backed, m, gradient_norms(backed, DUAL[claims.p]), others)


def _check_margin(claims: Claims, passed: Passed, m: Array, k: int) -> None:
    own = int(claims.label[k])
    logits, error = passed.outputs.value, passed.outputs.error
    ceiling = np.delete(logits[own] + error[own] - logits + error, own).min()
    claimed = float(claims.margin[k])
    _refuse(
        claimed <= ceiling + 8 * U * abs(ceiling), f"the margin is claimed to be {claimed:.9g}, it is {ceiling:.9g}"
    )
    if claims.correct[k]:
        _refuse(float(m.min()) > 0, "the margin at the input is not proven to be positive")
    else:
        # What rounding leaves open may be called misclassified; what is clearly correct may not.
        tolerance = 1e-9 * (1 + float(np.abs(logits).max()))
        _refuse(float(m.min()) <= tolerance, "a correctly classified sample is called misclassified")


def _check_constants(tables: _Tables, claims: Claims, point: _Point, k: int) -> Array:
    """Return the checker's own curvature constants, no larger than claimed; infinite where none are claimed."""
    facts, label, claimed = tables.facts, int(claims.label[k]), claims.K_used[k]
    own: Array
    none = np.full(facts.model.classes, np.inf)
    _refuse(not np.nan_to_num(claimed[label]) > 0, "the label has a curvature constant beside itself")
    if np.isnan(claimed[point.others]).all():
        return none
    _refuse(facts.smooth, "a network with kinks has no curvature constants")
    _refuse(claims.p == 2, "curvature constants are covered for p = 2 only", coverable=False)
    _refuse(not np.isnan(claimed[point.others]).any(), "a curvature constant is missing")
    own = facts.K[label]
    if not bool((claimed >= own)[point.others].all()):
        assert point.backed is not None
        views = views_of(facts, point.passed)
        anchored = anchored_curvatures(facts, point.passed, point.backed, views, label)
        own = np.minimum(own, anchored)
    short = ~(claimed >= own) & point.others
    if short.any():
        i = int(np.argmax(short))
        text = f"K of class {i} is claimed to be {claimed[i]:.9g}, proven is {own[i]:.9g}"
        _refuse(False, text, coverable=_family(claims.names[1]) <= _CURVATURE)
    return own


def _used_up(r: Array, g: Array, K: Array, L: Array) -> Array:
    """Bound what a margin loses within r, see the module's docstring; infinite K or L count as missing."""
    q = np.where(np.isfinite(K), np.clip((L - g) / np.where(K > 0, K, np.inf), 0.0, r), 0.0)
    q = np.where(np.isfinite(L) & (K > 0), q, np.where(np.isfinite(K), r, 0.0))
    rising = np.where(q > 0, g * q + 0.5 * np.where(np.isfinite(K), K, 0.0) * q * q, 0.0)
    flat = np.where(r - q > 0, L * (r - q) + 4 * U * np.where(np.isfinite(L), L, 0.0) * r, 0.0)
    return up(rising + flat, 8)


def _check_radii(tables: _Tables, claims: Claims, point: _Point, K: Array, k: int) -> None:
    facts, label, rest = tables.facts, int(claims.label[k]), point.others
    used_L = not np.isnan(claims.L[label][rest]).any()
    L = tables.L[label] if used_L else np.full_like(K, np.inf)
    none = np.full_like(K, np.inf)
    m, g = point.m[rest], point.g[rest]
    by_formula = {"lipschitz": (none, L), "curvature": (K, none), "anchored": (K, none), "combined": (K, L)}
    for name, constants in by_formula.items():
        radius = claims.radius_by(name, k)
        if not np.isnan(radius):
            lost = _used_up(np.full(rest.sum(), radius), g, constants[0][rest], constants[1][rest])
            _refuse(bool((lost < m).all()), f"the {name} radius {radius:.9g} is more than is proven")
    pair, radius = claims.pair_radius[k], float(claims.radius[k])
    for name, value in claims.radii.items():
        _refuse(not value[k] > radius, f"the {name} radius is larger than the radius")
    _refuse(bool(np.isinf(pair[label])), "the label's own pair has a finite radius")
    family, line = _family(claims.method[k]), claims.p == 2 and facts.smooth
    _refuse(line or "line" not in family, "the method is called line, which is one of smooth networks in l2")
    shell = not np.isnan(claims.radius_by("shell", k))
    proven = ~rest
    proven[rest] = _used_up(pair[rest], g, K[rest], L[rest]) < m
    if line and not proven.all():
        # A line takes along what shells know: shells alone do not reach its radius.
        order = ("line", "shell") if "line" in family else ("shell", "line", "shell")
        kinds = tuple(kind for kind in order if shell or kind == "line")
        proven = _by_balls(facts, point, label, np.where(proven, 0.0, pair), (K, L), kinds)
    missing = np.flatnonzero(~proven)
    if len(missing):
        i = int(missing[0])
        text = f"the radius {pair[i]:.9g} of class {i} is more than is proven"
        known = family <= _LIPSCHITZ | _CURVATURE | ({"shell", "line"} if claims.p == 2 else set())
        _refuse(False, text, coverable=known)
    _check_method(family, radius, pair, point, K, L, shell)


def _check_method(family: set[str], radius: float, pair: Array, point: _Point, K: Array, L: Array, shell: bool) -> None:
    """Require that the named kind of method proves the radius of the weakest classes, not some other kind.

    Every class has been proven before, each by the kind that reaches farthest; the name is that of the weakest.
    """
    _refuse("misclassified" not in family, "a correct sample is called misclassified")
    kinds = {"Lipschitz": bool(family & _LIPSCHITZ), "curvature": bool(family & _CURVATURE)}
    kinds |= {name: name in family for name in ("shell", "line")}
    _refuse(any(kinds.values()), "the method has a name that the checker does not know", coverable=False)
    if kinds["line"]:
        return  # it takes along what every other kind knows
    if kinds["shell"]:
        _refuse(shell, "the method is called shell and there is no shell radius")
        return
    none = np.full_like(K, np.inf)
    rest = point.others & (pair <= radius)
    constants = (K if kinds["curvature"] else none)[rest], (L if kinds["Lipschitz"] else none)[rest]
    lost = _used_up(np.full(rest.sum(), radius), point.g[rest], *constants)
    _refuse(bool((lost < point.m[rest]).all()), "the radius is more than the method that it names proves")


def _by_balls(
    facts: Facts, point: _Point, label: int, r: Array, constants: tuple[Array, Array], kinds: tuple[str, ...]
) -> NDArray[np.bool_]:
    """Tell which pairs are proven up to r, by shells or by lines, in the order given; 0 stands for a proven one."""
    assert point.backed is not None
    open_, before = r > 0, dict.fromkeys(kinds, -1)
    for kind in kinds:
        # Some pair may keep shells from looking at the others: again if, and only if, a line has proven it.
        if not open_.any() or np.isinf(r[open_]).any() or before[kind] == open_.sum():
            continue
        before[kind] = int(open_.sum())
        rest = np.where(open_, r, 0.0)
        if kind == "line":
            open_ &= ~by_lines(facts, point.passed, point.backed, label, rest)
        else:
            open_ &= ~_by_shells(facts, point, rest, *constants)
    return ~open_


def _by_shells(facts: Facts, point: _Point, r: Array, K: Array, L: Array) -> NDArray[np.bool_]:
    """Tell which pairs are proven up to r > 0 by bounds over balls, the cheap ones first."""
    if not r.any():
        return np.zeros(len(r), bool)
    assert point.backed is not None
    at = centres(facts, point.passed, point.backed)
    lost = np.where(r > 0, np.inf, 0.0)
    for shells, exact, within in _EFFORTS:
        index = np.flatnonzero((lost >= point.m) & (lost <= within * point.m))
        if len(index) < int((lost >= point.m).sum()):
            break  # a pair that is far from proven spoils the sample, whatever the others do
        pairs = Pairs(index, point.g[index], K[index], L[index])
        if len(index):
            lost[index] = spent(facts, at, r[index], pairs, shells, exact)
    return (r > 0) & (lost < point.m)


def _check_comparison(tables: _Tables, claims: Claims, point: _Point, K: Array, k: int) -> None:
    """Recompute the paper's condition where it is said to hold; too close to call within a part in a million."""
    if not claims.wins[k]:
        return
    shortest = claims.radius_by("lipschitz", k)
    rest = point.others
    if np.isnan(shortest) or not np.isfinite(K[rest]).all():
        _refuse(False, "the curvature radius is said to win with nothing to compare")
    left = claims.K_used[k][rest] * shortest**2
    right = 2 * (point.m[rest] - point.g[rest] * shortest)
    clear = _CLEAR * (np.abs(left) + 2 * (point.m[rest] + point.g[rest] * shortest))
    _refuse(bool((left <= right + clear).all()), "the curvature radius is said to win, and does not")


def _check_witness(facts: Facts, claims: Claims, x: Array, k: int) -> None:
    claimed = float(claims.attack_radius[k])
    if np.isinf(claimed):
        return
    witness, label = claims.witness(k), int(claims.label[k])
    if witness is None or not np.isfinite(witness).all():
        raise _Unproven(REFUSED, "an attack radius has no witness")
    length = _length((witness - x).reshape(-1), claims.p)
    near = length[0] <= claimed <= length[1] * (1 + _DISTANCE)
    _refuse(near, f"the witness is at distance {length[1]:.9g}, claimed is {claimed:.9g}")
    outputs = forward(facts.model, witness.reshape(-1)).outputs
    gap = outputs.value - outputs.value[label]
    doubt = outputs.error + outputs.error[label] + facts.deviations[label]
    _refuse(bool((np.delete(gap + doubt, label) > 0).any()), "the witness is classified correctly")
    strictly = bool((np.delete(gap - doubt, label) > 0).any())
    _refuse(strictly, "the witness is a tie within the checker's rounding", coverable=False)


def _length(v: Array, p: float) -> tuple[float, float]:
    """Enclose the p-norm of a difference of two vectors."""
    top = float(lengths(v[None], p, 1)[0]) * (1 + 4 * U)
    return top * (1 - 8 * (len(v) + 16) * U), top
