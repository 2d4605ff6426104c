"""Damaged models, recipes and data files: a named error each, never a crash, never a changed model or data set."""

import io
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.lib.format import write_array_header_1_0
from safetensors.torch import save

from benchmarks.damages import mutations
from curvcert.cli.inputs import load_inputs
from curvcert.errors import CurvcertError, InvalidFile, InvalidInput
from curvcert.nn.architectures import architecture
from curvcert.training import Recipe, load_model, load_recipe, save_model


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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_an_archive_that_unpacks_without_end_is_refused_before_it_is_unpacked(tmp_path: Path, dtype: type) -> None:
    file = tmp_path / "data.npz"
    np.savez_compressed(file, x=np.zeros((1, 2**26), dtype), y=np.zeros(1, int))
    assert file.stat().st_size < 2**20
    tracemalloc.start()
    with pytest.raises(InvalidFile, match="unpacks to 53687"):
        load_inputs(str(file), "test", None, None)
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


def member(shape: tuple[int, ...], data: bytes, descr: str = "<f8") -> bytes:
    """What a member of an archive holds: a header that promises a shape, and bytes."""
    buffer = io.BytesIO()
    write_array_header_1_0(buffer, {"descr": descr, "fortran_order": False, "shape": shape})
    return buffer.getvalue() + data


MEMBERS = {
    "text": (b"no array at all", "magic string"),
    "nothing": (b"", "EOF"),
    "numbers that are not there": (member((2**40, 2), b"12345678"), "promises float64 of shape"),
    "more than promised": (member((1,), b"12345678" * 3), "promises float64 of shape"),
    "entries without a size": (member((2**60,), b"", "|V0"), "promises"),
    "a negative shape": (member((-1, 8), b"12345678"), "promises"),
    "code": (member((1,), b"cos\nsystem\n(S'touch ran'\ntR.", "|O"), "promises object"),
    "nested brackets": (b"\x93NUMPY\x01\x00" + (8000).to_bytes(2, "little") + b"[" * 8000, "not a .npz file"),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_members_that_are_no_arrays_are_refused(tmp_path: Path, name: str) -> None:
    content, words = MEMBERS[name]
    file = tmp_path / "data.npz"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", content)
        archive.writestr("y.npy", member((1,), b"12345678", "<i8"))
    with pytest.raises(InvalidFile, match=words):
        load_inputs(str(file), "test", None, None)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_members_that_unpack_in_pieces_of_any_size_are_refused(tmp_path: Path, method: int) -> None:
    file = tmp_path / "data.npz"
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("x.npy", member((1, 1), bytes(8)))
        archive.writestr("y.npy", member((1,), bytes(8), "<i8"))
    with pytest.raises(InvalidFile, match="which numpy does not use"):
        load_inputs(str(file))


@pytest.mark.parametrize("about", ["9" * 5000, '{"format": ' + "9" * 5000 + "}", "[" * 100_000, "nonsense"])
def test_a_model_that_says_nonsense_of_itself_is_refused(tmp_path: Path, about: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(save({"w": torch.ones(1)}, metadata={"curvcert": about}))
    with pytest.raises(InvalidInput, match="not a safetensors file that can be read"):
        load_model(file)


RECIPES = {
    "nested without end": b"data = " + b"[" * 60_000,
    "nested tables": b"data = " + b"{a=" * 20_000,
    "a number of 5,000 digits": b"epochs = " + b"9" * 5000,
    "beyond any recipe": b"#" * 2**14,
    "names of names without end": b".".join([b"a"] * 30_000) + b"=1",
    "no text": b"\xff\xfe",
}


@pytest.mark.parametrize("name", RECIPES)
def test_texts_that_are_no_recipe_are_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "recipe.toml"
    file.write_bytes(RECIPES[name])
    with pytest.raises(InvalidInput, match=r"is not TOML|the limit is"):
        load_recipe(file)


def test_a_damaged_recipe_is_refused_or_still_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    content = b'data = "digits"\narchitecture = "digits"\nepochs = 30\ntau = 0.25\nepsilons = [0.1, 0.2]\n'
    for damaged in mutations(content, 300, seed=2):
        file.write_bytes(damaged)
        try:
            assert load_recipe(file).data == "digits"
        except CurvcertError:
            continue
