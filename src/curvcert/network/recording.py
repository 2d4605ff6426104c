"""The forward pass of a module as a tape of ATen calls.

The module runs once on a tensor without numbers.  Every operation of torch ends in calls of ATen, whatever the style of
the code above it, and a dispatch mode sees each of them: shapes are known, so branches and loops over shapes are
decided; numbers are not, so that code which would branch on them fails.

- *slot*: a tensor of the run.  What depends on the input has a shape and a place in memory, but no numbers; what does
  not is a constant, and is computed as usual.
- *tape*: the calls that read what depends on the input, in their order.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as hooks
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from curvcert.errors import CurvcertError, SoundnessError, UnsupportedModule
from curvcert.network.builder import start
from curvcert.network.lowering import lower_exactly

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


_UNSET = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
"""Calls whose result has no values yet: what is never written stays NaN, and is refused."""

_LIKE = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", *_UNSET} - {
    "empty",
    "empty_strided",
}
"""Calls that read the shape of a tensor, and not its numbers."""


class Unrecorded(Exception):
    """The forward pass itself has failed, in the module with this path."""

    def __init__(self, path: str, error: Exception) -> None:
        super().__init__(f"{path}{error}")
        self.path = path


@dataclass(eq=False)
class Slot:
    """A tensor of the run: where it lies in memory, and its numbers if it is a constant."""

    place: Tensor
    constant: Tensor | None = None

    @property
    def memory(self) -> int:
        """What tells whether two tensors share memory."""
        return int(self.place.untyped_storage()._cdata)


@dataclass(frozen=True, eq=False)
class Call:
    """One call on the tape: its arguments and results with slots for tensors, and where it stands.

    `module` is what was running; where the name is "opaque", what was called, by a rule of its own.
    """

    name: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    results: Any
    path: str
    written_at: str
    function: Any = None
    module: nn.Module | None = None


@dataclass(frozen=True, eq=False)
class Tape:
    """What a forward pass did, from its inputs to its output, a tensor's slot or a container of them."""

    inputs: tuple[Slot, ...]
    calls: list[Call]
    output: Any

    @property
    def computes_weights(self) -> bool:
        """Whether it reads what was computed from parameters, which a step of training makes another."""
        leaves = pytree.tree_leaves([(call.arguments, call.options) for call in self.calls])
        computed = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None)
        return any(tensor._base is None or not tensor._base.is_leaf for tensor in computed)


class Recorded(Tensor):
    """What a module sees in place of a tensor while it is recorded: everything but numbers."""

    slot: Slot
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, slot: Slot, device: torch.device) -> "Recorded":
        """Return a tensor of the slot's shape that has no memory of its own."""
        like = slot.place
        return Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=device,
        )

    def __init__(self, slot: Slot, device: torch.device) -> None:
        """Remember the slot."""
        self.slot = slot

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Return its shape: it has no numbers to show."""
        return f"Recorded{tuple(self.shape)}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse what happens outside of the recording."""
        raise UnsupportedModule(f"A value of one call is used after it, or outside of it ({func}). Keep none.")


class InFloat64(TorchDispatchMode):
    """Lets a copy in float64 keep to it: what a module casts to its own dtype, or makes in it, is float64 there.

    And softplus(z) is log(1 + e^z) everywhere; torch's jump at its threshold is the activation's `deviation`.
    """

    def __init__(self, own: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call with other options."""
        if func is torch.ops.aten.softplus.default:
            return func(*args[:2], *((1,) if len(args) < 2 else ()), 50)
        args, kwargs = in_float64(self._own, func, args, kwargs or {})
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not func._schema.is_mutable and any(leaf.dtype == torch.float64 for leaf in leaves):
            args, kwargs = pytree.tree_map(_widened, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch.compile's machinery, whose import takes seconds, out of what it has no part in."""
        return False


_EXACT = {"zeros", "ones", "empty", "eye", "arange", "_to_copy", "to", *_LIKE} - {"full_like", "new_full"}
"""Calls that give the same numbers in every dtype; `torch.tensor(0.1)` is another number in float32."""


_SUMS = {"sum", "mean", "cumsum", "prod", "linalg_vector_norm"}
"""Calls that may be told in which dtype they sum."""


def in_float64(own: torch.dtype, func: Any, args: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a call with float64 for every dtype that is as fine as a module's own.

    What was made in float32 keeps its numbers.
    """
    name, coarsest = func._schema.name.split("::")[1], torch.finfo(own).eps

    def raised(argument: Any) -> Any:
        real = isinstance(argument, torch.dtype) and argument.is_floating_point
        return torch.float64 if real and torch.finfo(argument).eps <= coarsest else argument

    if name in _EXACT or name in _SUMS:
        args, options = pytree.tree_map(raised, (args, dict(options)))
        made = name in ("zeros", "ones", "empty", "eye") and options.get("dtype") is None
        if made and torch.finfo(torch.get_default_dtype()).eps <= coarsest:
            options = {**options, "dtype": torch.float64}
    return args, dict(options)


def _widened(argument: Any) -> Any:
    return argument.double() if isinstance(argument, Tensor) and argument.is_floating_point() else argument


class Recorder(TorchDispatchMode):
    """Writes the tape; `running` is where it is: in which module, or in a node of a file, which is none."""

    def __init__(self, device: torch.device, own: torch.dtype | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.running: list[tuple[str, nn.Module | None]] = []
        self.failed = ""
        self._calls_at: Counter[str] = Counter()
        self._device = device
        self._own = own
        self._slots: dict[int, list[Slot]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def wrapped(self, slot: Slot) -> Recorded:
        """Return what stands for a slot in the module's code."""
        self._slots.setdefault(slot.memory, []).append(slot)
        return Recorded(slot, self._device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = args, dict(kwargs or {})
        if self._own is not None:
            args, kwargs = in_float64(self._own, func, args, kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        read = [leaf.slot for leaf in tensors if isinstance(leaf, Recorded)]
        if torch.Tag.inplace_view in func.tags and read:
            return self._turned(func, args, kwargs)
        if not any(slot.constant is None for slot in read):
            return self._computed(func, args, kwargs, bool(read) or not tensors)
        if func._schema.name.split("::")[1] in _LIKE:
            args, kwargs = pytree.tree_map(_without_numbers, (args, kwargs))
            return self._computed(func, args, kwargs, wrap=True)
        if func._schema.name in ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"):
            path, module = self.running[-1]
            raise UnsupportedModule(
                f"{path or type(module).__name__}: a branch, a loop or a Python number depends on the values of the "
                f"input. Write it without, or with torch.where.{self._line()}"
            )
        return self._taped(func, args, kwargs)

    def _taped(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Write down a call that reads what depends on the input; find the shapes of its results."""
        if torch.Tag.nondeterministic_seeded in func.tags and not func._schema.name.startswith("aten::rrelu"):
            raise self._draws(func)
        writes = func._schema.is_mutable
        if kwargs.get("out") is not None:
            raise UnsupportedModule(f"{self._where(func)}: writes to an out= tensor. Use its result.{self._line()}")
        if writes and not isinstance(args[0], Recorded):
            raise UnsupportedModule(
                f"{self._where(func)}: an in-place operation overwrites a parameter or buffer with what depends on the "
                f"input. Use the operation that is not in place.{self._line()}"
            )
        if writes:
            self._depends(args[0].slot)
        if func._schema.name in ("aten::index", "aten::index_put_", "aten::index_put"):
            args = (args[0], _listed_masks(args[1]), *args[2:])
        given = pytree.tree_map(self._argument, (args, kwargs))
        if writes:
            results: Any = args[0].slot
        else:
            places = pytree.tree_map(self._place, (args, kwargs))
            found = func(*places[0], **{**places[1], **({"device": "meta"} if places[1].get("device") else {})})
            results = pytree.tree_map(lambda t: Slot(t) if isinstance(t, Tensor) else t, found)
        name = func._schema.name.split("::")[1]
        self.calls.append(
            Call(name, given[0], given[1], results, self._own_path(func), self._line(), func, self.running[-1][1])
        )
        if writes:
            return args[0]
        return pytree.tree_map(lambda s: self.wrapped(s) if isinstance(s, Slot) else s, results)

    def _place(self, argument: Any) -> Any:
        """Return a tensor without its numbers; what depends on the input keeps its place in memory."""
        if not isinstance(argument, Tensor):
            return argument
        place = argument.slot.place if isinstance(argument, Recorded) else argument
        if isinstance(argument, Recorded) and argument.slot.constant is None:
            return place
        return place.to("meta") if self._own is None else _widened(place.to("meta"))

    def _argument(self, argument: Any) -> Any:
        """Return a slot for what depends on the input, and a constant's numbers as they are now."""
        if not isinstance(argument, Recorded):
            return argument
        constant = argument.slot.constant
        return argument.slot if constant is None else constant.clone()

    def _depends(self, slot: Slot) -> None:
        """Make all that shares a slot's memory depend on the input; the tape says what it was before."""
        constants = [other for other in self._slots[slot.memory] if other.constant is not None]
        if constants:
            memory = slot.place.untyped_storage().nbytes() // slot.place.element_size()
            shared = torch.empty(memory, dtype=slot.place.dtype, device="meta")
            for other in constants:
                self.calls.append(Call("constant", (other.constant.clone(),), {}, other, self._where(None), ""))  # type: ignore[union-attr]
                like, other.constant = other.place, None
                other.place = shared.as_strided(like.shape, like.stride(), like.storage_offset())
                self._slots.setdefault(other.memory, []).append(other)

    def _computed(self, func: Any, args: Any, kwargs: Any, wrap: bool) -> Any:
        """Compute what does not depend on the input; a tensor that a call makes anew may be written to later."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise self._draws(func)
        real = pytree.tree_map(lambda a: a.slot.constant if isinstance(a, Recorded) else a, (args, kwargs))
        found = func(*real[0], **real[1])
        if func._schema.name.split("::")[1] in _UNSET and found.dtype.is_floating_point:
            found.fill_(math.nan)
        if func._schema.is_mutable and isinstance(args[0], Recorded):
            return args[0]
        if not wrap:
            return found
        return pytree.tree_map(lambda t: self.wrapped(Slot(t, t)) if isinstance(t, Tensor) else t, found)

    def _draws(self, func: Any) -> SoundnessError:
        return SoundnessError(
            f"{self._where(func)}: the module draws random numbers, so that its output changes from call to call and "
            "no bound holds for it. Remove its randomness or state."
        )

    def _turned(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do what changes the shape of a tensor in place, such as squeeze_."""
        old: Slot = args[0].slot
        name = func._schema.name.split("::")[1].rstrip("_")
        overload = "int" if name == "transpose" else func._overloadname
        view = getattr(getattr(torch.ops.aten, name), overload)
        place = view(old.place, *args[1:], **kwargs)
        new = Slot(place, None if old.constant is None else place)
        self._slots.setdefault(new.memory, []).append(new)
        if old.constant is None:
            self.calls.append(Call(name, (old, *args[1:]), kwargs, new, self._where(func), self._line(), view))
        args[0].slot = new
        with no_dispatch():
            func(*args, **kwargs)
        return args[0]

    def opaque(self, module: nn.Module, path: str, x: Any, compute: Callable[[Tensor], Tensor]) -> Any:
        """Write down the call of a module that has a rule of its own."""
        if not isinstance(x, Recorded) or x.slot.constant is not None:
            return compute(x)
        with torch.utils._python_dispatch._disable_current_modes():
            sample = torch.zeros(x.shape, dtype=x.dtype, device=self._device)
            try:
                found = compute(sample)
            except Exception:
                # A rule says what it expects in better words than the failing call.
                lower_exactly(module, start(tuple(x.shape[1:]), self._device), path)
                raise
            if not isinstance(found, Tensor):
                kind = type(module).__name__
                raise UnsupportedModule(f"{path}: {kind} returns {type(found).__name__}, not one tensor.")
            overwrites = sample._version > 0
            result = x.slot if overwrites else Slot(found.detach().to("meta"))
        name = "opaque_" if overwrites else "opaque"
        self.calls.append(Call(name, (x.slot,), {}, result, path, "", None, module))
        return x if overwrites else self.wrapped(result)

    def _own_path(self, func: Any) -> str:
        """Return where a call stands, with a number if the same operation was called there before."""
        path = self._where(func)
        self._calls_at[path] += 1
        before = self._calls_at[path] - 1
        module = self.running[-1][1]
        return path if not before or module is None or is_torchs_own(module) else f"{path}_{before}"

    def _where(self, func: Any) -> str:
        """Return the path of the module that is running, and the operation if it is not torch's own module."""
        name = "" if func is None else func._schema.name.split("::")[1].strip("_")
        here, module = self.running[-1]
        return here if module is None or is_torchs_own(module) else f"{here}.{name}".strip(".")

    def _line(self) -> str:
        """Return the line of the user's code, such as " (model.py, line 12)"; empty if it is in no file."""
        frame = sys._getframe(1)
        if self.running[-1][1] is None:
            return ""
        while frame.f_back is not None and frame.f_code is not record.__code__:
            file = frame.f_code.co_filename
            if not file.startswith(_NOT_THE_USERS):
                return f" ({Path(file).name}, line {frame.f_lineno})" if Path(file).is_file() else ""
            frame = frame.f_back
        return ""


def _listed_masks(argument: Any) -> Any:
    """Return the places that the masks among some indices choose."""
    if not isinstance(argument, list | tuple):
        return argument
    found: list[Any] = []
    for index in argument:
        known = index.slot.constant if isinstance(index, Recorded) else index
        mask = isinstance(known, Tensor) and known.dtype == torch.bool
        found += known.nonzero().unbind(1) if mask else [index]  # type: ignore[union-attr]
    return found


def _without_numbers(argument: Any) -> Any:
    """Return a tensor of the same shape, for a call that reads no more of it."""
    if not isinstance(argument, Recorded):
        return argument
    return torch.zeros(argument.shape, dtype=argument.dtype, device=argument.device)


def is_torchs_own(module: nn.Module) -> bool:
    """Whether a module is a layer of torch's own, which is called more by its name than by what it calls."""
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.Sequential)


def record(
    model: nn.Module, inputs: tuple[Tensor, ...], known: Callable[[nn.Module], bool], own: torch.dtype | None
) -> Tape:
    """Run a module on tensors without numbers and return what it did.

    `known` modules go by a rule of their own.  With `own`, the model is a copy in float64 of one with that dtype.
    """
    recorder = Recorder(inputs[0].device, own)
    slots = tuple(Slot(torch.empty(x.shape, dtype=x.dtype, device="meta")) for x in inputs)
    paths = {id(module): path or type(module).__name__ for path, module in model.named_modules()}
    with _followed(recorder, model, paths), _replaced(recorder, model, paths, known), settings_for_recording():
        recorder.running.append(("", model))
        with recorder:
            try:
                output = model(*map(recorder.wrapped, slots))
            except CurvcertError:
                raise
            except Exception as error:  # whatever the user's forward pass raises
                raise Unrecorded(recorder.failed, error) from error
    return Tape(slots, recorder.calls, _slots_of(output))


@contextmanager
def _followed(recorder: Recorder, model: nn.Module, paths: Mapping[int, str]) -> Iterator[None]:
    """Let the recorder know which module is running."""

    def enter(module: nn.Module, args: Any) -> None:
        recorder.running.append((paths.get(id(module), type(module).__name__) if module is not model else "", module))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        here = recorder.running.pop()
        if sys.exc_info()[1] is not None and not recorder.failed:
            recorder.failed = f"{here[0]}: " if here[0] else ""

    handles = [hooks.register_module_forward_pre_hook(enter)]
    handles.append(hooks.register_module_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _replaced(
    recorder: Recorder, model: nn.Module, paths: Mapping[int, str], known: Callable[[nn.Module], bool]
) -> Iterator[None]:
    """Let the modules that have a rule write themselves down as a whole."""
    replaced = [module for module in model.modules() if known(module)]

    def whole(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path, given = paths[id(module)], (*args, *kwargs.values())
        if len(given) != 1:
            raise UnsupportedModule(
                f"{path}: {type(module).__name__} is called with {len(given)} arguments; a rule has one tensor."
            )
        return recorder.opaque(module, path, given[0], partial(type(module).forward, module))

    try:
        for module in replaced:
            module.forward = partial(whole, module)
        yield
    finally:
        for module in replaced:
            del module.forward


@contextmanager
def settings_for_recording() -> Iterator[None]:
    """Let torch call what it is made of: its fused transformer layers and attention say less."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _slots_of(output: Any) -> Any:
    """Return what a module returns with slots for tensors; objects with attributes as mappings of them."""
    if isinstance(output, Recorded):
        return output.slot
    if isinstance(output, Mapping):
        return {key: _slots_of(item) for key, item in output.items()}
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return {key: _slots_of(item) for key, item in zip(output._fields, output, strict=True)}
    if isinstance(output, tuple | list):
        return {key: _slots_of(item) for key, item in enumerate(output)}
    if is_dataclass(output):
        return {f.name: _slots_of(getattr(output, f.name)) for f in fields(output)}
    return output
