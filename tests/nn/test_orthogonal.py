"""Orthogonal layers: 1-Lipschitz whatever the weights, searched for in vain and proven; gradients keep their norms."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import curvcert
import curvcert.nn as cnn
from curvcert.attacks import pgd
from curvcert.errors import InvalidInput
from curvcert.network import Block, Network
from curvcert.network.network_file import network_digest
from curvcert.nn.orthogonal import _shifted, orthogonal_factor
from curvcert.operators import Composition
from curvcert.operators.permutation import ChannelShift

F64 = torch.float64


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def small(seed: int = 0) -> nn.Sequential:
    """Return a small network for images of 8 x 8 pixels, in float64, whose weights are far from orthogonal."""
    torch.manual_seed(seed)
    layers = [cnn.PadChannels(10), cnn.OrthogonalStack(10, 2), cnn.OrthogonalDownsample(10, 12)]
    last = [cnn.OrthogonalStack(12, 1), nn.Flatten(), cnn.OrthonormalLinear(12 * 16, 10)]
    model = nn.Sequential(cnn.Normalise([0.5, 0.4, 0.3], [1.0] * 3), *layers, *last).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("shape", [(6, 6), (3, 8), (8, 3), (4, 5, 5), (2, 3, 7), (1, 1)])
def test_the_factor_is_that_of_the_polar_decomposition(shape: tuple[int, ...]) -> None:
    weight = 0.2 * randn(*shape) + torch.eye(*shape[-2:], dtype=F64)
    U, S, V = torch.linalg.svd(weight, full_matrices=False)
    assert float((S.amax(dim=-1) / S.amin(dim=-1)).max()) < 4
    torch.testing.assert_close(orthogonal_factor(weight), U @ V, atol=1e-3, rtol=0)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e3, 1e30])
@pytest.mark.parametrize("kind", ["any", "one column", "zero", "one large"])
def test_no_weights_give_a_norm_above_one(scale: float, kind: str) -> None:
    weight = randn(7, 9, seed=1)
    if kind == "one column":
        weight[:, 1:] = 0
    if kind == "zero":
        weight.zero_()
    if kind == "one large":
        weight[0, 0] = 1e6
    found = orthogonal_factor(scale * weight)
    assert bool(torch.isfinite(found).all())
    assert float(torch.linalg.matrix_norm(found, 2)) <= 1 + 1e-12


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_the_size_of_the_weights_does_not_matter_in_float32_either(scale: float) -> None:
    weight = (0.2 * randn(6, 9) + torch.eye(6, 9, dtype=F64)).float()
    torch.testing.assert_close(orthogonal_factor(scale * weight), orthogonal_factor(weight), atol=1e-5, rtol=0)


@pytest.mark.parametrize("channels", [1, 4, 9, 13])
def test_a_layer_is_traced_to_its_matrix_after_its_shift(channels: int) -> None:
    layer, x = cnn.OrthogonalStack(channels, 1).double().eval(), randn(2, channels, 4, 3, seed=1)
    (Q,) = layer.effective().detach()
    expected = torch.nn.functional.linear(_shifted(x.permute(0, 2, 3, 1)), Q).permute(0, 3, 1, 2)
    block = curvcert.trace(layer, x).blocks[0]
    assert isinstance(block, Block)
    torch.testing.assert_close(block.W.apply(x), expected)


def test_a_trace_is_its_model_and_a_layer_its_formula() -> None:
    model, x = small().eval(), torch.rand(3, 3, 8, 8, dtype=F64)
    torch.testing.assert_close(curvcert.trace(model, x)(x), model(x), atol=1e-12, rtol=0)
    layer = cnn.OrthogonalStack(2, 1).double().eval()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]]))
        layer.bias.copy_(torch.tensor([[0.0, -0.5]]))
    x = randn(1, 2, 3, 3)
    swapped = torch.stack([x[:, 1].roll(1, 2), -x[:, 0]], dim=1)  # The second channel comes from the left.
    expected = torch.stack([swapped[:, 0].abs(), (swapped[:, 1] - 0.5).abs() - 0.5], dim=1)
    torch.testing.assert_close(layer(x), expected)


def test_a_network_file_tells_shifts_apart() -> None:
    x = torch.zeros(1, 4, 3, 3, dtype=F64)
    blocks = curvcert.trace(cnn.OrthogonalStack(4, 1).double().eval(), x).blocks
    other = Composition((blocks[0].W.factors[0], ChannelShift((4, 3, 3), ((4, 0, 1),))))
    digests = {network_digest(Network.of_blocks((replace(blocks[0], W=W), *blocks[1:]))) for W in (blocks[0].W, other)}
    assert len(digests) == 2


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (1, 3), (5, 2)])
def test_a_trace_is_its_model_where_neighbours_coincide(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, x = cnn.OrthogonalStack(11, 2).double().eval(), randn(2, 11, *size)
    network = curvcert.trace(model, x)
    torch.testing.assert_close(network(x), model(x), atol=1e-12, rtol=0)
    assert float(curvcert.lipschitz(network)) <= 1 + 1e-6


def test_one_is_proven_and_the_square_root_of_two_for_pairs() -> None:
    network = curvcert.trace(small().eval(), torch.zeros(1, 3, 8, 8, dtype=F64))
    bound = curvcert.lipschitz(network)
    assert 0.9 < float(bound) <= 1 + 1e-6
    pairs = curvcert.lipschitz(network, pair="all").value
    assert float(pairs.max()) <= math.sqrt(2) * (1 + 1e-6)


def test_gradients_keep_their_norms_where_channels_are_not_padded() -> None:
    torch.manual_seed(0)
    stack = cnn.OrthogonalStack(12, 4).double()
    model = nn.Sequential(cnn.OrthogonalDownsample(3, 12).double(), stack, nn.Flatten()).eval()
    last = cnn.OrthonormalLinear(12 * 16, 5).double().eval()
    x = torch.rand(2, 3, 8, 8, dtype=F64)
    J = curvcert.trace(nn.Sequential(model, last).eval(), x).jacobian(x).flatten(2)
    torch.testing.assert_close(J @ J.mT, torch.eye(5, dtype=F64).expand(2, 5, 5), atol=1e-6, rtol=0)


def test_certificates_hold_against_a_search_and_are_margins_over_the_square_root_of_two() -> None:
    model = small(seed=2).eval()
    x = torch.rand(40, 3, 8, 8, dtype=F64)
    y = model(x).argmax(dim=1)
    certificate = curvcert.certify(curvcert.trace(model, x[:1]), x, y, progress=False)
    top = model(x).topk(2, dim=1).values
    expected = (top[:, 0] - top[:, 1]) / math.sqrt(2)
    torch.testing.assert_close(certificate.radius, expected, rtol=1e-2, atol=0)
    assert bool((certificate.radius > 0).all())
    for share in (0.99, 0.9999):
        assert not pgd(model, x, y, share * certificate.radius, steps=30, restarts=2).broken.any()


def test_in_training_the_weights_become_orthogonal_and_the_outputs_stay() -> None:
    model, x = small(), torch.rand(2, 3, 8, 8, dtype=F64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model.eval()(x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(model.train()(x), expected)
    layer = model[2]
    assert isinstance(layer, cnn.OrthogonalStack)
    assert not torch.equal(layer.weight, before["2.weight"])
    torch.testing.assert_close(
        layer.weight @ layer.weight.mT, torch.eye(10, dtype=F64).expand(2, 10, 10), atol=1e-3, rtol=0
    )
    torch.testing.assert_close(model.eval()(x), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("layer", [cnn.OrthonormalLinear(6, 4), cnn.OrthonormalLinear(3, 5)])
def test_the_gradient_in_training_is_that_of_the_factor(layer: cnn.OrthonormalLinear) -> None:
    layer, x, slope = layer.double().train(), randn(5, layer.in_features), randn(5, layer.out_features, seed=1)
    layer(x)  # Now the weights are orthonormal.
    (layer(x) * slope).sum().backward()
    assert layer.weight.grad is not None
    found = layer.weight.grad.clone()
    (expected,) = torch.autograd.grad((layer.eval()(x) * slope).sum(), layer.weight)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"folds in place of an activation, got 'gelu'. Leave the activation out"):
        cnn.architecture("OrthoFold", "gelu")
    with pytest.raises(InvalidInput, match="a positive integer for channels, got 0"):
        cnn.OrthogonalStack(0, 1)
    with pytest.raises(InvalidInput, match="a positive integer for"):
        cnn.OrthogonalDownsample(1, 0)
    with pytest.raises(InvalidInput, match="a positive integer for"):
        cnn.OrthonormalLinear(0, 1)
    with pytest.raises(InvalidInput, match="expects images of 4 channels"):
        curvcert.trace(cnn.OrthogonalStack(4, 1).eval(), torch.zeros(1, 3, 4, 4))
    with pytest.raises(InvalidInput, match="an even height and width"):
        curvcert.trace(cnn.OrthogonalDownsample(3, 4).eval(), torch.zeros(1, 3, 5, 4))
    with pytest.raises(InvalidInput, match="expects 4 features"):
        curvcert.trace(cnn.OrthonormalLinear(4, 2).eval(), torch.zeros(1, 3))
