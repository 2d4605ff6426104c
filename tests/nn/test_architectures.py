"""The architectures: their shapes, sizes and traces; the linear layers of 1-Lipschitz networks."""

import math

import pytest
import torch
from torch import nn

import curvcert
import curvcert.nn as cnn
from curvcert.data.demo_network import demo_architecture
from curvcert.errors import InvalidInput, UnsupportedActivation

F64 = torch.float64
PARAMETERS = {
    "6F": 3_902_858,
    "6C2F": 733_866,
    "Lip-3C1F": 1_000_863,
    "MNIST-3F": 89_610,
    "MNIST-4F": 99_710,
    "MNIST-5F": 109_810,
    "MNIST-6F": 119_910,
    "digits": 10_698,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", cnn.ARCHITECTURES)
def test_sizes(name: str) -> None:
    with torch.device("meta"):
        model = cnn.architecture(name)
        assert model(torch.zeros(2, *cnn.INPUT_SHAPES[name])).shape == (2, 10)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    assert all(m.bias is not None for m in model if isinstance(m, nn.Linear | nn.Conv2d))


def test_sizes_are_those_of_the_published_tables() -> None:
    published = {"6F": 4e6, "6C2F": 0.7e6, "Lip-3C1F": 1e6}
    assert all(abs(PARAMETERS[name] / size - 1) < 0.05 for name, size in published.items())
    with torch.device("meta"):
        widths = [layer.out_features for layer in cnn.six_f() if isinstance(layer, nn.Linear)]
    assert widths == [1024, 512, 256, 256, 128, 10]


@pytest.mark.parametrize("name", ["MNIST-3F", "6C2F", "digits"])
@pytest.mark.parametrize("activation", ["tanh", "centred_softplus"])
def test_traces_equal_their_models(name: str, activation: str) -> None:
    channels = cnn.INPUT_SHAPES[name][0]
    model = cnn.architecture(name, activation, mean_shift=[0.25] * channels).double().eval()
    x = torch.rand(2, *cnn.INPUT_SHAPES[name], dtype=F64)
    assert torch.allclose(curvcert.trace(model, x)(x), model(x), atol=1e-12)
    assert torch.allclose(model[1:](x - 0.25), model(x), atol=1e-12)


def test_the_activation_is_everywhere_and_each_its_own() -> None:
    for name in ("MNIST-5F", "digits", "6C2F"):
        with torch.device("meta"):
            model = cnn.architecture(name, lambda: cnn.CentredSoftplus(3.0))
        found = [m for m in model.modules() if isinstance(m, cnn.CentredSoftplus)]
        linear = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        assert len(found) == len(linear) - 1
        assert len(set(map(id, found))) == len(found)
    with torch.device("meta"):
        lip = cnn.architecture("Lip-3C1F", "softsign")
    assert sum(isinstance(m, nn.Softsign) for m in lip.modules()) == 4


def test_the_digits_are_the_embedded_architecture() -> None:
    ours, embedded = cnn.digits().state_dict(), demo_architecture().state_dict()
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in embedded.items()}
    model = cnn.digits()
    model.load_state_dict(embedded)
    reference = demo_architecture()
    reference.load_state_dict(embedded)
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(model(x), reference(x))


def test_lip_3c1f_is_proven_to_be_one_lipschitz() -> None:
    torch.manual_seed(0)
    model = cnn.lip_3c1f(channels=8, hidden=24, mean_shift=[0.5, 0.4, 0.3]).eval()
    x = torch.rand(2, 3, 32, 32)
    net = curvcert.trace(model, x)
    assert torch.allclose(net(x), model.double()(x.double()), atol=1e-12)
    for i in (0, 7):
        assert float(curvcert.lipschitz(net, method="product", logit=i)) <= 1 + 1e-6
    pair = float(curvcert.lipschitz(net, method="product", pair=(0, 7)))
    rows = model[-1].effective().detach()
    assert math.isclose(pair, float((rows[0] - rows[7]).norm()), rel_tol=1e-6)
    last = float(torch.linalg.matrix_norm(rows, 2))
    assert float(curvcert.lipschitz(net, method="product")) <= last * (1 + 1e-6)


def test_wrong_names_and_arguments_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"Unknown architecture '7F'. Choose one of: 6F, 6C2F, Lip-3C1F, MNIST-3F"):
        cnn.architecture("7F")
    with pytest.raises(InvalidInput, match="images of 3 channels, got a mean shift of 1"):
        cnn.architecture("6F", mean_shift=[0.5])
    with pytest.raises(InvalidInput, match="Unknown activation"):
        cnn.architecture("digits", "tahn")
    with pytest.raises(InvalidInput, match="depth of 3, 4, 5 or 6"):
        cnn.mnist_dense(7)
    with pytest.raises(UnsupportedActivation, match=r"slopes in \[0, 1\]"):
        cnn.architecture("Lip-3C1F", "gelu")


def test_padding_of_channels_is_an_isometry() -> None:
    x = torch.randn(2, 3, 4, 5, dtype=F64)
    model = cnn.PadChannels(7).eval()
    assert torch.equal(model(x)[:, :3], x)
    assert not bool(model(x)[:, 3:].any())
    net = curvcert.trace(model, x)
    assert torch.equal(net(x), model(x))
    assert 1.0 <= float(curvcert.lipschitz(net)) <= 1 + 1e-9
    with pytest.raises(InvalidInput, match="3 channels, which is more"):
        cnn.PadChannels(2)(x)
    with pytest.raises(InvalidInput, match=r"0: .*3 channels, which is more"):
        curvcert.trace(nn.Sequential(cnn.PadChannels(2)).eval(), x)


@pytest.mark.parametrize(("k", "side"), [(1, 3), (2, 4), (4, 8), (3, 7)])
def test_scaled_pooling_is_one_lipschitz_and_no_less(k: int, side: int) -> None:
    x = torch.randn(2, 2, side, side, dtype=F64)
    model = cnn.ScaledAveragePool2d(k).eval()
    net = curvcert.trace(model, x)
    assert torch.allclose(net(x), model(x), atol=1e-14)
    truth = float(torch.linalg.matrix_norm(net.blocks[0].H.as_matrix(), 2))  # type: ignore[union-attr]
    assert math.isclose(truth, 1.0, rel_tol=1e-12)
    assert float(curvcert.lipschitz(net)) <= 1 + 1e-9


def test_unit_rows() -> None:
    model = cnn.UnitRowLinear(5, 4).double().eval()
    x = torch.randn(3, 5, dtype=F64)
    rows = model.effective()
    assert torch.allclose(rows.norm(dim=1), torch.ones(4, dtype=F64), atol=1e-11)
    assert torch.allclose(rows * model.weight.norm(dim=1, keepdim=True), model.weight, atol=1e-11)
    net = curvcert.trace(model, x)
    assert torch.allclose(net(x), model(x), atol=1e-14)
    assert all(0.999 < float(curvcert.lipschitz(net, logit=i)) <= 1 + 1e-9 for i in range(4))
    weight = model.weight.detach().clone().requires_grad_()
    call = lambda w: torch.func.functional_call(model, {"weight": w}, (x,))  # noqa: E731
    assert torch.autograd.gradcheck(call, (weight,))


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_a_zero_row_stays_zero_with_a_finite_gradient(dtype: torch.dtype) -> None:
    model = cnn.UnitRowLinear(3, 2).to(dtype)
    with torch.no_grad():
        model.weight[0] = 0.0
    assert torch.equal(model.effective()[0], torch.zeros(3, dtype=dtype))
    model(torch.randn(4, 3, dtype=dtype)).square().sum().backward()
    assert model.weight.grad is not None
    assert bool(torch.isfinite(model.weight.grad).all())


@pytest.mark.parametrize(
    "make",
    [
        lambda: cnn.PadChannels(0),
        lambda: cnn.ScaledAveragePool2d(0),
        lambda: cnn.ScaledAveragePool2d(2.5),
        lambda: cnn.UnitRowLinear(0, 3),
    ],
)
def test_sizes_of_linear_layers_are_checked(make) -> None:
    with pytest.raises(InvalidInput, match="needs"):
        make()


@pytest.mark.parametrize("model", [cnn.PadChannels(4), cnn.ScaledAveragePool2d(2), cnn.UnitRowLinear(4, 2)])
def test_linear_layers_refuse_other_shapes_by_path(model: nn.Module) -> None:
    shape = (3, 4) if isinstance(model, cnn.UnitRowLinear) else (3,)
    with pytest.raises(InvalidInput, match=r"^0: "):
        curvcert.trace(nn.Sequential(model).eval(), torch.zeros(1, *shape))
