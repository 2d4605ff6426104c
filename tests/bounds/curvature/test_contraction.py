"""Curvature of SLL blocks and stacks of them: above every search, exact in closed forms, cheap for large blocks."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from curvcert.activations import ACTIVATIONS
from curvcert.bounds.curvature import Compositional, block_curvature, curvature
from curvcert.bounds.curvature.block_contraction import block_curvature_contraction
from curvcert.bounds.curvature.gradients import gradient_bounds, gradient_sizes
from curvcert.bounds.lipschitz import growth, liplt, lipschitz
from curvcert.bounds.lipschitz.block_constants import block_product
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Global
from curvcert.errors import UnsupportedBlock, UnsupportedNorm
from curvcert.network import Block, Network, trace
from curvcert.nn import PadChannels, ScaledAveragePool2d, SLLConv2d, SLLDense, UnitRowLinear
from curvcert.operators import AbstractLinearMap, Conv2d, Dense, Diagonal, Identity, NormBounds
from tests.bounds.curvature.search import ROUNDING, CurvatureSearch

F64 = torch.float64
C = 4 / 27**0.5


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def sll(W: AbstractLinearMap, d: Tensor, activation: str = "tanh", seed: int = 1) -> Block:
    """x - W' D phi(W x + b)."""
    G = -1.0 * (W.T @ Diagonal(d, W.out_shape))
    zero = torch.zeros(W.in_shape, dtype=F64)
    return Block(Identity(W.in_shape), G, W, 0.3 * randn(*W.out_shape, seed=seed), zero, ACTIVATIONS[activation])


def diagonal(W: AbstractLinearMap) -> Tensor:
    """2 / T with T_i = sum_j |W W'|_ij."""
    matrix = W.as_matrix()
    return (2.0 / (matrix @ matrix.T).abs().sum(dim=1)).reshape(W.out_shape)


def conv(seed: int = 0, size: int = 4) -> Conv2d:
    return Conv2d(randn(3, 2, 3, 3, seed=seed), (2, size, size), padding=((1, 1), (1, 1)))


def cubic_form(W: Tensor, d: Tensor, steps: int = 200) -> Tensor:
    """Climb sum_l d_l |W_l u|^3 over unit u: the supremum of the trilinear form, attained."""
    u = nn.functional.normalize(torch.cat([randn(32, W.shape[1], seed=5), W]), dim=1)
    for _ in range(steps):
        z = u @ W.T
        u = nn.functional.normalize((d * z.abs() * z) @ W, dim=1)
    return ((u @ W.T).abs().pow(3) * d).sum(dim=1).amax()


@given(st.integers(0, 10**6), st.floats(0.1, 4.0), st.sampled_from(["tanh", "sigmoid", "arctan", "softplus(1)", "erf"]))
def test_nothing_exceeds_the_bound_of_a_dense_block(seed: int, scale: float, name: str) -> None:
    W = Dense(randn(5, 3, seed=seed) * randn(5, 1, seed=seed + 1).abs())
    block = sll(W, scale * diagonal(W), name)
    bound = float(block_curvature_contraction(block, 2, 2, NormBounds()))
    found = CurvatureSearch(Network.of_blocks((block,)), 2.0, 2.0, steps=6, seed=seed).everywhere(4)
    assert float(found) <= bound * (1 + ROUNDING)


@pytest.mark.parametrize("kind", ["a number per channel", "a number per pixel", "one number", "none"])
def test_nothing_exceeds_the_bound_of_a_convolution(kind: str) -> None:
    W = conv()
    d = {
        "a number per channel": 0.02 * torch.tensor([1.0, 0.3, 2.0], dtype=F64)[:, None, None],
        "a number per pixel": diagonal(W),
        "one number": torch.tensor(0.01, dtype=F64),
        "none": torch.ones((), dtype=F64),
    }[kind]
    block = sll(W, d.expand(W.out_shape) if kind == "a number per pixel" else d)
    if kind == "none":
        zero = torch.zeros(W.in_shape, dtype=F64)
        block = Block(Identity(W.in_shape), -1.0 * W.T, W, randn(*W.out_shape), zero, ACTIVATIONS["tanh"])
    bound = float(block_curvature_contraction(block, 2, 2, NormBounds()))
    supremum = C * float(cubic_form(W.as_matrix(), d.expand(W.out_shape).flatten()))
    assert supremum <= bound * (1 + ROUNDING)
    assert bound <= 3 * supremum
    assert float(CurvatureSearch(Network.of_blocks((block,)), 2.0, 2.0, steps=6).everywhere(4)) <= bound


@pytest.mark.parametrize("seed", range(8))
def test_the_bound_is_at_least_the_supremum_and_at_most_every_diagonal_that_is_tried(seed: int) -> None:
    W = randn(9, 6, seed=seed) * randn(9, 1, seed=seed + 50).abs()
    d = diagonal(Dense(W)) * randn(9, seed=seed + 90).exp()
    bound = float(block_curvature_contraction(sll(Dense(W), d), 2, 2, NormBounds()))
    assert C * float(cubic_form(W, d)) <= bound * (1 + ROUNDING)
    w = W.norm(dim=1)
    values = []
    for M in (d.sqrt(), (d * w).sqrt(), (d * w**3) ** 0.75 / w):
        V = (d / M).sqrt()[:, None] * W
        hadamard = float(torch.linalg.eigvalsh((V @ V.T) ** 2)[-1]) ** 0.5
        values.append(C * float(torch.linalg.matrix_norm(M[:, None] * W, 2)) * hadamard)
    assert min(values) * (1 - 1e-9) <= bound <= min(values) * (1 + 1e-9)


def test_orthogonal_rows_attain_the_bound() -> None:
    w, d = torch.tensor([3.0, 1.0, 0.5], dtype=F64), torch.tensor([0.1, 1.5, 4.0], dtype=F64)
    rows = torch.linalg.qr(randn(4, 4))[0][:3]
    bound = float(block_curvature_contraction(sll(Dense(w[:, None] * rows), d), 2, 2, NormBounds()))
    assert bound == pytest.approx(C * float((d * w**3).max()), rel=1e-9)
    # D^{1/2} alone would not.
    assert C * float((d.sqrt() * w).max() * (d.sqrt() * w**2).max()) > 1.2 * bound


@pytest.mark.parametrize("sign", [1.0, -3.0])
def test_a_map_behind_the_block_is_a_factor(sign: float) -> None:
    W, A = Dense(randn(6, 4)), sign * Dense(randn(3, 4, seed=1))
    block = sll(W, diagonal(W))
    norms = NormBounds()
    behind = block.read_out(A)
    expected = float(block_curvature_contraction(block, 2, 2, norms)) * float(norms.norm(A, 2, 2))
    bound = float(block_curvature_contraction(behind, 2, 2, norms))
    assert bound == pytest.approx(expected, rel=1e-12)
    assert float(CurvatureSearch(Network.of_blocks((behind,)), 2.0, 2.0).everywhere(8)) <= bound


def test_neurons_without_weights_and_zero_diagonals_count_for_nothing() -> None:
    W, d = randn(4, 3), torch.tensor([0.2, 0.0, 0.3, 1e6], dtype=F64)
    W[3] = 0.0
    bound = float(block_curvature_contraction(sll(Dense(W), d), 2, 2, NormBounds()))
    kept = float(block_curvature_contraction(sll(Dense(W[[0, 2]]), d[[0, 2]]), 2, 2, NormBounds()))
    assert math.isfinite(bound)
    assert kept * (1 - 1e-9) <= bound <= kept * (1 + 1e-9)


def test_blocks_of_another_form_and_other_norms_are_refused() -> None:
    W = Dense(randn(4, 3))
    block = sll(W, diagonal(W))
    with pytest.raises(UnsupportedNorm, match="contraction"):
        block_curvature_contraction(block, 1, 1, NormBounds())
    other = Block(Identity((3,)), Dense(randn(3, 4)), W, block.b, block.c, block.activation, "odd")
    with pytest.raises(UnsupportedBlock, match="odd"):
        block_curvature(other, 2, 2, NormBounds(), ["contraction"])
    assert not block_curvature(other, 2, 2, NormBounds())[1].startswith("contraction")


def test_auto_takes_the_least_and_skips_by_size(monkeypatch) -> None:
    W, norms = Dense(randn(6, 4)), NormBounds()
    block = sll(W, diagonal(W))
    value, name = block_curvature(block, 2, 2, norms)
    others = [
        block_curvature(block, 2, 2, norms, [n]) for n in ("contraction", "product", "vectorised", "sdp", "hadamard")
    ]
    assert float(value) == min(float(other) for other, _ in others)
    assert name in {n for _, n in others}
    monkeypatch.setattr("curvcert.bounds.curvature.blocks._LINES", 23)
    value, name = block_curvature(block, 2, 2, norms)
    assert name == "contraction (skipped for the size of G: product, vectorised, sdp, hadamard)"
    assert float(value) == float(others[0][0])
    # What is asked for by name is never skipped.
    assert block_curvature(block, 2, 2, norms, ["product"]) == others[1]


def network() -> Network:
    """Return a small Lip-3C1F."""
    torch.manual_seed(3)
    model = nn.Sequential(
        PadChannels(2),
        SLLConv2d(2, 3),
        SLLConv2d(2),
        ScaledAveragePool2d(2),
        nn.Flatten(),
        SLLDense(8, 6),
        UnitRowLinear(8, 3),
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7)
    return trace(model.double().eval(), torch.zeros(1, 1, 4, 4, dtype=F64))


def test_nothing_exceeds_the_bounds_of_a_stack() -> None:
    net = network()
    pairs = CurvatureSearch(net.all_differences(), 2.0, 2.0, scalars=True).everywhere(6)
    for method in ("compositional", "unrolled", "auto"):
        assert bool((pairs <= curvature(net, method=method, pair="all").value * (1 + ROUNDING)).all()), method
    assert float(CurvatureSearch(net, 2.0, 2.0).everywhere(6)) <= float(curvature(net))


def test_the_sum_over_layers_is_never_above_the_recursion_with_the_blocks_own_form() -> None:
    net = network()
    recursion = curvature(net, method=Compositional(["contraction"]), pair="all").value
    unrolled = curvature(net, method="unrolled", pair="all")
    assert bool((unrolled.value <= recursion * (1 + 1e-9)).all())
    assert "gradient behind the block" in {term.method for term in unrolled.per_layer}


def test_gradients_are_at_most_their_bounds_and_the_bounds_at_most_the_constants() -> None:
    net = network().all_differences()
    problem = Problem(net, 2.0, 2.0, Global(), scalars=True)
    sizes = gradient_sizes(problem, problem.norms)
    x = randn(64, 1, 4, 4) * torch.logspace(-1, 1, 64, dtype=F64)[:, None, None, None]
    constants = [block_product(b, problem, problem.norms, k == len(net.blocks) - 1) for k, b in enumerate(net.blocks)]
    states = list(itertools.accumulate(net.blocks, lambda y, block: block.evaluate(y), initial=x))
    bounds = gradient_bounds(problem, problem.norms)
    for k, (block, unit) in enumerate(zip(net.blocks, net.units, strict=True)):
        if not isinstance(block, Block):
            continue
        size, bound = sizes[unit.hidden], bounds[unit.hidden]
        g = torch.eye(net.outputs, dtype=F64).expand(len(x), -1, -1)
        for later, state in zip(reversed(net.blocks[k + 1 :]), reversed(states[k + 1 : -1]), strict=True):
            g = later.pull_back(state, g)
        u = block.G.adjoint(g).flatten(2)
        assert bool((u.norm(dim=2) <= size * (1 + 1e-12)).all())
        assert bool((u.abs() <= bound.entries.flatten(1) * (1 + 1e-12)).all())
        if k < len(net.blocks) - 1:
            product = problem.norms.norm(block.G, 2, 2) * math.prod(constants[k + 1 :])
            assert bool((size <= product * (1 + 1e-9)).all())


def test_large_chains_are_bounded_by_the_constants_of_their_blocks(monkeypatch) -> None:
    net = network().all_differences()
    whole = gradient_sizes(Problem(net, 2.0, 2.0, Global(), scalars=True), NormBounds())
    monkeypatch.setattr("curvcert.bounds.curvature.gradients._CHAIN_ELEMENTS", 0)
    norms, asked = NormBounds(), []
    monkeypatch.setattr(norms, "norm", lambda op, p, q: asked.append(op) or NormBounds().norm(op, p, q))
    cheap = gradient_sizes(Problem(net, 2.0, 2.0, Global(), scalars=True), norms)
    assert cheap.keys() == whole.keys()
    for large, small in zip(cheap.values(), whole.values(), strict=True):
        assert bool((large >= small * (1 - 1e-9)).all())
        assert bool((large <= 2 * small).all())
    # No map from one block's activations to another's is bounded as a whole.
    inner = [block.W for block in net.blocks if isinstance(block, Block)]
    starts = {id(W) for W in inner}
    assert asked
    assert not [op for op in asked if id(getattr(op, "factors", (None,))[0]) in starts]


@pytest.mark.parametrize("scalars", [False, True])
def test_norms_from_below_spare_sums_that_lose_and_change_nothing(monkeypatch, scalars: bool) -> None:
    net = network().all_differences() if scalars else network()

    def prefixes() -> tuple[list[Tensor], int]:
        norms = NormBounds()
        found = liplt.liplt_prefixes(Problem(net, 2.0, 2.0, Global(), scalars=scalars), norms)
        return found, len(norms._known)

    spared, fewer = prefixes()
    monkeypatch.setattr(growth, "glimpsed_norm", lambda op: torch.zeros((), dtype=torch.float64))
    full, more = prefixes()
    for left, right in zip(spared, full, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=0)
    assert fewer < more


def test_a_stack_stays_one_lipschitz_in_front_of_its_last_map() -> None:
    net = network()
    V = net.blocks[-1].H.factors[0].weight if hasattr(net.blocks[-1].H, "factors") else net.blocks[-1].H.weight
    assert float(lipschitz(net)) <= float(torch.linalg.matrix_norm(V, 2)) * (1 + 1e-9)
