"""SLL layers are 1-Lipschitz: searched for in vain, and proven from the weights, never assumed."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import curvcert
import curvcert.nn as cnn
from curvcert.activations import ACTIVATIONS, from_module
from curvcert.bounds.curvature.blocks import block_curvature
from curvcert.bounds.curvature.compositional import compositional_bound
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Global
from curvcert.errors import InvalidInput, UnsupportedActivation
from curvcert.network import Affine, Block, Network
from curvcert.nn.sll import FLOOR, contracting_diagonal
from curvcert.operators import Diagonal, NormBounds
from tests.bounds.search import ROUNDING, Search

F64 = torch.float64
SLL = cnn.SLLDense | cnn.SLLConv2d

LAYERS = {
    "dense": (lambda activation: cnn.SLLDense(5, 7, activation), (5,)),
    "dense, narrow": (lambda activation: cnn.SLLDense(6, 2, activation), (6,)),
    "conv 1": (lambda activation: cnn.SLLConv2d(3, 4, 1, activation), (3, 3, 3)),
    "conv 2": (lambda activation: cnn.SLLConv2d(2, 3, 2, activation), (2, 3, 4)),
    "conv 3": (lambda activation: cnn.SLLConv2d(2, 3, 3, activation), (2, 4, 4)),
    "conv 3, no padding": (lambda activation: cnn.SLLConv2d(2, 3, 3, activation, padding=0), (2, 5, 4)),
}


def layer(name: str, activation: str = "tanh", scale: float = 1.0, dtype: torch.dtype = F64) -> SLL:
    """Return a layer with random q and weights of a given size, in eval mode."""
    torch.manual_seed(3)
    made: SLL = LAYERS[name][0](activation).to(dtype).eval()
    with torch.no_grad():
        made.weight.mul_(scale)
        made.log_scale.normal_()
    return made


def example(name: str) -> Tensor:
    return torch.zeros(1, *LAYERS[name][1], dtype=F64)


def only_block(net: Network) -> Block:
    (block,) = net.blocks
    assert isinstance(block, Block)
    return block


@pytest.mark.parametrize("scale", [0.1, 10.0])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("name", LAYERS)
def test_no_slope_is_found_above_one_and_one_is_proven(name: str, activation: str, scale: float) -> None:
    net = curvcert.trace(layer(name, activation, scale), example(name))
    found = float(Search(net, 2, 2, steps=10).everywhere(starts=8))
    bound = float(curvcert.lipschitz(net))
    assert 0.5 < found <= min(1.0, bound) * (1 + ROUNDING)
    assert bound <= 1 + 1e-6


@pytest.mark.parametrize("name", LAYERS)
def test_the_trace_is_the_layer(name: str) -> None:
    model = layer(name)
    x = torch.randn(4, *LAYERS[name][1], dtype=F64)
    net = curvcert.trace(model, x)
    assert torch.allclose(net(x), model(x), atol=1e-13)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda v: model(v[None])[0].flatten()))(x)
    assert torch.allclose(net.jacobian(x), jacobian, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_a_float32_layer_is_certified_as_its_float64_twin(name: str) -> None:
    model = layer(name, dtype=torch.float32)
    x = torch.randn(4, *LAYERS[name][1])
    net = curvcert.trace(model, x)
    assert float(curvcert.lipschitz(net)) <= 1 + 1e-6
    assert float((net(x) - model(x)).detach().abs().max()) < 1e-5
    assert torch.equal(net(x), curvcert.trace(model.double(), x.double())(x))


def test_the_diagonal_of_a_dense_layer_against_its_definition() -> None:
    model = layer("dense")
    weight, diagonal = (part.detach() for part in model.effective())
    gram, q = weight @ weight.T, model.log_scale.detach().exp()
    for i in range(7):
        T = sum(abs(float(gram[i, j])) * float(q[j] / q[i]) for j in range(7))
        assert math.isclose(float(diagonal[i]), 2 / (T + FLOOR), rel_tol=1e-12)


@pytest.mark.parametrize("name", ["conv 1", "conv 2", "conv 3"])
def test_the_diagonal_of_a_convolution_is_that_of_its_matrix_away_from_the_edges(name: str) -> None:
    model = layer(name)
    net = curvcert.trace(model, torch.zeros(1, model.channels, 9, 9, dtype=F64))
    W = only_block(net).W
    gram = (W.as_matrix() @ W.as_matrix().T).abs().reshape(*W.out_shape, *W.out_shape)
    q = model.log_scale.exp()
    T = (gram[:, 4, 4].sum(dim=(2, 3)) * q).sum(dim=1) / q
    assert torch.allclose(model.effective()[1], 2 / (T + FLOOR), rtol=1e-12)


@pytest.mark.parametrize(("name", "dtype"), list(product(["dense", "conv 3"], [torch.float32, F64])))
def test_zero_weights_give_the_identity_and_finite_gradients(name: str, dtype: torch.dtype) -> None:
    model = layer(name, scale=0.0, dtype=dtype)
    x = torch.randn(2, *LAYERS[name][1], dtype=dtype, requires_grad=True)
    y = model(x)
    assert torch.equal(y, x)
    y.square().sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in (x, *model.parameters()))
    assert float(curvcert.lipschitz(curvcert.trace(model, x.detach()))) <= 1 + 1e-6


@pytest.mark.parametrize("tiny", [1e-30, 1e-12, 1e-4])
def test_tiny_weights_do_not_blow_up(tiny: float) -> None:
    model = layer("dense", scale=tiny, dtype=torch.float32)
    x = torch.randn(3, 5)
    assert bool(torch.isfinite(model(x)).all())
    assert float((model(x) - x).detach().abs().max()) < 2 / math.sqrt(FLOOR)


@pytest.mark.parametrize("name", ["dense", "conv 1", "conv 3"])
def test_gradients_of_inputs_and_parameters(name: str) -> None:
    model = layer(name)
    x = torch.randn(2, *LAYERS[name][1], dtype=F64, requires_grad=True)
    names = [key for key, _ in model.named_parameters()]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))

    values = [p.detach().clone().requires_grad_() for p in model.parameters()]
    assert len(values) == 3
    assert torch.autograd.gradcheck(run, (x, *values), fast_mode=True)


@pytest.mark.parametrize("name", ["dense", "conv 3"])
def test_a_smaller_T_raises_the_proven_constant(name: str) -> None:
    block = only_block(curvcert.trace(layer(name), example(name)))
    weights = block.G.map.factors[-1].weight  # type: ignore[attr-defined]
    bounds = []
    for factor in (1.0, 0.9, 0.5, 0.25):
        G = -1.0 * (block.W.T @ Diagonal(weights / factor, block.W.out_shape))
        net = Network.of_blocks((replace(block, G=G),))
        bounds.append(float(curvcert.lipschitz(net, method="product")))
        assert float(Search(net, 2, 2, steps=10).everywhere(starts=8)) <= bounds[-1] * (1 + ROUNDING)
    assert bounds[0] <= 1 + 1e-6
    assert bounds[-1] > 1.01


def test_the_proven_constant_is_attained_where_T_is_tight() -> None:
    # W = I: x - (2 / 0.9) tanh(x) has the slope 1 - 2 / 0.9 at 0.
    model = cnn.SLLDense(3).double().eval()
    with torch.no_grad():
        model.weight.copy_(torch.eye(3))
        model.bias.zero_()
    net = curvcert.trace(model, torch.zeros(1, 3))
    block = only_block(net)
    G = -1.0 * (block.W.T @ Diagonal(torch.full((3,), 2 / 0.9, dtype=F64), (3,)))
    tampered = Network.of_blocks((replace(block, G=G),))
    truth = float(torch.linalg.matrix_norm(tampered.jacobian(torch.zeros(1, 3))[0], 2))
    bound = float(curvcert.lipschitz(tampered))
    assert math.isclose(truth, 2 / 0.9 - 1, rel_tol=1e-12)
    assert truth <= bound <= truth * (1 + 1e-9)
    assert float(curvcert.lipschitz(net)) <= 1 + 1e-6


def test_a_stack_adds_up_the_curvatures_of_its_blocks() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        cnn.PadChannels(3),
        cnn.SLLConv2d(3, 4),
        cnn.SLLConv2d(3, 4),
        cnn.ScaledAveragePool2d(2),
        nn.Flatten(),
        cnn.SLLDense(12, 9),
    )
    net = curvcert.trace(model.eval(), torch.zeros(1, 2, 4, 4))
    assert [type(block) for block in net.blocks] == [Affine, Block, Block, Affine, Block]
    norms = NormBounds()
    total = sum(float(block_curvature(b, 2, 2, norms)[0]) for b in net.blocks if isinstance(b, Block))
    bound = float(compositional_bound(Problem(net, 2, 2, Global()), norms))
    assert bound <= total * (1 + 1e-9)
    assert float(curvcert.lipschitz(net)) <= 1 + 1e-6


def test_what_comes_before_a_layer_is_a_block_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), cnn.SLLDense(4), cnn.SLLDense(4)).eval()
    x = torch.randn(6, 3)
    net = curvcert.trace(model, x)
    assert len(net.blocks) == 3
    assert torch.allclose(net(x), model.double()(x.double()), atol=1e-13)
    norms = torch.linalg.matrix_norm(model[0].weight, 2) * torch.linalg.matrix_norm(model[2].weight, 2)
    assert float(curvcert.lipschitz(net, method="product")) <= float(norms) * (1 + 1e-6)


@pytest.mark.parametrize("name", cnn.ACTIVATION_MODULES)
def test_activations_with_slopes_outside_the_unit_interval_are_refused_at_birth(name: str) -> None:
    alpha, beta = from_module(cnn.make_activation(name)).slope
    for make in (lambda: cnn.SLLDense(2, activation=name), lambda: cnn.SLLConv2d(2, activation=name)):
        if alpha >= 0 and beta <= 1:
            model = make().eval()
            shape = (2,) if isinstance(model, cnn.SLLDense) else (2, 3, 3)
            assert float(curvcert.lipschitz(curvcert.trace(model, torch.zeros(1, *shape)))) <= 1 + 1e-6
        else:
            with pytest.raises(UnsupportedActivation, match=r"slopes in \[0, 1\]"):
                make()


def test_every_row_of_the_table_has_a_module() -> None:
    made = {from_module(make()).name for make in cnn.ACTIVATION_MODULES.values()}
    assert made == set(ACTIVATIONS)


def test_activations_are_made_from_names_modules_and_factories() -> None:
    given = cnn.CentredSoftplus(5.0)
    for choice in (given, lambda: cnn.CentredSoftplus(5.0)):
        model = cnn.SLLDense(2, activation=choice)
        assert isinstance(model.activation, cnn.CentredSoftplus)
        assert model.activation.beta == 5.0
        assert model.activation is not given
    with pytest.raises(InvalidInput, match="Unknown activation 'tahn'"):
        cnn.make_activation("tahn")
    with pytest.raises(InvalidInput, match="An activation is a name"):
        cnn.make_activation(3)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedActivation, match="No activation is known for PReLU"):
        cnn.SLLDense(2, activation=nn.PReLU)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cnn.SLLDense(0), "features"),
        (lambda: cnn.SLLDense(2, 0), "hidden"),
        (lambda: cnn.SLLConv2d(2, 2.5), "hidden_channels"),
        (lambda: cnn.SLLConv2d(2, kernel_size=0), "kernel_size"),
        (lambda: cnn.SLLConv2d(2, kernel_size=3, padding=3), "padding"),
    ],
)
def test_sizes_are_checked(make, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (cnn.SLLDense(3), (4,), "0: SLLDense expects vectors of 3 features"),
        (cnn.SLLDense(3), (2, 3), "0: SLLDense expects vectors"),
        (cnn.SLLConv2d(3), (2, 4, 4), "0: SLLConv2d expects images of 3 channels"),
    ],
)
def test_inputs_of_another_shape_are_refused(model: nn.Module, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        curvcert.trace(nn.Sequential(model).eval(), torch.zeros(1, *shape))


def test_the_state_is_weight_bias_and_log_scale() -> None:
    assert set(cnn.SLLConv2d(2).state_dict()) == {"weight", "bias", "log_scale"}
    assert "hidden=4" in repr(cnn.SLLDense(3, 4))
    assert "hidden_channels=4" in repr(cnn.SLLConv2d(3, 4))


def test_the_diagonal_follows_the_weights_with_gradients() -> None:
    gram = torch.tensor([[2.0, -1.0], [-1.0, 3.0]], dtype=F64, requires_grad=True)
    scale = torch.tensor([0.3, -0.2], dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(contracting_diagonal, (gram, scale))
