"""Which certificate wins where: a picture for every kind of network, of medians in `results/peers.json`.

Claim: none; the pictures draw what the record holds: the median radius as a share of the attack's.
Hardware: any; a second.
Trials: none; nothing is measured.

    python -m benchmarks.radii_pictures
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.drawing import BLUE, GREY, ORANGE, grid, legend_below
from benchmarks.harness import figures_of
from benchmarks.peer_networks import PEERS, Peer
from benchmarks.peers import NAME, NORMS
from curvcert.picture_files import write_figure

IMAGES = Path(__file__).parents[1] / "docs" / "images"
BARS = {"all together": ("ours", BLUE), "linear alone": ("linear alone", ORANGE), "CROWN": ("CROWN", GREY)}
HEIGHT = 0.27
"""Of one bar; networks are a unit apart."""


def kind(peer: Peer) -> str:
    """Return what kind of network one is."""
    if not peer.dense:
        return "convolutional"
    return "trained" if not peer.ordinary else "smooth" if peer.smooth else "kinked"


def kinds() -> Iterator[tuple[str, dict[str, Mapping[str, Any]]]]:
    """Yield every kind of network with the recorded figures of its networks."""
    recorded = figures_of(NAME)["networks"]
    for one in ("smooth", "kinked", "convolutional", "trained"):
        yield one, {name: recorded[name] for name, peer in PEERS.items() if kind(peer) == one and name in recorded}


def picture(networks: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Return bars for every network and norm: how much of the attack's radius is proven."""
    figure, axes = grid(1, len(NORMS), (10, 1.3 + 0.62 * len(networks)), sharex=True, sharey=True)
    for axis, norm in zip(axes[0], NORMS, strict=True):
        _drawn(axis, norm, networks)
    axes[0][0].set_yticks(range(len(networks)), list(networks))
    axes[0][0].invert_yaxis()
    axes[0][1].set_xlabel("median radius / median of the attack's")
    legend_below(figure, axes[0])
    return figure


def _drawn(axis: Axes, norm: str, networks: Mapping[str, Mapping[str, Any]]) -> None:
    axis.set_title(norm)
    axis.set_xlim(0, 1)
    axis.grid(axis="x", alpha=0.25)
    for k, (label, (key, colour)) in enumerate(BARS.items()):
        known = [(row, each[norm]) for row, each in enumerate(networks.values()) if key in each.get(norm, {})]
        places = [row + (k - 1) * HEIGHT for row, _ in known]
        shares = [figures[key] / figures["attack"] for _, figures in known]
        axis.barh(places, shares, HEIGHT, color=colour, label=label)


def main() -> None:
    """Draw a picture for every kind."""
    for name, networks in kinds():
        path = IMAGES / f"radii-{name}.svg"
        write_figure(picture(networks), path)
        Console().print(f"written {path.relative_to(IMAGES.parents[1])}")


if __name__ == "__main__":
    main()
