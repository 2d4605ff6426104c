"""What a notebook shows: whole HTML, text escaped, curves on the safe side."""

from xml.etree import ElementTree

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from curvcert import html
from curvcert.bounds.lipschitz import lipschitz
from curvcert.bounds.types import Bound
from curvcert.certificates import certify
from curvcert.network import trace


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(torch.cat([x, torch.tanh(self.first(x))], 1))
        return output


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<div>{text}</div>")


def test_a_network_shows_its_graph() -> None:
    net = trace(Skip().eval(), torch.zeros(1, 3))
    shown = parsed(net._repr_html_())
    assert len(list(shown.iter("{http://www.w3.org/2000/svg}rect"))) == len(net.nodes)
    edges = {(source, k) for k, node in enumerate(net.nodes) for source in node.sources}
    assert len(list(shown.iter("{http://www.w3.org/2000/svg}path"))) == len(edges)


def test_a_large_network_is_told_without_a_picture() -> None:
    layers = [layer for _ in range(40) for layer in (nn.Linear(2, 2), nn.Tanh())]
    shown = trace(nn.Sequential(*layers).eval(), torch.zeros(1, 2))._repr_html_()
    assert "left out" in shown
    assert "<svg" not in shown


def test_a_bound_shows_what_it_is() -> None:
    bound = lipschitz(trace(nn.Sequential(nn.Linear(3, 4), nn.Tanh()).eval(), torch.zeros(1, 3)))
    words = "".join(parsed(bound._repr_html_()).itertext())
    assert "l2 to l2" in words
    assert f"{float(bound):.6g}" in words


def test_text_is_escaped() -> None:
    bound = Bound(torch.tensor(1.0, dtype=torch.float64), 2, 2, method="<script>alert(1)</script>")
    assert "<script>" not in bound._repr_html_()
    assert "<script>" not in html.graph([(0, 0)], ["<script>"], [])


def test_a_certificate_shows_its_curve() -> None:
    torch.manual_seed(0)
    net = trace(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).eval(), torch.zeros(1, 2))
    cert = certify(net, torch.randn(8, 2))
    assert len(list(parsed(cert._repr_html_()).iter("{http://www.w3.org/2000/svg}polyline"))) == 2
    radii, shares = cert.curve()
    assert shares["certified"][0] == float(cert.correct.double().mean())
    assert all(a <= b for a, b in zip(shares["certified"], shares["searched"], strict=True))
    assert radii[-1] == pytest.approx(float(cert.falsified_radius[cert.falsified_radius.isfinite()].max()))


@pytest.mark.parametrize(("side", "between"), [("at least", 0.25), ("at most", 0.75)])
def test_staircases_say_no_more_than_is_known(side: str, between: float) -> None:
    drawn = parsed(html.staircases([0.0, 1.0], {"curve": ([0.75, 0.25], "#000", side)}, "x"))
    (line,) = drawn.iter("{http://www.w3.org/2000/svg}polyline")
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert heights[1] == heights[2] == pytest.approx(html._high(between), abs=0.06)


def test_plot_draws_into_given_axes() -> None:
    net = trace(nn.Linear(2, 3).eval(), torch.zeros(1, 2))
    axes = Figure().add_subplot()
    assert certify(net, torch.randn(4, 2)).plot(axes) is axes
    assert "robust accuracy" in axes.get_ylabel()
