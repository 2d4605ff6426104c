"""The checker on graphs: its own bounds are no smaller than what is found, and no larger than those that it checks."""

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.shell_search import Bounded
from curvcert.certificates import Certificate, certify
from curvcert.checker import check_certificate
from curvcert.checker.anchored import anchored_curvatures, views_of
from curvcert.checker.evaluation import Backed, Passed, backward, forward, gradient_norms, margins
from curvcert.checker.facts import Facts
from curvcert.checker.lines import by_lines
from curvcert.checker.model import pair_rows
from curvcert.checker.outward import Enclosed
from curvcert.checker.reading import read_model
from curvcert.checker.shells import Pairs, centres, gradient_change, spent
from curvcert.network import Network
from curvcert.network.network_file import save_network
from tests.certificates.saved import forged
from tests.checker.checking import certified_curvature, certified_lipschitz
from tests.checker.test_lines import nearest
from tests.graph_families import GRAPHS, IDS, SMOOTH, Graph, dense_path_maps
from tests.sampling import crossed

every_graph = pytest.mark.parametrize("graph", GRAPHS, ids=IDS)
every_smooth = pytest.mark.parametrize("graph", SMOOTH, ids=[graph.name for graph in SMOOTH])
SLACK = 1 + 1e-9


def facts_of(network: Network, folder: Path) -> Facts:
    return Facts(read_model(save_network(network, folder / "network.safetensors")))


def looked_at(facts: Facts, x: np.ndarray, rows: np.ndarray | None = None) -> tuple[Passed, Backed]:
    passed = forward(facts.model, x)
    return passed, backward(facts.model, passed, pair_rows(facts.model.classes, None) if rows is None else rows)


def steps(draw: np.random.Generator, n: int, count: int = 60) -> np.ndarray:
    return draw.normal(size=(count, n)) * np.logspace(-4, 1, count)[:, None]


@every_graph
def test_it_evaluates_and_differentiates_as_the_network_does(graph: Graph, tmp_path: Path) -> None:
    network, draw = graph.network(0), np.random.default_rng(0)
    facts = facts_of(network, tmp_path)
    for x in draw.normal(size=(5, 4)):
        passed, backed = looked_at(facts, x, np.eye(facts.model.classes))
        point = torch.tensor(x)[None]
        outputs = passed.outputs
        assert (np.abs(outputs.value - network(point)[0].numpy()) <= outputs.error + 1e-14).all()
        if graph in SMOOTH:
            assert np.abs(backed.gradients[0] - network.jacobian(point)[0].numpy()).max() < 1e-12


@every_graph
def test_its_path_maps_are_the_dense_ones(graph: Graph, tmp_path: Path) -> None:
    network = graph.network(1)
    facts = facts_of(network, tmp_path)
    for piece in facts.blocks.pieces:
        if piece.act is None or piece.W is None:
            continue
        expected = dense_path_maps(network, piece.z)
        paths = facts.growth.paths(dict(zip(piece.sources, piece.split(piece.W), strict=True)))
        found = {facts.blocks.pieces[k].a: A for k, A in paths.reach.items()}
        start = np.zeros_like(expected[0].numpy()) if paths.start is None else paths.start.value
        np.testing.assert_allclose(start, expected[0].numpy(), atol=1e-12)
        for a, A in found.items():
            assert isinstance(A, Enclosed)
            np.testing.assert_allclose(A.value, expected[a].numpy(), atol=1e-12)


@pytest.mark.slow
@every_graph
@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_its_lipschitz_constants_reach_those_of_curvcert_and_hold(graph: Graph, p: float, tmp_path: Path) -> None:
    draw, order = np.random.default_rng(0), {1.0: 1, 2.0: 2, math.inf: np.inf}[p]
    for seed in range(2):
        network = graph.network(seed)
        facts = facts_of(network, tmp_path)
        classes = facts.model.classes
        own, theirs = (
            facts.L(p)[np.triu_indices(classes, 1)],
            certified_lipschitz(network, p)[np.triu_indices(classes, 1)],
        )
        assert (own <= theirs * SLACK).all()
        x = draw.normal(size=4)
        here = forward(facts.model, x).outputs.value
        for d in steps(draw, 4):
            moved = pair_rows(classes, None) @ (forward(facts.model, x + d).outputs.value - here)
            assert (np.abs(moved) <= own * np.linalg.norm(d, order) * SLACK + 1e-13).all()


@every_graph
def test_no_value_moves_and_no_gradient_grows_further(graph: Graph, tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    facts = facts_of(graph.network(2), tmp_path)
    for x, d in zip(steps(draw, 4), steps(draw, 4), strict=True):
        (here, backed), there = looked_at(facts, x), forward(facts.model, x + d)
        size = np.linalg.norm(d) * SLACK
        for k, piece in enumerate(facts.blocks.pieces):
            if piece.act is not None:
                moved = np.linalg.norm(there.values[piece.z].value - here.values[piece.z].value)
                assert moved <= facts.growth.inner[k] * size + 1e-12
                if graph in SMOOTH:
                    gradient = np.linalg.norm(backed.gradients[piece.a], axis=1)
                    assert (gradient <= facts.gradient_sizes[k] * SLACK + 1e-12).all()
            if piece is not facts.blocks.last:
                moved = np.linalg.norm(there.values[piece.output].value - here.values[piece.output].value)
                assert moved <= facts.growth.values[piece.output] * size + 1e-12
                if graph in SMOOTH:
                    gradient = np.linalg.norm(backed.gradients[piece.output], axis=1)
                    assert (gradient <= facts.value_gradients[piece.output] * SLACK + 1e-12).all()


@pytest.mark.slow
@every_smooth
def test_no_gradient_changes_faster_than_its_curvatures(graph: Graph, tmp_path: Path) -> None:
    draw = np.random.default_rng(2)
    for seed in range(2):
        facts = facts_of(graph.network(seed), tmp_path)
        x = draw.normal(size=4)
        rows = pair_rows(facts.model.classes, 0)
        passed, backed = looked_at(facts, x, rows)
        anchored = anchored_curvatures(facts, passed, backed, views_of(facts, passed), 0)
        bounds = np.minimum(facts.K[0], anchored)
        for d in steps(draw, 4):
            there = looked_at(facts, x + d, rows)[1]
            change = np.linalg.norm(there.gradients[0] - backed.gradients[0], axis=1)
            assert (change <= bounds * np.linalg.norm(d) * SLACK + 1e-12).all()


@pytest.mark.slow
@every_smooth
@pytest.mark.parametrize("exact", [False, True])
def test_no_gradient_leaves_its_shell(graph: Graph, exact: bool, tmp_path: Path) -> None:
    for seed, t in product(range(2), (0.02, 0.3, 1.5)):
        network, draw = graph.network(seed), np.random.default_rng(3)
        facts = facts_of(network, tmp_path)
        x, rows = draw.normal(size=4), pair_rows(facts.model.classes, 0)
        passed, backed = looked_at(facts, x, rows)
        at, others = centres(facts, passed, backed), np.arange(1, len(rows))
        saturated, linear = gradient_change(facts, at, t, others, exact)
        assert (saturated <= linear * SLACK).all()
        for d in draw.normal(size=(20, 4)):
            there = looked_at(facts, x + t * d / np.linalg.norm(d), rows)[1]
            change = np.linalg.norm(there.gradients[0] - backed.gradients[0], axis=1)[1:]
            assert (change <= saturated * SLACK + 1e-12).all()
        g, m = gradient_norms(backed, 2.0), margins(passed.outputs, 0, facts.deviations[0])
        pairs = Pairs(others, g[1:], facts.K[0, 1:], facts.L(2.0)[0, 1:])
        lost = spent(facts, at, np.full(len(others), t), pairs, 8, exact)
        for d in draw.normal(size=(20, 4)):
            there = forward(facts.model, x + t * d / np.linalg.norm(d)).outputs
            assert (m[1:] - margins(there, 0, facts.deviations[0])[1:] <= lost + 1e-12).all()


@every_smooth
def test_its_shells_are_as_good_as_those_that_it_checks(graph: Graph, tmp_path: Path) -> None:
    for seed in range(2):
        network, t = graph.network(seed), torch.tensor([0.3], dtype=torch.float64)
        facts = facts_of(network, tmp_path)
        x = torch.randn(1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        theirs = Bounded.at(network, x, t).change()
        label = int(network(x).argmax())
        passed, backed = looked_at(facts, x[0].numpy(), pair_rows(facts.model.classes, label))
        others = np.flatnonzero(np.arange(facts.model.classes) != label)
        own = gradient_change(facts, centres(facts, passed, backed), 0.3, others, True)
        assert (own[0] <= theirs.saturated[0].numpy() * SLACK).all()
        assert (own[1] <= theirs.linear[0].numpy() * SLACK).all()


@every_smooth
def test_lines_on_graphs_never_reach_beyond_the_truth(graph: Graph, tmp_path: Path) -> None:
    network = graph.network(1, inputs=2)
    facts, x = facts_of(network, tmp_path), torch.tensor([0.3, -0.2], dtype=torch.float64)
    label = int(network(x[None]).argmax())
    classes = facts.model.classes
    passed, backed = looked_at(facts, x.numpy(), pair_rows(classes, label))
    truth = np.array([nearest(network, x, label, i) if i != label else 0.0 for i in range(classes)])
    found = truth[np.isfinite(truth)]
    assert not by_lines(facts, passed, backed, label, np.where(np.isfinite(truth), 1.001 * truth, 0.0)).any()
    near = by_lines(facts, passed, backed, label, np.where(np.isfinite(truth), 0.05 * truth, 0.0))
    assert near.sum() == (found > 0).sum()


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "p"), crossed(GRAPHS, [1.0, 2.0, math.inf]))
def test_a_certificate_of_a_graph_is_proven_again_to_the_end(graph: Graph, p: float, tmp_path: Path) -> None:
    network, method = graph.network(7), "checkable" if p == 2 else "lipschitz"
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    cert = certify(network, x, p=p, method=method)
    held, model = certificate_of(cert, tmp_path), save_network(network, tmp_path / "network")
    found = check_certificate(held, model, x.numpy())
    # The checker draws lines of its own: a radius by lines may be a little beyond what they prove.
    assert set(found.reasons) <= {"", "lines drawn anew do not prove the radius"}, found
    assert found.radii_proven[0] >= (2 if method == "checkable" else 3), found
    changed = forged(held, lambda header, arrays: arrays["L"].__imul__(0.5))
    assert check_certificate(changed, model, x.numpy()).refused
    # Of curvature constants in other norms the checker says that it has no engine, and refuses nothing.
    if p != 2 and graph in SMOOTH:
        curved = certificate_of(certify(network, x, p=p, method="unrolled"), tmp_path)
        assert set(check_certificate(curved, model, x.numpy()).status) == {"cannot check"}


def certificate_of(cert: Certificate, folder: Path) -> Path:
    cert.save(folder / "certificate")
    return folder / "certificate"


@pytest.mark.slow
@every_smooth
def test_its_curvatures_reach_those_of_curvcert(graph: Graph, tmp_path: Path) -> None:
    for seed in range(3):
        network = graph.network(seed)
        facts = facts_of(network, tmp_path)
        theirs = certified_curvature(network)
        assert (facts.K[np.triu_indices(facts.model.classes, 1)] <= theirs * SLACK).all()
