"""Decisions: never against what a grid of points shows, and both answers where they are within reach."""

from fractions import Fraction

import pytest
import torch
from torch import nn

from curvcert.activations import RELU, TANH, Activation
from curvcert.errors import InvalidInput
from curvcert.network import Network, trace
from curvcert.network.builder import start
from curvcert.operators import Dense
from curvcert.properties import Case, Decision, Property, Row, decide
from curvcert.properties.decision import _Rows
from curvcert.properties.vnnlib import parsed
from tests.graph_families import GRAPHS
from tests.sampling import crossed

F64 = torch.float64


def identity(n: int = 1, activation: Activation | None = None) -> Network:
    value = start((n,), torch.device("cpu")).linear(Dense(torch.eye(n, dtype=F64)), torch.zeros(n, dtype=F64))
    return Network((value if activation is None else value.activate(activation, "a")).builder.nodes)


def row(*coefficients: float | str, most: float | str = 0, strict: bool = False) -> Row:
    return Row({k: Fraction(c) for k, c in enumerate(coefficients)}, Fraction(most), strict)


def over(low: float | str, high: float | str, *rows: Row, inputs: int = 1, outputs: int = 1) -> Property:
    return Property(inputs, outputs, (Case((Fraction(low),) * inputs, (Fraction(high),) * inputs, rows),))


def violates(net: Network, wanted: Property, found: Decision) -> bool:
    """Whether a witness does what it should, in exact arithmetic but for the network."""
    assert found.witness is not None
    x, y = found.witness.flatten(), net(found.witness[None]).flatten()
    for case in wanted.cases:
        inside = all(low <= Fraction(float(v)) <= high for low, v, high in zip(case.lower, x, case.upper, strict=True))
        values = [sum(float(c) * float(y[k]) for k, c in each.coefficients.items()) for each in case.rows]
        if inside and all(value <= each.most for value, each in zip(values, case.rows, strict=True)):
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "kind"), crossed(GRAPHS, ["one row", "two rows", "two cases"]))
def test_no_decision_against_a_grid_of_points(graph, kind: str) -> None:
    net = graph.network(3)
    low, high = (
        (*[Fraction(-3, 10)] * 3, Fraction(1, 4)),
        (Fraction(1, 10), Fraction(1, 5), Fraction(0), Fraction(1, 4)),
    )
    ends = torch.tensor([[float(v) for v in side] for side in (low, high)], dtype=F64)
    points = ends[0] + torch.rand(4000, 4, dtype=F64, generator=torch.Generator().manual_seed(0)) * (ends[1] - ends[0])
    c = torch.randn(2, net.outputs, dtype=F64, generator=torch.Generator().manual_seed(1))
    values = net(points).flatten(1) @ c.T
    verdicts = set()
    for quantile in (-2.0, -0.1, 0.0, 0.3, 1.0):
        least, size = values.amin(dim=0), values.amax(dim=0) - values.amin(dim=0)
        limits = least + quantile * size
        rows = [Row({k: Fraction(float(v)) for k, v in enumerate(c[j])}, Fraction(float(limits[j]))) for j in (0, 1)]
        groups = {"one row": [rows[:1]], "two rows": [rows], "two cases": [rows[:1], rows[1:]]}[kind]
        wanted = Property(4, net.outputs, tuple(Case(low, high, tuple(group)) for group in groups))
        found = decide(net, wanted, timeout=0.1)
        verdicts.add(found.verdict)
        met = (values < limits).all(dim=1) if kind == "two rows" else (values < limits)[:, : len(groups)].any(dim=1)
        assert not (found.verdict == "holds" and bool(met.any()))
        assert found.verdict != "violated" or violates(net, wanted, found)
    assert {"holds", "violated"} <= verdicts


def test_halving_decides_what_one_box_does_not() -> None:
    torch.manual_seed(0)
    net = trace(nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).eval(),
                torch.zeros(1, 2))  # fmt: skip
    grid = torch.cartesian_prod(*[torch.linspace(-1, 1, 201, dtype=F64)] * 2)
    least = float(net(grid).min())
    found = decide(net, over(-1, 1, row(1, most=least - 1e-3), inputs=2))
    assert found.verdict == "holds"
    assert found.boxes > 1
    assert decide(net, over(-1, 1, row(1, most=least + 1e-3), inputs=2)).verdict == "violated"


def test_a_tie_counts_as_the_inequality_says() -> None:
    net = identity()
    # Y_0 is X_0 but for a rounding that is accounted for.
    assert decide(net, over(1, 2, row(1, most="0.99999999"))).verdict == "holds"
    assert decide(net, over(1, 2, row(1, most="1.00000001"))).verdict == "violated"
    assert decide(net, over(0, 2, row(1, most=0, strict=True)), timeout=0.1).verdict in ("holds", "unknown")
    assert decide(net, over(0, 2, row(1, most=0)), timeout=0.1).verdict in ("violated", "unknown")
    relu = identity(activation=RELU)
    for strict in (False, True):
        assert decide(relu, over(-2, -1, row(1, most=0, strict=strict)), timeout=0.1).verdict != (
            "violated" if strict else "holds"
        )


def test_numbers_that_are_no_floats_are_kept_to() -> None:
    net = identity()
    # The box is the number 0.1 alone: no float is in it, yet what violates is known.
    found = decide(net, over("0.1", "0.1", row(1, most="0.2")))
    assert found.verdict == "violated"
    assert decide(net, over("0.1", "0.1", row(1, most="0.0999999999"))).verdict == "holds"
    # A witness is in the exact box, where a float is.
    wanted = over("0.1", "0.3", row(-1, most="-0.29999999999"))
    assert violates(net, wanted, decide(net, wanted))
    # Coefficients too: 0.1 x 10 <= 1 is violated by a hair that floats do not see.
    rows = _Rows.of((Case((), (), (row("0.1", "0.5", most="0.3"),)),), 2, torch.device("cpu"))
    assert rows.off.tolist() == [[2.0**-56, 0.0]] or rows.off[0, 0] > 0
    assert rows.off[0, 1] == 0
    assert Fraction(float(rows.below[0])) < Fraction("0.3") < Fraction(float(rows.above[0]))
    assert decide(identity(), over(1, 1, row("0.1", most="0.1")), timeout=0.1).verdict == "unknown"


def test_cases_without_points_or_without_rows() -> None:
    net = identity(2, TANH)
    assert decide(net, Property(2, 2, ())).verdict == "holds"
    assert decide(net, over(1, 0, row(1, 0), inputs=2, outputs=2)).verdict == "holds"
    assert decide(net, over(0, 1, inputs=2, outputs=2)).verdict == "violated"


def test_time_is_up() -> None:
    torch.manual_seed(1)
    net = trace(nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 1)).eval(),
                torch.zeros(1, 20))  # fmt: skip
    x = torch.rand(200_000, 20, dtype=F64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    wanted = over(-1, 1, row(1, most=float(net(x).min()) - 0.3), inputs=20)
    found = decide(net, wanted, timeout=0.05)
    assert found.verdict == "unknown"
    assert "time is up" in found.reason


def test_a_property_of_another_network_is_refused() -> None:
    with pytest.raises(InvalidInput, match="1 inputs and 1 outputs, the property 2 and 1"):
        decide(identity(), over(0, 1, row(1), inputs=2))
    with pytest.raises(InvalidInput, match="timeout"):
        decide(identity(), over(0, 1, row(1)), timeout=0.0)


def test_numbers_that_no_float_holds_are_refused() -> None:
    box = "(declare-const X_0 Real) (declare-const Y_0 Real) (assert (<= X_0 1)) (assert (>= X_0 (- 1e999)))"
    with pytest.raises(InvalidInput, match="beyond"):
        decide(trace(nn.Linear(1, 1).eval(), torch.zeros(1, 1)), parsed(f"{box} (assert (<= Y_0 0))"))
