"""`curvcert verify`: three answers with their exit statuses, for a person and for a machine."""

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch

from curvcert.network import trace
from tests.cli.running import Runner

SHAPE = ("--input-shape", "1,8,8")


def spec(path: Path, limit: float, outputs: int = 10, also: str = "") -> Path:
    """Write: within 0.01 of a grey image, Y_0 is never as low as that."""
    lines = [f"(declare-const X_{k} Real)(assert (<= X_{k} 0.51))(assert (>= X_{k} 0.49))" for k in range(64)]
    lines += [f"(declare-const Y_{k} Real)" for k in range(outputs)]
    path.write_text("\n".join([*lines, f"(assert (<= Y_0 {limit}))", also]))
    return path


def test_three_answers(run: Runner, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    nets = import_module("nets")
    value = float(
        trace(nets.small(), torch.zeros(1, 1, 8, 8))(torch.full((1, 1, 8, 8), 0.5, dtype=torch.float64))[0, 0]
    )
    ran = run("verify", "nets:small", spec(folder / "holds.vnnlib", value - 1), *SHAPE)
    assert (ran.status, ran.out.split(":")[0]) == (0, "holds")
    ran = run("verify", "nets:small", spec(folder / "violated.vnnlib", value), *SHAPE)
    assert (ran.status, ran.out.split(":")[0]) == (1, "violated")
    assert "X_0 = " in ran.out and "52 more inputs" in ran.out and "Y_9 = " in ran.out
    found = json.loads(run("verify", "nets:small", folder / "violated.vnnlib", *SHAPE, "--json").out)
    assert found["verdict"] == "violated" and found["in_own_arithmetic"]
    assert len(found["witness"]) == 64 and all(0.49 <= v <= 0.51 for v in found["witness"])
    assert found["outputs"][0][0] <= value and found["outputs"][1][0] <= value
    # Between what PGD reaches and what one box proves, and no time to halve it.
    net = trace(nets.relu(), torch.zeros(1, 1, 8, 8))
    with torch.no_grad():
        lowest = min(float(net(0.5 + 0.01 * torch.randn(500, 1, 8, 8).sign().double())[:, 0].min()) for _ in range(3))
    statuses = set()
    for share in torch.linspace(0, 0.3, 7).tolist():
        ran = run("verify", "nets:relu", spec(folder / "close.vnnlib", lowest - share), *SHAPE, "--timeout", 0.01, "-q")
        assert {0: "holds", 1: "violated", 4: "unknown"}[ran.status] == ran.out.strip()
        statuses.add(ran.status)
    assert 0 in statuses


@pytest.mark.parametrize(
    ("also", "outputs", "told"),
    [
        ("", 9, "64 inputs and 10 outputs, the property 64 and 9"),
        ("(assert (<= (+ X_0 X_1) 1))", 10, "Only boxes of inputs"),
        ("(assert (>= (* Y_0 Y_1) 1))", 10, "Expected a number, a declared variable"),
    ],
)
def test_what_is_no_property_of_this_network(run: Runner, folder: Path, also: str, outputs: int, told: str) -> None:
    ran = run("verify", "nets:small", spec(folder / "spec.vnnlib", 0, outputs, also), *SHAPE)
    assert ran.status == 2
    assert told in ran.err and not ran.out
