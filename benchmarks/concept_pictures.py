"""Pictures for the page on concepts: certificates, scopes and intervals, in one dimension.

Claim: none; each picture draws what curvcert's own functions give for tanh(1.2 x) less a constant.
Hardware: any; a few seconds.
Trials: none; nothing is random.

    python -m benchmarks.concept_pictures
"""

import math
from pathlib import Path

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor, nn

from curvcert.bounds.curvature import curvature
from curvcert.bounds.lipschitz import lipschitz
from curvcert.certificates.radii import attack_radius, curvature_radius, lipschitz_radius
from curvcert.network import Network, trace
from curvcert.picture_files import write_figure

IMAGES = Path(__file__).parents[1] / "docs" / "images"
WEIGHT = 1.2
# Okabe and Ito's colours, apart for every kind of colour vision; each line has a style of its own as well.
TRUTH, LIPSCHITZ, CURVATURE, LOCAL, ATTACK = "#3B8FCB", "#E69F00", "#009E73", "#CC79A7", "#D55E00"
GREY = "#808080"


def main() -> None:
    """Draw every picture."""
    for name, draw in {"certificates": certificates, "scopes": scopes, "interval": interval}.items():
        path = IMAGES / f"concept-{name}.svg"
        # Mid-grey ink on no background: readable on a light page and on a dark one.
        with rc_context(
            {
                "font.size": 10,
                "axes.edgecolor": GREY,
                "axes.labelcolor": GREY,
                "xtick.color": GREY,
                "ytick.color": GREY,
                "text.color": GREY,
                "legend.labelcolor": GREY,
                "legend.frameon": False,
                "axes.spines.top": False,
                "axes.spines.right": False,
            }
        ):
            figure = Figure(figsize=(7.2, 3.8), layout="constrained")
            draw(figure.subplots())
            write_figure(figure, path, transparent=True)
        Console().print(f"written {path.relative_to(IMAGES.parents[1])}")


def step(level: float) -> Network:
    """Return the network that computes tanh(1.2 x) - level."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1)).double().eval()
    for parameter, value in zip(model.parameters(), (WEIGHT, 0.0, 1.0, -level), strict=True):
        parameter.data.fill_(value)
    return trace(model, torch.zeros(1, 1, dtype=torch.float64))


def column(value: float) -> Tensor:
    """Return one point of the line as a batch."""
    return torch.full((1, 1), value, dtype=torch.float64)


def certificates(axes: Axes) -> None:
    """Draw f, its majorants from x by L and by K, and where each meets 0."""
    network, x, level = step(-0.6), -1.2, -0.6
    m, g = -network(column(x)).reshape(()), network.jacobian(column(x)).abs().reshape(())
    L, K = lipschitz(network).value, curvature(network).value
    t = torch.linspace(0, 1.6, 400, dtype=torch.float64)
    truth = math.atanh(level) / WEIGHT - x
    _draw_function(axes, network, x, f"f = (other class) - (label); the class changes at {truth:.2f}")
    majorants: tuple[tuple[str, Tensor, float, str, str], ...] = (
        ("Lipschitz, -m + L t", -m + L * t, float(lipschitz_radius(m, L)), LIPSCHITZ, "--"),
        ("curvature, -m + g t + K t²/2", -m + g * t + K * t**2 / 2, float(curvature_radius(m, g, K)), CURVATURE, "-."),
        ("linear, -m + g t", -m + g * t, float(m / g), GREY, ":"),
    )
    for label, height, radius, colour, style in majorants:
        axes.plot(x + t, height, style, color=colour, lw=1.9, label=f"{label}: 0 at {radius:.2f}")
        axes.plot(x + radius, 0, "o", color=colour, ms=6)
    axes.plot(x + truth, 0, "o", color=TRUTH, ms=7)
    axes.annotate("", (x, 0), (x, -float(m)), arrowprops={"arrowstyle": "<->", "color": GREY})
    axes.text(x - 0.02, -float(m) / 2, "margin m ", ha="right", va="center")
    _finish(axes, (-1.75, 0.25), (-0.42, 0.75))
    axes.legend(loc="upper left")


def scopes(axes: Axes) -> None:
    """Draw the Lipschitz bounds of the three scopes, beside the slope itself."""
    network, x, radius = step(0.0), -1.6, 0.4
    z = torch.linspace(-3, 3, 600, dtype=torch.float64)
    axes.plot(z, network.jacobian(z.reshape(-1, 1)).flatten(), color=TRUTH, lw=2.4, label="the slope |f'|")
    bounds = (
        ("global: any two points", float(lipschitz(network)), (-3, 3), LIPSCHITZ, "--"),
        ("anchored: x and any other point", float(lipschitz(network, at=column(x))), (-3, 3), CURVATURE, "-."),
        (
            "local: any two points of the ball",
            float(lipschitz(network, at=column(x), radius=radius)),
            (x - radius, x + radius),
            LOCAL,
            "-",
        ),
    )
    for label, value, ends, colour, style in bounds:
        axes.plot(ends, (value, value), style, color=colour, lw=2.2, label=f"{label}: {value:.2f}")
    axes.axvspan(x - radius, x + radius, color=LOCAL, alpha=0.15, lw=0)
    at_x = float(network.jacobian(column(x)))
    axes.plot(x, at_x, "o", color=TRUTH, ms=7)
    axes.text(x, at_x - 0.05, "x", ha="center", va="top")
    axes.set(xlabel="input", ylabel="slope", xlim=(-3, 3), ylim=(-0.06, 1.95))
    axes.legend(loc="upper right", ncols=2, fontsize=9)


def interval(axes: Axes) -> None:
    """Draw f between its two parabolas from x: one proves a radius, the other shows a change of class."""
    network, x, level = step(0.45), 0.1, 0.45
    m, g = -network(column(x)).reshape(()), network.jacobian(column(x)).abs().reshape(())
    K = curvature(network).value
    t = torch.linspace(0, 0.45, 300, dtype=torch.float64)
    proven, shown = float(curvature_radius(m, g, K)), float(attack_radius(m, g, K))
    upper, lower = -m + g * t + K * t**2 / 2, -m + g * t - K * t**2 / 2
    truth = math.atanh(level) / WEIGHT - x
    axes.fill_between(x + t, lower, upper, color=GREY, alpha=0.15, lw=0)
    _draw_function(axes, network, x, f"f; the class changes at {truth:.3f}")
    for label, height, radius, colour, style in (
        ("-m + g t + K t²/2: proven up to", upper, proven, CURVATURE, "-."),
        ("-m + g t - K t²/2: changed by", lower, shown, ATTACK, "--"),
    ):
        axes.plot(x + t, height, style, color=colour, lw=1.9, label=f"{label} {radius:.3f}")
        axes.plot(x + radius, 0, "o", color=colour, ms=6)
    axes.plot(x + truth, 0, "o", color=TRUTH, ms=6)
    for left, right, colour in ((0, proven, CURVATURE), (proven, shown, GREY), (shown, 0.45, ATTACK)):
        axes.plot((x + left, x + right), (-0.4, -0.4), color=colour, lw=7, solid_capstyle="butt")
    for centre, text in ((proven / 2, "certified"), ((proven + shown) / 2, "unknown"), ((shown + 0.45) / 2, "witness")):
        axes.text(x + centre, -0.375, text, ha="center", va="bottom", fontsize=9)
    _finish(axes, (0.08, 0.55), (-0.43, 0.32))
    axes.legend(loc="upper left")


def _draw_function(axes: Axes, network: Network, x: float, label: str) -> None:
    """Draw f, the level 0 where the class changes, and the point."""
    wide = torch.linspace(x - 1, x + 1.6, 600, dtype=torch.float64)
    axes.plot(wide, network(wide.reshape(-1, 1)).flatten(), color=TRUTH, lw=2.4, label=label)
    axes.axhline(0, color=GREY, lw=0.8)
    axes.plot(x, float(network(column(x))), "o", color=TRUTH, ms=7)


def _finish(axes: Axes, x_range: tuple[float, float], y_range: tuple[float, float]) -> None:
    """Set the ranges and the labels."""
    axes.set(xlabel="input", ylabel="f", xlim=x_range, ylim=y_range)


if __name__ == "__main__":
    main()
