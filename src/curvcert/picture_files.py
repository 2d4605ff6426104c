"""Pictures as files: a figure gives the same bytes whenever it is written."""

from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

_DATES = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
"""What leaves the date out, by the format."""


def write_figure(figure: Figure, path: str | Path, transparent: bool = False) -> None:
    """Write a figure in the format of the name's ending: .png, .svg or .pdf."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a salt the identifiers in an SVG are drawn at random.
    with rc_context({"svg.hashsalt": "curvcert"}):
        figure.savefig(path, dpi=160, transparent=transparent, metadata=_DATES.get(path.suffix.lower(), {}))
