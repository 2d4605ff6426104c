"""Bounds of networks that multiply values, or have functions without a largest slope: against samples and attacks."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvcert
from curvcert.errors import OutOfRange, UnsupportedModule
from curvcert.falsifier import falsify_bound
from curvcert.network import Network, trace
from curvcert.network.nodes import ProductNode
from tests.network.cases import Function
from tests.sampling import crossed

F64 = torch.float64


class Made(nn.Module):
    """A forward pass with three layers to use."""

    def __init__(self, forward: Callable[["Made", Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)
        self.norm, self.small = nn.LayerNorm(6), nn.Linear(6, 6)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def attention(m: Made, x: Tensor) -> Tensor:
    q, k = m.a(x).view(-1, 3, 2), m.b(x).view(-1, 3, 2)
    return m.c((torch.softmax(q @ k.transpose(1, 2), -1) @ q).reshape(-1, 6))


NETWORKS: dict[str, Callable[[Made, Tensor], Tensor]] = {
    "glu": lambda m, x: m.c(m.a(x) * torch.sigmoid(m.b(x))),
    "swiglu": lambda m, x: m.c(F.silu(m.a(x)) * m.b(x)),
    "highway": lambda m, x: m.c(torch.sigmoid(m.a(x)) * torch.tanh(m.b(x)) + (1 - torch.sigmoid(m.a(x))) * m.a(x)),
    "squeeze-excite": lambda m, x: m.c(m.a(x) * torch.sigmoid(m.a(x).mean(1, keepdim=True))),
    "realnvp": lambda m, x: m.c(torch.exp(torch.tanh(m.a(x))) * m.b(x) + m.a(x)),
    "lyapunov": lambda m, x: m.c(torch.tanh(m.a(x)) ** 2 + 0.1 * m.a(x) ** 2),
    "layer norm": lambda m, x: m.c(m.norm(torch.tanh(m.a(x)) + m.b(x))),
    "softmax inside": lambda m, x: m.c(torch.softmax(m.a(x), 1)),
    "softmax": lambda m, x: torch.softmax(m.c(torch.tanh(m.a(x))), 1),
    "log-softmax": lambda m, x: F.log_softmax(m.c(torch.tanh(m.a(x))), 1),
    "attention": attention,
    "gated twice": lambda m, x: m.c(m.small(torch.tanh(m.a(x)) * m.b(x)) * torch.sigmoid(m.a(x))),
    "quotient": lambda m, x: m.c(m.a(x) / (1 + torch.exp(m.b(x)))),
    "distance": lambda m, x: m.c(torch.sqrt(m.a(x).square() + 0.1)),
    "log": lambda m, x: m.c(torch.log(1 + m.a(x) ** 2)),
}


LOOSE = {"layer norm": 60.0, "attention": 30.0, "gated twice": 12.0}
"""How many times the steepest sample a Lipschitz constant over a ball may be, where that is over 6."""


def network_of(name: str) -> Network:
    torch.manual_seed(len(name))
    return trace(Made(NETWORKS[name]).eval().double(), torch.zeros(1, 4, dtype=F64))


def displacements(p: float, radius: float, count: int, batch: int) -> Tensor:
    d = torch.randn(count, batch, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    d = d.sign() if math.isinf(p) else d
    return radius * d / torch.linalg.vector_norm(d, ord=p, dim=2, keepdim=True)


@pytest.mark.parametrize(("name", "p"), crossed(NETWORKS, (2.0, math.inf, 1.0), every=3))
def test_bounds_hold_at_every_sample(name: str, p: float) -> None:
    network, radius = network_of(name), 0.05
    x = torch.randn(2, 4, dtype=F64, generator=torch.Generator().manual_seed(1))
    d = displacements(p, radius, 60, len(x))
    points = (x + d).flatten(0, 1)
    outputs = network(points).reshape(60, len(x), -1)
    bounds = curvcert.output_bounds(network, x, radius, p)
    assert bool((outputs >= bounds.lower).all()) and bool((outputs <= bounds.upper).all())
    spread = outputs.amax(dim=0) - outputs.amin(dim=0)
    assert bool((bounds.upper - bounds.lower <= 6 * spread).all())
    J = network.jacobian(points).reshape(60, len(x), -1, 4)
    size = {2.0: torch.linalg.matrix_norm(J, 2), 1.0: J.abs().sum(2).amax(2), math.inf: J.abs().sum(3).amax(2)}[p]
    L = curvcert.lipschitz(network, p, at=x, radius=radius).value
    assert bool((size.amax(dim=0) <= L * (1 + 1e-12)).all())
    assert bool((LOOSE.get(name, 6.0) * size.amax(dim=0) >= L).all())


@pytest.mark.parametrize(("name", "p"), crossed(NETWORKS, (2.0, math.inf), every=3))
def test_curvatures_hold_at_every_sample(name: str, p: float) -> None:
    network, radius = network_of(name), 0.02
    x = torch.randn(1, 4, dtype=F64, generator=torch.Generator().manual_seed(2))
    K = float(curvcert.curvature(network, p, at=x, radius=radius, pair=(0, 1)))

    def gap(v: Tensor) -> Tensor:
        values = network.values(v[None])[-1][0]
        return values[0] - values[1]

    largest = 0.0
    for d in displacements(p, radius, 8, 1):
        H = torch.autograd.functional.hessian(gap, (x + d)[0])
        largest = max(largest, float(torch.linalg.matrix_norm(H, 2) if p == 2 else H.abs().sum()))
    # In linf the sum of all entries is no less than the norm, so it tells nothing of soundness there.
    truth = largest if p == 2 else 0.0
    assert truth <= K * (1 + 1e-9)
    assert 40 * largest + 1e-9 >= K


@pytest.mark.parametrize(
    ("name", "p", "method"), crossed(NETWORKS, (2.0, math.inf), ("linear", "quadratic", "auto"), every=9)
)
def test_radii_are_positive_and_no_step_within_them_changes_the_class(name: str, p: float, method: str) -> None:
    network = network_of(name)
    x = torch.randn(2, 4, dtype=F64, generator=torch.Generator().manual_seed(3))
    cert = curvcert.certify(network, x, p=p, method=method)
    assert bool((cert.radius > 0).all())
    d = displacements(p, 1.0, 200, len(x)) * cert.radius.clamp(max=10.0)[:, None] * (1 - 1e-9)
    assert bool((network((x + d).flatten(0, 1)).argmax(1).reshape(200, -1) == cert.label).all())


def test_both_forms_are_one_function() -> None:
    for name in ("highway", "attention", "layer norm"):
        network = network_of(name)
        x = 3 * torch.randn(50, 4, dtype=F64)
        torch.testing.assert_close(network.for_bounds(x), network(x), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(network.for_bounds_about(x[:2])(x), network(x), rtol=1e-10, atol=1e-10)
        assert network.for_bounds.for_bounds is network.for_bounds


def test_bounded_factors_have_a_global_constant_and_others_say_how_to_ask() -> None:
    bounded = trace(Made(lambda m, x: m.c(torch.tanh(m.a(x)) * torch.sigmoid(m.b(x)))).eval(), torch.zeros(1, 4))
    L = float(curvcert.lipschitz(bounded))
    points = 2 * torch.randn(500, 4, dtype=F64)
    found = float(torch.linalg.matrix_norm(bounded.jacobian(points), 2).max())
    assert found <= L <= 40 * found
    assert float(curvcert.curvature(bounded, pair=(0, 1))) < math.inf
    for ask in (curvcert.lipschitz, curvcert.curvature):
        with pytest.raises(UnsupportedModule, match="at=x, radius=r"):
            ask(network_of("swiglu"))


@pytest.mark.parametrize(("last", "p"), crossed((nn.Softmax(1), nn.LogSoftmax(1)), (2.0, math.inf, 1.0)))
@pytest.mark.parametrize("n", [2, 5])
def test_a_softmax_has_global_constants(last: nn.Module, p: float, n: int) -> None:
    torch.manual_seed(n)
    network = trace(nn.Sequential(nn.Linear(4, n), last).eval(), torch.zeros(1, 4))
    for ask, kind in ((curvcert.lipschitz, "lipschitz"), (curvcert.curvature, "curvature")):
        bound = ask(network, p)
        assert float(bound) < 40 * float(ask(network.classified, p) if kind == "lipschitz" else 1)
        assert not falsify_bound(bound, network, kind, ascents=12, steps=6)


@pytest.mark.parametrize(("name", "p"), crossed(("swiglu", "attention", "realnvp"), (2.0, math.inf)))
def test_curvatures_of_vectors_hold_over_balls(name: str, p: float) -> None:
    network = network_of(name)
    x = torch.randn(2, 4, dtype=F64, generator=torch.Generator().manual_seed(4))
    bound = curvcert.curvature(network, p, at=x, radius=0.02)
    found = falsify_bound(bound, network, "curvature", ascents=12, steps=6)
    assert not found and max(found.closest.values()) > 0.01


def test_slopes_within_reach_are_those_between_both_ends() -> None:
    """3 sin is between -3 and 3, where a square has slopes up to 6; f' = 9 sin(2 x)."""
    square = Function(lambda m, x: (3 * torch.sin(x)).square()).eval()
    bound = curvcert.lipschitz(trace(square, torch.zeros(1, 1, dtype=F64)))
    assert 9.0 <= float(bound) <= 18.0 * (1 + 1e-9)


GIVEN = {
    "gru": lambda: nn.GRU(4, 3, batch_first=True),
    "lstm": lambda: nn.LSTM(4, 2, batch_first=True),
}
NONE = ("glu", "swiglu", "highway", "squeeze-excite", "attention")


@pytest.mark.slow
@pytest.mark.parametrize("name", crossed(GIVEN))
def test_recurrent_cells_have_global_constants_with_a_notice(name: str) -> None:
    torch.manual_seed(0)
    cell = Function(lambda m, x: m.a(x)[0][:, -1], a=GIVEN[name]()).eval()
    network = trace(cell, torch.zeros(1, 2, 4))
    for ask, method, kind in (
        (curvcert.lipschitz, "liplt", "lipschitz"),
        (curvcert.curvature, "unrolled", "curvature"),
    ):
        bound = ask(network, method=method)
        assert math.isfinite(float(bound)) and "over a ball" in repr(bound)
        assert not falsify_bound(bound, network, kind, ascents=12, steps=6)
    x = torch.randn(1, 2, 4, dtype=F64)
    local = curvcert.lipschitz(network, at=x, radius=0.05)
    assert float(local) < float(bound) and not local.notes


@pytest.mark.parametrize("name", NONE)
def test_what_has_no_global_constant_is_refused_and_the_call_that_is_named_works(name: str) -> None:
    network, x = network_of(name), torch.randn(1, 4, dtype=F64)
    for ask in (curvcert.lipschitz, curvcert.curvature):
        for where in ({}, {"at": x}):
            with pytest.raises(UnsupportedModule, match="over a ball: at=x, radius=r"):
                ask(network, **where)
        assert math.isfinite(float(ask(network, at=x, radius=0.05)))


def test_a_range_that_leaves_the_domain_bounds_nothing() -> None:
    network = trace(Made(lambda m, x: torch.log(x[:, :2])).eval(), torch.ones(1, 4, dtype=F64))
    x = torch.ones(1, 4, dtype=F64)
    assert float(curvcert.lipschitz(network, at=x, radius=0.5)) == pytest.approx(2.0)
    with pytest.raises(OutOfRange, match="input of log may leave"):
        curvcert.lipschitz(network, at=x, radius=1.5)
    assert curvcert.output_bounds(network, x, 1.5).upper.tolist() == [[math.inf] * 2]


@pytest.mark.parametrize("last", [nn.Softmax(1), nn.LogSoftmax(1)])
def test_a_last_softmax_is_kept_and_certified_is_the_network_before_it(last: nn.Module) -> None:
    torch.manual_seed(0)
    logits = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).eval()
    whole, before = (trace(nn.Sequential(*parts).eval(), torch.zeros(1, 4)) for parts in ((logits, last), (logits,)))
    x = torch.randn(5, 4, dtype=F64)
    torch.testing.assert_close(whole(x), last(logits.double()(x)))
    cert, plain = curvcert.certify(whole, x), curvcert.certify(before, x)
    assert torch.equal(cert.radius, plain.radius) and torch.equal(cert.label, plain.label)
    assert any("changes no class" in note for note in cert.notes) and not any("no class" in n for n in plain.notes)
    assert cert.evidence.network == plain.evidence.network
    # Of probabilities, not of logits.
    assert float(curvcert.lipschitz(whole, at=x[:1], radius=0.01)) != float(
        curvcert.lipschitz(before, at=x[:1], radius=0.01)
    )


@pytest.mark.parametrize("norm", [nn.LayerNorm(6), nn.RMSNorm(6, 1e-3)], ids=["layer", "rms"])
def test_a_last_normalisation_costs_a_radius_nothing(norm: nn.Module) -> None:
    torch.manual_seed(1)
    body, head = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6)), nn.Linear(6, 3)
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    model = nn.Sequential(body, norm, head).eval().double()
    network, x = trace(model, torch.zeros(1, 4, dtype=F64)), torch.randn(40, 4, dtype=F64)
    simpler = network.classified
    assert not any(isinstance(node, ProductNode) for node in simpler.nodes)
    size = (simpler(x) / network(x)).detach()
    # The same positive number for every class.
    torch.testing.assert_close(size, size[:, :1].expand_as(size))
    assert bool((size > 0).all())
    cert = curvcert.certify(network, x[:3], method="linear")
    plain = curvcert.certify(network.for_bounds, x[:3], method="linear")
    assert bool((cert.radius > plain.radius).all())
    d = displacements(2.0, 1.0, 200, 3) * cert.radius[:, None] * (1 - 1e-9)
    assert bool((network((x[:3] + d).flatten(0, 1)).argmax(1).reshape(200, -1) == cert.label).all())
