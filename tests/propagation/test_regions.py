"""How far a linear function rises in a ball cut with a box: never less than sampled, and attained."""

import math

import pytest
import torch

from curvcert.errors import InvalidInput
from curvcert.norms import vector_norm
from curvcert.propagation.regions import region_of

F64 = torch.float64


def _largest_by_search(u, radius, p, below, above):
    """Return max u.d by projected ascent along the path of KKT points d_i = min(c_i, (a_i / lam)^(1/(p-1)))."""
    a, c = u.abs(), torch.where(u > 0, above, below)
    if p == math.inf:
        return float((a * torch.minimum(c, radius)).sum())
    if p == 1:
        left, total = float(radius), 0.0
        for k in a.argsort(descending=True).tolist():
            step = min(left, float(c[k]))
            total, left = total + float(a[k]) * step, left - step
        return total
    lam = torch.logspace(-6, 6, 4001, dtype=F64)[:, None]
    d = torch.minimum(c, (a / lam) ** (1 / (p - 1)))
    inside = vector_norm(d, p, dim=1) <= radius
    return float((a * d).sum(dim=1)[inside].max()) if bool(inside.any()) else 0.0


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, math.inf])
def test_cut_ball_is_bounded_and_attained(p: float):
    g = torch.Generator().manual_seed(0)
    for _ in range(60):
        n = int(torch.randint(1, 7, (1,), generator=g))
        u = torch.randn(n, dtype=F64, generator=g) * (torch.rand(n, generator=g) > 0.2)
        x = torch.rand(n, dtype=F64, generator=g)
        x = torch.where(torch.rand(n, generator=g) < 0.2, 0.0, x)
        radius = 10 ** (torch.rand(1, dtype=F64, generator=g) * 3 - 2)
        region = region_of(x[None], p, radius, (torch.zeros(n, dtype=F64), torch.ones(n, dtype=F64)))
        bound = float(region.largest(u[None, None]))
        found = _largest_by_search(u, radius, p, x, 1 - x)
        assert bound >= found * (1 - 1e-12)
        if p in (1.0, 2.0, math.inf):
            assert bound <= found * 1.01 + 1e-9
        ball = region_of(x[None], p, radius, None)
        assert bound <= float(ball.largest(u[None, None])) * (1 + 1e-12)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_sampled_displacements_stay_within_every_bound(p: float):
    g = torch.Generator().manual_seed(1)
    x = torch.rand(4, 3, 2, dtype=F64, generator=g)
    radius = torch.tensor([0.0, 0.1, 0.7, 2.0], dtype=F64)
    lower, upper = torch.zeros_like(x), torch.ones_like(x)
    region = region_of(x, p, radius, (lower, upper))
    d = torch.randn(500, 4, 6, dtype=F64, generator=g)
    d = d / vector_norm(d, p, dim=2)[:, :, None] * radius[:, None] * torch.rand(500, 4, 1, dtype=F64, generator=g)
    d = torch.minimum(torch.maximum(d, -x.flatten(1)), 1 - x.flatten(1))
    fall, rise = region.sides
    assert bool((d >= -fall).all()) and bool((d <= rise).all())
    assert bool((vector_norm(d, p, dim=2) <= region.length * (1 + 1e-12)).all())
    u = torch.randn(4, 5, 6, dtype=F64, generator=g)
    assert bool((torch.einsum("brn,sbn->sbr", u, d) <= region.largest(u) + 1e-15).all())
    index = torch.tensor([2, 0])
    assert torch.equal(region.part(index).largest(u[index]), region.largest(u)[index])


def test_box_alone_is_exact_and_must_hold_the_centre():
    x = torch.tensor([[0.25, 0.5]], dtype=F64)
    region = region_of(x, 2, None, (torch.zeros(2, dtype=F64), torch.ones(2, dtype=F64)))
    u = torch.tensor([[[4.0, -2.0]]], dtype=F64)
    assert float(region.largest(u)) == pytest.approx(4 * 0.75 + 2 * 0.5, rel=1e-13)
    with pytest.raises(InvalidInput, match="does not contain"):
        region_of(x, 2, None, (torch.full((2,), 0.3, dtype=F64), torch.ones(2, dtype=F64)))
    with pytest.raises(InvalidInput, match="a radius, a box, or both"):
        region_of(x, 2, None, None)
