"""Attack certificates of the curvature-trained 6F: how many there are, how far, and how many within 36/255.

Claim: attack certificates prove hundreds of its samples to be misclassified within 36/255.
Hardware: one accelerator; the record says which.
Trials: one network, all test images.
"""

from benchmarks.reproduce.attack_certificates import (
    attack_record,
    curvature_trained,
    curvature_trained_model,
    draw_histogram,
)
from benchmarks.reproduce.experiment import Experiment, Options
from benchmarks.reproduce.paper_numbers import ATTACKS_6F
from curvcert.results import Record

NAME = "attack-histogram"


def run(options: Options) -> Record:
    """Find the attack certificates of the curvature-trained 6F."""
    return attack_record(NAME, curvature_trained(options), ATTACKS_6F, options)


ATTACK_HISTOGRAM = Experiment(
    NAME,
    "Attack certificates prove hundreds of samples of the curvature-trained 6F to be misclassified within 36/255.",
    ("fig:newCertifiedAttackRadius",),
    run,
    draw_histogram,
    curvature_trained_model,
)
