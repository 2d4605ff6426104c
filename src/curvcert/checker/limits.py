"""What a network may ask of the checker: bounds on memory and work, from its sizes alone, before anything is formed.

A file of some kilobytes can describe matrices of gigabytes.  What is beyond these bounds cannot be checked.
"""

from collections.abc import Sequence
from itertools import combinations

from curvcert.errors import UnsupportedModule

MOST_ENTRIES = 2**26
"""Entries of all explicit matrices together, beside twice those that a file holds itself."""

_MOST_NUMBERS, _MOST_COVECTORS = 2**23, 2**27
_MOST_ON_IMAGES = 2**43
"""Of a network of kernels: numbers in all values and in covectors for all pairs, and multiplications."""

_MOST_WORK = 2**46
_MOST_GRADIENTS = 2**25
"""Multiplications, a quarter of an hour or more; and entries of the gradients of all pairs of classes."""


class TooLarge(UnsupportedModule):
    """A network that is beyond explicit matrices; as kernels it may still be checked."""


def require_entries(entries: int, most: int) -> None:
    """Refuse matrices that are too large together."""
    if entries > most:
        raise TooLarge(f"matrices of {entries} entries in all, over {most}")


def require_room(sizes: Sequence[int], sources: Sequence[Sequence[int]], activated: Sequence[int], most: int) -> None:
    """Refuse a network whose nodes, of these sizes and with what each reads, would take too much memory or time.

    Every use of an earlier value counts as a matrix, an activation's as the identity in front of it.
    """
    shapes = [(sizes[k], sizes[source]) for k, read in enumerate(sources) for source in read]
    entries = sum(rows * columns for rows, columns in shapes)
    require_entries(entries, most)
    classes = sizes[-1]
    gradients = classes * (classes - 1) // 2 * (sum(sizes[k] for k in activated) + sizes[0])
    if gradients > _MOST_GRADIENTS:
        raise TooLarge(f"gradients of all pairs of {classes} classes with {gradients} entries")
    # Every value's path maps pass all matrices, and every two activations have a norm between them.
    work = 4 * sum(sizes) * entries
    work += sum(_norm_work(sizes[i], sizes[j]) for i, j in combinations(activated, 2))
    if work > _MOST_WORK:
        raise TooLarge(f"a network that takes {work:.1e} multiplications, over {_MOST_WORK:.1e}")


def require_passes(sizes: Sequence[int], passes: Sequence[int], carried: Sequence[int], classes: int) -> None:
    """Refuse a network of kernels that would take too much memory or time.

    `passes` are the multiplications of one pass through every node, `carried` the values whose rows are carried back
    through all before them, and multiplied with each other.
    """
    total = sum(sizes)
    if total > _MOST_NUMBERS or total * classes * classes > _MOST_COVECTORS:
        raise UnsupportedModule(f"values of {total} numbers in all, and pairs of {classes} classes")
    work = sum(passes) * classes * classes
    work += sum(2 * sizes[k] * sum(passes[: k + 1]) + sizes[k] ** 2 * sum(sizes[:k]) for k in carried)
    if work > _MOST_ON_IMAGES:
        raise UnsupportedModule(f"a network that takes {work:.1e} multiplications, over {_MOST_ON_IMAGES:.1e}")


def _norm_work(rows: int, columns: int) -> int:
    short, long = sorted((rows, columns))
    return 2 * short * short * (long + 10 * short)
