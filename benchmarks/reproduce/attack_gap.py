"""The robust accuracy of the curvature-trained 6F at 36/255, between certificates and attack certificates.

Claim: the two enclose it in a narrow range.
Hardware: one accelerator; the record says which.
Trials: one network, all test images.
"""

from pathlib import Path

from benchmarks.drawing import BLUE, GREY, ORANGE, finish, panels
from benchmarks.reproduce.attack_certificates import attack_record, curvature_trained, curvature_trained_model
from benchmarks.reproduce.experiment import Experiment, Options
from benchmarks.reproduce.paper_numbers import ATTACKS_6F
from curvcert.results import Record

NAME = "attack-gap"


def run(options: Options) -> Record:
    """Enclose the robust accuracy of the curvature-trained 6F at 36/255."""
    return attack_record(NAME, curvature_trained(options), ATTACKS_6F, options)


def draw(record: Record, path: Path) -> None:
    """Draw the clean accuracy, and the range that encloses the robust accuracy at 36/255."""
    figures = record.figures
    figure, (axis,) = panels(1, width=6.4, height=2.2)
    low, high = figures["certified"], min(figures["ours"]["at_most"], figures["pgd"])
    axis.barh(0, figures["clean"], color=GREY, alpha=0.3, label=f"clean accuracy $A_c$ = {figures['clean']:.2f}")
    axis.barh(0, low, color=BLUE, label=f"certified, $A_v$ at least {low:.2f}")
    axis.barh(0, high - low, left=low, color=ORANGE, alpha=0.5, label="not known")
    axis.axvline(
        figures["ours"]["at_most"], color=ORANGE, label=f"at most {figures['ours']['at_most']:.2f}, by witnesses"
    )
    axis.axvline(figures["pgd"], color="black", ls=":", label=f"at most {figures['pgd']:.2f}, by PGD")
    axis.set_yticks([])
    axis.set_ylim(-0.5, 1.9)
    axis.set_xlim(max(0.0, low - 15), figures["clean"] + 5)
    axis.set_xlabel("accuracy at 36/255, %")
    finish(figure, (axis,), path)


ATTACK_GAP = Experiment(
    NAME,
    "Certificates and attack certificates enclose the robust accuracy at 36/255 in a narrow range.",
    ("fig:attack_example",),
    run,
    draw,
    curvature_trained_model,
)
