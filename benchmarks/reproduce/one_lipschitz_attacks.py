"""Attack certificates of a 1-Lipschitz network.

Claim: some of its samples have them; by the paper's constants all are of small radius, below 0.07.
Hardware: one accelerator; the record says which.
Trials: one network, all test images.
"""

from torch import nn

from benchmarks.reproduce.attack_certificates import attack_record, draw_histogram
from benchmarks.reproduce.experiment import Experiment, Options
from benchmarks.reproduce.models import experiment_recipe, fitted, recipe_behind, subject, with_options
from benchmarks.reproduce.paper_numbers import ATTACKS_ONE_LIPSCHITZ
from curvcert.nn import SLLDense, UnitRowLinear
from curvcert.results import Record
from curvcert.training import Recipe

NAME, _RECIPE = "one-lipschitz-attacks", "lip-3c1f-sll-ccrc"


def run(options: Options) -> Record:
    """Find the attack certificates of a 1-Lipschitz network."""
    if options.quick:
        measured = fitted(_small, options)
    else:
        measured = subject(with_options(experiment_recipe(_RECIPE), options), options)
    return attack_record(NAME, measured, ATTACKS_ONE_LIPSCHITZ, options)


def models(record: Record) -> dict[str, Recipe]:
    """Return the 1-Lipschitz network that a record was measured on; a quick run's is not kept."""
    if record.config["quick"]:
        return {}
    return {f"Lip-3C1F-sll-ccrc-seed{record.seed}": recipe_behind(_RECIPE, record)}


def _small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), SLLDense(64, 32), UnitRowLinear(64, 10))


ONE_LIPSCHITZ_ATTACKS = Experiment(
    NAME,
    "Some samples of a 1-Lipschitz network have attack certificates; by the paper's constants all of small radius.",
    ("fig:attackRadius",),
    run,
    draw_histogram,
    models,
)
