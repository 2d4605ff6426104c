"""The picture for the page on networks: a graph, and what a sweep forward and a sweep backward find on it.

Claim: none; the numbers are those of the two domains of the page, on the network of the page.
Hardware: any; a second.
Trials: none; the weights are those of one seed.

    python -m benchmarks.graph_picture
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor, nn

from curvcert.network import Network, trace
from curvcert.network.nodes import AffineNode, ElementwiseNode, InputNode
from curvcert.network.sweeps import AbstractBackward, AbstractForward
from curvcert.operators import NormBounds
from curvcert.picture_files import write_figure

PATH = Path(__file__).parents[1] / "docs" / "images" / "graph-sweeps.svg"
# Okabe and Ito's colours; mid-grey ink on no background is readable on a light page and on a dark one.
FORWARD, BACKWARD, GREY = "#3B8FCB", "#D55E00", "#808080"
LANES = {0: 0.5, 1: 0.0, 2: 0.0}
"""The height of the first nodes; what joins them lies between."""


class Joined(nn.Module):
    """A layer that reads its input and what the first layer makes of it, joined into one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 3), nn.Linear(7, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return two outputs."""
        joined = torch.cat([x, torch.tanh(self.first(x))], 1)
        output: Tensor = self.last(torch.tanh(self.second(joined)))
        return output


class Moves(AbstractForward[float]):
    """How far each value can move when the input moves by at most 1: sums of norms, and largest slopes."""

    norms = NormBounds()

    def affine(self, node: AffineNode, values: Sequence[float]) -> float:
        """Add up what the terms let through."""
        return sum(float(self.norms.norm(term.map, 2, 2)) * v for term, v in zip(node.terms, values, strict=True))

    def elementwise(self, node: ElementwiseNode, value: float) -> float:
        """Multiply by the steepest slope."""
        return max(map(abs, node.activation.slope)) * value


class Gradient(AbstractBackward[Tensor]):
    """The derivative of the output in every value, at one point."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._values = values

    def joined(self, k: int, arriving: Sequence[Tensor]) -> Tensor:
        """Add up what all readers send back."""
        return torch.stack([*arriving]).sum(dim=0)

    def affine(self, k: int, node: AffineNode, value: Tensor) -> Sequence[Tensor]:
        """Send the adjoint image back along every term."""
        return [term.map.adjoint(value) for term in node.terms]

    def elementwise(self, k: int, node: ElementwiseNode, value: Tensor) -> Tensor:
        """Multiply by the slopes at the point."""
        return node.activation.derivative(self._values[node.source]) * value


def network() -> Network:
    """Return the network that is drawn."""
    torch.manual_seed(0)
    return trace(Joined().eval(), torch.zeros(1, 4))


def moves(net: Network) -> list[float]:
    """Sweep forward from the input."""
    return Moves().sweep(net.nodes, 1.0)


def gradients(net: Network, x: Tensor) -> list[float]:
    """Sweep backward from the first output, and return the norms."""
    end = torch.eye(net.outputs, dtype=torch.float64)[:1]
    return [float(g.norm()) for g in Gradient(net.values(x)).sweep(net.nodes, end)]


def main() -> None:
    """Draw both sweeps, one above the other."""
    net = network()
    panels = (
        ("forward: how far a value moves when x moves by 1", "{:.2f}", moves(net), FORWARD, True),
        (
            "backward: the gradient of the first output, at x = 0",
            "{:.2f}",
            gradients(net, torch.zeros(1, 4)),
            BACKWARD,
            False,
        ),
    )
    with rc_context({"font.size": 10, "text.color": GREY}):
        figure = Figure(figsize=(7.8, 4.4), layout="constrained")
        for axes, (title, shape, numbers, colour, onward) in zip(figure.subplots(2, 1), panels, strict=True):
            _draw(axes, net, [shape.format(number) for number in numbers], colour, onward)
            axes.set_title(title, color=colour, fontsize=10.5, loc="left")
        write_figure(figure, PATH, transparent=True)
    Console().print(f"written {PATH.relative_to(PATH.parents[2])}")


def _draw(axes: Axes, net: Network, labels: Sequence[str], colour: str, onward: bool) -> None:
    """Draw the nodes in a row, what each reads as arrows, and a label below each."""
    places = [(1.35 * k, LANES.get(k, 0.25)) for k in range(len(net.nodes))]
    for k, node in enumerate(net.nodes):
        for source in node.sources:
            (x0, y0), (x1, y1) = places[source], places[k]
            behind, before = (x0 + _half_width(net, source), y0), (x1 - _half_width(net, k), y1)
            ends = (behind, before) if onward else (before, behind)
            axes.annotate(
                "",
                ends[1],
                ends[0],
                arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.6, "shrinkA": 0, "shrinkB": 0},
            )
        where = places[k]
        box = {"boxstyle": "round,pad=0.35", "facecolor": "none", "edgecolor": GREY, "lw": 1.2}
        axes.text(*where, _name(net, k), ha="center", va="center", bbox=box, fontsize=9.5)
        axes.text(where[0], where[1] - 0.21, labels[k], ha="center", va="center", color=colour, fontsize=10)
    axes.set(xlim=(-0.6, places[-1][0] + 0.6), ylim=(-0.32, 0.66))
    axes.axis("off")


def _half_width(net: Network, k: int) -> float:
    """Return how far from the middle of a node its arrows end."""
    return 0.17 + 0.04 * len(_name(net, k))


def _name(net: Network, k: int) -> str:
    """Return what a node is called in the picture."""
    node = net.nodes[k]
    match node:
        case InputNode():
            return "x"
        case ElementwiseNode():
            return node.activation.name
        case AffineNode() if len(node.terms) > 1:
            return "joined"
        case _:
            return node.name


if __name__ == "__main__":
    main()
