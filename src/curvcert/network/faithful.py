"""Whether what was traced is what runs: the module itself, in its own dtype, under every condition that it may ask for.

A forward pass can be another function in float32 than in float64, with gradients than without, for five samples than
for seven, or at its hundredth call.  A trace knows one of these.  So the module runs under two sets of conditions that
differ in all of them, and has to call the same functions in both; nothing that it can read may have changed afterwards.
"""

import dis
import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from curvcert.errors import CurvcertError, InvalidInput, SoundnessError, UnsupportedModule
from curvcert.network.recording import InFloat64

_FEW, _MORE = 5, 7
"""Two sizes of a batch, each a prime that sizes inside a network seldom are."""

_DEEPEST = 5
"""How many containers in containers a snapshot enters."""

_PLAIN = bool | int | float | complex | str | bytes | None | torch.dtype | torch.device | torch.Size
_OF_TORCH = str(Path(torch.__file__).parent)

Calls = tuple[tuple[Any, ...], ...]


def require_one_function(model: nn.Module, twin: nn.Module, example: Tensor) -> None:
    """Raise unless a module calls the same functions in its own dtype and in float64, with and without gradients.

    Both are copies, which may change.
    """
    own = _dtype(model, example)
    centre = example[:1].detach()
    few, more = (centre.expand(n, *centre.shape[1:]).clone() for n in (_FEW, _MORE))
    with _Watching(own), torch.enable_grad():
        first = _calls(model, few.to(own))
    with InFloat64(own):
        second = _calls_without_gradients(twin, more.to(torch.float64))
    other = next((k for k, (a, b) in enumerate(zip(first, second, strict=False)) if not _same_call(a, b)), None)
    if other is None and len(first) != len(second):
        other = min(len(first), len(second))
    if other is not None:
        names = [str(calls[other][0]) if other < len(calls) else "nothing more" for calls in (first, second)]
        raise UnsupportedModule(
            f"{type(model).__name__} computes something else in {own} with gradients for {_FEW} samples than in "
            f"torch.float64 without gradients for {_MORE}: call {other + 1} is {names[0]} there and {names[1]} here, "
            "or has other arguments. Remove what depends on the dtype, the grad mode, the size of the batch, or the "
            "number of calls."
        )


def _dtype(model: nn.Module, example: Tensor) -> torch.dtype:
    return next((weight.dtype for weight in model.parameters() if weight.dtype.is_floating_point), example.dtype)


def _calls(module: nn.Module, x: Tensor) -> Calls:
    with _Recording() as recording:
        try:
            module(x)
        except CurvcertError:
            raise
        except Exception as error:
            raise InvalidInput(
                f"The module itself fails on {x.dtype} inputs of shape {tuple(x.shape)}: {error}. Check the example's "
                "shape; tensors that are not parameters or buffers stay in their own dtype."
            ) from error
    return tuple(recording.calls)


def _calls_without_gradients(module: nn.Module, x: Tensor) -> Calls:
    """Return the calls in inference mode, or, if the module differentiates and so fails there, without gradients."""
    try:
        with torch.inference_mode():
            return _calls(module, x.clone())
    except InvalidInput:
        with torch.no_grad():
            return _calls(module, x.clone())


class _Recording(TorchFunctionMode):
    """Writes down every function of torch that is called, with its arguments but for the numbers of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name not in ("__get__", "_set_grad_enabled"):
            leaves, shape = pytree.tree_flatten((args, kwargs or {}))
            self.calls.append((name, str(shape), *map(_summary, leaves)))
        return func(*args, **(kwargs or {}))


def _summary(argument: Any) -> Any:
    """Return what of an argument is the same in every dtype."""
    if isinstance(argument, Tensor):
        return ("tensor", tuple(argument.shape))
    if isinstance(argument, torch.dtype):
        return "a float" if argument.is_floating_point else str(argument)
    return argument if isinstance(argument, int | float | str | type(None)) else type(argument).__name__


_ARITHMETIC = {
    f"{name}{end}" for name in ("add", "sub", "rsub", "mul", "div", "pow", "true_divide") for end in ("", "_")
}
_ARITHMETIC |= {f"__{name}__" for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rdiv", "pow")}


def _same_call(left: Any, right: Any) -> bool:
    """Whether two calls are the same but for the sizes of their batches, which are no numbers to compute with."""
    if isinstance(left, tuple) and isinstance(right, tuple):
        numbers = [[item for item in call if type(item) is int] for call in (left, right)]
        if left and left[0] in _ARITHMETIC and numbers[0] != numbers[1]:
            return False
        return len(left) == len(right) and all(map(_same_call, left, right))
    if isinstance(left, float) and isinstance(right, float) and left != left:
        return right != right
    if type(left) is int and type(right) is int:
        return left == right or left * _MORE == right * _FEW
    return bool(left == right)


class _Watching(TorchDispatchMode):
    """Looks for what no trace of a float64 copy can know: numbers rounded to fewer digits, and chance."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, own: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._like = torch.empty(0, dtype=own)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        may_draw = torch.Tag.nondeterministic_seeded in func.tags
        before = _chance() if may_draw else ()
        result = func(*args, **(kwargs or {}))
        if may_draw and (before != _chance() or (kwargs or {}).get("generator") is not None):
            raise SoundnessError(
                f"The module draws random numbers ({func}), so that its output changes from call to call and no bound "
                "holds for it. Remove its randomness or state."
            )
        widest = max(map(_precision, pytree.tree_leaves((args, kwargs))), default=0)
        for tensor in pytree.tree_leaves(result):
            if 0 < _precision(tensor) < min(widest, _precision(self._like)):
                raise UnsupportedModule(
                    f"The module rounds to {tensor.dtype} on the way ({func}), though its weights are "
                    f"{self._like.dtype}: autocast, or a cast. What rounds has no constant. Trace it without, or in "
                    "that dtype."
                )
        return result


def _precision(value: Any) -> int:
    """Return how fine the numbers of a tensor are; 0 for what holds no real numbers."""
    real = isinstance(value, Tensor) and value.dtype.is_floating_point
    return round(1 / torch.finfo(value.dtype).eps) if real else 0


@contextmanager
def require_nothing_changed(module: nn.Module) -> Iterator[None]:
    """Raise if, afterwards, anything has changed that the module can read, or a random state."""
    before, chance = _snapshot(module), _chance()
    yield
    changed = "a random state" if chance != _chance() else _difference(before, _snapshot(module))
    if changed:
        raise SoundnessError(
            f"The module's output or its state changes from call to call on the same input ({changed}), so no bound "
            "holds for it. Remove its randomness or state."
        )


@contextmanager
def surroundings_kept() -> Iterator[None]:
    """Leave random states and torch's settings as they were found, whatever a module does; refuse new settings."""
    python, numpy, settings = random.getstate(), np.random.get_state(), _settings()
    validates = Distribution._validate_args
    # A policy makes a distribution and takes its mean; whether the numbers are valid, which may be NaN here, it asks
    # when it runs.
    Distribution.set_default_validate_args(False)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
        if settings != _settings():
            raise SoundnessError(
                "The module changes a setting of torch, so that what runs after it is another "
                "program. Set it outside of the module."
            )
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        Distribution.set_default_validate_args(validates)
        torch.set_default_dtype(settings[0])
        torch.set_num_threads(settings[1])


def _settings() -> tuple[torch.dtype, int]:
    return torch.get_default_dtype(), torch.get_num_threads()


def _chance() -> tuple[Any, ...]:
    of_torch = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]
    of_numpy: Any = np.random.get_state()
    return (random.getstate(), str(of_numpy[2:]), *(state.numpy().tobytes() for state in of_torch))


def _snapshot(module: nn.Module) -> dict[str, Any]:
    """Return the data that a module can read: its attributes, and what its methods name outside of it."""
    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        for name, value in {**vars(part), **part._parameters, **part._buffers}.items():
            if name in ("_forward_hooks", "_forward_pre_hooks"):
                value = {key: hook for key, hook in value.items() if not _only_observes(hook)}
            if name not in ("_parameters", "_buffers", "_modules") and not isinstance(value, nn.Module):
                _collect(f"{path}.{name}".lstrip("."), value, found, 0)
        kind = type(part)
        if _is_the_users(kind.__module__):
            for name, value in vars(kind).items():
                if not name.startswith("__"):
                    _collect(f"{kind.__name__}.{name}", value, found, 0)
    return found


_KEEPERS = {list, dict, OrderedDict, defaultdict, str, int}
"""What a hook that only observes may read outside of itself."""


def _only_observes(hook: Any) -> bool:
    """Whether a hook, in whatever state, does nothing but keep what it is given: it may write down what it likes.

    Its code has no branch, returns None or what a list or dictionary returns for a new entry, and writes neither to its
    arguments nor in place.
    """
    code = getattr(hook, "__code__", None)
    if code is None or not {type(value) for value in _read_outside(hook).values()} <= _KEEPERS:
        return False
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("PRECALL", "CACHE", "RESUME")]
    for k, step in enumerate(steps):
        before = steps[max(0, k - 2) : k]
        container = before[0].opname if len(before) == 2 else ""
        jumps = "JUMP" in step.opname or step.opname in ("FOR_ITER", "SEND", "YIELD_VALUE")
        in_place = step.opname == "BINARY_OP" and step.argrepr.endswith("=")
        on_an_argument = step.opname == "STORE_SUBSCR" and container not in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME")
        if jumps or in_place or on_an_argument or step.opname in ("STORE_ATTR", "STORE_GLOBAL", "DELETE_SUBSCR"):
            return False
        if step.opname == "RETURN_CONST" and step.argval is not None:
            return False
        if step.opname == "RETURN_VALUE" and not (before[-1].opname == "LOAD_CONST" and before[-1].argval is None):
            kept = [name.argval for name in steps if name.opname in ("LOAD_METHOD", "LOAD_ATTR")]
            if not kept or kept[0] not in ("append", "update", "__setitem__"):
                return False
    return not any(name.endswith("_") and not name.endswith("__") for name in code.co_names)


def _is_the_users(name: str) -> bool:
    return name.split(".")[0] not in {"torch", "curvcert", *sys.stdlib_module_names} or name == "__main__"


def _collect(path: str, value: Any, found: dict[str, Any], depth: int) -> None:
    if path in found or depth > _DEEPEST or isinstance(value, type | types.ModuleType | nn.Module):
        return
    if isinstance(value, Tensor):
        found[path] = value.detach().clone() if value.device.type != "meta" else tuple(value.shape)
    elif isinstance(value, _PLAIN):
        found[path] = value
    elif isinstance(value, np.ndarray):
        found[path] = value.tobytes()
    elif isinstance(value, Mapping):
        found[path] = ("mapping", len(value))
        for key, item in list(value.items()):
            _collect(f"{path}[{key!r}]", item, found, depth + 1)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        found[path] = ("collection", len(value))
        for k, item in enumerate(value):
            _collect(f"{path}[{k}]", item, found, depth + 1)
    elif isinstance(value, types.FunctionType | types.MethodType | staticmethod | classmethod):
        _collect_function(path, value, found, depth)
    elif type(value).__module__ == "itertools":
        found[path] = repr(value)
    elif _is_the_users(type(value).__module__) and hasattr(value, "__dict__"):
        _collect(f"{path}.__dict__", vars(value), found, depth + 1)


def _collect_function(path: str, function: Any, found: dict[str, Any], depth: int) -> None:
    """Collect what a function of the user's can read: its defaults, closure, attributes, and the globals it names."""
    plain = getattr(function, "__func__", function)
    code = getattr(plain, "__code__", None)
    if code is None or code.co_filename.startswith(_OF_TORCH) or path.count("()") > 1:
        return
    read = {**vars(plain), "defaults": (plain.__defaults__, plain.__kwdefaults__), **_read_outside(plain)}
    for name, value in read.items():
        _collect(f"{path}().{name}", value, found, depth + 1)


def _read_outside(function: Any) -> dict[str, Any]:
    """Return the globals that a function names, and what its closure holds."""
    code = function.__code__
    outside = {name: function.__globals__[name] for name in _names(code) if name in function.__globals__}
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    return {**outside, **{name: cell.cell_contents for name, cell in cells if cell != types.CellType()}}


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return what has changed; an empty string if nothing has."""
    for path in (*before, *after):
        if path not in before or path not in after or not _equal(before[path], after[path]):
            return path
    return ""


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape
        return same and bool(((left == right) | (left != left) & (right != right)).all())
    return type(left) is type(right) and bool(left == right or left != left)
