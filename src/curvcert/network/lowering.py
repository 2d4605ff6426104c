r"""How each module becomes part of a block: `lower(module, value)`.

While a network is traced, a value is an expression :math:`Hx + G\Phi(Wx + b) + c` of the output x of the
blocks built so far.  A linear module multiplies H, G and c from the left; an activation starts the next
Phi; a sum of two expressions of the same x is one again, as long as they share one Phi.
"""

from dataclasses import dataclass, replace
from functools import singledispatch

import torch
from torch import Tensor, nn

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
)
from curvcert.operators.base import Shape
from curvcert.operators.conv import Pair

F64 = torch.float64


@dataclass(frozen=True, eq=False)
class Hidden:
    """The inner part Phi(W x + b) of an expression."""

    W: AbstractLinearMap
    b: Tensor
    b_error: Tensor | None
    activation: Activation
    name: str


@dataclass(frozen=True, eq=False)
class Branch:
    """The outer part G Phi(.) of an expression."""

    G: AbstractLinearMap
    hidden: Hidden


@dataclass(frozen=True, eq=False)
class Value:
    """H x + G Phi(W x + b) + c, where x is the output of `blocks`."""

    blocks: tuple[AbstractBlock, ...]
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
        return self.c.device

    def linear(self, A: AbstractLinearMap, offset: Tensor | None = None) -> "Value":
        """Return A value + offset."""
        A = A.to(F64, self.device)
        c, error = fold_offset(A, self.c, self.c_error)
        branch = None if self.branch is None else Branch(A @ self.branch.G, self.branch.hidden)
        value = replace(self, H=A @ self.H, branch=branch, c=c, c_error=error)
        return value if offset is None else value.shift(offset)

    def shift(self, offset: Tensor, offset_error: Tensor | None = None) -> "Value":
        """Return value + offset; a sum of two nonzero offsets rounds, and says by how much."""
        offset = offset.detach().to(F64).to(self.device).expand(self.shape)
        c, error = add_offsets(self.c, offset, self.c_error, offset_error)
        return replace(self, c=c, c_error=error)

    def activate(self, activation: Activation, name: str) -> "Value":
        """Return Phi(value)."""
        if self.branch is None:
            blocks, W, b, b_error = self.blocks, self.H, self.c, self.c_error
        elif isinstance(self.H, Zero):
            # The block ends at its Phi; what came after it is the next block's W and b.
            blocks = _phi(self.blocks, self.branch.hidden).close()
            W, b, b_error = self.branch.G, self.c, self.c_error
        else:
            blocks, W, b, b_error = (
                self.close(),
                _identity(self.shape, self.device),
                torch.zeros_like(self.c),
                None,
            )
        return _phi(blocks, Hidden(W, b, b_error, activation, name))

    def plus(self, other: "Value", name: str) -> "Value":
        """Return value + other, both expressions of the same x."""
        if self.shape != other.shape:
            raise UnsupportedModule(f"{name}: a sum of shapes {self.shape} and {other.shape} is not supported.")
        if self.blocks is not other.blocks:
            raise UnsupportedModule(
                f"{name}: a skip around more than one activation is not supported. "
                "Split the branch into residual blocks with one activation each."
            )
        branch = _sum_of_branches(self.branch, other.branch, name)
        total = replace(self.shift(other.c, other.c_error), H=self.H + other.H, branch=branch, name=name)
        residual = branch is not None and not isinstance(total.H, Zero)
        return start(total.close(), self.shape, self.device) if residual else total

    def close(self) -> tuple[AbstractBlock, ...]:
        """Return the blocks with this expression as the last of them."""
        if self.branch is None:
            if isinstance(self.H, Identity) and not bool(self.c.any()) and self.blocks:
                return self.blocks
            return (*self.blocks, Affine(self.H, self.c, self.name or "affine", self.c_error))
        G, inner = self.branch.G, self.branch.hidden
        block = Block(self.H, G, inner.W, inner.b, self.c, inner.activation, inner.name, inner.b_error, self.c_error)
        return (*self.blocks, block)


def start(blocks: tuple[AbstractBlock, ...], shape: Shape, device: torch.device) -> Value:
    """Return the value x itself, of the given shape, after the given blocks."""
    return Value(blocks, _identity(shape, device), torch.zeros(shape, dtype=F64, device=device))


def _identity(shape: Shape, device: torch.device) -> AbstractLinearMap:
    return Identity(shape, device=device)


def _phi(blocks: tuple[AbstractBlock, ...], hidden: Hidden) -> Value:
    """Return the value Phi(W x + b)."""
    shape, device = hidden.W.out_shape, hidden.b.device
    H = Zero(hidden.W.in_shape, shape, device=device)
    zeros = torch.zeros(shape, dtype=F64, device=device)
    return Value(blocks, H, zeros, branch=Branch(_identity(shape, device), hidden), name=hidden.name)


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
    """
    raise UnsupportedModule(
        f"{path}: {type(module).__name__} is not supported. Replace it by supported layers, or register a rule "
        "with curvcert.network.lower.register (an activation: curvcert.activations.register_activation)."
    )


def lower_exactly(module: nn.Module, value: Value, path: str) -> Value:
    """Lower a module by the rule for its own type, never by a base class's."""
    if type(module) in lower.registry:
        return lower.registry[type(module)](module, value, path)
    try:
        activation = activations.from_module(module)
    except UnsupportedActivation:
        return lower.registry[object](module, value, path)
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


def _frozen(parameter: Tensor) -> Tensor:
    """Return the exact values in float64, detached from what may change them."""
    return parameter.detach().to(F64).clone()


@lower.register
def _(module: nn.Linear, value: Value, path: str) -> Value:
    if value.shape[-1:] != (module.in_features,):
        raise InvalidInput(f"{path}: Linear expects {module.in_features} features, got shape {value.shape}.")
    if len(value.shape) > 1:
        raise UnsupportedModule(f"{path}: Linear on inputs of shape {value.shape} is not supported. Flatten first.")
    return value.linear(Dense(_frozen(module.weight)), module.bias)


@lower.register
def _(module: nn.Conv2d, value: Value, path: str) -> Value:
    if module.padding_mode not in ("zeros", "circular"):
        raise UnsupportedModule(
            f"{path}: padding mode {module.padding_mode!r} is not supported. Use zeros or circular."
        )
    conv = Conv2d(
        _frozen(module.weight),
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


def _two(size: int | tuple[int, ...] | None) -> Pair:
    if isinstance(size, tuple):
        return int(size[0]), int(size[-1])
    return int(size or 0), int(size or 0)


@lower.register
def _(module: nn.AvgPool2d, value: Value, path: str) -> Value:
    padding = _two(module.padding)
    if module.ceil_mode or module.divisor_override or (padding != (0, 0) and not module.count_include_pad):
        raise UnsupportedModule(
            f"{path}: AvgPool2d with ceil_mode, divisor_override or count_include_pad=False is not supported. "
            "Use its defaults."
        )
    stride = _two(module.stride or module.kernel_size)
    return value.linear(AveragePool2d(value.shape, _two(module.kernel_size), stride, padding))


@lower.register
def _(module: nn.MaxPool2d, value: Value, path: str) -> Value:
    if module.ceil_mode or _two(module.dilation) != (1, 1) or module.return_indices:
        raise UnsupportedModule(f"{path}: MaxPool2d with ceil_mode, dilation or indices is not supported.")
    stride = _two(module.stride or module.kernel_size)
    pool = MaxPool(value.shape, _two(module.kernel_size), stride, _two(module.padding), path)
    return start((*value.close(), pool), pool.out_shape, value.device)


@lower.register(nn.BatchNorm1d)
@lower.register(nn.BatchNorm2d)
def _(module: nn.BatchNorm1d | nn.BatchNorm2d, value: Value, path: str) -> Value:
    if module.running_mean is None or module.running_var is None:
        raise UnsupportedModule(f"{path}: batch normalisation without running statistics depends on the batch.")
    mean, variance = _frozen(module.running_mean), _frozen(module.running_var)
    weight = None if module.weight is None else _frozen(module.weight)
    bias = None if module.bias is None else _frozen(module.bias)
    scale, offset = batch_norm_in_eval(value.shape, mean, variance, module.eps, weight, bias)
    return value.linear(scale, offset)


@lower.register
def _(module: nn.Flatten, value: Value, path: str) -> Value:
    if module.start_dim != 1 or module.end_dim != -1:
        raise UnsupportedModule(f"{path}: Flatten is supported from dimension 1 to -1.")
    return flatten(value)


def flatten(value: Value) -> Value:
    """Return the value as one vector a sample."""
    return value.linear(Reshape(value.shape, (value.H.out_size,)))


@lower.register
def _(module: nn.Unflatten, value: Value, path: str) -> Value:
    if module.dim != 1 or len(value.shape) != 1:
        raise UnsupportedModule(f"{path}: Unflatten is supported on dimension 1 of vectors.")
    return value.linear(Reshape(value.shape, tuple(int(n) for n in module.unflattened_size)))


@lower.register(nn.Identity)
@lower.register(nn.Dropout)
@lower.register(nn.Dropout2d)
def _(module: nn.Module, value: Value, path: str) -> Value:
    return value


def scale_by(value: Value, factor: Tensor) -> Value:
    """Return factor * value elementwise."""
    return value.linear(Diagonal(_frozen(factor).to(value.device), value.shape))
