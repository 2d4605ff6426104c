"""The local certificate: no gradient moves further than it says, no margin is lost within its radius."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.shell_search import KINDS, SMOOTH, Bounded
from curvcert.activations import ACTIVATIONS, TANH, Activation, softplus
from curvcert.attacks import pgd
from curvcert.certificates import certifier, certify
from curvcert.certificates.methods.shell import shared_layers
from curvcert.certificates.shell import Layers, ball, centre, shells
from curvcert.certificates.shell.gradient_change import GradientChange
from curvcert.network import Block, Network
from curvcert.operators import Dense, Identity, Zero
from tests.bounds.cases import feed_forward, linear
from tests.bounds.curvature.cases import residual_conv, strided
from tests.sampling import crossed

F64 = torch.float64
T = torch.tensor([0.02, 0.3, 1.5], dtype=F64)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_holds(bounded: Bounded) -> None:
    found = bounded.found(steps=10)
    for layers in bounded.variants():
        for change in (bounded.change(layers), bounded.change_one_by_one(layers)):
            assert bool((found <= change.saturated).all())
            assert bool((change.saturated <= change.linear * (1 + 1e-9)).all())


class TestGradientChange:
    @pytest.mark.slow
    @pytest.mark.parametrize(("kind", "name"), crossed(KINDS, SMOOTH))
    def test_none_is_found_beyond_the_bound(self, kind: str, name: str) -> None:
        generator = seeded(len(name) + 17 * len(kind))
        network = KINDS[kind](SMOOTH[name], generator)
        x = torch.randn(3, *network.in_shape, dtype=F64, generator=generator)
        assert_holds(Bounded.at(network, x, T))

    @pytest.mark.parametrize("p", [1.0, 1.5, 3.0, math.inf])
    @pytest.mark.parametrize("kind", KINDS)
    def test_in_other_norms(self, kind: str, p: float) -> None:
        generator = seeded(int(3 * min(p, 9.0)) + len(kind))
        network = KINDS[kind](ACTIVATIONS["gelu"], generator)
        x = torch.randn(3, *network.in_shape, dtype=F64, generator=generator)
        assert_holds(Bounded.at(network, x, T, p))

    @pytest.mark.parametrize("make", [residual_conv, lambda: strided(1, 2, 2), lambda: strided(2, 1, 1)])
    def test_through_residual_strided_dilated_and_grouped_convolutions(self, make: Callable[[], Network]) -> None:
        network = make()
        assert_holds(Bounded.at(network, torch.randn(3, *network.in_shape, dtype=F64), T))

    def test_is_nearly_attained_in_small_balls(self) -> None:
        bounded = Bounded.at(feed_forward((5, 8, 3), TANH), torch.randn(3, 5, dtype=F64), 0 * T + 1e-4)
        ratio = bounded.found(steps=25) / bounded.change().saturated
        assert float(ratio.amax()) > 0.9

    def test_its_linear_side_grows_at_least_linearly(self) -> None:
        x = torch.randn(1, 4, dtype=F64).expand(12, -1)
        t = torch.logspace(-4, 1, 12, dtype=F64)
        change = Bounded.at(KINDS["dense"](TANH, seeded(0)), x, t).change()
        slope = change.linear / t[:, None]
        assert bool((slope[1:] >= slope[:-1] * (1 - 1e-9)).all())

    def test_there_is_none_in_a_linear_network(self) -> None:
        network, x = linear(3, 4), torch.randn(5, 4, dtype=F64)
        change = Bounded.at(network, x, T.repeat(2)[:5]).change()
        assert float(change.linear.amax()) < 1e-200
        cert = certify(network, x, method="local")
        torch.testing.assert_close(cert.radius, certify(network, x, method="lipschitz").radius, rtol=1e-9, atol=0)


class TestRadii:
    @pytest.mark.slow
    @pytest.mark.parametrize(("kind", "name"), crossed(KINDS, SMOOTH))
    def test_no_margin_is_lost_within_them(self, kind: str, name: str) -> None:
        generator = seeded(5 * len(name) + len(kind))
        network = KINDS[kind](SMOOTH[name], generator)
        x = torch.randn(5, *network.in_shape, dtype=F64, generator=generator)
        for p in (2.0, math.inf) if name == "tanh" else (2.0,):
            cert = certify(network, x, p=p, method="local")
            assert bool((cert.radius[cert.correct] > 0).all())
            attack = pgd(network, x, cert.label, 0.999 * cert.radius, p=p, steps=12, restarts=1)
            assert not bool((attack.broken & cert.correct).any())

    def test_without_jacobians_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        network = KINDS["dense"](TANH, seeded(1))
        x = torch.randn(20, 4, dtype=F64)
        full = certify(network, x, method="local")
        at_most(monkeypatch, 1, 1)
        bare = certify(network, x, method="local")
        assert bool((bare.radius <= full.radius * (1 + 1e-9)).all())
        assert not bool(pgd(network, x, bare.label, 0.999 * bare.radius, steps=20, restarts=2).broken.any())

    def test_do_not_depend_on_how_the_samples_are_cut(self, monkeypatch: pytest.MonkeyPatch) -> None:
        network = KINDS["dense"](TANH, seeded(2))
        x = torch.randn(9, 4, dtype=F64)
        ready = certifier(network, method="local")
        whole, layers = ready(x).radius, shared_layers(ready.question)
        monkeypatch.setattr(shells, "_CHUNK_ELEMENTS", 4 * shells.numbers_of_sample(layers))
        torch.testing.assert_close(ready(x).radius, whole, rtol=1e-9, atol=0)


def one_dimensional(seed: int, activation: Activation, depth: int = 3) -> Network:
    """Width 1 throughout, so that every norm is exact, and two outputs, f and 0."""
    generator, blocks = seeded(seed), []
    for _ in range(depth):
        W = Dense(2.5 * torch.randn(1, 1, dtype=F64, generator=generator))
        b, c = torch.randn(1, dtype=F64, generator=generator), torch.zeros(1, dtype=F64)
        blocks.append(Block(Zero((1,), (1,)), Identity((1,)), W, b, c, activation, "one"))
    last = blocks[-1].read_out(Dense(torch.tensor([[1.0], [0.0]], dtype=F64)))
    return Network.of_blocks((*blocks[:-1], last))


def violations(activation: Activation = TANH, networks: int = 8, points: int = 24, start: int | None = 0) -> int:
    """Count the balls in which a grid finds a gradient beyond the bound, over one-dimensional networks.

    Jacobians are formed from the block `start` on.
    """
    total, grid = 0, torch.linspace(-1, 1, 201, dtype=F64)
    for seed in range(networks):
        network = one_dimensional(seed, activation)
        x = torch.randn(points, 1, dtype=F64, generator=seeded(seed))
        t = torch.logspace(-2.5, 0.7, points, dtype=F64)
        bounded = Bounded.at(network, x, t)
        inputs = (x + t[:, None] * grid).reshape(-1, 1)
        slopes = network.jacobian(inputs).reshape(points, -1, 2)[:, :, 0]
        moved = (slopes - network.jacobian(x).reshape(points, 2)[:, :1]).abs().amax(dim=1)
        change = bounded.change(replace(bounded.layers, jacobians_from=start))
        total += int((moved - 1e-12 > change.saturated[:, 0]).sum())
    return total


class TestFront:
    """What stands for the Jacobian behind blocks whose own are not formed."""

    @pytest.mark.slow
    @pytest.mark.parametrize("name", SMOOTH)
    @pytest.mark.parametrize("kind", ["dense", "nearly linear"])
    def test_the_jacobian_is_as_close_as_it_says(self, kind: str, name: str) -> None:
        network = KINDS[kind](SMOOTH[name], seeded(len(name)))
        x = torch.randn(4, *network.in_shape, dtype=F64, generator=seeded(1))
        bounded = Bounded.at(network, x, torch.full((4,), 0.1, dtype=F64))
        for start in range(1, len(network.blocks)):
            layers = replace(bounded.layers, jacobians_from=start)
            at = bounded.centres(layers, bounded.others)[start]
            assert at.jacobian is not None
            product = torch.eye(*network.in_shape, dtype=F64)
            for block in network.blocks[: start + 1]:
                assert isinstance(block, Block)
                product = block.W.as_matrix() @ product
            true = true_jacobians(network, x, start)
            off = torch.linalg.matrix_norm(true - at.jacobian.scale[:, None, None] * product, 2)
            flipped = torch.linalg.matrix_norm(true + at.jacobian.scale[:, None, None] * product, 2)
            assert bool((torch.minimum(off, flipped) <= at.jacobian.error * (1 + 1e-12) + 1e-14).all())
            assert bool((torch.linalg.matrix_norm(true, 2) <= at.jacobian.norm).all())
            assert bool((true.norm(dim=2) <= at.jacobian.rows).all())
            weights = torch.rand(4, 2, true.shape[1], dtype=F64, generator=seeded(2))
            exact = torch.linalg.matrix_norm(weights.sqrt()[..., None] * true[:, None], 2)
            assert bool((exact <= at.jacobian.weighted(weights)).all())

    @pytest.mark.parametrize("name", SMOOTH)
    def test_weighted_by_the_matrix_itself(self, name: str) -> None:
        network = KINDS["nearly linear"](SMOOTH[name], seeded(len(name)))
        x = torch.randn(4, *network.in_shape, dtype=F64, generator=seeded(3))
        bounded = Bounded.at(network, x, torch.full((4,), 0.1, dtype=F64))
        centres = bounded.centres(replace(bounded.layers, jacobians_from=1), bounded.others[:, :1])
        for k, at in list(enumerate(centres))[2:]:
            assert at.jacobian is not None
            assert at.jacobian.matrix is not None
            weights = torch.rand(4, at.jacobian.rows.shape[1], dtype=F64, generator=seeded(k))
            exact = torch.linalg.matrix_norm(weights.sqrt()[..., None] * true_jacobians(network, x, k), 2)
            unknown = torch.full_like(at.jacobian.norm, torch.inf)
            found = at.jacobian.sharpened(unknown, weights)
            assert bool((exact <= found).all())
            index = torch.tensor([2, 0])
            fewer = at.jacobian.of_samples(index).sharpened(unknown[index], weights[index])
            torch.testing.assert_close(fewer, found[index])

    def test_starts_at_the_first_block_that_fits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        network = KINDS["nearly linear"](TANH, seeded(0))
        starts = []
        for size, behind in ((10_000, 1), (45, 45), (44, 44), (42, 42), (41, 41), (1, 10_000), (1, 44)):
            at_most(monkeypatch, size, behind)
            starts.append(Bounded.at(network, torch.zeros(1, 5, dtype=F64), T[:1]).layers.jacobians_from)
        assert starts == [0, 0, 2, 2, None, 1, 2]

    def test_is_not_formed_where_its_squares_would_overflow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        at_most(monkeypatch, 44, 44)
        network = KINDS["nearly linear"](TANH, seeded(0))
        first, *rest = network.blocks
        assert isinstance(first, Block)
        x = torch.zeros(1, 5, dtype=F64)
        assert Bounded.at(network, x, T[:1]).layers.jacobians_from == 2
        huge = Network.of_blocks((replace(first, W=1e101 * first.W), *rest))
        assert Bounded.at(huge, x, T[:1]).layers.jacobians_from is None

    def test_makes_radii_larger_where_the_front_hardly_bends(self) -> None:
        network = KINDS["nearly linear"](TANH, seeded(4))
        x = torch.randn(6, 5, dtype=F64, generator=seeded(5))
        bounded = Bounded.at(network, x, torch.full((6,), 0.3, dtype=F64))
        without = bounded.change(replace(bounded.layers, jacobians_from=None)).linear
        behind = bounded.change_one_by_one(replace(bounded.layers, jacobians_from=1)).linear
        assert bool((behind <= without * (1 + 1e-9)).all())
        assert float((behind / without).median()) < 0.8


def at_most(monkeypatch: pytest.MonkeyPatch, size: int, behind: int) -> None:
    """Form Jacobians up to these sizes alone."""
    monkeypatch.setattr("curvcert.certificates.shell.layers.JACOBIAN_ELEMENTS", size)
    monkeypatch.setattr("curvcert.certificates.shell.layers.BEHIND_WIDER_LAYERS", behind)


def true_jacobians(network: Network, x: Tensor, k: int) -> Tensor:
    """Return the Jacobians of z in block k, (batch, n, inputs), by autograd."""

    def pre_activation(point: Tensor) -> Tensor:
        value = point[None]
        for block in network.blocks[:k]:
            value = block.evaluate(value)
        last = network.blocks[k]
        assert isinstance(last, Block)
        return last.pre_activation(value).flatten()

    rows = [torch.autograd.functional.jacobian(pre_activation, point) for point in x]
    return torch.stack([row.flatten(1) for row in rows])


class TestMutations:
    """One-dimensional networks are covered densely, so a bound that lacks a term is caught."""

    @pytest.mark.parametrize("name", ["tanh", "gelu", "sin", "softsign"])
    def test_the_bound_as_it_is_stands(self, name: str) -> None:
        assert violations(SMOOTH[name]) == 0

    @pytest.mark.slow
    @pytest.mark.parametrize("start", [None, 1, 2])
    @pytest.mark.parametrize("name", ["tanh", "gelu", "sin", "softsign"])
    def test_it_stands_behind_a_front_too(self, name: str, start: int | None) -> None:
        assert violations(SMOOTH[name], start=start) == 0

    @pytest.mark.slow
    @pytest.mark.parametrize("start", [1, 2])
    @pytest.mark.parametrize("wrong", ["steepness", "number", "E", "R"])
    def test_a_wrong_front_is_caught(self, wrong: str, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
        if wrong == "steepness":
            steepness = Layers.steepness
            monkeypatch.setattr(Layers, "steepness", lambda self, k: 0.5 * steepness(self, k))
        elif wrong == "number":
            push = centre._Product.push
            monkeypatch.setattr(
                centre._Product, "push", lambda f, *where: push(replace(f, number=0.8 * f.number), *where)
            )
        else:
            unformed = ball._unformed

            def without(*args: Any) -> Any:
                front = unformed(*args)
                return replace(front, R=0 * front.R) if wrong == "R" else replace(front, E=(0 * front.R, 0 * front.R))

            monkeypatch.setattr(ball, "_unformed", without)
        assert violations(start=start) > 0

    @pytest.mark.parametrize("lost", ["R", "E", "rho"])
    def test_a_missing_term_is_caught(self, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
        original = ball._State

        def without(rho: Tensor, R: Tensor, r: Tensor | None, E: tuple[Tensor, Tensor]) -> object:
            front = original(rho, R, r, E)
            if lost == "R":
                return replace(front, R=0 * R, r=None if r is None else 0 * r)
            return replace(front, E=(0 * E[0], 0 * E[1])) if lost == "E" else replace(front, rho=0.3 * rho)

        monkeypatch.setattr(ball, "_State", without)
        assert violations() > 0

    def test_too_small_a_curvature_is_caught(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = ball.curvatures_within
        monkeypatch.setattr(ball, "curvatures_within", lambda *args: 0.95 * original(*args))
        assert violations() > 0

    def test_half_a_saturated_change_is_caught(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """softplus(10 x) at -0.2 rises by 6.68 more than its tangent within 1; half the change of slope gives 4.40."""
        steep = softplus(1.0)
        W, b = Dense(torch.tensor([[10.0]], dtype=F64)), torch.zeros(1, dtype=F64)
        margin = 5.7
        c = torch.tensor([-0.126928 - margin, 0.0], dtype=F64)
        block = Block(Zero((1,), (2,)), Dense(torch.tensor([[1.0], [0.0]], dtype=F64)), W, b, c, steep, "steep")
        network, x = Network.of_blocks((block,)), torch.full((1, 1), -0.2, dtype=F64)
        grid = torch.linspace(0, 1, 10001, dtype=F64)[:, None]
        values = network(x + grid)
        truth = float(grid[values[:, 0] >= values[:, 1]].amin())
        assert float(certify(network, x, method="local").radius) <= truth
        original = shells.gradient_change
        monkeypatch.setattr(
            shells,
            "gradient_change",
            lambda *args: GradientChange(*[side / 2 for side in vars(original(*args)).values()]),
        )
        assert float(certify(network, x, method="local").radius) > truth
