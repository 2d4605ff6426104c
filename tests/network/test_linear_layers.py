"""Linear layers in the styles of people's code: each is taken, and is the map that the module computes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvcert
import curvcert.nn as cnn
from curvcert.checker import check_certificate, evaluate_network
from curvcert.network import LiveNetwork
from curvcert.network.network_file import network_digest, save_network
from curvcert.network.network_reading import load_network
from curvcert.operators.norm_bounds import norm_upper_bound
from tests.network.cases import Function

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

Row = tuple[str, Callable[[], nn.Module], tuple[int, ...]]


def of(function: Callable[[Function, Tensor], object], **parts: object) -> Callable[[], nn.Module]:
    return lambda: Function(function, **parts)


def weight(*shape: int, seed: int = 4) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))


SIGNAL, IMAGE, TOKENS = (2, 6), (2, 4, 6), (3, 4)

MODULES: list[Row] = [
    ("conv1d", lambda: nn.Conv1d(2, 3, 3), SIGNAL),
    ("conv1d options", lambda: nn.Conv1d(2, 4, 3, 2, 2, 2, groups=2), SIGNAL),
    ("conv1d same", lambda: nn.Conv1d(2, 3, 4, padding="same"), SIGNAL),
    ("conv1d reflect", lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="reflect"), SIGNAL),
    ("conv1d circular", lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular"), SIGNAL),
    ("conv2d replicate", lambda: nn.Conv2d(2, 2, 3, padding=(1, 0), padding_mode="replicate"), IMAGE),
    ("conv2d reflect same", lambda: nn.Conv2d(2, 2, 3, padding="same", padding_mode="reflect"), IMAGE),
    ("transposed conv1d", lambda: nn.ConvTranspose1d(2, 3, 3, 2, 1, 1), SIGNAL),
    ("transposed conv2d", lambda: nn.ConvTranspose2d(2, 3, 4, 2, 1), IMAGE),
    ("transposed conv2d options", lambda: nn.ConvTranspose2d(2, 4, 3, 2, 1, 1, 2, False, 2), IMAGE),
    ("token-wise linear", lambda: nn.Linear(4, 3), TOKENS),
    ("linear on three axes", lambda: nn.Linear(3, 2), (2, 2, 3)),
    ("linear on one token", lambda: nn.Linear(4, 3), (1, 4)),
    ("average pool 1d", lambda: nn.AvgPool1d(3, 2, 1), SIGNAL),
    ("average pool 1d without its border", lambda: nn.AvgPool1d(3, 2, 1, True, False), SIGNAL),
    ("average pool ceil", lambda: nn.AvgPool2d(3, 2, 1, True), (2, 4, 5)),
    ("average pool without its border", lambda: nn.AvgPool2d((3, 2), 1, 1, count_include_pad=False), IMAGE),
    ("average pool divisor", lambda: nn.AvgPool2d(2, ceil_mode=True, divisor_override=3), (2, 3, 5)),
    ("adaptive average pool 1d", lambda: nn.AdaptiveAvgPool1d(3), SIGNAL),
    ("adaptive average pool", lambda: nn.AdaptiveAvgPool2d((2, None)), IMAGE),
    ("adaptive average pool, uneven", lambda: nn.AdaptiveAvgPool2d(3), IMAGE),
    ("global average pool", lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), IMAGE),
    ("upsample", lambda: nn.Upsample(scale_factor=2), IMAGE),
    ("upsample 1d", lambda: nn.Upsample(12), SIGNAL),
    ("upsample bilinear", lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    ("upsample to corners", lambda: nn.Upsample((5, 7), mode="bilinear", align_corners=True), IMAGE),
    ("reflection pad", lambda: nn.ReflectionPad2d((1, 2, 3, 0)), IMAGE),
    ("replication pad", lambda: nn.ReplicationPad1d(2), SIGNAL),
    ("circular pad", lambda: nn.CircularPad2d(1), IMAGE),
    ("constant pad", lambda: nn.ConstantPad2d((1, 0, 0, 2), 0.5), IMAGE),
    ("pixel shuffle", lambda: nn.PixelShuffle(2), (8, 2, 3)),
    ("pixel unshuffle", lambda: nn.PixelUnshuffle(2), IMAGE),
    ("channel shuffle", lambda: nn.ChannelShuffle(2), (4, 2, 2)),
    ("unflatten", lambda: nn.Unflatten(2, (3, -1)), SIGNAL),
]

FUNCTIONS: list[Row] = [
    ("linear", of(lambda m, x: F.linear(x, m.w, m.b), w=weight(3, 4), b=weight(3)), TOKENS),
    ("matmul", of(lambda m, x: torch.matmul(x, m.w), w=weight(4, 2)), TOKENS),
    ("at", of(lambda m, x: x @ m.w + m.b, w=weight(4, 2), b=weight(2)), (4,)),
    ("transposed weight", of(lambda m, x: x @ m.w.t(), w=weight(2, 4)), (4,)),
    ("matrix from the left", of(lambda m, x: m.a @ x, a=torch.randn(5, 3)), TOKENS),
    ("times a vector", of(lambda m, x: x @ m.w, w=weight(4)), TOKENS),
    ("addmm", of(lambda m, x: torch.addmm(m.b, x, m.w), w=weight(4, 2), b=weight(2)), (4,)),
    ("masked weight", of(lambda m, x: F.linear(x, m.w * m.mask), w=weight(3, 4), mask=torch.ones(4)), (4,)),
    ("conv1d", of(lambda m, x: F.conv1d(x, m.w, m.b, padding=1), w=weight(3, 2, 3), b=weight(3)), SIGNAL),
    ("conv2d", of(lambda m, x: F.conv2d(x, m.w, stride=2, padding="valid"), w=weight(3, 2, 2, 2)), IMAGE),
    ("conv_transpose2d", of(lambda m, x: F.conv_transpose2d(x, m.w, stride=2), w=weight(2, 1, 2, 2)), IMAGE),
    ("einsum", of(lambda m, x: torch.einsum("bnd,de->bne", x, m.w), w=weight(4, 2)), TOKENS),
    ("einsum from the left", of(lambda m, x: torch.einsum("mn, bnd -> bdm", m.a, x), a=torch.randn(5, 3)), TOKENS),
    ("mean", of(lambda m, x: x.mean(dim=(2, 3))), IMAGE),
    ("mean of channels", of(lambda m, x: torch.mean(x, 1, keepdim=True)), IMAGE),
    ("mean of tokens", of(lambda m, x: x.mean(1)), TOKENS),
    ("sum", of(lambda m, x: x.sum(-1)), TOKENS),
    ("sum, keepdim", of(lambda m, x: torch.sum(x, (1, 2), keepdim=True)), TOKENS),
    ("cumsum", of(lambda m, x: torch.cumsum(x, dim=1)), TOKENS),
    ("pools", of(lambda m, x: F.adaptive_avg_pool2d(F.avg_pool2d(x, 2), 1)), IMAGE),
    ("pools 1d", of(lambda m, x: F.adaptive_avg_pool1d(F.avg_pool1d(x, 2), 1).squeeze(-1)), SIGNAL),
    ("permute", of(lambda m, x: x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, x.shape[1])), IMAGE),
    ("transpose", of(lambda m, x: x.transpose(1, 2).contiguous().view(x.size(0), -1)), TOKENS),
    ("squeeze", of(lambda m, x: x.unsqueeze(1).squeeze(1).unflatten(1, (3, 1)).flatten(1)), TOKENS),
    ("stack", of(lambda m, x: torch.stack([x[:, 0], x[:, 2]], dim=1)), TOKENS),
    ("split", of(lambda m, x: torch.split(x, [1, 3], dim=2)[1]), TOKENS),
    ("chunk", of(lambda m, x: x.chunk(2, dim=-1)[1]), TOKENS),
    ("narrow", of(lambda m, x: x.narrow(1, 1, 2)), TOKENS),
    ("index buffer", of(lambda m, x: x[:, m.i], i=torch.tensor([2, 0, 0])), TOKENS),
    ("index list", of(lambda m, x: x[..., [3, 1]]), TOKENS),
    ("index mask", of(lambda m, x: x[:, m.i], i=torch.tensor([True, False, True])), TOKENS),
    ("index_select", of(lambda m, x: x.index_select(2, m.i), i=torch.tensor([1, 1])), TOKENS),
    ("flip", of(lambda m, x: torch.flip(x, [1, 2])), TOKENS),
    ("roll", of(lambda m, x: torch.roll(x, (1, -2), (1, 2))), TOKENS),
    ("interpolate", of(lambda m, x: F.interpolate(x, scale_factor=3, mode="nearest")), SIGNAL),
    ("interpolate by 1.5", of(lambda m, x: F.interpolate(x, scale_factor=1.5)), IMAGE),
    ("interpolate area", of(lambda m, x: F.interpolate(x, (2, 4), mode="area")), IMAGE),
    ("interpolate down", of(lambda m, x: F.interpolate(x, size=(2, 3), mode="nearest-exact")), IMAGE),
    ("pad", of(lambda m, x: F.pad(x, (1, 2), value=-1.0)), TOKENS),
    ("pad and crop", of(lambda m, x: F.pad(x, (-1, 2, 1, -1), value=2.0)), TOKENS),
    ("pad reflect", of(lambda m, x: F.pad(x, (2, 1), mode="reflect")), SIGNAL),
    ("pixel_shuffle", of(lambda m, x: F.pixel_shuffle(x, 2)), (4, 2, 2)),
    ("repeat", of(lambda m, x: x.repeat(1, 2, 1)), TOKENS),
    ("expand", of(lambda m, x: x[:, :, None].expand(-1, -1, 2, -1)), TOKENS),
    ("repeat_interleave", of(lambda m, x: x.repeat_interleave(2, dim=1)), TOKENS),
    ("batch_norm", of(lambda m, x: F.batch_norm(x, m.a, m.b, eps=0.1), a=torch.ones(2), b=torch.ones(2)), SIGNAL),
]

ROWS = [*MODULES, *FUNCTIONS]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_it_is_the_map_of_the_module(row: Row, tmp_path: Path) -> None:
    _, make, shape = row
    torch.manual_seed(1)
    model = make().eval()
    net = curvcert.trace(model, torch.zeros(1, *shape))
    twin, x = model.double(), torch.randn(3, *shape, dtype=torch.float64)
    expected = twin(x).detach()
    assert net(x).shape == expected.shape
    torch.testing.assert_close(net(x), expected, rtol=1e-12, atol=1e-12)
    # One affine map, with its adjoint and norms those of the dense Jacobian.
    (node,) = net.nodes[1:]
    (term,) = node.terms
    basis = torch.eye(x[0].numel(), dtype=torch.float64).reshape(-1, *shape)
    matrix = (twin(basis) - twin(torch.zeros_like(basis))).detach().flatten(1).T
    torch.testing.assert_close(term.map.as_matrix(), matrix, rtol=1e-12, atol=1e-12)
    y = torch.randn(2, *term.map.out_shape, dtype=torch.float64)
    torch.testing.assert_close(term.map.adjoint(y).flatten(1), y.flatten(1) @ matrix, rtol=1e-11, atol=1e-11)
    for p in (1.0, 2.0, float("inf")):
        truth = float(torch.linalg.matrix_norm(matrix, p))
        assert truth * (1 - 1e-14) <= float(norm_upper_bound(term.map, p)) <= truth * (1 + 1e-7)
    assert float(norm_upper_bound(term.map, 1.5)) >= float(torch.linalg.vector_norm(matrix, 1.5, dim=0).max())
    path = save_network(net, tmp_path / "net")
    again = load_network(path)
    assert network_digest(again) == network_digest(net)
    assert torch.equal(again(x), net(x))
    values, errors = evaluate_network(path, x.numpy())
    gap = (torch.from_numpy(values) - expected.flatten(1)).abs()
    assert bool((gap <= torch.from_numpy(errors) + 1e-12 * (1 + expected.flatten(1).abs())).all())


@pytest.mark.parametrize("name", ["conv1d", "transposed conv2d", "token-wise linear", "linear", "conv2d"])
def test_weights_of_a_live_network_keep_their_gradients(name: str) -> None:
    _, make, shape = next(row for row in reversed(ROWS) if row[0] == name)
    model = make()
    network = LiveNetwork(model, torch.zeros(1, *shape))()
    x = torch.randn(2, *shape, dtype=next(model.parameters()).dtype)
    (node,) = network.nodes[1:]
    node.terms[0].map.apply(x).square().sum().backward()
    assert all(
        w.grad is not None and bool(w.grad.any()) for n, w in model.named_parameters() if "bias" not in n and n != "b"
    )


def _signals() -> nn.Module:
    layers = nn.Conv1d(2, 4, 3, 2, 1), nn.Tanhshrink(), nn.ConvTranspose1d(4, 3, 4, 2, 1), cnn.Gaussian()
    return nn.Sequential(*layers, nn.AvgPool1d(3, 2, 1, True, False), nn.Flatten(), nn.Linear(15, 3))


def _tokens() -> nn.Module:
    gate = Function(lambda m, x: (x * torch.sigmoid(1.702 * x)).cumsum(2).flip(2))
    mean = Function(lambda m, x: torch.cos(torch.roll(x, 1, 1)[:, [0, 0, 2]]).mean(1))
    return nn.Sequential(nn.Linear(3, 5), gate, nn.Linear(5, 4), mean, nn.Linear(4, 3))


def _mirrors() -> nn.Module:
    first = nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), nn.LogSigmoid(), nn.Upsample(scale_factor=2)
    return nn.Sequential(*first, nn.Conv2d(2, 3, 3, 2, 1), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _kinks() -> nn.Module:
    inner = nn.Linear(6, 8), nn.Hardswish(), nn.Linear(8, 8), nn.PReLU(8, 0.3), nn.Linear(8, 8), nn.Hardsigmoid()
    return nn.Sequential(*inner, Function(lambda m, x: abs(x - 0.5).clamp(min=0.1)), nn.Linear(8, 3))


NETWORKS = [(_signals, (2, 8)), (_tokens, (3, 3)), (_mirrors, (1, 4, 4)), (_kinks, (6,))]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "shape"), NETWORKS, ids=lambda item: getattr(item, "__name__", ""))
def test_bounds_hold_and_the_checker_proves_the_radii(
    make: Callable[[], nn.Module], shape: tuple[int, ...], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    model = make().double().eval()
    x = torch.randn(4, *shape, dtype=torch.float64)
    net = curvcert.trace(model, x)
    near = 2 * torch.randn(300, *shape, dtype=torch.float64)
    step = torch.randn_like(near)
    step = 1e-4 * step / torch.linalg.vector_norm(step.flatten(1), dim=1).reshape(-1, *(1 for _ in shape))
    below, above = net.jacobian(near - step).flatten(2), net.jacobian(near + step).flatten(2)
    for p in (1.0, 2.0, float("inf")):
        assert float(torch.linalg.matrix_norm(above, p).max()) <= float(curvcert.lipschitz(net, p))
    if make is not _kinks:
        bend = torch.linalg.matrix_norm(above - below, 2).max() / 2e-4
        assert 0 < float(bend) <= float(curvcert.curvature(net)) * (1 + 1e-6)
    y = net(x).argmax(1)
    certificate = curvcert.certify(net, x, y, method="checkable")
    assert bool((certificate.radius > 0).all())
    certificate.save(tmp_path / "c.safetensors")
    network = save_network(net, tmp_path / "n")
    found = check_certificate(tmp_path / "c.safetensors", network, x.numpy(), y.numpy())
    assert set(found.status) == {"proven"}, found.reasons
