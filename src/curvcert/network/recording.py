"""The forward pass of a module as a graph (torch.fx), and what a graph cannot say about memory."""

import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from curvcert.errors import CurvcertError, InvalidInput, UnsupportedModule
from curvcert.network.lowering import is_known

_WRITTEN_AT = "written_at"
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv}
_ARITHMETIC = {operator.add, operator.sub, operator.mul, operator.truediv, torch.add, torch.sub, torch.mul, torch.div}
_FRESH = _ARITHMETIC | {torch.cat, torch.concat, torch.concatenate, torch.stack, torch.flip, "flip"}
_VIEWS = {torch.flatten, torch.reshape, F.dropout, F.dropout2d, "flatten", "reshape", "view", "contiguous"}
_VIEWS |= {torch.squeeze, torch.unsqueeze, torch.unbind, "squeeze", "unsqueeze", "unbind"}
_VIEWS |= {torch.t, torch.detach, "t", "detach"}


class _Proxy(fx.Proxy):
    """A recorded value that tells x += y, which overwrites x for all who hold it, from x = x + y."""

    def _record(self, function: Callable[..., Any], other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    def __iadd__(self, other: Any) -> Any:
        return self._record(operator.iadd, other)

    def __isub__(self, other: Any) -> Any:
        return self._record(operator.isub, other)

    def __imul__(self, other: Any) -> Any:
        return self._record(operator.imul, other)

    def __itruediv__(self, other: Any) -> Any:
        return self._record(operator.itruediv, other)


class _Tracer(fx.Tracer):
    """Records the forward pass down to the modules that have a rule."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def __init__(self, known: set[nn.Module]) -> None:
        super().__init__()
        self._known = known

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Record a node, and where in the user's code it comes from."""
        node = super().create_node(*args, **kwargs)
        node.meta[_WRITTEN_AT] = _users_line()
        return node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self._known or super().is_leaf_module(m, module_qualified_name)


def _users_line() -> str:
    """Return the file and line that is being recorded, such as "model.py, line 12"; empty if it is in no file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code is not record.__code__:
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THE_USERS):
            return f"{Path(file).name}, line {frame.f_lineno}" if Path(file).is_file() else ""
        frame = frame.f_back
    return ""


def written_at(node: fx.Node) -> str:
    """Return where in the user's code a call stands; empty where that is not known."""
    return str(node.meta.get(_WRITTEN_AT, ""))


def record(model: nn.Module) -> fx.Graph:
    """Return the graph of a module with one input, or say why its forward pass cannot be recorded."""
    # Asked before recording starts: the answer may run a module, which would then be recorded too.
    known = {module for module in model.modules() if is_known(module)}
    try:
        graph = _Tracer(known).trace(model)
    except CurvcertError:
        raise
    except Exception as error:  # whatever the user's forward pass raises
        raise UnsupportedModule(
            f"{type(model).__name__}: its forward pass cannot be recorded ({error}). "
            "Write it without branches, loops or Python functions that depend on the input's values."
        ) from error
    inputs = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1 or inputs[0].startswith("*"):
        raise UnsupportedModule(
            f"{type(model).__name__} takes the inputs ({', '.join(inputs)}); only one tensor is supported. "
            "Wrap it in a module whose forward takes x alone."
        )
    return graph


def path_of(node: fx.Node) -> str:
    """Return where a node stands: the path of the module that it was recorded in, and its own name."""
    if node.op == "call_module":
        return str(node.target)
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return f"{stack[-1][0]}.{node.name}" if stack and stack[-1][0] else node.name


def require_own_memory(model: nn.Module, node: fx.Node) -> None:
    """Raise if an in-place operation overwrites what something else still reads.

    A graph has values, not memory: with u = W x, relu_(u) + u is 2 relu(W x) in torch and relu(W x) + W x in
    the graph.  The two agree wherever W x is positive, so that samples may not tell them apart.
    """
    source: Any = node.all_input_nodes[0] if node.all_input_nodes else None
    while isinstance(source, fx.Node):
        if len(source.users) > 1 or source.op == "get_attr":
            what = "a parameter or buffer" if source.op == "get_attr" else "a value that is used again"
            raise UnsupportedModule(
                f"{path_of(node)}: an in-place operation overwrites {what} ({source.name}). "
                "Use the operation that is not in place: inplace=False, x = x + y."
            )
        source = source.all_input_nodes[0] if _shares_memory(model, source) and source.all_input_nodes else None


def _shares_memory(model: nn.Module, node: fx.Node) -> bool:
    """Tell whether a node's output may be its input's memory; in doubt, yes."""
    if node.op in ("placeholder", "get_attr"):
        return False
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        views = nn.Identity | nn.Flatten | nn.Unflatten | nn.modules.dropout._DropoutNd
        return not _is_torchs_own(module) or isinstance(module, views) or is_in_place_module(module)
    simple = node.target in _FRESH or (len(node.args) == 1 and not node.kwargs and node.target not in _VIEWS)
    return is_in_place_call(node) or not simple


def is_in_place_module(module: nn.Module) -> bool:
    """Tell whether a module says that it overwrites its input."""
    return bool(getattr(module, "inplace", False))


def overwrites_its_input(
    module: nn.Module, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float64
) -> bool:
    """Tell whether a module overwrites its input, whatever it says: torch counts the writes to a tensor."""
    if _is_torchs_own(module):
        return is_in_place_module(module)
    x = torch.ones(1, *shape, dtype=dtype, device=device)
    try:
        module(x)
    except Exception as error:
        raise InvalidInput(f"{type(module).__name__} itself fails on inputs of shape {shape}: {error}.") from error
    return is_in_place_module(module) or x._version > 0


def _is_torchs_own(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def is_in_place_call(node: fx.Node) -> bool:
    """Tell whether the name of a function or method says that it overwrites its first argument."""
    target: Any = node.target
    return target in _IN_PLACE or (isinstance(target, str) and target.endswith("_"))
