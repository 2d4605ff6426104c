"""A Network is the module that it came from: values, Jacobians, parts, and nothing else touched."""

import copy
from functools import cache
from itertools import combinations

import pytest
import torch
from torch import nn
from torch.func import jacrev, vmap

import curvcert
from curvcert.errors import CurvcertError, UnsupportedActivation
from curvcert.network import Affine, Block, MaxPool, Network
from curvcert.network.evaluation import evaluate_with_error
from curvcert.operators import Dense, NormBounds
from tests.network.cases import CASES, CONV, IDS, RESIDUAL, STRUCTURES, Case, Function

every_case = pytest.mark.parametrize("case", CASES, ids=IDS)
every_structure = pytest.mark.parametrize("case", STRUCTURES, ids=lambda case: case.name)


def close(got: torch.Tensor, expected: torch.Tensor, slack: float = 1e-12) -> bool:
    return got.shape == expected.shape and bool((got - expected).abs().max() <= slack * (1 + expected.abs().max()))


@cache
def traced(case: Case) -> tuple[nn.Module, Network]:
    model = case.model()
    return copy.deepcopy(model).double(), curvcert.trace(model, case.inputs(1))


@every_case
def test_values_are_those_of_the_module(case: Case) -> None:
    model, net = traced(case)
    for scale in (0.1, 1.0, 30.0):
        x = scale * case.inputs()
        expected = model(x.clone()).detach()
        # torch's Softplus leaves its formula, by 2e-9, beyond its threshold.
        slack = 1e-7 if scale > 1 and "oftplus" in case.name else 1e-12
        assert net(x).dtype == torch.float64
        assert close(net(x), expected, slack)


@every_case
def test_jacobians_are_those_of_autograd(case: Case) -> None:
    model, net = traced(case)
    x = case.inputs()
    expected = vmap(jacrev(lambda v: model(v.clone()[None])[0]))(x).detach()
    got = net.jacobian(x)
    assert got.shape == (len(x), net.outputs, *net.in_shape)
    assert close(got, expected.reshape(got.shape), 1e-11)


@every_structure
def test_shapes_and_number_of_blocks(case: Case) -> None:
    model, net = traced(case)
    x = case.inputs()
    assert net.in_shape == case.shape
    assert net.out_shape == tuple(model(x).shape[1:])
    assert net.outputs == model(x)[0].numel()
    assert case.blocks is None or len(net.blocks) == case.blocks


@every_structure
def test_values_prefixes_and_blocks_agree(case: Case) -> None:
    _, net = traced(case)
    x = case.inputs()
    values = net.values(x)
    assert torch.equal(values[0], x)
    assert torch.equal(values[-1], net(x))
    state = x
    for k, link in enumerate(net.chain, start=1):
        if isinstance(link.block, Block):
            assert close(values[link.z], link.block.W.apply(state) + link.block.b)
        assert close(link.block.evaluate(state), values[link.output])
        assert close(net.prefix(k)(x), values[link.output])
        state = values[link.output]


@every_structure
def test_a_chain_is_found_again_in_the_nodes_of_its_blocks(case: Case) -> None:
    _, net = traced(case)
    x, rows = case.inputs(), torch.randn(2, net.outputs, dtype=torch.float64)
    again = Network.of_blocks(net.blocks)
    for one, other in (
        (again, net),
        (Network(again.nodes), net),
        (Network(net.read_out(rows).nodes), net.read_out(rows)),
    ):
        assert [type(block) for block in one.blocks] == [type(block) for block in other.blocks]
        assert close(one(x), other(x))


@every_structure
def test_read_outs(case: Case) -> None:
    _, net = traced(case)
    x, n = case.inputs(), min(net.outputs, 4)
    y = net(x).flatten(1)
    rows = torch.randn(2, net.outputs, dtype=torch.float64)
    assert close(net.read_out(rows)(x), y @ rows.T)
    for i in range(n):
        assert close(net.logit(i)(x), y[:, i : i + 1])
    for i, j in combinations(range(n), 2):
        assert close(net.difference(i, j)(x), (y[:, i] - y[:, j])[:, None])
    if 1 < net.outputs < 10:
        expected = torch.stack([y[:, i] - y[:, j] for i, j in combinations(range(net.outputs), 2)], dim=1)
        assert close(net.all_differences()(x), expected)


@every_case
def test_only_smooth_networks_pass_as_smooth(case: Case) -> None:
    _, net = traced(case)
    if case.smooth:
        net.require_smooth()
    else:
        with pytest.raises(CurvcertError, match="jumps, so"):
            net.require_smooth()


@every_case
def test_evaluation_has_the_values_of_the_network_and_small_errors(case: Case) -> None:
    _, net = traced(case)
    x = case.inputs()
    for evaluation in (evaluate_with_error(net, x), evaluate_with_error(net, x, NormBounds())):
        pairs = zip(evaluation.values, net.values(x), strict=True)
        for computed, state in pairs:
            assert torch.equal(computed.value, state)
            assert bool((computed.error < 1e-10 * (1 + state.abs().max())).all())
            assert bool((computed.error_norm < 1e-10 * (1 + state.abs().max())).all())


@every_case
def test_low_precision_weights_count_as_the_numbers_they_hold(case: Case) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model = case.model().to(dtype)
        net = curvcert.trace(model, case.inputs(1, dtype))
        x = case.inputs()
        assert close(net(x), copy.deepcopy(model).double()(x.clone()).detach()), dtype


@every_structure
def test_model_and_example_are_left_alone(case: Case) -> None:
    model, example = case.model(), case.inputs(2, torch.float32)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, kept = copy.deepcopy(model), example.clone()
    names, random = {path: set(vars(m)) for path, m in model.named_modules()}, torch.get_rng_state()
    curvcert.trace(model, example)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(example, kept)
    assert {path: set(vars(m)) for path, m in model.named_modules()} == names
    assert not any(m.training for m in model.modules())
    for (name, new), (_, old) in zip(model.state_dict().items(), before.state_dict().items(), strict=True):
        assert new.dtype == old.dtype, name
        assert torch.equal(new, old), name
    for parameter in model.parameters():
        assert parameter.requires_grad
        assert torch.equal(parameter.grad, torch.ones_like(parameter))


@every_structure
def test_later_changes_of_the_module_do_not_reach_the_network(case: Case) -> None:
    model = case.model().double()
    net, x = curvcert.trace(model, case.inputs(1)), case.inputs()
    before = net(x)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
    assert torch.equal(net(x), before)


@pytest.mark.parametrize("case", [CASES[0], CONV[0], RESIDUAL[0]], ids=lambda case: case.name)
def test_a_network_is_differentiable_whatever_mode_it_was_made_in(case: Case) -> None:
    with torch.inference_mode():
        net = curvcert.trace(case.model(), case.inputs(1))
    x = case.inputs(1).requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).flatten(1)[:, 0].sum(), x)
    assert close(gradient, net.jacobian(x.detach())[:, 0])


def test_grad_mode_and_default_dtype_do_not_matter() -> None:
    case = CONV[0]
    expected = curvcert.trace(case.model(), case.inputs(1))(case.inputs())
    model = case.model()
    torch.set_default_dtype(torch.float16)
    try:
        got = curvcert.trace(model, case.inputs(1))(case.inputs())
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got, expected)


def test_its_own_arithmetic_is_never_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU rounds coarsely by default would decide which witnesses replay."""
    net = curvcert.trace(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval(), torch.zeros(1, 3))
    precisions = torch.backends.cudnn.conv
    before, seen, evaluate = precisions.fp32_precision, [], Dense._apply

    def watched(op: Dense, x: torch.Tensor) -> torch.Tensor:
        seen.append(precisions.fp32_precision)
        return evaluate(op, x)

    monkeypatch.setattr(Dense, "_apply", watched)
    net.in_source_dtype(torch.zeros(2, 3))
    assert set(seen) == {"ieee"}
    assert precisions.fp32_precision == before != "ieee"
    with pytest.raises(CurvcertError):
        net.in_source_dtype(torch.zeros(2, 99))
    assert precisions.fp32_precision == before


def test_kinds_of_blocks() -> None:
    case = next(case for case in CASES if case.name == "max pooling")
    net = curvcert.trace(case.model(), case.inputs(1))
    assert [type(block) for block in net.blocks] == [Block, MaxPool, Affine]


def test_a_softplus_beyond_its_threshold_is_within_its_deviation() -> None:
    model = nn.Softplus().eval()
    net = curvcert.trace(model, torch.zeros(1, 1))
    x = torch.linspace(19.9, 20.5, 1001, dtype=torch.float64)[:, None]
    assert float((net(x) - model(x)).abs().max()) <= net.blocks[0].activation.deviation


def test_a_graph_module_is_a_module() -> None:
    model = torch.fx.symbolic_trace(CASES[0].model())
    net, x = curvcert.trace(model.eval(), CASES[0].inputs(1)), CASES[0].inputs()
    assert close(net(x), CASES[0].model().double()(x).detach())


def test_plain_tensor_attributes_keep_their_own_precision() -> None:
    model = Function(lambda m, x: torch.tanh(x / m.std)).eval()
    model.__dict__["std"] = torch.tensor([0.3, 0.7])
    net, x = curvcert.trace(model, torch.zeros(1, 2)), torch.randn(4, 2, dtype=torch.float64)
    assert close(net(x), model(x))


def test_a_relu_has_no_curvature_and_says_why() -> None:
    net = curvcert.trace(nn.ReLU().eval(), torch.zeros(1, 2))
    with pytest.raises(UnsupportedActivation, match="'relu' has a kink"):
        net.require_smooth()


def test_folding_keeps_scalars_and_exact_maps() -> None:
    net = curvcert.trace(RESIDUAL[2].model(), RESIDUAL[2].inputs(1))
    weights = dict(RESIDUAL[2].model().named_parameters())
    block = net.blocks[0]
    assert isinstance(block, Block)
    assert torch.equal(block.W.as_matrix(), weights["0.down.weight"].double())
    assert torch.equal(block.G.as_matrix(), -2 * weights["0.up.weight"].double())
    assert torch.equal(block.H.as_matrix(), torch.eye(4, dtype=torch.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASES[0], CONV[1], RESIDUAL[0]], ids=lambda case: case.name)
def test_networks_move_between_devices(case: Case) -> None:
    net, x = curvcert.trace(case.model(), case.inputs(1)), case.inputs()
    moved = net.to("cuda")
    assert moved.device.type == "cuda"
    assert close(moved(x.cuda()).cpu(), net(x), 1e-11)
    born = curvcert.trace(case.model().cuda(), case.inputs(1).cuda())
    assert born.device.type == "cuda"
    assert close(born.to("cpu")(x), net(x), 1e-11)


@every_structure
def test_to_the_same_device_is_the_same_network(case: Case) -> None:
    _, net = traced(case)
    x = case.inputs()
    assert torch.equal(net.to("cpu")(x), net(x))
    assert net.device == torch.device("cpu")
    assert net.assumes == ()
    assert f"{net.in_shape} -> {net.out_shape}" in repr(net)
