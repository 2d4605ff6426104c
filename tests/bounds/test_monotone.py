"""SLL-like blocks are proven to contract, never assumed to; networks of them add up the blocks' curvatures."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from curvcert.activations import ACTIVATIONS, TANH
from curvcert.bounds.curvature.blocks import block_curvature
from curvcert.bounds.curvature.compositional import compositional_bound
from curvcert.bounds.lipschitz import lipschitz
from curvcert.bounds.lipschitz.monotone import monotone_residual_constant
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Global
from curvcert.network import Block, Network
from curvcert.operators import AbstractLinearMap, Conv2d, Dense, Diagonal, Identity, NormBounds, Zero

F64 = torch.float64


def sll(W: AbstractLinearMap, d: Tensor, activation: str = "tanh") -> Block:
    """x - W' D phi(W x)."""
    G = -1.0 * (W.T @ Diagonal(d, W.out_shape))
    b = 0.3 * torch.randn(W.out_shape, dtype=F64, generator=torch.Generator().manual_seed(1))
    return Block(Identity(W.in_shape), G, W, b, torch.zeros(W.in_shape, dtype=F64), ACTIVATIONS[activation], "sll")


def sll_diagonal(weight: Tensor) -> Tensor:
    """2 / T with T_i = sum_j |W W'|_ij, which makes the layer 1-Lipschitz."""
    return 2.0 / (weight @ weight.T).abs().sum(dim=1)


@given(st.integers(0, 10**6), st.floats(0.1, 3.0), st.sampled_from(["tanh", "sigmoid", "arctan", "softplus(1)", "erf"]))
def test_no_slope_exceeds_the_constant(seed: int, scale: float, name: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(5, 4, dtype=F64, generator=generator)
    block = sll(Dense(W), scale * sll_diagonal(W), name)
    constant = monotone_residual_constant(block, NormBounds())
    assert constant is not None
    jacobian = Network.of_blocks((block,)).jacobian(2 * torch.randn(200, 4, dtype=F64, generator=generator))
    assert float(torch.linalg.matrix_norm(jacobian, 2).max()) <= float(constant) * (1 + 1e-12)


def test_the_sll_scaling_is_proven_to_be_one_lipschitz() -> None:
    W = torch.randn(6, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    network = Network.of_blocks(tuple(sll(Dense(s * W), sll_diagonal(s * W)) for s in (0.5, 1.0, 2.0)))
    assert float(lipschitz(network, method="liplt")) <= 1 + 1e-9
    kernel = torch.randn(3, 2, 3, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    conv = Conv2d(kernel, (2, 5, 5), padding=((1, 1), (1, 1)))
    d = sll_diagonal(conv.as_matrix()).reshape(conv.out_shape)
    assert float(lipschitz(Network.of_blocks((sll(conv, d),)), method="product")) <= 1 + 1e-9


def test_a_scaling_too_large_is_not_called_one_lipschitz() -> None:
    W = torch.eye(3, dtype=F64)
    constant = monotone_residual_constant(sll(Dense(W), torch.full((3,), 2.5, dtype=F64)), NormBounds())
    assert constant is not None
    assert float(constant) >= 1.5  # x - 2.5 tanh(x) has slope -1.5 at 0


def test_the_curvature_of_one_lipschitz_blocks_is_the_sum_of_theirs() -> None:
    W = torch.randn(6, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    blocks = tuple(sll(Dense(s * W), sll_diagonal(s * W)) for s in (0.5, 1.0, 2.0))
    norms = NormBounds()
    total = sum(float(block_curvature(block, 2, 2, norms)[0]) for block in blocks)
    K = float(compositional_bound(Problem(Network.of_blocks(blocks), 2, 2, Global()), norms))
    assert total * (1 - 1e-9) <= K <= total * (1 + 1e-9)


@pytest.mark.parametrize("change", ["other weight", "another skip", "positive sign", "slopes below 0", "no skip"])
def test_blocks_of_another_form_are_left_to_other_rules(change: str) -> None:
    W = Dense(torch.eye(3, dtype=F64))
    d, zero = torch.ones(3, dtype=F64), torch.zeros(3, dtype=F64)
    G = -1.0 * (W.T @ Diagonal(d, (3,)))
    cases = {
        "other weight": Block(Identity((3,)), -1.0 * Dense(2 * torch.eye(3, dtype=F64)).T, W, zero, zero, TANH),
        "another skip": Block(W, G, W, zero, zero, TANH),
        "positive sign": Block(Identity((3,)), W.T @ Diagonal(d, (3,)), W, zero, zero, TANH),
        "slopes below 0": Block(Identity((3,)), G, W, zero, zero, ACTIVATIONS["sin"]),
        "no skip": Block(Zero((3,), (3,)), G, W, zero, zero, TANH),
    }
    assert monotone_residual_constant(cases[change], NormBounds()) is None


def test_copies_of_a_map_count_as_the_same() -> None:
    kernel = torch.randn(3, 2, 3, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    block = sll(Conv2d(kernel, (2, 5, 5), padding=((1, 1), (1, 1))), torch.full((3, 1, 1), 1e-3, dtype=F64))
    copied = replace(block, W=Conv2d(kernel.clone(), (2, 5, 5), padding=((1, 1), (1, 1))))
    assert float(monotone_residual_constant(copied, NormBounds())) == 1.0
    moved = replace(block, W=Conv2d(kernel.clone(), (2, 5, 5), padding=((0, 2), (1, 1))))
    assert monotone_residual_constant(moved, NormBounds()) is None


@pytest.mark.parametrize("per_pixel", [False, True])
def test_the_norm_of_a_weighted_convolution_is_that_of_its_matrix(per_pixel: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    W = Conv2d(torch.randn(3, 2, 3, 3, dtype=F64, generator=generator), (2, 5, 4), padding=((1, 1), (1, 1)))
    d = torch.rand(W.out_shape if per_pixel else (3, 1, 1), dtype=F64, generator=generator) + 0.1
    matrix = d.expand(W.out_shape).reshape(-1, 1).sqrt() * W.as_matrix()
    r = float(torch.linalg.matrix_norm(matrix, 2)) ** 2
    expected = (1 + r * (r - 2)) ** 0.5
    constant = float(monotone_residual_constant(sll(W, d), NormBounds()))
    assert expected <= constant <= expected * (1 + 1e-9)


@pytest.mark.parametrize("sign", [1.0, -3.0])
def test_a_map_behind_the_block_is_a_factor(sign: float) -> None:
    generator = torch.Generator().manual_seed(0)
    W, A = (torch.randn(n, 4, dtype=F64, generator=generator) for n in (6, 3))
    behind = sign * Dense(A)
    block = sll(Dense(W), sll_diagonal(W)).read_out(behind)
    norms = NormBounds()
    constant = monotone_residual_constant(block, norms)
    assert constant is not None
    assert float(constant) <= abs(sign) * float(torch.linalg.matrix_norm(A, 2)) * (1 + 1e-9)
    jacobian = Network.of_blocks((block,)).jacobian(torch.randn(500, 4, dtype=F64, generator=generator))
    assert float(torch.linalg.matrix_norm(jacobian, 2).max()) <= float(constant)
    rows = monotone_residual_constant(block, norms, lambda op: norms.row_norms(op, 2))
    assert rows is not None
    assert torch.allclose(rows, abs(sign) * A.norm(dim=1), rtol=1e-9)
    assert bool((jacobian.norm(dim=2).amax(dim=0) <= rows).all())


def test_the_constant_is_at_least_a_search_over_diagonals_of_slopes() -> None:
    # Every diagonal of slopes in [0, 1] is attained by some activation: the bound covers them all, and one attains it.
    generator = torch.Generator().manual_seed(0)
    for scale in (0.5, 1.0, 1.05, 1.5, 4.0):
        W = torch.randn(3, 3, dtype=F64, generator=generator)
        d = scale * sll_diagonal(W)
        constant = float(monotone_residual_constant(sll(Dense(W), d), NormBounds()))
        slopes = torch.rand(2000, 3, dtype=F64, generator=generator).round(decimals=1)
        jacobian = torch.eye(3, dtype=F64) - W.T @ ((d * slopes)[:, :, None] * W)
        assert float(torch.linalg.matrix_norm(jacobian, 2).max()) <= constant * (1 + 1e-12)
