"""`curvcert demo`: the norms of the embedded network's layers, certified, estimated and exact."""

from collections.abc import Iterator

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from curvcert.data.demo_network import INPUT_SHAPE, load_demo_network
from curvcert.data.digits import load_digits
from curvcert.operators import Conv2d, Dense, norm_upper_bound
from curvcert.operators.base import AbstractLinearMap
from curvcert.operators.estimates import norm_estimate

NEXT_STEPS = """\
A bound is never below the exact value; an estimate can be, so nothing is certified with one.
Next: bound a layer of your own network,

    from curvcert.operators import Dense, norm_upper_bound
    norm_upper_bound(Dense(layer.weight.detach().double()))

or `make docs`, and open site/index.html: "What a bound means" says what these columns promise."""


def demo() -> None:
    """Bound the norms of the layers of a small network trained on handwritten digits."""
    console = Console()
    model = load_demo_network().double()
    digits = load_digits("test")
    with torch.no_grad():
        correct = (model(digits.as_float64()).argmax(dim=1) == digits.labels).double().mean()
    console.print(f"The embedded network classifies {correct:.1%} of {len(digits)} test digits as labelled.")
    console.print(layer_table(model))
    console.print(NEXT_STEPS, markup=False, highlight=False)


def layer_table(model: nn.Sequential) -> Table:
    """Return a table of the l2 norms of the linear layers, one row a layer."""
    table = Table(title="l2 operator norms of the layers", caption="excess = certified / exact - 1")
    table.add_column("layer")
    for heading in ("shape", "certified", "estimated", "exact", "excess"):
        table.add_column(heading, justify="right")
    for name, op in linear_layers(model):
        certified = float(norm_upper_bound(op, p=2))
        estimated = float(norm_estimate(op))
        exact = float(torch.linalg.matrix_norm(op.as_matrix(), 2))
        shape = f"{op.out_size} x {op.in_size}"
        numbers = (f"{value:.8f}" for value in (certified, estimated, exact))
        table.add_row(name, shape, *numbers, f"{certified / exact - 1:.1e}")
    return table


def linear_layers(model: nn.Sequential) -> Iterator[tuple[str, AbstractLinearMap]]:
    """Yield the name and the linear map of each dense and convolutional layer, in order."""
    shape: tuple[int, ...] = INPUT_SHAPE
    for position, layer in enumerate(model):
        if isinstance(layer, nn.Conv2d):
            (height, width) = (int(side) for side in layer.padding)
            op: AbstractLinearMap = Conv2d(
                layer.weight.detach(),
                shape,
                stride=(layer.stride[0], layer.stride[1]),
                padding=((height, height), (width, width)),
            )
        elif isinstance(layer, nn.Linear):
            op = Dense(layer.weight.detach())
        else:
            continue
        shape = op.out_shape
        yield f"{position} {type(layer).__name__}", op
