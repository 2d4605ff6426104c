"""The type checker that jaxtyping's import hook applies to curvcert under pytest: shapes, and only shapes.

Annotations without a shape are left to mypy: checking them too would hide, behind its own error,
what curvcert says to a user who passes a wrong value.
"""

from collections.abc import Callable
from typing import Any, get_args

from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the annotations of a function that hold a shape, as Float[Tensor, "batch classes"] does."""
    function.__annotations__ = {name: hint for name, hint in function.__annotations__.items() if _has_shape(hint)}
    return _check(function)


def _has_shape(hint: object) -> bool:
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(map(_has_shape, get_args(hint)))
