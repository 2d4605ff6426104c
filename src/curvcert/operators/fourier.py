r"""Spectral norms of convolutions from the Fourier transform of their kernels.

A convolution with zero padding is a piece of a circular convolution on a larger torus, whose norm
is the largest norm of its blocks in the Fourier basis.
"""

import math

import torch
from jaxtyping import Float64
from torch import Tensor

from curvcert.operators.conv import Conv2d
from curvcert.operators.hermitian import largest_singular_value_upper_bound
from curvcert.rounding import UNIT_ROUNDOFF, inflate

_CHUNK_BYTES = 2**28
"""Blocks are formed and factorised in pieces of about this size."""


def torus_sizes(conv: Conv2d, extra: int) -> tuple[int, int]:
    r"""Return the torus on which the circular convolution contains the given one.

    Along each axis N is a multiple of the stride with :math:`N \ge n + \max(P_l, P_r)`: a tap in
    the padding then falls, modulo N, outside the image.  Any larger multiple serves as well.
    """
    if conv.padding_mode == "circular":
        return conv.in_shape[1], conv.in_shape[2]
    h, w = (
        (math.ceil((n + max(side)) / s) + extra) * s
        for n, side, s in zip(conv.in_shape[1:], conv.padding, conv.stride, strict=True)
    )
    return h, w


def covers(conv: Conv2d) -> bool:
    """Whether the Fourier bound applies: zero padding, or circular with a stride that divides the image."""
    if conv.padding_mode == "zeros":
        return True
    axes = zip(conv.in_shape[1:], conv.stride, conv.out_shape[1:], strict=True)
    return all(n % s == 0 and m * s <= n for n, s, m in axes)


def fourier_norm_upper_bound(conv: Conv2d, candidates: int = 2) -> Float64[Tensor, ""]:
    r"""Bound the spectral norm of a convolution on a fixed image; at most a few percent loose.

    With stride s the frequencies alias into N/s blocks of shape outputs x (inputs s_h s_w), and

    .. math:: \sigma \le \max_{blocks} \|\hat K\|_2 / \sqrt{s_h s_w} + \text{rounding}.

    Exact for circular padding.  Of several valid tori the least bound is taken.

    >>> identity = Conv2d(torch.ones(1, 1, 1, 1, dtype=torch.float64), image_shape=(1, 4, 4))
    >>> 1.0 <= float(fourier_norm_upper_bound(identity)) < 1.0 + 1e-12
    True
    """
    tries = candidates if conv.padding_mode == "zeros" else 1
    return torch.stack([_torus_norm_upper_bound(conv, *torus_sizes(conv, extra)) for extra in range(tries)]).amin()


def _torus_norm_upper_bound(conv: Conv2d, N_h: int, N_w: int) -> Tensor:
    s_h, s_w = conv.stride
    # K is real: frequency -k holds the conjugate block, of the same norm, so half the rows do.
    rows = torch.arange(N_h // s_h // 2 + 1, device=conv.device)
    per_row = conv.weight[:, :, 0, 0].numel() * s_h * N_w * 8
    chunks = rows.split(max(1, _CHUNK_BYTES // (8 * per_row)))
    norm = torch.stack([largest_singular_value_upper_bound(_blocks(conv, N_h, N_w, m)) for m in chunks]).amax()
    # exp(-2 pi i t / N) with |t| <= N / 2 is within 10 u; two of them and k_h k_w roundings.
    taps = conv.weight.shape[2] * conv.weight.shape[3]
    size = inflate(torch.linalg.vector_norm(conv.weight.abs().sum(dim=(-2, -1))), 1e-9)
    rounding = 4 * (taps + 16) * UNIT_ROUNDOFF * size * math.sqrt(s_h * s_w)
    return inflate((norm + rounding) / math.sqrt(s_h * s_w), 4 * UNIT_ROUNDOFF)


def _blocks(conv: Conv2d, N_h: int, N_w: int, rows: Tensor) -> Tensor:
    """Return, for the given aliased row frequencies, all blocks of outputs x (inputs s_h s_w)."""
    (s_h, s_w), (d_h, d_w) = conv.stride, conv.dilation
    M_h, M_w = N_h // s_h, N_w // s_w
    kernels = conv.weight.unflatten(0, (conv.groups, -1))
    high = _waves(rows[:, None] + M_h * torch.arange(s_h, device=conv.device), N_h, kernels.shape[-2], d_h, kernels)
    frequencies = torch.arange(N_w, device=conv.device).reshape(s_w, M_w)
    wide = _waves(frequencies, N_w, kernels.shape[-1], d_w, kernels)
    spectrum = torch.einsum("mjh,goihw,knw->gmnoijk", high, kernels.to(high.dtype), wide)
    return spectrum.flatten(-3).flatten(0, 2)


def _waves(frequency: Tensor, N: int, taps: int, dilation: int, like: Tensor) -> Tensor:
    """Return exp(-2 pi i k u d / N) for each frequency k and tap u, its argument reduced exactly."""
    turns = (frequency[..., None] * torch.arange(taps, device=like.device) * dilation) % N
    turns = torch.where(turns > N // 2, turns - N, turns).to(like.dtype)
    angle = turns * (-2 * math.pi / N)
    return torch.complex(angle.cos(), angle.sin())
