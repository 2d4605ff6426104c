"""Operations of ATen along the axes of a tensor: products with matrices, convolutions, pools, sums: `LINEAR`.

A rule is given the path for messages, then what the call is given, with `Batched` for the tensors that depend on the
input, and returns one of them, or the first results of several.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from curvcert.errors import InvalidInput, UnsupportedModule
from curvcert.network import composed, windows
from curvcert.network.aten_elementwise import ELEMENTWISE
from curvcert.network.batched import BATCH, Batched, Layout, constant_of_a_sample, moved
from curvcert.network.builder import Value
from curvcert.operators import Dense

_MOST_ENTRIES = 2**24
"""How large a matrix may be that is found by trying an operation on a basis."""


def _along(path: str, x: Batched, dim: int, W: Tensor) -> Batched:
    """Return W x along a dimension."""
    return Batched(windows.along(x.value, x.place(dim, path), x.value.weight(_own(W)), path), x.layout)


def _own(W: Any) -> Any:
    """Return a parameter itself where a call was given a view of all of it, as a training loss needs it."""
    base = W._base
    same = base is not None and (base.shape, base.stride(), base.data_ptr()) == (W.shape, W.stride(), W.data_ptr())
    return base if same else W


def _mm(path: str, left: Any, right: Any) -> Batched:
    if isinstance(left, Batched) and isinstance(right, Batched):
        return _product_of_values(path, left, right)
    if isinstance(left, Batched):
        return _along(path, left, -1, right.t())
    return _along(path, right, -2, left)


def _mv(path: str, left: Any, right: Any) -> Batched:
    if isinstance(left, Batched) and not isinstance(right, Batched):
        return _kept(path, left, _along(path, left, -1, right[None]).value, [1], False)
    raise UnsupportedModule(f"{path}: a matrix times a vector that depends on the input mixes the samples of a batch.")


def _addmm(path: str, bias: Any, left: Any, right: Any, beta: float = 1, alpha: float = 1) -> Batched:
    return _plus(path, bias, _mm(path, left, right), beta, alpha)


def _plus(path: str, bias: Any, product: Batched, beta: float, alpha: float) -> Batched:
    scaled = product if alpha == 1 else ELEMENTWISE["mul"](path, product, alpha)
    return scaled if beta == 0 else ELEMENTWISE["add"](path, scaled, bias, alpha=beta)


def _bmm(path: str, left: Any, right: Any) -> Batched:
    if isinstance(left, Batched) and isinstance(right, Batched):
        return _product_of_values(path, left, right)
    x, W, dim = (left, right.mT, 2) if isinstance(left, Batched) else (right, left, 1)
    if x.layout.axis == 0:
        rows = x.layout.rows(W)
        if not bool((rows == rows[:1]).all()):
            raise UnsupportedModule(f"{path}: multiplies every sample of a batch with a matrix of its own.")
        W = rows[0] if not x.layout.alone else rows[:1].reshape(1, *W.shape[1:])
    if len(W) == 1 or bool((W[:1] == W).all()):
        return _along(path, x, dim, W[0])
    group = x.place(0, path) if x.layout.axis != 0 else 0
    value = windows.grouped_along(x.value, group, _sample_place(x, dim, path), x.value.weight(W), path)
    return Batched(value, x.layout)


def _sample_place(x: Batched, dim: int, path: str) -> int:
    return x.place(dim, path)


def _baddbmm(path: str, bias: Any, left: Any, right: Any, beta: float = 1, alpha: float = 1) -> Batched:
    return _plus(path, bias, _bmm(path, left, right), beta, alpha)


def _product_of_values(path: str, left: Batched, right: Batched) -> Batched:
    """Return a product of matrices that both depend on the input."""
    rank = len(left.shape)
    if left.layout != right.layout or left.layout.axis >= rank - 2:
        raise UnsupportedModule(f"{path}: multiplies the samples of a batch with each other. Keep them apart.")
    return Batched(composed.matrix_product(left.value, right.value, path), left.layout)


def _convolution(
    path: str,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *_: Any,
) -> Batched:
    if not isinstance(x, Batched) or isinstance(weight, Batched) or isinstance(bias, Batched):
        raise UnsupportedModule(f"{path}: a convolution whose kernel depends on the input is a product of values.")
    kernel, many = weight if x.layout.alone else _exactly(weight), _images(path, x)
    if many > 1:
        # The same convolution of several images per sample: one with so many groups.
        kernel, groups = kernel.repeat(many, *(1,) * (kernel.dim() - 1)), groups * many
        bias = None if bias is None else bias.repeat(many)
    value = _together(path, x)
    steps, border, gaps = tuple(stride), tuple(padding), tuple(dilation)
    if transposed:
        extra = tuple(output_padding)
        found = windows.transposed_convolution(value, kernel, bias, steps, border, extra, groups, gaps, path)
    else:
        found = windows.convolution(value, kernel, bias, steps, border, gaps, groups, "zeros", path)
    return _apart(x, found, path)


def _exactly(weight: Tensor) -> Tensor:
    return weight.detach().double()


def _images(path: str, x: Batched) -> int:
    """Return how many images (or signals, ...) a sample is made of."""
    if x.layout.axis != 0:
        raise UnsupportedModule(
            f"{path}: the batch is in dimension {x.layout.axis}, where channels or pixels are expected."
        )
    return x.layout.pre * x.layout.post


def _together(path: str, x: Batched) -> Value:
    """Return the images of a sample as one, with the channels of all."""
    many, shape = _images(path, x), x.value.shape
    return x.value if x.layout.alone else x.value.reshaped((many * shape[1], *shape[2:]), path)


def _apart(x: Batched, value: Value, path: str) -> Batched:
    many = x.layout.pre * x.layout.post
    if x.layout.alone:
        return Batched(value, x.layout)
    return Batched(value.reshaped((many, value.shape[0] // many, *value.shape[1:]), path), x.layout)


def _by_image(function: Callable[..., Value]) -> Callable[..., Batched]:
    """Return the rule of a function of the images of a sample that treats every channel alike."""

    def rule(path: str, x: Batched, *args: Any, **options: Any) -> Batched:
        return _apart(x, function(path, _together(path, x), *args, **options), path)

    return rule


def _average_pool(
    path: str,
    value: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    sizes = tuple(kernel_size), tuple(stride) or None, tuple(padding)
    axes = len(value.shape) - 1
    return windows.average_pool(value, *sizes, ceil_mode, count_include_pad, divisor_override, axes, path)


def _adaptive_average_pool(path: str, value: Value, output_size: Sequence[int]) -> Value:
    return windows.adaptive_average_pool(value, tuple(output_size), len(output_size), path)


def _max_pool(
    path: str,
    value: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Value:
    if set(dilation) != {1}:
        raise UnsupportedModule(f"{path}: max-pooling with dilation is not supported. Use its default.")
    axes = len(value.shape) - 1
    return windows.max_pool(value, tuple(kernel_size), tuple(stride) or None, tuple(padding), axes, path, ceil_mode)


def _adaptive_max_pool(path: str, value: Value, output_size: Sequence[int]) -> Value:
    sizes = value.shape[1:]
    if any(n % m for n, m in zip(sizes, output_size, strict=True)):
        raise UnsupportedModule(
            f"{path}: max-pooling of {sizes} to {tuple(output_size)} has windows of several sizes. Use sizes that "
            "divide."
        )
    kernel = tuple(n // m for n, m in zip(sizes, output_size, strict=True))
    return windows.max_pool(value, kernel, kernel, 0, len(sizes), path)


def _interpolated(mode: str) -> Callable[..., Value]:
    """Return the function for an interpolation, axis by axis as torch itself does it."""

    def function(path: str, value: Value, output_size: Sequence[int], align_corners: bool, *scales: Any) -> Value:
        factors = scales or (None,) * len(output_size)
        for axis, (m, f) in enumerate(zip(output_size, factors, strict=True), start=1):
            n = value.shape[axis]
            value = windows.along(value, axis, _interpolation(mode, n, m, align_corners, f), path)
        return value

    return function


def _interpolation(mode: str, n: int, m: int, align_corners: bool, factor: float | None) -> Tensor:
    """Return the matrix of an interpolation from n to m places."""
    basis = torch.eye(n, dtype=torch.float64)[:, None]
    if mode == "linear":
        images: Tensor = torch.ops.aten.upsample_linear1d(basis, [m], align_corners, factor)
        return images[:, 0].T.contiguous()
    images = torch.ops.aten.upsample_bicubic2d(basis[..., None], [m, 1], align_corners, factor, None)
    return images[:, 0, :, 0].T.contiguous()


def _batch_norm(
    path: str,
    x: Batched,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Batched:
    apart = x.layout.axis == 1 and x.layout.pre == 1 and x.shape[0] == 1
    if (training or running_mean is None) and apart and weight is None and bias is None:
        # Every channel of every sample by itself: torch writes InstanceNorm so.
        axes = [k for k in range(len(x.value.shape)) if k != x.place(2, path) - 1]
        return Batched(composed.normalised(x.value, axes, eps, True, path), x.layout)
    if (training or running_mean is None or running_var is None) and not x.value.live:
        raise UnsupportedModule(
            f"{path}: batch normalisation without running statistics depends on the whole batch. Use "
            "track_running_stats=True, and pass training=self.training."
        )
    channels = x.shape[1]
    found, behind = x.value, len(x.shape) - 2
    full = (*(1,) * 1, channels, *(1,) * behind)

    def of_a_sample(constant: Any, otherwise: float) -> Tensor:
        given = torch.full((channels,), otherwise, dtype=torch.float64) if constant is None else found.weight(constant)
        return constant_of_a_sample(given.reshape(full), x.shape, x.layout, path)

    if x.layout == Layout():
        given = running_mean, running_var, weight, bias
        return Batched(windows.batch_normalised(found, *given, eps, path), x.layout)
    factor = of_a_sample(weight, 1.0) / torch.sqrt(of_a_sample(running_var, 1.0) + eps)
    shifted = found.times(factor, path)
    return Batched(shifted.shift(of_a_sample(bias, 0.0) - of_a_sample(running_mean, 0.0) * factor, name=path), x.layout)


def _reduced(mean: bool) -> Callable[..., Batched]:
    def rule(path: str, x: Batched, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Batched:
        dims = _dims(path, x, dim)
        axes = sorted(x.place(d, path) for d in dims)
        return _kept(path, x, windows.reduced(x.value, axes, True, mean, path), dims, keepdim)

    return rule


def _dims(path: str, x: Batched, dim: Any) -> list[int]:
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    if not dims:
        raise UnsupportedModule(f"{path}: without dimensions this joins all samples of the batch. Name those to sum.")
    return sorted(d % len(x.shape) for d in dims)


def _kept(path: str, x: Batched, value: Value, dims: Sequence[int], keepdim: bool) -> Batched:
    """Return a value that has 1 entry along some dimensions, perhaps without them."""
    if keepdim:
        return Batched(value, x.layout)
    gone = {x.place(d, path) for d in dims}
    axis, rank = x.layout.axis - sum(d < x.layout.axis for d in dims), len(x.shape) - len(dims)
    left = tuple(n for k, n in enumerate(value.shape) if k not in gone)
    return Batched(value.reshaped(left or (1,), path), Layout(axis, x.layout.pre, x.layout.post, rank == 1))


def _cumsum(path: str, x: Batched, dim: int, dtype: Any = None) -> Batched:
    return Batched(windows.cumulative_sum(x.value, x.place(dim, path), path), x.layout)


def _largest(path: str, x: Batched, dim: Any, keepdim: bool = False) -> Batched:
    dims = _dims(path, x, dim)
    axes = sorted(x.place(d, path) for d in dims)
    others = [k for k in range(len(x.value.shape)) if k not in axes]
    count = math.prod(x.value.shape[k] for k in axes)
    signal = x.value.permuted((*others, *axes), path).reshaped((math.prod(x.value.shape) // count, count), path)
    found = windows.max_pool(signal, count, count, 0, 1, path)
    shape = tuple(1 if k in axes else n for k, n in enumerate(x.value.shape))
    return _kept(path, x, found.reshaped(shape, path), dims, keepdim)


def _smallest(path: str, x: Batched, dim: Any, keepdim: bool = False) -> Batched:
    found = _largest(path, Batched(x.value.negative(), x.layout), dim, keepdim)
    return Batched(found.value.negative(), found.layout)


def _by_basis(name: str) -> Callable[..., Batched]:
    """Return the rule of a linear operation that is tried on a basis, a matrix of numbers that it reads itself."""

    def rule(path: str, x: Batched, *args: Any, **options: Any) -> Batched:
        if x.layout != Layout():
            raise UnsupportedModule(f"{path}: expects the batch as the first dimension.")
        n = math.prod(x.value.shape)
        function = getattr(torch.ops.aten, name)
        if n > 2**12:
            raise UnsupportedModule(f"{path}: {name} of {n} numbers is too large for a matrix of its own.")
        columns = function(torch.eye(n, dtype=torch.float64).reshape(n, *x.value.shape), *args, **options)
        m = columns[0].numel()
        if n * m > _MOST_ENTRIES:
            raise UnsupportedModule(f"{path}: {name} from {n} to {m} numbers is too large for a matrix of its own.")
        dense = x.value.reshaped((n,), path).linear(Dense(columns.reshape(n, m).T.contiguous()), name=path)
        return Batched(dense.reshaped(tuple(columns.shape[1:]), path), x.layout)

    return rule


def _trilinear(path: str, left: Any, weight: Any, right: Any, *expansions: Any) -> Batched:
    """Return a bilinear layer, whose weight (out, left, right) stands between its two inputs."""
    if list(expansions[:4]) != [[1, 3], [0], [1, 2], [2, 3]] or isinstance(weight, Batched):
        raise UnsupportedModule(f"{path}: trilinear products are supported as bilinear layers with a constant weight.")
    W = _exactly(weight)
    if isinstance(left, Batched) and isinstance(right, Batched):
        outputs, _, k = W.shape
        # Row (o, j) is the j-th entry of x' W_o.
        parts = _along(path, left, -1, W.mT.reshape(-1, W.shape[1])).value.reshaped((outputs, k), path)
        whole = parts.multiplied(right.value.expanded((outputs, k), path), path)
        return Batched(windows.reduced(whole, [1], False, False, path), left.layout)
    x, constant, product = (left, right, W) if isinstance(left, Batched) else (right, left, W.mT)
    vector = constant_of_a_sample(_exactly(constant), (BATCH, constant.shape[-1]), Layout(), path)
    return _along(path, x, -1, product @ vector)


def _gated(path: str, x: Batched, dim: int = -1) -> Batched:
    """Return a gated linear unit: half of the entries times the sigmoid of the others."""
    axis = x.place(dim, path)
    half = x.value.shape[axis] // 2
    a, b = (Batched(x.value.cut(axis, first, half, name=path), x.layout) for first in (0, half))
    return ELEMENTWISE["mul"](path, a, ELEMENTWISE["sigmoid"](path, b))


def _along_dimension(function: Callable[..., Value]) -> Callable[..., Batched]:
    """Return the rule of a function of a value, an axis and the path."""
    return lambda path, x, dim, *_: Batched(function(x.value, x.place(dim, path), path), x.layout)


def _log_sum_exp(path: str, x: Batched, dim: Any, keepdim: bool = False) -> Batched:
    dims = _dims(path, x, dim)
    if len(dims) != 1:
        raise UnsupportedModule(f"{path}: logsumexp over several dimensions is not supported. Flatten them.")
    return _kept(path, x, composed.log_sum_exp(x.value, x.place(dims[0], path), path), dims, keepdim)


def _layer_norm(path: str, x: Batched, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Batched:
    rank = len(shape)
    for dim in range(1, rank + 1):
        x.place(-dim, path)
    return Batched(composed.layer_norm(x.value, rank, _exact(weight), _exact(bias), eps, path), x.layout)


def _exact(weight: Any) -> Any:
    return None if weight is None else _exactly(weight)


def _group_norm(path: str, x: Batched, weight: Any, bias: Any, *sizes: Any) -> Batched:
    *_, groups, eps = sizes
    weight, bias = _exact(weight), _exact(bias)
    return Batched(composed.group_norm(x.leading(path), groups, weight, bias, eps, path), x.layout)


def _variance(path: str, x: Batched, dim: Any = None, correction: float | None = 1, keepdim: bool = False) -> Batched:
    """Return the mean of the squares beside the mean, times n / (n - correction)."""
    dims = _dims(path, x, dim)
    axes = sorted(x.place(d, path) for d in dims)
    mean = windows.reduced(x.value, axes, True, True, path)
    centred = x.value.plus(mean.negative().expanded(x.value.shape, path), path)
    n = math.prod(x.value.shape[axis] for axis in axes)
    left = n - (1 if correction is None else correction)
    if left <= 0:
        raise InvalidInput(f"{path}: the variance of {n} numbers with a correction of {correction} is not defined.")
    sums = windows.reduced(composed.squared(centred, path), axes, True, False, path)
    return _kept(path, x, sums.times(torch.tensor(1.0 / left, dtype=torch.float64), path), dims, keepdim)


def _vector_norm(path: str, x: Batched, ord: float = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> Batched:
    dims = _dims(path, x, dim)
    axes = sorted(x.place(d, path) for d in dims)
    if ord == 2:
        squares = windows.reduced(composed.squared(x.value, path), axes, True, False, path)
        found = ELEMENTWISE["sqrt"](path, Batched(squares, x.layout)).value
    elif ord == 1:
        found = windows.reduced(ELEMENTWISE["abs"](path, x).value, axes, True, False, path)
    else:
        raise UnsupportedModule(f"{path}: a norm with exponent {ord} is not supported. Use 1 or 2.")
    return _kept(path, x, found, dims, keepdim)


def _distances(path: str, left: Any, right: Any, p: float, *_: Any) -> Batched:
    """Return the distances of each row of one tensor to each row of another."""
    a, b = (_unsqueezed(x, dim, path) for x, dim in ((left, -2), (right, -3)))
    return _vector_norm(path, ELEMENTWISE["sub"](path, a, b), p, [-1])


def _unsqueezed(x: Any, dim: int, path: str) -> Any:
    if not isinstance(x, Batched):
        return x.unsqueeze(dim)
    return moved(lambda tensor: tensor.unsqueeze(dim), [x], path)[0]


LINEAR: dict[str, Callable[..., Any]] = {
    "_softmax": _along_dimension(composed.softmax),
    "_safe_softmax": _along_dimension(composed.softmax),
    "_log_softmax": _along_dimension(composed.log_softmax),
    "logsumexp": _log_sum_exp,
    "native_layer_norm": _layer_norm,
    "native_group_norm": _group_norm,
    "var": _variance,
    "linalg_vector_norm": _vector_norm,
    "_cdist_forward": _distances,
    "_euclidean_dist": lambda path, left, right: _distances(path, left, right, 2),
    "mm": _mm,
    "mv": _mv,
    "addmm": _addmm,
    "bmm": _bmm,
    "baddbmm": _baddbmm,
    "convolution": _convolution,
    "native_batch_norm": _batch_norm,
    "cudnn_batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": lambda path, x, w, b, m, v, momentum, eps: _batch_norm(
        path, x, w, b, m, v, False, momentum, eps
    ),
    "sum": _reduced(mean=False),
    "mean": _reduced(mean=True),
    "cumsum": _cumsum,
    "amax": _largest,
    "amin": _smallest,
    "max": _largest,
    "min": _smallest,
    "avg_pool2d": _by_image(_average_pool),
    "avg_pool3d": _by_image(_average_pool),
    "_adaptive_avg_pool2d": _by_image(_adaptive_average_pool),
    "_adaptive_avg_pool3d": _by_image(_adaptive_average_pool),
    "max_pool2d_with_indices": _by_image(_max_pool),
    "max_pool3d_with_indices": _by_image(_max_pool),
    "adaptive_max_pool2d": _by_image(_adaptive_max_pool),
    "adaptive_max_pool3d": _by_image(_adaptive_max_pool),
    "upsample_linear1d": _by_image(_interpolated("linear")),
    "upsample_bilinear2d": _by_image(_interpolated("linear")),
    "upsample_trilinear3d": _by_image(_interpolated("linear")),
    "upsample_bicubic2d": _by_image(_interpolated("cubic")),
    "col2im": _by_basis("col2im"),
    "_trilinear": _trilinear,
    "glu": _gated,
}
"""Every operation, with its rule."""
