"""Closed forms, the errata's counterexamples, the orders that are proved, and what a result says of itself."""

import math
from fractions import Fraction

import pytest
import torch

from curvcert import curvature
from curvcert.activations import ACTIVATIONS, TANH, Activation, anchored_curvature_range, anchored_slope_range
from curvcert.bounds.curvature import BLOCK_BOUNDS, Compositional, block_curvature, scalar_block_curvatures
from curvcert.bounds.curvature.anchored import anchored_curvature_bound
from curvcert.bounds.curvature.compositional import unit_lipschitz
from curvcert.bounds.lipschitz.liplt import loop_transformed
from curvcert.bounds.lipschitz.problem import make_problem
from curvcert.bounds.types import Anchor, Ball, Bound, Estimate, Global
from curvcert.errors import InvalidInput, SoundnessError, UnsupportedActivation, UnsupportedNorm
from curvcert.network import Block, Network
from curvcert.operators import Dense, Identity, NormBounds, Zero
from tests.bounds.cases import feed_forward, linear, one_dimensional, randn, residual
from tests.bounds.curvature.cases import SMOOTH
from tests.bounds.curvature.search import CurvatureSearch

INF = math.inf
F64 = torch.float64
C = 4 / 27**0.5
"""The largest second derivative of tanh, 0.7698..."""


def sum_then_tanh(n: int) -> Network:
    """tanh(sum x)."""
    zero = torch.zeros(1, dtype=F64)
    return Network.of_blocks(
        (Block(Zero((n,), (1,)), Identity((1,)), Dense(torch.ones(1, n, dtype=F64)), zero, zero, TANH, "only"),)
    )


def tanh_then_sum(n: int) -> Network:
    """sum of tanh(x_i)."""
    W, G = Dense(torch.eye(n, dtype=F64)), Dense(torch.ones(1, n, dtype=F64))
    b, c = torch.zeros(n, dtype=F64), torch.zeros(1, dtype=F64)
    return Network.of_blocks((Block(Zero((n,), (1,)), G, W, b, c, TANH, "only"),))


@pytest.mark.parametrize("w", [0.1, 1.0, -3.0])
@pytest.mark.parametrize("name", ["compositional", "unrolled"])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, INF])
def test_one_dimension_is_exact(w, name, p) -> None:
    for activation in SMOOTH.values():
        exact = w * w * activation.curvature_c
        assert exact <= float(curvature(one_dimensional(w, activation), p, method=name)) <= exact * (1 + 1e-9)


def test_linear_networks_have_no_curvature() -> None:
    network = linear(3, 4)
    assert float(curvature(network)) == 0.0
    assert curvature(network, pair="all").value.tolist() == [0.0] * 3
    assert curvature(network, at=torch.zeros(2, 4, dtype=F64), radius=1.0).value.tolist() == [0.0] * 2


@pytest.mark.parametrize(("p", "exact"), [(1.0, C), (2.0, 20 * C), (INF, 400 * C)])
def test_tanh_of_a_sum_is_exact_where_the_paper_is_unsound(p, exact) -> None:
    # With p*-operator norms the paper's formula gives c ||W||_{1->1} ||W||_{1->inf} ... = 20 c = 15.4 at p = inf.
    network = sum_then_tanh(20)
    assert exact <= float(curvature(network, p)) <= exact * (1 + 1e-9)
    found = float(CurvatureSearch(network, p, p, scalars=True, steps=40).everywhere())
    assert found == pytest.approx(exact, rel=1e-4)
    if p == INF:
        assert found > 307.9 > 20 * C


@pytest.mark.parametrize(("p", "exact"), [(1.0, C), (2.0, C), (INF, 20 * C)])
def test_a_sum_of_tanhs_is_exact_where_the_paper_is_unsound(p, exact) -> None:
    network = tanh_then_sum(20)
    assert exact <= float(curvature(network, p)) <= exact * (1 + 1e-9)
    # All coordinates at the steepest point of tanh'.
    x = torch.full((1, 20), math.atanh(1 / 3**0.5), dtype=F64)
    hessian = -2 * torch.tanh(x) * (1 - torch.tanh(x) ** 2)
    attained = {1.0: hessian.abs().max(), 2.0: hessian.abs().max(), INF: hessian.abs().sum()}[p]
    assert float(attained) == pytest.approx(exact, rel=1e-9)
    if p == INF:
        assert float(attained) > 15.37 > C


def test_an_anchored_outer_constant_would_be_unsound() -> None:
    # tanh(w2 tanh(w1 x + b1) + b2): with an anchored Lipschitz constant of the outer function, 5.08 times too small.
    w1, w2, b1, b2, x = 6.2454, -8.3036, -2.0412, 0.0246, torch.tensor([[-0.3986]], dtype=F64)
    network = Network.of_blocks((*one_dimensional(w1, TANH, b1).blocks, *one_dimensional(w2, TANH, b2).blocks))
    search = CurvatureSearch(network, 2.0, 2.0, scalars=True, steps=30)
    found = float(search.from_anchors(x, 60))
    assert found <= float(curvature(network, method="anchored", at=x).value)
    assert found <= float(curvature(network, at=x).value)
    z1 = w1 * x + b1
    z2 = w2 * torch.tanh(z1) + b2
    (L1, L2), (K1, K2) = ([largest(TANH, z) for z in (z1, z2)] for largest in (steepest_seen, bend_seen))
    point = float(w1 * (1 - torch.tanh(z1) ** 2))
    wrong = abs(w2) * L2 * K1 * w1**2 + w2**2 * K2 * point * L1 * w1
    assert found > 5 * wrong


def steepest_seen(activation: Activation, z: torch.Tensor) -> float:
    return max(float(end.abs()) for end in anchored_slope_range(activation, z))


def bend_seen(activation: Activation, z: torch.Tensor) -> float:
    return max(float(end.abs()) for end in anchored_curvature_range(activation, z))


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_one_hidden_layer_is_exact_for_free_signs(p) -> None:
    # Each neuron of its own direction's bias: some x has |phi''| = c in every neuron with the sign of its weight.
    n, W = 4, torch.linalg.qr(randn(4, 4, seed=5))[0]
    g = torch.tensor([[1.0, -2.0, 0.5, 1.5]], dtype=F64)
    b = torch.zeros(n, dtype=F64)
    network = Network.of_blocks(
        (Block(Zero((n,), (1,)), Dense(g), Dense(W), b, torch.zeros(1, dtype=F64), TANH, "only"),)
    )
    M = W.T @ torch.diag(g[0].abs()) @ W
    exact = C * float(torch.linalg.eigvalsh(M).max() if p == 2 else M.abs().max())
    for name in ("compositional", "unrolled"):
        assert exact * (1 - 1e-12) <= float(curvature(network, p, method=name)) <= exact * (1 + 1e-9)
    # The search must find as much: W x reaches any point.
    assert float(CurvatureSearch(network, p, p, scalars=True, steps=40).everywhere(64)) > 0.98 * exact


def test_crc_is_exact_for_one_convex_layer() -> None:
    network = feed_forward((4, 5, 1), SMOOTH["softplus(5)"])
    block = network.blocks[0]
    c, W, g = block.activation.curvature_c, block.W.as_matrix(), block.G.as_matrix()[0]
    exact = max(float(torch.linalg.eigvalsh(W.T @ torch.diag((s * g).clamp(min=0)) @ W).max()) for s in (1, -1))
    assert float(curvature(network, method="crc")) == pytest.approx(c * exact, rel=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_block_bounds_are_ordered_as_proved(seed) -> None:
    rows, columns = [(3, 5), (5, 3), (8, 8), (1, 4)][seed % 4]
    zero = torch.zeros(rows, dtype=F64)
    block = Block(
        Zero((columns,), (rows,)), Identity((rows,)), Dense(randn(rows, columns, seed=seed)), zero, zero, TANH
    )
    bounds = {name: bound for name, bound in BLOCK_BOUNDS.items() if name != "contraction"}
    values = {name: float(bound(block, 2.0, 2.0, NormBounds())) for name, bound in bounds.items()}
    slack = 1 + 1e-9
    assert values["hadamard"] <= values["sdp"] * slack
    assert values["sdp"] <= values["vectorised"] * slack
    assert values["vectorised"] <= values["product"] * slack
    assert block_curvature(block, 2.0, 2.0, NormBounds())[1] == "hadamard" or rows == 1


@pytest.mark.parametrize("seed", range(6))
def test_general_read_outs_are_ordered_as_proved(seed) -> None:
    G, W = Dense(randn(3, 6, seed=seed)), Dense(randn(6, 4, seed=seed + 50))
    block = Block(Zero((4,), (3,)), G, W, torch.zeros(6, dtype=F64), torch.zeros(3, dtype=F64), TANH)
    hadamard, vectorised, sdp = (
        float(BLOCK_BOUNDS[n](block, 2.0, 2.0, NormBounds())) for n in ("hadamard", "vectorised", "sdp")
    )
    g, w = G.as_matrix(), W.as_matrix()
    product = C * float(torch.linalg.matrix_norm(g, 2) * torch.linalg.matrix_norm(w, 2) * w.norm(dim=1).max())
    slack = 1 + 1e-9
    assert hadamard <= vectorised * slack and hadamard <= sdp * slack and vectorised <= product * slack
    # Each is above the norm of the vectorised Jacobian's change along any one direction.
    found = float(CurvatureSearch(Network.of_blocks((block,)), 2.0, 2.0).everywhere())
    assert found <= hadamard * slack


@pytest.mark.parametrize("seed", range(6))
def test_unrolled_is_never_above_compositional(seed) -> None:
    widths = [(4, 6, 5, 3), (3, 5, 4, 5, 4), (6, 2, 6, 3)][seed % 3]
    network = feed_forward(widths, [TANH, SMOOTH["gelu"]][seed % 2], seed=100 * seed)
    unrolled, compositional = (
        curvature(network, method=name, pair="all").value for name in ("unrolled", "compositional")
    )
    assert bool((unrolled <= compositional * (1 + 1e-9)).all())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("p", "q"), [(1.0, 1.0), (2.0, 2.0), (INF, INF), (2.0, INF)])
def test_unrolled_is_never_above_compositional_for_a_vector(seed, p, q) -> None:
    network = feed_forward((4, 6, 5, 5, 3), TANH, seed=seed)
    unrolled, recursion = (curvature(network, p, q, method=name).value for name in ("unrolled", "compositional"))
    assert unrolled.shape == () and float(unrolled) <= float(recursion) * (1 + 1e-9)
    logits = torch.stack([curvature(network, p, method="unrolled", logit=k).value for k in range(3)])
    assert float(unrolled) >= float(logits.amax()) * (1 - 1e-9)


def test_pair_folding_beats_the_factor_of_the_vector() -> None:
    network = feed_forward((4, 6, 5, 3), TANH)
    for p in (1.0, 2.0, INF):
        folded = curvature(network, p, pair="all", method="compositional").value
        assert bool(
            (folded <= 2 ** (1 - 1 / p) * curvature(network, p, method="compositional").value * (1 + 1e-9)).all()
        )


def test_pairs_at_once_are_the_pairs_one_by_one() -> None:
    network = residual(4, 5, TANH)
    for scope in ({}, {"at": randn(2, 4, seed=3)}, {"at": randn(2, 4, seed=3), "radius": 0.2}):
        together = curvature(network, pair="all", **scope).value
        for k, pair in enumerate([(0, 1), (0, 2), (1, 2)]):
            torch.testing.assert_close(
                together[..., k], curvature(network, pair=pair, **scope).value, rtol=1e-9, atol=0
            )


def test_one_lipschitz_blocks_add_up() -> None:
    # Orthogonal weights and tanh: every block is 1-Lipschitz, and the recursion is the sum of the blocks' constants.
    blocks = []
    for k in range(5):
        zero = torch.zeros(4, dtype=F64)
        W = Dense(torch.linalg.qr(randn(4, 4, seed=k))[0])
        blocks.append(Block(Zero((4,), (4,)), Identity((4,)), W, zero, zero, TANH, str(k)))
    norms = NormBounds()
    total = sum(float(block_curvature(block, 2.0, 2.0, norms)[0]) for block in blocks)
    assert float(curvature(Network.of_blocks(tuple(blocks)), method="compositional")) == pytest.approx(total, rel=1e-9)


def test_anchored_and_local_are_tight_in_one_dimension() -> None:
    network, x = one_dimensional(1.0, TANH), torch.zeros(1, 1, dtype=F64)
    assert float(curvature(network, at=x, method="anchored").value) == pytest.approx(0.5825829084, rel=1e-6)
    far = torch.full((1, 1), 5.0, dtype=F64)
    second = float(2 * torch.tanh(far - 0.1) * (1 - torch.tanh(far - 0.1) ** 2))
    assert float(curvature(network, at=far, radius=0.1).value) == pytest.approx(second, rel=1e-6)


def test_a_corner_of_the_corollary_with_constants_for_each_neuron() -> None:
    block = feed_forward((3, 4, 2), TANH).blocks[0]
    all_alike = torch.full((4,), block.activation.curvature_c, dtype=F64)
    sdp = BLOCK_BOUNDS["sdp"]
    plain = float(sdp(block, 2.0, 2.0, NormBounds()))
    assert float(sdp(block, 2.0, 2.0, NormBounds(), all_alike)) == pytest.approx(plain, rel=1e-9)
    assert float(sdp(block, 2.0, 2.0, NormBounds(), 0.5 * all_alike)) == pytest.approx(0.5 * plain, rel=1e-9)


def test_a_result_says_what_won_and_what_was_skipped() -> None:
    network, x = feed_forward((4, 6, 5, 3), TANH), randn(2, 4, seed=1)
    everywhere = curvature(network, pair="all")
    assert everywhere.method == "unrolled" and isinstance(everywhere.scope, Global)
    assert [term.layer for term in everywhere.per_layer] == ["layer0", "layer1"]
    assert any("anchored" in reason for reason in everywhere.skipped)
    assert isinstance(curvature(network, at=x).scope, Anchor | Global)
    assert isinstance(curvature(network, at=x, radius=0.1, pair=(0, 1)).scope, Ball)
    recursion = curvature(network, method="compositional")
    assert {term.method for term in recursion.per_layer} >= {"hadamard"}
    assert curvature(network).method == "unrolled" and any("crc" in reason for reason in curvature(network).skipped)
    smallest = torch.stack(
        [curvature(network, pair="all", method=m).value for m in ("compositional", "unrolled", "crc")]
    ).amin(0)
    assert torch.equal(everywhere.value, smallest)


def test_scalar_blocks_are_the_rows() -> None:
    block = feed_forward((4, 6, 3), TANH).blocks[0]
    values = scalar_block_curvatures(block, 2.0, NormBounds())
    W, G = block.W.as_matrix(), block.G.as_matrix()
    for value, row in zip(values, G, strict=True):
        assert float(value) == pytest.approx(
            C * float(torch.linalg.eigvalsh(W.T @ torch.diag(row.abs()) @ W).max()), rel=1e-9
        )


def test_refusals() -> None:
    network = feed_forward((4, 6, 3), TANH)
    with pytest.raises(InvalidInput, match="Unknown method"):
        curvature(network, method="magic")
    with pytest.raises(InvalidInput, match="scalar"):
        curvature(network, method="crc")
    with pytest.raises(InvalidInput, match="no radius"):
        curvature(network, method="anchored", at=torch.zeros(1, 4), radius=0.1)
    with pytest.raises(UnsupportedNorm, match="p = q = 2"):
        curvature(network, 1, method=Compositional(["sdp"]))
    with pytest.raises(InvalidInput, match="Unknown block bound"):
        curvature(network, method=Compositional(["magic"]))
    with pytest.raises(UnsupportedActivation, match="kink"):
        curvature(feed_forward((4, 6, 3), ACTIVATIONS["relu"]))
    with pytest.raises(InvalidInput, match="at=x"):
        anchored_curvature_bound(make_problem(network, 2, None, None, None, None, None))


def test_the_entry_point_rechecks_a_method() -> None:
    network, x = one_dimensional(1.0, TANH), torch.zeros(1, 1, dtype=F64)

    def passing(result: Bound | Estimate) -> Compositional:
        method = Compositional()
        object.__setattr__(method, "bound", lambda problem: result)
        return method

    one = torch.ones((), dtype=F64)
    for wrong in (Estimate(one, 2, 2), Bound(one, 1, 1), Bound(one[None], 2, 2, Anchor(x))):
        with pytest.raises(SoundnessError):
            curvature(network, method=passing(wrong), at=x, radius=0.5)


def test_the_constant_of_a_loop_transformed_block_is_rounded_up(monkeypatch) -> None:
    """Norms may be exact: then nothing but the sum itself pays for its own rounding."""
    network = residual(3, 4, TANH)
    unit, problem = network.units[0], make_problem(network, INF, None, None, None, None, None)
    parts, sizes = loop_transformed(unit.block), dict[tuple[int, ...], float]()
    monkeypatch.setattr(NormBounds, "norm", lambda _, op, *norms: torch.tensor(sizes[type(op), op.in_size], dtype=F64))
    keys = [(type(op), op.in_size) for op in (unit.block.H, parts.linear, parts.G, parts.W)]
    assert len(set(keys)) == 4
    for h, g, w in randn(100, 3, seed=0).abs().tolist():
        sizes.update(zip(keys, (1e9, h, g, w), strict=True))
        exact = Fraction(h) + Fraction(parts.rho) * Fraction(g) * Fraction(w)
        found = Fraction(float(unit_lipschitz(unit, problem, problem.norms, False)))
        assert exact <= found <= exact * (1 + Fraction(1, 2**48))
