"""Damaged models, recipes and data files: a named error each, never a crash, never a changed model or data set."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch

from curvcert.cli.inputs import load_inputs
from curvcert.errors import CurvcertError, InvalidFile
from curvcert.nn.architectures import architecture
from curvcert.training import Recipe, load_model, load_recipe, save_model
from tests.hostile import mutations


def test_a_damaged_model_never_loads_as_another(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    model = architecture("digits")
    save_model(file, model, Recipe(data="digits", architecture="digits"))
    refused = 0
    for damaged in mutations(file.read_bytes(), 300, seed=0):
        file.write_bytes(damaged)
        try:
            loaded, _ = load_model(file)
        except CurvcertError:
            refused += 1
        else:  # damage that says the same: a space in the header
            same = zip(loaded.state_dict().values(), model.state_dict().values(), strict=True)
            assert all(torch.equal(left, right) for left, right in same)
    assert refused >= 290


def test_a_damaged_archive_never_crashes(tmp_path: Path) -> None:
    buffer, file = io.BytesIO(), tmp_path / "data.npz"
    np.savez(buffer, x=np.random.default_rng(0).random((3, 4)), y=np.arange(3))
    refused = 0
    for damaged in mutations(buffer.getvalue(), 300, seed=1):
        file.write_bytes(damaged)
        try:
            assert load_inputs(str(file), "test", None, None).x.shape == (3, 4)
        except CurvcertError:
            refused += 1
    assert refused >= 280


def test_an_archive_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curvcert.cli.inputs.LARGEST", 10_000)
    file = tmp_path / "data.npz"
    np.savez_compressed(file, x=np.zeros((100, 100)), y=np.zeros(100, int))
    with pytest.raises(InvalidFile, match="unpacks to"):
        load_inputs(str(file), "test", None, None)


def test_a_damaged_recipe_is_refused_or_still_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    content = b'data = "digits"\narchitecture = "digits"\nepochs = 30\ntau = 0.25\nepsilons = [0.1, 0.2]\n'
    for damaged in mutations(content, 300, seed=2):
        file.write_bytes(damaged)
        try:
            assert load_recipe(file).data == "digits"
        except CurvcertError:
            continue
