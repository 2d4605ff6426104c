"""Networks of images on one torus: never below what slopes can do on the image itself, whatever the layers."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import curvcert
from curvcert.activations import SILU, SIN, TANH, Activation, leaky_relu
from curvcert.bounds.curvature import gradients, portfolio
from curvcert.bounds.curvature.gradients import gradient_sizes
from curvcert.bounds.curvature.portfolio import curvature_of
from curvcert.bounds.lipschitz import growth, lipsdp_recursion, on_torus
from curvcert.bounds.lipschitz.growth import Growth
from curvcert.bounds.lipschitz.lipsdp_recursion import lipsdp_recursion_bound, recursion_of_images
from curvcert.bounds.lipschitz.on_torus import image_gradients, images_of
from curvcert.bounds.lipschitz.portfolio import lipschitz_of
from curvcert.bounds.lipschitz.problem import make_problem
from curvcert.bounds.types import SIDES
from curvcert.network import Network
from curvcert.network.builder import Value, start
from curvcert.network.nodes import AffineNode, ElementwiseNode
from curvcert.network.rewriting.fusion import fused
from curvcert.operators import AveragePool2d, Conv2d, Dense, Diagonal, NormBounds, Reshape, frequencies
from curvcert.operators.frequencies import Exit
from curvcert.operators.planes import Planes
from curvcert.operators.torus import tori_of
from tests.operators.cases import F64, randn
from tests.operators.test_torus import drawn_conv, same_conv

LAPACK = 1e-12
"""How far a singular value that LAPACK computes may be off, relatively."""


def scaled(value: Value, rng: random.Random) -> Value:
    weight = 0.5 + randn(value.shape[0], 1, 1, seed=rng.randrange(2**31)).abs()
    return value.linear(Diagonal(weight, value.shape))


def block(value: Value, rng: random.Random, activation: Activation) -> Value:
    """One of the things that image networks are made of."""
    shape = value.shape
    match rng.randrange(6):
        case 0 if min(shape[1:]) >= 3:
            size = rng.choice([(2, 2), (2, 3)])
            value = value.linear(AveragePool2d(shape, size, rng.choice([size, (1, 2)])))
            return value.linear(same_conv(value.shape, rng))
        case 1:
            branch = value.linear(same_conv(shape, rng)).activate(activation, "a").linear(same_conv(shape, rng))
            return value.plus(branch, "skip").activate(activation, "b")
        case 2:
            return scaled(scaled(value, rng).linear(same_conv(shape, rng)), rng)
        case 3:
            return value.linear(same_conv(shape, rng)).linear(same_conv(shape, rng))  # takes a crop
        case _:
            return value.linear(drawn_conv(shape, rng))


def drawn(seed: int, activation: Activation) -> Network:
    rng = random.Random(seed)
    value = start((rng.randint(1, 2), rng.randint(3, 7), rng.randint(3, 7)), torch.device("cpu"))
    for _ in range(rng.randint(2, 3)):
        value = block(value, rng, activation).activate(activation, activation.name)
    value = value.linear(same_conv(value.shape, rng))
    return Network(fused(value.builder.nodes, value.number))


def constants_of_images(network: Network) -> dict[int, Tensor]:
    images = images_of(network.nodes)
    assert images is not None
    return images.constants


def secant_matrices(network: Network, slopes: Callable[[ElementwiseNode], Tensor]) -> list[Tensor]:
    """Return the matrix from the input to every value when each neuron has a slope of its own."""
    found = [torch.eye(torch.Size(network.in_shape).numel(), dtype=F64)]
    for node in network.nodes[1:]:
        if isinstance(node, AffineNode):
            found.append(torch.stack([term.map.as_matrix() @ found[term.source] for term in node.terms]).sum(dim=0))
        else:
            assert isinstance(node, ElementwiseNode)
            found.append(slopes(node).flatten()[:, None] * found[node.source])
    return found


def slope_choices(activation: Activation, seed: int) -> list[Callable[[ElementwiseNode], Tensor]]:
    """Ways to choose a slope for every neuron: any, the ends in two draws, and the steeper end for all."""
    low, high = activation.slope
    generator = torch.Generator().manual_seed(seed)

    def anything(node: ElementwiseNode) -> Tensor:
        return low + (high - low) * torch.rand(node.shape, dtype=F64, generator=generator)

    def ends(node: ElementwiseNode) -> Tensor:
        steep = torch.rand(node.shape, generator=generator) < 0.7
        return torch.where(steep, torch.full(node.shape, high, dtype=F64), low)

    return [anything, ends, ends, lambda node: torch.full(node.shape, high, dtype=F64)]


@pytest.mark.slow
@pytest.mark.parametrize("activation", [TANH, SILU, SIN, leaky_relu(0.3)], ids=lambda each: each.name)
def test_no_slopes_lead_further(activation: Activation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_torus, "EXPLICIT_SIZE", 0)
    for seed in range(20):
        network = drawn(seed, activation)
        constants = constants_of_images(network)
        assert len(network.nodes) - 1 in constants
        for slopes in slope_choices(activation, seed):
            matrices = secant_matrices(network, slopes)
            for value, constant in constants.items():
                assert float(torch.linalg.matrix_norm(matrices[value], 2)) <= float(constant) * (1 + LAPACK), seed


def test_compression_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_torus, "EXPLICIT_SIZE", 0)
    for seed in range(20):
        network = drawn(seed, TANH)
        monkeypatch.setattr(frequencies, "_WORTH_COMPRESSING", 1e9)
        plain = constants_of_images(network)
        monkeypatch.setattr(frequencies, "_WORTH_COMPRESSING", 0.5)
        for value, constant in constants_of_images(network).items():
            assert float(constant) == pytest.approx(float(plain[value]), rel=1e-9), seed


def small_vgg(side: int, width: int) -> Network:
    """Convolutions with scales, pools and a dense end."""
    rng = random.Random(0)
    value = start((3, side, side), torch.device("cpu"))
    for channels in (width, 2 * width):
        for _ in range(2):
            weight = randn(channels, value.shape[0], 3, 3, seed=rng.randrange(2**31)) / (9 * value.shape[0]) ** 0.5
            value = scaled(value.linear(Conv2d(weight, value.shape, padding=((1, 1), (1, 1)))), rng)
            value = value.activate(SILU, "silu")
        value = value.linear(AveragePool2d(value.shape, (2, 2), (2, 2)))
    size = torch.Size(value.shape).numel()
    value = value.linear(Dense(randn(10, size) / size**0.5) @ Reshape(value.shape, (size,)))
    return Network(fused(value.builder.nodes, value.number))


def with_dense_end(value: Value, seed: int, activation: Activation, hidden: bool) -> Network:
    """Two dense layers behind an image, or one."""
    size = torch.Size(value.shape).numel()
    flat = Reshape(value.shape, (size,))
    if hidden:
        value = value.linear(Dense(randn(4, size, seed=seed) / size**0.5) @ flat).activate(activation, "dense")
        value = value.linear(Dense(randn(3, 4, seed=seed + 1)))
    else:
        value = value.linear(Dense(randn(3, size, seed=seed)) @ flat)
    return Network(fused(value.builder.nodes, value.number))


def gradient_matrices(network: Network, slopes: Callable[[ElementwiseNode], Tensor]) -> list[Tensor]:
    """Return the matrix from every value to the output when each neuron has a slope of its own."""
    count, outputs = len(network.nodes), network.outputs
    found = [torch.zeros(outputs, torch.Size(node.shape).numel(), dtype=F64) for node in network.nodes]
    found[-1] = torch.eye(outputs, dtype=F64)
    for k in range(count - 1, 0, -1):
        node = network.nodes[k]
        if isinstance(node, AffineNode):
            for term in node.terms:
                found[term.source] = found[term.source] + found[k] @ term.map.as_matrix()
        else:
            assert isinstance(node, ElementwiseNode)
            found[node.source] = found[node.source] + found[k] * slopes(node).flatten()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("activation", [TANH, SILU, SIN, leaky_relu(0.3)], ids=lambda each: each.name)
def test_no_slopes_send_more_back_to_an_image(activation: Activation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_torus, "EXPLICIT_SIZE", 0)
    for seed in range(6):
        rng = random.Random(seed)
        value = start((rng.randint(1, 2), rng.randint(3, 6), rng.randint(3, 6)), torch.device("cpu"))
        for _ in range(rng.randint(2, 3)):
            value = block(value, rng, activation).activate(activation, activation.name)
        network = with_dense_end(value, seed, activation, rng.random() < 0.7)
        images, norms = images_of(network.nodes), NormBounds()
        assert images is not None
        gradients = image_gradients(images, norms, scalars=True)
        assert gradients is not None
        sizes = gradient_sizes(replace(make_problem(network, 2, None, None, None, None, None), scalars=True), norms)
        for slopes in slope_choices(activation, seed):
            matrices = gradient_matrices(network, slopes)
            for k in images.number:
                if k > 0:
                    bound = gradients.of(k, sizes.__getitem__)
                    assert bool((matrices[k].norm(dim=1) <= bound * (1 + LAPACK)).all()), (seed, k)


def test_what_is_behind_an_image_is_exact_on_the_torus() -> None:
    """Rows behind a convolution with stride, beside the circular convolution written out position by position."""
    conv = Conv2d(randn(3, 2, 3, 3), (2, 7, 6), (2, 1), ((1, 1), (1, 1)))
    planes = Planes((2, 7, 6))
    end = planes.image(conv, 0)
    torus = tori_of(planes.values, {0, end})[0]
    (height, width), rows = torus.circles.length, randn(4, *conv.out_shape, seed=1)
    circular = torch.zeros(*conv.out_shape, 2, height, width, dtype=F64)
    for i, j, a, b in itertools.product(range(conv.out_shape[1]), range(conv.out_shape[2]), range(3), range(3)):
        circular[:, i, j, :, (2 * i + a - 1) % height, (j + b - 1) % width] += conv.weight[:, :, a, b]
    exact = rows.flatten(1) @ circular.reshape(conv.out_size, -1)
    gate = Exit(torus.place[end], rows, torch.zeros((), dtype=F64))
    ((norm, lengths),) = torus.behind((0,), (gate,)).values()
    assert float(norm) == pytest.approx(float(torch.linalg.matrix_norm(exact, 2)), rel=1e-9)
    assert lengths.tolist() == pytest.approx(exact.norm(dim=1).tolist(), rel=1e-9)
    assert bool((lengths >= exact.norm(dim=1) * (1 - LAPACK)).all())


def chain_block(value: Value, rng: random.Random) -> Value:
    match rng.randrange(4):
        case 0 if min(value.shape[1:]) >= 3:
            value = value.linear(AveragePool2d(value.shape, (2, 2), (2, 2)))
            return value.linear(same_conv(value.shape, rng))
        case 1:
            return scaled(value, rng).linear(same_conv(value.shape, rng))
        case 2:
            return value.linear(same_conv(value.shape, rng)).linear(same_conv(value.shape, rng))  # takes a crop
        case _:
            return value.linear(drawn_conv(value.shape, rng))


@pytest.mark.slow
@pytest.mark.parametrize("activation", [TANH, SILU, leaky_relu(0.3)], ids=lambda each: each.name)
def test_the_recursion_on_a_torus_dominates_whatever_slopes_do(
    activation: Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every layer JJ' is below S as a matrix, its entries squared below the Hadamard form, and |J| below L."""
    monkeypatch.setattr(on_torus, "EXPLICIT_SIZE", 0)
    monkeypatch.setattr(lipsdp_recursion, "EXPLICIT_SIZE", 0)
    for seed in range(6):
        rng = random.Random(seed)
        value = start((rng.randint(1, 3), rng.randint(3, 6), rng.randint(3, 6)), torch.device("cpu"))
        for _ in range(rng.randint(2, 3)):
            value = chain_block(value, rng).activate(activation, activation.name)
        network = with_dense_end(value, seed, activation, rng.random() < 0.7)
        problem = make_problem(network, 2, None, None, None, None, None)
        recursion = recursion_of_images(problem)
        assert recursion is not None
        bound = lipsdp_recursion_bound(problem)
        for slopes in slope_choices(activation, seed):
            J = secant_matrices(network, slopes)
            assert float(torch.linalg.matrix_norm(J[-1], 2)) <= float(bound) * (1 + LAPACK)
            for k, congruence in recursion.layers.items():
                Jz = J[network.nodes[k].sources[0]]
                gram, (S, _) = Jz @ Jz.T, congruence.matrix
                assert float(torch.linalg.eigvalsh(S - gram).amin()) >= -1e-9 * float(torch.linalg.matrix_norm(S)), seed
                hadamard = float(congruence.hadamard) * (1 + LAPACK)
                assert float(torch.linalg.eigvalsh(S.square()).amax().sqrt()) <= hadamard * (1 + 1e-9)
                assert float(torch.linalg.eigvalsh(gram.square()).amax().sqrt()) <= hadamard
                assert float(torch.linalg.matrix_norm(J[k], 2)) ** 2 <= float(recursion.scales[k]) * (1 + LAPACK)


@pytest.mark.slow
def test_large_images_take_no_gram_matrix_of_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of the matrices that are factorised: none larger than the explicit size, where one took minutes."""
    network = small_vgg(20, 12)
    sizes: list[int] = []
    cholesky = torch.linalg.cholesky_ex

    def counted(matrix: Tensor) -> tuple[Tensor, Tensor]:
        sizes.append(matrix.shape[-1])
        return cholesky(matrix)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", counted)
    bound = curvcert.lipschitz(network, method="liplt")
    assert max(sizes) <= on_torus.EXPLICIT_SIZE
    x = randn(20, 3, 20, 20)
    J = network.jacobian(x).flatten(2)
    assert float(torch.linalg.matrix_norm(J, 2).amax()) <= float(bound)


def test_the_torus_of_a_network_costs_little_where_norms_one_by_one_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 12 x 12 images: above the sum over exact path maps, by less than a quarter at every value."""
    network = small_vgg(12, 4)
    found = Growth(make_problem(network, 2, None, None, None, None, None), NormBounds())
    assert not found._images
    monkeypatch.setattr(on_torus, "EXPLICIT_SIZE", 0)
    for value, constant in constants_of_images(network).items():
        assert float(found.of(value)) * (1 - 1e-9) <= float(constant) <= 1.25 * float(found.of(value))


@pytest.mark.parametrize("seed", range(2))
def test_glimpses_spare_norms_and_change_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_torus, "EXPLICIT_SIZE", 8)
    monkeypatch.setattr(growth, "EXPLICIT_SIZE", 8)

    def constants(network: Network) -> tuple[list[Tensor], int]:
        problem = make_problem(network, 2, None, None, None, "all", None)
        found = [lipschitz_of(problem).value, *(curvature_of(problem.seen_from(side)).value for side in SIDES)]
        return found, len(problem.norms._known)

    rng = random.Random(seed)
    value = start((2, 6, 6), torch.device("cpu"))
    value = value.linear(same_conv((2, 6, 6), rng)).activate(SILU, "first")
    for k in range(2):
        inner = value.linear(same_conv(value.shape, rng)).activate(SILU, f"inner {k}")
        branch = inner.linear(same_conv(inner.shape, rng))
        value = value.plus(branch, f"skip {k}").activate(SILU, f"outer {k}")
    network = with_dense_end(value, seed, SILU, True)
    spared, fewer = constants(network)
    nothing = torch.zeros((), dtype=F64)
    monkeypatch.setattr(gradients, "glimpsed_lipschitz", lambda *_: nothing)
    monkeypatch.setattr(gradients, "glimpsed_norm", lambda _: nothing)
    monkeypatch.setattr(NormBounds, "may_be_below", lambda *_: True)
    monkeypatch.setattr(portfolio, "glimpsed_recursion", lambda _: None)
    full, more = constants(network)
    for left, right in zip(spared, full, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=0)
    assert fewer < more
