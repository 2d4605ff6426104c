"""A module exported by either of PyTorch's exporters comes back as the Network that `trace` makes of it."""

import logging
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import curvcert
import curvcert.nn as cnn
from curvcert.network import Block, Network
from curvcert.network.onnx_import import load_onnx
from tests.network.cases import Function, Residual, batch_norm

SMOOTH = {
    "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "softplus": nn.Softplus, "softplus(3)": lambda: nn.Softplus(3.0, 30.0),
    "elu": nn.ELU, "celu(2)": lambda: nn.CELU(2.0), "gelu": nn.GELU, "gelu tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU, "mish": nn.Mish, "softsign": nn.Softsign, "sin": cnn.Sin, "arctan": cnn.Arctan, "erf": cnn.Erf,
}  # fmt: skip
KINKED = {
    "relu": nn.ReLU, "leaky": nn.LeakyReLU, "relu6": nn.ReLU6, "hardtanh": lambda: nn.Hardtanh(-0.4, 0.3),
    "selu": nn.SELU, "elu(0.7)": lambda: nn.ELU(0.7),
}  # fmt: skip


def exported(model: nn.Module, shape: tuple[int, ...], folder: Path, dynamo: bool, **options: object) -> Path:
    """Export with an open batch, quietly."""
    path = folder / "net.onnx"
    axes = {"dynamic_shapes": ({0: torch.export.Dim("batch")},)} if dynamo else {"dynamic_axes": {"x": {0: "batch"}}}
    quiet = {"verbose": False} if dynamo else {}
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x = torch.randn(2, *shape)
            torch.onnx.export(model.eval(), (x,), path, dynamo=dynamo, input_names=["x"], **axes, **quiet, **options)
    finally:
        logging.disable(logging.NOTSET)
    return path


def same(model: nn.Module, network: Network, shape: tuple[int, ...], slack: float = 1e-6) -> None:
    """Assert equality with the module in float64: only constants of formulas are rounded to float32 on the way."""
    x = torch.randn(5, *shape, dtype=torch.float64)
    expected = model.double()(x).detach()
    torch.testing.assert_close(network(x), expected, rtol=slack, atol=slack)
    assert network.source_dtype == torch.float32


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), batch_norm(nn.BatchNorm2d(4)), nn.Tanh(), nn.AvgPool2d(2),
        batch_norm(nn.BatchNorm2d(4)), nn.Conv2d(4, 3, (2, 3), padding="same"), nn.Softplus(), nn.AvgPool2d(3, 2, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(3, 3), batch_norm(nn.BatchNorm1d(3)),
    )  # fmt: skip


def forward(m: Function, x: Tensor) -> Tensor:
    y = torch.tanh(m.conv((x - m.mean) / 0.3))
    y = nn.functional.pad(y, (1, 0, 0, 2)).permute(0, 2, 3, 1)
    y = m.rows(y.reshape(y.size(0), -1, 3)).transpose(1, 2)
    y = m.out(y.flatten(1)).view(x.shape[0], 2, 2)
    return y.view(y.size(0), -1) + 2 * y.flatten(1)


def mixed() -> nn.Module:
    layers = {"conv": nn.Conv2d(2, 3, 2), "rows": nn.Linear(3, 2), "out": nn.Linear(40, 4, bias=False)}
    return Function(forward, mean=torch.rand(2, 1, 1), **layers)


def residual() -> nn.Module:
    inner = nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 5))
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), Residual(inner, 0.3), nn.SiLU(), nn.Linear(5, 4))


def chain(activations: dict) -> nn.Module:
    """One module with a residual block and every activation, a dense layer before each."""
    layers = [layer for make in activations.values() for layer in (nn.Linear(4, 4), make())]
    return nn.Sequential(residual(), *layers, nn.Linear(4, 3))


MODELS = {
    "conv": (conv_net, (2, 8, 8)),
    "mixed": (mixed, (2, 4, 4)),
    "activations": (lambda: chain(SMOOTH | KINKED), (4,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
@pytest.mark.parametrize("name", MODELS)
def test_both_exporters(name: str, dynamo: bool, tmp_path: Path) -> None:
    make, shape = MODELS[name]
    model = make()
    path = exported(model, shape, tmp_path, dynamo)
    # The newer exporter puts the weights into a file beside the model.
    assert path.with_name("net.onnx.data").exists() == dynamo
    same(model, load_onnx(path), shape)


@pytest.mark.parametrize("opset", [9, 13, 17])
@pytest.mark.parametrize("name", ["conv", "residual"])
def test_older_opsets(name: str, opset: int, tmp_path: Path) -> None:
    make, shape = MODELS.get(name, (residual, (4,)))
    model = make()
    if name == "conv" and opset == 9:
        model = nn.Sequential(*(layer for layer in model if not isinstance(layer, nn.AvgPool2d)))
    same(model, load_onnx(exported(model, shape, tmp_path, False, opset_version=opset)), shape)


@pytest.mark.parametrize("name", SMOOTH)
def test_each_activation_keeps_its_row(name: str, tmp_path: Path) -> None:
    make = SMOOTH[name]
    model = nn.Sequential(nn.Linear(4, 5), make(), nn.Linear(5, 2))
    network = load_onnx(exported(model, (4,), tmp_path, False, opset_version=17))
    traced = curvcert.trace(model.float().eval(), torch.zeros(1, 4))
    (block,), (other,) = network.blocks, traced.blocks
    assert isinstance(block, Block) and isinstance(other, Block)
    if name != "softplus(3)":
        # The table's, or that with the constants that float32 holds.
        assert block.activation.name.partition("(0.79")[0].partition("(0.70")[0] == other.activation.name
    bounds = [float(curvcert.curvature(net)) for net in (network, traced)]
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-6)


def test_a_certificate_from_a_file(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    network = load_onnx(exported(model, (4,), tmp_path, False))
    x = torch.randn(4, 4)
    traced = curvcert.trace(model.eval(), x)
    got, expected = curvcert.certify(network, x), curvcert.certify(traced, x)
    assert torch.equal(got.radius, expected.radius)
    assert bool((got.radius > 0).all())
