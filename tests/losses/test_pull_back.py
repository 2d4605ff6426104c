"""Gradients written out, layer by layer, against torch's own."""

import pytest
import torch
from torch import nn

from curvcert.losses.pull_back import has_rule, layers_with_rules, pull_back
from curvcert.nn import CentredSoftplus, Normalise, PadChannels, ScaledAveragePool2d, SLLConv2d, SLLDense, UnitRowLinear

F64 = torch.float64
IMAGE, VECTOR = (2, 7, 6), (5,)
LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(5, 3), VECTOR),
    "conv": (nn.Conv2d(2, 4, 3, padding=1), IMAGE),
    "strided conv, rows left over": (nn.Conv2d(2, 4, (4, 3), stride=(2, 3), padding=(1, 0)), IMAGE),
    "dilated, grouped conv": (nn.Conv2d(2, 4, 2, dilation=2, groups=2), IMAGE),
    "same padding": (nn.Conv2d(2, 3, 3, padding="same"), IMAGE),
    "circular padding": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), IMAGE),
    "tanh": (nn.Tanh(), VECTOR),
    "sigmoid": (nn.Sigmoid(), VECTOR),
    "gelu": (nn.GELU(), VECTOR),
    "softplus": (CentredSoftplus(2.0), IMAGE),
    "identity": (nn.Identity(), VECTOR),
    "flatten": (nn.Flatten(), IMAGE),
    "unflatten": (nn.Unflatten(1, (5, 1)), VECTOR),
    "normalise": (Normalise([0.1, 0.2], [0.5, 3.0]), IMAGE),
    "pad channels": (PadChannels(5), IMAGE),
    "scaled pooling, pixels left over": (ScaledAveragePool2d(3), IMAGE),
    "unit rows": (UnitRowLinear(5, 3), VECTOR),
    "dense sll": (SLLDense(5, 8), VECTOR),
    "conv sll": (SLLConv2d(2, 3, 3), IMAGE),
}


@pytest.mark.parametrize(("layer", "shape"), LAYERS.values(), ids=LAYERS)
def test_it_is_the_gradient(layer, shape) -> None:
    layer = layer.to(F64)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, *shape, dtype=F64, generator=generator)
    y, back, *_ = torch.func.vjp(layer, x)
    g = torch.randn(4, *y.shape, dtype=F64, generator=generator)
    expected = torch.stack([back(row)[0] for row in g])
    assert has_rule(layer)
    torch.testing.assert_close(pull_back(layer, x, y, g), expected, rtol=1e-12, atol=1e-13)


def test_a_part_without_a_rule_is_left_to_autograd() -> None:
    assert layers_with_rules(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))) is None


def test_a_subclass_of_sequential_may_compute_something_else() -> None:
    class Doubled(nn.Sequential):
        def forward(self, x):
            return 2 * super().forward(x)

    assert layers_with_rules(Doubled(nn.Linear(2, 2))) is None
    assert layers_with_rules(nn.Sequential(Doubled(nn.Linear(2, 2)))) is None
