"""The quadratic certificate at image size: how much of a trained network it proves, how fast, and where the loss goes.

Claim: what it loses beside the linear limit, margin over gradient, is small where training kept the network straight.
Hardware: whatever it runs on; the record says which.
Trials: test images in their order, as many as the time allows; a run that was stopped goes on where it was.

    python -m benchmarks.image_certificate --data DIR --models FILE ... --seconds 480 --device cuda --out FOLDER
    python -m benchmarks.image_certificate --data DIR --models FILE ... --terms 4      # the parts of the loss instead
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.certification import device_name
from benchmarks.harness import RESULTS, record_path
from curvcert.certificates import Certifier, certifier
from curvcert.certificates.methods.balls import Centres
from curvcert.certificates.methods.forms import ByForms, Rivals
from curvcert.certificates.methods.method import Samples
from curvcert.certificates.pointwise import evaluate_points
from curvcert.certificates.radii import decided
from curvcert.data import LabelledImages, load
from curvcert.network import Network, trace
from curvcert.nn.architectures import INPUT_SHAPES
from curvcert.nn.ensemble import with_mirror_image
from curvcert.propagation.expansion import Expansion
from curvcert.propagation.expansion_remainders import Ball
from curvcert.propagation.quadratic_forms import Form, Functions
from curvcert.results import Record
from curvcert.training.kept import read_digests
from curvcert.training.model_file import load_trained
from curvcert.whole_files import write_whole

RADII = (36 / 255, 72 / 255, 108 / 255)
BATCH = 8
"""Images between two looks at the clock."""

SAVED_EVERY = 8.0
"""Seconds between two times that a process writes what it has."""


def test_images(source: Path, most: int) -> tuple[Tensor, Tensor]:
    """Return the first test images of CIFAR-10, and labels: from its folder, or from a file with some of both."""
    if source.suffix == ".npz":
        with np.load(source) as held:
            data = LabelledImages(torch.from_numpy(held["images"]), torch.from_numpy(held["labels"]), max_value=255)
    else:
        data = load("cifar10", "test", source)
    return data.as_float64()[:most], data.labels[:most]


def network_of(path: Path, mirror: bool, device: str) -> Network:
    """Return the network of a model file, or it beside its mirror image."""
    model, recipe = load_trained(path)
    shape = INPUT_SHAPES[recipe.architecture]
    return trace(with_mirror_image(model, shape) if mirror else model, torch.zeros(1, *shape)).to(device)


class Progress:
    """What is known of a network's test images: kept in one file, (images,) each; NaN where nothing is yet."""

    def __init__(self, path: Path, images: int) -> None:
        """Go on with a file that is there."""
        self.path = path
        self.radius, self.limit, self.seconds = (np.full(images, np.nan) for _ in range(3))
        if path.is_file():
            with np.load(path) as held:
                self.radius, self.limit, self.seconds = held["radius"], held["limit"], held["seconds"]

    def open(self, share: int, of: int) -> np.ndarray:
        """Return the numbers of the images that are left of a share, every `of`-th."""
        numbers = np.arange(share, len(self.radius), of)
        left: np.ndarray = numbers[np.isnan(self.radius[numbers])]
        return left

    def save(self) -> None:
        """Write the file whole, or leave the old one."""
        part = self.path.with_suffix(".part.npz")
        np.savez_compressed(part, radius=self.radius, limit=self.limit, seconds=self.seconds)
        part.replace(self.path)

    def take(self, other: "Progress") -> None:
        """Add what another process found."""
        for mine, theirs in zip(
            (self.radius, self.limit, self.seconds), (other.radius, other.limit, other.seconds), strict=True
        ):
            mine[:] = np.where(np.isnan(mine), theirs, mine)

    def figures(self) -> dict[str, object]:
        """Return shares, in percent, of the images from the first on that are all done."""
        left = np.isnan(self.radius).nonzero()[0]
        n = int(left[0]) if len(left) else len(self.radius)
        radius, limit, count = self.radius[:n], self.limit[:n], max(n, 1)
        shares = {f"{round(255 * r)}/255": round(100 * float((radius >= r).sum()) / count, 2) for r in RADII}
        limits = {f"{round(255 * r)}/255": round(100 * float((limit >= r).sum()) / count, 2) for r in RADII}
        clean = round(100 * float((limit > 0).sum()) / count, 2)
        each = round(float(np.nanmean(self.seconds[:n])), 4) if n else None
        return {"images": n, "clean": clean, "certified": shares, "limit": limits, "seconds of an image": each}


def certified(ready: Certifier, x: Tensor, y: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return certified radii, 0 where wrong, and linear limits, 0 where wrong."""
    certificate = ready(x, y, progress=False)
    at = evaluate_points(
        ready.question.outputs, x.to(ready.network.device), y.to(ready.network.device), ready.question.deviations
    )
    limit = (at.margin / at.gradient_norm.clamp(min=1e-300)).amin(dim=1)
    right = certificate.correct.cpu()
    radius, limit = (torch.where(right, each.cpu(), 0.0) for each in (certificate.radius, limit))
    return np.asarray(radius), np.asarray(limit)


def run(
    network: Network, x: Tensor, y: Tensor, known: Progress, seconds: float, share: tuple[int, int], method: str
) -> None:
    """Certify a share of the images in their order until the time is used up."""
    end = time.monotonic() + seconds
    ready = certifier(network, 2, method, epsilons=RADII, progress=False)
    saved = time.monotonic()
    for numbers in np.array_split(known.open(*share), max(1, math.ceil(len(known.open(*share)) / BATCH))):
        if time.monotonic() > end:
            break
        begun = time.monotonic()
        known.radius[numbers], known.limit[numbers] = certified(ready, x[numbers], y[numbers])
        known.seconds[numbers] = (time.monotonic() - begun) / max(1, len(numbers))
        if time.monotonic() > saved + SAVED_EVERY:
            saved = time.monotonic()
            known.save()
    known.save()


def side_by_side(path: Path, options: argparse.Namespace, seconds: float, images: int) -> Progress:
    """Let several processes share the device, each with every so many images, and put together what they found."""
    name = path.stem + ("-mirror" if options.mirror else "")
    whole = Progress(options.out / f"{name}.npz", images)
    whole.save()
    shares = [Progress(options.out / f"{name}.npz", images) for _ in range(options.workers)]
    command = [sys.executable, "-m", "benchmarks.image_certificate", "--data", str(options.data), "--models", str(path)]
    command += [
        "--device",
        options.device,
        "--seconds",
        str(seconds),
        "--images",
        str(images),
        "--method",
        options.method,
        "--out",
        str(options.out),
    ]
    command += ["--mirror"] if options.mirror else []
    running = []
    for k, share in enumerate(shares):
        share.path = options.out / f"{name}-{k}-of-{len(shares)}.npz"
        share.save()
        running.append(subprocess.Popen([*command, "--share", str(k), str(len(shares))]))
    while any(process.poll() is None for process in running):
        time.sleep(5)
        told = Progress(options.out / f"{name}.npz", images)
        for share in shares:
            told.take(Progress(share.path, images))
        told.save()
        print(name, int((~np.isnan(told.radius)).sum()), told.figures(), flush=True)
    for share in shares:
        whole.take(Progress(share.path, images))
        share.path.unlink()
    whole.save()
    return whole


def terms(network: Network, x: Tensor, y: Tensor, images: int) -> list[dict[str, object]]:
    """Return what the loss is made of at each radius that the limit leaves, for the nearest rival of some images."""
    ready, found = certifier(network, 2, "quadratic", epsilons=RADII, progress=False), list[dict[str, object]]()
    step = next(step for step in ready.plan if isinstance(step, ByForms))
    for n in range(len(x)):
        if len({row["image"] for row in found}) == images:
            break
        at = evaluate_points(
            ready.question.outputs,
            x[n : n + 1].to(network.device),
            y[n : n + 1].to(network.device),
            ready.question.deviations,
        )
        samples = Samples(ready.question, x[n : n + 1].to(network.device), at)
        if not bool(samples.points.correct) or float(samples.limit) < RADII[0]:
            continue
        clock = Clock(network.device)
        centre = Centres.about(step.facts, samples, torch.zeros(1, dtype=torch.int64, device=network.device))
        expansion = Expansion(step.facts, centre.evaluation)
        clock.lap("tangents")
        functions = Functions(expansion, centre.rows[0])
        steep = torch.linalg.vector_norm(functions.gradient, dim=1)
        limits = torch.where(centre.margin[0].isfinite(), centre.margin[0] / steep.clamp(min=1e-300), torch.inf)
        rival = int(limits.argmin())
        _ = expansion.path_norms
        clock.lap("path maps")
        _ = expansion.bent_paths
        clock.lap("correlations")
        for radius in RADII:
            if float(limits[rival]) < radius:
                continue
            ball = Ball(expansion, decided(radius))
            clock.lap("ball")
            row: dict[str, object] = {
                "image": n,
                "radius": round(255 * radius),
                "room": float(centre.margin[0, rival] - steep[rival] * radius),
            }
            some = sorted(
                (k for k in range(len(limits)) if math.isfinite(float(limits[k]))), key=lambda k: float(limits[k])
            )
            for name, group in (("own", [rival]), ("shared", some)):
                form = Form(functions, group, ball)
                clock.lap("form")
                rise = form.rises([rival], [ball])[0, 0]
                clock.lap("trust region")
                row |= {f"{name} loss": float(rise - steep[rival] * radius), f"{name} rest": float(form.residual(ball))}
            rivals = Rivals(step.facts, centre, ready.question.deviations[y[n]])
            clock.lap("again")
            row["proven"] = bool(rivals.decided([decided(radius)])[rival] > 0)
            clock.lap("decided")
            g = functions.gradient[rival] / steep[rival]
            row["along the gradient"] = float(radius**2 / 2 * (g @ form.form.H @ g))
            row["rest over reach"] = [
                round(float((step_.rest / step_.far).median()), 4) for step_ in ball.steps.values()
            ]
            row["seconds"] = clock.laps()
            found.append(row)
            print(json.dumps(row), flush=True)
    return found


def recorded(folder: Path, name: str, model: str, commit: str) -> Path:
    """Write the record of what a run of a kept model left in a folder, maybe elsewhere, by the code of a commit."""
    found = {kind: json.loads((folder / f"{kind}.json").read_text()) for kind in ("certified", "terms")}
    digests = read_digests(RESULTS)[name]
    weights = {name: {key: digests[key] for key in ("sha256", "file")}}
    figures = {"certified": found["certified"][model], "terms of the nearest rival": found["terms"][model]}
    gpu, versions = found["certified"]["device"], {"torch": found["certified"]["torch"]}
    command = (
        f"python -m benchmarks.image_certificate --data DIR --models results/weights/{name}.safetensors --device cuda"
    )
    config = {"radii": list(RADII), "weights": weights, "code": commit}
    record = Record("image_certificate", command, date.today().isoformat(), versions, {"gpu": gpu}, 0, config, figures)
    return record.write(record_path("image_certificate"))


class Clock:
    """Seconds of the parts of a computation, the device waited for."""

    def __init__(self, device: torch.device) -> None:
        """Start now."""
        self._device, self._laps = device, dict[str, float]()
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """Note what went by since the last lap."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        now = time.monotonic()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    def laps(self) -> dict[str, float]:
        """Return all laps, and start anew."""
        found, self._laps = {name: round(value, 4) for name, value in self._laps.items()}, {}
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Certify, or take the loss apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=Path("data"), help="a folder, or a file of images and labels (.npz)"
    )
    parser.add_argument("--models", type=Path, nargs="+", default=[])
    parser.add_argument("--method", default="quadratic", help="of `curvcert certify`")
    parser.add_argument("--mirror", action="store_true", help="each beside its mirror image")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=480.0, help="for all models together, in equal shares")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=1, help="processes that share the device")
    parser.add_argument("--share", type=int, nargs=2, help="one process's number, and how many there are")
    parser.add_argument("--terms", type=int, default=0, help="take the loss of so many images apart instead")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument(
        "--record", nargs=3, metavar=("NAME", "MODEL", "COMMIT"), help="record what is in --out instead"
    )
    options = parser.parse_args(arguments)
    if options.record:
        print(recorded(options.out, *options.record))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    x, y = test_images(options.data, options.images)
    figures: dict[str, object] = {"device": device_name(options.device), "torch": torch.__version__}
    for place, path in enumerate(options.models):
        name = path.stem + ("-mirror" if options.mirror else "")
        seconds = (end - time.monotonic()) / (len(options.models) - place)
        if options.workers > 1 and not options.terms:
            figures[name] = side_by_side(path, options, seconds, len(x)).figures()
        else:
            network = network_of(path, options.mirror, options.device)
            share = tuple(options.share) if options.share else (0, 1)
            ending = f"-{share[0]}-of-{share[1]}" if options.share else ""
            with torch.no_grad():
                if options.terms:
                    figures[name] = terms(network, x, y, options.terms)
                else:
                    known = Progress(options.out / f"{name}{ending}.npz", len(x))
                    left = end - time.monotonic() if options.share else seconds
                    run(network, x, y, known, left, share, options.method)
                    figures[name] = known.figures()
        if not options.share:
            print(name, figures[name], flush=True)
            kind = "terms" if options.terms else "certified"
            write_whole(options.out / f"{kind}.json", (json.dumps(figures, indent=2) + "\n").encode())


if __name__ == "__main__":
    main()
