r"""Constants of trained networks beside those of LipSDP and of so-robust: values and times.

Claim: "lipsdp" is within 0.1% of LipSDP-neuron's optimum for pairs and for the vector, in less time; the curvature of a
pair is below so-robust's on every network, from both sides and from one.
Hardware: whatever it runs on; the record says which.  One thread.
Trials: networks trained on the embedded digits from SEED; the vector of outputs, one pair, and for ours all pairs.
Ours and the rival's take turns within one run.  The solver answers for one pair: all pairs by it take as many times as
long as there are pairs.  The largest Hessian is found by ascent, and is attained.  Each network is written to the
record as it is measured, in place of its former figures, so that a run may be stopped and continued.

LipSDP is solved by cvxpy with Clarabel (the extra `sdp`), with one multiplier for each neuron: its value is what the
solver returns, within its tolerance of the optimum on an unknown side, and no bound.  so-robust is the released code of
Singla and Feizi (2020): their `curvature_bound` is written out here, with exact eigenvalues where they iterate.  Given
the folder of their code, that is run as well.  What is not installed is skipped, with a line that says so.

    python -m benchmarks.rivals [--so-robust DIR] [--only curvature lipschitz large] [--networks NAME ...] [--quick]
"""

import argparse
import importlib
import importlib.util
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

import curvcert
from benchmarks.curvature_tightness import largest_hessian
from benchmarks.harness import read_record, write_record
from benchmarks.networks import peak_gib
from benchmarks.reproduce.paper_bounds import PaperBounds, paper_pair_curvature
from curvcert.bounds.lipschitz.problem import Pair
from curvcert.data import load_digits
from curvcert.errors import InvalidInput
from curvcert.network import Block, Network
from curvcert.nn import make_activation

SEED, PAIR, STEPS = 0, (3, 8), 600
SLOPES = {"tanh": (0.0, 1.0), "sigmoid": (0.0, 0.25), "softplus": (0.0, 1.0)}
SO_ROBUST_CONSTANTS = {"tanh": (1.0, 0.7699), "sigmoid": (0.25, 0.09623), "softplus": (1.0, 0.25)}
"""The largest slope and the largest second derivative, as their code has them."""

Case = tuple[str, tuple[int, ...]]

LIPSDP: tuple[Case, ...] = (
    ("tanh", (64, 20, 20, 10)),
    ("sigmoid", (64, 24, 24, 10)),
    ("tanh", (64, 20, 20, 20, 10)),
    ("softplus", (64, 20, 20, 20, 20, 10)),
    ("tanh", (64, *(20,) * 5, 10)),
    ("sigmoid", (64, *(30,) * 4, 10)),
    ("tanh", (64, *(20,) * 10, 10)),
)
"""Where LipSDP is solved, 40 to 200 neurons: in layers of 30 at most, which its solver can take."""

CURVATURE: tuple[Case, ...] = (
    ("tanh", (64, 24, 24, 10)),
    ("sigmoid", (64, 24, 24, 10)),
    ("softplus", (64, 24, 24, 10)),
    ("tanh", (64, 20, 20, 20, 10)),
    ("softplus", (64, 20, 20, 20, 10)),
    ("softplus", (64, 100, 100, 10)),
    ("softplus", (64, 64, 10)),
)
LARGE: tuple[Case, ...] = (("tanh", (64, 1000, 1000, 10)),)
CASES = {"curvature": CURVATURE, "lipschitz": LIPSDP, "large": LARGE}
RELEASED = "so-robust, released code"
QUICK: tuple[Case, ...] = (("tanh", (64, 6, 6, 10)), ("softplus", (64, 6, 6, 10)))

Figures = dict[str, Any]


def trained(case: Case) -> tuple[Network, float]:
    """Return a network trained on the digits by cross-entropy alone, and its accuracy on the test digits."""
    activation, widths = case
    torch.manual_seed(SEED)
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), make_activation(activation)]
    model, data = nn.Sequential(*layers[:-1]), load_digits()
    x, y, optimiser = data.as_float64().float(), data.labels, torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(STEPS):
        pick = torch.arange(step * 128, (step + 1) * 128) % len(x)
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[pick]), y[pick]).backward()
        optimiser.step()
    network, test = curvcert.trace(model.eval(), torch.zeros(1, 1, 8, 8)), load_digits("test")
    return network, float((network(test.as_float64()).argmax(dim=1) == test.labels).double().mean())


def called(case: Case) -> str:
    """Return a network's name.

    >>> called(LIPSDP[0])
    'tanh 64-20-20-10'
    """
    return f"{case[0]} {'-'.join(map(str, case[1]))}"


def weights_of(network: Network) -> list[Tensor]:
    """Return the matrices of a feed-forward network, first to last."""
    blocks = [block for block in network.blocks if isinstance(block, Block)]
    return [block.W.as_matrix() for block in blocks] + [blocks[-1].G.as_matrix()]


def lipsdp_neuron(weights: list[Tensor], slopes: tuple[float, float]) -> float:
    """Return the value of LipSDP-neuron for slopes in [0, beta], by cvxpy and Clarabel."""
    cp: Any = importlib.import_module("cvxpy")
    beta, W = slopes[1], [weight.numpy() for weight in weights]
    sizes = [W[0].shape[1], *(len(w) for w in W[:-1])]
    T, rho = [cp.diag(cp.Variable(n, nonneg=True)) for n in sizes[1:]], cp.Variable()
    M: list[list[Any]] = [[np.zeros((n, m)) for m in sizes] for n in sizes]
    M[0][0] = rho * np.eye(sizes[0])
    for k, (w, t) in enumerate(zip(W, T, strict=False)):
        M[k + 1][k + 1], M[k + 1][k] = 2 * t, -beta * (t @ w)
        M[k][k + 1] = M[k + 1][k].T
    M[-1][-1] = M[-1][-1] - W[-1].T @ W[-1]
    cp.Problem(cp.Minimize(rho), [cp.bmat(M) >> 0]).solve(solver=cp.CLARABEL)
    return math.sqrt(float(rho.value))


def so_robust(weights: list[Tensor], activation: str) -> tuple[float, float]:
    """Return the released code's bounds m and M on minus the least and on the largest eigenvalue of f_i - f_j.

    `weights` end in the row of the pair.  Two to four layers, as there.
    """
    g, h = SO_ROBUST_CONSTANTS[activation]
    *inner, row = weights
    convex = activation == "softplus"
    sides = [row.clamp(max=0.0).abs(), row.clamp(min=0.0)] if convex else [row.abs(), row.abs()]
    totals, size, last = [0.0, 0.0], row.abs(), len(inner) - 1
    for k in range(last, -1, -1):
        if k == last - 1:
            parts = g * row.T * inner[last]
            sides = [parts.clamp(max=0.0).sum(dim=0).abs()[None], parts.clamp(min=0.0).sum(dim=0)[None]]
            size = torch.maximum(*sides)
            sides = sides if convex else [size, size]
        elif k < last - 1:
            size = g * size @ inner[k + 1].abs()
            sides = [size, size]
        prefix = math.prod(g * float(torch.linalg.matrix_norm(W, 2)) for W in inner[:k])
        for side, weight in enumerate(sides):
            totals[side] += (prefix * float(torch.linalg.matrix_norm(weight.T.sqrt() * inner[k], 2))) ** 2
    return h * totals[0], h * totals[1]


def so_robust_released(folder: Path) -> Callable[[list[Tensor], str], tuple[float, float]]:
    """Return the same by the released code itself, on the CPU, in its power iterations."""
    text = (folder / "utils.py").read_text(encoding="utf-8")
    text = re.sub(r"^.*(torchvision|matplotlib).*$", "", text, flags=re.MULTILINE).replace("'cuda'", "'cpu'")
    space: dict[str, Any] = {}
    exec(compile(text, "utils.py", "exec"), space)

    def bounds(weights: list[Tensor], activation: str) -> tuple[float, float]:
        torch.manual_seed(SEED)
        *inner, row = (weight.float() for weight in weights)
        both = torch.cat([row, torch.zeros_like(row)])
        parameters = [part for weight in (*inner, both) for part in (weight, weight[:, 0])]
        model = SimpleNamespace(nonlin=activation, num_layers=len(weights), parameters=lambda: parameters)
        m, M = space["curvature_bound"](model, torch.tensor([0]), torch.tensor([1]))
        return abs(float(m)), float(M)

    return bounds


def constant(network: Network, method: str, pair: Pair) -> float:
    """Return a Lipschitz constant, the largest one of all pairs."""
    return float(curvcert.lipschitz(network, method=method, pair=pair).value.amax())


def timed(call: Callable[[], float]) -> tuple[float, float]:
    """Return a value and the seconds that it took."""
    start = time.perf_counter()
    value = call()
    return value, time.perf_counter() - start


def beside_lipsdp(case: Case, with_solver: bool) -> Figures:
    """Return the constants of the vector and of a pair by ours and by LipSDP, and how long all pairs take us."""
    network, accuracy = trained(case)
    found: Figures = {"network": called(case), "neurons": sum(case[1][1:-1]), "accuracy": accuracy}
    for name, pair in (("vector", None), ("pair", PAIR)):
        weights = weights_of(network if pair is None else network.difference(*pair))
        figures: Figures = {}
        for method in ("product", "liplt", "lipsdp-recursion", "lipsdp"):
            value, seconds = timed(partial(constant, network, method, pair))
            figures[method] = {"value": value, "seconds": seconds}
        if with_solver:
            value, seconds = timed(partial(lipsdp_neuron, weights, SLOPES[case[0]]))
            figures["LipSDP-neuron"] = {"value": value, "seconds": seconds}
            figures["over_lipsdp_neuron"] = figures["lipsdp"]["value"] / value
        found[name] = figures
    _, found["all_pairs_seconds"] = timed(partial(constant, network, "lipsdp", "all"))
    if with_solver:
        found["all_pairs_over_one_pair_of_LipSDP-neuron"] = (
            found["all_pairs_seconds"] / found["pair"]["LipSDP-neuron"]["seconds"]
        )
    return found


def beside_so_robust(case: Case, released: Callable[[list[Tensor], str], tuple[float, float]] | None) -> Figures:
    """Return the curvature of a pair by every method, from either side, and what a search for the Hessian attains."""
    network, accuracy = trained(case)
    pair = network.difference(*PAIR)
    weights, test = weights_of(pair), load_digits("test").as_float64()
    below, above = so_robust(weights, case[0])
    bounds = {
        name: float(curvcert.curvature(network, pair=PAIR, method=name))
        for name in ("crc", "compositional", "unrolled")
    }
    sides = {side: float(curvcert.curvature(network, pair=PAIR, side=side)) for side in ("both", "above", "below")}
    theirs = {"both": max(below, above), "above": above, "below": below}
    starts = torch.cat([test[:24], torch.randn(24, 1, 8, 8, dtype=torch.float64)])
    found: Figures = {
        "network": called(case),
        "accuracy": accuracy,
        "bounds": {**bounds, "paper": float(paper_pair_curvature(PaperBounds(network)))},
        "ours": sides,
        "so-robust": theirs,
        "over_so_robust": {side: sides[side] / theirs[side] for side in sides},
        "largest_hessian_found": largest_hessian(pair, starts, 60),
    }
    if released is not None:
        m, M = released(weights, case[0])
        found[RELEASED] = {"both": max(m, M), "above": M, "below": m}
    return found


def large(case: Case) -> Figures:
    """Return value, seconds and memory of one pair of a network that LipSDP's solvers cannot take."""
    network, accuracy = trained(case)
    figures: Figures = {"network": called(case), "neurons": sum(case[1][1:-1]), "accuracy": accuracy}
    for method in ("liplt", "lipsdp-recursion", "lipsdp"):
        value, seconds = timed(partial(constant, network, method, PAIR))
        figures[method] = {"value": value, "seconds": seconds}
    return {**figures, "peak_gib": peak_gib()}


def measured(options: argparse.Namespace, console: Console) -> Iterator[tuple[str, Figures]]:
    """Yield the part of the record and the figures of each network, as they are measured."""
    released = None if options.so_robust is None else so_robust_released(options.so_robust)
    with_solver = all(importlib.util.find_spec(name) is not None for name in ("cvxpy", "clarabel"))
    if not with_solver:
        console.print("Skipped LipSDP-neuron: it needs cvxpy and clarabel, the extra sdp.")
    measure: dict[str, Callable[[Case], Figures]] = {
        "curvature": partial(beside_so_robust, released=released),
        "lipschitz": partial(beside_lipsdp, with_solver=with_solver),
        "large": large,
    }
    quick = {"curvature": QUICK, "lipschitz": QUICK[:1], "large": ()}
    for part in options.only:
        for case in (quick if options.quick else CASES)[part]:
            if options.networks is None or called(case) in options.networks:
                yield part, measure[part](case)


def with_network(figures: Mapping[str, list[Figures]], part: str, new: Figures) -> dict[str, list[Figures]]:
    """Return the figures of a record with those of one network in place of its former ones.

    What the released code said stays where it is not present, if the network is the same to the last digit.

    >>> name = called(LARGE[0])
    >>> with_network({"large": [{"network": name, "K": 2.0}]}, "large", {"network": name, "K": 1.0})["large"][0]["K"]
    1.0
    """
    by_name = {one["network"]: one for one in figures.get(part, ())}
    former = by_name.get(new["network"], {})
    if RELEASED in former and former["so-robust"] == new["so-robust"]:
        new = {RELEASED: former[RELEASED], **new}
    by_name[new["network"]] = new
    return {**figures, part: [by_name[name] for name in map(called, CASES[part]) if name in by_name]}


def main() -> None:
    """Measure; the record keeps the parts that are not measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--so-robust", type=Path, help="the folder of so-robust's code")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, help="the parts to measure; all by default")
    names = [called(case) for cases in CASES.values() for case in cases]
    parser.add_argument("--networks", nargs="+", choices=names, metavar="NAME", help="the networks; all by default")
    parser.add_argument("--quick", action="store_true", help="two tiny networks; writes no record")
    options, console = parser.parse_args(), Console()
    torch.set_num_threads(1)
    if options.so_robust is not None and not (options.so_robust / "utils.py").is_file():
        raise InvalidInput(f"{options.so_robust} holds no utils.py. Give the folder of so-robust's code.")
    config = {"threads": 1, "pair": list(PAIR), "steps": STEPS}
    for part, figures in measured(options, console):
        console.print(figures)
        if not options.quick:
            kept = read_record("rivals")
            figures_of_all = with_network(kept.figures if kept else {}, part, figures)
            write_record("rivals", "python -m benchmarks.rivals --so-robust DIR", SEED, config, figures_of_all)


if __name__ == "__main__":
    main()
