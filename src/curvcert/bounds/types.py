"""What a result is: a `Bound` or an `Interval`, proven, or an `Estimate`, not; and the scope that it holds in.

The two are unrelated types on purpose.  Whatever certifies asks for a `Bound`, so that a number
from power iteration or sampling cannot slip into a certificate.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

from curvcert import html
from curvcert.errors import InvalidInput
from curvcert.norms import validate_p


@dataclass(frozen=True)
class Global:
    """Both points anywhere: serves every scope."""


@dataclass(frozen=True, eq=False)
class Anchor:
    """One point fixed at x, the other anywhere; one value per sample."""

    x: Tensor


@dataclass(frozen=True, eq=False)
class Ball:
    """Both points in the closed ball of radius r about x; one value per sample."""

    x: Tensor
    r: Tensor


Scope = Global | Anchor | Ball

Side = Literal["both", "above", "below"]
SIDES: tuple[Side, ...] = ("both", "above", "below")
"""What a curvature bounds of a scalar's second derivative: its norm, its largest eigenvalue, or minus the least."""


@dataclass(frozen=True, eq=False)
class LayerTerm:
    """One line of a per-layer breakdown: which layer, what quantity, how large, by which method."""

    layer: str
    quantity: str
    value: Tensor
    method: str = ""

    def __repr__(self) -> str:
        by = f" by {self.method}" if self.method else ""
        return f"{self.layer}: {self.quantity} {_show(self.value)}{by}"


@dataclass(frozen=True, eq=False, repr=False)
class Bound:
    """A proven upper bound, with the norms, the scope and the method that it was proven in.

    `method` says in words how, `methods` names the methods that it rests on.  `per_layer` tells where the looseness
    is, `assumes` what a user declared and we could only sample, `skipped` which methods did not apply and why, `notes`
    what to know before use.  A curvature from one `side` says nothing about the other.

    >>> Bound(torch.tensor(2.0, dtype=torch.float64), p=2, q=2, method="product")
    Bound(<= 2, l2 -> l2, global, by product)
    """

    value: Tensor
    p: float
    q: float
    scope: Scope = field(default_factory=Global)
    method: str = ""
    per_layer: tuple[LayerTerm, ...] = ()
    assumes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    side: Side = "both"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.method and not self.methods:
            object.__setattr__(self, "methods", (self.method,))
        _validate_norms(self)
        _validate_value(self)
        if self.value.dtype != torch.float64:
            raise InvalidInput(f"A Bound holds float64, got {self.value.dtype}. Compute it in float64.")

    def __float__(self) -> float:
        return _as_float(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.value.detach().cpu().numpy(), dtype=dtype)

    def __lt__(self, other: Any) -> bool:
        return float(self) < _comparable(other)

    def __le__(self, other: Any) -> bool:
        return float(self) <= _comparable(other)

    def __gt__(self, other: Any) -> bool:
        return float(self) > _comparable(other)

    def __ge__(self, other: Any) -> bool:
        return float(self) >= _comparable(other)

    # Without this an array, or a number of numpy's, would take the value and compute with it.
    __array_ufunc__ = None

    def _arithmetic(self, *others: Any) -> NoReturn:
        raise TypeError(
            "A Bound has no arithmetic, since the result would no longer be rounded outward. Use float(bound), or "
            "bound.value, and count the rounding yourself."
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _arithmetic
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _arithmetic
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __neg__ = __abs__ = __round__ = _arithmetic

    def __repr__(self) -> str:
        assumes = f", assumes {'; '.join(self.assumes)}" if self.assumes else ""
        side = "" if self.side == "both" else f", from {self.side}"
        notes = f"; note: {' '.join(self.notes)}" if self.notes else ""
        return f"Bound(<= {_describe(self)}{side}{assumes}{notes})"

    def _repr_html_(self) -> str:
        rows: list[tuple[str, object]] = [
            ("at most", _show(self.value)),
            ("norms", f"l{self.p:g} to l{self.q:g}"),
            ("scope", type(self.scope).__name__.lower()),
        ]
        rows += [("side", self.side)] if self.side != "both" else []
        rows += [("method", self.method)] if self.method else []
        rows += [("assumes", line) for line in self.assumes]
        rows += [("note", line) for line in self.notes]
        rows += [(f"layer {term.layer}", f"{term.quantity} {_show(term.value)}") for term in self.per_layer]
        return html.table(rows)


@dataclass(frozen=True, eq=False, repr=False)
class Estimate:
    """A number near the truth on an unknown side of it: for training, never for a certificate.

    Its value is not looked at, which would wait for the device at every step: it may be NaN where weights are.

    >>> Estimate(torch.tensor(2.0), p=2, q=2, method="power iteration")
    Estimate(~ 2, l2 -> l2, global, by power iteration)
    """

    value: Tensor
    p: float
    q: float
    scope: Scope = field(default_factory=Global)
    method: str = ""
    per_layer: tuple[LayerTerm, ...] = ()

    def __post_init__(self) -> None:
        _validate_norms(self)

    def __float__(self) -> float:
        return _as_float(self)

    def __repr__(self) -> str:
        return f"Estimate(~ {_describe(self)})"


@dataclass(frozen=True, eq=False, repr=False)
class Interval:
    """Proven lower and upper values, elementwise; `assumes` tells what a user declared and we could only sample.

    >>> Interval(torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)).width
    tensor([[1., 1.]], dtype=torch.float64)
    """

    lower: Tensor
    upper: Tensor
    assumes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.lower.shape != self.upper.shape or {self.lower.dtype, self.upper.dtype} != {torch.float64}:
            raise InvalidInput("An Interval holds two float64 tensors of one shape.")
        if not bool((self.lower <= self.upper).all()):
            raise InvalidInput("An Interval needs lower <= upper, and no NaN.")

    @property
    def width(self) -> Tensor:
        """How far apart both are."""
        return self.upper - self.lower

    def __repr__(self) -> str:
        assumes = f", assumes {'; '.join(self.assumes)}" if self.assumes else ""
        lowest, highest = float(self.lower.min()), float(self.upper.max())
        return f"Interval([{lowest:.6g}, {highest:.6g}], shape {tuple(self.lower.shape)}{assumes})"


def _comparable(other: Any) -> float:
    """Return the number that a Bound is compared with."""
    if isinstance(other, Estimate):
        raise TypeError("An Estimate is on an unknown side of the truth. Compare float(estimate) if you mean to.")
    return float(other)


def _validate_norms(result: Bound | Estimate) -> None:
    object.__setattr__(result, "p", validate_p(result.p))
    object.__setattr__(result, "q", validate_p(result.q, "q"))


def _validate_value(bound: Bound) -> None:
    value = bound.value.detach()
    if bool(torch.isnan(value).any()) or bool((value < 0).any()):
        raise InvalidInput(
            f"A Bound is a nonnegative number, got {_show(value)}. Check the weights for NaN and overflow."
        )


def _as_float(result: Bound | Estimate) -> float:
    if result.value.numel() != 1:
        raise InvalidInput(
            f"float() needs a single value, this result has shape {tuple(result.value.shape)}. Use .value."
        )
    return float(result.value.detach())


def _describe(result: Bound | Estimate) -> str:
    scope = type(result.scope).__name__.lower()
    by = f", by {result.method}" if result.method else ""
    return f"{_show(result.value)}, l{result.p:g} -> l{result.q:g}, {scope}{by}"


def _show(value: Tensor) -> str:
    value = value.detach()
    if value.numel() == 1:
        return f"{float(value):.6g}"
    return f"[{float(value.min()):.6g} .. {float(value.max()):.6g}], shape {tuple(value.shape)}"
