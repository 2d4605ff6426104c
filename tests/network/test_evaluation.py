"""The exact value lies within the claimed error: mpmath at 50 digits, on random tiny networks."""

from fractions import Fraction
from itertools import pairwise

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import curvcert
import curvcert.nn as cnn
from curvcert.activations import declare_activation
from curvcert.errors import InvalidInput, UnsupportedBlock, UnsupportedModule
from curvcert.network import AbstractBlock, Affine, Block, MaxPool, Network
from curvcert.network.evaluation import Computed, evaluate_with_error
from curvcert.network.nodes import AbstractNode, InputNode
from curvcert.operators import AbstractLinearMap, Dense, Diagonal, Identity, NormBounds, Zero
from tests.activations.cases import EXACT, ROWS
from tests.network.cases import batch_norm

F64 = torch.float64
DIGITS = 50
KINKED = {
    "relu": lambda x: max(x, mpmath.mpf(0)),
    "leaky_relu(0.01)": lambda x: x if x > 0 else mpmath.mpf(0.01) * x,
    "hardtanh(-1,1)": lambda x: max(min(x, mpmath.mpf(1)), mpmath.mpf(-1)),
}
PHI = {name: (ROWS[name], phi) for name, phi in {**EXACT, **KINKED}.items()}

Numbers = list[mpmath.mpf]


def exact(x: Tensor) -> Numbers:
    return [mpmath.mpf(v) for v in x.flatten().tolist()]


def exact_apply(op: AbstractLinearMap, x: Numbers) -> Numbers:
    """Apply a map exactly, factor by factor: a product of matrices would round."""
    if isinstance(op, curvcert.operators.Composition):
        for factor in reversed(op.factors):
            x = exact_apply(factor, x)
        return x
    if isinstance(op, curvcert.operators.Scaled):
        return [mpmath.mpf(op.factor) * y for y in exact_apply(op.map, x)]
    if isinstance(op, curvcert.operators.Sum):
        return [mpmath.fsum(ys) for ys in zip(*(exact_apply(term, x) for term in op.terms), strict=True)]
    return [mpmath.fdot(exact(row), x) for row in op.as_matrix()]


def plus(left: Numbers, right: Numbers) -> Numbers:
    return [a + b for a, b in zip(left, right, strict=True)]


def exact_states(net: Network, x: Tensor) -> tuple[list[Numbers], list[Numbers]]:
    """Return the exact input of every block, the output, and every pre-activation."""
    states, pre = [exact(x)], []
    for block in net.blocks:
        if isinstance(block, Affine):
            states.append(plus(exact_apply(block.H, states[-1]), exact(block.c)))
            continue
        z = plus(exact_apply(block.W, states[-1]), exact(block.b))
        y = plus(exact_apply(block.G, [PHI[block.activation.name][1](v) for v in z]), exact(block.c))
        pre.append(z)
        states.append(plus(y, exact_apply(block.H, states[-1])))
    return states, pre


def assert_enclosed(computed: Computed, truth: Numbers) -> None:
    gaps = [abs(mpmath.mpf(v) - t) for v, t in zip(computed.value[0].flatten().tolist(), truth, strict=True)]
    for gap, error in zip(gaps, computed.error[0].flatten().tolist(), strict=True):
        assert gap <= mpmath.mpf(error), f"off by {mpmath.nstr(gap)}, claimed {error}"
    assert mpmath.norm(gaps) <= mpmath.mpf(float(computed.error_norm[0]))


def assert_sound(net: Network, x: Tensor) -> None:
    with mpmath.workdps(DIGITS):
        states, pre = exact_states(net, x)
        for norms in (None, NormBounds()):
            evaluation = evaluate_with_error(net, x, norms)
            for computed, truth in zip(evaluation.states, states, strict=True):
                assert_enclosed(computed, truth)
            inner = [z for z in evaluation.pre_activations if z is not None]
            for computed, truth in zip(inner, pre, strict=True):
                assert_enclosed(computed, truth)


def gaussian(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


@st.composite
def networks(draw: st.DrawFn) -> tuple[Network, Tensor]:
    """One to three blocks of width at most 4, with and without skips, at every scale."""
    widths = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    scale = 10.0 ** draw(st.sampled_from([-160, -20, -8, -1, 0, 0, 0, 1, 3]))
    seed = draw(st.integers(0, 2**20))
    blocks: list[AbstractBlock] = []
    for k, (n, m) in enumerate(pairwise(widths)):
        inner, act = draw(st.integers(1, 4)), PHI[draw(st.sampled_from(sorted(PHI)))][0]
        W, G = Dense(gaussian(inner, n, seed=seed + k, scale=scale)), Dense(gaussian(m, inner, seed=seed + 7 * k + 1))
        H: AbstractLinearMap = Zero((n,), (m,))
        if draw(st.booleans()):
            H = Identity((n,)) if n == m else Dense(gaussian(m, n, seed=seed + 11 * k))
        b, c = gaussian(inner, seed=seed + 3, scale=scale), gaussian(m, seed=seed + 5, scale=scale)
        blocks.append(Block(H, G, W, b, c, act, str(k)))
    if draw(st.booleans()):
        D = Diagonal(gaussian(widths[-1], seed=seed + 4), (widths[-1],))
        blocks.append(Affine(0.3 * D, gaussian(widths[-1], seed=seed + 6), "last"))
    return Network.of_blocks(tuple(blocks)), gaussian(
        1, widths[0], seed=seed + 9, scale=10.0 ** draw(st.integers(-12, 3))
    )


@given(networks())
def test_the_exact_value_lies_within_the_claimed_error(case: tuple[Network, Tensor]) -> None:
    assert_sound(*case)


@pytest.mark.parametrize("name", sorted(PHI))
def test_the_error_of_one_activation(name: str) -> None:
    one, zero = torch.ones(1, 1, dtype=F64), torch.zeros(1, dtype=F64)
    net = Network.of_blocks((Block(Zero((1,), (1,)), Identity((1,)), Dense(one), zero, zero, PHI[name][0]),))
    for z in (0.0, 1e-300, 1e-12, -3e-9, 0.3, -2.0, 19.0, -40.0, 1e4):
        assert_sound(net, z * one)


def test_underflow_is_accounted_for() -> None:
    tiny = torch.full((1, 2), 1e-200, dtype=F64)
    net = Network.of_blocks((Affine(Dense(tiny), torch.zeros(1, dtype=F64)),))
    assert_sound(net, torch.full((1, 2), 1e-200, dtype=F64))
    chain = Network.of_blocks((Affine(Dense(tiny), torch.zeros(1, dtype=F64)), Affine(Dense(tiny[:, :1]), tiny[0, :1])))
    assert_sound(chain, torch.full((1, 2), 1e-180, dtype=F64))


def test_small_numbers_keep_their_norm() -> None:
    net = Network.of_blocks((Affine(Dense(gaussian(3, 3, seed=1, scale=1e-160)), gaussian(3, seed=2, scale=1e-160)),))
    error = evaluate_with_error(net, torch.ones(1, 3, dtype=F64), NormBounds()).states[-1]
    assert 1e-178 < float(error.error_norm) < 1e-172
    assert_sound(net, torch.ones(1, 3, dtype=F64))


@pytest.mark.parametrize("norms", [None, NormBounds()], ids=["coordinates", "norms"])
def test_after_an_overflow_nothing_is_known(norms: NormBounds | None) -> None:
    huge = Dense(torch.full((2, 2), 1e150, dtype=F64))
    zero = torch.zeros(2, dtype=F64)
    net = Network.of_blocks((Affine(huge, zero), Affine(huge, zero), Affine(huge, zero)))
    evaluation = evaluate_with_error(net, torch.tensor([[1e100, 0.0], [0.0, 0.0]], dtype=F64), norms)
    last = evaluation.states[-1]
    assert bool(torch.isinf(last.error[0]).all() and torch.isinf(last.error_norm[0]))
    assert bool(torch.isfinite(last.error[1]).all())


def test_a_declared_activation_is_granted_its_rounding() -> None:
    act = declare_activation("cos", torch.cos, lambda z: -torch.sin(z), (-1.0, 1.0))
    one, zero = torch.ones(1, 1, dtype=F64), torch.zeros(1, dtype=F64)
    net = Network.of_blocks((Block(Zero((1,), (1,)), Identity((1,)), Dense(one), zero, zero, act),))
    error = float(evaluate_with_error(net, one * 1.5707963267948966).states[-1].error)
    assert 1e-13 < error < 1e-12


def test_a_block_or_a_node_without_a_rule_is_refused() -> None:
    class Strange(AbstractBlock):
        name, in_shape, out_shape = "strange", (1,), (1,)

        def evaluate(self, x: Tensor) -> Tensor:
            return x

        def pull_back(self, x: Tensor, g: Tensor) -> Tensor:
            return g

        def read_out(self, A: AbstractLinearMap) -> None:
            return None

    with pytest.raises(UnsupportedBlock, match="Strange"):
        Network.of_blocks((Strange(),))

    class Odd(AbstractNode):
        name, sources, shape = "odd", (0,), (1,)

        def renumbered(self, number: dict[int, int]) -> "Odd":
            return self

    with pytest.raises(UnsupportedModule, match=r"odd: .* has no rule for a Odd"):
        evaluate_with_error(Network((InputNode((1,)), Odd())), torch.zeros(1, 1))


def exact_layers(model: nn.Sequential, x: Tensor) -> Numbers:
    """Evaluate Linear, Tanh, BatchNorm1d and Normalise layers, from their own weights, exactly."""
    y = exact(x)
    for layer in model:
        if isinstance(layer, nn.Linear):
            y = plus(exact_apply(Dense(layer.weight.detach()), y), exact(layer.bias.detach()))
        elif isinstance(layer, nn.BatchNorm1d):
            rows = zip(
                *map(exact, (layer.running_mean, layer.running_var, layer.weight.data, layer.bias.data)), y, strict=True
            )
            y = [w * (v - m) / mpmath.sqrt(s + mpmath.mpf(layer.eps)) + b for m, s, w, b, v in rows]
        elif isinstance(layer, cnn.Normalise):
            y = [(v - m) / s for m, s, v in zip(exact(layer.mean), exact(layer.std), y, strict=True)]
        else:
            y = [mpmath.tanh(v) for v in y]
    return y


@given(st.integers(0, 2**20))
def test_folded_offsets_carry_their_rounding(seed: int) -> None:
    torch.manual_seed(seed)
    layers = (nn.Linear(3, 4), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2), nn.Linear(2, 3), nn.Linear(3, 2))
    model = nn.Sequential(*layers).double().eval()
    net, x = curvcert.trace(model, torch.zeros(1, 3)), torch.randn(1, 3, dtype=F64)
    assert len(net.blocks) == 1
    with mpmath.workdps(DIGITS):
        truth = exact_layers(model, x)
        for norms in (None, NormBounds()):
            assert_enclosed(evaluate_with_error(net, x, norms).states[-1], truth)


@given(st.integers(0, 2**20))
def test_rounded_coefficients_are_off_by_rounding_alone(seed: int) -> None:
    torch.manual_seed(seed)
    layers = (
        cnn.Normalise([0.3, -1.0, 2.0], [0.7, 3.0, 0.1]),
        nn.Linear(3, 4),
        batch_norm(nn.BatchNorm1d(4)),
        nn.Tanh(),
    )
    model = nn.Sequential(*layers).double().eval()
    net, x = curvcert.trace(model, torch.zeros(1, 3)), torch.randn(1, 3, dtype=F64)
    with mpmath.workdps(DIGITS):
        truth = torch.tensor([float(v) for v in exact_layers(model, x)], dtype=F64)
    assert float((net(x)[0] - truth).abs().max()) < 1e-12


@pytest.mark.parametrize("before", [nn.Tanh(), nn.MaxPool2d(1)], ids=["tanh", "max pooling"])
def test_offsets_that_cancel_keep_their_error(before: nn.Module) -> None:
    # 0.1 + 0.2 rounds; the sum of all three offsets is 0 as computed, and not 0.
    class Shifts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0.1 + 0.2 - 0.30000000000000004

    net = curvcert.trace(nn.Sequential(before, Shifts()).eval(), torch.zeros(1, 1, 1, 1))
    error = evaluate_with_error(net, torch.zeros(1, 1, 1, 1)).states[-1].error
    truth = Fraction(0.1) + Fraction(0.2) - Fraction(0.30000000000000004)
    assert 0 < abs(truth) <= Fraction(float(error))


def test_max_pooling_passes_errors_on() -> None:
    image = (1, 4, 4)
    scale = Diagonal(torch.full(image, 0.1, dtype=F64), image)
    net = Network.of_blocks((Affine(scale, torch.full(image, 0.3, dtype=F64)), MaxPool(image, (2, 2), (2, 2))))
    x = gaussian(1, *image, seed=3)
    last = evaluate_with_error(net, x, NormBounds()).states[-1]
    with mpmath.workdps(DIGITS):
        truth = [mpmath.mpf(0.1) * v + mpmath.mpf(0.3) for v in exact(x)]
        windows = [
            max(truth[4 * i + j], truth[4 * i + j + 1], truth[4 * i + j + 4], truth[4 * i + j + 5])
            for i in (0, 2)
            for j in (0, 2)
        ]
        assert_enclosed(last, windows)


def test_blocks_are_validated_at_birth() -> None:
    one, c = Dense(torch.ones(1, 1, dtype=F64)), torch.zeros(1, dtype=F64)
    for wrong in (torch.zeros(2, dtype=F64), c.float(), torch.full((1,), float("nan"), dtype=F64)):
        with pytest.raises(InvalidInput):
            Affine(one, wrong)
        with pytest.raises(InvalidInput):
            Block(Zero((1,), (1,)), Identity((1,)), one, wrong, c, ROWS["tanh"])
    with pytest.raises(InvalidInput, match="does not fit"):
        MaxPool((4, 4), (2, 2), (2, 2))
    with pytest.raises(InvalidInput, match="at least one block"):
        Network.of_blocks(())
    with pytest.raises(InvalidInput, match="takes"):
        Network.of_blocks((Affine(one, c), Affine(Dense(torch.ones(1, 2, dtype=F64)), c, "second")))


def test_what_cancels_in_front_of_an_activation_stays_off_behind_it() -> None:
    """3 x 0.1 - 0.3 rounds to twice what it is, which is as far off behind a tanh."""
    W, b, zero = torch.full((1, 1), 3.0, dtype=F64), torch.full((1,), -0.3, dtype=F64), torch.zeros(1, dtype=F64)
    net = Network.of_blocks((Block(Zero((1,), (1,)), Identity((1,)), Dense(W), b, zero, PHI["tanh"][0]),))
    assert_sound(net, torch.full((1, 1), 0.1, dtype=F64))
