"""Accuracy against the size of a perturbation: what is certified, what is falsified, and the gap between."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from curvcert.certificates import Certificate
from curvcert.picture_files import write_figure


def draw_accuracy(certificate: Certificate, path: str | Path, epsilons: Sequence[float]) -> None:
    """Draw certified accuracy, the upper bounds by witnesses and by a search, and the gap, into a file.

    The name's ending chooses the format: .png, .svg or .pdf.
    """
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    certificate.plot(figure.add_subplot(), epsilons)
    write_figure(figure, path)
