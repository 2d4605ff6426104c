"""The arguments that several commands share, and how their text is read."""

import math
import os
from pathlib import Path
from typing import Annotated

import typer

from curvcert.cli.output import Output
from curvcert.errors import InvalidInput

BUDGET_VARIABLE = "CURVCERT_BUDGET"
"""The environment variable by which `audit` and `train` do a share of their work, to try a line out."""

CLAIM, MODEL, DATA, SEARCH, RUN, OUTPUT = (
    "What is proven",
    "The model",
    "The data",
    "The search for misclassified points",
    "How it runs",
    "What comes out",
)
"""The groups of options in the help."""

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="An ONNX file (.onnx), a model.safetensors by `curvcert train`, or package.module:factory, whose code is "
        "run with your rights: name only what you trust.",
        show_default=False,
    ),
]
DataName = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="digits, mnist, cifar10; a .npz file with x and y, a .npy or .pt file; or a folder of images, one folder "
        "per class.",
        show_default=False,
    ),
]
Labels = Annotated[
    Path | None,
    typer.Option(
        rich_help_panel=DATA,
        metavar="FILE",
        help="The labels of a .npy or .pt file that has none: .npy, .pt or a text.",
        show_default=False,
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        rich_help_panel=MODEL,
        help="The weights of package.module:factory, a .safetensors file or a .pt state dict; every name must match.",
    ),
]
Evaluate = Annotated[
    bool, typer.Option("--eval", rich_help_panel=MODEL, help="Put the factory's module into eval mode.")
]
Normalise = Annotated[
    tuple[str, str] | None,
    typer.Option(
        rich_help_panel=MODEL,
        metavar="MEAN STD",
        help="Put (x - MEAN) / STD in front of the model, so that radii are those of the raw input: one number, or "
        "one per channel with commas between.",
    ),
]
InputShape = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=MODEL, metavar="C,H,W", help="The shape of one input, where neither model nor data tell it."
    ),
]
Norm = Annotated[
    float, typer.Option("--p", rich_help_panel=CLAIM, help="The norm of the inputs: 2, inf, 1, or a number between.")
]
Split = Annotated[
    str, typer.Option(rich_help_panel=DATA, help="Which half of digits, mnist or cifar10: test or train.")
]
DataFolder = Annotated[
    Path | None,
    typer.Option(
        rich_help_panel=DATA, help="Where MNIST or CIFAR-10 is, or is to be downloaded to.", show_default=False
    ),
]
Device = Annotated[str, typer.Option(rich_help_panel=RUN, help="Where to compute: cpu, cuda, cuda:1 ...")]
Json = Annotated[
    bool,
    typer.Option("--json", rich_help_panel=OUTPUT, help="Print one JSON object, and nothing else, on standard output."),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", rich_help_panel=OUTPUT, help="No tables, no progress: the result alone.")
]
Budget = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=RUN,
        metavar="SECONDS",
        help="Stop after so long with what is proven by then, at least the cheapest bounds; there is no search then.",
    ),
]


def budget_share(output: Output) -> float:
    """Return the share of its usual work that a command is to do, and tell if that is not all of it.

    >>> budget_share(Output())
    1.0

    Raises:
        InvalidInput: if the environment variable is no such share.
    """
    given = os.environ.get(BUDGET_VARIABLE, "1")
    share = number(given, BUDGET_VARIABLE)
    if not 0 < share <= 1:
        raise InvalidInput(f"{BUDGET_VARIABLE} is a share of the usual work, above 0 and at most 1, got {given!r}.")
    if share < 1:
        output.notice(f"{BUDGET_VARIABLE} is {given}: a try-out that does that share of the usual work.")
    return share


def share_of(count: int, share: float) -> int:
    """Return that share of a count, at least 1.

    >>> share_of(200, 0.1), share_of(200, 0.001)
    (20, 1)
    """
    return max(1, round(share * count))


def number(text: str, option: str) -> float:
    """Return a number that may be written as a fraction.

    >>> number("8/32", "--radius")
    0.25

    Raises:
        InvalidInput: if it is not a finite number.
    """
    try:
        above, *below = (float(part) for part in text.split("/", 1))
        value = above / below[0] if below else above
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not math.isfinite(value):
        raise InvalidInput(f"{option} expects a number such as 0.1 or 36/255, got {text!r}.")
    return value


def numbers(text: str, option: str) -> tuple[float, ...]:
    """Return numbers with commas between.

    >>> numbers("1/4,0.5", "--eps")
    (0.25, 0.5)
    """
    return tuple(number(part, option) for part in text.split(","))


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """Return whole numbers with commas between.

    >>> whole_numbers("1,28,28", "--input-shape")
    (1, 28, 28)
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidInput(f"{option} expects whole numbers such as 1,28,28, got {text!r}.") from None
