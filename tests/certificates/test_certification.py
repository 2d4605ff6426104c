"""certify: no radius exceeds an adversarial distance; every witness replays; bad input is answered clearly."""

import math
import warnings
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from curvcert.activations import TANH
from curvcert.attacks import Attack, pgd
from curvcert.bounds.curvature import Compositional, curvature
from curvcert.certificates import Certificate, attack_radius, certify, with_search
from curvcert.certificates.attack_radius import replays
from curvcert.certificates.methods.balls import PRECISION
from curvcert.errors import InvalidInput, SoundnessError, UnsupportedActivation
from curvcert.network import Affine, Block, Network, trace
from curvcert.network.evaluation import Computed
from curvcert.network.sweeps import AbstractForward
from curvcert.nn import CentredSoftplus
from curvcert.norms import vector_norm
from curvcert.operators import Dense, Identity, Zero
from curvcert.propagation.analysis import AbstractAnalysis
from curvcert.reporting import draw_accuracy, draw_witnesses
from tests.certificates.cases import blobs, digits, digits_network, planar
from tests.sampling import crossed

pytestmark = pytest.mark.slow

NORMS = [1.0, 2.0, math.inf]
METHODS = ["auto", "lipschitz", "anchored", "product", "liplt", "compositional", "unrolled"]


@pytest.mark.parametrize(("p", "activation"), crossed(NORMS, [nn.Tanh, nn.Softplus, nn.GELU, nn.Softsign, nn.ELU]))
def test_no_radius_exceeds_an_adversarial_distance(p: float, activation: type[nn.Module]) -> None:
    network = planar(activation)
    x, y = blobs(seed=1)
    cert = certify(network, x, y, p=p)
    ball = (0.999 * cert.radius).clamp(max=1e3)
    attack = pgd(network, x.double(), y, ball, p=p, steps=40, restarts=3)
    assert not bool((attack.broken & cert.correct).any())
    assert bool((cert.radius <= cert.attack_radius).all())
    assert bool((cert.radius[cert.correct] > 0).all())


@cache
def of_digits(n: int, p: float = 2.0) -> Certificate:
    return certify(digits_network()[0], *digits(n), p=p)


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_sound_and_auto_is_the_best(p: float, method: str) -> None:
    network, _ = digits_network()
    x, y = digits(12)
    best = of_digits(12, p)
    cert = best if method == "auto" else certify(network, x, y, p=p, method=method)
    attack = pgd(network, x, y, 0.999 * cert.radius, p=p, steps=30, restarts=2)
    assert not bool((attack.broken & cert.correct).any())
    assert bool((cert.radius <= best.radius * (1 + 1e-9)).all())
    assert len(cert.method) == 12


def test_the_interval_closes_in_one_dimension() -> None:
    """f_0 - f_1 = 2 tanh(x): the boundary is at 0, so the true radius is |x|."""
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Tanh()).eval()
    nn.init.constant_(model[0].weight[0], 1.0)
    nn.init.constant_(model[0].weight[1], -1.0)
    x = torch.tensor([[0.01], [-0.02], [0.3]])
    cert = certify(trace(model, x[:1]), x)
    assert bool((cert.radius <= x.abs().double().flatten()).all())
    assert bool((cert.radius[:2] >= 0.98 * x[:2].abs().double().flatten()).all())
    assert bool((cert.attack_radius[:2] >= x[:2].abs().double().flatten()).all())
    assert bool((cert.attack_radius[:2] <= 1.05 * x[:2].abs().double().flatten()).all())


@cache
def of_many_blobs(box: tuple[float, float] | None = None) -> tuple[Certificate, torch.Tensor]:
    x = blobs(400, seed=3)[0].double()
    return certify(planar(), x, box=box), x


class TestWitnesses:
    def test_there_are_some_and_all_of_them_replay(self) -> None:
        cert, _ = of_many_blobs()
        found = cert.attack_radius.isfinite() & cert.correct
        assert int(found.sum()) >= 1
        assert bool(replays(planar(), cert.witness[found], cert.label[found]).all())
        assert bool(cert.witness[~found & cert.correct].isnan().all())

    def test_the_attack_radius_is_their_distance(self) -> None:
        cert, x = of_many_blobs()
        found = cert.attack_radius.isfinite() & cert.correct
        distance = vector_norm((cert.witness - x)[found], 2, dim=1)
        torch.testing.assert_close(cert.attack_radius[found], distance, rtol=1e-12, atol=0)

    def test_a_box_keeps_them_inside(self) -> None:
        cert, _ = of_many_blobs(box=(0.0, 1.0))
        found = cert.attack_radius.isfinite() & cert.correct
        assert bool(((cert.witness[found] >= 0) & (cert.witness[found] <= 1)).all())
        free, _ = of_many_blobs()
        torch.testing.assert_close(cert.radius, free.radius, rtol=0, atol=0)  # the box limits witnesses only

    def test_they_replay_in_the_models_own_arithmetic(self) -> None:
        network, model = digits_network()
        x, _ = digits(360)
        cert = certify(network, x)
        found = cert.attack_radius.isfinite() & cert.correct
        if bool(found.any()):
            with torch.no_grad():
                classes = model(cert.witness[found].float()).argmax(dim=1)
            assert bool((classes != cert.label[found]).all())

    def test_they_replay_where_the_arithmetic_rounds_otherwise(self) -> None:
        """The same network with its inputs and neurons in another order: what only rounding misclassifies falls."""
        torch.manual_seed(0)
        first, last = nn.Linear(200, 300), nn.Linear(300, 4)
        model = nn.Sequential(first, nn.Tanh(), last).eval()
        x = torch.rand(400, 200)
        cert = certify(trace(model, x[:1]), x, method="compositional")
        found = cert.attack_radius.isfinite() & cert.correct
        assert int(found.sum()) >= 300
        witnesses = cert.witness[found].float()
        for _ in range(20):
            inputs, neurons = torch.randperm(200), torch.randperm(300)
            with torch.no_grad():
                hidden = nn.functional.linear(
                    witnesses[:, inputs], first.weight[neurons][:, inputs], first.bias[neurons]
                )
                logits = nn.functional.linear(hidden.tanh(), last.weight[:, neurons], last.bias)
            assert bool((logits.argmax(dim=1) != cert.label[found]).all())


class TestSummaries:
    def test_fractions_are_of_all_samples(self) -> None:
        network, _ = digits_network()
        x, y = digits()
        wrong = (y + 1) % 10
        cert = certify(network, torch.cat([x, x]), torch.cat([y, wrong]))
        assert cert.certified_accuracy(0.0) <= 0.5 + 1e-9
        eps = float(cert.radius.max())
        assert 0 < cert.certified_accuracy(eps) < cert.certified_accuracy(0.0)
        assert math.isclose(cert.gap(eps), cert.attacked_accuracy(eps) - cert.certified_accuracy(eps))
        assert cert.interval().shape == (80, 2)
        assert "samples" in repr(cert)
        assert "<table>" in cert._repr_html_()

    def test_misclassified_samples_are_stated_not_dropped(self) -> None:
        network, _ = digits_network()
        x, y = digits(5)
        cert = certify(network, x, (y + 1) % 10)
        assert len(cert) == 5
        assert not bool(cert.correct.any())
        assert float(cert.radius.max()) == 0.0
        assert float(cert.attack_radius.max()) == 0.0
        assert set(cert.method) == {"misclassified"}

    def test_the_comparison_of_the_paper_is_exposed(self) -> None:
        network, _ = digits_network()
        x, _ = digits()
        cert = certify(network, x)
        wins = cert.curvature_wins
        zeroth = cert.lipschitz_radius.fmax(cert.radii.get("anchored-lipschitz", cert.lipschitz_radius))
        assert bool((cert.curvature_radius[wins] >= zeroth[wins] * (1 - 1e-9)).all())
        assert bool((cert.comparison_known == cert.correct).all())

    @pytest.mark.parametrize("method", ["lipschitz", "anchored-lipschitz", "unrolled", "anchored"])
    def test_nothing_is_compared_where_only_one_side_is_known(self, method: str) -> None:
        network, _ = digits_network()
        cert = certify(network, digits(5)[0], method=method)
        assert not bool((cert.comparison_known | cert.curvature_wins).any())


class TestBatches:
    def test_the_batch_size_does_not_matter(self) -> None:
        network, _ = digits_network()
        x, y = digits(10)
        whole, parts = of_digits(10), certify(network, x, y, batch_size=3)
        torch.testing.assert_close(whole.radius, parts.radius, rtol=1e-9, atol=1e-12)
        assert whole.method == parts.method

    def test_a_data_loader(self) -> None:
        network, _ = digits_network()
        x, y = digits(10)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)
        torch.testing.assert_close(certify(network, loader).radius, of_digits(10).radius, rtol=1e-9, atol=1e-12)

    def test_running_out_of_memory_halves_the_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from curvcert.certificates import certification

        network, _ = digits_network()
        x, y = digits(8)
        expected = certify(network, x, y, method="unrolled").radius
        original, sizes = certification._certify_batch, []

        def limited(request: object, part: torch.Tensor, *others: object) -> Certificate:
            sizes.append(len(part))
            if len(part) > 2:
                raise MemoryError
            return original(request, part, *others)

        monkeypatch.setattr(certification, "_certify_batch", limited)
        torch.testing.assert_close(certify(network, x, y, method="unrolled").radius, expected, rtol=1e-9, atol=1e-12)
        assert sizes[0] == 8
        assert sizes.count(2) == 4

    def test_radii_to_decide_spare_the_expensive_bounds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from curvcert.certificates.methods import anchored

        network, _ = digits_network()
        x, y = digits(20)
        full = certify(network, x, y)
        seen = []
        original = anchored._anchored_constants
        monkeypatch.setattr(
            anchored, "_anchored_constants", lambda *args: seen.append(int(args[-1].sum())) or original(*args)
        )
        eps = 1e-6
        decided = certify(network, x, y, epsilons=[eps])
        assert sum(seen) == 0
        assert decided.certified_accuracy(eps) == full.certified_accuracy(eps)
        for eps in (0.05, 0.1, 0.2):
            decided = certify(network, x, y, epsilons=[eps])
            assert decided.certified_accuracy(eps) == full.certified_accuracy(eps)


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"y": torch.tensor([99])}, "Labels lie in"),
            ({"y": torch.tensor([-1])}, "Labels lie in"),
            ({"y": torch.tensor([0.5])}, "whole number"),
            ({"y": torch.tensor([0, 1])}, "whole number"),
            ({"x": torch.zeros(1, 3)}, "Expected a batch"),
            ({"x": torch.full((1, 1, 8, 8), math.nan)}, "NaN"),
            ({"x": torch.zeros(0, 1, 8, 8)}, "empty"),
            ({"x": torch.zeros(1, 1, 8, 8, dtype=torch.int64)}, "floating-point"),
            ({"x": torch.full((1, 1, 8, 8), -0.5), "box": (0, 1)}, "does not contain x"),
            ({"box": (1, 0)}, "lowest"),
            ({"p": 0.5}, "1 <= p"),
            ({"method": "magic"}, "Unknown method"),
            ({"method": "crc", "p": 1}, "does not apply"),
            ({"epsilons": [-1.0]}, "positive"),
            ({"network": "model.pt"}, "expects a Network, got str"),
            ({"x": "inputs.npy"}, "x is a tensor, an array, a data set or an iterable of batches, got str"),
            ({"x": 0.5}, "got float"),
            ({"x": np.array([["a"]])}, "array of real numbers, got <U1"),
        ],
    )
    def test_is_answered_clearly(self, arguments: dict[str, object], message: str) -> None:
        network, _ = digits_network()
        full = {"network": network, "x": torch.full((1, 1, 8, 8), 0.5), **arguments}
        with pytest.raises(InvalidInput, match=message):
            certify(**full)  # type: ignore[arg-type]

    def test_one_class(self) -> None:
        model = nn.Sequential(nn.Linear(2, 1), nn.Tanh()).eval()
        with pytest.raises(InvalidInput, match="two classes"):
            certify(trace(model, torch.zeros(1, 2)), torch.zeros(1, 2))

    def test_bytes_where_the_box_is_the_unit_interval(self) -> None:
        network, _ = digits_network()
        with pytest.warns(UserWarning, match="Divide them by 255"):
            certify(network, torch.full((1, 1, 8, 8), 200.0), box=(0, 1))

    def test_a_kinked_network_has_lipschitz_certificates_only(self) -> None:
        network = planar(nn.ReLU)
        x, y = blobs(10)
        cert = certify(network, x, y)
        assert bool(cert.curvature_radius.isnan().all())
        assert any("curvature skipped" in note for note in cert.notes)
        with pytest.raises(UnsupportedActivation):
            certify(network, x, y, method="unrolled")

    @pytest.mark.parametrize(("activation", "method"), [(nn.ReLU, "auto"), (nn.Tanh, "lipschitz")])
    def test_no_gradient_is_computed_for_lipschitz_certificates(self, activation, method, monkeypatch) -> None:
        network = planar(activation)
        x, y = blobs(10)
        before = certify(network, x, y, method=method)
        monkeypatch.setattr(AbstractAnalysis, "covectors", _refuse)
        assert torch.equal(certify(network, x, y, method=method).radius, before.radius)
        with pytest.raises(AssertionError, match="a gradient was computed"):
            certify(planar(nn.Tanh), x, y)

    @pytest.mark.parametrize("method", ["auto", "lipschitz", "anchored", "shell", "line", "linear"])
    def test_every_point_is_evaluated_once(self, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
        network = planar(nn.Tanh)
        x, y = blobs(10)
        sweep, looks = AbstractForward.sweep, []

        def counted(domain, nodes, start, known=()):
            if isinstance(start, Computed) and not known:
                looks.append((start.value[:, None] == x[None]).all(dim=2).any(dim=0))
            return sweep(domain, nodes, start, known)

        monkeypatch.setattr(AbstractForward, "sweep", counted)
        certify(network, x, y, method=method, batch_size=5)
        assert bool((torch.stack(looks).sum(dim=0) == 1).all())

    def test_nothing_is_printed_or_warned_without_reason(self) -> None:
        network, _ = digits_network()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            certify(network, torch.full((1, 1, 8, 8), 0.5), box=(0, 1))


def _refuse(*arguments: object) -> None:
    raise AssertionError("a gradient was computed")


def test_the_jump_of_torchs_softplus_is_charged_to_the_margin() -> None:
    """Beyond its threshold torch's Softplus is x, not log(1 + e^x): a threshold of 16 makes the difference visible."""
    torch.manual_seed(0)
    smooth = nn.Sequential(nn.Linear(2, 8), nn.Softplus(), nn.Linear(8, 3)).eval()
    jumping = nn.Sequential(smooth[0], nn.Softplus(threshold=16.0), smooth[2]).eval()
    x = torch.rand(6, 2)
    exact = nn.Sequential(smooth[0], CentredSoftplus(), smooth[2]).eval()
    margins = [certify(trace(model, x[:1]), x).margin for model in (exact, smooth, jumping)]
    lost = margins[1] - margins[2]
    assert bool((lost > 1e-8).all())  # log1p(exp(-16)) is 1.1e-7 a neuron
    assert bool((lost < 1e-4).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_witness_takes_no_step_that_the_arithmetic_of_its_model_cannot_see(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.Tanh()).to(dtype).eval()
    nn.init.zeros_(model[0].bias)
    model[0].weight.data.copy_(torch.tensor([[1.0], [-1.0]]))
    x, distances = torch.tensor([[0.01], [-0.02]], dtype=torch.float64), []

    def never(_: Network, points: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        distances.append((points - x).abs().flatten())
        return torch.zeros_like(label, dtype=torch.bool)

    monkeypatch.setattr(attack_radius, "_clearly_misclassified", never)
    cert = certify(trace(model, x[:1].to(dtype)), x, method="compositional")
    steps = torch.stack(distances) / distances[0] - 1
    assert float(steps[1].min()) > torch.finfo(dtype).eps
    assert len(steps) == {torch.float32: 6, torch.float64: 9}[dtype]
    assert bool(cert.attack_radius.isinf().all())


def test_there_are_at_least_as_many_witnesses_as_the_papers_formula_gives() -> None:
    """The paper's K for a pair, sqrt(2) times its recursion for the vector, with exact norms; no box."""
    network, (cert, x) = planar(), of_many_blobs()
    K = 2**0.5 * float(curvature(network, method=Compositional(["sdp"])))
    logits, jacobian = network(x), network.jacobian(x)
    own, rows = logits.gather(1, cert.label[:, None]), jacobian[torch.arange(len(x)), cert.label]
    margin, g = own - logits, vector_norm((jacobian - rows[:, None]).flatten(2), 2, dim=2)
    papers = ((2 * K * margin < g.square()) & (margin > 0)).any(dim=1)
    assert int(papers.sum()) >= 1
    assert int((cert.attack_radius.isfinite() & cert.correct).sum()) >= int(papers.sum())


class TestSearch:
    def test_is_merged_and_told_apart(self) -> None:
        network, _ = digits_network()
        x, y = digits(30)
        cert = of_digits(30)
        attack = pgd(network, x, y, 0.4, steps=30, restarts=1)
        merged = with_search(cert, network, x, attack)
        assert bool(attack.broken.any())
        assert torch.equal(merged.attack_radius, cert.attack_radius)
        assert bool((merged.search_radius[attack.broken & cert.correct] <= 0.4 * (1 + 1e-12)).all())
        assert bool((merged.interval()[:, 0] <= merged.interval()[:, 1]).all())
        assert merged.certified_accuracy(0.4) <= merged.searched_accuracy(0.4) <= merged.attacked_accuracy(0.4)

    def test_what_does_not_replay_does_not_count(self) -> None:
        network, _ = digits_network()
        x, _ = digits(5)
        cert = of_digits(5)
        liar = Attack(torch.ones(5, dtype=torch.bool), x + 1e-9)
        assert bool(with_search(cert, network, x, liar).search_radius[cert.correct].isinf().all())

    def test_a_refuted_certificate_raises(self) -> None:
        network, _ = digits_network()
        x, y = digits(30)
        cert = of_digits(30)
        attack = pgd(network, x, y, 0.4, steps=30, restarts=1)
        with pytest.raises(SoundnessError, match="inside a certified ball"):
            with_search(replace(cert, radius=cert.radius + 1.0), network, x, attack)

    def test_sizes_must_agree(self) -> None:
        network, _ = digits_network()
        x, y = digits(5)
        with pytest.raises(InvalidInput, match="samples"):
            with_search(certify(network, x, y), network, x[:3], pgd(network, x[:3], y[:3], 0.1, steps=2, restarts=1))


def test_pictures_are_drawn(tmp_path: Path) -> None:
    network, _ = digits_network()
    x, y = digits(360)
    cert = certify(network, x, y, method="unrolled")
    draw_accuracy(cert, tmp_path / "accuracy.png", [0.0, 0.1, 0.2])
    assert (tmp_path / "accuracy.png").stat().st_size > 1000
    if bool((cert.attack_radius.isfinite() & cert.correct).any()):
        draw_witnesses(cert, network, x, tmp_path / "witnesses.png")
        assert (tmp_path / "witnesses.png").stat().st_size > 1000
    none = replace(cert, attack_radius=torch.full_like(cert.attack_radius, math.inf))
    with pytest.raises(InvalidInput, match="no witness"):
        draw_witnesses(none, network, x, tmp_path / "nothing.png")


def step_at_zero(steepness: float, size: float) -> Network:
    """Two classes that meet near 0: size (tanh(steepness x) - 1/2) against 0."""
    W, b = torch.full((1, 1), steepness, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    out, c = torch.tensor([[0.0], [size]], dtype=torch.float64), torch.tensor([0.0, -size / 2], dtype=torch.float64)
    first = Block(Zero((1,), (1,)), Identity((1,)), Dense(W), b, b, TANH)
    return Network.of_blocks((first, Affine(Dense(out), c)))


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("method", ["auto", "local", "anchored", "unrolled"])
@pytest.mark.parametrize(("steepness", "size"), [(1e308, 1.0), (1e308, 1e-100), (1e200, 1e200), (1.0, 1e-170)])
def test_gradients_out_of_range_certify_nothing_beyond_the_truth(
    p: float, method: str, steepness: float, size: float
) -> None:
    try:
        cert = certify(step_at_zero(steepness, size), torch.zeros(1, 1), p=p, method=method, epsilons=[0.1])
    except InvalidInput:
        return
    assert float(cert.radius) <= math.atanh(0.5) / steepness


@pytest.mark.parametrize(
    ("method", "p"),
    [("compositional", 2), ("unrolled", 2), ("anchored", 2), ("lipschitz", 2), ("local", math.inf), ("auto", math.inf)],
)
def test_radii_do_not_depend_on_the_scale_of_the_outputs(method: str, p: float) -> None:
    network, (x, y) = planar(), blobs(12)
    last = network.blocks[-1]
    assert isinstance(last, Block) and isinstance(last.G, Dense)
    at_one = certify(network, x, y, p=p, method=method)
    for scale in (2.0**-545, 2.0**-900):
        small = replace(last, G=Dense(scale * last.G.weight), c=scale * last.c)
        cert = certify(Network.of_blocks((*network.blocks[:-1], small)), x, y, p=p, method=method)
        assert bool((cert.radius <= at_one.radius * (1 + 2 * PRECISION)).all())
        assert bool((cert.radius >= 0.3 * at_one.radius).all())


def test_a_search_belongs_to_the_network_and_the_inputs_that_were_certified() -> None:
    network, (x, y) = planar(), blobs(6)
    cert = certify(network, x, y, method="lipschitz")
    attack = pgd(network, x, y, 1.0, steps=5, restarts=1)
    with_search(cert, network, x, attack)
    with pytest.raises(InvalidInput, match="x is not what was certified: 6 of 6 samples differ"):
        with_search(cert, network, x + 0.1, attack)
    last = network.blocks[-1]
    assert isinstance(last, Block)
    other = Network.of_blocks((*network.blocks[:-1], replace(last, c=last.c.flip(0))))
    with pytest.raises(InvalidInput, match="not the one that was certified"):
        with_search(cert, other, x, attack)


def test_outputs_that_are_no_classes_are_refused() -> None:
    maps = trace(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh()).eval(), torch.zeros(1, 1, 8, 8))
    with pytest.raises(InvalidInput, match=r"one logit per class, got outputs of shape \(2, 6, 6\)"):
        certify(maps, torch.zeros(1, 1, 8, 8))
    pooled = trace(nn.Sequential(nn.Conv2d(1, 2, 8), nn.Tanh()).eval(), torch.zeros(1, 1, 8, 8))
    assert len(certify(pooled, torch.zeros(1, 1, 8, 8), method="product")) == 1


def test_arrays_are_taken_as_tensors_are() -> None:
    network, (x, y) = planar(), blobs(6)
    assert torch.equal(certify(network, x.numpy(), y.numpy()).radius, certify(network, x, y).radius)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh()).eval()
    traced = trace(model, np.zeros((1, 2)))
    assert torch.equal(traced(x), trace(model, torch.zeros(1, 2))(x))
    assert torch.equal(traced(x.numpy()), traced(x))


def test_what_is_no_batch_is_told() -> None:
    network, (x, y) = planar(), blobs(6)
    with pytest.raises(InvalidInput, match="batch_size must be at least 1, got 0"):
        certify(network, x, y, batch_size=0)
    with pytest.raises(InvalidInput, match="The example input is a tensor, got list"):
        trace(nn.Linear(2, 2).eval(), [[0.0, 0.0]])  # type: ignore[arg-type]


def test_a_witness_is_no_farther_than_its_radius_in_many_dimensions() -> None:
    model = nn.Sequential(nn.Linear(3000, 2, bias=False), nn.Tanh()).double().eval()
    linear = model[0]
    assert isinstance(linear, nn.Linear)
    linear.weight.data = torch.stack([torch.rand(3000, dtype=torch.float64), torch.zeros(3000, dtype=torch.float64)])
    network = trace(model, torch.zeros(1, 3000, dtype=torch.float64))
    x = 1e-4 * torch.rand(40, 3000, dtype=torch.float64)
    cert = certify(network, x, method="unrolled")
    found = cert.attack_radius.isfinite()
    assert int(found.sum()) > 20
    for point, place, radius in zip(x[found], cert.witness[found], cert.attack_radius[found].tolist(), strict=True):
        squares = sum((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(place.tolist(), point.tolist(), strict=True))
        assert squares <= Fraction(radius) ** 2


@pytest.mark.parametrize("side", [1.0, -1.0], ids=["above", "below"])
def test_a_witness_that_would_leave_the_box_is_brought_inside(side: float) -> None:
    x = blobs(400, seed=3)[0].double()
    free = certify(planar(), x, method="unrolled").witness
    beyond = ((side * free).amax(dim=1) - (side * x).amax(dim=1)).nan_to_num(nan=-1.0)
    k = int(beyond.argmax())
    edge = side * float((side * torch.stack([x[k], free[k]])).amax(dim=1).mean())
    box = (-1.0, edge) if side > 0 else (edge, 2.0)
    assert float(beyond[k]) > 1e-6 and not box[0] <= float(side * (side * free[k]).amax()) <= box[1]
    inside = certify(planar(), x[k : k + 1], method="unrolled", box=box).witness
    assert not bool(((inside < box[0]) | (inside > box[1])).any())
