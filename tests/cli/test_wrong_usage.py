"""What a person gets wrong: one or two lines that say what was expected, what came and what to do; status 2."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from curvcert import cli
from curvcert.errors import CannotWrite, InvalidInput, SoundnessError
from tests.cli.running import Runner, run_process, write_npz

IMAGES = np.zeros((2, 1, 8, 8))
DEMO = "curvcert.data:load_demo_network"


@pytest.fixture
def wrong(folder: Path) -> Path:
    """Files of every kind that cannot be used."""
    write_npz(folder / "empty.npz", np.zeros((0, 1, 8, 8)), np.zeros(0, int))
    write_npz(folder / "labels.npz", IMAGES, [3, 10])
    write_npz(folder / "negative.npz", IMAGES, [3, -1])
    write_npz(folder / "floats.npz", IMAGES, [3.0, 1.0])
    write_npz(folder / "shape.npz", np.zeros((2, 3, 9, 9)), [3, 1])
    write_npz(folder / "bytes.npz", IMAGES.astype(np.uint8), [3, 1])
    write_npz(folder / "nan.npz", np.full_like(IMAGES, np.nan), [3, 1])
    np.savez(folder / "pickle.npz", x=np.array([{}], object), y=np.array([1]))
    np.savez(folder / "unlabelled.npz", x=IMAGES)
    (folder / "junk.npz").write_bytes(b"PK\x03\x04 and nothing that follows")
    (folder / "corrupt.onnx").write_bytes(b"\x08\x07 nonsense")
    (folder / "corrupt.safetensors").write_bytes(b"\xff" * 64)
    save_file({"1.weight": torch.zeros(8, 64)}, folder / "some.safetensors")
    save_file({"1.weight": torch.zeros(8, 63)}, folder / "narrow.safetensors")
    (folder / "file").write_text("in the way")
    return folder


CERTIFY = {
    # The ten of every user's first day.
    "missing.onnx digits": "InvalidInput: missing.onnx: no such file.",
    "nets:small shape.npz": "InvalidInput: 1: mat1 and mat2 shapes cannot be multiplied",
    "nets:relu digits --method compositional": "UnsupportedActivation: Activation 'relu' has a kink",
    "nets:small digits --p 0.5": "InvalidInput: p must satisfy 1 <= p <= inf, got 0.5.",
    "nets:small digits --method magic": "InvalidInput: Unknown method 'magic'. Choose one of: auto, checkable",
    "corrupt.onnx digits": "InvalidInput: corrupt.onnx is not an ONNX model",
    "nets:small empty.npz": "InvalidInput: empty.npz: expected x of shape (samples, ...), at least one sample",
    "nets:small digits --out file": "InvalidInput: Cannot write into file",
    "nets:small labels.npz": "InvalidInput: Labels lie in 0 .. 9 for this model, labels.npz has 3 .. 10.",
    "nets:training digits": "InvalidInput: nets:training returned a module in train mode",
    # And more.
    "missing.safetensors digits": "InvalidInput: No model file missing.safetensors.",
    "corrupt.safetensors digits": "InvalidFile: corrupt.safetensors is not a safetensors file",
    "some.safetensors digits": "InvalidInput: some.safetensors does not say which architecture",
    "net digits": "InvalidInput: MODEL is an ONNX file (.onnx), a model.safetensors",
    "nowhere:net digits": "InvalidInput: Cannot import 'nowhere' for MODEL nowhere:net: there is no such module.",
    "nets:nothing digits": "InvalidInput: MODEL nets:nothing: 'nets' has no function 'nothing'.",
    "nets:raising digits": "InvalidInput: nets:raising, called without arguments, raised ZeroDivisionError: no model",
    "nets:scalar digits": "InvalidInput: A certificate needs at least two classes, this model has one output.",
    "nets:seven digits": "InvalidInput: nets:seven must return an nn.Module, got int.",
    "nets:small digits --weights none.safetensors": "InvalidInput: --weights none.safetensors: no such file.",
    "nets:small digits --weights corrupt.safetensors": "InvalidFile: --weights corrupt.safetensors is not",
    "nets:small digits --weights some.safetensors": "InvalidInput: --weights some.safetensors lacks 1.bias, 3.bias",
    "nets:small digits --weights narrow.safetensors": "InvalidInput: --weights narrow.safetensors: 1.weight has shape",
    "corrupt.onnx digits --eval": "InvalidInput: --eval belongs to package.module:factory",
    "nets:small missing.npz": "InvalidInput: missing.npz: no such file.",
    "nets:small digit": "InvalidInput: DATA is one of digits, mnist, cifar10, a file (.npz, .npy, .pt, .pth) or a",
    "nets:small digits --split best": "InvalidInput: --split is train or test, got 'best'.",
    "nets:small negative.npz": "InvalidInput: negative.npz: labels count from 0, got -1 .. 3.",
    "nets:small floats.npz": "InvalidInput: floats.npz: expected y as 2 whole numbers",
    "nets:small bytes.npz": "InvalidInput: bytes.npz: x holds uint8, expected float64 or less",
    "nets:small nan.npz": "InvalidInput: nan.npz: x holds NaN or infinity.",
    "nets:small pickle.npz": "InvalidFile: pickle.npz is not a .npz file of plain arrays",
    "nets:small unlabelled.npz": "InvalidFile: unlabelled.npz has the arrays x, expected x and y.",
    "nets:small junk.npz": "InvalidFile: junk.npz is not a .npz file of plain arrays",
    "nets:small digits --eps 1/0": "InvalidInput: --eps expects a number such as 0.1 or 36/255, got '1/0'.",
    "nets:small digits --eps 1e999": "InvalidInput: --eps expects a number such as 0.1 or 36/255, got '1e999'.",
    "nets:small digits --eps -1": "InvalidInput: epsilons are positive, finite radii, got [-1.0].",
    "nets:small digits --box 1 0": "InvalidInput: box is (lowest, highest) with lowest <= highest",
    "nets:small digits --box 0.5 1": "InvalidInput: The box [0.5, 1] does not contain x",
    "nets:small digits --inside-box": "InvalidInput: inside_box needs the box",
    "nets:small digits --box 0.5 1 --inside-box": "InvalidInput: The box [0.5, 1] does not contain x",
    "nets:small digits --box nan 1": "InvalidInput: A side of the box is NaN.",
    "nets:small digits --device moon": "InvalidInput: Cannot compute on 'moon'",
    "nets:small digits --normalise 1,2 1": "InvalidInput: --normalise expects one number, or one for each of the 1",
    "nets:small digits --normalise 1 0": "InvalidInput: Normalise needs a mean and a positive std",
    "nets:small digits --class-names a,b": "InvalidInput: --class-names has 2 names, the model 10 classes.",
    "nets:small digits --p 3": "InvalidInput: The search covers p = 1, 2 and inf, got 3. Add --no-search.",
}

OTHERS = {
    "bound nets:relu --input-shape 1,8,8 --only curvature": "UnsupportedActivation: Activation 'relu' has a kink",
    "bound nets:small": "InvalidInput: The shape of one input of nets:small is not known.",
    "bound nets:small --input-shape -1,8": "InvalidInput: --input-shape expects positive sizes",
    "bound nets:small --input-shape 1,a": "InvalidInput: --input-shape expects whole numbers",
    "bound nets:small --at digits --p 0.5": "InvalidInput: p must satisfy 1 <= p <= inf, got 0.5.",
    "bound nets:small --at digits --method magic": "InvalidInput: Unknown method 'magic'. Choose one of",
    "bound nets:small --at digits --only K": "InvalidInput: --only is lipschitz or curvature, got 'K'.",
    "bound nets:small --only curvature --method liplt": "InvalidInput: Unknown method 'liplt' for curvature.",
    "bound nets:small --at digits --pair 3": "InvalidInput: --pair expects two outputs such as 0,1, or all, got '3'.",
    "bound nets:small --at digits --pair 3,3": "InvalidInput: pair is two different outputs",
    "bound nets:small --at digits --logit 10": "InvalidInput: Output 10 does not exist",
    "bound nets:small --radius 1": "InvalidInput: --radius is about balls: add their centres",
    "check missing.safetensors nets:small digits": "InvalidFile: There is no file missing.safetensors.",
    "check corrupt.safetensors nets:small digits": "InvalidFile: corrupt.safetensors is cut short",
}


@pytest.mark.parametrize("words", CERTIFY)
def test_certify(wrong: Path, run: Runner, words: str) -> None:
    out = () if "--out" in words else ("--out", "out")
    status, printed, error = run("certify", *words.split(), *out, "--samples", 2, "--quiet")
    assert error.startswith(CERTIFY[words])
    assert (status, printed, error.count("\n")) == (2, "", 1)


def test_weights_of_another_format_are_told_how_to_become_readable(folder: Path, run: Runner) -> None:
    torch.save({"1.weight": torch.zeros(8, 64)}, folder / "weights.bin")
    status, _, error = run("certify", "nets:small", "digits", "--weights", "weights.bin", "--out", "out")
    assert status == 2
    assert "A PyTorch file ends in .pt" in error


@pytest.mark.parametrize("words", OTHERS)
def test_bound_and_check(wrong: Path, run: Runner, words: str) -> None:
    status, printed, error = run(*words.split())
    assert error.startswith(OTHERS[words])
    assert (status, printed, error.count("\n")) == (2, "", 1)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="who may write everywhere meets no such folder")
def test_a_folder_without_the_right_to_write(folder: Path, run: Runner) -> None:
    (folder / "locked").mkdir(mode=0o500)
    status, _, error = run("certify", "nets:small", "digits", "--samples", 2, "--out", "locked/out")
    assert (status, error) == (
        5,
        "CannotWrite: Cannot write into locked/out: Permission denied. Free some space, or choose another folder.\n",
    )


@pytest.mark.parametrize(
    "words", [("certify", "a", "b"), ("bound", "a", "--bogus"), ("bound", "a", "--p", "two"), ("no",)]
)
def test_words_that_are_not_understood(run: Runner, words: tuple[str, ...]) -> None:
    status, printed, error = run(*words)
    assert (status, printed) == (2, "")
    assert "Error" in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_the_installed_command_answers_in_one_line_and_with_a_traceback_only_on_request(folder: Path) -> None:
    ran = run_process("certify", "nets:raising", "digits", "--out", "out", folder=folder)
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert ran.err.endswith("Run with --debug to see where.\n")
    ran = run_process("certify", "nets:raising", "digits", "--out", "out", "--debug", folder=folder)
    assert (ran.status, ran.out) == (2, "")
    assert "Traceback" in ran.err and 'raise ZeroDivisionError("no model today")' in ran.err


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (InvalidInput("p must be [at least] 1."), 2, "InvalidInput: p must be [at least] 1.\n"),
        (SoundnessError("A ball is broken."), 1, "SoundnessError: A ball is broken.\n"),
        (CannotWrite("Cannot write into out: No space left on device."), 5, "CannotWrite: Cannot write into out: No"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 5, "OSError: x: No space left on device. Make room"),
        (MemoryError(), 5, "MemoryError: the memory is exhausted."),
        (PermissionError(13, "Permission denied", "x"), 2, "PermissionError: x: Permission denied. Check the path"),
        (KeyError("odd\nthing"), 3, "KeyError: 'odd\\nthing'. This is unexpected. Run with --debug to see where.\n"),
    ],
)
def test_errors_and_their_statuses(
    monkeypatch: pytest.MonkeyPatch, run: Runner, error: Exception, status: int, message: str
) -> None:
    def fail(words: list[str]) -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    ran = run("bound")
    assert ran.status == status
    assert ran.err.startswith(message)
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("certify", DEMO, "digts", "--out", "o"), "digits"),
        (("certify", DEMO, "digits", "--method", "liptl", "--no-search", "--out", "o"), "liplt"),
        (("bound", DEMO, "--input-shape", "1,8,8", "--method", "unroled"), "unrolled"),
        (("bound", "curvcert.data:load_demo_netwrok", "--input-shape", "1,8,8"), "load_demo_network"),
        (("train", "--recipe", "digts", "--out", "o"), "digits"),
        (("train", "--recipe", "digits", "--set", "epoch=3", "--out", "o"), "epochs"),
    ],
)
def test_a_name_that_is_nearly_one_is_asked_back(run: Runner, words: tuple[str, ...], meant: str) -> None:
    ran = run(*words)
    assert ran.status == 2
    assert f"Did you mean '{meant}'?" in ran.err
