"""Zeros around an image join the window behind them: the same map, entry by entry, where it is one."""

import pytest
import torch

from curvcert.network.builder import Value, start
from curvcert.network.rewriting.fusion import fused
from curvcert.network.rewriting.padding import with_padding_joined
from curvcert.operators import AbstractLinearMap, AveragePool2d, Conv2d, norm_upper_bound
from tests.operators.cases import F64, randn

SIDES = {1: (1, 2), 2: (0, 3)}
EVEN = {1: (1, 1), 2: (1, 1)}
IMAGE = (2, 5, 4)
WIDE = (2, 8, 7)


def rewritten(value: Value) -> tuple[AbstractLinearMap, AbstractLinearMap]:
    """Return the map of a value before the rule and after it."""
    nodes = fused(value.builder.nodes, value.number)
    return nodes[-1].terms[0].map, with_padding_joined(nodes)[-1].terms[0].map


def image() -> Value:
    return start(IMAGE, torch.device("cpu"))


WINDOWS = {
    "convolution": (SIDES, lambda: Conv2d(randn(3, 2, 3, 2), WIDE, (2, 1), ((1, 0), (0, 2)), (1, 2)), Conv2d),
    "grouped": (SIDES, lambda: Conv2d(randn(4, 1, 2, 2), WIDE, groups=2), Conv2d),
    "mean": (EVEN, lambda: AveragePool2d((2, 7, 6), (3, 2), (2, 2)), AveragePool2d),
    "padded mean": (EVEN, lambda: AveragePool2d((2, 7, 6), (4, 4), (1, 2), (1, 1)), AveragePool2d),
    "mean, unevenly padded": (SIDES, lambda: AveragePool2d(WIDE, (3, 3), (2, 2)), Conv2d),
    "mean, widely padded": (EVEN, lambda: AveragePool2d((2, 7, 6), (1, 1), (1, 1)), Conv2d),
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("factor", [1.0, -0.3])
def test_the_map_is_the_same_and_one_window(name: str, factor: float) -> None:
    sides, make, kind = WINDOWS[name]
    before, after = rewritten(image().padded(sides).linear(factor * make()))
    window = after if factor == 1.0 else after.map
    assert type(window) is kind and window.in_shape == IMAGE
    torch.testing.assert_close(after.as_matrix(), before.as_matrix(), rtol=1e-15, atol=0)
    assert float(norm_upper_bound(after)) <= float(norm_upper_bound(before)) * (1 + 1e-6)


def test_windows_in_a_row_join_what_is_before_each() -> None:
    first, second = Conv2d(randn(3, 2, 3, 3), WIDE), Conv2d(randn(2, 3, 2, 2), (3, 8, 6))
    value = image().padded(SIDES).linear(first).padded({1: (2, 0), 2: (1, 0)}).linear(second)
    before, after = rewritten(value)
    assert [type(factor) for factor in after.factors] == [Conv2d, Conv2d]
    torch.testing.assert_close(after.as_matrix(), before.as_matrix(), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(("sides", "shape", "mode"), [
    (SIDES, WIDE, "circular"),
    ({0: (1, 0)}, (3, 5, 4), "zeros"),
], ids=["circular", "channels"])  # fmt: skip
def test_what_is_another_map_is_left_alone(
    sides: dict[int, tuple[int, int]], shape: tuple[int, ...], mode: str
) -> None:
    conv = Conv2d(randn(3, shape[0], 3, 3), shape, padding=((1, 1), (1, 1)), padding_mode=mode)
    before, after = rewritten(image().padded(sides).linear(conv))
    assert after is before


def test_zeros_with_two_readers_stay() -> None:
    ring = image().padded(SIDES)
    one, other = (ring.linear(Conv2d(randn(1, 2, 2, 2, seed=seed), WIDE)) for seed in (1, 2))
    total = one.plus(other, "sum")
    nodes = fused(total.builder.nodes, total.number)
    after = with_padding_joined(nodes)
    assert len(after) == len(nodes) and all(new is old for new, old in zip(after, nodes, strict=True))
    assert total.shape == (1, 7, 6) and total.node.offset.dtype == F64
