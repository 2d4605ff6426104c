"""The zoo: every network that is kept loads by its name, and what is missing says where to get it."""

import shutil
from pathlib import Path

import pytest
import torch

from curvcert import zoo
from curvcert.errors import InvalidFile, InvalidInput
from curvcert.training.kept import read_digests

RESULTS = Path(__file__).parents[1] / "results"


def test_every_recorded_network_is_listed() -> None:
    listed = {f"{entry.name}-seed{entry.seed}": entry.sha256 for entry in zoo.entries()}
    assert listed == {name: facts["sha256"] for name, facts in read_digests(RESULTS).items()}


def test_a_network_computes() -> None:
    with torch.no_grad():
        assert zoo.load("MNIST-6F-standard")(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.slow
@pytest.mark.parametrize("entry", [e for e in zoo.entries() if e.available], ids=lambda e: f"{e.name}-{e.seed}")
def test_every_available_network_loads(entry: zoo.Entry) -> None:
    assert not zoo.load(entry.name, entry.seed).training


def test_a_misspelt_name_is_asked_back() -> None:
    with pytest.raises(InvalidInput, match="Did you mean '6C2F-ours'"):
        zoo.load("6C2F-our")


def test_a_seed_that_was_not_trained() -> None:
    with pytest.raises(InvalidInput, match="seeds 0, got 7"):
        zoo.load("MNIST-6F-ccrc", seed=7)


def test_weights_that_are_not_kept_say_why() -> None:
    with pytest.raises(InvalidInput, match="not kept"):
        zoo.load("6F-ours")


def test_what_did_not_come_with_the_wheel_says_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").mkdir()
    shutil.copy(RESULTS / "weights/digests.json", tmp_path / "weights")
    monkeypatch.setattr(zoo, "_INSTALLED", tmp_path)
    monkeypatch.setattr(zoo, "_CHECKOUT", tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match="folder=CHECKOUT/results"):
        zoo.load("6C2F-ours", seed=1)


def test_an_altered_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    shutil.copy(RESULTS / "weights/digests.json", tmp_path / "weights")
    whole = (RESULTS / "weights/MNIST-3F-standard-seed0.safetensors").read_bytes()
    (tmp_path / "weights/MNIST-3F-standard-seed0.safetensors").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(InvalidFile, match="altered"):
        zoo.load("MNIST-3F-standard", folder=tmp_path)


def test_a_folder_without_digests(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no digests.json"):
        zoo.load("6C2F-ours", folder=tmp_path)
