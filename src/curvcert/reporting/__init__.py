"""Pictures of results."""

from curvcert.reporting.accuracy import draw_accuracy
from curvcert.reporting.witnesses import draw_witnesses

__all__ = ["draw_accuracy", "draw_witnesses"]
