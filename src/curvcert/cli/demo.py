"""`curvcert demo`: certify an embedded network on embedded images, and show what that is worth."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table
from torch import Tensor

from curvcert._version import __version__
from curvcert.attacks import Attack, pgd
from curvcert.certificates import Certificate, certify
from curvcert.certificates.search import with_search
from curvcert.cli import options
from curvcert.cli.output import Output
from curvcert.data.mnist_sample import load_mnist_network, load_mnist_sample
from curvcert.folder_lock import locked
from curvcert.network import Network, trace
from curvcert.reporting import report

EPSILONS = (0.1, 0.25, 0.5, 0.75, 1.0)
SEED = 0
NEXT_STEPS = """\
Every share in the column "certified" is proven: no point within the radius changes the answer.

What to try next:
    curvcert train --recipe digits --out runs/digits      train a certifiable classifier, two minutes
    curvcert certify MODEL DATA --out DIR                 certify a model of your own
    curvcert audit --minutes 1                            attack curvcert's own certificates
    curvcert --help                                       everything else"""


def demo_command(
    out: Annotated[Path, typer.Option(help="The folder that the report is written into.")] = Path("curvcert-demo"),
    samples: Annotated[int, typer.Option(min=1, max=500, help="How many of the embedded images to certify.")] = 50,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Certify an embedded MNIST network on embedded test images, and write a report.

    Nothing is downloaded, and it takes about a minute on two cores:

        curvcert demo

    A quick look, with the report elsewhere:

        curvcert demo --samples 20 --out look
    """
    output = Output(json, quiet)
    with locked(out, "curvcert demo"):
        _demonstrate(out, samples, output)


def _demonstrate(out: Path, samples: int, output: Output) -> None:
    """Certify, search, tell, and write the report."""
    network, sample = trace(load_mnist_network(), torch.zeros(1, 1, 28, 28)), load_mnist_sample()
    x, y = sample.as_float64()[:samples], sample.labels[:samples]
    output.show(f"A tanh network, 784-100-100-100-100-100-10, and {samples} test images of MNIST, in l2.")
    certificate = certify(network, x, y, box=(0.0, 1.0), progress=False if output.quiet else None)
    attacks = searches(network, x, y)
    for attack in attacks:
        certificate = with_search(certificate, network, x, attack)
    output.show(accuracy_table(certificate))
    page = report(
        certificate,
        out / "report.html",
        network=network,
        x=x,
        y=y,
        title="The embedded MNIST network",
        command=f"curvcert demo --out {out} --samples {samples}",
        epsilons=EPSILONS,
        searches=attacks,
        seeds={"pgd": SEED},
    )
    output.show(NEXT_STEPS, f"\nThe report, to open in a browser: {page.resolve()}")
    output.answer(str(page.resolve()), _facts(certificate, page))


def _facts(certificate: Certificate, page: Path) -> dict[str, object]:
    """Return the table's numbers for a machine."""
    shares = [
        {"eps": eps, "certified": certificate.certified_accuracy(eps), "not_broken": certificate.searched_accuracy(eps)}
        for eps in EPSILONS
    ]
    accuracy = float(certificate.correct.double().mean())
    return {
        "command": "demo",
        "curvcert": __version__,
        "report": str(page.resolve()),
        "samples": len(certificate),
        "accuracy": accuracy,
        "at": shares,
    }


def searches(network: Network, x: Tensor, y: Tensor) -> list[Attack]:
    """Return what PGD finds at each radius of the table."""
    return [pgd(network, x, y, eps, steps=20, restarts=1, box=(0.0, 1.0), seed=SEED) for eps in EPSILONS]


def accuracy_table(certificate: Certificate) -> Table:
    """Return the shares that each certificate proves, and what an attack leaves, a row for each radius."""
    table = Table(
        title=f"Robust accuracy on {len(certificate)} images",
        caption="the truth lies between 'certified' and 'not broken by PGD'",
    )
    columns = {
        "by Lipschitz": certificate.lipschitz_radius,
        "by curvature": certificate.curvature_radius,
        "by shells": certificate.local_radius,
        "certified": certificate.radius,
    }
    for heading in ("within", *columns, "not broken by PGD"):
        table.add_column(heading, justify="right", style="bold" if heading == "certified" else None)
    for eps in (0.0, *EPSILONS):
        shares = [float((radius.nan_to_num(0.0) >= eps)[certificate.correct].sum()) for radius in columns.values()]
        proven = [f"{share / len(certificate):.1%}" for share in shares]
        table.add_row(f"{eps:g}", *proven, f"{certificate.searched_accuracy(eps):.1%}")
    return table
