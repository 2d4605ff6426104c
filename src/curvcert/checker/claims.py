"""What a certificate file claims, read by the checker itself, and whether the claims contradict each other."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from curvcert.checker.files import Content, read
from curvcert.checker.outward import Array

KIND, VERSION = "curvcert-certificate", 2

_FIELDS = {
    *("curvcert", "p", "samples", "classes", "in_shape", "network", "names", "methods", "assumes", "notes"),
    *("made_by", "proven_by", "inside_box"),
}
_NUMBERS = (
    "radius",
    "attack_radius",
    "search_radius",
    "margin",
)
_OTHERS = {
    *("correct", "curvature_wins", "comparison_known", "method", "inputs", "label", "pair_radius", "L", "K", "K_used"),
    *("witness_index", "witness_points"),
}
_RADII = "radii."
"""What the names of the arrays begin with that hold the radii by one method."""


@dataclass(frozen=True, eq=False)
class Claims:
    """A certificate file's content: what it says about the network and about every sample."""

    network: str
    p: float
    in_shape: tuple[int, ...]
    made_by: tuple[frozenset[str], frozenset[str]]
    assumes: tuple[str, ...]
    inputs: NDArray[np.uint8]
    label: NDArray[np.int64]
    correct: NDArray[np.bool_]
    wins: NDArray[np.bool_]
    compared: NDArray[np.bool_]
    proven_by: tuple[frozenset[str], ...]
    radius: Array
    radii: dict[str, Array]
    attack_radius: Array
    search_radius: Array
    margin: Array
    pair_radius: Array
    L: Array
    K: Array
    K_used: Array
    witness_index: NDArray[np.int64]
    witness_points: Array
    box: tuple[Array, Array] | None
    """The sides of the range of valid inputs: of all samples, or with one row for each."""
    inside_box: bool
    threshold: float | None
    """For a network of one output: what the label 1 is above of, which is its output 0."""

    def sides(self, k: int) -> tuple[Array, Array] | None:
        """Return the lowest and the highest values of a sample's box, of its shape, if there is a box."""
        if self.box is None:
            return None
        own = self.box[0].ndim == 1 + len(self.in_shape) and self.box[0].ndim > 0
        lower, upper = (np.broadcast_to(side[k] if own else side, self.in_shape) for side in self.box)
        return lower, upper

    def radius_by(self, name: str, k: int) -> float:
        """Return the radius of a sample by one method, NaN where it was not run."""
        found = self.radii.get(name)
        return math.nan if found is None else float(found[k])

    def witness(self, k: int) -> Array | None:
        """Return the witness of a sample, if it has one."""
        place = int(np.searchsorted(self.witness_index, k))
        if place == len(self.witness_index) or self.witness_index[place] != k:
            return None
        found: Array = self.witness_points[place]
        return found


def read_claims(path: Path | str) -> Claims:
    """Read a certificate file.

    Raises:
        InvalidFile: if it is cut short, altered, of another kind or version, or contradicts itself.
    """
    content = read(path, KIND, VERSION)
    fields = _FIELDS | ({"threshold"} & set(content.header))
    if set(content.header) != fields:
        content.refuse(f"missing or unknown header fields {sorted(set(content.header) ^ fields)}")
    n, classes, in_shape, p = _sizes(content)
    numbers: dict[str, Array] = {name: content.array(name, "<f8", (n,)) for name in _NUMBERS}
    flags = {name: _flags(content, name, n) for name in ("correct", "curvature_wins", "comparison_known")}
    methods = _texts(content, "methods")
    codes = content.array("method", "<i8", (n,))
    if bool(((codes < 0) | (codes >= len(methods))).any()):
        content.refuse("a method's code has no name")
    made_by, proven_by = _names(content, "made_by"), _names(content, "proven_by")
    if len(proven_by) != len(methods):
        content.refuse("a method has no names, or names have no method")
    if len(made_by) != 2 or len(_texts(content, "names")) != 2 or not isinstance(content.header["network"], str):
        content.refuse("the names of the constants or the network's digest are missing")
    _texts(content, "notes")
    radii = [name for name in content.arrays if re.fullmatch(_RADII + "[a-z0-9-]{1,40}", name)]
    index = content.array("witness_index", "<i8").reshape(-1)
    inside, box = content.field("inside_box", bool), _box(content, n, in_shape)
    if inside and box is None:
        content.refuse("its radii are about the inside of a box that it does not hold")
    claims = Claims(
        network=content.header["network"],
        p=p,
        in_shape=in_shape,
        made_by=(made_by[0], made_by[1]),
        assumes=_texts(content, "assumes"),
        inputs=content.array("inputs", "|u1", (n, 32)),
        label=content.array("label", "<i8", (n,)),
        correct=flags["correct"],
        wins=flags["curvature_wins"],
        compared=flags["comparison_known"],
        proven_by=tuple(proven_by[code] for code in codes),
        pair_radius=content.array("pair_radius", "<f8", (n, classes)),
        L=content.array("L", "<f8", (classes, classes)),
        K=content.array("K", "<f8", (classes, classes)),
        K_used=content.array("K_used", "<f8", (n, classes)),
        radii={name[len(_RADII) :]: content.array(name, "<f8", (n,)) for name in radii},
        witness_index=index,
        witness_points=content.array("witness_points", "<f8", (len(index), *in_shape)),
        box=box,
        inside_box=inside,
        threshold=_threshold(content, classes),
        **numbers,
    )
    known = {*_NUMBERS, *_OTHERS, *radii, *({"box"} if box else ()), *_steps(content, n)}
    if set(content.arrays) != known:
        content.refuse(f"unknown arrays {sorted(set(content.arrays) - known)}")
    _require_consistency(content, claims, classes)
    return claims


def _steps(content: Content, n: int) -> set[str]:
    """Return the name of the array that tells how much of its work a budget allowed, if there is one: no claim."""
    if "steps" not in content.arrays:
        return set()
    if bool((content.array("steps", "<i8", (n,)) < 0).any()):
        content.refuse("a sample has fewer than no steps")
    return {"steps"}


def _box(content: Content, n: int, in_shape: tuple[int, ...]) -> tuple[Array, Array] | None:
    if "box" not in content.arrays:
        return None
    sides = content.array("box", "<f8")
    if sides.shape not in ((2,), (2, *in_shape), (2, n, *in_shape)):
        content.refuse(f"its box is of shape {sides.shape}")
    if not bool((sides[0] <= sides[1]).all()):
        content.refuse("a side of its box is NaN, or a lower one above the upper one")
    return sides[0], sides[1]


def _threshold(content: Content, classes: int) -> float | None:
    if "threshold" not in content.header:
        return None
    found = content.header["threshold"]
    if type(found) not in (int, float) or not math.isfinite(found) or classes != 2:
        content.refuse("its threshold is no finite number, or there are not two classes")
    return float(found)


def _sizes(content: Content) -> tuple[int, int, tuple[int, ...], float]:
    n, classes, shape = (content.header[name] for name in ("samples", "classes", "in_shape"))
    whole = isinstance(shape, list) and len(shape) <= 8
    if not whole or not all(type(value) is int and 0 < value < 2**31 for value in (n, classes, *shape)) or classes < 2:
        content.refuse("its sizes are not positive whole numbers")
    p = content.header["p"]
    if p == "inf":
        return n, classes, tuple(shape), math.inf
    if type(p) not in (int, float) or not 1 <= p < math.inf:
        content.refuse("p is not the number of a norm")
    return n, classes, tuple(shape), float(p)


def _texts(content: Content, name: str) -> tuple[str, ...]:
    found = content.header[name]
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        content.refuse(f"{name} is not a list of strings")
    return tuple(found)


def _names(content: Content, field: str) -> list[frozenset[str]]:
    found = content.header[field]
    if not isinstance(found, list) or not all(isinstance(each, list) for each in found):
        content.refuse(f"{field} is not a list of lists")
    if not all(isinstance(name, str) for each in found for name in each):
        content.refuse(f"{field} does not consist of names")
    return [frozenset(each) for each in found]


def _flags(content: Content, name: str, n: int) -> NDArray[np.bool_]:
    raw: NDArray[Any] = content.array(name, "|b1", (n,)).view(np.uint8)
    if bool((raw > 1).any()):
        content.refuse(f"{name} has an entry that is neither true nor false")
    found: NDArray[np.bool_] = raw == 1
    return found


def _require_consistency(content: Content, claims: Claims, classes: int) -> None:
    correct, radius = claims.correct, claims.radius
    nonnegative = (claims.radius, claims.pair_radius, claims.attack_radius, claims.search_radius)
    partial = (*claims.radii.values(), claims.L, claims.K, claims.K_used)
    index = claims.witness_index
    least = np.where(correct, claims.pair_radius.min(axis=1), 0.0)
    nearest = np.minimum(claims.attack_radius, claims.search_radius)
    wrong = ~correct
    rules = (
        (bool(((claims.label >= 0) & (claims.label < classes)).all()), "a label is not a class"),
        (all(bool((value >= 0).all()) for value in nonnegative), "a radius is negative or NaN"),
        (not any(bool((value < 0).any()) for value in partial), "a radius or constant is negative"),
        (not bool(np.isnan(claims.margin).any()), "a margin is NaN"),
        (bool((radius == least).all()), "a radius is not the least of its pairs'"),
        (
            bool((radius[wrong] == 0).all() and (claims.pair_radius[wrong] == 0).all()),
            "a misclassified one has a radius",
        ),
        (bool((claims.attack_radius[wrong] == 0).all()), "a misclassified sample has an attack radius"),
        (bool((radius[correct] <= nearest[correct]).all()), "a radius reaches beyond a misclassified point"),
        (bool((np.diff(index) > 0).all()), "the samples with a witness are not given in order"),
        (bool(((index >= 0) & (index < len(correct))).all()), "a witness is that of no sample"),
        (bool((correct | ~claims.compared).all()), "a misclassified sample is compared"),
        (bool((claims.compared | ~claims.wins).all()), "a curvature radius wins where nothing is compared"),
        (bool((claims.margin[correct] > 0).all()), "a sample is called correct with a margin of 0 or less"),
    )
    for holds, otherwise in rules:
        if not holds:
            content.refuse(otherwise)
