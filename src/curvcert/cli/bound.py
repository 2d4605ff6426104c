"""`curvcert bound`: Lipschitz and curvature constants of a model, and where they come from."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, Any, final

import typer
from rich.table import Table
from torch import Tensor

from curvcert._version import __version__
from curvcert.bounds.curvature import CURVATURE_METHODS, curvature
from curvcert.bounds.lipschitz import LIPSCHITZ_METHODS, lipschitz
from curvcert.bounds.lipschitz.problem import Pair
from curvcert.bounds.types import Bound
from curvcert.budget import budget_of
from curvcert.cli import options
from curvcert.cli.inputs import load_inputs, require_fit
from curvcert.cli.models import ModelChoice, load_network
from curvcert.cli.output import Output, assumed
from curvcert.errors import InvalidInput, UnsupportedActivation, UnsupportedModule, meant
from curvcert.network import Network
from curvcert.norms import validate_p
from curvcert.training.distributed import require_device

QUANTITIES: dict[str, tuple[Callable[..., Bound], str]] = {
    "lipschitz": (lipschitz, "L"),
    "curvature": (curvature, "K"),
}
MOST_ROWS = 20


def bound_command(
    model: options.ModelName,
    p: options.Norm = 2.0,
    q: Annotated[float | None, typer.Option(help="The norm of the outputs; p by default.")] = None,
    pair: Annotated[
        str | None, typer.Option(metavar="I,J", help="The difference of two outputs f_I - f_J, or all of them: all.")
    ] = None,
    logit: Annotated[int | None, typer.Option(metavar="I", help="One output f_I.")] = None,
    only: Annotated[str | None, typer.Option(help="lipschitz or curvature; both by default.")] = None,
    method: Annotated[
        str,
        typer.Option(
            help=f"auto (the least of all that apply); for L {', '.join(LIPSCHITZ_METHODS)}; "
            f"for K {', '.join(CURVATURE_METHODS)}."
        ),
    ] = "auto",
    side: Annotated[
        str, typer.Option(help="Of K of a pair or logit: both, or above or below alone, its eigenvalues in l2.")
    ] = "both",
    at: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="Bounds as seen from samples of this data: digits, a .npz file, ..."),
    ] = None,
    radius: Annotated[
        str | None, typer.Option(metavar="R", help="With --at: both points within R of the sample, such as 8/255.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="With --at: how many samples.")] = 4,
    normalise: options.Normalise = None,
    weights: options.Weights = None,
    evaluate: options.Evaluate = False,
    input_shape: options.InputShape = None,
    split: options.Split = "test",
    data_folder: options.DataFolder = None,
    device: options.Device = "cpu",
    budget: options.Budget = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Bound how fast a model (L), and its Jacobian (K), can change: provably.

    Everywhere, for the whole model, then for the difference of two classes:

        curvcert bound net.onnx

        curvcert bound net.onnx --pair 0,1 --p inf

    A PyTorch module that a function in net.py returns, with its input shape,
    which no data tells here:

        curvcert bound net:make_model --weights weights.safetensors --input-shape 1,28,28

    As seen from a few samples, and within a ball about each of them:

        curvcert bound runs/digits/model.safetensors --at digits --pair all

        curvcert bound runs/digits/model.safetensors --at digits --radius 8/255 --pair 3,5 --json
    """
    output = Output(json, quiet)
    if side != "both" and only == "lipschitz":
        raise InvalidInput(f"--side {side} is about curvature: leave out --only lipschitz.")
    wanted = _quantities(only if side == "both" else "curvature", method)
    if radius is not None and at is None:
        raise InvalidInput("--radius is about balls: add their centres, such as --at digits.")
    inputs = None if at is None else load_inputs(at, split, data_folder, samples, labelled=False)
    choice = ModelChoice(model, weights, normalise, input_shape, evaluate)
    network = load_network(choice, None if inputs is None else inputs.shape)
    if inputs is not None:
        require_fit(network, inputs, labels=False)
    network = network.to(require_device(device))
    arguments: dict[str, Any] = {
        "p": validate_p(p),
        "q": None if q is None else validate_p(q, "q"),
        "method": method,
        "at": None if inputs is None else inputs.x,
        "radius": None if radius is None else options.number(radius, "--radius"),
        "pair": _pair(pair),
        "logit": logit,
    }
    limit = budget_of(budget)
    with output.working(f"bounding the {' and the '.join(wanted)} constant"):
        found = [
            _answer(
                name,
                network,
                arguments
                | ({"side": side} if name == "curvature" else {})
                | {"budget": None if limit is None else limit.until(limit.seconds * (k + 1) / len(wanted))},
                alone=len(wanted) == 1,
            )
            for k, name in enumerate(wanted)
        ]
    pairs = list(combinations(range(network.outputs), 2)) if arguments["pair"] == "all" else None
    bounds = [one.bound for one in found if one.bound is not None]
    resting = dict.fromkeys(line for bound in bounds for line in bound.assumes)
    notes = dict.fromkeys(f"Note: {line}" for bound in bounds for line in bound.notes)
    tables = (table for one in found for table in one.tables(pairs))
    output.show(_summary(found, model), *tables, *assumed(list(resting)), *notes)
    lines = [f"{one.letter} {one.largest!r}" for one in found if one.bound is not None]
    content = {"command": "bound", "curvcert": __version__, "model": model} | {one.name: one.facts() for one in found}
    output.answer("\n".join(lines), content | ({} if pairs is None else {"pairs": pairs}))


@final
@dataclass(frozen=True, eq=False)
class Answer:
    """One constant: its bound, or the reason why there is none."""

    name: str
    letter: str
    bound: Bound | None
    reason: str = ""

    @property
    def largest(self) -> float:
        """The largest of its values: one that holds for every sample and pair."""
        return float("nan") if self.bound is None else float(self.bound.value.max())

    def facts(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        if self.bound is None:
            return {"value": None, "reason": self.reason}
        layers = [
            {"layer": term.layer, "quantity": term.quantity, "value": term.value, "method": term.method}
            for term in self.bound.per_layer
        ]
        return {
            "value": self.bound.value,
            "p": self.bound.p,
            "q": self.bound.q,
            "scope": type(self.bound.scope).__name__.lower(),
            "method": self.bound.method,
            "methods": self.bound.methods,
            "side": self.bound.side,
            "skipped": self.bound.skipped,
            "assumes": self.bound.assumes,
            "notes": self.bound.notes,
            "per_layer": layers,
        }

    def tables(self, pairs: list[tuple[int, int]] | None) -> list[Table]:
        """Return the layers as a table, and the values where there are several."""
        if self.bound is None:
            return []
        layers = Table(title=f"{self.name} by layers: {self.bound.method}")
        for heading in ("layer", "quantity", "bound", "by"):
            layers.add_column(heading, justify="right" if heading == "bound" else "left")
        for term in self.bound.per_layer:
            layers.add_row(term.layer, term.quantity, _range(term.value), term.method)
        several = [] if self.bound.value.numel() == 1 else [self._values(self.bound.value, pairs)]
        return ([layers] if self.bound.per_layer else []) + several

    def _values(self, value: Tensor, pairs: list[tuple[int, int]] | None) -> Table:
        """Return one row per sample, or one per pair of outputs; of samples with pairs, the range over the pairs."""
        by_pair = pairs is not None and value.dim() == 1
        rows = [f"{i}, {j}" for i, j in pairs] if by_pair and pairs is not None else [str(k) for k in range(len(value))]
        left = f"{len(rows) - MOST_ROWS} more: --json has them all" if len(rows) > MOST_ROWS else None
        table = Table(title=f"{self.letter} by {'pairs' if by_pair else 'samples'}", caption=left)
        table.add_column("pair" if by_pair else "sample")
        table.add_column("bound", justify="right")
        for name, row in zip(rows[:MOST_ROWS], value[:MOST_ROWS], strict=True):
            table.add_row(name, _range(row))
        return table


def _quantities(only: str | None, method: str) -> list[str]:
    """Return which constants to bound: those that were asked for, and that the method is one for."""
    if only is not None and only not in QUANTITIES:
        raise InvalidInput(f"--only is lipschitz or curvature, got {only!r}.")
    known = {"lipschitz": {"auto", *LIPSCHITZ_METHODS}, "curvature": {"auto", *CURVATURE_METHODS}}
    fitting = [name for name in QUANTITIES if method in known[name] and only in (None, name)]
    if not fitting:
        choices = {name for key, names in known.items() if only in (None, key) for name in names}
        what = "" if only is None else f" for {only}"
        raise InvalidInput(
            f"Unknown method {method!r}{what}. Choose one of: {', '.join(sorted(choices))}.{meant(method, choices)}"
        )
    return fitting


def _pair(text: str | None) -> Pair:
    if text is None or text == "all":
        return "all" if text else None
    values = options.whole_numbers(text, "--pair")
    if len(values) != 2:
        raise InvalidInput(f"--pair expects two outputs such as 0,1, or all, got {text!r}.")
    return values[0], values[1]


def _answer(name: str, network: Network, arguments: dict[str, Any], alone: bool) -> Answer:
    """Bound one constant; a network with kinks has no K, which is an answer unless K was all that was asked for."""
    function, letter = QUANTITIES[name]
    try:
        return Answer(name, letter, function(network, **arguments))
    except (UnsupportedActivation, UnsupportedModule) as error:
        if alone or name == "lipschitz":
            raise
        return Answer(name, letter, None, str(error))


def _summary(found: list[Answer], model: str) -> Table:
    table = Table(title=model)
    for heading in ("constant", "at most", "norms", "scope", "method"):
        table.add_column(heading)
    for one in found:
        if one.bound is None:
            table.add_row(one.name, "none", "", "", one.reason)
        else:
            norms, scope = f"l{one.bound.p:g} -> l{one.bound.q:g}", type(one.bound.scope).__name__.lower()
            scope += "" if one.bound.side == "both" else f", from {one.bound.side}"
            table.add_row(f"{one.letter} ({one.name})", _up(one.largest), norms, scope, one.bound.method)
    return table


def _range(value: Tensor) -> str:
    low, high = float(value.min()), float(value.max())
    return _up(high) if low == high else f"{_up(low)} .. {_up(high)}"


def _up(value: float) -> str:
    """Return six digits, rounded up: what is shown is a bound too.

    >>> _up(1.2345671), _up(2.0)
    ('1.23457', '2')
    """
    text = f"{value:.6g}"
    return text if float(text) >= value else f"{value * (1 + 1e-5):.6g}"
