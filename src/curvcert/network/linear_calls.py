"""The calls of torch that are linear in one value, each with torch's own parameters: `LINEAR`.

A rule is given the path for messages, then what the call is given: a `Value` for the tensor that depends on the input,
tensors and numbers for all else.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvcert.errors import InvalidInput, UnsupportedModule
from curvcert.network import movement, windows
from curvcert.network.builder import Value
from curvcert.network.windows import Numbers


def _linear(path: str, input: Value, weight: Tensor, bias: Tensor | None = None) -> Value:
    return windows.linear(input, _matrix(path, weight), bias, path)


def _matrix(path: str, weight: Any) -> Tensor:
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.dtype.is_floating_point:
        what = f"shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
        raise UnsupportedModule(f"{path}: expected a constant real matrix, got {what}.")
    return weight


def _matmul(path: str, left: Any, right: Any) -> Value:
    """Return x W along the last axis, W x along the one before, or x w for a vector w."""
    if isinstance(left, Value):
        if isinstance(right, Tensor) and right.dim() == 1:
            found = windows.linear(left, _matrix(path, right[None]), None, path)
            return movement.kept(found, found.shape[:-1], path)
        return windows.linear(left, _matrix(path, right).T, None, path)
    if len(right.shape) < 2:
        raise UnsupportedModule(
            f"{path}: a matrix from the left mixes the samples of a batch. Write x @ W.T, or F.linear(x, W)."
        )
    axis, W = len(right.shape) - 2, _matrix(path, left)
    return windows.along(right, axis, right.weight(W), path)


def _addmm(path: str, input: Tensor, mat1: Value, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Value:
    if not isinstance(mat1, Value) or isinstance(input, Value) or beta != 1 or alpha != 1:
        raise UnsupportedModule(f"{path}: addmm is supported as a constant plus x W, without factors.")
    if not isinstance(input, Tensor) or input.dim() > 1:
        raise UnsupportedModule(f"{path}: expected a bias with one number for each output.")
    return _matmul(path, mat1, mat2).shift(input, name=path)


def _einsum(path: str, equation: str, *operands: Any) -> Value:
    """Return a product with one matrix along one axis, the batch staying first: "bnd,de->bne", "mn,bnd->bmd"."""
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], tuple | list) else operands
    names, arrow, target = equation.replace(" ", "").partition("->")
    sources = names.split(",")
    if not arrow or len(given) != 2 or len(sources) != 2:
        raise UnsupportedModule(f"{path}: einsum is supported for one value and one constant matrix, with '->'.")
    k = 0 if isinstance(given[0], Value) else 1
    value, read, W, sides = given[k], sources[k], _matrix(path, given[1 - k]), sources[1 - k]
    summed, new = [s for s in sides if s not in target], [s for s in sides if s not in read]
    plain = all(len(set(part)) == len(part) for part in (read, sides, target)) and len(read) == 1 + len(value.shape)
    if not plain or len(sides) != 2 or len(summed) != 1 or len(new) != 1 or summed[0] not in read[1:]:
        raise UnsupportedModule(
            f"{path}: einsum {equation!r} is no product with a matrix along one dimension of a sample. Write it as "
            "F.linear, or as a matrix from the left."
        )
    found = read.replace(summed[0], new[0])
    if sorted(found) != sorted(target):
        raise UnsupportedModule(
            f"{path}: einsum {equation!r} drops or repeats a dimension. Sum it in a call of its own."
        )
    A = value.weight(W if sides == new[0] + summed[0] else W.T)
    mixed = windows.along(value, read.index(summed[0]) - 1, A, path)
    return movement.permute(mixed, [found.index(name) for name in target], path)


def _conv(
    path: str,
    input: Value,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers | str = 0,
    dilation: Numbers = 1,
    groups: int = 1,
) -> Value:
    return windows.convolution(input, weight, bias, stride, padding, dilation, groups, "zeros", path)


def _conv_transposed(
    path: str,
    input: Value,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers = 0,
    output_padding: Numbers = 0,
    groups: int = 1,
    dilation: Numbers = 1,
) -> Value:
    return windows.transposed_convolution(input, weight, bias, stride, padding, output_padding, groups, dilation, path)


def _interpolate(
    path: str,
    input: Value,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Value:
    if antialias:
        raise UnsupportedModule(f"{path}: interpolation with antialias is not supported. Use an average pooling.")
    return windows.interpolated(input, size, scale_factor, mode, align_corners, recompute_scale_factor, path)


def _mean(path: str, input: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return windows.reduced(input, _axes(path, input, dim), keepdim, True, path)


def _sum(path: str, input: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return windows.reduced(input, _axes(path, input, dim), keepdim, False, path)


def _axes(path: str, value: Value, dim: Any) -> list[int]:
    if dim is None or dim == ():
        raise UnsupportedModule(f"{path}: without dimensions this joins all samples of the batch. Name those to sum.")
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    axes = sorted(movement.axis_of(value, d, path) for d in dims)
    if len(set(axes)) != len(axes):
        raise InvalidInput(f"{path}: {dim} names a dimension twice.")
    return axes


def _cumsum(path: str, input: Value, dim: int) -> Value:
    return windows.cumulative_sum(input, movement.axis_of(input, dim, path), path)


def _batch_norm(
    path: str,
    input: Value,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Value:
    if training or running_mean is None or running_var is None:
        raise UnsupportedModule(
            f"{path}: batch normalisation by the statistics of a batch depends on the other samples. "
            "Pass training=self.training, and running statistics."
        )
    return windows.batch_normalised(input, running_mean, running_var, weight, bias, eps, path)


LINEAR: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.mv: _matmul,
    operator.matmul: _matmul,
    "matmul": _matmul,
    "mm": _matmul,
    torch.addmm: _addmm,
    torch.einsum: _einsum,
    F.conv1d: _conv,
    F.conv2d: _conv,
    F.conv_transpose1d: _conv_transposed,
    F.conv_transpose2d: _conv_transposed,
    F.interpolate: _interpolate,
    torch.mean: _mean,
    "mean": _mean,
    torch.sum: _sum,
    "sum": _sum,
    torch.cumsum: _cumsum,
    "cumsum": _cumsum,
    F.batch_norm: _batch_norm,
}
"""Every function and method, with its rule."""
