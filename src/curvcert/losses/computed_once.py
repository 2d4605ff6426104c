"""A property computed when it is first read, in a form that torch.compile can follow."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class computed_once(Generic[T]):
    """`functools.cached_property` without its lock, which Python 3.11 still has and torch.compile cannot enter.

    >>> class Constants:
    ...     @computed_once
    ...     def norm(self) -> float:
    ...         print("computing")
    ...         return 2.0
    >>> now = Constants()
    >>> now.norm, now.norm
    computing
    (2.0, 2.0)
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute, self.name, self.__doc__ = compute, compute.__name__, compute.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> "computed_once[T]": ...

    @overload
    def __get__(self, owner: object, kind: type | None = None) -> T: ...

    def __get__(self, owner: object | None, kind: type | None = None) -> "T | computed_once[T]":
        """Compute the value and keep it among the owner's attributes, where it is found from then on."""
        if owner is None:
            return self
        value = self.compute(owner)
        owner.__dict__[self.name] = value
        return value
