"""The independent checker: it proves what is true, refuses what is not, and says what it cannot check."""

import ast
import itertools
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import curvcert
from curvcert import checker
from curvcert.activations import ACTIVATIONS, declare_activation, register_activation
from curvcert.bounds.lipschitz.liplt import liplt_prefixes
from curvcert.bounds.lipschitz.problem import make_problem
from curvcert.checker import Declared, evaluate_network
from curvcert.checker.activations import activation
from curvcert.checker.anchored import anchored_curvatures, views_of
from curvcert.checker.evaluation import backward, forward, gradient_norms
from curvcert.checker.facts import Facts
from curvcert.checker.outward import Enclosed, largest_eigenvalue, product, spectral_norm
from curvcert.checker.quotients import curvature_quotients, steepest_quotients
from curvcert.checker.reading import read_model
from curvcert.checker.shells import Pairs, centres, spent
from curvcert.errors import InvalidFile, InvalidInput
from curvcert.network import Network, trace
from curvcert.network.network_file import save_network
from curvcert.operators import NormBounds
from curvcert.tensor_files import read_tensor_file, write_tensor_file
from tests.certificates.cases import blobs, planar
from tests.certificates.saved import BOX, Files, forged, saved, shallow
from tests.checker.checking import certified_curvature, certified_lipschitz, refused, verdict


class Skipping(nn.Module):
    """A residual block between two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.inner, self.outer, self.down = (nn.Linear(*s) for s in ((2, 5), (5, 7), (7, 5), (5, 3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.up(x))
        return self.down(x + self.outer(torch.tanh(self.inner(x))))


class Picture(nn.Module):
    """Normalisation, a convolution, average pooling, and a dense layer, on the plane seen as an image."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Unflatten(1, (2, 1, 1)),
            nn.BatchNorm2d(2),
            nn.Conv2d(2, 4, 3, padding=2),
            nn.Tanh(),
            nn.AvgPool2d(2, 1),
            nn.Flatten(),
            nn.Linear(16, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def traced(module: nn.Module, seed: int = 0) -> Network:
    torch.manual_seed(seed)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    return trace(module.eval(), torch.zeros(1, 2))


METHODS = (
    "lipschitz",
    "product",
    "liplt",
    "lipsdp-recursion",
    "anchored-lipschitz",
    "compositional",
    "unrolled",
    "anchored",
    "shell",
    "checkable",
)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_a_dense_network_is_proven(tmp_path, method) -> None:
    found = verdict(saved(tmp_path, n=5, method=method, box=BOX))
    assert found.holds, str(found)


@pytest.mark.slow
@pytest.mark.parametrize("act", (nn.Softplus, nn.GELU, nn.SiLU, nn.ELU, nn.Sigmoid, nn.Softsign))
def test_every_activation_is_proven(tmp_path, act) -> None:
    found = verdict(saved(tmp_path, shallow(act), n=4, box=BOX))
    assert found.holds, str(found)


@pytest.mark.parametrize("act", (nn.ReLU, nn.LeakyReLU))
def test_lipschitz_certificates_of_networks_with_kinks_are_proven(tmp_path, act) -> None:
    files = saved(tmp_path, shallow(act), n=3)
    assert verdict(files).holds, str(verdict(files))

    def change(header, arrays) -> None:
        arrays["K_used"][:] = np.where(np.eye(3)[arrays["label"]] > 0, 0.0, 1e9)

    assert refused(verdict(files, certificate=forged(files.certificate, change)))


@pytest.mark.parametrize("p", (1.0, 2.0, float("inf")))
def test_constants_as_seen_from_a_sample_are_proven_and_no_less(tmp_path, p) -> None:
    files = saved(tmp_path, trace(deep(), torch.zeros(1, 2)), n=5, p=p, method="anchored-lipschitz")
    held = files.held
    everywhere = curvcert.certify(trace(deep(), torch.zeros(1, 2)), torch.as_tensor(files.x), p=p, method="lipschitz")
    assert bool((held.radii["anchored-lipschitz"] > everywhere.radius)[held.correct].all())
    assert verdict(files).holds, str(verdict(files))

    def change(header, arrays) -> None:
        for name in ("radii.anchored-lipschitz", "radius", "pair_radius"):
            arrays[name] *= 1 + 1e-4

    found = verdict(files, certificate=forged(files.certificate, change))
    assert set(found.status) <= {"not reached", "contradicted", "proven"}
    assert found.refused


def deep() -> nn.Module:
    torch.manual_seed(1)
    sizes = (2, 6, 6, 6, 3)
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())]
    with torch.no_grad():
        for layer in layers[::2]:
            layer.weight *= 3
    return nn.Sequential(*layers[:-1]).eval()


def contracting() -> nn.Module:
    return nn.Sequential(curvcert.nn.SLLDense(2, 5), curvcert.nn.SLLDense(2, 4), nn.Linear(2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("module", (Skipping, Picture, contracting))
def test_skips_and_convolutions_are_proven(tmp_path, module) -> None:
    files = saved(tmp_path, traced(module()), n=4)
    found = verdict(files)
    assert found.holds, str(found)


@pytest.mark.parametrize("p", (1.0, float("inf")))
def test_lipschitz_certificates_in_other_norms_are_proven(tmp_path, p) -> None:
    assert verdict(saved(tmp_path, p=p, method="lipschitz")).holds
    assert verdict(saved(tmp_path, n=2, p=p, method="checkable")).holds
    found = verdict(saved(tmp_path, n=2, p=p, method="unrolled"))
    assert set(found.status) == {"cannot check"}


def test_misclassified_samples_are_told_apart(tmp_path) -> None:
    y = (blobs(6)[1] + torch.tensor([0, 1, 0, 0, 2, 0])) % 3
    files = saved(tmp_path, n=6, y=y, method="unrolled")
    assert files.held.correct.tolist() == [True, False, True, True, False, True]
    assert verdict(files).holds
    flipped = forged(files.certificate, lambda header, arrays: arrays["correct"].__setitem__(1, True))
    with pytest.raises(InvalidFile):
        verdict(files, certificate=flipped)


# --- What must be refused -------------------------------------------------------------------------------------


def _scaled(name: str, factor: float, where: object = ...):
    def change(header, arrays) -> None:
        arrays[name][where] *= factor

    return change


def _raised(factor: float):
    def change(header, arrays) -> None:
        for name in ("radius", "pair_radius"):
            arrays[name] *= factor
        arrays["attack_radius"][:] = np.inf

    return change


def _moved(header, arrays) -> None:
    arrays["witness_points"] *= 0.999


def _method(name: str):
    def change(header, arrays) -> None:
        header["methods"], header["proven_by"] = [name], [[name]]
        arrays["method"][:] = 0

    return change


FALSE = {
    "all radii": (_raised(1.5), "more than is proven"),
    "a Lipschitz radius": (_scaled("radii.lipschitz", 1.5), "lipschitz radius"),
    "a curvature radius": (_scaled("radii.curvature", 1.5), "curvature radius"),
    "margins": (_scaled("margin", 1.001), "margin is claimed"),
    "Lipschitz constants": (_scaled("L", 0.99), "L of classes"),
    "curvature constants": (_scaled("K", 0.99), "K of classes"),
    "one curvature constant": (_scaled("K_used", 0.5), "K of class"),
    "attack radii below": (_scaled("attack_radius", 1 - 1e-6), "distance"),
    "attack radii above": (_scaled("attack_radius", 1.01), "distance"),
    "witnesses": (_moved, "distance"),
    "labels": (lambda header, arrays: arrays["label"].__iadd__(1).__imod__(3), "certificate is about class"),
    "inputs": (lambda header, arrays: arrays["inputs"].__ixor__(1), "another one"),
    "the comparison": (lambda header, arrays: arrays["curvature_wins"].__ior__(True), "said to win"),
    "the network": (lambda header, arrays: header.update(network="0" * 64), "another network"),
    "the norm": (lambda header, arrays: header.update(p=1), "p = 2 only|more than is proven|L of classes|distance"),
    "the method": (_method("lipsdp-recursion"), "more than the method that it names proves"),
    "no method": (_method("misclassified"), "called misclassified"),
    "a method by no name": (_method("magic"), "by magic, which the checker has no rules for"),
    "an asymmetric table": (_scaled("L", 2.0, (0, 1)), "not that of differences"),
}


@pytest.fixture(scope="module")
def genuine(tmp_path_factory) -> Files:
    """A certificate by every method at once, with witnesses; four samples."""
    return saved(tmp_path_factory.mktemp("genuine"), shallow(), n=4, box=BOX)


def test_the_untouched_certificate_holds(genuine) -> None:
    found = verdict(genuine)
    assert bool((genuine.held.attack_radius.isfinite() & genuine.held.correct).any())
    assert found.holds, str(found)
    assert str(found).startswith("The certificate holds: 4 proven.")


@pytest.mark.parametrize("name", FALSE)
def test_a_false_claim_is_refused_with_the_reason(genuine, name) -> None:
    change, reason = FALSE[name]
    found = verdict(genuine, certificate=forged(genuine.certificate, change))
    assert not found.holds
    assert any(re.search(reason, text) for text in found.reasons), str(found)
    assert "NOT PROVEN" in str(found)


def test_one_false_number_spoils_one_sample(genuine) -> None:
    def change(header, arrays) -> None:
        arrays["pair_radius"][2] *= 1.5
        arrays["radius"][2] *= 1.5
        arrays["attack_radius"][2] = np.inf

    found = verdict(genuine, certificate=forged(genuine.certificate, change))
    assert [status == "proven" for status in found.status] == [True, True, False, True]
    assert found.reasons[0] == "" and "more than is proven" in found.reasons[2]


def test_a_weaker_claim_is_still_true(genuine) -> None:
    def change(header, arrays) -> None:
        for name in ("radius", "pair_radius", "margin", *(name for name in arrays if name.startswith("radii."))):
            arrays[name] *= 0.9
        for name in ("L", "K"):
            arrays[name] *= 1.1
        arrays["curvature_wins"][:] = False

    assert verdict(genuine, certificate=forged(genuine.certificate, change)).holds


def test_a_claim_just_above_what_is_proven_is_refused(tmp_path) -> None:
    # Constants agree to parts in 2**30, so that a part in a million too much is too much.
    files = saved(tmp_path, n=3, method="lipsdp-recursion")
    assert verdict(files).holds
    for change in (_raised(1 + 1e-6), _scaled("L", 1 - 1e-6), _scaled("radii.lipschitz", 1 + 1e-6)):
        found = verdict(files, certificate=forged(files.certificate, change))
        assert refused(found)


def test_a_radius_beyond_the_truth_is_never_proven(genuine) -> None:
    """In the plane the nearest misclassified point is found by looking everywhere."""
    network, x, label = shallow(), torch.tensor(genuine.x, dtype=torch.float64), genuine.held.label
    angles = torch.linspace(0, 2 * torch.pi, 361, dtype=torch.float64)[:-1]
    circle = torch.stack([angles.cos(), angles.sin()], dim=1)
    reach = torch.linspace(0.0, 1.5, 300, dtype=torch.float64)
    nearest = []
    for centre, own in zip(x, label, strict=True):
        broken = network((centre + reach[:, None, None] * circle).reshape(-1, 2)).argmax(dim=1) != own
        nearest.append(float(reach[broken.reshape(len(reach), -1).any(dim=1)].min()))
    truth = np.array(nearest)
    assert (genuine.held.radius.numpy() <= truth).all()

    def change(header, arrays) -> None:
        arrays["radius"][:] = truth * 1.001
        arrays["pair_radius"] = np.maximum(arrays["pair_radius"], arrays["radius"][:, None])
        arrays["attack_radius"][:] = np.inf

    assert refused(verdict(genuine, certificate=forged(genuine.certificate, change)))


def test_another_model_other_inputs_and_other_labels_are_refused(genuine, tmp_path) -> None:
    other = save_network(planar(), tmp_path / "other.safetensors")
    assert set(verdict(genuine, model=other).reasons) == {"the certificate is about another network"}
    moved = genuine.x.copy()
    moved[1] += 1e-3
    assert verdict(genuine, x=moved).status == ("proven", "contradicted", "proven", "proven")
    assert "the label is" in verdict(genuine, y=(genuine.y + 1) % 3).reasons[0]
    with pytest.raises(InvalidInput, match="shape"):
        verdict(genuine, x=genuine.x[:3])
    with pytest.raises(InvalidInput, match="whole numbers"):
        verdict(genuine, y=genuine.y[:3])


def test_a_network_that_is_nearly_the_same_is_refused(genuine, tmp_path) -> None:
    header, arrays = read_tensor_file(genuine.network, "curvcert-network", 2)
    arrays = {name: value.copy() for name, value in arrays.items()}
    arrays["t0"].flat[0] = np.nextafter(arrays["t0"].flat[0], np.inf)
    forgery = write_tensor_file(tmp_path / "nearly.safetensors", "curvcert-network", 2, header, arrays)
    assert refused(verdict(genuine, model=forgery))


# --- What it cannot check, it says -----------------------------------------------------------------------------


def test_what_it_does_not_cover_it_does_not_pass(tmp_path) -> None:
    selu = saved(tmp_path, shallow(nn.SELU), n=2)
    assert set(verdict(selu).status) == {"cannot check"}
    assert "'selu'" in verdict(selu).reasons[0]
    assert set(verdict(saved(tmp_path, n=2, p=3.0)).status) == {"cannot check"}


@pytest.mark.full
def test_a_layer_of_5000_neurons_is_no_limit(tmp_path) -> None:
    wide = trace(nn.Sequential(nn.Linear(2, 5000), nn.Tanh(), nn.Linear(5000, 3)).eval(), torch.zeros(1, 2))
    assert verdict(saved(tmp_path, wide, n=2, method="product")).holds


def test_a_constant_from_an_unknown_method_cannot_be_checked(genuine) -> None:
    def change(header, arrays) -> None:
        arrays["L"] *= 1 - 1e-6
        header["made_by"][0] = ["a cleverer method"]

    found = verdict(genuine, certificate=forged(genuine.certificate, change))
    assert set(found.status) == {"cannot check"}
    assert not found.refused
    assert found.radii_proven == (4, 4)
    assert "Radii proven again: 4 of 4 (100%)." in str(found)


@pytest.fixture(scope="module")
def loose(tmp_path_factory) -> Files:
    """Radii in linf, by Lipschitz constants alone: well below the truth."""
    return saved(tmp_path_factory.mktemp("loose"), n=4, p=float("inf"), method="lipschitz")


def _together(*changes):
    def change(header, arrays) -> None:
        for one in changes:
            one(header, arrays)

    return change


def test_a_radius_from_an_unknown_method_cannot_be_checked(loose) -> None:
    for factor, again in ((1.0, 4), (1.01, 0)):
        forgery = forged(loose.certificate, _together(_raised(factor), _method("cleverer")))
        found = verdict(loose, certificate=forgery)
        assert set(found.status) == {"cannot check"}
        assert found.radii_proven == (again, 4)


def test_radii_by_parabolas_cannot_be_checked(tmp_path) -> None:
    """There is no engine for them: they are neither proven nor contradicted, and the verdict does not hold."""
    found = verdict(saved(tmp_path, n=4, p=float("inf"), method="quadratic"))
    assert set(found.status) == {"cannot check"} and not found.holds
    assert "by quadratic, which the checker has no rules for" in found.reasons[0]
    assert "certify with --method checkable" in str(found)


def test_what_is_not_reached_is_told_from_what_is_false(loose, genuine) -> None:
    for factor, status in ((1.01, "not reached"), (30.0, "contradicted")):
        found = verdict(loose, certificate=forged(loose.certificate, _raised(factor)))
        assert set(found.status) == {status}
        assert found.radii_proven == (0, 4)
    assert all("reaches the label within it" in reason for reason in found.reasons)
    # By no name does a false radius pass for one that is only not checked.
    both = forged(loose.certificate, _together(_raised(30.0), _method("cleverer")))
    assert set(verdict(loose, certificate=both).status) == {"contradicted"}
    for name, factor in (("L", 0.1), ("K_used", 0.01)):
        found = verdict(genuine, certificate=forged(genuine.certificate, _scaled(name, factor)))
        assert set(found.status) == {"contradicted"}, str(found)


def test_a_fault_beside_the_radius_leaves_it_proven(genuine) -> None:
    found = verdict(genuine, certificate=forged(genuine.certificate, _scaled("K", 0.99)))
    assert refused(found) and found.radii_proven == (4, 4)


# --- Its own mathematics -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def facts(tmp_path_factory) -> Facts:
    return Facts(read_model(save_network(planar(), tmp_path_factory.mktemp("facts") / "network.safetensors")))


def test_constants_agree_with_those_of_curvcert(facts) -> None:
    i, j = np.triu_indices(3, 1)
    L, K = certified_lipschitz(planar())[i, j], certified_curvature(planar())
    assert np.abs(facts.L(2.0)[i, j] / L - 1).max() < 1e-9
    assert np.abs(facts.K[i, j] / K - 1).max() < 1e-9


def test_constants_are_above_what_is_sampled(facts) -> None:
    network, (x, _) = planar(), blobs(60)
    points = torch.cat([x, 3 * x - 1]).double().requires_grad_()
    rows = network(points)[:, 0] - network(points)[:, 1]
    (gradient,) = torch.autograd.grad(rows.sum(), points, create_graph=True)
    hessian = torch.stack([torch.autograd.grad(gradient[:, k].sum(), points, retain_graph=True)[0] for k in (0, 1)], 1)
    assert float(gradient.detach().norm(dim=1).max()) <= facts.L(2.0)[0, 1]
    largest = float(torch.linalg.matrix_norm(hessian, 2).max())
    assert 0.1 * facts.K[0, 1] < largest <= facts.K[0, 1]


def test_anchored_constants_are_above_what_is_sampled(facts) -> None:
    network, x = planar(), blobs(3)[0].double()
    other = torch.cat([x[0] + s * torch.randn(4000, 2, dtype=torch.float64) for s in (0.03, 0.3, 3.0)])
    jacobians = [network.jacobian(points) for points in (x[:1], other)]
    change = (jacobians[1] - jacobians[0])[:, 0] - (jacobians[1] - jacobians[0])[:, 1]
    sampled = float((change.norm(dim=1) / (other - x[0]).norm(dim=1)).max())
    passed = forward(facts.model, x[0].numpy())
    backed = backward(facts.model, passed, np.eye(3) - np.eye(3)[1])
    anchored = anchored_curvatures(facts, passed, backed, views_of(facts, passed), 1)
    assert sampled <= anchored[0]
    bound = certified_curvature(network, "anchored", x[:1])[0, 0]
    assert anchored[0] == pytest.approx(float(bound), rel=1e-5)


@pytest.mark.parametrize(("steepness", "at"), [(3.0, 1.0), (1.0, 3.0)])
def test_anchored_constants_hold_a_saturated_layer_in_front_of_another(tmp_path, steepness, at) -> None:
    """tanh(tanh(w x)) is flat at x and steep elsewhere: the other point's prefix is the global one."""
    first, second, last = (nn.Linear(1, k, bias=False) for k in (1, 1, 2))
    for layer, weight in ((first, [[steepness]]), (second, [[1.0]]), (last, [[1.0], [-1.0]])):
        layer.weight.data = torch.tensor(weight)
    network = trace(nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last).eval(), torch.zeros(1, 1))
    facts = Facts(read_model(save_network(network, tmp_path / "network.safetensors")))
    x, other = torch.tensor([[at]], dtype=torch.float64), torch.linspace(-6, 6, 4000, dtype=torch.float64)[:, None]
    slopes = network.jacobian(torch.cat([x, other]))[:, 0, 0] - network.jacobian(torch.cat([x, other]))[:, 1, 0]
    sampled = float(((slopes[1:] - slopes[0]) / (other - x)[:, 0]).abs().max())
    passed = forward(facts.model, x[0].numpy())
    backed = backward(facts.model, passed, np.eye(2) - np.eye(2)[1])
    anchored = anchored_curvatures(facts, passed, backed, views_of(facts, passed), 1)
    assert sampled <= anchored[0] <= 1.1 * sampled


def test_shells_lose_at_least_what_margins_lose(facts) -> None:
    network, x = planar(), blobs(1)[0].double()
    passed = forward(facts.model, x[0].numpy())
    label = int(passed.outputs.value.argmax())
    others = np.array([i for i in range(3) if i != label])
    backed = backward(facts.model, passed, np.eye(3) - np.eye(3)[label])
    g = gradient_norms(backed, 2.0)
    at = centres(facts, passed, backed)
    pairs = Pairs(others, g[others], facts.K[label][others], facts.L(2.0)[label][others])
    directions = torch.nn.functional.normalize(torch.randn(2000, 2, dtype=torch.float64), dim=1)
    for r in (1e-3, 0.1, 0.5, 2.0):
        before, after = network(x)[0], network(x + r * directions)
        lost = (before[label] - before[others]) - (after[:, [label]] - after[:, others])
        bounds = [spent(facts, at, np.full(2, r), pairs, shells, exact) for shells, exact in ((8, False), (24, True))]
        assert all((lost.amax(dim=0).numpy() <= bound).all() for bound in bounds)
        assert (bounds[1] <= bounds[0] * (1 + 1e-9)).all()
        assert r > 0.01 or (bounds[1] <= 1.2 * lost.amax(dim=0).numpy()).all()


def test_eigenvalues_are_bounded_from_above_and_closely() -> None:
    draw = np.random.default_rng(0)
    for n in (1, 2, 7, 40):
        A = draw.normal(size=(n, n + 3))
        truth = np.linalg.norm(A, 2)
        assert truth <= spectral_norm(Enclosed(A)) <= truth * (1 + 1e-10)
        S = A @ A.T - 3 * np.eye(n)
        top = np.linalg.eigvalsh(0.5 * (S + S.T))[-1]
        assert top <= largest_eigenvalue(S, 1e-9) <= top + 2e-9 + 1e-10 * abs(top)
    assert largest_eigenvalue(np.full((2, 2), np.nan)) == np.inf


def test_products_of_matrices_enclose_the_exact_ones() -> None:
    draw = np.random.default_rng(1)
    left, right = draw.normal(size=(3, 50)), draw.normal(size=(50, 4)) * 10.0 ** draw.integers(-8, 8, (50, 4))
    found = product(Enclosed(left), Enclosed(right))
    exact = [[sum(Fraction(a) * Fraction(b) for a, b in zip(row, col, strict=True)) for col in right.T] for row in left]
    errors = [
        [abs(float(e - Fraction(v))) for e, v in zip(*rows, strict=True)]
        for rows in zip(exact, found.value, strict=True)
    ]
    assert (np.array(errors) <= found.error).all()


KNOWN = [name for name in ACTIVATIONS if activation(name) is not None and activation(name).smooth]


def test_the_table_covers_what_it_promises() -> None:
    smooth = "tanh sigmoid softplus(1) centred_softplus(1) elu(1) celu(1) gelu gelu_tanh silu mish sin arctan erf isru"
    assert {*smooth.split(), "softsign"} <= set(KNOWN)
    assert not any(activation(name).smooth for name in ("relu", "relu6", "leaky_relu(0.01)"))


@pytest.mark.parametrize("name", KNOWN)
def test_activations_agree_with_those_of_curvcert(name) -> None:
    own, theirs = activation(name), ACTIVATIONS[name]
    z = np.concatenate([np.linspace(-9, 9, 801), [0.0, -40.0, 35.0]])
    for graph, function in zip(
        (own.value, own.first, own.second), (theirs.value, theirs.derivative, theirs.second_derivative), strict=True
    ):
        value, expected = graph.function(z), function(torch.tensor(z)).numpy()
        smooth = ~np.isin(z, own.jumps)
        assert (np.abs(value - expected) <= graph.error(value))[smooth].all()
    assert own.slope == pytest.approx(theirs.slope, abs=1e-12)
    assert own.second.range == pytest.approx(theirs.curvature, abs=1e-12)
    assert own.c >= theirs.curvature_c * (1 - 1e-15)


@pytest.mark.parametrize("name", KNOWN)
def test_ranges_and_quotients_hold_what_is_sampled(name) -> None:
    own, draw = activation(name), np.random.default_rng(0)
    z, reach = draw.normal(size=200) * 3, draw.exponential(size=200) * 10.0 ** draw.integers(-6, 2, 200)
    y = z[:, None] + reach[:, None] * np.linspace(-1, 1, 401)
    for graph in (own.first, own.second):
        low, high = graph.over(z - reach, z + reach)
        value = graph.function(y)
        assert (low[:, None] <= value + 1e-15).all() and (value - 1e-15 <= high[:, None]).all()
    far = z[:, None] + np.concatenate([np.linspace(-30, 30, 6000), np.logspace(-5, 3, 200)])
    low, high = steepest_quotients(own, z, np.zeros_like(z))
    quotient = (own.value.function(far) - own.value.function(z)[:, None]) / (far - z[:, None])
    assert (low[:, None] - 1e-9 <= quotient).all() and (quotient <= high[:, None] + 1e-9).all()
    quotient = np.abs(own.first.function(far) - own.first.function(z)[:, None]) / np.abs(far - z[:, None])
    bound = curvature_quotients(own, z, np.zeros_like(z))
    assert (quotient <= bound[:, None] + 1e-9).all()
    assert (np.maximum(quotient.max(axis=1), np.abs(own.second.function(z))) >= 0.98 * bound).mean() > 0.95


def test_the_table_holds_in_ball_arithmetic() -> None:
    """Prove the largest |phi''| of the smooth rows again, over small balls, by Arb."""
    flint = pytest.importorskip("flint", reason="needs python-flint (curvcert[check])")
    arb = flint.arb
    seconds = {
        "tanh": lambda z: -2 * z.tanh() * (1 - z.tanh() ** 2),
        "arctan": lambda z: -2 * z / (1 + z * z) ** 2,
        "erf": lambda z: -4 * z * (-z * z).exp() / arb.pi().sqrt(),
        "gelu": lambda z: (2 - z * z) * (-z * z / 2).exp() / (2 * arb.pi()).sqrt(),
        "silu": lambda z: (2 - z * (z / 2).tanh()) / (2 * (z / 2).cosh()) ** 2,
        "isru": lambda z: -3 * z / (1 + z * z) ** 2 / (1 + z * z).sqrt(),
    }
    for name, second in seconds.items():
        low, high = activation(name).second.range
        for k in range(-3000, 3000):
            value = second(arb((2 * k + 1) / 600, 1 / 600))
            assert value < high + 0.02 and value > low - 0.02
        peaks = [second(arb(turn.point)) for turn in activation(name).second.turns]
        assert all(low <= peak and peak <= high for peak in peaks)


# --- Independence -------------------------------------------------------------------------------------------------


def test_it_imports_nothing_of_what_makes_certificates() -> None:
    allowed = ("numpy", "curvcert.checker", "curvcert.errors")
    standard = {
        "collections",
        "contextlib",
        "dataclasses",
        "functools",
        "hashlib",
        "itertools",
        "json",
        "math",
        "pathlib",
        "re",
        "types",
        "typing",
    }
    sources = sorted(Path(checker.__file__).parent.glob("*.py"))
    assert len(sources) > 8
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] in standard or name.startswith(allowed), f"{source.name} imports {name}"


def test_it_evaluates_a_network_file_by_itself(tmp_path) -> None:
    for k, network in enumerate((planar(), traced(Skipping()), traced(Picture()))):
        path, x = save_network(network, tmp_path / f"{k}.safetensors"), blobs(5)[0].double()
        value, error = evaluate_network(path, x.numpy())
        assert (np.abs(value - network(x).numpy()) <= error + 1e-14).all()
        assert error.max() < 1e-12
    with pytest.raises(InvalidInput, match="takes inputs"):
        evaluate_network(path, np.zeros((1, 3)))


def test_constants_of_a_deeper_network_agree_too(tmp_path) -> None:
    layers = [layer for n, m in ((2, 6), (6, 5), (5, 4)) for layer in (nn.Linear(n, m), nn.Tanh())]
    network = trace(nn.Sequential(*layers, nn.Linear(4, 3)).double().eval(), torch.zeros(1, 2))
    facts = Facts(read_model(save_network(network, tmp_path / "network.safetensors")))
    i, j = np.triu_indices(3, 1)
    prefixes = liplt_prefixes(make_problem(network, 2, None, None, None, "all", None), NormBounds())
    assert (
        np.abs(np.array([facts.growth.before(k) for k in range(3)]) / [float(L) for L in prefixes[:3]] - 1).max() < 1e-9
    )
    assert np.abs(facts.L(2.0)[i, j] / certified_lipschitz(network)[i, j] - 1).max() < 1e-9
    assert np.abs(facts.K[i, j] / certified_curvature(network) - 1).max() < 1e-9


def test_an_eigenvalue_counts_the_error_of_its_matrix() -> None:
    for error in (1e-9, 1e-3, 1.0):
        assert largest_eigenvalue(np.diag([1.0, -2.0]), error) >= 1.0 + error


def test_what_bends_the_other_way_contradicts_no_constant(tmp_path) -> None:
    """A margin that is concave in every neuron needs a curvature constant of 0, however much it bends."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 8, bias=False), nn.Linear(8, 2)).double()
    with torch.no_grad():
        model[2].weight.copy_(torch.ones(8, 8).tril())
        model[3].weight.copy_(torch.tensor([[0.1], [-0.2]]) * (1 + torch.rand(1, 8)))
        model[3].bias.copy_(torch.tensor([-9.0, 9.0]))
    x = torch.randn(4, 6, dtype=torch.float64) / 8
    model.eval()
    for y in (0, 1):
        labels = torch.full((4,), y)
        with torch.no_grad():
            model[3].bias.neg_()
        net = curvcert.trace(model, x)
        assert bool((net(x).argmax(1) == labels).all())
        certificate = curvcert.certify(net, x, labels, method="checkable")
        certificate.save(tmp_path / "c.safetensors")
        network = save_network(net, tmp_path / "n")
        found = checker.check_certificate(tmp_path / "c.safetensors", network, x.numpy(), labels.numpy())
        assert set(found.status) == {"proven"}, found.reasons[0]


class Wave(nn.Module):
    """An activation that curvcert does not know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(x)


class Bent(Wave):
    """The same, declared with more than its slopes."""


class Sine(nn.Module):
    """An activation that it knows by another name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x)


@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
def test_a_declared_activation_is_believed_and_said_to_be(tmp_path, p: float) -> None:
    declared = declare_activation("wave", torch.cos, lambda z: -torch.sin(z), (-1.0, 1.0))
    register_activation(Wave, declared)
    files = saved(tmp_path, shallow(Wave), n=3, p=p, method="lipschitz")
    found = verdict(files)
    assert set(found.status) == {"cannot check"} and "the formula of the declared" in found.reasons[0]
    found = verdict(files, declared={"wave": Declared(np.cos, (-1.0, 1.0))})
    assert found.holds, str(found)
    assert any("activation 'wave': slope in [-1, 1]" in line and "stated" in line for line in found.given)
    assert not verdict(files, declared={"wave": Declared(np.cos, (-2.0, 2.0))}).holds
    assert verdict(files, declared={"wave": Declared(np.sin, (-1.0, 1.0))}).refused


def _slopes(lower: torch.Tensor, upper: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-sin over a range, by its middle: it changes by no more than its argument."""
    middle, half = -torch.sin(0.5 * (lower + upper)), 0.5 * (upper - lower)
    return (middle - half).clamp(min=-1.0), (middle + half).clamp(max=1.0)


@pytest.mark.parametrize(
    "method", ["checkable", "auto", "anchored-lipschitz", "compositional", "anchored", "shell", "line"]
)
def test_what_a_declaration_says_beyond_slopes_cannot_be_checked_and_is_not_refused(tmp_path, method: str) -> None:
    """Only slopes are taken as declared; a certificate that rests on more is not false for that."""
    wave = declare_activation(
        "wave", torch.cos, lambda z: -torch.sin(z), (-1.0, 1.0), (-1.0, 1.0), derivative_range=_slopes
    )
    register_activation(Bent, wave)
    files = saved(tmp_path, shallow(Bent), n=3, method=method)
    found = verdict(files, declared={"wave": Declared(np.cos, (-1.0, 1.0))})
    assert not found.refused, str(found)
    assert found.holds or method != "checkable", str(found)


def test_a_module_that_is_said_to_compute_a_known_activation_is_checked_by_that(tmp_path) -> None:
    register_activation(Sine, ACTIVATIONS["sin"])
    found = verdict(saved(tmp_path, shallow(Sine), n=3))
    assert found.holds, str(found)
    assert any("computes activation 'sin' as registered" in line for line in found.given)
