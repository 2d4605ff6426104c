"""From an ONNX file to a `Network`, exactly, or a refusal that names the node.

The file is run on a tensor without numbers, node by node, and recorded as a module is (`recording.py`); what its calls
mean is read by the same rules (`aten.py`).  After each node it is known where the batch is, so that a shape that the
file computes has a symbol for it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from curvcert.errors import CurvcertError, InvalidInput, UnsupportedModule
from curvcert.network.aten import Items, output_of
from curvcert.network.batched import BATCH, Batched, Layout
from curvcert.network.builder import Value, start
from curvcert.network.building import built
from curvcert.network.faithful import surroundings_kept
from curvcert.network.network import Network
from curvcert.network.onnx_arguments import Given, Operand
from curvcert.network.onnx_constants import FOLDS, fold
from curvcert.network.onnx_file import LARGEST, Array, Graph, Node, read_graph, shown
from curvcert.network.onnx_operators import OPERATORS
from curvcert.network.onnx_runtime import require_equal_to_onnxruntime
from curvcert.network.recording import Recorded, Recorder, Slot, settings_for_recording


def load_onnx(path: str | Path, input_shape: Sequence[int] | None = None, output: str | None = None) -> Network:
    r"""Turn an ONNX file into a `Network`, exactly, or say which node is in the way.

    Covers opset 7 and later, and what `trace` takes, from either of PyTorch's exporters or another tool: what is linear
    along the axes of a sample, the activations of the table, as operators or written out, kinks, products of values,
    softmax, normalisations, attention, and recurrent layers; the page on ONNX in the documentation has the list.  Needs
    `curvcert[onnx]`.

    The first dimension of the input is the batch, fixed or open.  `input_shape`, the shape of one input without the
    batch, is needed where the file leaves another size open; `output` names one of several outputs.  Weights in files
    beside the model are read from the model's own folder only.

    Weights are taken as the exact values that they hold.  Rounded to float64 once are the coefficients of a batch
    normalisation, 1/d in a division by d, 1/k in a mean of k, and arithmetic between constants.  A formula written
    out, such as :math:`\tfrac12 x(1 + erf(x/\sqrt2))`, stands for the activation that it is, with the constants that
    the file has.  The result is compared with onnxruntime on random inputs.

    >>> import tempfile, onnx
    >>> from onnx import helper as h
    >>> image = h.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 1, 2, 2])
    >>> mean = h.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 1, 1, 1])
    >>> nodes = [h.make_node("Tanh", ["x"], ["z"]), h.make_node("GlobalAveragePool", ["z"], ["y"])]
    >>> graph = h.make_graph(nodes, "mean of tanh", [image], [mean])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8), f"{folder}/net.onnx")
    ...     load_onnx(f"{folder}/net.onnx")
    Network((1, 2, 2) -> (1, 1, 1), 1 blocks
      z: Block (1, 2, 2) -> (1, 1, 1))

    Raises:
        UnsupportedModule: a node that curvcert does not cover, by name and operator, with the remedy.
        InvalidInput: no such file, a damaged one, NaN weights, sizes that do not fit.
        SoundnessError: the network and onnxruntime disagree.
    """
    graph = read_graph(path, input_shape, output)
    with torch.inference_mode(False), torch.no_grad(), surroundings_kept():
        network = built(_read(graph), source_dtype=graph.dtype)
        require_equal_to_onnxruntime(network, graph)
    return network


_MOST_READINGS = 64
_MOST_CALLS = 20_000
"""How many calls of torch a file may take, and all readings of one together before another is begun."""


def _read(graph: Graph) -> Value:
    """Return the output of a graph; what a rule says of a node names its operator, too.

    Where a file fixes the size of the batch, to 1 say, a change of shape may leave open which dimension holds it.  Then
    one is tried after the other: what is read is a function of one sample in any case, or refused.
    """
    choices, calls = list[int](), 0
    refusal: UnsupportedModule | InvalidInput | None = None
    for _ in range(_MOST_READINGS):
        reading = _Reading(graph, choices)
        try:
            return reading.output()
        except (UnsupportedModule, InvalidInput) as error:
            refusal = refusal or error
        made = reading.made
        left = [k for k, (chosen, count) in enumerate(made) if chosen + 1 < count]
        calls += reading.calls
        if not left or calls > _MOST_CALLS:
            break
        choices = [chosen for chosen, _ in made[: left[-1]]] + [made[left[-1]][0] + 1]
    assert refusal is not None
    name, _, rest = str(refusal).partition(": ")
    label = next((node.label for node in graph.nodes if name == node.short), name)
    raise type(refusal)(f"{label}: {rest}" if rest else name) from refusal


class _Reading:
    """A file while it is read: its values so far, each a constant or recorded."""

    def __init__(self, graph: Graph, choices: Sequence[int]) -> None:
        self._graph, self._choices = graph, choices
        self.made: list[tuple[int, int]] = []
        """The choices that were made, each with how many there were."""
        self._recorder = Recorder(torch.device("cpu"), None)
        self._items = Items()
        self._room = graph.room
        self._operands: dict[str, Operand] = dict(graph.constants)

    @property
    def calls(self) -> int:
        """How many calls of torch it took so far."""
        return len(self._recorder.calls)

    def output(self) -> Value:
        """Return the value of one sample of the file's output."""
        graph = self._graph
        slot = Slot(torch.empty(BATCH, *graph.input_shape, dtype=torch.float64, device="meta"))
        read = start(graph.input_shape, torch.device("cpu"))
        self._items.read_input(slot, Batched(read))
        self._operands[graph.input_name] = self._recorder.wrapped(slot)
        with settings_for_recording():
            for node in graph.nodes:
                self._follow(node)
        output = self._operands.get(graph.output_name)
        if not isinstance(output, Recorded) or output.slot.constant is not None:
            raise UnsupportedModule(f"The output {shown(graph.output_name)} does not depend on the input.")
        return output_of(self._items, output.slot, f"The output {shown(graph.output_name)}")

    def _follow(self, node: Node) -> None:
        """Give the outputs of a node what they are."""
        if any(name in self._operands for name in node.outputs if name):
            raise InvalidInput(f"{node.label}: its output has a name that is taken. The file is damaged.")
        args = [self._argument(node, name) for name in node.inputs]
        found = self._results(node, args)
        depends = any(isinstance(result, Recorded) for result in found)
        weights = [arg for arg in args if isinstance(arg, np.ndarray)] if depends else []
        self._room -= sum(map(_numbers, (*found, *weights)))
        if self._room < 0:
            raise InvalidInput(
                f"{node.label}: up to here values and constants are over the {self._graph.room} numbers that load_onnx "
                "covers for a file of this size."
            )
        self._operands.update(zip(node.outputs, found, strict=False))
        self._further(node, node.outputs[len(found) :])

    def _further(self, node: Node, names: Sequence[str]) -> None:
        """Refuse outputs that no rule gives, where they are read."""
        read = {name for other in self._graph.nodes for name in other.inputs} | {self._graph.output_name}
        for name in names:
            if name and name in read:
                raise node.unsupported(f"a use of its further output {shown(name)}")

    def _argument(self, node: Node, name: str) -> Operand:
        if not name:
            return None
        if name not in self._operands:
            raise InvalidInput(
                f"{node.label}: it reads {shown(name)}, which nothing before it gives: an initialiser is missing, or "
                "the nodes are out of order or form a cycle. Export the model again."
            )
        return self._operands[name]

    def _results(self, node: Node, args: Sequence[Operand]) -> list[Operand]:
        recorded = any(isinstance(arg, Recorded) for arg in args)
        given = Given(node, args, self._graph, self._layout, self._choose)
        if not recorded and node.op in FOLDS:
            return [fold(node, args)]  # type: ignore[arg-type]
        if node.op == "Shape":
            return [_shape(given)]
        if node.op not in OPERATORS:
            raise node.unsupported("this operator" if recorded else "this operator, applied to constants,")
        try:
            return self._recorded(given) if recorded else _computed(given)
        except CurvcertError:
            raise
        except Exception as error:  # whatever torch says of arguments that a file may hold
            raise InvalidInput(
                f"{node.label}: its arguments do not fit ({str(error).splitlines()[0]}). Export the model again."
            ) from error

    def _recorded(self, given: Given) -> list[Operand]:
        before, node = len(self._recorder.calls), given.node
        self._recorder.running[:] = [(node.short, None)]
        with self._recorder:
            found = OPERATORS[node.op](given)
        if self.calls > _MOST_CALLS:
            raise InvalidInput(f"{node.label}: up to here it takes over the {_MOST_CALLS} steps that load_onnx covers.")
        for k in range(before, len(self._recorder.calls)):
            call = self._recorder.calls[k]
            sizes = [leaf.place.numel() for leaf in pytree.tree_leaves(call.results) if isinstance(leaf, Slot)]
            if 0 in sizes:
                raise InvalidInput(f"{node.label}: its result is empty.")
            given.require_room(max(sizes, default=0) // BATCH)
            self._items.follow(call)
        results = [found] if isinstance(found, Tensor) else list(found)
        return [result if isinstance(result, Recorded) else result.numpy() for result in results]

    def _choose(self, count: int) -> int:
        chosen = self._choices[len(self.made)] if len(self.made) < len(self._choices) else 0
        self.made.append((chosen, count))
        return chosen

    def _layout(self, x: Recorded) -> Layout:
        return self._items.layout(x.slot)


def _computed(given: Given) -> list[Operand]:
    """Return the results of an operator on constants; their sizes are looked at first."""
    for device in ("meta", "cpu"):
        found = OPERATORS[given.node.op](replace(given, device=device))
        results = [found] if isinstance(found, Tensor) else list(found)
        size = sum(result.numel() for result in results)
        if size > LARGEST:
            raise InvalidInput(
                f"{given.node.label}: a constant of {size} numbers is over the {LARGEST} that load_onnx covers."
            )
    return [result.numpy() for result in results]


def _shape(given: Given) -> Array:
    """Return the shape of a value as a constant, with the batch as a symbol."""
    shape = given.sizes(given.tensor())
    first, last = given.node.attribute("start", 0), given.node.attribute("end", len(shape))
    found = np.empty(len(shape[first:last]), dtype=object)
    found[:] = shape[first:last]
    return found


def _numbers(found: Any) -> int:
    if isinstance(found, Recorded):
        return math.prod(found.shape) // BATCH
    return found.size if isinstance(found, np.ndarray) else 0
