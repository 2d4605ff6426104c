"""The paper's tables and figures, one file each, and the frame that they share; `curvcert reproduce` runs them."""

from curvcert.experiments.anchored_depth import ANCHORED_DEPTH
from curvcert.experiments.attack_gap import ATTACK_GAP
from curvcert.experiments.attack_histogram import ATTACK_HISTOGRAM
from curvcert.experiments.complexity import COMPLEXITY
from curvcert.experiments.crc_vs_ccrc import CRC_VS_CCRC
from curvcert.experiments.curvature_vs_lipschitz import CURVATURE_VS_LIPSCHITZ
from curvcert.experiments.experiment import Experiment, Options, load_arrays
from curvcert.experiments.one_lipschitz_attacks import ONE_LIPSCHITZ_ATTACKS
from curvcert.experiments.reproducing import read_record, reproduce
from curvcert.experiments.table1 import TABLE1
from curvcert.experiments.tanh_anchor import TANH_ANCHOR
from curvcert.experiments.weights import load_kept, read_digests

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        TABLE1,
        CRC_VS_CCRC,
        ANCHORED_DEPTH,
        ATTACK_HISTOGRAM,
        ATTACK_GAP,
        ONE_LIPSCHITZ_ATTACKS,
        CURVATURE_VS_LIPSCHITZ,
        TANH_ANCHOR,
        COMPLEXITY,
    )
}
"""Every experiment by its name."""

__all__ = [
    "EXPERIMENTS",
    "Experiment",
    "Options",
    "load_arrays",
    "load_kept",
    "read_digests",
    "read_record",
    "reproduce",
]
