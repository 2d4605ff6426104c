"""Model files: bit for bit, and refused by name if they are anything else."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from curvcert.errors import InvalidInput
from curvcert.nn.architectures import architecture
from curvcert.training import Recipe, load_model, load_trained, save_model

RECIPE = Recipe(data="digits", architecture="digits", mean_shift=True)


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(1)
    return architecture("digits", "tanh", [0.3]).to(dtype).eval()


def metadata(**changes: object) -> dict[str, str]:
    about = {"format": "curvcert model 1", "recipe": RECIPE.as_dict(), "facts": {}} | changes
    return {"curvcert": json.dumps(about)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    path, saved = tmp_path / "model.safetensors", model(dtype)
    save_model(path, saved, RECIPE)
    found, recipe = load_model(path)
    assert recipe == RECIPE
    assert not found.training
    for name, tensor in saved.state_dict().items():
        assert found.state_dict()[name].dtype == tensor.dtype
        assert torch.equal(found.state_dict()[name], tensor)
    x = torch.rand(2, 1, 8, 8, dtype=dtype)
    assert torch.equal(found(x), saved(x))


def test_half_precision_comes_back_as_float32_exactly(tmp_path: Path) -> None:
    save_model(tmp_path / "m", model(torch.float16), RECIPE)
    found, _ = load_model(tmp_path / "m")
    for name, tensor in model(torch.float16).state_dict().items():
        assert found.state_dict()[name].dtype == torch.float32
        assert torch.equal(found.state_dict()[name], tensor.float())


def test_a_mirror_image_is_made_anew_from_the_weights_of_one_side(tmp_path: Path) -> None:
    saved, x = model(), torch.rand(5, 1, 8, 8)
    save_model(tmp_path / "m", saved, replace(RECIPE, mirror=True))
    both, recipe = load_model(tmp_path / "m")
    one, _ = load_trained(tmp_path / "m")
    assert recipe.mirror and not both.training
    assert torch.equal(one(x), saved(x))
    assert torch.allclose(both(x), saved(x) + saved(x.flip(-1)), atol=1e-5)
    save_model(tmp_path / "plain", saved, RECIPE)
    assert b"mirror" not in (tmp_path / "plain").read_bytes(), "files of before the field keep their digests"


def test_the_bytes_depend_on_the_weights_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_model(tmp_path / name, model(), RECIPE)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("mirror", [False, True])
def test_the_random_state_is_left_alone(tmp_path: Path, mirror: bool) -> None:
    save_model(tmp_path / "m", model(), replace(RECIPE, mirror=mirror))
    before = torch.get_rng_state()
    load_model(tmp_path / "m")
    assert torch.equal(before, torch.get_rng_state())


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No model file"):
        load_model(tmp_path / "none")


@pytest.mark.parametrize("length", [0, 4, 100, -1])
def test_a_truncated_file(tmp_path: Path, length: int) -> None:
    path = tmp_path / "m"
    save_model(path, model(), RECIPE)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(InvalidInput, match="is not a safetensors file that can be read"):
        load_model(path)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        (None, "does not say which architecture"),
        ({"other": "x"}, "does not say which architecture"),
        ({"curvcert": "[]"}, "does not say which architecture"),
        ({"curvcert": "{"}, "cannot|can be read"),
        ({"curvcert": "[" * 100_000}, "can be read"),
        (metadata(format="curvcert model 2"), "does not say which architecture"),
        (metadata(recipe=[]), "does not say which architecture"),
        (metadata(recipe={}), "lacks 'data'"),
        (metadata(recipe=RECIPE.as_dict() | {"architecture": "7F"}), "Unknown architecture '7F'"),
        (metadata(recipe=RECIPE.as_dict() | {"architecture": "MNIST-3F"}), "it is not a MNIST-3F"),
        (metadata(recipe=RECIPE.as_dict() | {"activation": "step"}), "step"),
    ],
)
def test_other_metadata(tmp_path: Path, about: dict[str, str] | None, message: str) -> None:
    save_file(model().state_dict(), tmp_path / "m", metadata=about)
    with pytest.raises(InvalidInput, match=message):
        load_model(tmp_path / "m")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("1.bias", torch.full((8,), torch.nan), "1.bias holds NaN or infinity"),
        ("1.bias", torch.full((8,), torch.inf), "1.bias holds NaN or infinity"),
        ("1.bias", torch.zeros(9), r"1.bias needs torch.float32 of shape \(8,\), got torch.float32 of \(9,\)"),
        ("1.bias", torch.zeros(8, dtype=torch.int64), "1.bias needs torch.float32 .* got torch.int64"),
        ("1.bias", torch.zeros(8, dtype=torch.complex64), "1.bias needs torch.float32 .* got torch.complex64"),
        ("extra", torch.zeros(1), "has the unknown tensor extra"),
    ],
)
def test_other_tensors(tmp_path: Path, name: str, tensor: torch.Tensor, message: str) -> None:
    save_file(model().state_dict() | {name: tensor}, tmp_path / "m", metadata=metadata())
    with pytest.raises(InvalidInput, match=message):
        load_model(tmp_path / "m")


def test_a_missing_tensor(tmp_path: Path) -> None:
    tensors = model().state_dict()
    tensors.pop("1.bias")
    save_file(tensors, tmp_path / "m", metadata=metadata())
    with pytest.raises(InvalidInput, match=r"lacks 1\.bias: it is not a digits"):
        load_model(tmp_path / "m")
