"""Every experiment's quick version: it writes a record, arrays and a picture, and its parts fit together."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness import read_record
from benchmarks.reproduce import EXPERIMENTS, Options, load_arrays, reproduce
from curvcert.errors import InvalidInput
from curvcert.results import Record

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all: what one experiment trains another one finds."""
    return tmp_path_factory.mktemp("reproduce")


class Records(dict[str, Record]):
    """The records by name, each made when it is first asked for."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def __missing__(self, name: str) -> Record:
        self[name] = reproduce(EXPERIMENTS[name], Options(self.out, quick=True))
        return self[name]


@pytest.fixture(scope="module")
def records(out: Path) -> Records:
    return Records(out)


def test_all_of_the_papers_results_are_there() -> None:
    assert set(EXPERIMENTS) == {
        "table1",
        "crc-vs-ccrc",
        "anchored-depth",
        "attack-histogram",
        "attack-gap",
        "one-lipschitz-attacks",
        "curvature-vs-lipschitz",
        "tanh-anchor",
        "complexity",
        "two-radii",
    }


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_record_and_a_picture_are_written(name: str, out: Path, records: Records) -> None:
    made = records[name]
    assert read_record(name, out) == made
    assert records[name].config["quick"] is True
    assert records[name].command.startswith(f"python -m benchmarks reproduce {name}")
    picture = (out / f"{name}.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 5000


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != "table1"])
def test_arrays_stand_beside_the_record(name: str, out: Path, records: Records) -> None:
    assert records[name].figures
    arrays = load_arrays(out / f"{name}.npz")
    assert arrays
    assert all(array.dtype.kind in "fb" for array in arrays.values())
    assert not any(np.isnan(array).any() for array in arrays.values() if array.dtype.kind == "f")


def test_rows_of_table1(out: Path, records: Records) -> None:
    figures = records["table1"].figures
    assert len(figures["rows"]) == 6
    for row in figures["rows"]:
        assert {"model", "method", "certificate", "seed", "epochs", "clean", "certified", "attacked"} <= set(row)
        radii = load_arrays(out / row["arrays"])
        assert len(radii["radius"]) == row["samples"]
        for name, certified in row["certified"].items():
            above, below = (float(part) for part in name.split("/"))
            again = 100 * float(np.mean(radii["correct"] & (radii["radius"] >= above / below)))
            assert certified == pytest.approx(again, abs=0.006)
            assert certified <= row["attacked"][name] <= row["clean"]


def test_anchored_is_not_below_global_and_ours_is_not_below_the_paper(records: Records) -> None:
    rows = {(row["method"], row["certificate"]): row for row in records["table1"].figures["rows"]}
    for method in ("CCRC", "ours"):
        given = [rows[method, name] for name in ("paper-global", "paper-anchored")]
        assert given[0]["median_radius"] <= given[1]["median_radius"]
        for name, best in rows[method, "best"]["certified"].items():
            assert best >= given[0]["certified"][name]


def test_a_row_that_is_there_is_not_made_again(out: Path, records: Records) -> None:
    assert records["table1"].figures
    path = out / "table1" / "digits-ours-0-best.json"
    content = json.loads(path.read_text())
    content["figures"]["clean"] = 12.34
    before = path.read_text()
    path.write_text(json.dumps(content))
    try:
        again = reproduce(EXPERIMENTS["table1"], Options(out, quick=True, rows=("digits/ours/0/best",)))
        assert 12.34 in [row["clean"] for row in again.figures["rows"]]
    finally:
        path.write_text(before)


@pytest.mark.parametrize(("change", "message"), [({"epochs": 3}, "epochs = 2"), ({"samples": 3}, "samples = None")])
def test_a_row_of_another_run_is_not_overwritten(
    out: Path, records: Records, change: dict[str, int], message: str
) -> None:
    assert records["table1"].figures
    with pytest.raises(InvalidInput, match=message):
        reproduce(EXPERIMENTS["table1"], Options(out, quick=True, **change))


def test_radii_of_crc_are_ordered(out: Path, records: Records) -> None:
    assert records["crc-vs-ccrc"].figures
    arrays = load_arrays(out / "crc-vs-ccrc.npz")
    assert (arrays["ours"] >= arrays["paper"]).all()
    assert (arrays["ours"][arrays["correct"]] > 0).all()
    assert (arrays["ours"][~arrays["correct"]] == 0).all()


@pytest.mark.parametrize("name", ["attack-histogram", "attack-gap", "one-lipschitz-attacks"])
def test_witnesses_lie_outside_certified_balls_and_replay(name: str, out: Path, records: Records) -> None:
    figures = records[name].figures
    arrays = load_arrays(out / f"{name}.npz")
    for whose in ("paper", "ours"):
        found = figures[whose]
        assert found["replayed"] == found["attack_certificates"]
        assert sum(found["histogram"]["counts"]) == found["attack_certificates"]
        assert (arrays[f"{whose}_witness_distance"] >= arrays["radius"]).all()
        assert figures["certified"] <= found["at_most"] <= figures["clean"]
    assert figures["ours"]["attack_certificates"] >= figures["paper"]["attack_certificates"]


def test_some_sample_of_a_one_lipschitz_network_has_an_attack_certificate(records: Records) -> None:
    assert records["one-lipschitz-attacks"].figures["ours"]["attack_certificates"] > 0


def test_anchored_constants_are_below_global_ones(records: Records) -> None:
    for network in records["anchored-depth"].figures["networks"]:
        for name in ("lipschitz", "curvature"):
            assert network[name]["anchored_largest"] <= network[name]["global"] * (1 + 1e-9)


def test_where_the_condition_holds_the_curvature_radius_is_larger(out: Path, records: Records) -> None:
    assert records["curvature-vs-lipschitz"].figures
    arrays = load_arrays(out / "curvature-vs-lipschitz.npz")
    for whose in ("paper", "ours"):
        wins = arrays[f"{whose}_wins"]
        assert (arrays[f"{whose}_curvature"][wins] >= arrays[f"{whose}_lipschitz"][wins] * (1 - 1e-9)).all()
    assert (arrays["ours_curvature"] >= arrays["paper_curvature"]).all()


def test_a_quick_run_is_not_kept_among_the_results(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="never the figures"):
        reproduce(EXPERIMENTS["tanh-anchor"], Options(tmp_path / "out", quick=True), tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_a_full_run_is_kept_where_it_is_asked_for(tmp_path: Path) -> None:
    record = reproduce(EXPERIMENTS["tanh-anchor"], Options(tmp_path / "out"), tmp_path / "results")
    assert read_record("tanh-anchor", tmp_path / "results") == record
    assert len(load_arrays(tmp_path / "results" / "tanh-anchor.npz")["z"]) == 1001
    assert record.figures["anchored_slope_at_2"] == pytest.approx(0.5815729372, abs=1e-9)
