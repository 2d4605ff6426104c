"""Pictures as files: a figure gives the same bytes whenever it is written."""

from io import BytesIO
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from curvcert.whole_files import write_whole

_DATES = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
"""What leaves the date out, by the format."""


def write_figure(figure: Figure, path: str | Path, transparent: bool = False) -> None:
    """Write a figure in the format of the name's ending: .png, .svg or .pdf."""
    ending, content = Path(path).suffix.lower(), BytesIO()
    # Without a salt the identifiers in an SVG are drawn at random.
    with rc_context({"svg.hashsalt": "curvcert"}):
        figure.savefig(content, format=ending[1:], dpi=160, transparent=transparent, metadata=_DATES.get(ending, {}))
    write_whole(path, content.getvalue())
