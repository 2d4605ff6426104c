"""Models as they are named on the command line: each becomes the network that it is, normalisation included."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from curvcert.cli import models
from curvcert.cli.models import ModelChoice, is_network_file, load_network
from curvcert.data import load_demo_network, load_digits
from curvcert.errors import InvalidInput
from curvcert.network import trace
from curvcert.network.network_file import network_digest, save_network
from curvcert.nn import Normalise, architecture
from curvcert.training import load_recipe
from curvcert.training.model_file import save_model as save_trained_model
from tests.graph_families import GRAPHS

SHAPE = (1, 8, 8)


def images() -> torch.Tensor:
    return load_digits("test").as_float64()[:5]


def export(path: Path, model: nn.Module) -> Path:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    axes = {"x": {0: "batch"}}
    torch.onnx.export(
        model, (torch.zeros(2, *SHAPE),), path, dynamo=False, input_names=["x"], dynamic_axes=axes, verbose=False
    )
    return path


def test_a_factory_in_the_current_folder(folder: Path) -> None:
    before = list(sys.path)
    with torch.random.fork_rng(devices=[]):
        network = load_network(ModelChoice("nets:small"), SHAPE)
        expected = trace(sys.modules["nets"].small(), torch.zeros(1, *SHAPE))
    assert network_digest(network) == network_digest(expected)
    assert sys.path == before


def test_weights_of_other_kinds_than_a_module_has_are_refused(folder: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        load_network(ModelChoice("nets:small"), SHAPE)  # makes nets importable
        module = sys.modules["nets"].small()
        save_file({k: t.to(torch.float8_e5m2) for k, t in module.state_dict().items()}, folder / "short.safetensors")
        torch.save({"1.weight": torch.zeros(3).to_sparse()}, folder / "sparse.pt")
        torch.save({"1.weight": torch.empty(3, device="meta")}, folder / "meta.pt")
        torch.save({1: torch.ones(3)}, folder / "number.pt")
        for name, words in (
            ("short.safetensors", "torch.float8_e5m2, which torch.float32 would round"),
            ("sparse.pt", "it names 'torch._utils _rebuild_sparse_tensor'"),
            ("meta.pt", "it names 'torch._utils _rebuild_meta_tensor_no_storage'"),
            ("number.pt", "holds no state dict"),
        ):
            with pytest.raises(InvalidInput, match=words):
                load_network(ModelChoice("nets:small", weights=folder / name), SHAPE)


def test_weights_are_loaded_by_name_and_not_rounded(folder: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        model = load_network(ModelChoice("nets:small"), SHAPE)  # makes nets importable below
        module = sys.modules["nets"].small()
    for tensor in module.parameters():
        tensor.data.mul_(0.5)
    save_model(module, str(folder / "half.safetensors"))
    with torch.random.fork_rng(devices=[]):
        found = load_network(ModelChoice("nets:small", weights=folder / "half.safetensors"), SHAPE)
        assert network_digest(found) == network_digest(trace(module, torch.zeros(1, *SHAPE))) != network_digest(model)
        torch.save({"model_state_dict": {f"module.{k}": t for k, t in module.state_dict().items()}}, folder / "half.pt")
        torch.save({"epoch": 3}, folder / "none.pt")
        pickled = load_network(ModelChoice("nets:small", weights=folder / "half.pt"), SHAPE)
        assert network_digest(pickled) == network_digest(found)
        with pytest.raises(InvalidInput, match="holds no state dict"):
            load_network(ModelChoice("nets:small", weights=folder / "none.pt"), SHAPE)
        save_file({k: t.double() for k, t in module.state_dict().items()}, folder / "double.safetensors")
        with pytest.raises(InvalidInput, match=r"1.bias is torch.float64, which torch.float32 would round"):
            load_network(ModelChoice("nets:small", weights=folder / "double.safetensors"), SHAPE)
        wide = load_network(ModelChoice("nets:double", weights=folder / "double.safetensors"), SHAPE)
    assert network_digest(wide) == network_digest(found)


def test_train_mode_is_left_by_request_only(folder: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        with pytest.raises(InvalidInput, match="train mode"):
            load_network(ModelChoice("nets:training"), SHAPE)
        found = load_network(ModelChoice("nets:training", evaluate=True), SHAPE)
        assert network_digest(found) == network_digest(load_network(ModelChoice("nets:small"), SHAPE))


def test_a_trained_model(folder: Path) -> None:
    recipe = load_recipe("digits")
    with torch.random.fork_rng(devices=[]):
        own = architecture(recipe.architecture, recipe.activation).eval()
    save_trained_model(folder / "model.safetensors", own, recipe)
    network = load_network(ModelChoice(str(folder / "model.safetensors")))
    assert network.in_shape == SHAPE
    torch.testing.assert_close(network(images()), own.double()(images()).detach())


@pytest.mark.parametrize("kind", ["onnx", "factory"])
def test_a_normalisation_is_part_of_the_model(folder: Path, kind: str) -> None:
    model = load_demo_network()
    name = "curvcert.data:load_demo_network" if kind == "factory" else str(export(folder / "net.onnx", model))
    network = load_network(ModelChoice(name, normalise=("0.1307", "0.3081")), SHAPE)
    whole = nn.Sequential(Normalise([0.1307], [0.3081]), model).double()
    torch.testing.assert_close(network(images()), whole(images()).detach(), rtol=1e-12, atol=1e-12)
    assert not network.blocks[0].is_residual
    assert len(network.blocks) == 3


def test_a_normalisation_in_front_of_affine_and_max_pooling_networks(folder: Path) -> None:
    for first in (nn.Flatten(), nn.MaxPool2d(2)):
        model = nn.Sequential(first, nn.Flatten(), nn.Linear(64 if isinstance(first, nn.Flatten) else 16, 3)).eval()
        path = export(folder / "net.onnx", model)
        network = load_network(ModelChoice(str(path), normalise=("1/2", "2")))
        expected = model.double()((images() - 0.5) / 2).detach()
        torch.testing.assert_close(network(images()), expected, rtol=1e-12, atol=1e-12)


def test_a_normalisation_in_front_of_a_graph() -> None:
    network = GRAPHS[0].network()
    x = torch.randn(3, *network.in_shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = models._normalised(network, ModelChoice("net.onnx", normalise=("1/2", "2")))
    torch.testing.assert_close(whole(x), network((x - 0.5) / 2), rtol=1e-12, atol=1e-12)
    assert len(whole.nodes) == len(network.nodes) + 1  # others read the input too


def test_a_network_file_is_told_apart(folder: Path) -> None:
    path = save_network(trace(load_demo_network(), torch.zeros(1, *SHAPE)), folder / "network.safetensors")
    assert is_network_file(str(path))
    assert not is_network_file("nets:small")
    with pytest.raises(InvalidInput, match="`curvcert check` reads it"):
        load_network(ModelChoice(str(path)))
    np.save(folder / "other.npy", np.zeros(1))
    assert not is_network_file(str(folder / "other.npy"))
