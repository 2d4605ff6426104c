"""The fast bounds against a slow reference with exact norms, and the integral against a sum."""

import math

import pytest
import torch
from torch import Tensor

from benchmarks.shell_search import KINDS, Bounded
from curvcert.activations import ACTIVATIONS, derivative_range, second_derivative_range
from curvcert.certificates.shell import Layers
from curvcert.certificates.shell.gradient_change import GradientChange
from curvcert.certificates.shell.integral import Pairs, Spent, integrate_shell
from curvcert.certificates.shell.norms import congruent_eigenvalues, spectral_norms
from curvcert.network import Block

F64 = torch.float64


def norm(A: Tensor) -> float:
    return float(torch.linalg.matrix_norm(A, 2))


def length(v: Tensor) -> float:
    return float(torch.linalg.vector_norm(v))


def reference(layers: Layers, x: Tensor, i: int, j: int, t: float) -> tuple[float, float]:
    """Return the saturated and the linear bound for one sample and pair, by the formulas with exact norms.

    The global constants of blocks and prefixes are the library's: they are not what is tested here.
    """
    network = layers.network
    blocks = [block for block in network.blocks if isinstance(block, Block)]
    z, state, matrices = [], x[None], []
    for block in blocks:
        z.append(block.pre_activation(state)[0].flatten())
        state = block.evaluate(state)
        matrices.append([op.as_matrix() for op in (block.H, block.G, block.W)])
    g = torch.zeros(network.outputs, dtype=F64)
    g[i], g[j] = 1.0, -1.0
    pulled = []
    for block, at, (H, G, W) in zip(reversed(blocks), reversed(z), reversed(matrices), strict=True):
        pulled.insert(0, (G.T @ g).abs())
        g = H.T @ g + W.T @ (block.activation.derivative(at) * (G.T @ g))
    X, rho, R, r = torch.eye(x.numel(), dtype=F64), t, 0.0, torch.zeros(x.numel(), dtype=F64)
    E, parts = [0.0, 0.0], []
    for k, (block, at, (H, G, W), u) in enumerate(zip(blocks, z, matrices, pulled, strict=True)):
        S, J = block.activation.derivative(at), W @ X
        rows, j_rows = W.norm(dim=1), J.norm(dim=1)
        rz = torch.minimum(rows * R, W.abs() @ r)
        Rz = min(norm(W) * R, length(rz))
        zeta = min(norm(W) * rho, norm(J) * t + Rz)
        d = torch.minimum(torch.minimum(rows * rho, j_rows * t + rz), torch.full_like(rz, zeta))
        low, high = derivative_range(block.activation, at - d, at + d)
        bends = second_derivative_range(block.activation, at - d, at + d)
        s, c = torch.maximum(low.abs(), high.abs()), torch.maximum(bends[0].abs(), bends[1].abs())
        changes = [torch.minimum(torch.maximum(high - S, S - low), c * d), c * d]
        A, widest = H + G @ (S[:, None] * W), torch.maximum(high - S, S - low).clamp(min=0)
        root = widest.sqrt()
        growth = min(
            norm(H) + norm(G) * norm(s[:, None] * W),
            norm(A) + norm(G * root) * norm(root[:, None] * W),
            float(layers.layers[k].constant),
        )
        h = u * c
        parts.append((h, changes, zeta, Rz, J, [norm(W) * e for e in E], growth, norm(W), u))
        e = c * d * d / 2
        nu = min(length(e), float((c * d).amax()) * zeta / 2)
        inner = min(length(s * d), float(s.amax()) * zeta)
        rho = min(growth * rho, norm(H) * rho + norm(G) * inner, float(layers.layers[k].reach) * t)
        bent = S.abs() * rz
        R = min(
            norm(A) * R + norm(G) * nu, norm(H) * R + norm(G) * (min(length(bent), float(S.abs().amax()) * Rz) + nu)
        )
        r = H.abs() @ r + G.abs() @ (bent + e)
        R, X = min(R, length(r)), A @ X
        rho = min(rho, norm(X) * t + R)
        E = [growth * old + norm(G) * norm(change[:, None] * J) for old, change in zip(E, changes, strict=True)]
    eta, total = [0.0, 0.0], [0.0, 0.0]
    for h, changes, zeta, Rz, J, Ez, growth, W_norm, u in reversed(parts):
        peak = float(h.amax())
        core = norm(J.T @ (h[:, None] * J)) * t + norm(J) * peak * Rz
        for kind in (0, 1):
            v = min(length(changes[kind] * u), norm(h[:, None] * J) * t + peak * Rz, peak * zeta)
            eta[kind] = growth * eta[kind] + W_norm * v
            total[kind] += min(core, norm(J) * v) + Ez[kind] * v
    return min(eta[0], total[0]), min(eta[1], total[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tanh", "gelu", "softsign"])
@pytest.mark.parametrize("kind", KINDS)
def test_never_below_the_slow_reference_and_not_far_above(kind: str, name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    network = KINDS[kind](ACTIVATIONS[name], generator)
    x = torch.randn(4, *network.in_shape, dtype=F64, generator=generator)
    for radius in (1e-3, 0.1, 1.0):
        bounded = Bounded.at(network, x, torch.full((4,), radius, dtype=F64))
        change = bounded.change()
        for sample in range(4):
            for place, other in enumerate(bounded.others[sample].tolist()):
                slow = reference(bounded.layers, x[sample], other, int(bounded.label[sample]), radius)
                fast = float(change.saturated[sample, place]), float(change.linear[sample, place])
                assert fast[0] >= slow[0] * (1 - 1e-11)
                assert fast[1] >= slow[1] * (1 - 1e-11)
                assert fast[0] <= 1.8 * slow[0]


class TestNorms:
    @pytest.mark.parametrize("n", [3, 20, 60])
    def test_spectral_norms_are_above_the_truth_and_close(self, n: int) -> None:
        J = torch.randn(5, n, 2 * n, dtype=F64)
        bound, truth = spectral_norms(J), torch.linalg.matrix_norm(J, 2)
        assert bool((bound >= truth * (1 - 1e-14)).all())
        assert bool((bound <= 1.06 * truth).all())

    def test_congruent_eigenvalues_are_above_the_truth_and_no_sum(self) -> None:
        J = torch.randn(4, 15, 30, dtype=F64)
        w = torch.rand(4, 6, 15, dtype=F64).pow(8)
        w[0, 0] = 0.0
        gram = J @ J.mT
        bound = congruent_eigenvalues(gram.abs(), w, J.norm(dim=2))
        root = w.sqrt()
        truth = torch.linalg.eigvalsh(root[:, :, :, None] * gram[:, None] * root[:, :, None, :])[..., -1]
        assert bool((bound >= truth * (1 - 1e-13)).all())
        assert bool((bound <= (w * gram.diagonal(dim1=1, dim2=2)[:, None]).sum(dim=2) * (1 + 1e-12) + 1e-100).all())


class TestIntegral:
    def test_agrees_with_a_sum(self) -> None:
        """Five shells with random bounds; the sum over a fine grid of min(a, g + kappa tau) reaches m at the radius."""
        generator = torch.Generator().manual_seed(0)
        m, g, K, L = (0.2 + torch.rand(40, 3, dtype=F64, generator=generator) for _ in range(4))
        K, L, ends = 4 * K, g + 2 * L, torch.linspace(0, 1.2, 6, dtype=F64)
        changes = [torch.rand(2, 40, 3, dtype=F64, generator=generator).cumsum(0) * (k + 1) for k in range(5)]
        pairs = Pairs(m, g, K, L)
        spent = Spent.nothing(pairs)
        fine, dt = torch.linspace(0, 1.2, 6001, dtype=F64), 1.2 / 6000
        total, radius = torch.zeros_like(m), torch.full_like(m, 1.2)
        for k, change in enumerate(changes):
            low, high = ends[k].expand(40), ends[k + 1].expand(40)
            spent = integrate_shell(spent, pairs, GradientChange(change[0], change[1]), low, high)
            kappa = torch.minimum(change[1] / ends[k + 1], K)
            top = torch.minimum(torch.minimum(g + change[0], g + kappa * ends[k + 1]), L)
            for tau in (fine[(fine >= ends[k] - 1e-9) & (fine < ends[k + 1] - 1e-9)] + dt / 2).tolist():
                total = total + dt * torch.minimum(top, g + kappa * tau)
                radius = torch.where((total >= m) & (radius == 1.2), tau, radius)
        torch.testing.assert_close(spent.radius, radius, rtol=0, atol=4 * dt)
        assert bool((spent.open_ == (spent.radius >= 1.2)).all())

    @pytest.mark.parametrize("margin", [1e-250, 1e-9, 1.0, 1e9])
    def test_is_rounded_down_and_close(self, margin: float) -> None:
        """With K alone the radius is 2m / (g + sqrt(g^2 + 2Km))."""
        one = torch.ones(1, 1, dtype=F64)
        g, K, m = 0.7, 1.3, margin
        exact = 2 * m / (g + math.sqrt(g * g + 2 * K * m))
        pairs = Pairs(m * one, g * one, K * one, math.inf * one)
        endless = GradientChange(math.inf * one, math.inf * one)
        spent, low = Spent.nothing(pairs), 0 * one[0]
        for k in range(1, 9):
            high = one[0] * exact * k / 4
            spent, low = integrate_shell(spent, pairs, endless, low, high), high
        assert (1 - 1e-9) * exact <= float(spent.radius) <= exact
