"""The type checker that jaxtyping's import hook applies to curvcert under pytest: shapes, and only shapes.

Annotations without a shape are left to mypy: checking them too would hide, behind its own error,
what curvcert says to a user who passes a wrong value.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import jaxtyping
from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, install_import_hook

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))
_jaxtyped = jaxtyping.jaxtyped


def install() -> None:
    """Check shapes in curvcert from now on: call it before curvcert is imported."""
    # jaxtyping's wrapper binds every call's arguments, which took more time than the tests themselves:
    # the hook puts it around every function, and here those without a shape are let go.
    jaxtyping.jaxtyped = _jaxtyped_where_shapes_are
    install_import_hook("curvcert", f"{check_shapes.__module__}.{check_shapes.__name__}")


def check_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the annotations of a function that hold a shape, as Float[Tensor, "batch classes"] does."""
    function.__annotations__ = {name: hint for name, hint in function.__annotations__.items() if _has_shape(hint)}
    return _check(function)


def _jaxtyped_where_shapes_are(function: Any = None, **options: Any) -> Any:
    if function is None:
        return partial(_jaxtyped_where_shapes_are, **options)
    holder = getattr(function, "__init__", function) if isinstance(function, type) else function
    hints = getattr(holder, "__annotations__", {}).values()
    return _jaxtyped(function, **options) if any(map(_may_have_shape, hints)) else function


def _may_have_shape(hint: object) -> bool:
    return isinstance(hint, str) or _has_shape(hint)


def _has_shape(hint: object) -> bool:
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(map(_has_shape, get_args(hint)))
