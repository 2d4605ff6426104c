"""Runs side by side are the runs that they would be alone, and go on together from what all of them kept."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from curvcert.certificates import certify
from curvcert.cli.train import each_recipe
from curvcert.data import load
from curvcert.errors import InvalidInput
from curvcert.training import Recipe, SideBySide, Trainer, checkpoints, load_model, loop, train, train_side_by_side

QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def certified_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """How a model is certified has no part in this."""
    monkeypatch.setattr(loop, "certify", partial(certify, method="product"))


def recipe(**fields: object) -> Recipe:
    chosen = {"epochs": 2, "batch_size": 256, "evaluate_samples": 20, "learning_rate": 5e-3} | fields
    return Recipe(data="digits", architecture="digits", **chosen)  # type: ignore[arg-type]


def weights(folder: Path) -> list[torch.Tensor]:
    return list(load_model(folder / "model.safetensors")[0].parameters())


def test_each_is_the_run_that_it_would_be_alone():
    recipes, data = [recipe(seed=0), recipe(seed=1), recipe(epsilon=0.4)], load("digits", "train")
    together = SideBySide(recipes, data)
    lone = [Trainer(one, data) for one in recipes]
    assert together.not_captured == "the device is cpu, and only CUDA has graphs"
    for _ in range(3):
        together.advance()
        for trainer in lone:
            trainer.advance()
    for beside, alone in zip(together.trainers, lone, strict=True):
        assert beside.step == alone.step == 3
        assert all(torch.equal(a, b) for a, b in zip(beside.model.parameters(), alone.model.parameters(), strict=True))


@pytest.mark.slow
def test_every_run_has_a_folder_of_its_own(tmp_path):
    recipes = each_recipe(recipe(), "seed=0,1")
    found = train_side_by_side(recipes, tmp_path / "both", certify_samples=3, console=QUIET)
    alone = train(recipe(seed=1), tmp_path / "one", certify_samples=3, console=QUIET)
    assert list(found) == ["seed-0", "seed-1"]
    assert found["seed-1"].accuracy == alone.accuracy
    for a, b in zip(weights(tmp_path / "both" / "seed-1"), weights(tmp_path / "one"), strict=True):
        assert torch.equal(a, b)
    assert (tmp_path / "both" / "seed-0" / "metrics.jsonl").read_text().count("\n") == 2


@pytest.mark.slow
def test_a_kill_between_two_savings_costs_one_checkpoint(tmp_path):
    recipes = each_recipe(recipe(epochs=3), "seed=0,1")
    whole = train_side_by_side(recipes, tmp_path, certify_samples=2, console=QUIET)
    wanted = [p.clone() for p in whole["seed-1"].model.parameters()]
    newest = checkpoints(tmp_path / "seed-1" / "checkpoints")
    shutil.rmtree(newest[-1])
    (tmp_path / "seed-1" / "model.safetensors").unlink()
    again = train_side_by_side(recipes, tmp_path, resume=True, certify_samples=2, console=QUIET)
    assert all(torch.equal(a, b) for a, b in zip(again["seed-1"].model.parameters(), wanted, strict=True))
    kept = [[path.name for path in checkpoints(tmp_path / name / "checkpoints")] for name in recipes]
    assert kept[0] == kept[1]


@pytest.mark.slow
def test_without_a_common_step_all_start_afresh(tmp_path):
    recipes = each_recipe(recipe(epochs=1), "seed=0,1")
    train_side_by_side(recipes, tmp_path, certify_samples=2, console=QUIET)
    shutil.rmtree(tmp_path / "seed-0" / "checkpoints")
    with (tmp_path / "said").open("w") as file:
        train_side_by_side(recipes, tmp_path, resume=True, certify_samples=2, console=Console(file=file))
    assert "starting afresh" in (tmp_path / "said").read_text()


@pytest.mark.slow
def test_a_folder_that_holds_a_run_is_refused(tmp_path):
    recipes = each_recipe(recipe(epochs=1), "seed=0,1")
    train_side_by_side({"seed-1": recipes["seed-1"]}, tmp_path, certify_samples=2, console=QUIET)
    with pytest.raises(InvalidInput, match="already holds a run"):
        train_side_by_side(recipes, tmp_path, console=QUIET)


@pytest.mark.parametrize(
    ("recipes", "said"),
    [
        ([], "at least one recipe"),
        ([recipe(epochs=1), recipe(epochs=2)], "the same epochs, got 1, 2"),
        ([recipe(batch_size=32), recipe(batch_size=64)], "the same batch_size, got 32, 64"),
    ],
)
def test_runs_that_differ_in_their_steps_are_refused(recipes, said):
    with pytest.raises(InvalidInput, match=said):
        SideBySide(recipes, load("digits", "train"))


@pytest.mark.parametrize(
    ("each", "said"),
    [
        ("seed", "FIELD=A,B,C"),
        ("seed=", "different values"),
        ("seed=1,1", "different values"),
        ("epochs=1,2", "--set epochs=VALUE"),
        ("nonsense=1,2", "no field 'nonsense'"),
        ("seed=a,b", "seed"),
    ],
)
def test_each_says_what_it_expects(each, said):
    with pytest.raises(InvalidInput, match=said):
        each_recipe(recipe(), each)
