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
    certified = [100 * certificate.certified_accuracy(eps) for eps in epsilons]
    attacked = [100 * certificate.attacked_accuracy(eps) for eps in epsilons]
    searched = [100 * certificate.searched_accuracy(eps) for eps in epsilons]
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(epsilons, certified, searched, color="#999999", alpha=0.25, label="not known")
    axes.plot(epsilons, attacked, color="#b35806", linestyle="--", label="at most, by witnesses")
    axes.plot(epsilons, searched, color="#b35806", label="at most, by witnesses and PGD")
    axes.plot(epsilons, certified, color="#2166ac", label="at least, certified")
    axes.set_xlabel(f"size of the perturbation (l{certificate.p:g})")
    axes.set_ylabel("robust accuracy, %")
    axes.set_xlim(0, max(epsilons))
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    write_figure(figure, path)
