"""The paper's tables and figures, one file each, and the frame they share: `python -m benchmarks reproduce NAME`."""

from benchmarks.reproduce.anchored_depth import ANCHORED_DEPTH
from benchmarks.reproduce.attack_gap import ATTACK_GAP
from benchmarks.reproduce.attack_histogram import ATTACK_HISTOGRAM
from benchmarks.reproduce.complexity import COMPLEXITY
from benchmarks.reproduce.crc_vs_ccrc import CRC_VS_CCRC
from benchmarks.reproduce.curvature_vs_lipschitz import CURVATURE_VS_LIPSCHITZ
from benchmarks.reproduce.experiment import Experiment, Options, load_arrays
from benchmarks.reproduce.one_lipschitz_attacks import ONE_LIPSCHITZ_ATTACKS
from benchmarks.reproduce.reproducing import reproduce
from benchmarks.reproduce.table1 import TABLE1
from benchmarks.reproduce.tanh_anchor import TANH_ANCHOR
from benchmarks.reproduce.two_radii import TWO_RADII

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
        TWO_RADII,
        COMPLEXITY,
    )
}
"""Every experiment by its name."""

__all__ = [
    "EXPERIMENTS",
    "Experiment",
    "Options",
    "load_arrays",
    "reproduce",
]
