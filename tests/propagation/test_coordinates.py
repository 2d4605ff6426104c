"""Parabolas over balls, against dense eigenvalues, the sphere's own maximum and many points."""

import math

import pytest
import torch
from torch import Tensor, nn

from curvcert.network import Network, trace
from curvcert.norms import conjugate
from curvcert.propagation.coordinates import MOST_COORDINATES, Coordinates, Seen

F64 = torch.float64
PS = (1.0, 1.5, 2.0, 3.0, math.inf)


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def network(inputs: int, rows: int) -> Network:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, rows), nn.Tanh(), nn.Linear(rows, 2)).double().eval()
    return trace(model, torch.zeros(1, inputs))


def parts(found: Coordinates, W: Tensor, seed: int, signed: bool = True) -> tuple[Seen, Tensor, Tensor, Tensor]:
    """Return rows J behind W, weights, and the dense M of each row of weights."""
    J = randn(seed, 2, 6, len(W)) @ W
    w = randn(seed + 1, 2, 4, 6) if signed else randn(seed + 1, 2, 4, 6).abs()
    seen, left = found.seen(J)
    assert float(left.max()) < 1e-12
    return seen, w, torch.einsum("bln,brl,blm->brnm", J, w, J), J


def points(p: float, count: int, n: int) -> Tensor:
    """Return points of the unit sphere, corners among them."""
    x = randn(9, count, n)
    x = torch.cat([x, x.sign(), torch.eye(n, dtype=F64)])
    return x / torch.linalg.vector_norm(x, p, dim=1, keepdim=True)


@pytest.mark.parametrize("p", PS)
@pytest.mark.parametrize(("inputs", "rows"), [(8, 3), (4, 7)], ids=["few rows", "few inputs"])
class TestBounds:
    def test_rows_are_as_steep_as_their_dual_norms(self, p: float, inputs: int, rows: int) -> None:
        net = network(inputs, rows)
        found = Coordinates.of(net, p)
        seen, _, _, J = parts(found, net.blocks[0].W.as_matrix(), 1)
        dual = torch.linalg.vector_norm(J, conjugate(p), dim=2)
        torch.testing.assert_close(seen.steepest, dual, rtol=1e-9, atol=0)
        assert bool((seen.steepest >= dual).all())

    def test_no_point_of_the_ball_is_above(self, p: float, inputs: int, rows: int) -> None:
        net = network(inputs, rows)
        found = Coordinates.of(net, p)
        seen, w, M, J = parts(found, net.blocks[0].W.as_matrix(), 2)
        above, below = found.peaks([w], [seen])
        outer, _ = found.seen(J[:, :4])
        parabolas = found.parabolas(outer, found.matrices([w], [seen]), [w], [seen])
        for t in (0.1, 1.0, 7.0):
            d = t * points(p, 4000, inputs)
            values = torch.einsum("kn,brnm,km->brk", d, M, d) / 2
            assert bool((values.amax(2) <= above * t**2).all())
            assert bool(((-values).amax(2) <= below * t**2).all())
            both = (torch.einsum("brn,kn->brk", J[:, :4], d) + values).amax(2)
            assert bool((both <= parabolas.largest(torch.full((2,), t, dtype=F64))).all())


def test_in_l2_peaks_are_eigenvalues_and_the_dual_is_attained() -> None:
    net = network(6, 9)
    found = Coordinates.of(net, 2.0)
    seen, w, M, J = parts(found, net.blocks[0].W.as_matrix(), 3)
    eigenvalues = torch.linalg.eigvalsh(M)
    above, below = found.peaks([w], [seen])
    slack = 2e-5 * float(eigenvalues.abs().max())
    torch.testing.assert_close(above, eigenvalues[..., -1].clamp(min=0) / 2, rtol=0, atol=slack)
    torch.testing.assert_close(below, (-eigenvalues[..., 0]).clamp(min=0) / 2, rtol=0, atol=slack)
    outer, matrices = found.seen(J[:, :4])[0], found.matrices([w], [seen])
    bound = found.parabolas(outer, matrices, [w], [seen]).largest(torch.ones(2, dtype=F64))
    d = torch.nn.functional.normalize(randn(4, 2, 4, 50, 6), dim=3)
    for _ in range(3000):  # The fixed point of ascent on the sphere.
        gradient = J[:, :4].unsqueeze(2) + torch.einsum("brnm,brkm->brkn", M, d)
        d = torch.nn.functional.normalize(d + 0.05 * gradient, dim=3)
    attained = (torch.einsum("brn,brkn->brk", J[:, :4], d) + torch.einsum("brkn,brnm,brkm->brk", d, M, d) / 2).amax(2)
    torch.testing.assert_close(bound, attained, rtol=1e-4, atol=0)
    assert bool((bound >= attained).all())


def test_matrices_are_those_of_the_weights_and_so_are_their_sums() -> None:
    net = network(11, 23)
    found = Coordinates.of(net, 2.0)
    seen, w, _, _ = parts(found, net.blocks[0].W.as_matrix(), 5)
    exact = torch.einsum("brk,bki,bkj->brij", w, seen.rows, seen.rows)
    M, left = found.matrices([w], [seen]), found.matrices([w.abs()], [seen])
    assert bool((torch.linalg.matrix_norm(M.full - exact) <= M.error).all())
    both, factors = M.plus(left, (0.0, 0.25)), (0.0, 0.25)
    for part, factor in zip(both.full.chunk(2, dim=1), factors, strict=True):
        dense = torch.einsum("brk,bki,bkj->brij", w + factor * w.abs(), seen.rows, seen.rows)
        assert bool((torch.linalg.matrix_norm(part - dense) <= both.error.chunk(2, dim=1)[-1]).all())


def test_wide_networks_are_too_much() -> None:
    assert Coordinates.reason_to_skip(network(4, 7)) is None
    wide = network(MOST_COORDINATES + 1, MOST_COORDINATES + 1)
    assert f"at most {MOST_COORDINATES}" in str(Coordinates.reason_to_skip(wide))
