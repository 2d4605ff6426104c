"""The falsifier has teeth: with c or a norm taken a twentieth too small, where the bound is tight, it finds out."""

import math
from dataclasses import replace

import pytest
import torch

from curvcert.activations import SIN, anchored_curvature_range, second_derivative_range
from curvcert.bounds.curvature import curvature
from curvcert.bounds.lipschitz import lipschitz
from curvcert.bounds.lipschitz.portfolio import LIPSCHITZ_METHODS, lipschitz_of
from curvcert.bounds.lipschitz.problem import make_problem
from curvcert.certificates import certify
from curvcert.falsifier import Effort, audit, falsify, falsify_bound, replay
from curvcert.falsifier.bound_search import BoundSearch, Target
from curvcert.falsifier.random_networks import FAMILIES
from curvcert.network import Affine, Network
from curvcert.operators import Dense
from curvcert.propagation.slopes import curvatures_within
from tests.falsifier.tight import (
    BEND,
    SHORT,
    aligned,
    diagonal,
    equal_neurons,
    linear_chain,
    neuron,
    shortened,
    slope,
    tensor,
    valley,
)

NORMS = [1.0, 2.0, 3.0, math.inf]
TIGHT = {"neuron": neuron, "linear chain": linear_chain, "diagonal": diagonal, "aligned": aligned}


def assert_bites(bound, network, kind, **target) -> None:
    """Nothing is found against the bound itself, and a confirmed counterexample against the shortened one."""
    right = falsify_bound(bound, network, kind, **target, ascents=24)
    assert not right and right.unconfirmed == 0
    wrong = falsify_bound(shortened(bound), network, kind, **target, ascents=24)
    assert [replay(example).refuted for example in wrong.counterexamples] == [True] * len(wrong.counterexamples)
    assert wrong.counterexamples, f"{bound} times {SHORT} was not found out"


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("name", TIGHT)
def test_a_short_lipschitz_bound_is_found_out(name, p) -> None:
    assert_bites(lipschitz(TIGHT[name](), p), TIGHT[name](), "lipschitz")


def test_a_bound_that_is_short_by_a_ten_billionth_is_found_out() -> None:
    bound = lipschitz(linear_chain())
    assert not falsify_bound(bound, linear_chain(), "lipschitz")
    short = replace(bound, value=bound.value * (1 - 1e-10))
    assert falsify_bound(short, linear_chain(), "lipschitz").counterexamples


def test_rounding_of_the_search_is_no_share_above_one() -> None:
    """Outputs far larger than their difference: what is divided carries their rounding, here above the bound."""
    steep = Network.of_blocks((Affine(Dense(tensor(1.0)[None]), tensor(1e4)),))
    bound = lipschitz(steep, at=tensor(0.0)[None])
    (search,) = BoundSearch(steep, "lipschitz", 2.0, 2.0, Target.of(steep), bound.scope).run()
    assert 1 < float((search.ascended.value / bound.value).max()) < 1 + 1e-9
    found = falsify_bound(bound, steep, "lipschitz")
    assert (len(found.counterexamples), found.unconfirmed, found.closest) == (0, 0, {"lipschitz": 1.0})


@pytest.mark.parametrize("method", ["product", "liplt", "lipsdp-recursion"])
def test_a_short_bound_of_every_lipschitz_method_is_found_out(method) -> None:
    network = neuron()
    assert LIPSCHITZ_METHODS[method].reason_to_skip(make_problem(network, 2, None, None, None, None, None)) is None
    assert_bites(lipschitz(network, method=method), network, "lipschitz")


@pytest.mark.parametrize("p", NORMS)
def test_a_short_anchored_lipschitz_bound_is_found_out(p) -> None:
    at = torch.tensor([[0.0], [2.0 / 3.0]], dtype=torch.float64)
    assert_bites(lipschitz(neuron(), p, method="anchored", at=at), neuron(), "lipschitz")


@pytest.mark.parametrize("p", NORMS)
def test_a_short_local_lipschitz_bound_is_found_out(p) -> None:
    # About 0 the steepest point is the centre, about 1 it is on the sphere.
    for centre in (0.0, 1.0):
        bound = lipschitz(neuron(), p, method="local", at=tensor(centre)[:, None], radius=0.2)
        assert_bites(bound, neuron(), "lipschitz")


@pytest.mark.slow
@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("make", [neuron, diagonal, equal_neurons], ids=lambda make: make.__name__)
def test_a_short_curvature_bound_is_found_out(make, p) -> None:
    network = make().prefix(1)
    assert_bites(curvature(network, p), network, "curvature")


@pytest.mark.parametrize("method", ["compositional", "unrolled", "crc"])
def test_a_short_bound_of_every_curvature_method_is_found_out(method) -> None:
    assert_bites(curvature(neuron(), method=method), neuron(), "curvature")


def test_short_anchored_and_local_curvature_bounds_are_found_out() -> None:
    at = tensor(BEND / 3)[:, None]
    assert_bites(curvature(neuron(), method="anchored", at=at), neuron(), "curvature")
    assert_bites(curvature(neuron(), method="local", at=at, radius=0.01), neuron(), "curvature")


@pytest.mark.parametrize("kind", ["lipschitz", "curvature"])
def test_short_bounds_of_pairs_and_logits_are_found_out(kind) -> None:
    network, _ = valley()
    ask = lipschitz if kind == "lipschitz" else curvature
    assert_bites(ask(network, pair="all"), network, kind, pair="all")
    assert_bites(ask(network, pair=(1, 0)), network, kind, pair=(1, 0))
    assert_bites(ask(network, logit=1), network, kind, logit=1)


def found(network, x, cert) -> set[str]:
    return {example.kind for example in falsify(network, x, None, cert).counterexamples}


@pytest.mark.parametrize("p", NORMS)
def test_a_short_norm_in_a_lipschitz_certificate_is_found_out(p, monkeypatch) -> None:
    network, x = slope()
    assert not falsify(network, x, None, certify(network, x, p=p, method="lipschitz"))
    monkeypatch.setattr("curvcert.certificates.constants.lipschitz_of", lambda *a: shortened(lipschitz_of(*a)))
    assert found(network, x, certify(network, x, p=p, method="lipschitz")) == {"radius"}


@pytest.mark.parametrize("method", ["compositional", "unrolled", "crc"])
def test_a_short_c_in_a_global_certificate_is_found_out(method) -> None:
    network, x = valley()
    assert not falsify(network, x, None, certify(network, x, method=method))
    wrong, _ = valley(replace(SIN, curvature=(-SHORT, SHORT)))
    assert found(wrong, x, certify(wrong, x, method=method)) == {"radius"}


def test_a_short_c_in_an_anchored_certificate_is_found_out(monkeypatch) -> None:
    network, x = valley()
    assert not falsify(network, x, None, certify(network, x, method="anchored"))
    for right in (anchored_curvature_range, second_derivative_range):
        wrong = lambda *a, right=right: tuple(SHORT * end for end in right(*a))  # noqa: E731
        monkeypatch.setattr(f"curvcert.bounds.curvature.anchored.{right.__name__}", wrong)
    assert found(network, x, certify(network, x, method="anchored")) == {"radius"}


@pytest.mark.parametrize("method", ["local", "auto"])
def test_a_short_c_in_a_local_certificate_is_found_out(method, monkeypatch) -> None:
    network, x = valley()
    assert not falsify(network, x, None, certify(network, x, method=method))
    monkeypatch.setattr("curvcert.certificates.shell.ball.curvatures_within", lambda *a: SHORT * curvatures_within(*a))
    assert found(network, x, certify(network, x, method=method)) == {"radius"}


@pytest.mark.parametrize("name", ["radius", "lipschitz", "pair_radius"])
def test_every_radius_of_a_certificate_is_attacked(name) -> None:
    network, x = slope()
    cert = certify(network, x, method="lipschitz")
    far = {"radii": {name: cert.radii[name] / SHORT}} if name in cert.radii else {name: getattr(cert, name) / SHORT}
    assert found(network, x, replace(cert, **far)) == {"radius"}


def test_a_short_attack_radius_is_found_out() -> None:
    network, x = slope()
    cert = certify(network, x)
    assert cert.attack_radius.isfinite().all() and not falsify(network, x, None, cert)
    assert found(network, x, replace(cert, attack_radius=SHORT * cert.attack_radius)) == {"witness"}


def test_a_witness_that_is_no_witness_is_found_out() -> None:
    network, x = slope()
    cert = certify(network, x)
    assert found(network, x, replace(cert, witness_points=x + SHORT * (cert.witness - x))) == {"witness"}


def test_a_witness_inside_the_certified_ball_refutes_the_radius() -> None:
    network, x = slope()
    cert = certify(network, x)
    far = replace(cert, radius=1.0001 * cert.attack_radius, pair_radius=torch.full_like(cert.pair_radius, 0.1))
    assert found(network, x, far) == {"radius"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lipschitz", "curvature"])
def test_an_audit_finds_a_short_method_out(kind, monkeypatch) -> None:
    ask = lipschitz if kind == "lipschitz" else curvature
    monkeypatch.setattr(f"curvcert.falsifier.session.{kind}", lambda *a, **k: shortened(ask(*a, **k)))
    tight = {name: FAMILIES[name] for name in ("diagonal", "aligned")}
    monkeypatch.setattr("curvcert.falsifier.random_networks.FAMILIES", tight)
    result = audit(seed=5, networks=2, effort=Effort(anchors=3, samples=1, dear=0.0, best=0.0))
    kinds = {example.kind for example in result.findings.counterexamples}
    assert kinds and kinds <= ({"lipschitz"} if kind == "lipschitz" else {"curvature", "bend"})
