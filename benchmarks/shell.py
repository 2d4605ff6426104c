r"""The local and line certificates against the paper's anchored one, on networks trained on MNIST; how long they take.

Claim: the median radius is at least 1.25 times the paper's anchored one on a curvature-regularised 784-100^5-10
network and 1.8 times on a standard one; certified accuracy with it is never below that without it, and with the line
certificate on top never below that.
Hardware: whatever it runs on; the record says which.
Trials: one tanh network for each depth and training from SEED, the first POINTS test images.

The paper's radius is :math:`2m / (g + \sqrt{g^2 + 2Km})` with K = sqrt 2 times the anchored bound of the vector f,
here with verified norms and the lesser of two recursions, so that it is no larger than the paper's own.  "Without" is
everything that `certify` has but the local certificate and the line: global and anchored constants of pairs, and
Lipschitz radii.  "Local" adds the local certificate to that, "line" the line, which is all that `certify` has.

    python -m benchmarks.shell --data DIR [--points 200]      # DIR/MNIST/raw/*-ubyte, the official files
    python -m benchmarks.shell --plots                        # only the picture, from the record
    python -m benchmarks.shell --speed 6F 6C2F --device cuda --points 10000
    python -m benchmarks.shell --models 6F.safetensors --data DIR --device cuda --points 10000 --full-points 10000
"""

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import curvcert
from benchmarks.drawing import grid, legend_below
from benchmarks.harness import ROOT, figures_of, require_known_code, write_record
from benchmarks.local_curvature import KINDS, load
from benchmarks.networks import dense, six_c_two_f, six_f
from curvcert.bounds.curvature.compositional import compositional_bound
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Global
from curvcert.certificates import Certifier, certifier
from curvcert.certificates.pointwise import evaluate_points
from curvcert.certificates.radii import curvature_radius
from curvcert.data import load as load_data
from curvcert.network import LiveNetwork
from curvcert.operators.estimates import NormEstimates
from curvcert.picture_files import write_figure
from curvcert.training import load_model

SEED, BATCH = 0, 256
WIDTHS = {"784-100-100-10": (784, 100, 100, 10), "784-100^5-10": (784, 100, 100, 100, 100, 100, 10)}
RADII = [k / 100 for k in range(201)]
FULL_PART = 1000
DECIDED = (36 / 255, 72 / 255, 108 / 255)
IMAGES = ROOT / "docs" / "images"
CURVES = {"paper": "#999999", "without": "#4e79a7", "shell": "#e15759", "line": "#59a14f", "limit": "#bab0ac"}
LABELS = {
    "paper": "the paper's anchored radius",
    "without": "all but the local certificate and the line",
    "shell": "with the shell certificate",
    "line": "with the line certificate too",
    "limit": "the limit m / g (no certificate)",
}


def deep() -> nn.Sequential:
    """Return a fresh 784-100^5-10."""
    return dense(*WIDTHS["784-100^5-10"])


def train(widths: tuple[int, ...], x: Tensor, y: Tensor, weight: float, epochs: int) -> nn.Sequential:
    """Train with the paper's bound, its norms estimated, times `weight` in the loss."""
    torch.manual_seed(SEED)
    model, norms = dense(*widths), NormEstimates()
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for index in torch.randperm(len(x)).split(BATCH):
            loss = nn.functional.cross_entropy(model(x[index]), y[index])
            if weight:
                norms.start_step()
                problem = Problem(LiveNetwork(model, x[:1])(), 2, 2, Global())
                loss = loss + weight * compositional_bound(problem, norms, ["sdp"]).value.float()
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
    return model.eval()


def radii_of(network: curvcert.Network, x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return every curve's radii, 0 where misclassified, and the seconds that "shell" and "line" took, by name."""
    ready = certifier(network)
    points = evaluate_points(ready.question.outputs, x, y, ready.question.deviations)
    K = math.sqrt(2) * curvcert.curvature(network, at=x, method="anchored").value[:, None]
    paper = curvature_radius(points.margin, points.gradient_norm, K).scatter(1, points.label[:, None], torch.inf)
    limit = (points.margin / points.gradient_norm.clamp(min=1e-300)).scatter(1, points.label[:, None], torch.inf)
    seconds = {}
    alone = {method: certifier(network, method=method) for method in ("shell", "line")}
    for method in alone:
        begun = time.perf_counter()
        alone[method](x, y, progress=False)
        seconds[method] = time.perf_counter() - begun
    found = {
        "paper": paper.amin(dim=1),
        "without": _without(ready, "shell", "line")(x, y, progress=False).radius,
        "shell": _without(ready, "line")(x, y, progress=False).radius,
        "line": ready(x, y, progress=False).radius,
        "limit": limit.amin(dim=1),
    }
    return {name: torch.where(points.correct, value, 0.0) for name, value in found.items()}, seconds


def _without(ready: Certifier, *ways: str) -> Certifier:
    """Return a certifier that leaves some of its steps out."""
    return replace(ready, plan=tuple(step for step in ready.plan if step.way not in ways))


def measure(name: str, kind: str, network: curvcert.Network, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Return one network's figures."""
    radii, seconds = radii_of(network, x, y)
    correct = radii["limit"] > 0
    medians = {key: float(value[correct].median()) for key, value in radii.items()}
    return {
        "network": name,
        "training": kind,
        "correct": float(correct.double().mean()),
        "median_radius": medians,
        "local_over_paper": medians["shell"] / medians["paper"],
        "median_of_local_over_paper": float((radii["shell"] / radii["paper"])[correct].median()),
        "median_of_local_over_without": float((radii["shell"] / radii["without"])[correct].median()),
        "share_of_limit": float((radii["shell"] / radii["limit"])[correct].median()),
        "median_of_line_over_paper": float((radii["line"] / radii["paper"])[correct].median()),
        "line_share_of_limit": float((radii["line"] / radii["limit"])[correct].median()),
        "seconds_per_1000_points": {method: 1000 * took / len(x) for method, took in seconds.items()},
        "radii": RADII,
        "certified_accuracy": {
            key: [float((correct & (value >= eps)).double().mean()) for eps in RADII] for key, value in radii.items()
        },
    }


def draw(networks: list[dict[str, Any]]) -> None:
    """Draw certified accuracy against the radius: a row for each depth, a column for each training."""
    figure, axes = grid(2, 2, (9, 5.8), sharey=True)
    for axis, found in zip(axes.flat, networks, strict=True):
        for key, colour in CURVES.items():
            style = "--" if key == "limit" else "-"
            axis.plot(found["radii"], found["certified_accuracy"][key], style, color=colour, label=LABELS[key], lw=1.8)
        certified = zip(found["radii"], found["certified_accuracy"]["line"], strict=True)
        reach = next((eps for eps, share in certified if share < 0.01), RADII[-1])
        axis.set_xlim(0, min(RADII[-1], 1.5 * reach))
        axis.set_ylim(0, 1)
        axis.grid(True, alpha=0.25)
        axis.set_title(
            f"{found['network']}, {found['training']}: {found['median_of_local_over_paper']:.2f}"
            f" and {found['median_of_line_over_paper']:.2f} times",
            fontsize=10,
        )
    for axis in axes[-1]:
        axis.set_xlabel("radius, l2")
    for axis in axes[:, 0]:
        axis.set_ylabel("certified accuracy")
    legend_below(figure, axes.flat, columns=2, size=10)
    write_figure(figure, IMAGES / "local-certificate.svg")


def speed(names: list[str], points: int, device: str, console: Console) -> None:
    """Time the full radii of every point, and three radii decided, on fresh networks of the paper's shapes."""
    builders = {"6F": six_f, "6C2F": six_c_two_f, "784-100^5-10": deep}
    figures = []
    for name in names:
        torch.manual_seed(SEED)
        model = builders[name]().eval()
        shape = (784,) if name.startswith("784") else (3, 32, 32)
        x = torch.rand(points, *shape, dtype=torch.float64)
        network = curvcert.trace(model, x[:1].float()).to(device)
        begun = time.perf_counter()
        ready = certifier(network, method="shell")
        prepared = time.perf_counter() - begun
        ready(x[:64], progress=False)
        whole, decided = _timed(ready, x), _timed(certifier(network, method="shell", epsilons=DECIDED), x)
        figures.append(
            {"network": name, "points": points, "prepare_s": prepared, "radii_s": whole, "deciding_s": decided}
        )
        console.print(figures[-1])
    command = f"python -m benchmarks.shell --speed {' '.join(names)} --device {device} --points {points}"
    kind = torch.cuda.get_device_name() if device.startswith("cuda") else device
    write_record(f"shell_speed_{device}", command, SEED, {"device": kind}, {"timings": figures})


def speed_of_models(options: argparse.Namespace, console: Console) -> None:
    """Time trained models on the test images of their data: three radii decided, and full radii of the first ones.

    Full radii come in parts, and the record is written after each: what was measured is kept if the run is cut short.
    """
    for path in options.models:
        model, recipe = load_model(path)
        test = load_data(recipe.data, "test", options.data)
        x, y = (part[: options.points].to(options.device) for part in (test.as_float64(), test.labels))
        network = curvcert.trace(model, x[:1].float().cpu()).to(options.device)
        begun = time.perf_counter()
        ready = certifier(network, epsilons=DECIDED)
        prepared = time.perf_counter() - begun
        ready(x[:64], y[:64], progress=False)
        begun = time.perf_counter()
        certificate = ready(x, y, progress=False)
        decided = time.perf_counter() - begun
        found: dict[str, Any] = {"model": recipe.architecture, "loss": recipe.loss, "seed": recipe.seed}
        found |= {"points": options.points, "prepare_s": prepared, "deciding_s": decided}
        found["clean"] = 100 * float(certificate.correct.double().mean())
        found["certified"] = [100 * certificate.certified_accuracy(eps) for eps in DECIDED]
        found |= {"full_points": 0, "radii_s": 0.0}
        everything = certifier(network)
        for part in x[: options.full_points].split(FULL_PART):
            found["radii_s"] += _timed(everything, part)
            found["full_points"] += len(part)
            _write_model_record(options, found)
            console.print(found)
        _write_model_record(options, found)
        console.print(found)


def _write_model_record(options: argparse.Namespace, found: dict[str, Any]) -> None:
    command = f"python -m benchmarks.shell --models FILE --data DIR --device {options.device}"
    command += f" --points {options.points} --full-points {found['full_points']} --beside '{options.beside}'"
    kind = torch.cuda.get_device_name() if options.device.startswith("cuda") else options.device
    config = {"device": kind, "beside": options.beside}
    write_record(f"shell_{found['model']}_{options.device}", command, SEED, config, found)


def _timed(ready: Certifier, x: Tensor) -> float:
    begun = time.perf_counter()
    ready(x, progress=False)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def compare(folder: Path, points: int, epochs: int, console: Console) -> list[dict[str, Any]]:
    """Train and measure every network, and write the record."""
    (x, y), (test_x, test_y) = load(folder, "train"), load(folder, "t10k")
    networks = []
    for name, widths in WIDTHS.items():
        for kind, weight in KINDS.items():
            network = curvcert.trace(train(widths, x, y, weight, epochs), test_x[:1])
            networks.append(measure(name, kind, network, test_x[:points].double(), test_y[:points]))
            hidden = ("radii", "certified_accuracy")
            console.print({key: value for key, value in networks[-1].items() if key not in hidden})
    config = {"points": points, "epochs": epochs, "weights": KINDS}
    command = f"python -m benchmarks.shell --data DIR --points {points} --epochs {epochs}"
    write_record("shell", command, SEED, config, {"networks": networks})
    return networks


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder that holds MNIST/raw")
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--plots", action="store_true", help="draw the picture again from the record")
    parser.add_argument("--speed", nargs="+", choices=["6F", "6C2F", "784-100^5-10"], help="only time these")
    parser.add_argument("--models", nargs="+", type=Path, help="only time these trained models, on --data")
    parser.add_argument("--full-points", type=int, default=0, help="of how many images --models times full radii too")
    parser.add_argument("--beside", default="nothing", help="what else runs on the device while --models are timed")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    console = Console()
    if options.device != "cpu":
        require_known_code()
    if options.models:
        speed_of_models(options, console)
    elif options.speed:
        speed(options.speed, options.points, options.device, console)
    elif options.plots:
        draw(figures_of("shell")["networks"])
    elif options.data:
        draw(compare(options.data / "MNIST" / "raw", options.points, options.epochs, console))
    else:
        parser.error("pass --data, --plots or --speed")


if __name__ == "__main__":
    main()
