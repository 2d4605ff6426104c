r"""How each module becomes part of a block: `lower(module, value)`.

While a network is traced, a value is an expression :math:`Hx + G\Phi(Wx + b) + c` of the output x of the
blocks built so far.  A linear module multiplies H, G and c from the left; an activation starts the next
Phi; a sum of two expressions of the same x is one again, as long as they share one Phi.

A value is either exact (float64 copies of the weights, offsets with their rounding errors: what `trace` reads) or
live: over the module's own parameters, in their dtype and with their gradients, for estimates in training.  What
holds at every input does not depend on offsets, so those of a live value have no values (torch's meta device).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, singledispatch

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from curvcert import activations
from curvcert.activations import Activation
from curvcert.errors import InvalidInput, UnsupportedActivation, UnsupportedModule
from curvcert.network.block import AbstractBlock, Affine, Block, MaxPool, add_offsets, fold_offset
from curvcert.operators import (
    AbstractLinearMap,
    AveragePool2d,
    Conv2d,
    Dense,
    Diagonal,
    Identity,
    Reshape,
    Zero,
    batch_norm_in_eval,
    scale,
)
from curvcert.operators.base import Shape
from curvcert.operators.conv import Pair

F64 = torch.float64
Blocks = tuple[AbstractBlock, ...]

LARGEST_DEVIATION = 1e-6
"""How far a module may be from its activation: torch's Softplus jumps at its threshold, by 2.1e-9 as it comes."""


@dataclass(frozen=True, eq=False)
class Hidden:
    """The inner part Phi(W x + b) of an expression, where x is the output of `below`."""

    below: Blocks
    W: AbstractLinearMap
    b: Tensor
    b_error: Tensor | None
    activation: Activation
    name: str

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks up to and including this Phi; one tuple, so that branches that start here know each other."""
        H, G = _zero(self.W.in_shape, self.W.out_shape, self.W), _identity(self.W.out_shape, self.W)
        c = torch.zeros_like(self.b)
        return (*self.below, Block(H, G, self.W, self.b, c, self.activation, self.name, self.b_error))


@dataclass(frozen=True, eq=False)
class Branch:
    """The outer part G Phi(.) of an expression."""

    G: AbstractLinearMap
    hidden: Hidden


@dataclass(frozen=True, eq=False)
class Value:
    """H x + G Phi(W x + b) + c, where x is the output of `blocks`."""

    blocks: Blocks
    H: AbstractLinearMap
    c: Tensor
    c_error: Tensor | None = None
    branch: Branch | None = None
    name: str = ""

    @property
    def shape(self) -> Shape:
        """Shape of one sample."""
        return self.H.out_shape

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.H.device

    @property
    def live(self) -> bool:
        """Whether this is an expression over parameters in training; its offsets have no values."""
        return self.c.is_meta

    def linear(self, A: AbstractLinearMap, offset: Tensor | None = None) -> "Value":
        """Return A value + offset."""
        A = A.to(self.H.dtype, self.device)
        c, error = fold_offset(A, self.c, self.c_error)
        branch = None if self.branch is None else Branch(A @ self.branch.G, self.branch.hidden)
        value = replace(self, H=A @ self.H, branch=branch, c=c, c_error=error)
        return value if offset is None else value.shift(offset)

    def shift(self, offset: Tensor, offset_error: Tensor | None = None) -> "Value":
        """Return value + offset; a sum of two nonzero offsets rounds, and says by how much."""
        if self.live:
            return self
        offset = offset.detach().to(F64).to(self.device).expand(self.shape)
        c, error = add_offsets(self.c, offset, self.c_error, offset_error)
        return replace(self, c=c, c_error=error)

    def activate(self, activation: Activation, name: str) -> "Value":
        """Return Phi(value)."""
        inner = self._settled()
        hidden = Hidden(inner.blocks, inner.H, inner.c, inner.c_error, activation, name)
        H = _zero(inner.H.in_shape, self.shape, self.H)
        branch = Branch(_identity(self.shape, self.H), hidden)
        return Value(inner.blocks, H, torch.zeros_like(self.c), branch=branch, name=name)

    def plus(self, other: "Value", name: str) -> "Value":
        """Return value + other, both expressions of the same x."""
        if self.shape != other.shape:
            raise UnsupportedModule(
                f"{name}: a sum of shapes {self.shape} and {other.shape} is not supported. Give both the same shape."
            )
        left, right = _on_the_same_blocks(self, other, name)
        branch = _sum_of_branches(left.branch, right.branch, name)
        total = replace(left.shift(right.c, right.c_error), H=left.H + right.H, branch=branch, name=name)
        residual = branch is not None and not isinstance(total.H, Zero)
        return self.restart(total.close(), self.shape) if residual else total

    def close(self) -> Blocks:
        """Return the blocks with this expression as the last of them."""
        if self.branch is None:
            shifted = not self.live and (bool(self.c.any()) or self.c_error is not None)
            unchanged = isinstance(self.H, Identity) and not shifted
            affine = Affine(self.H, self.c, self.name or "affine", self.c_error)
            return self.blocks if unchanged else (*self.blocks, affine)
        G, inner = self.branch.G, self.branch.hidden
        block = Block(self.H, G, inner.W, inner.b, self.c, inner.activation, inner.name, inner.b_error, self.c_error)
        return (*self.blocks, block)

    def restart(self, blocks: Blocks, shape: Shape) -> "Value":
        """Return the output of the given blocks, as the x of the expressions that follow."""
        return start(blocks, shape, self.device, self.H.dtype, self.live)

    def weight(self, parameter: Tensor) -> Tensor:
        """Return a module's weight as this value needs it: the parameter itself, or its exact values in float64."""
        return parameter if self.live else parameter.detach().to(F64).clone()

    def _settled(self) -> "Value":
        """Return the same value without a branch: its Phi ends a block, and G and c belong to what follows."""
        if self.branch is None:
            return self
        if not isinstance(self.H, Zero):
            return self.restart(self.close(), self.shape)
        return replace(self, blocks=self.branch.hidden.blocks, H=self.branch.G, branch=None)


def start(blocks: Blocks, shape: Shape, device: torch.device, dtype: torch.dtype = F64, live: bool = False) -> Value:
    """Return the value x itself, of the given shape, after the given blocks."""
    c = torch.zeros(shape, dtype=F64, device="meta" if live else device)
    return Value(blocks, Identity(shape, dtype, device), c)


def _identity(shape: Shape, like: AbstractLinearMap) -> AbstractLinearMap:
    return Identity(shape, like.dtype, like.device)


def _zero(source: Shape, target: Shape, like: AbstractLinearMap) -> AbstractLinearMap:
    return Zero(source, target, like.dtype, like.device)


def _on_the_same_blocks(left: Value, right: Value, name: str) -> tuple[Value, Value]:
    """Return both as expressions of one x: h + Phi(W h + b) is one of h, even if h itself ends in an activation."""
    for pair in ((left, right), (left._settled(), right), (left, right._settled())):
        if pair[0].blocks is pair[1].blocks:
            return pair
    raise UnsupportedModule(
        f"{name}: a skip around more than one activation, or around a whole block, is not supported. "
        "Split the branch into residual blocks with one activation each."
    )


def _sum_of_branches(left: Branch | None, right: Branch | None, name: str) -> Branch | None:
    if left is None or right is None:
        return left or right
    if left.hidden is not right.hidden:
        raise UnsupportedModule(
            f"{name}: a sum of two branches with an activation each is not supported. "
            "Concatenate their weights into one branch."
        )
    return Branch(left.G + right.G, left.hidden)


@singledispatch
def lower(module: nn.Module, value: Value, path: str) -> Value:
    """Return the expression for module(value); a module of an unknown type is refused by name.

    Rules are looked up by the exact type: a subclass may compute something else.

    >>> class Doubled(nn.Module):
    ...     def forward(self, x):
    ...         return 2 * x
    >>> @lower.register
    ... def _(module: Doubled, value: Value, path: str) -> Value:
    ...     return scale_by(value, torch.tensor(2.0))
    >>> lower(Doubled(), start((), (3,), torch.device("cpu")), "doubled").shape
    (3,)
    """
    if parametrize.is_parametrized(module):
        raise UnsupportedModule(
            f"{path}: {type(module).__name__} has a parametrisation. Make its weights plain with "
            "torch.nn.utils.parametrize.remove_parametrizations(module, name, leave_parametrized=True)."
        )
    raise UnsupportedModule(
        f"{path}: {type(module).__name__} is not supported. Replace it by supported layers, or register a rule "
        "with curvcert.network.lower.register (an activation: curvcert.activations.register_activation)."
    )


def lower_exactly(module: nn.Module, value: Value, path: str) -> Value:
    """Lower a module by the rule for its own type, never by a base class's."""
    if type(module) in lower.registry:
        try:
            return lower.registry[type(module)](module, value, path)
        except InvalidInput as error:
            if str(error).startswith(path):
                raise
            raise InvalidInput(f"{path}: {error}") from error
    try:
        activation = activations.from_module(module)
    except UnsupportedActivation:
        return lower.registry[object](module, value, path)
    if activation.deviation > LARGEST_DEVIATION:
        raise UnsupportedModule(
            f"{path}: {type(module).__name__} is off its activation {activation.name!r} by up to "
            f"{activation.deviation:.3g}, so a bound for one is none for the other. For Softplus keep the default "
            "threshold of 20, or take curvcert.nn.CentredSoftplus, which has none."
        )
    return value.activate(activation, path)


def is_known(module: nn.Module) -> bool:
    """Tell whether a module has a rule of its own."""
    if type(module) in lower.registry:
        return True
    try:
        activations.from_module(module)
    except UnsupportedActivation:
        return False
    return True


@lower.register
def _(module: nn.Linear, value: Value, path: str) -> Value:
    if value.shape[-1:] != (module.in_features,):
        raise InvalidInput(f"{path}: Linear expects {module.in_features} features, got shape {value.shape}.")
    if len(value.shape) > 1:
        raise UnsupportedModule(f"{path}: Linear on inputs of shape {value.shape} is not supported. Flatten first.")
    return value.linear(Dense(value.weight(module.weight)), module.bias)


@lower.register
def _(module: nn.Conv2d, value: Value, path: str) -> Value:
    if module.padding_mode not in ("zeros", "circular"):
        raise UnsupportedModule(
            f"{path}: padding mode {module.padding_mode!r} is not supported. Use zeros or circular."
        )
    _require_image(value, path, module)
    conv = Conv2d(
        value.weight(module.weight),
        value.shape,
        _two(module.stride),
        _conv_padding(module),
        _two(module.dilation),
        module.groups,
        module.padding_mode,
    )
    return value.linear(conv, None if module.bias is None else module.bias[:, None, None])


def _conv_padding(module: nn.Conv2d) -> tuple[Pair, Pair]:
    if module.padding == "valid":
        return (0, 0), (0, 0)
    if module.padding == "same":
        spans = [d * (k - 1) for d, k in zip(_two(module.dilation), _two(module.kernel_size), strict=True)]
        return (spans[0] // 2, spans[0] - spans[0] // 2), (spans[1] // 2, spans[1] - spans[1] // 2)
    h, w = _two(module.padding)  # type: ignore[arg-type]
    return (h, h), (w, w)


def _two(size: int | Sequence[int]) -> Pair:
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[-1]))


def _require_image(value: Value, path: str, module: nn.Module) -> None:
    if len(value.shape) != 3:
        raise InvalidInput(
            f"{path}: {type(module).__name__} expects images of shape (channels, height, width), got {value.shape}. "
            "The example input needs its batch dimension, and no Flatten before this layer."
        )


@lower.register
def _(module: nn.AvgPool2d, value: Value, path: str) -> Value:
    padding = _two(module.padding)
    if module.ceil_mode or module.divisor_override or (padding != (0, 0) and not module.count_include_pad):
        raise UnsupportedModule(
            f"{path}: AvgPool2d with ceil_mode, divisor_override or count_include_pad=False is not supported. "
            "Use its defaults."
        )
    _require_image(value, path, module)
    stride = _two(module.kernel_size if module.stride is None else module.stride)
    return value.linear(AveragePool2d(value.shape, _two(module.kernel_size), stride, padding))


@lower.register
def _(module: nn.MaxPool2d, value: Value, path: str) -> Value:
    if module.ceil_mode or _two(module.dilation) != (1, 1) or module.return_indices:
        raise UnsupportedModule(
            f"{path}: MaxPool2d with ceil_mode, dilation or return_indices is not supported. Use its defaults."
        )
    _require_image(value, path, module)
    stride = _two(module.kernel_size if module.stride is None else module.stride)
    pool = MaxPool(value.shape, _two(module.kernel_size), stride, _two(module.padding), path)
    return value.restart((*value.close(), pool), pool.out_shape)


@lower.register(nn.BatchNorm1d)
@lower.register(nn.BatchNorm2d)
def _(module: nn.BatchNorm1d | nn.BatchNorm2d, value: Value, path: str) -> Value:
    if module.running_mean is None or module.running_var is None:
        raise UnsupportedModule(
            f"{path}: {type(module).__name__} without running statistics depends on the whole batch. "
            "Use track_running_stats=True."
        )
    dimensions = (1, 2) if isinstance(module, nn.BatchNorm1d) else (3,)
    if len(value.shape) not in dimensions or value.shape[0] != module.num_features:
        raise InvalidInput(
            f"{path}: {type(module).__name__} expects {module.num_features} channels, got shape {value.shape}."
        )
    if value.live:
        raise UnsupportedModule(
            f"{path}: {type(module).__name__} divides by statistics that move while it is trained, so the network has "
            "no constants yet. Leave it out, or train with its statistics frozen as a curvcert.nn.Normalise."
        )
    mean, variance = value.weight(module.running_mean), value.weight(module.running_var)
    weight = None if module.weight is None else value.weight(module.weight)
    bias = None if module.bias is None else value.weight(module.bias)
    scale, offset = batch_norm_in_eval(value.shape, mean, variance, module.eps, weight, bias)
    return value.linear(scale, offset)


@lower.register
def _(module: nn.Flatten, value: Value, path: str) -> Value:
    return flatten(value, module.start_dim, module.end_dim, path)


def flatten(value: Value, start_dim: int, end_dim: int, path: str) -> Value:
    """Return the value with the dimensions from start_dim to end_dim (the batch is dimension 0) as one."""
    rank = len(value.shape) + 1
    first, last = (d + rank if d < 0 else d for d in (start_dim, end_dim))
    if not 1 <= first <= last < rank:
        raise UnsupportedModule(
            f"{path}: Flatten from dimension {start_dim} to {end_dim} is not supported. Keep the batch: flatten(x, 1)."
        )
    middle = math.prod(value.shape[first - 1 : last])
    return value.linear(Reshape(value.shape, (*value.shape[: first - 1], middle, *value.shape[last:])))


@lower.register
def _(module: nn.Unflatten, value: Value, path: str) -> Value:
    sizes = tuple(module.unflattened_size)
    if module.dim != 1 or len(value.shape) != 1 or not all(isinstance(n, int) for n in sizes):
        raise UnsupportedModule(f"{path}: Unflatten is supported on dimension 1 of vectors, into unnamed dimensions.")
    return reshape(value, sizes, path)


def reshape(value: Value, sizes: Shape, path: str) -> Value:
    """Return the value in another shape; one size may be -1."""
    known = math.prod(n for n in sizes if n != -1)
    if sizes.count(-1) == 1 and known > 0:
        sizes = tuple(value.H.out_size // known if n == -1 else n for n in sizes)
    if any(n < 1 for n in sizes) or math.prod(sizes) != value.H.out_size:
        raise InvalidInput(f"{path}: cannot reshape samples of shape {value.shape} into {sizes}.")
    return value.linear(Reshape(value.shape, sizes))


@lower.register(nn.Identity)
@lower.register(nn.Dropout)
@lower.register(nn.Dropout1d)
@lower.register(nn.Dropout2d)
@lower.register(nn.Dropout3d)
@lower.register(nn.AlphaDropout)
@lower.register(nn.FeatureAlphaDropout)
def _(module: nn.Module, value: Value, path: str) -> Value:
    return value


def scale_by(value: Value, factor: Tensor) -> Value:
    """Return factor * value elementwise; one factor for all coordinates stays a number, which norms can use."""
    factor = factor.detach().to(F64).to(value.device)
    first = float(factor.reshape(-1)[0])
    if bool((factor == first).all()):
        return value.linear(scale(first, _identity(value.shape, value.H)))
    return value.linear(Diagonal(factor, value.shape))
