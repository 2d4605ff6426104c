"""From modules to activations, and declarations: believed only until a sample contradicts them."""

import math

import pytest
import torch
from torch import nn

import curvcert
from curvcert.activations import (
    ACTIVATIONS,
    SIN,
    TANH,
    Activation,
    Profile,
    Turn,
    anchored_curvature_range,
    anchored_slope_range,
    celu,
    declare_activation,
    derivative_range,
    elu,
    from_module,
    hardtanh,
    leaky_relu,
    register_activation,
    second_derivative_range,
    softplus,
    torch_softplus,
    value_range,
)
from curvcert.certificates import check_certificate
from curvcert.errors import InvalidInput, SoundnessError, UnsupportedActivation
from curvcert.network.network_file import save_network
from curvcert.nn import Sin
from tests.activations.cases import as_tensor

C = 4 / (3 * math.sqrt(3)) + 1e-15


def _tanh_slope(z):
    return 1 - torch.tanh(z) ** 2


def _declare(**changes):
    arguments = {
        "name": "mine",
        "value": torch.tanh,
        "derivative": _tanh_slope,
        "slope": (0.0, 1.0),
        "curvature": (-C, C),
    }
    return declare_activation(**(arguments | changes))


def test_a_true_declaration_is_accepted_and_says_what_it_assumes():
    act = _declare(second_derivative=lambda z: -2 * torch.tanh(z) * _tanh_slope(z))
    assert act.assumes == (
        "activation 'mine': slope in [0, 1], curvature in [-0.7698003589, 0.7698003589] as declared, sampled only",
    )
    assert "assumes" in repr(act)


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_every_row_could_have_been_declared(name: str):
    row = ACTIVATIONS[name]

    def bends(lower, upper):
        return second_derivative_range(row, lower, upper)

    act = declare_activation(
        name,
        row.value,
        row.derivative,
        row.slope,
        row.curvature,
        row.second_derivative,
        lambda lower, upper: derivative_range(row, lower, upper),
        None if row.curvature is None else bends,
    )
    lower, upper = as_tensor(-1.0, 0.2), as_tensor(0.5, 3.0)
    for ours, theirs in zip(derivative_range(act, lower, upper), derivative_range(row, lower, upper), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"derivative": lambda z: 0.9 * _tanh_slope(z)}, "not that of value"),
        ({"value": lambda z: torch.tanh(z) + 0.01 * z}, "slope of value|not that of value"),
        ({"slope": (0.0, 0.999)}, "derivative is 1"),
        ({"slope": (0.1, 1.0)}, "outside"),
        ({"curvature": (-0.76, 0.76)}, "slope of derivative"),
        ({"second_derivative": lambda z: torch.ones_like(z)}, "second_derivative is 1"),
        ({"derivative_range": lambda lo, hi: (_tanh_slope(hi), _tanh_slope(hi))}, "derivative_range"),
        ({"second_derivative_range": lambda lo, hi: (0 * lo, 0 * hi)}, "second_derivative_range"),
        ({"value": lambda z: z / (z - 1)}, "not finite|slope of value"),
    ],
)
def test_a_contradicted_declaration_is_refused(changes, words: str):
    with pytest.raises(SoundnessError, match=words):
        _declare(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"slope": (1.0, 0.0)},
        {"slope": (0.0, math.inf)},
        {"curvature": (math.nan, 1.0)},
        {"curvature": None, "second_derivative_range": lambda lo, hi: (lo, hi)},
        {"value": lambda z: z.sum()},
        {"deviation": -1.0},
    ],
)
def test_a_malformed_declaration_is_refused(changes):
    with pytest.raises(InvalidInput):
        _declare(**changes)


def test_declared_ranges_fall_back_to_the_global_ones():
    act = _declare()
    lower, upper = as_tensor(-1.0, 3.0), as_tensor(2.0, 3.5)
    assert [end.tolist() for end in derivative_range(act, lower, upper)] == [[0.0, 0.0], [1.0, 1.0]]
    assert [end.tolist() for end in second_derivative_range(act, lower, upper)] == [[-C, -C], [C, C]]
    assert [end.tolist() for end in anchored_slope_range(act, lower)] == [[0.0, 0.0], [1.0, 1.0]]
    assert [end.tolist() for end in anchored_curvature_range(act, lower)] == [[-C, -C], [C, C]]


def test_declared_value_range_holds_the_value():
    act = _declare()
    lower, upper = (
        as_tensor(-1.0, 0.5, -torch.inf, 0.0, -torch.inf),
        as_tensor(2.0, 0.5, 1.0, torch.inf, torch.inf),
    )
    lo, hi = value_range(act, lower, upper)
    assert bool((lo <= torch.tanh(lower)).all()) and bool((torch.tanh(upper) <= hi).all())
    assert hi[2].item() == pytest.approx(math.tanh(1.0)) and lo[3].item() == pytest.approx(0.0)
    assert not bool(lo.isnan().any() | hi.isnan().any())


def test_declared_without_curvature_serves_lipschitz_only():
    act = declare_activation("step", torch.relu, lambda z: (z > 0).double(), (0.0, 1.0))
    with pytest.raises(UnsupportedActivation, match="declared without"):
        second_derivative_range(act, as_tensor(0.0), as_tensor(1.0))
    with pytest.raises(UnsupportedActivation, match="declared without"):
        anchored_curvature_range(act, as_tensor(0.0))
    assert act.assumes == ("activation 'step': slope in [0, 1], no curvature as declared, sampled only",)


def test_a_range_callable_of_the_wrong_kind_is_refused_when_used():
    base = _declare()
    act = Activation(
        "bad",
        base.value,
        base.derivative,
        None,
        (0.0, 1.0),
        None,
        None,
        lambda lo, hi: (hi, lo),
        assumes=("x",),
    )
    with pytest.raises(InvalidInput, match="Correct the callable"):
        derivative_range(act, as_tensor(0.0), as_tensor(1.0))


class Wave(nn.Module):
    def forward(self, x):
        return torch.sin(x)


class Scaled(nn.Module):
    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return torch.tanh(self.factor * x)


def _scaled(module: Scaled) -> Activation:
    k = module.factor
    return _declare(
        name=f"scaled({k:g})",
        value=lambda z: torch.tanh(k * z),
        derivative=lambda z: k * _tanh_slope(k * z),
        slope=(0.0, k),
        curvature=(-C * k * k, C * k * k),
    )


def test_registration():
    with pytest.raises(UnsupportedActivation, match=r"Wave.*register_activation"):
        from_module(Wave())
    register_activation(Wave, SIN)
    act = from_module(Wave())
    assert (act.name, act.slope) == ("sin", SIN.slope)
    assert act.assumes == ("module Wave: computes activation 'sin' as registered, sampled only",)
    register_activation(Scaled, _scaled)
    assert from_module(Scaled(2.0)).name == "scaled(2)"


def test_a_module_that_computes_something_else_is_refused():
    class NotSine(nn.Module):
        def forward(self, x):
            return torch.cos(x)

    register_activation(NotSine, SIN)
    with pytest.raises(SoundnessError, match="does not compute"):
        from_module(NotSine())


class Leaving(nn.Module):
    """tanh up to a point, and then no longer."""

    def __init__(self, beyond: float):
        super().__init__()
        self.beyond = beyond

    def forward(self, x):
        return torch.tanh(x) + torch.relu(x - self.beyond)


@pytest.mark.parametrize("beyond", [30.0, 5_000.0, 3e5, 9e8])
def test_a_module_that_leaves_its_activation_far_from_zero_is_refused(beyond: float):
    register_activation(Leaving, TANH)
    with pytest.raises(SoundnessError, match="does not compute activation 'tanh'"):
        curvcert.trace(nn.Sequential(nn.Linear(2, 3), Leaving(beyond), nn.Linear(3, 2)).eval(), torch.zeros(1, 2))


def test_what_a_registration_states_stands_wherever_it_is_used(tmp_path):
    register_activation(Leaving, TANH)
    model = nn.Sequential(nn.Linear(2, 3), Leaving(1e12), nn.Linear(3, 2)).eval()
    net, x = curvcert.trace(model, torch.zeros(1, 2)), torch.zeros(1, 2, dtype=torch.float64)
    stated = ("module Leaving: computes activation 'tanh' as registered, sampled only",)
    assert net.assumes == curvcert.lipschitz(net).assumes == curvcert.curvature(net).assumes == stated
    saved = curvcert.certify(net, x, method="liplt").save(tmp_path / "certificate")
    assert saved.assumes == stated
    verdict = check_certificate(tmp_path / "certificate", save_network(net, tmp_path / "net"), x.numpy())
    assert verdict.status == ("proven",)
    assert any(stated[0] in line for line in verdict.given)


def test_what_curvcert_computes_itself_is_not_assumed():
    assert from_module(Sin()) is SIN
    with pytest.raises(InvalidInput, match="proven row"):
        register_activation(Sin, TANH)


def test_a_subclass_with_its_own_forward_is_refused():
    class Louder(nn.Tanh):
        def forward(self, x):
            return 2 * super().forward(x)

    class Renamed(nn.Tanh):
        pass

    with pytest.raises(UnsupportedActivation, match="its own forward"):
        from_module(Louder())
    assert from_module(Renamed()).name == "tanh"


@pytest.mark.parametrize("module_type", [nn.Tanh, nn.Softplus])
def test_proven_rows_cannot_be_replaced(module_type):
    with pytest.raises(InvalidInput, match="proven row"):
        register_activation(module_type, SIN)


def test_nonsense_is_not_registered():
    with pytest.raises(InvalidInput):
        register_activation(torch.tanh, SIN)
    with pytest.raises(InvalidInput):
        register_activation(nn.Bilinear, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: softplus(0.0),
        lambda: softplus(-1.0),
        lambda: softplus(math.nan),
        lambda: softplus(math.inf),
        lambda: torch_softplus(1.0, math.nan),
        lambda: torch_softplus(1.0, 89.0),
        lambda: from_module(nn.Softplus(2.0, 100.0)),
        lambda: celu(-1.0),
        lambda: celu(math.nan),
        lambda: elu(math.nan),
        lambda: leaky_relu(math.inf),
        lambda: hardtanh(1.0, -1.0),
        lambda: hardtanh(0.0, math.nan),
        lambda: from_module(nn.Softplus(beta=-2.0)),
        lambda: Turn(0.0, 1.0, 0.5),
        lambda: Profile(torch.tanh, "+-", (0.0, 0.0)),
        lambda: Profile(torch.tanh, "+-+", (0.0, 0.0), (Turn(1.0, 0.0, 0.0), Turn(0.0, 0.0, 0.0))),
        lambda: Activation("bare", torch.tanh, _tanh_slope, None, (0.0, 1.0), None),
    ],
)
def test_bad_parameters_are_refused_at_birth(make):
    with pytest.raises(InvalidInput):
        make()


def test_unknown_modules_are_named_with_a_remedy():
    with pytest.raises(UnsupportedActivation, match=r"Linear.*declare_activation.*register_activation"):
        from_module(nn.Linear(2, 2))
    with pytest.raises(UnsupportedActivation, match="none"):
        module = nn.GELU()
        module.approximate = "quick"
        from_module(module)
