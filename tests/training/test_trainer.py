"""A run in one process: by its seed alone, resumed bit for bit, and without a look at any value in a step."""

from dataclasses import replace
from functools import lru_cache
from typing import Any, get_args

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from curvcert.data import LabelledImages, load
from curvcert.errors import InvalidInput
from curvcert.losses import AbstractObjective
from curvcert.losses.objectives import Compiled
from curvcert.training import Checkpoint, Recipe, Trainer, load_checkpoint, load_recipe, save_checkpoint
from curvcert.training.recipe import Loss

LOSSES = get_args(Loss)
TINY = replace(load_recipe("digits"), epochs=2, batch_size=40, weight_step=0.05, clip=1.0, nu=0.5)


@lru_cache(maxsize=1)
def data() -> LabelledImages:
    digits = load("digits", "train")
    return LabelledImages(digits.images[:120], digits.labels[:120], digits.max_value)


def trainer(**changes: Any) -> Trainer:
    return Trainer(replace(TINY, **changes), data())


def advanced(steps: int, **changes: Any) -> Trainer:
    found = trainer(**changes)
    for _ in range(steps):
        found.advance()
    return found


def same_state(left: Trainer, right: Trainer) -> bool:
    one, other = left.checkpoint().tensors, right.checkpoint().tensors
    assert one.keys() == other.keys()
    return all(torch.equal(one[key], other[key]) for key in one if key != "run.random_state")


@pytest.mark.parametrize("loss", LOSSES)
def test_resumed_is_the_same_as_uninterrupted(loss: str, tmp_path) -> None:
    whole = advanced(5, loss=loss, weight_average=0.9)
    half = advanced(2, loss=loss, weight_average=0.9)
    path = save_checkpoint(tmp_path, half.checkpoint())
    resumed = trainer(loss=loss, weight_average=0.9)
    resumed.restore(load_checkpoint(path))
    assert resumed.step == 2
    assert same_state(half, resumed)
    for _ in range(3):
        resumed.advance()
    assert same_state(whole, resumed)
    assert whole.read_tally() == resumed.read_tally()


def test_resumed_at_the_end_of_an_epoch_and_of_the_run() -> None:
    whole = advanced(6)
    for steps in (3, 6):
        resumed = trainer()
        resumed.restore(advanced(steps).checkpoint())
        while resumed.step < resumed.total_steps:
            resumed.advance()
        assert same_state(whole, resumed)


def test_a_run_depends_on_its_seed_alone() -> None:
    torch.manual_seed(1)
    first = advanced(3)
    torch.manual_seed(2)
    assert same_state(first, advanced(3))
    assert not same_state(first, advanced(3, seed=1))


def test_making_a_trainer_takes_no_step() -> None:
    fresh = trainer()
    assert fresh.step == 0
    tensors = fresh.checkpoint().tensors
    assert int(tensors["run.count"]) == 0
    assert all(float(value.abs().max()) == 0.0 for key, value in tensors.items() if key.startswith("optimiser."))
    assert same_state(fresh, trainer())


def test_everything_that_a_step_changes_is_in_the_checkpoint() -> None:
    """Of all tensors that a step moves, none is outside: a twin with the checkpoint's tensors takes the same step."""
    keys = set(advanced(1, weight_average=0.9).checkpoint().tensors)
    for part in ("model.", "objective.", "optimiser.", "average.", "multiplier.value", "multiplier.accuracy", "run."):
        assert any(key.startswith(part) for key in keys), part


def test_the_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    advanced(2, crop=1, flip=True)
    assert torch.equal(before, torch.get_rng_state())


class Looks(TorchDispatchMode):
    """Collects the operations by which a step would wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if any(word in name for word in ("_local_scalar_dense", "nonzero", "masked_select", "aten.equal", "unique")):
            self.found.append(name)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_looks_at_no_value(loss: str) -> None:
    """A look waits for the device, and keeps the step from being captured as a graph."""
    found = trainer(loss=loss, weight_average=0.9)
    with Looks() as looks:
        found.advance()
    assert looks.found == []


@pytest.mark.parametrize("change", [{"epsilon": 0.1}, {"seed": 3}, {"epochs": 3}, {"loss": "standard"}])
def test_another_recipe_is_refused(change: dict[str, Any]) -> None:
    name = next(iter(change))
    with pytest.raises(InvalidInput, match=f"was made with {name} = .* Resume with the same recipe"):
        trainer(**change).restore(advanced(1).checkpoint())


def test_what_is_shown_and_kept_may_change() -> None:
    resumed = trainer(evaluate_every=7, checkpoint_every=9, epsilons=(0.5,), evaluate_samples=3)
    resumed.restore(advanced(1).checkpoint())
    assert resumed.step == 1


def test_tensors_of_another_run_are_refused() -> None:
    kept = advanced(1).checkpoint()
    wrong = {**kept.tensors, "run.count": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(
        InvalidInput, match=r"run\.count is torch\.int64 of shape \(2,\), expected torch\.int64 of \(\)"
    ):
        trainer().restore(Checkpoint(1, wrong, kept.facts))
    fewer = {key: value for key, value in kept.tensors.items() if key != "run.count"}
    with pytest.raises(InvalidInput, match=r"run\.count is in one of them only"):
        trainer().restore(Checkpoint(1, fewer, kept.facts))


def test_facts_without_a_recipe_are_refused() -> None:
    kept = advanced(1).checkpoint()
    for facts in ({}, {"recipe": None}, {"recipe": {"data": "digits"}}):
        with pytest.raises(InvalidInput):
            trainer().restore(Checkpoint(1, kept.tensors, facts))


def test_the_learning_rate_is_a_cosine() -> None:
    found = trainer(learning_rate=1e-2, final_learning_rate=1e-3)
    rates = []
    for _ in range(found.total_steps):
        found.advance()
        rates.append(found.read_tally()["learning_rate"])
    expected = [1e-3 + 9e-3 * 0.5 * (1 + float(torch.cos(torch.tensor(torch.pi * k / 6)))) for k in range(6)]
    assert rates == pytest.approx(expected, rel=1e-5)


def test_training_lowers_the_loss() -> None:
    found = trainer(loss="standard", epochs=10, learning_rate=1e-2)
    losses = []
    for _ in range(10):
        for _ in range(found.steps_per_epoch):
            found.advance()
        losses.append(found.read_tally()["loss"])
    assert losses[-1] < 0.7 * losses[0]


def test_an_architecture_for_other_images_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"6F takes images of shape \(3, 32, 32\), digits has \(1, 8, 8\)"):
        Trainer(Recipe(data="digits", architecture="6F", batch_size=40), data())


@pytest.mark.parametrize("change", [{"architecture": "7F"}, {"activation": "step"}, {"batch_size": 121}, {"crop": -1}])
def test_what_a_recipe_names_must_exist(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        trainer(**change)


def test_a_step_that_cannot_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: AbstractObjective) -> None:
        def refuse(*_: object) -> Any:
            raise Exception("the limit of recompilations is reached\nand more")

        self.compiled = Compiled(refuse, refuse, refuse)

    wanted = advanced(2)
    monkeypatch.setattr(Trainer, "_reason_not_to_compile", lambda self, wanted: None)
    monkeypatch.setattr(AbstractObjective, "compile_pieces", broken)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    found = advanced(2)
    assert found.not_compiled == "the limit of recompilations is reached"
    assert all(torch.equal(a, b) for a, b in zip(found.model.parameters(), wanted.model.parameters(), strict=True))
