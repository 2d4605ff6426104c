r"""Where the loss of a local quadratic certificate goes on a 6C2F: a rough one, power iteration where proofs belong.

Claim: with the cross term of slopes and residuals kept together over all layers, the certificate loses less beside the
gradient than by the better of the two older forms.
Hardware: whatever it runs on; the record says which.
Trials: the first SAMPLES test images whose linear limit, margin over gradient norm, exceeds 36/255; the nearest rival.

With :math:`dz_k = J_k d + R_k`, :math:`R_k = \sum_{i<k} P_{ki} \rho_i` and weights w with
:math:`u_l \rho_l(\delta) \le w_l \delta^2 / 2` on the ranges (negative ones too), a pair's F is at most

.. math:: F(x) + g d + \tfrac12 d^T M d + \sum_i (C_i d) \cdot \rho_i + \tfrac12 \sum_k w_k \cdot R_k^2,
    \quad M = \sum_k J_k^T w_k J_k, \quad C_i = \sum_{k>i} P_{ki}^T w_k J_k.

"coupled" bounds the five terms by the trust-region dual, by norms and rows of the C_i, and by the residuals.
The older forms are "layerwise", :math:`g t + \sum_k (\sqrt{A_k} + \sqrt{B_k})^2` by the norms of every layer, and
"split", one matrix of the weights of both signs whose cross terms are split by :math:`\theta_k = \sqrt{B_k / A_k}`.

    python -m benchmarks.quadratic_prototype --data DIR     # DIR/cifar-10-batches-bin/test_batch.bin
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import RESULTS, write_record
from curvcert.data import load
from curvcert.losses.pull_back import pull_back
from curvcert.nn.activations import Normalise
from curvcert.training.model_file import load_trained

SEED, SAMPLES = 0, 8
RADII = {"36/255": 36 / 255, "72/255": 72 / 255, "108/255": 108 / 255}
EXPLICIT, PROBES, STEPS = 1100, 96, 14
"""Widest layer whose path maps are made row by row; random tangents for the others; steps of Lanczos."""

Operator = Callable[[Tensor], Tensor]


def tangent(layer: nn.Module, t: Tensor) -> Tensor:
    """Return the image of tangents under a layer without activation."""
    if isinstance(layer, nn.Conv2d):
        return F.conv2d(t, layer.weight, None, layer.stride, layer.padding)
    if isinstance(layer, nn.Linear):
        return F.linear(t, layer.weight)
    if isinstance(layer, nn.Flatten):
        return t.flatten(1)
    if isinstance(layer, Normalise):
        return t / layer.std.reshape(-1, 1, 1)
    raise SystemExit(f"This prototype covers convolutions and dense layers with tanh, got {layer!r}.")


def quotients(z: Tensor, d: Tensor, nodes: int = 13) -> tuple[Tensor, Tensor]:
    r"""Return the range of :math:`2 \rho(\delta) / \delta^2` of tanh over :math:`|\delta| \le d`, on a grid."""
    y = torch.tanh(z)
    slope, bend = 1 - y * y, -2 * y * (1 - y * y)
    low, high = bend, bend
    for share in torch.linspace(-1, 1, nodes).tolist():
        delta = share * d
        safe = torch.where(delta.abs() < 2e-2, 1.0, delta)
        far = 2 * (torch.tanh(z + safe) - y - slope * safe) / safe.square()
        found = torch.where(delta.abs() < 2e-2, bend + delta / 3 * slope * (4 * y * y - 2 * slope), far)
        low, high = torch.minimum(low, found), torch.maximum(high, found)
    return low, high


def lanczos(op: Operator, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return the tridiagonal matrix of a symmetric operator from a start, reorthogonalised, and the start's length."""
    length = torch.linalg.vector_norm(start)
    basis, diagonal, beside = [start / length], list[Tensor](), list[Tensor]()
    for _ in range(steps):
        image = op(basis[-1])
        diagonal.append(image @ basis[-1])
        known = torch.stack(basis)
        for _ in range(2):
            image = image - (known @ image) @ known
        beside.append(torch.linalg.vector_norm(image))
        basis.append(image / beside[-1].clamp(min=1e-30))
    off = torch.stack(beside[:-1])
    return torch.diag(torch.stack(diagonal)) + torch.diag(off, 1) + torch.diag(off, -1), length


def norm_estimate(op: Operator, size: int, like: Tensor) -> float:
    """Return about the largest eigenvalue of a positive semidefinite operator."""
    start = torch.randn(size, generator=torch.Generator().manual_seed(SEED), dtype=like.dtype).to(like.device)
    return max(0.0, float(torch.linalg.eigvalsh(lanczos(op, start, STEPS)[0].double())[-1]))


def trust_region_estimate(op: Operator, g: Tensor, t: float) -> float:
    r"""Return about :math:`\max g d + \tfrac12 d^T M d` over :math:`|d| \le t`, in the Krylov space of g."""
    matrix, length = lanczos(op, g, STEPS + 4)
    values, vectors = torch.linalg.eigh(matrix.double())
    squares = (vectors[0] * length).square()
    low = max(0.0, float(values[-1])) + 1e-12
    high = low + float(length) / t + 1e-9
    for _ in range(80):
        middle = (low + high) / 2
        rising = float((squares / (middle - values).square()).sum()) < t * t
        low, high = (low, middle) if rising else (middle, high)
    return float((squares / (high - values)).sum()) / 2 + high * t * t / 2


@dataclass(frozen=True)
class Terms:
    """What a margin may lose within a radius, term by term: positive numbers make it smaller."""

    linear: float
    layerwise: float
    split: float
    quadratic: float
    cross: float
    residual: float

    @property
    def older(self) -> float:
        """The loss beside the gradient's, by the better of the two older forms."""
        return min(self.layerwise, self.split)

    @property
    def coupled(self) -> float:
        """The loss beside the gradient's, by the coupled form."""
        return self.quadratic + self.cross + self.residual


def _residual(weights: Tensor, r: Tensor, R: float) -> float:
    """Bound half the sum of weights times squared residuals, by the entries' bounds r and the norm's R."""
    return min(float(weights.max()) * R * R, float(weights @ r.square())) / 2


class Expansion:
    """A tanh network at one point: Jacobians, path maps, and the covectors of one pair."""

    def __init__(self, model: nn.Sequential, x: Tensor, gap: Tensor) -> None:
        self.x = x
        self._stages: list[list[nn.Module]] = [[]]
        for layer in model:
            if type(layer) is nn.Tanh:
                self._stages.append([])
            else:
                self._stages[-1].append(layer)
        self.depth = len(self._stages) - 1
        self._states: list[list[Tensor]] = []
        self.z, self.slopes = list[Tensor](), list[Tensor]()
        inside = x
        for stage in self._stages:
            states = [inside]
            for layer in stage:
                states.append(layer(states[-1]))
            self._states.append(states)
            if len(self.z) < self.depth:
                self.z.append(states[-1].flatten())
                inside = torch.tanh(states[-1])
                self.slopes.append(1 - inside.square())
        self._find_jacobians()
        self._find_paths()
        g, self.u = self.back(self.depth, gap[None]), list[Tensor]()
        for k in range(self.depth - 1, -1, -1):
            self.u.insert(0, g.flatten())
            g = self.back(k, g * self.slopes[k])
        self.gradient = g.flatten()

    def push(self, k: int, rows: Tensor) -> Tensor:
        """Return tangents of the k-th input as tangents of z_k."""
        for layer in self._stages[k]:
            rows = tangent(layer, rows)
        return rows

    def back(self, k: int, rows: Tensor) -> Tensor:
        """Return covectors of z_k as covectors of the k-th input."""
        states, g = self._states[k], rows.reshape(len(rows), *self._states[k][-1].shape)
        for layer, (before, after) in zip(reversed(self._stages[k]), reversed(list(pairwise(states))), strict=True):
            g = pull_back(layer, before, after, g)
        return g[:, 0]

    def _find_jacobians(self) -> None:
        size = self.x.numel()
        t = self.push(0, torch.eye(size, dtype=self.x.dtype, device=self.x.device).reshape(size, *self.x.shape[1:]))
        self.J = [t.flatten(1)]  # transposed: a row for each input
        for k in range(1, self.depth):
            t = self.push(k, t * self.slopes[k - 1])
            self.J.append(t.flatten(1))
        self.lengths = [torch.linalg.vector_norm(J, dim=0) for J in self.J]

    def _find_paths(self) -> None:
        """Make the rows of P_ki, or their lengths by random tangents, and the norms by power iteration."""
        generator = torch.Generator().manual_seed(SEED)
        self.rows: dict[tuple[int, int], Tensor] = {}
        self.row_lengths: dict[tuple[int, int], Tensor] = {}
        for i in range(self.depth - 1):
            signs = torch.randint(0, 2, (PROBES, *self.slopes[i].shape[1:]), generator=generator)
            t = (2 * signs - 1).to(self.x)
            for k in range(i + 1, self.depth):
                t = self.push(k, t if k == i + 1 else t * self.slopes[k - 1])
                self.row_lengths[k, i] = t.flatten(1).square().mean(dim=0).sqrt()
        for k in range(1, self.depth):
            if (width := len(self.z[k])) <= EXPLICIT:
                g = torch.eye(width, dtype=self.x.dtype, device=self.x.device)
                for i in range(k - 1, -1, -1):
                    g = self.back(i + 1, g)
                    self.rows[k, i] = g.flatten(1)
                    self.row_lengths[k, i] = torch.linalg.vector_norm(g.flatten(1), dim=1)
                    g = g * self.slopes[i]
        pairs = [(k, i) for k in range(1, self.depth) for i in range(k)]
        self.path_norms = {
            pair: norm_estimate(self._path_square(*pair), len(self.z[pair[1]]), self.x) ** 0.5 for pair in pairs
        }

    def _path_square(self, k: int, i: int) -> Operator:
        def square(v: Tensor) -> Tensor:
            t = v.reshape(self.slopes[i].shape)
            for j in range(i + 1, k + 1):
                t = self.push(j, t if j == i + 1 else t * self.slopes[j - 1])
            for j in range(k, i, -1):
                t = self.back(j, t if j == k else t * self.slopes[j])
            return t.flatten()

        return square

    def _weighted_norm(self, k: int, weights: Tensor) -> float:
        """Return about the largest eigenvalue of J_k' diag(weights) J_k."""
        return norm_estimate(lambda v: self.J[k] @ (weights * (v @ self.J[k])), len(self.J[k]), self.x)

    def terms(self, t: float) -> Terms:
        """Return what is lost within the ball of radius t."""
        weights, remainders, sizes = list[Tensor](), list[Tensor](), list[float]()
        layerwise = residual = rest = 0.0
        split = list[Tensor]()
        for k, z in enumerate(self.z):
            r, R = self._residuals(k, remainders, sizes)
            d = self.lengths[k] * t + r
            low, high = quotients(z, d)
            w = torch.maximum(self.u[k] * low, self.u[k] * high)
            q = torch.maximum(high.abs(), low.abs()) * d
            missed = min(float(q.max()) * R, float(torch.linalg.vector_norm(q * r)))
            by_norm = (self._weighted_norm(k, q.square()) ** 0.5 * t + missed) / 2
            remainders.append(q * d / 2)
            sizes.append(min(float(torch.linalg.vector_norm(remainders[-1])), by_norm))
            weights.append(w)
            up, down = w.clamp(min=0), (-w).clamp(min=0)
            A, B, B_down = t * t / 2 * self._weighted_norm(k, up), _residual(up, r, R), _residual(down, r, R)
            layerwise, residual = layerwise + (A**0.5 + B**0.5) ** 2, residual + B
            theta = max((B / A) ** 0.5, 1e-6) if r.any() else 0.0
            split.append(up * (1 + theta) - down * (1 - min(theta, 1.0)))
            rest += (1 + 1 / theta) * B + max(1 / theta - 1, 0.0) * B_down if theta else 0.0
        linear = t * float(torch.linalg.vector_norm(self.gradient))
        quadratic = trust_region_estimate(self._hessian(weights), self.gradient, t) - linear
        apart = trust_region_estimate(self._hessian(split), self.gradient, t) - linear + rest
        return Terms(linear, layerwise, apart, quadratic, self._cross(weights, remainders, sizes, t), residual)

    def _residuals(self, k: int, remainders: list[Tensor], sizes: list[float]) -> tuple[Tensor, float]:
        """Return bounds on the entries and on the norm of R_k = sum_i P_ki rho_i."""
        r, R = torch.zeros_like(self.z[k]), 0.0
        for i, (remainder, size) in enumerate(zip(remainders, sizes, strict=True)):
            term = self.row_lengths[k, i] * size
            if (k, i) in self.rows:
                term = torch.minimum(term, self.rows[k, i].abs() @ remainder)
            r, R = r + term, R + self.path_norms[k, i] * size
        r = r.clamp(max=R)
        return r, min(R, float(torch.linalg.vector_norm(r)))

    def _hessian(self, weights: list[Tensor]) -> Operator:
        def times(v: Tensor) -> Tensor:
            return torch.stack([J @ (w * (v @ J)) for w, J in zip(weights, self.J, strict=True)]).sum(dim=0)

        return times

    def _cross(self, weights: list[Tensor], remainders: list[Tensor], sizes: list[float], t: float) -> float:
        """Bound the sum of (C_i d) . rho_i: by one backward sweep of all input directions."""
        total, C = 0.0, torch.zeros_like(self.J[-1])
        for k in range(self.depth - 1, 0, -1):
            C = self.back(k, weights[k] * self.J[k] + self.slopes[k].flatten() * C).flatten(1)
            by_rows = float(torch.linalg.vector_norm(C, dim=0) @ remainders[k - 1])
            norm = norm_estimate(self._square_of(C), len(C), C) ** 0.5
            total += t * min(by_rows, norm * sizes[k - 1])
        return total

    @staticmethod
    def _square_of(C: Tensor) -> Operator:
        return lambda v: C @ (v @ C)


def nearest_rival(model: nn.Sequential, x: Tensor, y: int) -> tuple[Tensor, float, float]:
    """Return the gap of logits to the rival of the least margin over gradient norm, its value at x, and the ratio."""
    with torch.enable_grad():
        point = x.clone().requires_grad_()
        logits = model(point)[0]
        gaps = torch.eye(len(logits), dtype=x.dtype, device=x.device)
        gaps = gaps - gaps[y]
        values = gaps @ logits
        slopes = [torch.autograd.grad(value, point, retain_graph=True)[0].norm().clamp(min=1e-12) for value in values]
    ratios = (-values.detach() / torch.stack(slopes)).index_fill(0, torch.tensor([y], device=x.device), torch.inf)
    rival = int(ratios.argmin())
    return gaps[rival], float(values[rival].detach()), float(ratios[rival])


@torch.no_grad()
def measured(model: nn.Sequential, folder: Path, samples: int, device: str, console: Console) -> dict[str, object]:
    """Return the medians of the terms, and how many images each form certifies of those within the limit."""
    data, found, at = load("cifar10", "test", folder), dict[str, list[tuple[Terms, float, float]]](), 0
    while len(found.get("36/255", [])) < samples:
        x = (data.images[at : at + 1].to(device, torch.float32)) / data.max_value
        gap, value, limit = nearest_rival(model, x, int(data.labels[at]))
        at += 1
        if limit <= min(RADII.values()):
            continue
        expansion = Expansion(model, x, gap)
        for name, t in RADII.items():
            found.setdefault(name, []).append((expansion.terms(t), value, limit))
            console.print(f"image {at - 1}, {name}: {found[name][-1][0]}")
    figures: dict[str, object] = {"images looked at": at}
    for name, rows in found.items():
        shares = ("linear", "layerwise", "split", "coupled", "quadratic", "cross", "residual")
        figures[name] = {
            **{f"median {share}": statistics.median(getattr(terms, share) for terms, *_ in rows) for share in shares},
            "median ratio": statistics.median(terms.coupled / terms.older for terms, *_ in rows),
            "within the linear limit": sum(limit > RADII[name] for *_, limit in rows),
            "by the older forms": sum(value + terms.linear + terms.older < 0 for terms, value, _ in rows),
            "by coupled": sum(value + terms.linear + terms.coupled < 0 for terms, value, _ in rows),
        }
    return figures


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--networks", nargs="+", default=["6C2F-ours-seed0"], help="files in results/weights")
    options = parser.parse_args()
    console, figures = Console(width=160), dict[str, object]()
    for name in options.networks:
        model = load_trained(RESULTS / "weights" / f"{name}.safetensors")[0].to(options.device)
        figures[name] = measured(model, options.data, options.samples, options.device, console)
        console.print(name, figures[name])
    command = f"python -m benchmarks.quadratic_prototype --data DIR --networks {' '.join(options.networks)}"
    config = {"samples": options.samples, "device": options.device, "probes": PROBES, "lanczos": STEPS}
    write_record("quadratic_prototype", command, SEED, config, figures)


if __name__ == "__main__":
    main()
