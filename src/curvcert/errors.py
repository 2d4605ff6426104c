"""The named errors of curvcert: each says what was expected, what came and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class CurvcertError(Exception):
    """Root of every error that curvcert raises on purpose."""


class InvalidInput(CurvcertError, ValueError):
    """A value outside what a function is defined for (a NaN weight, p < 1, a wrong shape)."""


class OutOfRange(InvalidInput):
    """Weights so small, or so large, that float64 cannot hold what is asked about them."""


class InvalidFile(InvalidInput):
    """A file that is cut short, altered, of another kind or version, or that contradicts itself."""


class CannotWrite(CurvcertError, OSError):
    """A disk that is full, or a folder that may not be written to, or that another run is writing into."""


class UnsupportedModule(CurvcertError, TypeError):
    """A module or graph node that curvcert does not recognise, named with its path."""


class UnsupportedActivation(CurvcertError, TypeError):
    """An activation for which the requested constant does not exist or is not known."""


class UnsupportedOperator(CurvcertError, TypeError):
    """A linear map for which the requested operation has no rule."""


class UnsupportedBlock(CurvcertError, TypeError):
    """A network block to which a bound's hypotheses do not apply."""


class UnsupportedNorm(CurvcertError, ValueError):
    """A pair of norms that a bound does not cover."""


class SoundnessError(CurvcertError, RuntimeError):
    """Something that soundness rests on was contradicted (a declared range, a traced forward pass)."""


class TrainingDiverged(CurvcertError, RuntimeError):
    """A training run whose loss became NaN or infinite; names the last good checkpoint."""


def meant(given: str, known: Iterable[str]) -> str:
    """Return a question for the name that may be meant, to stand behind a message; nothing where none is like it.

    >>> meant("liptl", ["auto", "liplt"]), meant("x", ["auto"])
    (" Did you mean 'liplt'?", '')
    """
    found = get_close_matches(given, known, n=1)
    return f" Did you mean {found[0]!r}?" if found else ""
