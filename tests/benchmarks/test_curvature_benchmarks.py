import json

import pytest

from benchmarks import curvature


@pytest.mark.parametrize("method", curvature.DENSE_METHODS)
def test_measures_a_method(method) -> None:
    figures = curvature.measure("quick", method)
    assert figures["pairs"] == 45 and figures["median_bound"] > 0
    json.dumps(figures, allow_nan=False)


def test_the_networks_are_those_of_the_paper() -> None:
    assert sum(block.W.weight.numel() for block in curvature.dense(curvature.WIDTHS_6F).blocks) > 3.8e6
    assert curvature.convolutional().in_shape == (3, 32, 32)
