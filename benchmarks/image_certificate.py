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
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.certification import device_name
from curvcert.certificates import Certifier, certifier
from curvcert.certificates.methods.balls import Centres
from curvcert.certificates.methods.forms import Rivals
from curvcert.certificates.methods.method import Samples
from curvcert.certificates.pointwise import evaluate_points
from curvcert.certificates.radii import decided
from curvcert.data import LabelledImages, load
from curvcert.network import Network, trace
from curvcert.nn.architectures import INPUT_SHAPES
from curvcert.nn.ensemble import with_mirror_image
from curvcert.propagation.expansion import Ball, Expansion, Form, Functions
from curvcert.training.model_file import load_trained
from curvcert.whole_files import write_whole

RADII = (36 / 255, 72 / 255, 108 / 255)
BATCH = 16
"""Images between two looks at the clock."""


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
        self.radius, self.limit = (np.full(images, np.nan) for _ in range(2))
        self.seconds = 0.0
        if path.is_file():
            with np.load(path) as held:
                self.radius, self.limit, self.seconds = held["radius"], held["limit"], float(held["seconds"])

    @property
    def done(self) -> int:
        """How many images are done; they are done in their order."""
        return int(np.isfinite(self.radius).sum())

    def save(self) -> None:
        """Write the file whole, or leave the old one."""
        part = self.path.with_suffix(".part.npz")
        np.savez_compressed(part, radius=self.radius, limit=self.limit, seconds=self.seconds)
        part.replace(self.path)

    def figures(self) -> dict[str, object]:
        """Return shares of the images done, in percent."""
        radius, limit = self.radius[: self.done], self.limit[: self.done]
        n = max(self.done, 1)
        shares = {f"{round(255 * r)}/255": round(100 * float((radius >= r).sum()) / n, 2) for r in RADII}
        limits = {f"{round(255 * r)}/255": round(100 * float((limit >= r).sum()) / n, 2) for r in RADII}
        clean = round(100 * float((limit > 0).sum()) / n, 2)
        per_image = round(self.seconds / n, 4)
        return {"images": self.done, "clean": clean, "certified": shares, "limit": limits, "s_per_image": per_image}


def certified(ready: Certifier, x: Tensor, y: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return certified radii, 0 where wrong, and linear limits, 0 where wrong."""
    certificate = ready(x, y, progress=False)
    at = evaluate_points(ready.question.outputs, x.to(ready.network.device), y.to(ready.network.device), ready.question.deviations)
    limit = (at.margin / at.gradient_norm.clamp(min=1e-300)).amin(dim=1)
    right = certificate.correct.cpu()
    return torch.where(right, certificate.radius.cpu(), 0.0).numpy(), torch.where(right, limit.cpu(), 0.0).numpy()


def run(network: Network, x: Tensor, y: Tensor, known: Progress, seconds: float) -> None:
    """Certify images in their order until the time is used up."""
    ready, end, told = certifier(network, 2, "quadratic", epsilons=RADII, progress=False), time.monotonic() + seconds, 0
    while known.done < len(x) and time.monotonic() < end:
        begun, start = time.monotonic(), known.done
        part = slice(start, min(start + BATCH, len(x)))
        known.radius[part], known.limit[part] = certified(ready, x[part], y[part])
        known.seconds += time.monotonic() - begun
        if known.done // 128 > told or known.done < 64:
            told = known.done // 128
            known.save()
            print(known.path.stem, known.figures(), flush=True)
    known.save()


def terms(network: Network, x: Tensor, y: Tensor, images: int) -> list[dict[str, object]]:
    """Return what the loss is made of at each radius that the limit leaves, for the nearest rival of some images."""
    ready, found = certifier(network, 2, "quadratic", epsilons=RADII, progress=False), list[dict[str, object]]()
    step = next(step for step in ready.plan if step.way == "quadratic")
    for n in range(len(x)):
        if len({row["image"] for row in found}) == images:
            break
        at = evaluate_points(ready.question.outputs, x[n : n + 1].to(network.device), y[n : n + 1].to(network.device), ready.question.deviations)
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
            row: dict[str, object] = {"image": n, "radius": round(255 * radius), "room": float(centre.margin[0, rival] - steep[rival] * radius)}
            some = sorted((k for k in range(len(limits)) if math.isfinite(float(limits[k]))), key=lambda k: float(limits[k]))
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
    parser.add_argument("--data", type=Path, required=True, help="a folder, or a file of images and labels (.npz)")
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--mirror", action="store_true", help="each beside its mirror image")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=480.0, help="for all models together, in equal shares")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--terms", type=int, default=0, help="take the loss of so many images apart instead")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    x, y = test_images(options.data, options.images)
    end = time.monotonic() + options.seconds
    figures: dict[str, object] = {"device": device_name(options.device), "torch": torch.__version__}
    for place, path in enumerate(options.models):
        name = path.stem + ("-mirror" if options.mirror else "")
        network = network_of(path, options.mirror, options.device)
        with torch.no_grad():
            if options.terms:
                figures[name] = terms(network, x, y, options.terms)
            else:
                known = Progress(options.out / f"{name}.npz", len(x))
                run(network, x, y, known, (end - time.monotonic()) / (len(options.models) - place))
                figures[name] = known.figures()
                print(name, figures[name], flush=True)
        kind = "terms" if options.terms else "certified"
        write_whole(options.out / f"{kind}.json", (json.dumps(figures, indent=2) + "\n").encode())


if __name__ == "__main__":
    main()
