"""Every kind of data file holds the same samples; what a hostile one claims is refused before it is unpacked."""

import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.damages import mutations
from curvcert.cli.inputs import Inputs, load_inputs
from curvcert.cli.torch_files import read_torch_file
from curvcert.errors import CurvcertError, InvalidFile, InvalidInput

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 5, 4, 3), np.uint8)
X, Y = PIXELS.transpose(0, 3, 1, 2) / 255, np.array([2, 0, 1, 1, 2, 0])


def npz(folder: Path) -> Inputs:
    np.savez(folder / "data.npz", x=X, y=Y)
    return load_inputs(str(folder / "data.npz"))


def npy(folder: Path) -> Inputs:
    np.save(folder / "x.npy", X)
    np.save(folder / "y.npy", Y)
    return load_inputs(str(folder / "x.npy"), labels=folder / "y.npy")


def text_labels(folder: Path) -> Inputs:
    np.save(folder / "x.npy", np.asfortranarray(X))
    (folder / "y.txt").write_text("\n".join(map(str, Y)) + "\n")
    return load_inputs(str(folder / "x.npy"), labels=folder / "y.txt")


def pair(folder: Path) -> Inputs:
    torch.save((torch.tensor(X), torch.tensor(Y)), folder / "data.pt")
    return load_inputs(str(folder / "data.pt"))


def named(folder: Path) -> Inputs:
    torch.save({"x": torch.tensor(X), "y": torch.tensor(Y)}, folder / "data.pth")
    return load_inputs(str(folder / "data.pth"))


def tensor_alone(folder: Path) -> Inputs:
    torch.save(torch.tensor(X, requires_grad=True), folder / "x.pt")
    torch.save(torch.tensor(Y), folder / "y.pt")
    return load_inputs(str(folder / "x.pt"), labels=folder / "y.pt")


def listed(folder: Path) -> Inputs:
    for k, pixels in enumerate(PIXELS):
        Image.fromarray(pixels).save(folder / f"{k}.png")
    (folder / "labels.csv").write_text("file,label\n" + "".join(f"{k}.png,{label}\n" for k, label in enumerate(Y)))
    return load_inputs(str(folder))


@pytest.mark.parametrize("kind", [npz, npy, text_labels, pair, named, tensor_alone, listed], ids=lambda k: k.__name__)
def test_every_kind_holds_the_same_samples(kind, tmp_path: Path) -> None:
    found = kind(tmp_path)
    assert found.x.dtype == torch.float64 and found.x.tolist() == X.tolist()
    assert found.y.dtype == torch.int64 and found.y.tolist() == Y.tolist()


def test_a_folder_for_each_class(tmp_path: Path) -> None:
    for k, (pixels, label) in enumerate(zip(PIXELS, Y, strict=True)):
        (tmp_path / "abc"[label]).mkdir(exist_ok=True)
        Image.fromarray(pixels[:, :, 0]).save(tmp_path / "abc"[label] / f"{k}.png")
    found = load_inputs(str(tmp_path), samples=3)
    assert found.class_names == ("a", "b", "c")
    assert found.y.tolist() == [0, 1, 2]  # the first few are of all classes
    assert found.x.tolist() == (PIXELS[[1, 2, 0], None, :, :, 0] / 255).tolist()
    (tmp_path / "c").rename(tmp_path / "10")
    (tmp_path / "a").rename(tmp_path / "0")
    (tmp_path / "b").rename(tmp_path / "9")
    found = load_inputs(str(tmp_path))
    assert sorted(set(found.y.tolist())) == [0, 9, 10] and found.class_names == ()


def test_what_is_not_labelled_says_so(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    with pytest.raises(InvalidInput, match="--labels"):
        load_inputs(str(tmp_path / "x.npy"))
    assert load_inputs(str(tmp_path / "x.npy"), labelled=False).x.shape == X.shape
    with pytest.raises(InvalidInput, match="has its own"):
        load_inputs("digits", labels=tmp_path / "x.npy")


def refused(path: Path, words: str, labels: Path | None = None) -> None:
    with pytest.raises(InvalidInput, match=words):
        load_inputs(str(path), labels=labels)


def test_folders_that_hold_no_samples_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, "holds no samples")
    (tmp_path / "cat").mkdir()
    Image.fromarray(PIXELS[0]).save(tmp_path / "cat" / "a.png")
    Image.fromarray(PIXELS[1][:3]).save(tmp_path / "cat" / "b.png")
    refused(tmp_path, "different sizes")
    Image.fromarray(PIXELS[1]).convert("P").save(tmp_path / "cat" / "b.png")
    refused(tmp_path, "mode P")
    (tmp_path / "cat" / "b.png").write_bytes((tmp_path / "cat" / "a.png").read_bytes()[:60])
    refused(tmp_path, r"b\.png is not a \.png file")
    (tmp_path / "labels.csv").write_text("gone.png,3\n")
    refused(tmp_path, "no such file")
    (tmp_path / "labels.csv").write_text("cat/a.png,one\n")
    refused(tmp_path, "whole numbers")
    for stranger in ("../a.png", str(tmp_path / "cat" / "a.png")):
        (tmp_path / "labels.csv").write_text(f"{stranger},0\n")
        refused(tmp_path, "not in its own folder")
    (tmp_path / "labels.csv").write_text("cat/a.png\n")
    refused(tmp_path, "lines of a file's name")
    for text, reason in (
        (b"\xff.png,0\n", "is not a .csv file"),
        (b"a" * 2**18 + b".png,0\n", "is not a .csv file"),
        (b"a" * 2**12 + b".png,0\n", "is not a .png file"),
    ):
        (tmp_path / "labels.csv").write_bytes(text)
        refused(tmp_path, reason)
    # Editors of tables begin a file with a mark.
    Image.fromarray(PIXELS[0]).save(tmp_path / "whole.png")
    (tmp_path / "labels.csv").write_text("whole.png,3\n", encoding="utf-8-sig")
    assert load_inputs(str(tmp_path)).y.tolist() == [3]


def test_a_folder_that_is_named_by_too_large_a_number_is_refused(tmp_path: Path) -> None:
    (tmp_path / ("9" * 30)).mkdir()
    Image.fromarray(PIXELS[0]).save(tmp_path / ("9" * 30) / "a.png")
    refused(tmp_path, "labels are whole numbers")


def test_an_image_is_measured_before_it_is_unpacked(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    Image.new("L", (9000, 9000)).save(tmp_path / "0" / "a.png")
    refused(tmp_path, "unpacks to 648000000 bytes")


def test_the_scans_of_a_jpeg_are_counted(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    file = tmp_path / "0" / "a.jpg"
    Image.new("L", (64, 64)).save(file, progressive=True)
    assert load_inputs(str(tmp_path)).shape == (1, 64, 64)
    content = file.read_bytes()
    scan = content[content.rindex(b"\xff\xda") : -2]
    file.write_bytes(content[:-2] + scan * 100 + content[-2:])
    refused(tmp_path, "scans, over the limit of 100")


def test_a_tensor_that_repeats_one_number_is_measured(tmp_path: Path) -> None:
    torch.save(torch.zeros(1).expand(2**20, 2**12), tmp_path / "x.pt")
    refused(tmp_path / "x.pt", "unpacks to", labels=tmp_path / "x.pt")


class Code:
    def __reduce__(self):
        return print, ("this code ran",)


def test_code_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"x": Code()}, tmp_path / "data.pt")
    refused(tmp_path / "data.pt", "not a file of tensors by torch.save")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Code()))
    refused(tmp_path / "plain.pt", "not a file of tensors by torch.save")
    assert "this code ran" not in capsys.readouterr().out


def rewritten(source: Path, target: Path, change, packing: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", packing) as new:
        for part in old.infolist():
            new.writestr(part.filename, change(part.filename, old.read(part)))
    return target


def promise_more(name: str, held: bytes) -> bytes:
    return held.replace(b"K\x08", b"J\x00\x00\x00\x10")


def test_records_that_promise_more_than_they_hold_reach_no_other_memory(tmp_path: Path) -> None:
    torch.save(torch.arange(8.0), tmp_path / "x.pt")
    # The number of entries stands twice in the pickle: of the storage, and of the tensor.
    longer = rewritten(tmp_path / "x.pt", tmp_path / "y.pt", promise_more)
    with pytest.raises(InvalidFile, match="not a file of tensors"):
        read_torch_file(longer)
    packed = rewritten(tmp_path / "x.pt", tmp_path / "z.pt", lambda name, held: held, zipfile.ZIP_DEFLATED)
    with pytest.raises(InvalidFile, match="packed records"):
        read_torch_file(packed)


def called(name: str, number: int) -> bytes:
    return f"c{name}\n".encode() + b"J" + number.to_bytes(4, "little") + b"\x85R"


PICKLES = {
    "a bytearray of two gigabytes": (called("builtins\nbytearray", 2**31 - 1), "it names 'builtins bytearray'"),
    "a storage of two gigabytes": (called("torch.storage\nUntypedStorage", 2**31 - 1), "it names 'torch.storage Un"),
    "an encoder": (b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x08\x00\x00\x00punycode\x86R", "it names '_codecs encode'"),
    "tuples of tuples": (b")" + b"".join(b"q%ch%c\x86" % (k, k) for k in range(60)), "the same values too many times"),
    "lists of lists": (
        b"]" + b"".join(b"q%c](h%ch%ce" % (k, k, k) for k in range(60)),
        "the same values too many times",
    ),
    "a list in itself": (b"]q\x00h\x00a", "the same values too many times"),
    "a call of a list": (b"])R", "calls what has no name"),
    "an empty stack": (b"\x86\x86", "takes what is not there"),
}


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_of_few_bytes_that_ask_for_much(name: str, tmp_path: Path) -> None:
    pickled, words = PICKLES[name]
    torch.save(torch.ones(2), tmp_path / "x.pt")
    greedy = rewritten(
        tmp_path / "x.pt",
        tmp_path / "y.pt",
        lambda part, held: b"\x80\x02}" + pickled + b"K\x01s." if part.endswith("data.pkl") else held,
    )
    with pytest.raises(InvalidFile, match=words):
        read_torch_file(greedy)


def test_what_training_saves_is_read(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimiser = torch.optim.AdamW([{"params": part.parameters()} for part in net])
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, [1, 2])
    net(torch.ones(1, 2)).sum().backward()
    optimiser.step()
    parts = {"net": net, "optimiser": optimiser, "schedule": schedule}
    held = {name: part.state_dict() for name, part in parts.items()}
    torch.save(held | {"losses": [0.5] * 3000, "dtype": torch.float64, "shape": torch.Size((2,))}, tmp_path / "a.pt")
    found = read_torch_file(tmp_path / "a.pt")
    assert found["net"]["1.bias"].tolist() == net[1].bias.tolist()
    assert found["schedule"]["milestones"] == schedule.milestones and len(found["losses"]) == 3000


@pytest.mark.parametrize("table", [b"\xff.png,1\n", b"a" * 2**18 + b",1\n"], ids=["no text", "a long name"])
def test_a_table_that_cannot_be_read(table: bytes, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_bytes(table)
    refused(tmp_path, "is not a .csv file")


@pytest.mark.parametrize("kind", ["x.npy", "x.pt", "0/a.png"])
def test_damaged_files_are_refused_or_read(kind: str, tmp_path: Path) -> None:
    file = tmp_path / kind
    file.parent.mkdir(exist_ok=True)
    {
        "x.npy": lambda: np.save(file, X),
        "x.pt": lambda: torch.save((torch.tensor(X), torch.tensor(Y)), file),
        "0/a.png": lambda: Image.fromarray(PIXELS[0]).save(file),
    }[kind]()
    labels = tmp_path / "y.txt"
    labels.write_text("\n".join(map(str, Y)))
    read = 0
    for damaged in mutations(file.read_bytes(), 60, seed=3):
        file.write_bytes(damaged)
        try:
            load_inputs(str(tmp_path if kind == "0/a.png" else file), labels=labels if kind == "x.npy" else None)
        except CurvcertError:
            continue
        read += 1
    assert read < 60
