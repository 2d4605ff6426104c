"""A small audit finds nothing, and counts what it did; a counterexample is saved, replayed, and never believed."""

import json
import math
from dataclasses import replace

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks.damages import mutations
from curvcert.bounds.curvature import CURVATURE_METHODS
from curvcert.bounds.lipschitz import LIPSCHITZ_METHODS, lipschitz
from curvcert.certificates import certify
from curvcert.cli import main
from curvcert.cli.audit import audit_command, counts_table
from curvcert.cli.options import BUDGET_VARIABLE
from curvcert.errors import CurvcertError, InvalidFile, InvalidInput, SoundnessError, UnsupportedActivation
from curvcert.falsifier import (
    AIMS,
    Counterexample,
    Effort,
    audit,
    audit_aim,
    audit_network,
    falsify,
    falsify_bound,
    load_counterexample,
    replay,
    save_counterexample,
)
from curvcert.falsifier.counterexample_file import KIND, VERSION
from curvcert.falsifier.draws import Draw
from curvcert.falsifier.random_graphs import GRAPHS
from curvcert.falsifier.random_networks import FAMILIES, KINKED, SMOOTH, random_network
from curvcert.falsifier.random_products import PRODUCTS
from curvcert.network import Network
from curvcert.tensor_files import read_tensor_file, write_tensor_file
from tests.falsifier.tight import neuron, shortened, slope, tensor
from tests.sampling import crossed

pytestmark = pytest.mark.slow

SMALL = Effort(anchors=2, samples=12, ascents=12, steps=5, dear=0.4)
CHAINS = {name: make for name, make in FAMILIES.items() if name not in GRAPHS}
TINY = Effort(anchors=1, samples=2, ascents=2, steps=2, dear=0.0, best=0.0)


@pytest.fixture(scope="module")
def small():
    return audit(seed=8, networks=10, effort=SMALL)


def test_nothing_is_found_against_us(small) -> None:
    assert small.findings.counterexamples == ()
    assert small.findings.unconfirmed == 0


def test_the_audit_goes_over_the_table(small) -> None:
    assert small.networks == 10 and len(small.families) >= 5 and len(small.families.keys() & GRAPHS.keys()) >= 4
    assert len(small.activations) >= 8
    assert small.findings.checks.keys() == {"lipschitz", "curvature", "radius", "witness", "output"}
    cells = " | ".join(small.cells)
    for method in (*LIPSCHITZ_METHODS, *CURVATURE_METHODS, "auto"):
        assert f" {method}," in cells, method
    for part in ("global", "anchor", "ball", "l1", "l2", "linf", "certify"):
        assert part in cells, part


def test_counts_add_up(small) -> None:
    counts = small.to_dict()
    assert sum(counts["checks_by_kind"].values()) == counts["checks"] == sum(counts["checks_by_cell"].values())
    attacked = sum(number for name, number in counts["searches"].items() if name.startswith("attacked"))
    assert attacked == counts["checks_by_kind"]["radius"]
    assert counts["attacked_radii"] <= attacked and counts["ascended_hessians"] > 0
    json.dumps(counts, allow_nan=False)


def test_a_network_of_an_audit_is_met_again() -> None:
    first, again = (audit_network(5, 0, TINY) for _ in range(2))
    assert first.cells == again.cells and first.findings.checks == again.findings.checks
    one, other = (random_network(Draw.of(5, 0)).network for _ in range(2))
    x = torch.randn(3, *one.in_shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert len(one.nodes) == len(other.nodes) and torch.equal(one(x), other(x))


def test_random_networks_cover_every_family_and_activation() -> None:
    drawn = [random_network(Draw.of(0, k)) for k in range(600)]
    assert {one.family for one in drawn} == set(FAMILIES)
    assert sum(not one.network.is_chain for one in drawn) > 250
    drawn = [one for one in drawn if one.family not in PRODUCTS]
    assert {name for one in drawn for name in one.activations} == {act.name for act in (*SMOOTH, *KINKED)}


def test_an_audit_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    audit_network(5, 0, TINY)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("aim", crossed(AIMS, every=12))
def test_nothing_is_found_on_an_aimed_network(aim) -> None:
    result = audit_aim(aim, effort=Effort(ascents=24, steps=8, restarts=1))
    assert (result.findings.counterexamples, result.findings.unconfirmed, result.aimed) == ((), 0, 1)
    assert result.findings.total > 50


def test_aimed_networks_are_told_apart() -> None:
    names = [aim.name for aim in AIMS]
    assert len(set(names)) == len(names) >= 50


def test_minutes_end_an_audit() -> None:
    assert audit(seed=5, minutes=1e-6, effort=TINY).networks == 1


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, math.inf])
def test_falsify_counts_what_it_attacks(p) -> None:
    network = next(net for k in range(99) if (net := random_network(Draw.of(3, k)).network).outputs == 3)
    x = torch.randn(5, *network.in_shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cert = certify(network, x, p=p, method="lipschitz")
    findings = falsify(network, x, cert.label, cert, restarts=2, steps=5)
    assert findings.searches["attacked radius"] == int((cert.radius > 0).sum())
    assert not findings and "0 violations" in repr(findings)


@pytest.mark.parametrize("call", [
    lambda net, x, cert: falsify(net, x[:0], None, cert),
    lambda net, x, cert: falsify(net, x.repeat(2, 1), None, cert),
    lambda net, x, cert: falsify(net, x, 1 - cert.label, cert),
    lambda net, x, cert: falsify(net, x, None, cert, restarts=0),
    lambda net, x, cert: falsify_bound(lipschitz(net), net, "slope"),
    lambda net, x, cert: falsify_bound(3.0, net, "lipschitz"),
    lambda net, x, cert: falsify_bound(lipschitz(net, pair="all", at=x.repeat(3, 1)), net, "lipschitz", pair=(0, 0)),
    lambda net, x, cert: audit(networks=0),
    lambda net, x, cert: audit(minutes=math.nan),
    lambda net, x, cert: Effort(steps=0),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(call) -> None:
    network, x = slope()
    with pytest.raises(InvalidInput):
        call(network, x, certify(network, x))


def planted() -> Counterexample:
    network = neuron()
    (example,) = falsify_bound(shortened(lipschitz(network)), network, "lipschitz").counterexamples
    return example


def test_every_random_network_survives_a_file(tmp_path) -> None:
    for k in range(40):
        network = random_network(Draw.of(1, k)).network
        x = torch.randn(network.in_shape, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        zero = torch.zeros(network.outputs, dtype=torch.float64)
        example = Counterexample("radius", "test", network, x, x + 1, zero, math.inf, "global", x, 0.0, 0.5, 0, -1)
        loaded = load_counterexample(save_counterexample(example, tmp_path / "file"))
        torch.testing.assert_close(loaded.network(x[None]), network(x[None]), rtol=1e-14, atol=1e-14)
        assert loaded.p == math.inf and replay(loaded).refuted == replay(example).refuted


def test_a_declared_activation_cannot_be_saved(tmp_path) -> None:
    example = planted()
    (block,) = example.network.blocks
    declared = replace(block, activation=replace(block.activation, name="mine"))
    with pytest.raises(UnsupportedActivation):
        save_counterexample(replace(example, network=Network.of_blocks((declared,))), tmp_path / "file")


@pytest.mark.parametrize(("change", "reason"), [
    ({"claimed": 3.1}, "within the claim"),
    ({"scope": "anchor", "centre": tensor(5.0)}, "not the anchor"),
    ({"scope": "ball", "centre": tensor(5.0), "radius": 1.0}, "not in the ball"),
    ({"y": tensor(9.0)}, "within the claim"),
])  # fmt: skip
def test_a_replay_does_not_believe_what_it_is_told(change, reason) -> None:
    assert replay(planted()).refuted
    verdict = replay(replace(planted(), **change))
    assert not verdict.refuted and reason in verdict.reason


@pytest.mark.parametrize("change", [
    {"x": tensor(math.nan)},
    {"y": tensor(0.0, 1.0)},
    {"covector": tensor(math.inf)},
    {"claimed": math.nan},
    {"kind": "guess"},
    {"kind": "radius", "label": 4},
])  # fmt: skip
def test_a_counterexample_that_makes_no_sense_is_refused(change) -> None:
    with pytest.raises(InvalidInput):
        replace(planted(), **change)


def test_hostile_files_are_refused(tmp_path) -> None:
    path = save_counterexample(planted(), tmp_path / "file")
    content = path.read_bytes()
    for damaged in mutations(content, 300, seed=3):
        path.write_bytes(damaged)
        with pytest.raises(InvalidFile):
            load_counterexample(path)
    with pytest.raises(InvalidFile):
        load_counterexample(tmp_path / "none")


@pytest.mark.parametrize("change", [
    {"claimed": "much"}, {"label": 0.5}, {"p": 0.5}, {"p": None}, {"network": {}}, {"network": {"blocks": []}},
    {"network": {"blocks": [{"kind": "lambda"}]}}, {"network": {"blocks": 3}}, {"scope": "here"}, {"radius": None},
])  # fmt: skip
def test_files_that_are_sealed_and_senseless_are_refused(change, tmp_path) -> None:
    path = save_counterexample(planted(), tmp_path / "file")
    header, arrays = read_tensor_file(path, KIND, VERSION)
    write_tensor_file(path, KIND, VERSION, header | change, arrays)
    with pytest.raises(InvalidFile):
        load_counterexample(path)


def test_a_sealed_file_with_nan_is_refused(tmp_path) -> None:
    path = save_counterexample(planted(), tmp_path / "file")
    header, arrays = read_tensor_file(path, KIND, VERSION)
    for name in arrays:
        write_tensor_file(path, KIND, VERSION, header, arrays | {name: arrays[name] * math.nan})
        with pytest.raises(InvalidFile):
            load_counterexample(path)


@pytest.fixture
def few_aims(monkeypatch) -> None:
    monkeypatch.setattr("curvcert.cli.audit.AIMS", [aim for aim in AIMS if aim.name == "falling slopes"])


def invoke(*arguments: str):
    app = typer.Typer()
    app.command()(audit_command)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_reports_counts(small, few_aims) -> None:
    result = invoke("--networks", "1", "--seed", "5", "--json")
    assert result.exit_code == 0, result.output
    counts = json.loads(result.stdout)
    assert (counts["networks"], counts["aimed_networks"], counts["violations"]) == (1, 1, 0) and counts["files"] == []
    table = counts_table(small)
    found = small.findings
    rows = len(found.checks) + len(found.searches) + bool(small.refusals) + len(small.refusals)
    assert "0 violations" in str(table.title) and table.row_count == rows


def test_a_network_that_is_refused_is_counted_and_the_audit_goes_on(monkeypatch) -> None:
    # Four chains, with the least effort.  A convolution of network 3 of this seed reads nothing but padding.
    monkeypatch.setattr("curvcert.falsifier.random_networks.FAMILIES", CHAINS)
    monkeypatch.setenv(BUDGET_VARIABLE, "0.01")
    result = invoke("--networks", "400", "--seed", "13", "--json")
    assert result.exit_code == 0, result.output
    counts = json.loads(result.stdout)
    assert counts["networks"] == 4 and counts["violations"] == 0 and counts["checks"] > 100
    (reason,) = counts["refusals"]
    assert reason == "OutOfRange: The weights are too small for bounds in float64"
    assert counts["refused_networks"] == 1 and counts["refusals"][reason] > 1


def test_refusals_add_up_and_are_shown(monkeypatch) -> None:
    monkeypatch.setattr("curvcert.falsifier.random_networks.FAMILIES", CHAINS)
    refused = audit_network(13, 3, TINY)
    both = refused + refused
    assert both.refused_networks == 2
    assert both.refusals == {reason: 2 * count for reason, count in refused.refusals.items()}
    cells = [cell for column in counts_table(both).columns for cell in column.cells]
    assert all(f"refused by {reason}" in cells and f"{count}" in cells for reason, count in both.refusals.items())


@pytest.mark.parametrize(("error", "status"), [(InvalidInput, 3), (InvalidFile, 3), (SoundnessError, 1), (OSError, 3)])
def test_a_fault_is_no_refusal(error, status, monkeypatch, capsys, few_aims) -> None:
    def fail(*words):
        raise error("p is not a norm")

    monkeypatch.setattr("curvcert.falsifier.session.lipschitz", fail)
    with pytest.raises(SystemExit) as ended:
        main(["audit", "--networks", "1", "--quiet"])
    assert ended.value.code == status and "p is not a norm" in capsys.readouterr().err


def test_the_command_saves_what_it_finds_and_replays_it(tmp_path, monkeypatch, few_aims) -> None:
    monkeypatch.setattr("curvcert.falsifier.session.lipschitz", lambda *a: shortened(lipschitz(*a)))
    monkeypatch.setattr("curvcert.falsifier.random_networks.FAMILIES", {"aligned": FAMILIES["aligned"]})
    result = invoke("--networks", "1", "--seed", "1", "--out", str(tmp_path / "found"), "--json")
    assert result.exit_code == 1
    counts = json.loads(result.stdout)
    files = counts["files"]
    assert files and (counts["aimed_networks"], counts["networks"]) == (1, 1)
    first = json.loads(invoke("--first", "--out", str(tmp_path / "first"), "--json").stdout)
    assert first["files"] and (first["aimed_networks"], first["networks"]) == (1, 0)
    monkeypatch.undo()
    for file in files:
        again = invoke("--replay", file)
        assert again.exit_code == 1 and "Refuted" in again.stdout
    assert json.loads(invoke("--replay", files[0], "--json").stdout)["refuted"] is True


def test_a_replay_that_refutes_nothing_ends_well(tmp_path) -> None:
    path = save_counterexample(replace(planted(), claimed=4.0), tmp_path / "file")
    result = invoke("--replay", str(path))
    assert result.exit_code == 0 and "Not refuted" in result.stdout


def test_a_damaged_file_is_a_named_error(tmp_path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"nothing")
    result = invoke("--replay", str(path))
    assert isinstance(result.exception, CurvcertError)
