"""`curvcert demo`: what can be proven about the embedded network, beside what a search finds."""

from collections.abc import Iterator

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from curvcert.attacks import pgd
from curvcert.bounds.curvature import CURVATURE_METHODS, curvature
from curvcert.bounds.lipschitz import LIPSCHITZ_METHODS, lipschitz
from curvcert.certificates import certify
from curvcert.data.demo_network import INPUT_SHAPE, load_demo_network
from curvcert.data.digits import load_digits
from curvcert.falsifier import largest_hessian_lower_bound, largest_slope_lower_bound
from curvcert.network import Block, Network, trace
from curvcert.operators import norm_upper_bound
from curvcert.operators.base import AbstractLinearMap, Identity
from curvcert.operators.estimates import norm_estimate

SAMPLES = 16
RADIUS = 0.03
EPSILONS = (0.02, 0.05, 0.1, 0.2)
NEXT_STEPS = """\
A bound is never below what a search finds; an estimate can be, so nothing is certified with one.
Next: bound a network of your own,

    import curvcert
    net = curvcert.trace(model.eval(), example_input)
    print(curvcert.lipschitz(net), curvcert.curvature(net, pair=(0, 1)))
    print(curvcert.certify(net, x, y))

or `make docs`, and open site/index.html: "Your first bound" takes five minutes."""


def demo() -> None:
    """Bound a small network trained on handwritten digits, and certify some of them."""
    console = Console()
    network = trace(load_demo_network(), torch.zeros(1, *INPUT_SHAPE))
    digits = load_digits("test")
    images = digits.as_float64()
    correct = (network(images).argmax(dim=1) == digits.labels).double().mean()
    console.print(f"The embedded network classifies {correct:.1%} of {len(digits)} test digits as labelled.")
    console.print(layer_table(network))
    with console.status("searching for the largest slope ..."):
        found = largest_slope_lower_bound(network, images[:SAMPLES])
    console.print(lipschitz_table(network, images[:SAMPLES], found))
    with console.status("searching for the largest Hessian ..."):
        found = largest_hessian_lower_bound(network.difference(0, 1), images[:SAMPLES])
    console.print(curvature_table(network, images[:SAMPLES], found))
    with console.status("certifying ..."):
        console.print(certificate_table(network, images[:SAMPLES], digits.labels[:SAMPLES]))
    console.print(NEXT_STEPS, markup=False, highlight=False)


def layer_table(network: Network) -> Table:
    """Return a table of the l2 norms of the linear layers, one row a layer."""
    table = Table(title="l2 operator norms of the layers", caption="excess = certified / exact - 1")
    table.add_column("in front of")
    for heading in ("shape", "certified", "estimated", "exact", "excess"):
        table.add_column(heading, justify="right")
    for name, op in linear_layers(network):
        certified = float(norm_upper_bound(op, p=2))
        estimated = float(norm_estimate(op))
        exact = float(torch.linalg.matrix_norm(op.as_matrix(), 2))
        numbers = (f"{value:.8f}" for value in (certified, estimated, exact))
        table.add_row(name, f"{op.out_size} x {op.in_size}", *numbers, f"{certified / exact - 1:.1e}")
    return table


def linear_layers(network: Network) -> Iterator[tuple[str, AbstractLinearMap]]:
    """Yield the linear maps in front of each activation and of the output, with a name."""
    for block in network.blocks:
        if isinstance(block, Block):
            yield f"{block.name} ({block.activation.name})", block.W
            if not isinstance(block.G, Identity):
                yield "output", block.G


def lipschitz_table(network: Network, images: Tensor, found: float) -> Table:
    """Return a table of Lipschitz bounds by every method, beside the largest slope that a search found."""
    table = Table(title="l2 Lipschitz constant", caption=f"largest slope found by a search: {found:.4g}")
    for heading in ("method", "scope"):
        table.add_column(heading)
    for heading in ("bound", "bound / found"):
        table.add_column(heading, justify="right")
    for name in LIPSCHITZ_METHODS:
        where = _scope(name, images)
        value = lipschitz(network, method=name, **where).value  # type: ignore[arg-type]
        table.add_row(name, _describe(name), f"{float(value.median()):.4g}", _ratio(value, found, where))
    return table


def curvature_table(network: Network, images: Tensor, found: float) -> Table:
    """Return a table of curvature bounds of f_0 - f_1 by every method, beside the largest Hessian found."""
    table = Table(title="l2 curvature of f_0 - f_1", caption=f"largest Hessian found by a search: {found:.4g}")
    for heading in ("method", "scope"):
        table.add_column(heading)
    for heading in ("bound", "bound / found"):
        table.add_column(heading, justify="right")
    for name in CURVATURE_METHODS:
        where = _scope(name, images)
        value = curvature(network, method=name, pair=(0, 1), **where).value  # type: ignore[arg-type]
        table.add_row(name, _describe(name), f"{float(value.median()):.4g}", _ratio(value, found, where))
    return table


def certificate_table(network: Network, images: Tensor, labels: Tensor) -> Table:
    """Return a table of the share of digits certified, and of those that an attack leaves standing, by radius."""
    certificate = certify(network, images, labels, box=(0, 1), progress=False)
    table = Table(title=f"{len(images)} digits in l2", caption="the truth lies between the two columns")
    for heading in ("within", "certified", "not broken by PGD"):
        table.add_column(heading, justify="right")
    for eps in EPSILONS:
        broken = pgd(network, images, labels, eps, steps=20, restarts=2, box=(0.0, 1.0)).broken
        standing = 1 - float(broken.double().mean())
        table.add_row(f"{eps}", f"{certificate.certified_accuracy(eps):.0%}", f"{standing:.0%}")
    return table


def _scope(name: str, images: Tensor) -> dict[str, object]:
    if name == "anchored":
        return {"at": images}
    return {"at": images, "radius": RADIUS} if name == "local" else {}


def _describe(name: str) -> str:
    scopes = {"anchored": f"at {SAMPLES} digits, median", "local": f"within {RADIUS} of {SAMPLES} digits, median"}
    return scopes.get(name, "everywhere")


def _ratio(value: Tensor, found: float, where: dict[str, object]) -> str:
    """Return how far a global bound is above what was found; a narrower scope has another truth."""
    return "" if where else f"{float(value) / found:.2f}"
