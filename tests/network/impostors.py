"""Modules that differ from what they seem, and modules that only look as if they did.

`IMPOSTORS` compute something else than one run on ordinary inputs shows: none may be taken for what it is not (refused,
or taken as what it is).  `UNSEEN` names those that nothing can detect, with the reason.  `HARMLESS` look suspicious and
are what they seem.
"""

import math
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.network.cases import Function

Forward = Callable[[Function, Tensor], Any]

COUNTS: dict[str, int] = {}
_GENERATOR = (k % 997 for k in range(10**9))
_LOCAL = threading.local()


def _count(name: str) -> int:
    COUNTS[name] = COUNTS.get(name, 0) + 1
    return COUNTS[name]


def _autocast(m: Function, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.tanh(m.a(x))


def _default_dtype(m: Function, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    return torch.tanh(x)


def _swallowed(m: Function, x: Tensor) -> Tensor:
    try:
        return torch.tanh(x).round(decimals=2) * 1.0
    except Exception:
        return torch.tanh(x)


def _float_or_other(m: Function, x: Tensor) -> Tensor:
    try:
        return torch.tanh(x) if float(x.sum()) < 1e9 else 5 * x
    except Exception:
        return torch.tanh(x)


def _numpy_or_other(m: Function, x: Tensor) -> Tensor:
    try:
        return torch.from_numpy(np.tanh(x.detach().numpy())) * (1.0 if x.detach().numpy().max() < 1e2 else 2.0)
    except Exception:
        return torch.tanh(x)


def _attribute(m: Function, x: Tensor) -> Tensor:
    m.calls = getattr(m, "calls", 0) + 1
    return torch.tanh(x) if m.calls < 1000 else 3 * torch.tanh(x)


def _function_attribute(m: Function, x: Tensor) -> Tensor:
    _function_attribute.calls = getattr(_function_attribute, "calls", 0) + 1  # type: ignore[attr-defined]
    return torch.tanh(x)


def _buffer(m: Function, x: Tensor) -> Tensor:
    m.buffer.add_(1)
    return torch.tanh(x) * (1.0 if float(m.buffer[0]) < 1e6 else 2.0)


def _momentum(m: Function, x: Tensor) -> Tensor:
    m.buffer.mul_(0.9).add_(0.1 * x.mean(0).detach())
    return torch.tanh(x - m.buffer)


def _cache(m: Function, x: Tensor) -> Tensor:
    if not m.seen:
        m.seen.append(x.detach().mean())
    return torch.tanh(x)


def _thread_local(m: Function, x: Tensor) -> Tensor:
    _LOCAL.calls = getattr(_LOCAL, "calls", 0) + 1
    return torch.tanh(x) if _LOCAL.calls < 10**6 else x


def _environment(m: Function, x: Tensor) -> Tensor:
    return torch.tanh(x) * float(os.environ.get("CURVCERT_TEST_FACTOR", "1"))


def _in_place_on_the_input(m: Function, x: Tensor) -> Tensor:
    x.mul_(2)
    return torch.tanh(x)


def _shared_view(m: Function, x: Tensor) -> Tensor:
    y = m.a(x) + 1e6
    z = y[:, :2]
    y.relu_()
    return torch.cat([y, z], 1)


def _overlapping(m: Function, x: Tensor) -> Tensor:
    y = torch.cat([x, x], 1)
    y[:, 1:5] = y[:, 0:4].clone()
    return y


def _strided(m: Function, x: Tensor) -> Tensor:
    return torch.as_strided(m.a(x), (len(x), 3), (1, 4))


def _other_samples_by_index(m: Function, x: Tensor) -> Tensor:
    return torch.tanh(x) + 1e-3 * x[torch.arange(len(x)).flip(0)]


def _sorted_samples(m: Function, x: Tensor) -> Tensor:
    return torch.tanh(x.sort(0)[0])


def _grad_penalty(m: Function, x: Tensor) -> Tensor:
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        (g,) = torch.autograd.grad((z**3).sum() * torch.tanh(z).mean(), z)
    return torch.tanh(g)


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.where(x.abs() < 1e5, torch.tanh(x), torch.zeros_like(x))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def _straight_through(m: Function, x: Tensor) -> Tensor:
    return x + (x.round(decimals=6) - x).detach()


def _kept_value(m: Function, x: Tensor) -> Tensor:
    if m.seen:
        m.seen[0] = x
    else:
        m.seen.append(x)
    return torch.tanh(x)


IMPOSTORS: dict[str, Forward] = {
    "autocast": _autocast,
    "a default dtype that it sets": _default_dtype,
    "rounding behind a try": _swallowed,
    "a branch behind a try": _float_or_other,
    "numpy behind a try": _numpy_or_other,
    "a counter on the module": _attribute,
    "a counter on its function": _function_attribute,
    "a counter in a buffer": _buffer,
    "a counter in a dictionary": lambda m, x: torch.tanh(x) if _count("a") < 1000 else 3 * torch.tanh(x),
    "a counter in a list": lambda m, x: m.seen.append(1) or torch.tanh(x),
    "a running mean": _momentum,
    "a cache of the first input": _cache,
    "a value kept from call to call": _kept_value,
    "its own dtype": lambda m, x: torch.tanh(x) * (2.0 if x.dtype == torch.float32 else 1.0),
    "the dtype of a weight": lambda m, x: torch.tanh(x) * (2.0 if m.a.weight.dtype == torch.float32 else 1.0),
    "the size of an element": lambda m, x: torch.tanh(x) * (2 if m.a.weight.element_size() == 4 else 3),
    "the roundoff": lambda m, x: torch.tanh(x) + torch.finfo(x.dtype).eps * 1e3,
    "gradients": lambda m, x: torch.tanh(x) * (5 if torch.is_grad_enabled() else 1),
    "inference mode": lambda m, x: torch.tanh(x) * (5 if torch.is_inference_mode_enabled() else 1),
    "a tensor's gradient": lambda m, x: torch.tanh(x) * (2 if m.a(x).requires_grad else 1),
    "a type": lambda m, x: torch.tanh(x) if type(x) is Tensor else 2 * torch.tanh(x),
    "another type": lambda m, x: 2 * torch.tanh(x) if type(x) is Tensor else torch.tanh(x),
    "the memory of the input": lambda m, x: torch.tanh(x) * (1.0 if x.data_ptr() == 0 else 2.0),
    "its storage": lambda m, x: torch.tanh(x) * (2.0 if x.untyped_storage().nbytes() else 1.0),
    "the name of its class": lambda m, x: torch.tanh(x) * (1.0 if "Recorded" in type(x).__name__ else 2.0),
    "how it is printed": lambda m, x: torch.tanh(x) * (1.0 if "Recorded" in repr(x) else 2.0),
    "the size of the batch": lambda m, x: torch.tanh(x) * (2 if len(x) == 5 else 1),
    "the parity of the batch": lambda m, x: torch.tanh(x) * (2 if len(x) % 2 else 1),
    "a large batch": lambda m, x: torch.tanh(x) * (2 if len(x) > 100 else 1),
    "a factor of the batch": lambda m, x: torch.tanh(x) * len(x),
    "a mean by the batch": lambda m, x: torch.tanh(x) / x.shape[0],
    "a fill by the batch": lambda m, x: torch.tanh(x) + torch.full((1, 4), float(len(x))),
    "an arange over the batch": lambda m, x: torch.tanh(x) + torch.arange(len(x))[:, None],
    "a weight for each sample": lambda m, x: torch.tanh(x) * torch.linspace(1, 2, len(x))[:, None],
    "the mean of the batch": lambda m, x: torch.tanh(x - x.mean(0)),
    "the first sample": lambda m, x: torch.tanh(x - x[:1]),
    "the next sample": lambda m, x: torch.tanh(x + 1e-9 * x.roll(1, 0)),
    "the sum of everything": lambda m, x: torch.tanh(x) + 1e-9 * x.sum(),
    "the mean of everything": lambda m, x: x - x.mean(),
    "the norm of everything": lambda m, x: x / (1 + x.norm()),
    "the largest of everything": lambda m, x: torch.tanh(x - x.max()),
    "a softmax over the batch": lambda m, x: torch.softmax(m.a(x), 0),
    "attention over the batch": lambda m, x: torch.softmax(x @ x.T, 1) @ x,
    "distances within the batch": lambda m, x: torch.cdist(x, x)[:, :2],
    "a product with the batch": lambda m, x: x * x.flip(0),
    "samples by index": _other_samples_by_index,
    "samples in order": _sorted_samples,
    "a view across samples": lambda m, x: torch.tanh(x.reshape(-1)[: 4 * len(x)].view(4, -1).T.contiguous()),
    "a transposed batch": lambda m, x: torch.tanh(x.T.reshape(len(x), 4)),
    "cumulated samples": lambda m, x: torch.tanh(x.cumsum(0)),
    "a convolution over the batch": lambda m, x: F.conv1d(x.T[None], torch.ones(4, 4, 3), padding=1)[0].T,
    "a pool over the batch": lambda m, x: F.avg_pool1d(x.T[None], 3, 1, 1)[0].T,
    "batch statistics": lambda m, x: F.batch_norm(x, None, None, training=True),
    "a stride across samples": _strided,
    "a gradient that joins the samples": _grad_penalty,
    "a branch on a sum": lambda m, x: torch.tanh(x) if x.sum() < 1e9 else x,
    "a branch on a comparison": lambda m, x: torch.tanh(x) if bool((x < 1e5).all()) else x,
    "a branch on equality": lambda m, x: torch.tanh(x) if not torch.equal(x, torch.ones_like(x)) else x,
    "a branch on closeness": lambda m, x: torch.tanh(x) if not torch.allclose(x, torch.zeros_like(x)) else 2 * x,
    "a loop by values": lambda m, x: [x := torch.tanh(x) for _ in range(int(x.abs().max()) % 3 + 1)][-1],
    "a list of its numbers": lambda m, x: torch.tanh(x) * (1.0 if max(x.flatten().tolist()) < 1e5 else 2.0),
    "a number of its own": lambda m, x: torch.tanh(x) * (1.0 if x[0, 0].item() < 1e5 else 2.0),
    "a hash of its numbers": lambda m, x: torch.tanh(x) * (1.0 if hash(tuple(x[0].tolist())) % 1000 else 2.0),
    "a jump far away": lambda m, x: torch.where(x > 1e6, 0.0, torch.tanh(x)),
    "a jump by a mask": lambda m, x: torch.tanh(x) * (x < 1e6),
    "a jump by masked_fill": lambda m, x: torch.tanh(x).masked_fill(x > 1e6, 0.0),
    "a jump by an index": lambda m, x: torch.tanh(m.table[(x > 1e6).long()[0]]),
    "a jump by a sign": lambda m, x: torch.tanh(x) + 1e-9 * torch.sign(x - 1e5),
    "a jump by heaviside": lambda m, x: x * torch.heaviside(x - 1e5, torch.zeros(())),
    "a jump by a floor": lambda m, x: torch.tanh(x) + (x * 1e-7).floor(),
    "a jump by a remainder": lambda m, x: torch.tanh(x % 1e6),
    "a jump by a cast": lambda m, x: torch.tanh(x) + (x * 1e-7).int(),
    "a jump by a threshold": lambda m, x: F.threshold(torch.tanh(x), 0.99999, 0.0),
    "a jump by hardshrink": lambda m, x: F.hardshrink(x, 1e-9),
    "a jump in a function of its own": lambda m, x: _Wrong.apply(x),
    "a jump by the largest": lambda m, x: F.one_hot(x.argmax(1), 4).float() * 1e-9 + x,
    "a jump by sorting": lambda m, x: torch.gather(x, 1, x.argsort(1)),
    "a jump by topk": lambda m, x: x * torch.zeros_like(x).scatter(1, x.topk(2, 1)[1], 1.0),
    "rounding to half and back": lambda m, x: torch.tanh(x).half().float(),
    "rounding to float32 and back": lambda m, x: torch.tanh(x.double().float().bfloat16().to(x.dtype)),
    "rounding of a weight": lambda m, x: torch.tanh(x) * m.a.weight[0].half().float(),
    "straight through a rounding": _straight_through,
    "quantisation": lambda m, x: torch.fake_quantize_per_tensor_affine(x, 1e-6, 0, -(10**9), 10**9),
    "NaN beyond a size": lambda m, x: torch.tanh(x) + 0 * torch.sqrt(50 - x),
    "clamping that fails on NaN": lambda m, x: torch.nan_to_num(x, nan=1.0, posinf=2.0),
    "a memory that is never written": lambda m, x: torch.tanh(x) + 0.0 * torch.empty(4),
    "a bernoulli mask": lambda m, x: x * torch.bernoulli(torch.full((4,), 0.999999)),
    "dropout": lambda m, x: F.dropout(x, 1e-9),
    "dropout of channels": lambda m, x: F.dropout1d(x[:, :, None], 1e-9)[..., 0],
    "torch's chance": lambda m, x: x + 1e-12 * torch.rand(4),
    "chance like the input": lambda m, x: x + 1e-12 * torch.randn_like(x),
    "chance of a generator": lambda m, x: x + 1e-12 * torch.rand(4, generator=torch.Generator().manual_seed(1)),
    "python's chance": lambda m, x: x * (1 + 1e-15 * random.random()),
    "numpy's chance": lambda m, x: x * (1 + 1e-15 * float(np.random.rand())),
    "a permutation by chance": lambda m, x: x[:, torch.randperm(4)],
    "a shuffled mean": lambda m, x: x + 0 * torch.multinomial(torch.ones(4), 2).sum(),
    "randomised leaky ReLU": lambda m, x: F.rrelu(x, training=True),
    "gumbel softmax": lambda m, x: F.gumbel_softmax(x),
    "a training flag of its own": lambda m, x: F.dropout(x, 0.5, training=not m.training),
    "in place on the input": _in_place_on_the_input,
    "in place far from the kink": _shared_view,
    "a buffer that takes a value": lambda m, x: torch.tanh(m.buffer.copy_(x[0]) + x),
    "a parameter that is overwritten": lambda m, x: torch.tanh(x) * m.a.weight.data.mul_(1.01)[0],
    "an out argument": lambda m, x: torch.sin(x, out=m.buffer),
    "a complex detour": lambda m, x: torch.fft.ifft(torch.fft.fft(x)).real,
    "an integer detour": lambda m, x: x.view(torch.int32).view(torch.float32),
}

UNSEEN: dict[str, tuple[Forward, str]] = {
    "the clock": (lambda m, x: torch.tanh(x) * (1 if time.time() < 4e9 else 2), "a clock"),
    "the environment": (_environment, "what lies outside of the program"),
    "a counter in thread-local memory": (_thread_local, "a counter where nothing can look"),
    "a generator of long period": (lambda m, x: torch.tanh(x) * (2 if next(_GENERATOR) > 900 else 1), "a long period"),
    "a batch beyond all that are tried": (lambda m, x: torch.tanh(x) * (2 if len(x) > 1000 else 1), "its batch"),
}


def _rebound(m: Function, x: Tensor) -> Tensor:
    x = x + 0
    x += 1
    return torch.tanh(x)


def _temporary_attribute(m: Function, x: Tensor) -> Tensor:
    m.hidden = None
    return torch.tanh(m.a(x))


def _asserts(m: Function, x: Tensor) -> Tensor:
    assert x.dim() == 2 and x.is_floating_point() and not x.is_complex() and x.shape[1] == 4
    return torch.tanh(m.a(x))


def _no_grad(m: Function, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = m.a.weight.norm()
    return torch.tanh(m.a(x)) / scale


def _cumulated_by_hand(m: Function, x: Tensor) -> Tensor:
    parts = [x[:, 0]]
    for k in range(1, x.shape[1]):
        parts.append(parts[-1] + x[:, k])
    return torch.stack(parts, 1)


HARMLESS: dict[str, Forward] = {
    "in place on a copy": _rebound,
    "an attribute that is always None": _temporary_attribute,
    "asserts on shapes and types": _asserts,
    "a norm of weights without gradients": _no_grad,
    "a sum in a loop": _cumulated_by_hand,
    "the batch in a view": lambda m, x: torch.tanh(m.a(x.view(len(x), 2, 2).flatten(1))),
    "the batch times one": lambda m, x: torch.tanh(x.reshape(x.shape[0] * 1, -1)),
    "the batch divided by itself": lambda m, x: torch.tanh(x) * (len(x) // len(x)),
    "zeros for each sample": lambda m, x: torch.tanh(m.a(x) + torch.zeros(len(x), 4)),
    "ones like the input": lambda m, x: torch.tanh(x) + torch.ones_like(x),
    "a constant for every sample": lambda m, x: torch.cat([x, m.buffer.expand(len(x), 4)], 1),
    "the batch moved to the end and back": lambda m, x: torch.tanh(m.a(x.T.T)),
    "a mask that is constant": lambda m, x: torch.where(torch.tensor([True, False, True, True]), torch.tanh(x), x),
    "a cast to its own dtype": lambda m, x: torch.tanh(m.a(x.to(m.a.weight.dtype))),
    "a cast to a wider dtype": lambda m, x: torch.tanh(x.double()).to(x.dtype),
    "dropout in eval mode": lambda m, x: F.dropout(torch.tanh(x), 0.5, training=m.training),
    "a seed that it puts back": lambda m, x: torch.tanh(x) * (1 if torch.initial_seed() is not None else 2),
    "a try around what works": lambda m, x: _tried(x),
    "a relu by a jump": lambda m, x: x * (x > 0),
    "an ELU by where": lambda m, x: torch.where(x > 0, x, torch.exp(x) - 1),
    "a view that is overwritten whole": lambda m, x: torch.zeros(len(x), 4).copy_(torch.tanh(x)),
    "a value that is not used": lambda m, x: (x.mean(), x.argmax(), torch.tanh(x))[2],
    "a comparison that is not used": lambda m, x: (x > 0, torch.tanh(x))[1],
    "a name with _ at its end": lambda m, x: torch.tanh(x).clone().mul_(2).add_(1),
    "a sum over samples of one": lambda m, x: torch.tanh(x.unsqueeze(0).sum(0)),
    "a product with its own size": lambda m, x: torch.tanh(x) * math.sqrt(x.shape[1]),
}


def _tried(x: Tensor) -> Tensor:
    try:
        return torch.tanh(x)
    except RuntimeError:
        return x
