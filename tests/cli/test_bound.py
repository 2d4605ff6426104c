"""`curvcert bound`: the numbers are the library's, for a person and for a machine."""

import json
from itertools import combinations
from pathlib import Path

import pytest
import torch

import curvcert
from curvcert.cli.bound import _up
from curvcert.data import load_demo_network, load_digits
from curvcert.network import Network, trace
from tests.cli.running import Runner

DEMO = "curvcert.data:load_demo_network"


@pytest.fixture(scope="module")
def network() -> Network:
    return trace(load_demo_network(), torch.zeros(1, 1, 8, 8))


def facts(run: Runner, *words: object) -> dict:
    ran = run("bound", *words, "--json")
    assert ran.status == 0, ran.err
    assert ran.out.count("\n") == 1
    return json.loads(ran.out)


def test_global_bounds(run: Runner, network: Network) -> None:
    found = facts(run, DEMO, "--input-shape", "1,8,8")
    assert found["lipschitz"]["value"] == float(curvcert.lipschitz(network))
    assert found["curvature"]["value"] == float(curvcert.curvature(network))
    assert found["lipschitz"]["scope"] == "global"
    assert [term["layer"] for term in found["lipschitz"]["per_layer"]] == ["1", "3", "6"]


@pytest.mark.slow
def test_other_norms_methods_and_outputs(run: Runner, network: Network) -> None:
    found = facts(run, DEMO, "--input-shape", "1,8,8", "--p", "inf", "--q", 2, "--method", "product")
    assert set(found) == {"command", "curvcert", "model", "lipschitz"}
    assert found["lipschitz"]["value"] == float(curvcert.lipschitz(network, p=torch.inf, q=2, method="product"))
    assert found["lipschitz"]["p"] == "inf"
    found = facts(run, DEMO, "--input-shape", "1,8,8", "--pair", "all", "--method", "crc")
    assert found["curvature"]["value"] == curvcert.curvature(network, pair="all", method="crc").value.tolist()
    assert [tuple(pair) for pair in found["pairs"]] == list(combinations(range(10), 2))
    found = facts(run, DEMO, "--input-shape", "1,8,8", "--logit", 3, "--method", "unrolled")
    assert found["curvature"]["value"] == float(curvcert.curvature(network, logit=3, method="unrolled"))


@pytest.mark.slow
def test_samples_and_balls(run: Runner, network: Network) -> None:
    x = load_digits("test").as_float64()[:3]
    words = (DEMO, "--at", "digits", "--samples", 3, "--pair", "3,5")
    found = facts(run, *words, "--only", "lipschitz")
    assert found["lipschitz"]["value"] == curvcert.lipschitz(network, at=x, pair=(3, 5)).value.tolist()
    found = facts(run, *words, "--radius", "1/100", "--method", "local")
    assert (
        found["curvature"]["value"]
        == curvcert.curvature(network, at=x, radius=0.01, pair=(3, 5), method="local").value.tolist()
    )
    assert found["curvature"]["scope"] == "ball"


@pytest.mark.slow
def test_tables_for_a_person(run: Runner) -> None:
    ran = run("bound", DEMO, "--at", "digits", "--samples", 2, "--pair", "all", "--method", "anchored")
    assert ran.status == 0
    for text in ("L (lipschitz)", "K (curvature)", "anchor", "by layers", "L by samples", " .. "):
        assert text in ran.out
    ran = run("bound", DEMO, "--input-shape", "1,8,8", "--pair", "all", "--method", "liplt")
    assert "25 more: --json has them all" in " ".join(ran.out.split())


def test_quiet_is_the_number_alone(run: Runner, network: Network) -> None:
    ran = run("bound", DEMO, "--input-shape", "1,8,8", "--only", "lipschitz", "-q")
    assert ran == (0, f"L {float(curvcert.lipschitz(network))!r}\n", "")


def test_a_network_with_kinks_has_no_curvature_and_the_answer_says_so(run: Runner) -> None:
    found = facts(run, "nets:relu", "--input-shape", "1,8,8")
    assert found["lipschitz"]["value"] > 0
    assert found["curvature"]["value"] is None
    assert "kink" in found["curvature"]["reason"]
    assert "none" in run("bound", "nets:relu", "--input-shape", "1,8,8").out


@pytest.mark.parametrize("value", [1.2345611, 1.2345649999, 2.0, 0.1, 123456.7, 9.999999e-5])
def test_what_is_shown_is_a_bound_too(value: float) -> None:
    assert value <= float(_up(value)) <= value * (1 + 3e-5)


MINE = """
import torch
from torch import nn
from curvcert.activations import TANH, register_activation

class Mine(nn.Module):
    def forward(self, x):
        return torch.tanh(x)

register_activation(Mine, TANH)

def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), Mine(), nn.Linear(4, 10)).eval()
"""


def test_what_is_assumed_is_shown(folder: Path, run: Runner) -> None:
    (folder / "mine.py").write_text(MINE)
    line = "module Mine: computes activation 'tanh' as registered, sampled only"
    assert f"Assumed, not proven: {line}" in run("bound", "mine:net", "--input-shape", "1,8,8").out
    words = ("certify", "mine:net", "digits", "--samples", 1, "--method", "liplt", "--no-search", "--no-report")
    assert f"Assumed, not proven: {line}" in run(*words, "--out", "out").out
    assert json.loads(run(*words, "--out", "out", "--resume", "--json").out)["assumes"] == [line]


def test_a_budget_leaves_the_cheapest_bounds(run: Runner, network: Network) -> None:
    found = facts(run, DEMO, "--input-shape", "1,8,8", "--budget", "1e-9")
    assert found["lipschitz"]["value"] == float(curvcert.lipschitz(network, method="product"))
    assert float(curvcert.curvature(network)) < found["curvature"]["value"] < torch.inf
    assert any("the budget of" in reason for reason in found["curvature"]["skipped"])
    assert run("bound", DEMO, "--input-shape", "1,8,8", "--budget", "nan").status == 2
