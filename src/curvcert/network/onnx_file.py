"""An ONNX file as plain data: read with every declared size checked, before anything is computed or allocated."""

import importlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from curvcert.errors import CurvcertError, InvalidInput, UnsupportedModule
from curvcert.operators.base import Shape

Array = np.ndarray[Any, Any]

LARGEST = 2**24
"""The most numbers in one constant."""

_LARGEST_BATCH = 2**26
"""The most numbers in one batch of any intermediate value: 256 MiB in float32."""

CHECKED = 9
"""How many inputs a network is compared on, at least."""

_LARGEST_FILE = 2**31 - 1
_MOST_NODES = 20_000
_OLDEST_OPSET = 7
_DOMAINS = ("", "ai.onnx")
_OF_TREES_AND_TABLES = "ai.onnx.ml"
_TAKEN_FROM_THERE = ("Scaler",)
_ROOM, _ROOM_PER_NUMBER = 2**24, 32

# Number of the type in ONNX -> its name in the file's typed fields, bytes, numpy type.
_TYPES: dict[int, tuple[str, int, Any]] = {
    1: ("float_data", 4, np.float32),
    11: ("double_data", 8, np.float64),
    10: ("int32_data", 2, np.float16),
    7: ("int64_data", 8, np.int64),
    6: ("int32_data", 4, np.int32),
    9: ("int32_data", 1, np.bool_),
}
FLOATS = {1: torch.float32, 10: torch.float16, 11: torch.float64}
_REMEDY = "Use the operators that curvcert.load_onnx lists, or trace the PyTorch module with curvcert.trace."


@dataclass(frozen=True)
class Batch:
    """Stands for a multiple of the number of samples, which nothing but a shape may depend on."""

    times: int = 1

    def __mul__(self, other: int) -> "Batch":
        """Return a multiple of it."""
        return Batch(self.times * int(other)) if isinstance(other, int | np.integer) else NotImplemented

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> "Batch":
        """Return a part of it."""
        if not isinstance(other, int | np.integer) or other < 1 or self.times % other:
            return NotImplemented
        return Batch(self.times // int(other))

    def __ge__(self, other: object) -> bool:
        """Whether it is at least another multiple, or 1: a dimension that is stretched to it is."""
        if isinstance(other, Batch):
            return self.times >= other.times
        return True if isinstance(other, int) and other <= 1 else NotImplemented

    def __le__(self, other: object) -> bool:
        """Whether it is at most another multiple."""
        return self.times <= other.times if isinstance(other, Batch) else NotImplemented

    def __repr__(self) -> str:
        """Return what messages call it."""
        return "batch" if self.times == 1 else f"{self.times} batch"


@dataclass(frozen=True, eq=False)
class Node:
    """One operation of the graph."""

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]

    @property
    def label(self) -> str:
        """How errors call this node: its name and its operator."""
        return f"{shown(self.short)} ({shown(self.op)[1:-1]})"

    @property
    def short(self) -> str:
        """Its name, or that of its first output."""
        return self.name or next(filter(None, self.outputs), "")

    def attribute(self, name: str, default: Any) -> Any:
        """Return an attribute; one of another type than its default is refused."""
        value = self.attributes.get(name, default)
        if default is not None and type(value) is not type(default):
            raise InvalidInput(
                f"{self.label}: attribute {name} should be a {type(default).__name__}, got {type(value).__name__}. "
                "Export the model again."
            )
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return an attribute that is 0 or 1."""
        value = self.attribute(name, int(default))
        if value not in (0, 1):
            raise InvalidInput(f"{self.label}: attribute {name} should be 0 or 1, got {value}. Export the model again.")
        return bool(value)

    def unsupported(self, why: str, remedy: str = _REMEDY) -> UnsupportedModule:
        """Return the refusal of this node."""
        return UnsupportedModule(f"{self.label}: {why} is not supported. {remedy}")


@dataclass(frozen=True, eq=False)
class Graph:
    """What a file computes: nodes in order, constants by name, one input and one output.

    `batch` is the size of the batch if the file fixes it; `serialised` is the whole model, for onnxruntime.
    """

    nodes: tuple[Node, ...]
    constants: dict[str, Array]
    input_name: str
    input_shape: Shape
    batch: int | None
    output_name: str
    dtype: torch.dtype
    opset: int
    serialised: bytes

    @property
    def largest(self) -> int:
        """The most numbers in one sample of any intermediate value."""
        return _LARGEST_BATCH // max(CHECKED, self.batch or 1)

    @property
    def room(self) -> int:
        """The most numbers in all values of one sample and all uses of constants: small files may not ask for much."""
        held = [*self.constants.values(), *(value for node in self.nodes for value in node.attributes.values())]
        return _ROOM + _ROOM_PER_NUMBER * sum(value.size for value in held if isinstance(value, np.ndarray))


def shown(name: str) -> str:
    """Return a name from a file in quotes, cut to a readable length."""
    return repr(name if len(name) <= 80 else name[:77] + "...")


def imported(module: str) -> Any:
    """Return an optional module, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CurvcertError(
            f"load_onnx needs the package {module}, which is not installed. Install it: pip install 'curvcert[onnx]'."
        ) from error


def read_graph(path: str | Path, input_shape: Sequence[int] | None = None, output: str | None = None) -> Graph:
    """Read a file; `input_shape` is the shape of one input, for what the file leaves open, `output` one of its outputs.

    Raises:
        InvalidInput: no such file, no ONNX model, contents that contradict themselves.
        UnsupportedModule: several inputs or outputs, other types of numbers.
    """
    onnx = imported("onnx")
    path = Path(path)
    model = _parsed(onnx, path)
    opset = _opset(onnx, model)
    graph = model.graph
    if len(graph.node) > _MOST_NODES:
        raise UnsupportedModule(f"{path.name} has {len(graph.node)} nodes; load_onnx covers up to {_MOST_NODES}.")
    if graph.sparse_initializer:
        raise UnsupportedModule(f"{path.name} holds sparse initialisers. Export them as plain (dense) tensors.")
    target = _output(onnx, graph, output, path.name)
    source = _only(_open_inputs(graph), f"{path.name} needs one input")
    _keep_what_is_needed(model, target, source.name)
    constants: dict[str, Array] = {}
    outside = 0
    for tensor in graph.initializer:
        if tensor.name in constants or not tensor.name:
            raise InvalidInput(f"{path.name} has two initialisers, or a nameless one, called {shown(tensor.name)}.")
        what = f"initialiser {shown(tensor.name)}"
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            outside += _embed(onnx, tensor, path.parent, what, _LARGEST_FILE - outside)
        constants[tensor.name] = _array(onnx, tensor, what)
    nodes = tuple(_node(onnx, node) for node in graph.node)
    batch, shape, dtype = _input_type(source, input_shape)
    return Graph(nodes, constants, source.name, shape, batch, target, dtype, opset, _serialised(model, path))


def _output(onnx: Any, graph: Any, wanted: str | None, name: str) -> str:
    """Return the name of the output that is read, and leave no other: labels and a ZipMap are dropped with a notice."""
    made_by = {output: node for node in graph.node for output in node.output}
    found = {}
    for item in graph.output:
        node = made_by.get(item.name)
        if node is not None and node.op_type == "ZipMap" and node.domain == _OF_TREES_AND_TABLES:
            _notice(f"{name}: the output {shown(item.name)} is read without its ZipMap, as a tensor.")
            found[item.name] = node.input[0]
        elif not item.type.HasField("tensor_type") or item.type.tensor_type.elem_type in FLOATS:
            found[item.name] = item.name
        elif wanted is None and len(graph.output) > 1:
            _notice(f"{name}: the output {shown(item.name)} holds labels, not numbers, and is left out.")
    if wanted is not None and wanted not in found:
        raise InvalidInput(f"{name} has no output {shown(wanted)}: its outputs are {', '.join(map(shown, found))}.")
    if wanted is None and len(found) != 1:
        names = ", ".join(map(shown, list(found)[:8])) or "none"
        raise UnsupportedModule(
            f"{name} needs one output, got {len(found)}: {names}. Say which one: load_onnx(path, output=...)."
        )
    target = found[wanted] if wanted is not None else next(iter(found.values()))
    kind = next((item for item in graph.output if item.name == target), None)
    if kind is None:
        kind = onnx.helper.make_tensor_value_info(target, onnx.TensorProto.FLOAT, None)
    kept = onnx.ValueInfoProto.FromString(kind.SerializeToString())
    del graph.output[:]
    graph.output.append(kept)
    return str(target)


def _notice(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=5)


def _open_inputs(graph: Any) -> list[Any]:
    given = {tensor.name for tensor in graph.initializer}
    return [item for item in graph.input if item.name not in given]


def _keep_what_is_needed(model: Any, output: str, source: str) -> None:
    """Leave in a model only what its output is computed from: onnxruntime would compute the rest too.

    Nodes with outputs of one name are all kept, so that they are refused.
    """
    graph, needed = model.graph, {output}
    own = {function.name for function in model.functions if function.domain in _DOMAINS}
    for k in reversed(range(len(graph.node))):
        if needed.isdisjoint(graph.node[k].output):
            del graph.node[k]
        else:
            needed.update(graph.node[k].input)
            if graph.node[k].op_type in own:
                raise UnsupportedModule(f"The file defines the operator {shown(graph.node[k].op_type)} anew. {_REMEDY}")
    for field, kept in ((graph.initializer, needed), (graph.input, {*needed, source})):
        for k in reversed(range(len(field))):
            if field[k].name not in kept:
                del field[k]
    for field in (graph.value_info, graph.quantization_annotation, model.functions, model.training_info):
        del field[:]


def _parsed(onnx: Any, path: Path) -> Any:
    if not path.is_file():
        raise InvalidInput(f"{path}: no such file. Give the path of an ONNX file.")
    if not 0 < path.stat().st_size <= _LARGEST_FILE:
        raise InvalidInput(f"{path.name} is empty, or larger than 2 GiB, which no ONNX file can be.")
    try:
        model = onnx.ModelProto.FromString(path.read_bytes())
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read ({error.strerror}).") from error
    except Exception:
        raise InvalidInput(
            f"{path.name} is not an ONNX model, or is cut short: its bytes do not parse. Export or download it again."
        ) from None
    if not model.HasField("graph") or not model.graph.node:
        raise InvalidInput(f"{path.name} is not an ONNX model with a graph: it has no nodes. Export it again.")
    return model


def _opset(onnx: Any, model: Any) -> int:
    versions = [entry.version for entry in model.opset_import if entry.domain in _DOMAINS]
    newest = onnx.defs.onnx_opset_version()
    if len(versions) != 1 or not _OLDEST_OPSET <= versions[0] <= newest:
        raise UnsupportedModule(
            f"load_onnx covers opset {_OLDEST_OPSET} to {newest} (of the installed onnx), got {versions or 'none'}. "
            "Export again with opset_version=20, or convert with onnx.version_converter."
        )
    return int(versions[0])


def _only(found: list[Any], what: str) -> Any:
    if len(found) == 1:
        return found[0]
    names = ", ".join(shown(item.name) for item in found[:8]) or "none"
    raise UnsupportedModule(f"{what}, got {len(found)}: {names}. Export a model of one tensor, batch dimension first.")


def _node(onnx: Any, proto: Any) -> Node:
    label = f"{shown(proto.name or (proto.output[0] if proto.output else ''))} ({shown(proto.op_type)[1:-1]})"
    from_there = proto.domain == _OF_TREES_AND_TABLES and proto.op_type in _TAKEN_FROM_THERE
    if proto.domain not in _DOMAINS and not from_there:
        raise UnsupportedModule(f"{label}: an operator of the domain {shown(proto.domain)} is not supported. {_REMEDY}")
    if not any(proto.output):
        raise InvalidInput(f"{label}: this node has no output. Export the model again.")
    attributes = {item.name: _attribute(onnx, item, label) for item in proto.attribute}
    return Node(proto.op_type[:80], proto.name, tuple(proto.input), tuple(proto.output), attributes)


def _attribute(onnx: Any, item: Any, label: str) -> Any:
    kinds = onnx.AttributeProto
    match item.type:
        case kinds.INT:
            return int(item.i)
        case kinds.FLOAT:
            return float(item.f)
        case kinds.STRING:
            return item.s.decode(errors="replace")
        case kinds.INTS:
            return tuple(int(i) for i in item.ints)
        case kinds.FLOATS:
            return tuple(float(f) for f in item.floats)
        case kinds.TENSOR:
            return _array(onnx, item.t, f"{label}: attribute {shown(item.name)}")
        case kinds.STRINGS:
            return tuple(s.decode(errors="replace") for s in item.strings)
        case _:
            raise UnsupportedModule(
                f"{label}: attribute {shown(item.name)} is a graph or of an unknown type, which is not supported. "
                f"{_REMEDY}"
            )


def _array(onnx: Any, tensor: Any, what: str) -> Array:
    """Return a tensor's values: floats in float64, which holds float16 and float32 exactly; integers as they are."""
    if tensor.data_type not in _TYPES:
        raise UnsupportedModule(
            f"{what} has the element type {tensor.data_type}; load_onnx covers float16, float32, float64, int32, "
            "int64 and bool. Export an unquantised model."
        )
    field, width, kind = _TYPES[tensor.data_type]
    dims = tuple(int(n) for n in tensor.dims)
    if any(n < 0 for n in dims):
        raise InvalidInput(f"{what} has a negative dimension: {dims}.")
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raise UnsupportedModule(f"{what} lies in another file. Only initialisers may: export the model again.")
    count = math.prod(dims)
    got, width = (len(tensor.raw_data), width) if tensor.raw_data else (len(getattr(tensor, field)), 1)
    if got != count * width:
        raise InvalidInput(f"{what} of shape {dims} holds {got // width} numbers, not {count}. The file is damaged.")
    try:
        array = np.asarray(onnx.numpy_helper.to_array(tensor)).reshape(dims)
    except Exception as error:
        raise InvalidInput(f"{what} cannot be read: {error}. The file is damaged.") from error
    return array.astype(np.float64) if np.issubdtype(kind, np.floating) else array


def _embed(onnx: Any, tensor: Any, folder: Path, what: str, limit: int) -> int:
    """Replace a tensor's reference to a file in the model's own folder by the bytes there; return their number."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    try:
        file, home = (folder / location).resolve(), folder.resolve()
        inside, there = bool(location) and file.is_relative_to(home), file.is_file()
    except (OSError, ValueError, RuntimeError):
        raise InvalidInput(f"{what} lies in {shown(location)}, which names no file. The file is damaged.") from None
    if not inside or Path(location).is_absolute():
        raise InvalidInput(f"{what} lies in {shown(location)}, outside the model's folder. Keep them together.")
    if not there:
        raise InvalidInput(f"{what} lies in {shown(location)}, which is missing. Put it beside the ONNX file.")
    try:
        offset, length = int(entries.get("offset", "0")), int(entries.get("length", "-1"))
    except ValueError:
        raise InvalidInput(f"{what} has an offset or a length that is no number. The file is damaged.") from None
    size = file.stat().st_size
    length = size - offset if "length" not in entries else length
    if length > limit and offset + length <= size:
        raise InvalidInput(f"{what}: the weights in other files are over 2 GiB together, too large to check.")
    if not 0 <= offset <= offset + length <= size:
        raise InvalidInput(
            f"{what} lies in bytes {offset} to {offset + length} of {shown(location)}, which has {size}. "
            "The file is damaged."
        )
    with file.open("rb") as stream:
        stream.seek(offset)
        tensor.raw_data = stream.read(length)
    del tensor.external_data[:]
    tensor.data_location = onnx.TensorProto.DEFAULT
    return length


def _input_type(source: Any, given: Sequence[int] | None) -> tuple[int | None, Shape, torch.dtype]:
    """Return the fixed size of the batch, if there is one, the shape of one input and its type."""
    tensor = source.type.tensor_type
    name = f"the input {shown(source.name)}"
    if tensor.elem_type not in FLOATS:
        raise UnsupportedModule(
            f"load_onnx expects real floating-point inputs, got element type {tensor.elem_type} for {name}. "
            "Export a float32 model."
        )
    dims = [int(d.dim_value) if d.HasField("dim_value") else 0 for d in tensor.shape.dim]
    if not dims and given is not None:
        dims = [0] * (1 + len(given))
    if len(dims) < 2:
        raise InvalidInput(
            f"{name} has {len(dims)} declared dimensions; it needs a batch dimension first and at least one more. "
            "Pass input_shape, the shape of one input without its batch dimension, if the file declares none."
        )
    shape = _completed(dims[1:], given, name)
    batch = dims[0] if dims[0] > 0 else None
    if math.prod(shape) * max(CHECKED, batch or 1) > _LARGEST_BATCH:
        raise InvalidInput(f"{name} has the shape {dims}, over the {_LARGEST_BATCH} numbers that load_onnx covers.")
    return batch, shape, FLOATS[tensor.elem_type]


def _completed(declared: list[int], given: Sequence[int] | None, name: str) -> Shape:
    if given is None:
        if min(declared) < 1:
            raise InvalidInput(
                f"{name} has dimensions without a size besides the batch: {declared} (0: open). "
                "Pass input_shape, the shape of one input without its batch dimension."
            )
        return tuple(declared)
    if not all(isinstance(n, int) and n > 0 for n in given):
        raise InvalidInput(f"input_shape expects positive integers, the shape of one input, got {given!r}.")
    if len(given) != len(declared) or any(d > 0 and d != n for d, n in zip(declared, given, strict=True)):
        raise InvalidInput(
            f"input_shape {tuple(given)} does not fit {name}, whose shape is {declared} after the batch (0: open)."
        )
    return tuple(given)


def _serialised(model: Any, path: Path) -> bytes:
    try:
        return bytes(model.SerializeToString())
    except Exception as error:
        raise InvalidInput(f"{path.name} and its external data are over 2 GiB together, too large to check.") from error
