"""The kept weights: each has its digest and its record, loads, and certifies as it was recorded."""

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks import command_line
from benchmarks.reproduce import EXPERIMENTS, Options, load_arrays
from benchmarks.reproduce.anchored_depth import anchored_constants
from benchmarks.reproduce.crc_vs_ccrc import against
from benchmarks.reproduce.experiment import RADII, make_record
from benchmarks.reproduce.keeping import keep_all
from benchmarks.reproduce.models import ROUNDED, Subject, experiment_recipe, model_folder, on_digits
from benchmarks.reproduce.paper_bounds import PaperBounds, paper_pair_curvature
from benchmarks.reproduce.reproducing import keep
from benchmarks.reproduce.table1 import of_seeds
from benchmarks.reproduce.weights import KEPT_BELOW, described, keep_weights
from curvcert.bounds.curvature.singla2020 import CRCOptions, crc_radii
from curvcert.certificates import certify
from curvcert.certificates.record import SLACK
from curvcert.data import load, load_cifar10, load_mnist_sample
from curvcert.errors import InvalidFile, InvalidInput
from curvcert.network import trace
from curvcert.results import Record
from curvcert.training import Recipe, load_kept, load_model, load_trained, read_digests, save_model
from curvcert.training.kept import FOLDER, file_digest, kept_content
from curvcert.training.trainer import make_model

RESULTS = Path(__file__).parents[3] / "results"
KEPT = {name: facts for name, facts in read_digests(RESULTS).items() if facts["file"]}
ROWS = {path.stem: Record.read(path) for path in sorted((RESULTS / "table1").glob("*.json"))}
SAMPLES = 3


def subject(name: str, x: torch.Tensor, y: torch.Tensor) -> Subject:
    model, recipe = load_kept(RESULTS, name)
    return Subject(model, trace(model, x[:1].float()), x, y, recipe)


def test_every_file_has_its_digest_and_no_other_is_there() -> None:
    files = {name: facts for name, facts in KEPT.items() if "mirror_of" not in facts}
    assert {path.name for path in (RESULTS / FOLDER).glob("*.safetensors")} == {f"{name}.safetensors" for name in files}
    for facts in files.values():
        path = RESULTS / facts["file"]
        assert (file_digest(path), path.stat().st_size) == (facts["sha256"], facts["bytes"])
        assert path.stat().st_size < KEPT_BELOW


def test_no_weights_are_there_twice() -> None:
    held = [digest_of_weights(path) for path in (RESULTS / FOLDER).glob("*.safetensors")]
    assert len(set(held)) == len(held)


def digest_of_weights(path: Path) -> str:
    """Return a digest of what a file holds, whatever it says of it."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("name", [name for name, facts in KEPT.items() if "mirror_of" in facts])
def test_the_file_of_a_mirrored_network_is_made_byte_for_byte(name: str, tmp_path: Path) -> None:
    path = tmp_path / "made.safetensors"
    command_line.weights(name, path)
    assert (file_digest(path), path.stat().st_size) == (KEPT[name]["sha256"], KEPT[name]["bytes"])
    made, kept = load_model(path), load_kept(RESULTS, name)
    assert made[1] == kept[1] and kept[1].mirror
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(made[0](x), kept[0](x))


@pytest.mark.parametrize("name", KEPT)
def test_kept_weights_load(name: str) -> None:
    model, recipe = load_kept(RESULTS, name)
    assert name.startswith(recipe.architecture)
    assert name.endswith(f"seed{recipe.seed}")
    assert not model.training


def test_every_model_belongs_to_records_that_name_its_digest() -> None:
    assert KEPT
    for name, facts in read_digests(RESULTS).items():
        assert facts["records"]
        for record in facts["records"]:
            named = Record.read(RESULTS / f"{record}.json").config["weights"][name]
            assert named["sha256"] == facts["sha256"]
            assert named["file"] == facts["file"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_record_names_the_weights_it_was_measured_on(name: str) -> None:
    for path in [RESULTS / f"{name}.json", *(RESULTS / name).glob("*.json")]:
        if path.is_file():
            record = Record.read(path)
            assert set(record.config.get("weights", {})) == set(EXPERIMENTS[name].models(record))


def test_rows_of_the_table_are_the_rows_own_records() -> None:
    rows = Record.read(RESULTS / "table1.json").figures["rows"]
    assert len(rows) == len(ROWS)
    for row in rows:
        own = ROWS["-".join(str(row[key]) for key in ("model", "method", "seed", "certificate"))]
        assert {key: row[key] for key in own.figures} == own.figures
        assert (row["hardware"], row["command"]) == (own.hardware, own.command)
        assert row["weights"] == {key: facts["sha256"] for key, facts in own.config["weights"].items()}


@pytest.mark.parametrize("row", ROWS)
def test_accuracies_of_a_row_are_those_of_its_radii(row: str) -> None:
    figures = ROWS[row].figures
    arrays = load_arrays(RESULTS / figures["arrays"])
    assert len(arrays["radius"]) == figures["samples"]
    assert figures["clean"] == pytest.approx(100 * arrays["correct"].mean(), abs=0.006)
    # A certificate's file holds radii that are lower by the checker's slack.
    for lowered in (1.0, 1 - SLACK):
        for name, radius in RADII.items():
            share = 100 * (arrays["correct"] & (arrays["radius"] * lowered >= radius)).mean()
            assert figures["certified"][name] == pytest.approx(share, abs=0.006)


@pytest.mark.parametrize("depth", [3, 4, 5, 6])
def test_anchored_constants_of_mnist_are_the_recorded_ones(depth: int) -> None:
    sample, arrays = load_mnist_sample(), load_arrays(RESULTS / "anchored-depth.npz")
    chosen = subject(f"MNIST-{depth}F-standard-seed0", sample.as_float64()[:SAMPLES], sample.labels[:SAMPLES])
    for name, found in anchored_constants(chosen).items():
        assert found.numpy() == pytest.approx(arrays[f"{name}_{depth}"][:SAMPLES], rel=1e-6)


def test_a_radius_of_the_mnist_network_is_the_recorded_one_or_larger() -> None:
    sample, arrays = load_mnist_sample(), load_arrays(RESULTS / "crc-vs-ccrc.npz")
    chosen = subject("MNIST-6F-ccrc-seed0", sample.as_float64()[:1], sample.labels[:1])
    pairs, others = against(chosen.network, int(chosen.y))
    K = paper_pair_curvature(PaperBounds(chosen.network)).expand(len(others))
    found = crc_radii(pairs, chosen.x, -K, K, CRCOptions()).amin(dim=1)
    assert 1 - 1e-9 <= float(found) / float(arrays["paper"][0]) <= 1.01


@pytest.mark.skipif("CURVCERT_DATA" not in os.environ, reason="needs CIFAR-10: CURVCERT_DATA names no folder")
@pytest.mark.parametrize("model", ["6C2F", "Lip-3C1F"])
def test_cifar_weights_certify_as_recorded(model: str) -> None:
    figures = of_seeds([row.figures for row in ROWS.values()], model, "ours")[0]
    name = f"{model}-ours-seed{figures['seed']}"
    data, arrays = load_cifar10("test", download=False), load_arrays(RESULTS / figures["arrays"])
    chosen = subject(name, data.as_float64()[:SAMPLES], data.labels[:SAMPLES])
    found = certify(chosen.network, chosen.x, chosen.y, epsilons=tuple(RADII.values()), progress=False)
    assert np.array_equal(found.correct.numpy(), arrays["correct"][:SAMPLES])
    for eps in RADII.values():
        assert np.array_equal(found.radius.numpy() >= eps, arrays["radius"][:SAMPLES] >= eps)


@pytest.fixture
def measured(tmp_path: Path) -> tuple[Path, Recipe]:
    """A folder with the weights of a small network, untrained, as an experiment leaves them."""
    recipe = on_digits(experiment_recipe("6f-ours"))
    path = model_folder(recipe, tmp_path / "out") / ROUNDED
    path.parent.mkdir(parents=True)
    save_model(path, make_model(recipe, load("digits", "train")).eval().half(), recipe)
    return tmp_path / "out", recipe


def write_record(out: Path, recipe: Recipe, **config: Any) -> None:
    figures = {"model": "digits", "method": "ours", "certificate": "best", "seed": 0}
    made = make_record("table1", Options(out), {"recipe": recipe.as_dict(), **config}, figures)
    made.write(out / "table1" / "digits-ours-0-best.json")
    replace(made, config={"quick": False}, figures={"rows": []}).write(out / "table1.json")


def test_weights_are_kept_with_their_record(measured: tuple[Path, Recipe], tmp_path: Path) -> None:
    out, recipe = measured
    results = tmp_path / "results"
    write_record(out, recipe)
    keep_all(out, results, ["table1"])
    keep_all(out, results, ["table1"])
    facts = read_digests(results)["digits-ours-seed0"]
    assert facts["records"] == ["table1/digits-ours-0-best"]
    assert facts["certify"].startswith("curvcert certify results/weights/digits-ours-seed0.safetensors digits --eps ")
    assert Record.read(results / "table1" / "digits-ours-0-best.json").config["weights"]["digits-ours-seed0"] == {
        key: facts[key] for key in ("sha256", "bytes", "file")
    }
    kept, again = load_kept(results, "digits-ours-seed0")
    weights = load_model(model_folder(recipe, out) / ROUNDED)[0].state_dict()
    assert again == recipe
    assert all(torch.equal(value, weights[name]) for name, value in kept.state_dict().items())


def test_large_weights_are_told_and_not_kept(
    measured: tuple[Path, Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.reproduce.weights.KEPT_BELOW", 1000)
    out, recipe = measured
    write_record(out, recipe)
    keep(EXPERIMENTS["table1"], out, tmp_path / "results")
    facts = read_digests(tmp_path / "results")["digits-ours-seed0"]
    assert (facts["file"], facts["certify"]) == (None, None)
    assert facts["sha256"] == file_digest(model_folder(recipe, out) / ROUNDED)
    assert not list((tmp_path / "results" / FOLDER).glob("*.safetensors"))
    with pytest.raises(InvalidInput, match=r"not kept: .* trains it again"):
        load_kept(tmp_path / "results", "digits-ours-seed0")


def test_altered_or_unknown_weights_are_refused(measured: tuple[Path, Recipe], tmp_path: Path) -> None:
    out, recipe = measured
    results = tmp_path / "results"
    write_record(out, recipe)
    keep(EXPERIMENTS["table1"], out, results)
    with pytest.raises(InvalidInput, match="no model '7F'"):
        load_kept(results, "7F")
    path = results / FOLDER / "digits-ours-seed0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(InvalidFile, match="is altered: its SHA-256"):
        load_kept(results, "digits-ours-seed0")
    path.unlink()
    with pytest.raises(InvalidFile, match="is missing"):
        load_kept(results, "digits-ours-seed0")
    (results / FOLDER / "digests.json").write_text("{")
    with pytest.raises(InvalidFile, match="not JSON"):
        read_digests(results)


def test_weights_of_another_record_are_not_replaced(measured: tuple[Path, Recipe], tmp_path: Path) -> None:
    out, recipe = measured
    results = tmp_path / "results"
    write_record(out, recipe)
    keep(EXPERIMENTS["table1"], out, results)
    digests = results / FOLDER / "digests.json"
    content = json.loads(digests.read_text())
    content["digits-ours-seed0"] |= {"sha256": "0" * 64, "records": ["another"]}
    digests.write_text(json.dumps(content))
    with pytest.raises(InvalidInput, match="other weights digits-ours-seed0: another"):
        keep(EXPERIMENTS["table1"], out, results)


def test_weights_that_are_missing_or_not_the_measured_ones(measured: tuple[Path, Recipe], tmp_path: Path) -> None:
    out, recipe = measured
    named = described({"digits-ours-seed0": recipe}, out)
    named["digits-ours-seed0"]["sha256"] = "0" * 64
    write_record(out, recipe, weights=named)
    with pytest.raises(InvalidInput, match="not the file that was measured"):
        keep(EXPERIMENTS["table1"], out, tmp_path / "results")
    write_record(out, recipe)
    shutil.rmtree(out / "models")
    with pytest.raises(InvalidInput, match="Put the file there"):
        keep(EXPERIMENTS["table1"], out, tmp_path / "results")


def test_what_was_not_measured_or_quickly_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no record of 'tanh-anchor'"):
        keep_all(tmp_path, tmp_path / "results", ["tanh-anchor"])
    make_record("tanh-anchor", Options(tmp_path, quick=True), {}, {}).write(tmp_path / "tanh-anchor.json")
    with pytest.raises(InvalidInput, match="quick run"):
        keep_all(tmp_path, tmp_path / "results", ["tanh-anchor"])


def test_a_mirrored_network_shares_the_file_of_the_network(measured: tuple[Path, Recipe], tmp_path: Path) -> None:
    out, recipe = measured
    alone, both, results = "digits-ours-seed0", "digits-ours-mirror-seed0", tmp_path / "results"
    mirrored = replace(recipe, mirror=True)
    path = model_folder(mirrored, out) / ROUNDED
    path.parent.mkdir()
    save_model(path, load_trained(model_folder(recipe, out) / ROUNDED)[0].half(), mirrored)
    told = described({both: mirrored}, out)
    with pytest.raises(InvalidInput, match="Keep a record of that network first"):
        keep_weights("record", told, {both: mirrored}, out, results)
    keep_weights("record", described({alone: recipe}, out), {alone: recipe}, out, results)
    keep_weights("record", told, {both: mirrored}, out, results)
    assert [each.name for each in (results / FOLDER).glob("*.safetensors")] == [f"{alone}.safetensors"]
    assert kept_content(results, both) == path.read_bytes()
    assert kept_content(results, alone) == (model_folder(recipe, out) / ROUNDED).read_bytes()
    digests = json.loads((results / FOLDER / "digests.json").read_text())
    digests[both]["sha256"] = "0" * 64
    (results / FOLDER / "digests.json").write_text(json.dumps(digests))
    with pytest.raises(InvalidFile, match="is altered"):
        load_kept(results, both)
