"""Time limits: a fixed plan of work that a budget cuts short, and changes in no other way.

Whoever runs a plan opens `Budget.limits()` around a piece of work.  Inside, `checkpoint` stands before whatever takes
time, such as every product with a linear map, and ends the piece by `OutOfTime` once the budget is spent.  What was
proven by then stays.  The limit is that of the running context, not an argument: it would otherwise be one of every
rule for every map.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import final

from curvcert.errors import InvalidInput


class OutOfTime(Exception):
    """The budget of the running piece of work is spent."""


@final
@dataclass(frozen=True, eq=False)
class Budget:
    """Seconds that work may take, counted from when this is made; tests replace the clock.

    >>> ticks = iter(range(10))
    >>> budget = Budget(2.5, clock=lambda: float(next(ticks)))  # at 0
    >>> budget.is_spent, budget.is_spent, budget.is_spent
    (False, False, True)
    """

    seconds: float
    clock: Callable[[], float] = time.monotonic
    begun: float = field(init=False)

    def __post_init__(self) -> None:
        if isinstance(self.seconds, bool) or not isinstance(self.seconds, int | float) or not self.seconds > 0:
            raise InvalidInput(f"budget is a positive number of seconds, got {self.seconds!r}. Leave it out for none.")
        object.__setattr__(self, "begun", self.clock())

    @property
    def elapsed(self) -> float:
        """Seconds since it was made."""
        return self.clock() - self.begun

    @property
    def is_spent(self) -> bool:
        """Whether its time is over."""
        return self.elapsed > self.seconds

    def until(self, seconds: float) -> "Budget":
        """Return one that began at the same moment and ends after so many seconds."""
        other = Budget(max(seconds, math.ulp(0.0)), lambda: self.begun)
        object.__setattr__(other, "clock", self.clock)
        return other

    @contextmanager
    def limits(self) -> Iterator[None]:
        """End what runs inside by `OutOfTime` when this budget, or one around it, is spent."""
        token = _LIMITS.set((*_LIMITS.get(), self))
        try:
            checkpoint()
            yield
        finally:
            _LIMITS.reset(token)


_LIMITS: ContextVar[tuple[Budget, ...]] = ContextVar("limits", default=())


def budget_of(given: float | Budget | None) -> Budget | None:
    """Return the budget that is meant: seconds from now on, one that began before, or none.

    Raises:
        InvalidInput: for what is not a positive number of seconds.
    """
    return given if given is None or isinstance(given, Budget) else Budget(given)


def checkpoint() -> None:
    """Raise `OutOfTime` if a budget that limits what is running is spent; cheap, and nothing without a budget."""
    if any(budget.is_spent for budget in _LIMITS.get()):
        raise OutOfTime
