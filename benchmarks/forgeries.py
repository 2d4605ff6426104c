"""Forged files: well-formed, sealed anew, and senseless or greedy inside; where damage stops, a forger begins.

Each function takes a valid file's bytes and a source of randomness, and returns another file's bytes.
"""

import copy
import hashlib
import io
import json
import pickle
import random
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.lib.format import write_array_header_1_0
from onnx import TensorProto, helper
from safetensors import safe_open
from safetensors.numpy import load

from curvcert.tensor_files import safetensors_content, seal
from curvcert.training import model_file

Forge = Callable[[bytes, random.Random], bytes]

CANARY = "code-was-run"
"""The file that code in a forgery would leave in the current folder."""

_WORDS = (
    "", "t0", "t99", "dense", "conv", "identity", "zero", "sum", "circuit", "permutation", "magic", "tanh", "relu",
    "softplus(1e-300)", "softplus(1e400)", "elu(-1)", "gelu(1,2,3)", "anchored", "auto", "shell", "inf", "nan", "-1",
    "1e999", "../../etc/passwd", "/dev/zero", "/dev/stdin", "a\0b", "\x1b[2J\x07", "\u202e", "\ud800", "=1+1",
    "curvcert.data:load_demo_network", "os:system", "__import__('os').system('id')", "w" * 5000,
)  # fmt: skip
_NUMBERS = (
    0, 1, -1, 2, 3, 7, 255, 256, 2**15, 2**16, 2**24, 2**27, 2**28, 2**31 - 1, 2**31, 2**32, 2**40, 2**63, -(2**63),
    10**30, 10**400, 0.5, -0.0, 1e-320, 1e-300, 1e100, 1e300, 1.7e308, -1e300,
)  # fmt: skip
_OPERATORS = (
    "Add", "Sub", "Mul", "Div", "Tanh", "Relu", "Conv", "Gemm", "MatMul", "Reshape", "Flatten", "Concat", "Slice",
    "Split", "Gather", "Transpose", "Pad", "Expand", "ConstantOfShape", "Tile", "Resize", "Range", "NonZero", "Loop",
    "If", "Scan", "Einsum", "Softmax", "MaxPool", "AveragePool", "ReduceMean", "Shape", "Cast", "Unsqueeze", "Squeeze",
    "BatchNormalization", "Dropout", "Clip", "Pow", "Sqrt", "Constant", "Identity", "GlobalAveragePool", "RandomNormal",
    "LSTM", "GRU", "RNN", "LayerNormalization", "InstanceNormalization", "LogSoftmax", "ReduceSum", "ReduceMax",
    "CumSum", "Where", "Greater", "GatherElements", "Trilu", "ConvTranspose", "Upsample", "DepthToSpace", "LRN", "Max",
    "Mean", "Scaler", "ZipMap", "ReduceProd", "Size", "Equal",
)  # fmt: skip


class Bomb:
    """What runs code where it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (CANARY, "w")


def pickled(content: bytes, draw: random.Random) -> bytes:
    """Return a pickle in place of the file: bare, as PyTorch saves one, or inside of an archive of arrays."""
    kind = draw.randrange(3)
    if kind == 0:
        return pickle.dumps(Bomb())
    buffer = io.BytesIO()
    if kind == 1:
        torch.save({"weight": Bomb()}, buffer)
    else:
        np.savez(buffer, x=np.array([Bomb()], object), y=np.zeros(1, int))
    return buffer.getvalue()


def forged_value(value: Any, draw: random.Random) -> Any:
    """Return a JSON value with one to three of its places changed, however deep."""
    value = copy.deepcopy({"": value})
    for _ in range(draw.choice((1, 1, 2, 3))):
        try:
            places = list(_places(value))
        except RecursionError:
            break
        holder, key = draw.choice(places)
        found = holder[key]
        match draw.randrange(8):
            case 0 if isinstance(holder, list) or holder is not value:
                del holder[key]
            case 1 if isinstance(found, list) and found:
                holder[key] = found * draw.choice((2, 50, 3000))
            case 2:
                other, place = draw.choice(places)
                holder[key] = copy.deepcopy(other[place])
            case 3 if draw.random() < 0.3:
                holder[key] = nested(found, draw)
            case 4 if isinstance(found, str) or draw.random() < 0.3:
                holder[key] = draw.choice(_WORDS)
            case 5 if isinstance(found, int | float) and not isinstance(found, bool):
                holder[key] = draw.choice(
                    (found + 1, found - 1, 2 * found, -found, found / 2 if abs(found) < 2**60 else 0.5)
                )
            case _ if isinstance(found, int | float) or draw.random() < 0.3:
                holder[key] = draw.choice((*_NUMBERS, None, True, False, [], {}, [[]], [0] * 5000))
            case _:
                other, place = draw.choice([pair for pair in places if type(pair[0][pair[1]]) is type(found)])
                holder[key] = copy.deepcopy(other[place])
    return value.get("")


def nudged(value: Any, draw: random.Random) -> Any:
    """Return a JSON value with one number or word of it another: what passes for a file, and is another one."""
    value = copy.deepcopy({"": value})
    holder, key = draw.choice([pair for pair in _places(value) if type(pair[0][pair[1]]) in (int, float, str)])
    found = holder[key]
    if isinstance(found, str):
        words = [pair[0][pair[1]] for pair in _places(value) if isinstance(pair[0][pair[1]], str)]
        holder[key] = draw.choice((*words, *_WORDS))
    else:
        holder[key] = draw.choice((found + 1, found - 1, 2 * found, 0, 1, 1000, draw.choice(_NUMBERS)))
    return value[""]


def nested(value: Any, draw: random.Random) -> Any:
    """Return a value inside of many others: of lists, or as a map of a network is nested."""
    wrap = draw.choice((lambda inner: [inner], lambda inner: {"map": "transposed", "of": inner}))
    for _ in range(draw.choice((1, 5, 33, 400, 1000))):
        value = wrap(value)
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place in a JSON value: what holds it, and its key or number there."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs)[:300]:
        yield value, key
        yield from _places(inner)


@np.errstate(all="ignore")
def forged_arrays(arrays: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Return arrays of which one or two are others: in a number, in type, in shape, in name."""
    arrays = {name: arrays[name].copy() for name in sorted(arrays)}
    for _ in range(draw.choice((0, 1, 1, 2))):
        if not arrays:
            break
        name = draw.choice(sorted(arrays))
        value = arrays[name]
        match draw.randrange(7):
            case 0 if value.size and value.dtype.kind == "f":
                value.flat[draw.randrange(value.size)] = draw.choice((np.nan, np.inf, 1e300, -1e200, 1e-310, 0.0))
            case 1:
                arrays[name] = value.astype(draw.choice(("<f8", "<f4", "<i8", "|b1", "|u1")))
            case 2:
                arrays[name] = draw.choice(
                    (value.reshape(-1), value.reshape(*value.shape, 1), value[:0], value.T.copy())
                )
            case 3:
                del arrays[name]
            case 4:
                arrays[draw.choice(_WORDS[:3])] = arrays.pop(name)
            case 5:
                arrays[name] = np.zeros(draw.choice(((0,), (1,), (4096, 16), (2,) * 8)))
            case _ if value.size:
                value.flat[draw.randrange(value.size)] = draw.choice((0, 1, 2, 3))
    return arrays


def sealed(content: bytes, draw: random.Random) -> bytes:
    """Forge one of curvcert's sealed files: its header, its arrays, or the text of its header."""
    size = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + size])["__metadata__"]
    arrays = forged_arrays(load(content), draw)
    if draw.random() < 0.4:
        held = load(content)  # in any order
        arrays, text = {name: held[name] for name in sorted(held)}, dumped(nudged(json.loads(metadata["header"]), draw))
    elif draw.random() < 0.85:
        text = dumped(forged_value(json.loads(metadata["header"]), draw))
    else:
        text = spoilt(metadata["header"], draw)
    metadata["header"] = text.encode("utf-8", "replace").decode()
    metadata["seal"] = seal(metadata["kind"], int(metadata["version"]), metadata["header"], arrays)
    return safetensors_content(metadata, arrays)


def dumped(value: Any) -> str:
    """Return JSON, with NaN where there is one; what is nested too deep for it is nested without end."""
    try:
        return json.dumps(value)
    except (RecursionError, ValueError):
        return "[" * 100_000


def spoilt(text: str, draw: random.Random) -> str:
    """Return a text with a few of its characters changed, or a stretch of it repeated."""
    for _ in range(draw.choice((1, 2, 5))):
        place = draw.randrange(len(text) + 1)
        if draw.random() < 0.2:
            text = text[:place] + text[place : place + 40] * draw.choice((2, 1000)) + text[place:]
        else:
            text = text[:place] + draw.choice('0123456789[]{}",:eE-+.nul\\') + text[place + 1 :]
    return text


def tensors(content: bytes, draw: random.Random) -> bytes:
    """Forge tensors that nothing seals."""
    return safetensors_content({}, forged_arrays(load(content), draw))


def model(content: bytes, draw: random.Random) -> bytes:
    """Forge a trained model: its recipe or its weights, sealed anew."""
    path = Path("forged-model.safetensors")
    path.write_bytes(content)
    with safe_open(str(path), framework="pt") as file:
        about = json.loads(file.metadata()["curvcert"])
        arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118  (not a mapping)
    path.unlink()
    about.pop("sha256")
    about = forged_value(about, draw)
    arrays = forged_arrays(arrays, draw)
    if isinstance(about, dict):
        try:
            about["sha256"] = model_file._seal(about, {name: torch.from_numpy(value) for name, value in arrays.items()})
        except (RuntimeError, ValueError):
            about["sha256"] = ""
    return safetensors_content({"curvcert": dumped(about)}, arrays)


def index(content: bytes, draw: random.Random) -> bytes:
    """Forge the index of a checkpoint, with its digest made anew."""
    about = json.loads(content)
    about.pop("sha256")
    about = forged_value(about, draw)
    if isinstance(about, dict):
        about["sha256"] = _digest(about)
    return dumped(about).encode("utf-8", "replace")


def _digest(about: dict[str, Any]) -> str:
    try:
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    except (RecursionError, ValueError, TypeError):
        return ""


def plan(content: bytes, draw: random.Random) -> bytes:
    """Forge a plan, which has no seal."""
    return dumped(forged_value(json.loads(content), draw)).encode("utf-8", "replace")


def recipe(content: bytes, draw: random.Random) -> bytes:
    """Forge a recipe: one line gets another value, of any kind that TOML has, or another name."""
    lines = content.decode().splitlines()
    place = draw.randrange(len(lines))
    name = lines[place].partition(" = ")[0]
    depth = draw.choice((3, 500, 30_000))
    value = draw.choice(
        (
            *map(str, _NUMBERS), *(json.dumps(word[:200]) for word in _WORDS), "inf", "-nan", "true", "1979-05-27",
            "07:32:00", "[[[]]]", "{a = 1}", "[" * depth + "]" * depth, "{a=" * depth + "1" + "}" * depth,
            "[1," * depth, '"""' + "x" * depth, "0x" + "f" * depth, "9" * 5000, "[" + "0.1," * depth + "]", '["36/0"]',
            f'["{"9" * 4000}/1"]', '["1/3", true]', "'''", "\\",
        )
    )  # fmt: skip
    match draw.randrange(12):
        case 0:
            lines.append(f"{draw.choice(_WORDS[1:10])} = {value}")
        case 1:
            lines.insert(place, f"[{'.'.join(['a'] * draw.choice((1, 100, 10_000)))}]")
        case 2:
            lines.append(lines[place])
        case _:
            lines[place] = f"{name} = {value}"
    return "\n".join(lines).encode("utf-8", "replace")


def statement(content: bytes, draw: random.Random) -> bytes:
    """Forge a property: one of its words is another, or a piece of it is repeated, nested or without an end."""
    words = re.findall(r"[()]|[^\s()]+", content.decode().partition("\n")[2])
    place = draw.randrange(len(words))
    depth = draw.choice((3, 60, 5_000, 100_000))
    others = ("(", ")", "and", "or", "*", "-", "<=", "X_0", "Y_0", "Y_9999999", "|", '"', ";", "0." + "9" * 50, "1e999",
              "9" * 5000, "assert", "declare-const", "\u0661", "1/0", "-", "0", "")  # fmt: skip
    match draw.randrange(6):
        case 0:
            words[place:place] = ["("] * depth
        case 1:
            piece = words[place : place + draw.choice((1, 12, 40))]
            words[place:place] = piece * min(depth, 5_000)
        case 2:
            words[place:place] = [
                "(",
                "assert",
                "(",
                "or",
                *(["(", "<=", "Y_0", "Y_1", ")"] * min(depth, 5_000)),
                ")",
                ")",
            ]
        case 3:
            words[place:place] = ["(", "*", "2"] * min(depth, 60) + ["Y_0"] + [")"] * min(depth, 60)
        case _:
            for k in (place, draw.randrange(len(words))):
                words[k] = draw.choice(others)
    return " ".join(words).encode()


def archive(content: bytes, draw: random.Random) -> bytes:
    """Forge an archive of arrays: members with headers that promise something else, of all names and sizes."""
    buffer = io.BytesIO()
    warnings.simplefilter("ignore", UserWarning)  # two members of one name are meant
    method = draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    with zipfile.ZipFile(buffer, "w") as file:
        labels = draw.choice((*["y.npy"] * 20, "y", "Y.npy", "../y.npy", "y.npy/"))
        others = [draw.choice(("z.npy", "__init__.py", "/etc/passwd")) for _ in range(draw.choice((0, 0, 1, 300)))]
        members = {"x.npy": _member(draw, "<f8", (3, 4)), labels: _labels(draw)}
        for name, data in (*members.items(), *((name, draw.randbytes(20)) for name in others)):
            file.writestr(zipfile.ZipInfo(name), data, method)  # without the time of day
    return buffer.getvalue()


def _member(draw: random.Random, kind: str, shape: tuple[int, ...]) -> bytes:
    count = int(np.prod(shape))
    held = draw.choice((8 * count, 8 * count, 8 * count, 0, 7, 8 * count + 1, 2**22))
    shape = draw.choice((shape, shape, shape, (count,), (), (0, 4), (-1, 4), (2**40, 2**20), (3, 2**62), (1,) * 60))
    kind = draw.choice((kind, kind, kind, "<f4", "<f2", ">f8", "<i8", "|O", "|V8", "|V0", "<U2", "<c16", "<M8[s]"))
    order = draw.random() < 0.1
    buffer = io.BytesIO()
    if draw.random() < 0.8:
        write_array_header_1_0(buffer, {"descr": kind, "fortran_order": order, "shape": shape})
    else:
        text = draw.choice(("[" * 9000, "-" * 9000, "{" + "'a':" * 2000, "__import__('os').system('id')", "{}", "("))
        buffer.write(b"\x93NUMPY" + bytes(draw.choice(((1, 0), (2, 0), (3, 0), (9, 9)))))
        buffer.write(struct.pack("<H", len(text)) + text.encode())
    body = pickle.dumps(Bomb()) if "O" in kind else bytes(held)
    return buffer.getvalue() + body


def _labels(draw: random.Random) -> bytes:
    if draw.random() < 0.3:
        return _member(draw, "<i8", (3,))
    buffer = io.BytesIO()
    np.save(buffer, np.arange(3))
    return buffer.getvalue()


def graph(content: bytes, draw: random.Random) -> bytes:
    """Forge an ONNX file: nodes, attributes, constants, names and sizes."""
    made = onnx.ModelProto.FromString(content)
    for _ in range(draw.choice((1, 1, 2, 4))):
        draw.choice(_GRAPHS)(made, draw)
    return bytes(made.SerializeToString())


def _size(draw: random.Random) -> int:
    return int(draw.choice([n for n in _NUMBERS if isinstance(n, int) and abs(n) < 2**63]))


def _node(made: Any, draw: random.Random) -> Any:
    return draw.choice(list(made.graph.node)) if made.graph.node else made.graph.node.add()


def _another_operator(made: Any, draw: random.Random) -> None:
    _node(made, draw).op_type = draw.choice(_OPERATORS)


def _another_attribute(made: Any, draw: random.Random) -> None:
    node = _node(made, draw)
    names = [item.name for item in node.attribute] or ["axis", "pads", "perm", "kernel_shape", "value", "to"]
    name = draw.choice(names)
    for k in reversed(range(len(node.attribute))):
        if node.attribute[k].name == name:
            del node.attribute[k]
    value: Any = draw.choice(([_size(draw) for _ in range(draw.choice((1, 2, 4)))], _size(draw), 1e300, "text"))
    node.attribute.append(helper.make_attribute(name, value))


def _another_input(made: Any, draw: random.Random) -> None:
    node = _node(made, draw)
    names = [name for other in made.graph.node for name in (*other.input, *other.output)]
    if node.input:
        node.input[draw.randrange(len(node.input))] = draw.choice([*names, "", "nowhere"])


def _fewer_nodes(made: Any, draw: random.Random) -> None:
    if made.graph.node:
        del made.graph.node[draw.randrange(len(made.graph.node))]


def _more_nodes(made: Any, draw: random.Random) -> None:
    """Nodes that make much out of little, in front of one that is needed or beside all."""
    sizes = [_size(draw) for _ in range(draw.choice((1, 2, 4)))]
    made.graph.initializer.append(helper.make_tensor("sizes", TensorProto.INT64, [len(sizes)], sizes))
    made.graph.node.insert(0, helper.make_node("ConstantOfShape", ["sizes"], ["much"], name="much"))
    node = _node(made, draw)
    if node.input and draw.random() < 0.7:
        node.input[draw.randrange(len(node.input))] = "much"
    for k in range(draw.choice((0, 3, 60))):
        source = "much" if k == 0 else f"much{k - 1}"
        made.graph.node.insert(1 + k, helper.make_node("Add", [source, source], [f"much{k}"], name=f"much{k}"))


def _another_constant(made: Any, draw: random.Random) -> None:
    if not made.graph.initializer:
        return
    tensor = draw.choice(list(made.graph.initializer))
    match draw.randrange(5):
        case 0:
            tensor.dims[:] = [_size(draw) for _ in tensor.dims] or [1]
        case 1:
            tensor.data_type = draw.randrange(25)
        case 2:
            tensor.raw_data = tensor.raw_data[: draw.randrange(1 + len(tensor.raw_data))]
        case 3:
            floats = np.array(draw.choice((np.nan, np.inf, 1e38, 1e-45)), np.float32).tobytes()
            tensor.raw_data = floats + tensor.raw_data[4:]
        case _:
            del tensor.external_data[:]
            tensor.data_location = TensorProto.EXTERNAL
            tensor.ClearField("raw_data")
            word = draw.choice((*_WORDS[:-1], "w" * 300, "weights.bin")).encode("utf-8", "replace").decode()
            for key, value in (("location", word), ("offset", str(_size(draw))), ("length", str(_size(draw)))):
                tensor.external_data.add(key=key, value=value)


def _another_shape(made: Any, draw: random.Random) -> None:
    sizes = made.graph.input[0].type.tensor_type.shape.dim if made.graph.input else []
    if sizes:
        draw.choice(list(sizes)).dim_value = _size(draw)


def _another_name(made: Any, draw: random.Random) -> None:
    node = _node(made, draw)
    node.name = draw.choice(_WORDS).encode("utf-8", "replace").decode()
    if draw.random() < 0.3 and node.output:
        node.output[0] = draw.choice([name for other in made.graph.node for name in other.output] or ["y"])


def _another_version(made: Any, draw: random.Random) -> None:
    made.opset_import[0].version = draw.choice((8, 9, 11, 12, 13, 14, 16, 18, 20, 21, 999, 2**62))
    made.ir_version = draw.choice((0, 3, 8, 999))


def _own_operator(made: Any, draw: random.Random) -> None:
    node = _node(made, draw)
    domain = draw.choice(("", "own"))
    body = [helper.make_node("Identity", ["a"], ["b"])]
    made.functions.append(helper.make_function(domain, node.op_type, ["a"], ["b"], body, made.opset_import))
    node.domain = domain


_GRAPHS: tuple[Callable[[Any, random.Random], None], ...] = (
    _another_operator, _another_attribute, _another_input, _fewer_nodes, _more_nodes, _another_constant,
    _another_shape, _another_name, _another_version, _own_operator,
)  # fmt: skip
