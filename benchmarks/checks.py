"""Certificates of kept networks, saved and proven again by the independent checker, sample by sample.

Claim: no sample of a certificate is refused, and every radius of a network that the checker's engines reach is proven
again.  What no engine reaches is "cannot check", and counted.
Hardware: whatever it runs on; the record says which.  One process, one thread.
Trials: the first `--samples` images of the embedded MNIST sample or digits, certified with `method="checkable"`.
Networks on colour images are certified on the first images of CIFAR-10's test set with `method="liplt"`, and some of
them, whose curvature is small, with `method="compositional"` too: of those constants the checker's are never more.

    python -m benchmarks.checks --data-folder DATA [--samples 20] [--networks NAME ...] [--quick]

Networks that are not named keep their figures.
"""

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.harness import RESULTS, read_record, write_record
from curvcert.certificates import certify
from curvcert.checker import check_certificate
from curvcert.data import load_cifar10, load_demo_network, load_digits, load_mnist_network, load_mnist_sample
from curvcert.network import trace
from curvcert.network.network_file import save_network
from curvcert.training.kept import load_kept, read_digests

_BENT = ("6C2F-ours-seed0", "Lip-3C1F-ours-seed0")
"""Networks that are certified by their curvature too."""


@dataclass(frozen=True, eq=False)
class Case:
    """A network, and images and labels that it is certified on."""

    model: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    method: str = "checkable"


def cases(samples: int, data_folder: Path | None) -> dict[str, Case]:
    """Return the embedded networks and the kept ones, by name; those on CIFAR-10 where its folder is given."""
    digits, mnist = load_digits("test"), load_mnist_sample()
    colour = None if data_folder is None else load_cifar10("test", data_folder, download=False)
    # All of the images as float64 take a quarter of a GB.
    first = None if colour is None else replace(colour, images=colour.images[:samples], labels=colour.labels[:samples])
    grey = Case(load_mnist_network, mnist.as_float64()[:samples], mnist.labels[:samples])
    found = {
        "digits-embedded": Case(load_demo_network, digits.as_float64()[:samples], digits.labels[:samples]),
        "mnist-embedded": grey,
    }
    for name in sorted(read_digests(RESULTS)):
        if (RESULTS / "weights" / f"{name}.safetensors").is_file():
            model = partial(_kept, name)
            if name.startswith("MNIST"):
                found[name] = Case(model, grey.x, grey.y)
            elif first is not None:
                x, y = first.as_float64(), first.labels
                found[name] = Case(model, x, y, "liplt")
                if name in _BENT:
                    found[f"{name}, by curvature"] = Case(model, x, y, "compositional")
    return found


def _kept(name: str) -> nn.Module:
    return load_kept(RESULTS, name)[0]


def checked(case: Case, folder: Path) -> dict[str, Any]:
    """Certify, save, check, and return what was proven."""
    network = trace(case.model(), case.x[:1].float())
    begun = time.process_time()
    certificate = certify(network, case.x, case.y, method=case.method, progress=False)
    certified = time.process_time() - begun
    paths = folder / "certificate.safetensors", folder / "network.safetensors"
    certificate.save(paths[0])
    save_network(network, paths[1])
    begun = time.process_time()
    verdict = check_certificate(*paths, case.x.numpy(), certificate.label.numpy())
    proven, claimed = verdict.radii_proven
    return {
        "method": case.method,
        "samples": len(certificate),
        "statuses": dict(sorted(Counter(verdict.status).items())),
        "radii": claimed,
        "radii_proven": proven,
        "reasons": sorted({reason for reason in verdict.reasons if reason})[:3],
        "certify_s": round(certified, 1),
        "check_s": round(time.process_time() - begun, 1),
    }


def main() -> None:
    """Certify, check and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--data-folder", type=Path, help="where CIFAR-10 is; without it only grey images are certified")
    parser.add_argument("--networks", nargs="+", metavar="NAME", help="some of them; all by default")
    parser.add_argument("--quick", action="store_true", help="two samples of the embedded networks, and no record")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console, known = Console(soft_wrap=True), cases(2 if options.quick else options.samples, options.data_folder)
    names = ["digits-embedded", "mnist-embedded"] if options.quick else options.networks or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"There is no network called {', '.join(unknown)}. There are {', '.join(known)}.")
    before = read_record("checks")
    figures = dict(before.figures["networks"]) if before else {}
    refused = 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            figures[name] = checked(known[name], Path(folder))
        refused += sum(figures[name]["statuses"].get(status, 0) for status in ("not reached", "contradicted"))
        console.print(f"{name}: {figures[name]}", markup=False)
        if not options.quick:
            command = f"python -m benchmarks.checks --samples {options.samples}"
            config = {"samples": options.samples, "threads": 1}
            write_record("checks", command, 0, config, {"networks": dict(sorted(figures.items()))})
    raise SystemExit(1 if refused else 0)


if __name__ == "__main__":
    main()
