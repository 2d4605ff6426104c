"""Taylor models of order 2: the identity that they rest on, and rises that no search exceeds."""

import math

import pytest
import torch
from torch import Tensor

from curvcert.network import Network
from curvcert.network.evaluation import evaluate_with_error
from curvcert.network.nodes import ElementwiseNode
from curvcert.norms import steepest_direction
from curvcert.operators import NormBounds
from curvcert.propagation.linear_relaxation import Relaxed
from curvcert.propagation.reach import NetworkFacts
from curvcert.propagation.regions import NormBall
from curvcert.propagation.taylor import REACH, TaylorModels
from tests.graph_families import SMOOTH, Graph

F64 = torch.float64
SAMPLES, ROWS = 3, 3


def models(
    network: Network, p: float, radius: float, seed: int = 0, enough: Tensor | None = None
) -> tuple[TaylorModels, Tensor, Tensor]:
    """Return models at random points, the points, and the rows of the outputs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, *network.in_shape, dtype=F64, generator=generator)
    rows = torch.randn(SAMPLES, ROWS, network.outputs, dtype=F64, generator=generator)
    facts, evaluation = NetworkFacts(network, p, NormBounds()), evaluate_with_error(network, x)
    return TaylorModels(facts, evaluation, rows, torch.full((SAMPLES,), radius, dtype=F64), enough), x, rows


def largest_found(network: Network, x: Tensor, rows: Tensor, p: float, t: float) -> Tensor:
    """Return the largest rise that an ascent in the ball finds, (samples, rows)."""
    before = (rows @ network(x).unsqueeze(2)).squeeze(2)
    centre = x.unsqueeze(1).expand(-1, ROWS, -1)
    best = torch.zeros_like(before)
    for start in range(2):
        generator = torch.Generator().manual_seed(start)
        d = _projected(t * torch.randn(centre.shape, dtype=F64, generator=generator), p, t)
        for k in range(20):
            d = d.detach().requires_grad_()
            rise = (rows * network((centre + d).flatten(0, 1)).reshape(rows.shape)).sum(dim=2) - before
            best = torch.maximum(best, rise.detach())
            (gradient,) = torch.autograd.grad(rise.sum(), d)
            step = steepest_direction(gradient.flatten(0, 1), p).reshape(d.shape)
            d = _projected(d + (0.5 if k < 10 else 0.1) * t * step, p, t)
    return best


def _projected(d: Tensor, p: float, t: float) -> Tensor:
    if math.isinf(p):
        return d.clamp(-t, t)
    return d * (t / torch.linalg.vector_norm(d, p, dim=-1, keepdim=True)).clamp(max=1)


@pytest.mark.parametrize("graph", SMOOTH, ids=[graph.name for graph in SMOOTH])
class TestGraphs:
    @pytest.mark.slow
    @pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
    def test_no_ascent_rises_higher(self, graph: Graph, p: float) -> None:
        network = graph.network(1)
        made, x, rows = models(network, p, 0.4)
        for t in (0.4, 0.7):
            bound = made.rise(torch.full((SAMPLES,), t, dtype=F64))
            assert bool((largest_found(network, x, rows, p, t) <= bound).all())

    @pytest.mark.slow
    def test_only_rows_that_lines_do_not_prove_are_modelled(self, graph: Graph) -> None:
        network, t = graph.network(1), torch.full((SAMPLES,), 0.4, dtype=F64)
        whole = models(network, 2.0, 0.4)[0].rise(t)
        lines = models(network, 2.0, 0.4, enough=torch.full_like(whole, torch.inf))[0].rise(t)
        assert bool((whole <= lines).all())
        middle = lines.median(dim=1, keepdim=True).values
        some = models(network, 2.0, 0.4, enough=middle.expand_as(lines))[0].rise(t)
        torch.testing.assert_close(some, torch.where(lines >= middle, whole, lines), rtol=1e-12, atol=0)

    def test_what_is_left_out_is_the_remainders_exactly(self, graph: Graph) -> None:
        """At random d: dz = J d + d'Md/2 + sum u psi, for every pre-activation."""
        network = graph.network(2)
        made, x, _ = models(network, 2.0, 0.5)
        d = 0.3 * torch.randn(x.shape, dtype=F64, generator=torch.Generator().manual_seed(1))
        at, moved = network.values(x), network.values(x + d)
        y = d @ made.coordinates.expand
        for value in {node.source for node in network.nodes if isinstance(node, ElementwiseNode)}:
            form = made.form(value)
            change = (moved[value] - at[value]).flatten(1)
            total = (form.seen.rows @ y.unsqueeze(2)).squeeze(2)
            for k, u in form.sent.items():
                node, bend = network.nodes[k], made.bends[k]
                assert isinstance(node, ElementwiseNode)
                b = (made.seen[k].rows @ y.unsqueeze(2)).squeeze(2)
                dz = moved[node.source] - at[node.source]
                psi = moved[k] - at[k] - bend.slope * dz - bend.bend * b.square() / 2
                total = total + (u @ (psi + bend.bend * b.square() / 2).unsqueeze(2)).squeeze(2)
            torch.testing.assert_close(change, total, rtol=0, atol=1e-12)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_it_is_better_than_lines_where_a_network_bends(p: float) -> None:
    network = next(g for g in SMOOTH if g.name == "dense net").network(0, 8)
    made, _, rows = models(network, p, 0.3)
    t = torch.full((SAMPLES,), 0.3, dtype=F64)
    lines = Relaxed(made.facts, made.evaluation, NormBall(p, t, 8)).change(len(network.nodes) - 1, rows).rise
    assert float((made.rise(t) / lines).median()) < {1.0: 1.0, 2.0: 0.93, math.inf: 0.999}[p]


def test_beyond_its_reach_a_model_says_nothing_and_at_0_everything() -> None:
    made, _, _ = models(SMOOTH[0].network(0), 2.0, 0.1)
    assert bool(made.rise(torch.full((SAMPLES,), 1.01 * REACH * 0.1, dtype=F64)).isinf().all())
    assert float(made.rise(torch.zeros(SAMPLES, dtype=F64)).max()) < 1e-10
