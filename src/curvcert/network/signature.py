"""Modules with several inputs or outputs as modules of one tensor, and modules that wrap another one."""

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvcert.errors import InvalidInput, UnsupportedModule

Key = str | int
Output = Key | Sequence[Key] | None


def unwrapped(model: Any) -> Any:
    """Return the module that torch.compile or DataParallel has wrapped; they compute what it computes."""
    while type(model).__name__ == "OptimizedModule" or isinstance(model, nn.DataParallel):
        model = model.module if isinstance(model, nn.DataParallel) else model._orig_mod
    return model


def own_copy(model: nn.Module) -> nn.Module:
    """Return a copy in the dtype that it has, with nothing wrapped; what a hook computed from weights is detached."""
    computed = {
        id(value): value.detach().clone()
        for part in model.modules()
        for value in vars(part).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    try:
        found = copy.deepcopy(model, computed)
    except Exception as error:
        raise UnsupportedModule(
            f"{type(model).__name__} cannot be copied ({error}). A weight computed from others, as an attribute, is "
            "the usual cause: make it a parameter or a buffer."
        ) from error
    dtype = next((weight.dtype for weight in found.parameters() if weight.dtype.is_floating_point), None)
    for part in list(found.modules()):
        if isinstance(part, nn.RMSNorm) and part.eps is None and dtype is not None:
            # Torch takes the roundoff of what it computes in, which would be another number in a copy in float64.
            part.eps = torch.finfo(dtype).eps
        for name, child in part.named_children():
            if unwrapped(child) is not child:
                setattr(part, name, unwrapped(child))
    return found


class Joined(nn.Module):
    """A module as a function of one tensor: free inputs joined into one vector, others fixed, one output chosen."""

    def __init__(self, model: nn.Module, examples: tuple[Tensor, ...], fixed: Sequence[int], output: Output) -> None:
        super().__init__()
        self.model = model
        self.training = False
        self._shapes = [tuple(x.shape[1:]) for x in examples]
        self._fixed, self._output = frozenset(fixed), output
        for k in self._fixed:
            self.register_buffer(f"input_{k}", examples[k][:1].detach().clone())

    def joined(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the free inputs as one tensor."""
        free = [x for k, x in enumerate(inputs) if k not in self._fixed]
        return free[0] if len(free) == 1 else torch.cat([x.flatten(1) for x in free], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the chosen output."""
        free = [shape for k, shape in enumerate(self._shapes) if k not in self._fixed]
        sizes = [math.prod(shape) for shape in free]
        parts = [x] if len(free) == 1 else x.split(sizes, dim=1)
        values = iter(part.reshape(len(x), *shape) for part, shape in zip(parts, free, strict=True))
        inputs = [
            getattr(self, f"input_{k}").expand(len(x), *shape) if k in self._fixed else next(values)
            for k, shape in enumerate(self._shapes)
        ]
        found = self.model(*inputs)
        tensor = chosen(found, self._output)
        if not isinstance(tensor, Tensor):
            raise UnsupportedModule(
                f"The output {self._output!r} of {type(self.model).__name__} is {type(tensor).__name__}, not a tensor."
            )
        return tensor


def chosen(found: Any, output: Output) -> Any:
    """Return one of the tensors that a module returns, by its key, index or name; the only one if none is named.

    >>> chosen({"logits": torch.ones(1), "hidden": None}, None), chosen((1, {"a": 2}), (1, "a"))
    (tensor([1.]), 2)
    """
    if output is None:
        tensors = dict(_tensors((), found))
        if len(tensors) != 1:
            names = ", ".join(repr(path[0] if len(path) == 1 else path) for path in tensors) or "none"
            raise UnsupportedModule(
                f"Expected a module that returns one tensor, got {len(tensors)} of them ({names}). Say which one: "
                "trace(model, x, output=...)."
            )
        return next(iter(tensors.values()))
    for key in output if isinstance(output, tuple | list) else (output,):
        found = _part(found, key)
    return found


def _part(found: Any, key: Key) -> Any:
    parts = _parts(found)
    if key not in parts:
        raise InvalidInput(f"There is no output {key!r}; the module returns {list(parts)}.")
    return parts[key]


def _parts(found: Any) -> dict[Any, Any]:
    """Return what a container holds, by its keys; names and numbers of a named tuple alike."""
    if isinstance(found, Mapping):
        return dict(found)
    if isinstance(found, tuple | list):
        return {**dict(enumerate(found)), **dict(zip(getattr(found, "_fields", ()), found, strict=False))}
    if dataclasses.is_dataclass(found):
        return {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}
    return {}


def _tensors(path: tuple[Any, ...], found: Any) -> list[tuple[tuple[Any, ...], Tensor]]:
    if isinstance(found, Tensor):
        return [(path, found)]
    named = getattr(found, "_fields", None)
    parts = {k: v for k, v in _parts(found).items() if named is None or k in named}
    return [entry for key, part in parts.items() for entry in _tensors((*path, key), part)]
