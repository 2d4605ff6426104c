"""What the calls on a tape mean: each becomes values of one sample, by a rule for its name in ATen.

- *item*: a tensor on the tape: a value of one sample with its place for the batch, or a constant, or the reason why it
  has no meaning here.  That is raised only where the item is needed: a later call may complete a formula that this one
  is part of, and what nothing reads need not be known.
- A call in place gives its tensor, and all that shares memory with it, a new item.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from curvcert.errors import InvalidInput, SoundnessError, UnsupportedModule
from curvcert.network import formulas
from curvcert.network.aten_elementwise import ELEMENTWISE, ENDS, SYMBOLS
from curvcert.network.aten_linear import LINEAR
from curvcert.network.batched import Batched, Layout, moved, require_shape
from curvcert.network.builder import Value
from curvcert.network.elementwise import UNBOUNDED, without_a_constant
from curvcert.network.formulas import Polynomial
from curvcert.network.lowering import lower_exactly
from curvcert.network.recording import Call, Slot, Tape, is_torchs_own
from curvcert.network.remedies import remedy

_GENERAL_REMEDY = (
    "Use what the page 'Networks' of the documentation lists, or put it into a module of your own with a rule "
    "(curvcert.network.lower.register)."
)
_SAME = {"alias", "clone", "contiguous", "detach", "lift", "lift_fresh", "lift_fresh_copy"}
_MOVES = {
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "permute", "transpose", "t", "select", "slice", "unsqueeze"),
    *("squeeze", "expand", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "unbind", "cat"),
    *("stack", "flip", "roll", "repeat", "index", "index_select", "gather", "take", "constant_pad_nd", "movedim"),
    *("reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d"),
    *("replication_pad3d", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle", "im2col"),
    *("unfold", "diagonal", "diag_embed", "tril", "triu", "rot90", "upsample_nearest1d", "upsample_nearest2d"),
    *("upsample_nearest3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    *("masked_fill", "where", "select_scatter", "slice_scatter", "diagonal_scatter", "index_copy", "index_fill"),
    *("scatter", "fill", "zero", "index_put"),
}
"""Operations whose result holds entries of what they read, and constants."""

_READ = {
    **dict.fromkeys(("where",), (1, 2)),
    **dict.fromkeys(("select_scatter", "slice_scatter", "diagonal_scatter", "fill"), (0, 1)),
    **dict.fromkeys(("index_put", "masked_fill"), (0, 2)),
    **dict.fromkeys(("index_copy", "index_fill", "scatter"), (0, 3)),
}
"""Which of their arguments hold entries, where that is not the first alone; the others say where to."""

_Error = UnsupportedModule | InvalidInput


@dataclass(eq=False)
class Item:
    """A tensor on the tape: its meaning, or why it has none; and what it is as a formula of earlier items."""

    tensor: Batched | Tensor | None
    shape: tuple[int, ...]
    error: _Error | None = None
    formulas: dict["Item", Polynomial] = field(default_factory=dict)

    def known(self) -> Batched | Tensor:
        """Return its meaning, or raise."""
        if self.tensor is None:
            raise self.error or UnsupportedModule("A value without a rule.")
        return self.tensor

    def of(self, base: "Item") -> Polynomial | None:
        """Return it as a formula of another item of its shape."""
        return formulas.X if base is self else self.formulas.get(base)

    def bases(self) -> list["Item"]:
        """Return the items that it has a formula of, the nearest first."""
        return [self, *self.formulas] if isinstance(self.tensor, Batched) else list(self.formulas)


def read(tape: Tape, inputs: Sequence[Batched | Tensor]) -> "Items":
    """Return the items of a tape, from those of its inputs."""
    items = Items()
    for slot, tensor in zip(tape.inputs, inputs, strict=True):
        items.read_input(slot, tensor)
    for call in tape.calls:
        items.follow(call)
    return items


class Items:
    """The items of the slots so far."""

    def __init__(self) -> None:
        self._of: dict[Slot, Item] = {}
        self._in_memory: dict[int, list[Slot]] = {}

    def put(self, slot: Slot, item: Item) -> None:
        """Give a slot an item."""
        if slot not in self._of:
            self._in_memory.setdefault(slot.memory, []).append(slot)
        self._of[slot] = item

    def read_input(self, slot: Slot, tensor: Batched | Tensor) -> None:
        """Begin with an input."""
        self.put(slot, Item(tensor, tuple(slot.place.shape)))

    def of(self, slot: Slot) -> Item:
        """Return the item of a slot."""
        return self._of[slot]

    def layout(self, slot: Slot) -> Layout:
        """Return where the batch is; of what is part of a formula, where it is in what the formula is of."""
        item = self._of[slot]
        found = item.tensor if item.tensor is not None else next((base.tensor for base in item.formulas), None)
        if not isinstance(found, Batched):
            raise item.error or UnsupportedModule("Expected a value that depends on the input.")
        return found.layout

    def follow(self, call: Call) -> None:
        """Give the results of a call their items."""
        if call.name == "constant":
            return self.put(call.results, Item(call.arguments[0], tuple(call.arguments[0].shape)))
        given = pytree.tree_map(self._item, (call.arguments, dict(call.options)))
        slots = [leaf for leaf in pytree.tree_leaves(call.results) if isinstance(leaf, Slot)]
        shapes = [tuple(slot.place.shape) for slot in slots]
        try:
            found = _meaning(call, given[0], given[1], shapes)
        except (UnsupportedModule, InvalidInput) as error:
            found = [Item(None, shape, _placed(error, call)) for shape in shapes]
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            wrong = InvalidInput(f"{call.path}: {call.name.strip('_')} fails on these arguments: {error}.")
            found = [Item(None, shape, _placed(wrong, call)) for shape in shapes]
        if call.name.endswith("_") and not call.name.startswith("_"):
            return self._write(slots[0], found[0], call.path)
        missing = UnsupportedModule(f"{call.path}: only the first output of {call.name} is supported.")
        found += [Item(None, shape, missing) for shape in shapes[len(found) :]]
        for slot, item in zip(slots, found, strict=True):
            if item.tensor is not None:
                require_shape(item.tensor, tuple(slot.place.shape), call.path)
            self.put(slot, item)
        return None

    def _item(self, argument: Any) -> Any:
        if isinstance(argument, Slot):
            return self._of[argument]
        return Item(argument, tuple(argument.shape)) if isinstance(argument, Tensor) else argument

    def _write(self, target: Slot, item: Item, path: str) -> None:
        """Give a tensor a new item, and every other tensor the entries of it that lie in the same memory."""
        require = tuple(target.place.shape)
        if item.tensor is not None:
            require_shape(item.tensor, require, path)
        for slot in self._in_memory[target.memory]:
            same = (slot.place.shape, slot.place.stride(), slot.place.storage_offset()) == (
                target.place.shape,
                target.place.stride(),
                target.place.storage_offset(),
            )
            if slot is target or same:
                self._of[slot] = item
                continue
            places = _shared(target.place, slot.place)
            if bool((places < 0).all()):
                continue
            old, shape = self._of[slot], tuple(slot.place.shape)
            try:
                sources = [old.known(), item.known()]
                (tensor,) = moved(
                    lambda a, b, p=places: torch.where(p >= 0, b.flatten()[p.clamp(min=0)], a), sources, path
                )
                self._of[slot] = Item(tensor, shape)
            except (UnsupportedModule, InvalidInput) as error:
                self._of[slot] = Item(None, shape, error)


def _shared(written: Tensor, other: Tensor) -> Tensor:
    """Return where each entry of `other` lies in `written`, which shares its memory; -1 where it does not."""
    size = 1 + max(
        place.storage_offset() + sum((n - 1) * s for n, s in zip(place.shape, place.stride(), strict=True))
        for place in (written, other)
    )
    memory = torch.full((size,), -1)
    numbers = torch.arange(written.numel()).reshape(written.shape)
    memory.as_strided(written.shape, written.stride(), written.storage_offset()).copy_(numbers)
    return memory.as_strided(other.shape, other.stride(), other.storage_offset()).clone()


def _meaning(call: Call, args: tuple[Any, ...], options: dict[str, Any], shapes: list[Any]) -> list[Item]:
    name = call.name.rstrip("_") if not call.name.startswith("_") else call.name
    if name == "opaque":
        return [_opaque(call, args[0], shapes[0])]
    _require_no_rounding(call)
    if name in _SAME:
        return [args[0]]
    if name == "_to_copy":
        return [args[0]]
    if name == "copy":
        name, args, options = "expand", (args[1], shapes[0]), {}
    chosen = name == "where" and isinstance(args[0].tensor, Tensor)
    if (name in SYMBOLS or name in ELEMENTWISE) and not chosen:
        return [_elementwise(call, name, args, options, shapes[0])]
    plain = pytree.tree_map(lambda a: a.known() if isinstance(a, Item) else a, (args, options))
    if name in _MOVES:
        tensors = _move(call, name, *plain)
    elif name in LINEAR:
        found = LINEAR[name](call.path, *plain[0], **plain[1])
        tensors = list(found) if isinstance(found, tuple | list) else [found]
    else:
        raise _unsupported(call)
    return [Item(tensor, shape) for tensor, shape in zip(tensors, shapes, strict=False)]


def _require_no_rounding(call: Call) -> None:
    """Raise if the result has fewer digits than what it is made of."""
    read = (leaf.place.dtype for leaf in pytree.tree_leaves((call.arguments, call.options)) if isinstance(leaf, Slot))
    finest = min((torch.finfo(dtype).eps for dtype in read if dtype.is_floating_point), default=math.inf)
    for slot in pytree.tree_leaves(call.results):
        dtype = slot.place.dtype if isinstance(slot, Slot) else torch.float64
        rounded = dtype.is_floating_point and torch.finfo(dtype).eps > finest
        if rounded or (call.name == "_to_copy" and not dtype.is_floating_point):
            raise UnsupportedModule(
                f"{call.path}: rounds to {dtype}, and what rounds has no constant. Give the input in the dtype "
                "you mean."
            )


def _opaque(call: Call, item: Item, shape: tuple[int, ...]) -> Item:
    value = lower_exactly(call.module, _known_value(item).leading(call.path), call.path)  # type: ignore[arg-type]
    if (len(shape) == 0 or shape[1:] != value.shape) and value.shape:
        raise SoundnessError(
            f"{call.path}: the module returns shape {shape[1:]} per sample, its rule {value.shape}. Correct the rule."
        )
    return Item(Batched(value), shape)


def _known_value(item: Item) -> Batched:
    found = item.known()
    if not isinstance(found, Batched):
        raise UnsupportedModule("Expected a value that depends on the input.")
    return found


def _move(call: Call, name: str, args: Any, options: Any) -> list[Any]:
    """Return the tensors of an operation that moves entries: any tensor among its arguments may depend on the input."""
    to_where = [a for k, a in enumerate(args) if k not in _READ.get(name, (0,))]
    if any(isinstance(leaf, Batched) for leaf in pytree.tree_leaves((to_where, options))):
        raise UnsupportedModule(
            f"{call.path}: {name} moves entries to places that depend on the input, and may jump. Use clamp, "
            "relu or abs."
        )
    leaves, tree = pytree.tree_flatten((args, options))
    dependent = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Batched)]
    function = getattr(getattr(torch.ops.aten, name), _overload(call, name))

    def again(*tensors: Tensor) -> Any:
        given = [leaf.to("cpu") if isinstance(leaf, Tensor) and not _is_real(leaf) else leaf for leaf in leaves]
        for k, tensor in zip(places, tensors, strict=True):
            given[k] = tensor
        args, options = pytree.tree_unflatten(given, tree)
        return function(*args, **options)

    places = [k for k, leaf in enumerate(leaves) if k in dependent or (isinstance(leaf, Tensor) and _is_real(leaf))]
    sources = [leaves[k] if k in dependent else leaves[k].detach().double() for k in places]
    return moved(again, sources, call.path)


def _is_real(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point


def _overload(call: Call, name: str) -> str:
    return "default" if name == "expand" else call.function._overloadname


def _elementwise(call: Call, name: str, args: tuple[Any, ...], options: dict[str, Any], shape: tuple[int, ...]) -> Item:
    """Return what an operation on every entry gives, as a formula that is known, or by its own rule."""
    found = _formulas(name, args, options, shape)
    if name in ENDS:
        recognised = _recognised(found, call.path)
        if recognised is not None:
            return Item(recognised, shape, None, found)
    try:
        tensors = pytree.tree_map(lambda a: a.known() if isinstance(a, Item) else a, (args, options))
        if name not in ELEMENTWISE:
            raise without_a_constant(name, call.path) if name in UNBOUNDED else _unsupported(call)
        return Item(ELEMENTWISE[name](call.path, *tensors[0], **tensors[1]), shape, None, found)
    except (UnsupportedModule, InvalidInput) as error:
        recognised = _recognised(found, call.path)
        if recognised is not None:
            return Item(recognised, shape, None, found)
        return Item(None, shape, _placed(error, call), found)


_MOST_BASES = 12


def _formulas(name: str, args: Any, options: Any, shape: tuple[int, ...]) -> dict[Item, Polynomial]:
    """Return the result of an operation on every entry as formulas of what went before."""
    symbol = SYMBOLS.get(name)
    given = None if symbol is None else symbol(*args, **options)
    if given is None:
        return {}
    op, operands = given
    items = [item for item in operands if isinstance(item, Item) and not isinstance(item.tensor, Tensor)]
    bases = (
        [base for base in items[0].bases() if all(base is i or base in i.formulas for i in items[1:])] if items else []
    )
    found = {}
    for base in bases[:_MOST_BASES]:
        parts = [_part(operand, base) for operand in operands]
        whole = None if any(p is None for p in parts) or base.shape != shape else formulas.operation(op, parts)  # type: ignore[arg-type]
        if whole is not None:
            found[base] = whole
    return found


def _part(operand: Any, base: Item) -> Polynomial | None:
    if isinstance(operand, Item) and not isinstance(operand.tensor, Tensor):
        return operand.of(base)
    number = operand.tensor if isinstance(operand, Item) else operand
    if isinstance(number, Tensor):
        if number.numel() != 1 or number.dim() > len(base.shape):
            return None
        number = number.item()
    return formulas.number(float(number)) if isinstance(number, int | float) and math.isfinite(number) else None


def _recognised(found: dict[Item, Polynomial], path: str) -> Batched | None:
    for base, formula in found.items():
        lowering = formulas.recognised(formula)
        if lowering is not None and isinstance(base.tensor, Batched):
            return Batched(lowering(base.tensor.value, path), base.tensor.layout)
    return None


def _placed(error: _Error, call: Call) -> _Error:
    """Return the error with the line of the user's code, if it is known."""
    if not call.written_at or re.search(r", line \d+\)$", str(error)):
        return error
    return type(error)(f"{error}{call.written_at}")


def _unsupported(call: Call) -> UnsupportedModule:
    name = call.name.strip("_")
    module = call.module
    if module is not None and is_torchs_own(module) and remedy(type(module).__name__):
        kind = type(module).__name__
        return UnsupportedModule(f"{call.path}: {kind} is not supported. {remedy(kind)}")
    return UnsupportedModule(f"{call.path}: {name} is unknown to curvcert. {remedy(name) or _GENERAL_REMEDY}")


def output_of(items: Items, slot: Slot, path: str) -> Value:
    """Return the value of one sample of the output, whose first dimension is the batch."""
    item = items.of(slot)
    found = item.known()
    if not isinstance(found, Batched):
        raise UnsupportedModule(f"{path}: expected an output that depends on the input.")
    if found.layout == Layout(bare=True):
        raise UnsupportedModule(f"{path}: one number per sample without a dimension. Keep a dimension of size 1.")
    if found.layout != Layout():
        raise UnsupportedModule(
            f"{path}: the output has shape {found.shape} with the batch in dimension {found.layout.axis}. Return it "
            "with the batch as its first dimension."
        )
    return found.value
