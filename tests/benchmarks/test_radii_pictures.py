"""The pictures of certified radii: every recorded network is in one of them, with a bar for whatever is recorded."""

import pytest

from benchmarks.harness import figures_of
from benchmarks.radii_pictures import BARS, kinds, picture


def test_every_network_is_in_one_picture() -> None:
    shown = [name for _, networks in kinds() for name in networks]
    assert sorted(shown) == sorted(figures_of("peers")["networks"])


def test_bars_are_shares_of_the_attack() -> None:
    networks = dict(kinds())["kinked"]
    figure = picture(networks)
    for axis, norm in zip(figure.axes, ("l2", "linf", "l1"), strict=True):
        widths = [bar.get_width() for bar in axis.patches]
        expected = [each[norm][key] / each[norm]["attack"] for key, _ in BARS.values() for each in networks.values()]
        assert widths == pytest.approx(expected)
