"""What is not recognised is refused, with the path, the type and the remedy; what changes is found out."""

import inspect
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import curvcert
from curvcert.activations import RELU, declare_activation, register_activation
from curvcert.errors import CurvcertError, InvalidInput, SoundnessError, UnsupportedModule
from curvcert.network import lower
from curvcert.network.lowering import Value
from tests.network.cases import Function, mlp

VECTOR, IMAGE = (4,), (2, 6, 6)


def refuse(model: nn.Module, shape: tuple[int, ...], error: type[CurvcertError], *says: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(error) as caught:
        curvcert.trace(model.eval(), torch.randn(2, *shape))
    for word in says:
        assert word in str(caught.value)


# Modules without a rule, with the words that the message must hold.
UNKNOWN: dict[str, tuple[nn.Module, tuple[int, ...], tuple[str, ...]]] = {
    "LSTM": (nn.LSTM(4, 3), (5, 4), ("LSTM", "Conv1d")),
    "ConvTranspose3d": (
        nn.ConvTranspose3d(2, 1, 3),
        (2, 6, 6, 6),
        ("ConvTranspose3d", "lower.register", "register_activation"),
    ),
    "Threshold": (nn.Threshold(0.1, 20), VECTOR, ("Threshold", "jumps")),
    "Conv3d": (nn.Conv3d(2, 1, 3), (2, 4, 4, 4), ("Conv3d",)),
    "MaxPool3d": (nn.MaxPool3d(2), (2, 4, 4, 4), ("MaxPool3d",)),
    "AdaptiveMaxPool2d": (nn.AdaptiveMaxPool2d(1), IMAGE, ("AdaptiveMaxPool2d",)),
    "SyncBatchNorm": (nn.SyncBatchNorm(2), IMAGE, ("SyncBatchNorm",)),
    "Embedding": (nn.Embedding(3, 2), VECTOR, ("Embedding",)),
    "weight norm": (parametrizations.weight_norm(nn.Linear(4, 3)), VECTOR, ("ParametrizedLinear", "remove_param")),
    "spectral norm": (parametrizations.spectral_norm(nn.Linear(4, 3)), VECTOR, ("ParametrizedLinear", "remove_param")),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_modules_are_named_with_their_path(name: str) -> None:
    module, shape, says = UNKNOWN[name]
    refuse(nn.Sequential(nn.Identity(), nn.Sequential(module)), shape, UnsupportedModule, "1.0", *says)


def test_removed_parametrisations_are_accepted() -> None:
    layer = parametrizations.weight_norm(nn.Linear(4, 3))
    parametrize.remove_parametrizations(layer, "weight")
    net = curvcert.trace(nn.Sequential(layer).eval(), torch.zeros(1, 4))
    x = torch.randn(3, 4)
    assert torch.allclose(net(x).float(), layer(x), atol=1e-6)


class OtherForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 1e9, 0.0, super().forward(x))


class OtherCall(nn.Tanh):
    def __call__(self, x: Tensor) -> Tensor:
        return torch.where(x > 1e9, 0.0, torch.tanh(x))


class OtherActivation(nn.Tanh):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x).round(decimals=9)


def _own_forward() -> nn.Module:
    layer = nn.Tanh()
    layer.forward = lambda x: torch.tanh(x).clamp(-0.999999, 0.999999)  # type: ignore[method-assign]
    return nn.Sequential(layer)


def _hooked(pre: bool, root: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    part = model if root else model[1]
    if pre:
        part.register_forward_pre_hook(lambda m, args: (args[0].clamp(max=1e3),))
    else:
        part.register_forward_hook(lambda m, args, y: y.clamp(max=0.9999999))
    return model


def _pruned() -> nn.Module:
    return nn.Sequential(prune.l1_unstructured(nn.Linear(4, 3), "weight", 0.5))


IMPOSTORS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "forward on the object": (_own_forward, "0: this Tanh"),
    "subclass with its own __call__": (lambda: nn.Sequential(OtherCall()), "0: this OtherCall"),
    "subclass of an activation": (lambda: nn.Sequential(OtherActivation()), "0.round"),
    "subclass of Linear": (lambda: nn.Sequential(OtherForward(4, 3)), "0."),
    "hook": (lambda: _hooked(pre=False, root=False), "1: Tanh has a forward hook"),
    "pre-hook": (lambda: _hooked(pre=True, root=False), "1: Tanh has a forward hook"),
    "hook on the root": (lambda: _hooked(pre=False, root=True), "Sequential: Sequential has a forward hook"),
    "pre-hook on the root": (lambda: _hooked(pre=True, root=True), "forward hook"),
    "old weight norm": (lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 3))), "remove"),
    "old spectral norm": (lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 3))), "remove"),
    "pruned": (_pruned, "remove"),
    "script": (lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 3))), "TorchScript"),
    "compiled": (lambda: torch.compile(nn.Sequential(nn.Linear(4, 3))), "torch.compile"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning", "ignore:.*jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", IMPOSTORS)
def test_modules_that_do_more_than_their_class_says(name: str) -> None:
    make, says = IMPOSTORS[name]
    refuse(make(), VECTOR, UnsupportedModule, says)


def _aliased_view(m: Function, x: Tensor) -> Tensor:
    u = m.a(x)
    v = u.view(-1, 4)
    v.add_(1)
    return torch.tanh(u)


def _aliased_identity(m: Function, x: Tensor) -> Tensor:
    u = m.a(x)
    return torch.relu(u) + m.in_place(m.identity(u))


def _result_unused(m: Function, x: Tensor) -> Tensor:
    u = m.a(x)
    u.mul_(2)
    return torch.tanh(u)


def _relu_with_skip(m: Function, x: Tensor) -> Tensor:
    u = m.a(x)
    return m.in_place(u) + u


def _functional_relu_with_skip(m: Function, x: Tensor) -> Tensor:
    u = m.a(x)
    return F.relu(u, 1) + u  # type: ignore[arg-type]


def _iadd_with_skip(m: Function, x: Tensor) -> Tensor:
    u = m.a(x)
    v = u
    v += 1
    return torch.relu(-u) + 0 * v


def _overwrites_a_buffer(m: Function, x: Tensor) -> Tensor:
    return torch.tanh(m.buffer.add_(x) + x)


IN_PLACE = {
    "inplace module with a skip": _relu_with_skip,
    "inplace function with a skip": _functional_relu_with_skip,
    "method whose result is not used": _result_unused,
    "through a view": _aliased_view,
    "through an identity": _aliased_identity,
    "+= with a skip": _iadd_with_skip,
    "of a buffer": _overwrites_a_buffer,
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_operations_on_what_is_used_again(name: str) -> None:
    parts = {"a": nn.Linear(4, 4), "in_place": nn.ReLU(inplace=True), "identity": nn.Identity()}
    # Far from the kink, where samples cannot tell the difference.
    nn.init.constant_(parts["a"].bias, 1e6)
    refuse(Function(IN_PLACE[name], **parts, buffer=torch.zeros(4)), VECTOR, UnsupportedModule)


def _branching(m: Function, x: Tensor) -> Tensor:
    return torch.tanh(x) if x.sum() > 1e9 else x


def _loop(m: Function, x: Tensor) -> Tensor:
    for row in x:
        x = x + row
    return x


def _overwritten(x: Tensor) -> Tensor:
    y = 2 * x
    y[:, 0] = 1
    return y


GRAPHS: dict[str, tuple[Callable[[Function, Tensor], object], str]] = {
    "batch mean": (lambda m, x: x - x.mean(0), "dimension 0 is the batch"),
    "mean of everything": (lambda m, x: x.mean(), "joins all samples"),
    "mean of nothing there": (lambda m, x: x.mean(2), "no dimension 2"),
    "mean over one dimension twice": (lambda m, x: x[:, None].mean((1, -2)), "twice"),
    "mean in another type": (lambda m, x: x.mean(1, True, dtype=torch.float32), "mean"),
    "sum to one number": (lambda m, x: torch.sum(x, 1), "without a dimension"),
    "cumsum over the batch": (lambda m, x: x.cumsum(0), "dimension 0 is the batch"),
    "roll of the batch": (lambda m, x: x.roll(1, 0), "dimension 0 is the batch"),
    "roll of everything": (lambda m, x: x.roll(1), "other samples"),
    "repeat of the batch": (lambda m, x: x.repeat(2, 1), "leave the batch"),
    "repeat into a new dimension": (lambda m, x: x.repeat(1, 1, 2), "leave the batch"),
    "expand of the batch": (lambda m, x: x[:, :1].expand(2, 4), "keep the batch"),
    "expand of several": (lambda m, x: x.expand(-1, 8), "cannot expand"),
    "matrix over the batch": (lambda m, x: m.a.weight[:2, :2] @ x, "mixes the samples"),
    "matrix that does not fit": (lambda m, x: x @ m.c.weight, "expects 1 features"),
    "einsum of values": (lambda m, x: torch.einsum("bi,bi->b", x, x), "einsum"),
    "einsum over the batch": (lambda m, x: torch.einsum("bi,ab->ai", x, torch.ones(2, 2)), "along one dimension"),
    "einsum that sums more": (lambda m, x: torch.einsum("bij,jk->bk", x[:, None], m.a.weight), "drops or repeats"),
    "einsum that repeats": (lambda m, x: torch.einsum("bi,ii->bi", x, m.a.weight), "along one dimension"),
    "einsum without a target": (lambda m, x: torch.einsum("bi,ij", x, m.a.weight), "with '->'"),
    "several matrices": (lambda m, x: x[:, None] @ torch.ones(2, 4, 4), "constant real matrix"),
    "index out of a list": (lambda m, x: x[:, [0, 4]], "entries of dimension 1"),
    "index by two lists": (lambda m, x: x[:, None][:, [0], [1]], "step by step"),
    "index by reals": (lambda m, x: x[:, torch.ones(2)], "one constant list"),
    "mask that does not fit": (lambda m, x: x[:, torch.ones(3, dtype=torch.bool)], "a mask of 3"),
    "choice of samples": (lambda m, x: x.index_select(0, torch.tensor([0])), "dimension 0 is the batch"),
    "weights by chance": (lambda m, x: x * torch.bernoulli(m.a.weight[0]), "bernoulli"),
    "weights that change": (lambda m, x: x * m.a.weight[0].add_(1), "add_"),
    "a part of a weight in place": (lambda m, x: m.a.weight.t().add_(x[:, None]), "overwrites"),
    "clamp by a value": (lambda m, x: x.clamp(m.a(x), 100), "clamp"),
    "clamp by a tensor": (lambda m, x: x.clamp(m.buffer, 100), "one constant number"),
    "clamp to nothing": (lambda m, x: x.clamp(2, 1), "lower < upper"),
    "no clamp": (lambda m, x: x.clamp(), "a lower or an upper limit"),
    "slopes from the input": (lambda m, x: F.prelu(x, x[0, :1]), "dimension 0"),
    "where": (lambda m, x: torch.where(x > 1e6, 0.0, x), "gt"),
    "index of a sample": (lambda m, x: x[0], "dimension 0 is the batch"),
    "slice of the batch": (lambda m, x: x[:1] + x, "dimension 0 is the batch"),
    "index by a value": (lambda m, x: x[:, x], "getitem"),
    "index by the batch": (lambda m, x: x[:, : x.shape[0]], "ends are not whole numbers"),
    "index out of range": (lambda m, x: x[:, 4], "no entry 4"),
    "empty slice": (lambda m, x: x[:, 3:2], "nothing is left"),
    "too many indices": (lambda m, x: x[:, 0:1, 0], "no dimension 2"),
    "two ellipses": (lambda m, x: x[..., 0:1, ...], "one ellipsis"),
    "one number for each sample": (lambda m, x: x[:, 0], "without a dimension"),
    "concatenation along the batch": (lambda m, x: torch.cat([x, x]), "dimension 0 is the batch"),
    "concatenation with a constant": (lambda m, x: torch.cat([x, m.a.weight], 1), "joining values with constants"),
    "concatenation that does not fit": (lambda m, x: torch.cat([x, x[:, None]], 1), "cannot be joined"),
    "concatenation into a buffer": (lambda m, x: torch.cat([x, x], 1, out=m.buffer), "cat"),
    "stack along the batch": (lambda m, x: torch.stack([x, x]), "dimension 0 is the batch"),
    "flip of the batch": (lambda m, x: x.flip(0), "dimension 0 is the batch"),
    "transpose of the batch": (lambda m, x: x.transpose(0, 1), "dimension 0 is the batch"),
    "permutation of the batch": (lambda m, x: x.permute(1, 0), "moves the batch"),
    "permutation that is none": (lambda m, x: x.permute(0, 0), "no order"),
    "split of the batch": (lambda m, x: x.split(1)[0], "dimension 0 is the batch"),
    "split that does not fit": (lambda m, x: x.split([1, 2], 1)[0], "do not make up"),
    "no chunks": (lambda m, x: x.chunk(0, 1)[0], "at least 1"),
    "narrow beyond the end": (lambda m, x: x.narrow(1, 2, 3), "do not fit"),
    "padding of the batch": (lambda m, x: F.pad(x, (0, 0, 1, 1)), "last dimensions"),
    "padding by one number": (lambda m, x: F.pad(x, (1,)), "last dimensions"),
    "cropping everything": (lambda m, x: F.pad(x, (-2, -2)), "nothing is left"),
    "squeeze of whatever": (lambda m, x: x[:, None].squeeze(), "Name it"),
    "write into a part": (lambda m, x: _overwritten(x), "cannot be recorded"),
    "in place on a part": (lambda m, x: x[:, :2].add_(1).tanh() + x[:, 2:], "overwrites"),
    "in place on a chunk": (lambda m, x: (lambda parts: parts[0].add_(1) + parts[1])(x.chunk(2, 1)), "overwrites"),
    "wide reflection": (lambda m, x: F.pad(x[:, None], (4, 1), mode="reflect"), "a border of 4 is wider"),
    "unknown padding": (lambda m, x: F.pad(x[:, None], (1, 1), mode="symmetric"), "padding mode 'symmetric'"),
    "bicubic": (lambda m, x: F.interpolate(x.view(-1, 1, 2, 2), scale_factor=2, mode="bicubic"), "'bicubic'"),
    "interpolation of vectors": (lambda m, x: F.interpolate(x, 8), "shape (4,)"),
    "interpolation without a size": (lambda m, x: F.interpolate(x[:, None]), "a scale factor"),
    "shuffle that does not fit": (lambda m, x: F.pixel_shuffle(x.view(-1, 1, 2, 2), 2), "cannot be shuffled"),
    "batch norm in training": (lambda m, x: F.batch_norm(x, m.buffer, m.buffer, training=True), "other samples"),
    "conv2d that does not fit": (lambda m, x: F.conv2d(x.view(-1, 1, 2, 2), torch.ones(1, 2, 1, 1)), "conv2d: Conv2d"),
    "cast": (lambda m, x: x.float(), "float"),
    "sum with a factor": (lambda m, x: torch.add(x, x, alpha=2), "add"),
    "rounded division": (lambda m, x: torch.div(x, 2, rounding_mode="floor"), "div"),
    "out argument": (lambda m, x: torch.sin(x, out=m.buffer), "sin"),
    "dropout in eval": (lambda m, x: F.dropout(x, 1e-9), "training=self.training"),
    "dropout by position": (lambda m, x: F.dropout(x, 1e-9, True), "training=self.training"),
    "random shape": (lambda m, x: x + torch.rand(x.shape[1]), "rand"),
    "computing with the batch": (lambda m, x: x / (x.shape[0] + 1), "size of the batch"),
    "scaling by the batch": (lambda m, x: x / x.shape[0], "constant real number"),
    "flatten everything": (lambda m, x: x.flatten(), "flatten(x, 1)"),
    "flatten the batch": (lambda m, x: torch.flatten(x, end_dim=1), "flatten(x, 1)"),
    "view that drops the batch": (lambda m, x: x.view(-1), "cannot reshape"),
    "view that mixes samples": (lambda m, x: x.view(-1, 2), "cannot reshape"),
    "view of a fixed batch": (lambda m, x: x.view(2, 4), "keep the batch"),
    "view with the batch last": (lambda m, x: x.view(4, x.shape[0]), "keep the batch"),
    "view in two unknowns": (lambda m, x: x.view(x.size(0), -1, -1), "cannot reshape"),
    "view with a zero": (lambda m, x: x.view(x.size(0), 0, -1), "cannot reshape"),
    "size out of range": (lambda m, x: x / x.size(7), "size"),
    "constant too large": (lambda m, x: x + torch.ones(3, 1, 4), "does not fit"),
    "constant for each sample": (lambda m, x: x + torch.ones(2, 4), "does not fit"),
    "sum of shapes": (lambda m, x: x + m.c(x), "a sum of shapes"),
    "complex constant": (lambda m, x: x * 1j, "constant real number"),
    "complex tensor": (lambda m, x: x * torch.tensor(1j), "constant real number"),
    "NaN constant": (lambda m, x: x * float("nan"), "NaN"),
    "division by zero": (lambda m, x: x / 0.0, "division by zero"),
    "tuple output": (lambda m, x: (x, m.a(x)), "one tensor"),
    "dict output": (lambda m, x: {"y": x}, "one tensor"),
    "no output": (lambda m, x: None, "one tensor"),
    "constant output": (lambda m, x: m.a.weight, "one tensor"),
    "shape output": (lambda m, x: x.shape, "one tensor"),
    "module on a constant": (lambda m, x: m.a(m.buffer) + x, ""),
    "branch on the input": (_branching, "cannot be recorded"),
    "loop over the batch": (_loop, "cannot be recorded"),
    "length of the batch": (lambda m, x: x.view(len(x), -1), "cannot be recorded"),
    "error inside": (lambda m, x: m.missing(x), "cannot be recorded"),
    "beta from the input": (lambda m, x: F.softplus(x, beta=x), "softplus"),
    "wrong argument": (lambda m, x: F.hardtanh(x, 1.0, -1.0), "hardtanh"),
    "softplus that jumps": (lambda m, x: F.softplus(x, 1, 1.0), "threshold of 20"),
    "trilu": (lambda m, x: torch.tril(x), "tril"),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_that_are_no_block(name: str) -> None:
    forward, says = GRAPHS[name]
    model = Function(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 1), buffer=torch.zeros(4))
    with pytest.raises((UnsupportedModule, InvalidInput)) as caught:
        curvcert.trace(model.eval(), torch.randn(2, 4))
    assert says in str(caught.value)


REMEDIES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attention": (lambda: nn.MultiheadAttention(4, 2), "matrix products"),
    "lstm": (lambda: nn.LSTM(4, 3), "Conv1d"),
    "unknown": (lambda: Function(lambda m, x: torch.fft.fft(x)), "fft_fft is unknown to curvcert"),
    "arguments": (lambda: Function(lambda m, x: torch.cumsum(x, 1, dtype=torch.float64)), "with these arguments"),
    "jump": (lambda: Function(lambda m, x: x.sign()), "no Lipschitz constant"),
    "order": (lambda: Function(lambda m, x: x.max(dim=1)[0]), "MaxPool1d"),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_what_is_not_covered_has_its_own_remedy(name: str) -> None:
    make, says = REMEDIES[name]
    refuse(make(), VECTOR, UnsupportedModule, says)


def test_a_call_is_named_with_the_line_that_it_stands_in() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Function(lambda m, x: torch.relu(x) * torch.erf(x).floor()))
    line = inspect.currentframe().f_lineno - 1
    refuse(model, VECTOR, UnsupportedModule, "floor", f"(test_refusals.py, line {line})")
    refuse(Function(lambda m, x: 1 + x[:, 7]), VECTOR, InvalidInput, f"(test_refusals.py, line {line + 3})")


def test_a_missing_batch_dimension_is_seen() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(24, 3)).eval()
    with pytest.raises(InvalidInput, match="is the batch dimension missing"):
        curvcert.trace(model, torch.zeros(4, 6))
    with pytest.raises(InvalidInput, match=r"expects 24 features, got shape \(7,\)\.$"):
        curvcert.trace(model, torch.zeros(4, 7))


def test_a_call_inside_a_submodule_is_named_with_its_path() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), Function(lambda m, x: x.sign()))
    refuse(nn.Sequential(nn.Identity(), inner), VECTOR, UnsupportedModule, "1.1.sign", "(in a Function)")


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class StarInputs(nn.Module):
    def forward(self, *x: Tensor) -> Tensor:
        return x[0]


@pytest.mark.parametrize("model", [TwoInputs(), StarInputs()], ids=["two", "star"])
def test_several_inputs(model: nn.Module) -> None:
    refuse(model, VECTOR, UnsupportedModule, type(model).__name__, "only one tensor is supported")


def test_a_module_called_with_two_arguments() -> None:
    refuse(Function(lambda m, x: m.a(x, x), a=nn.Bilinear(4, 4, 3)), VECTOR, UnsupportedModule, "a: Bilinear", "2 arg")


OPTIONS: dict[str, tuple[nn.Module, tuple[int, ...], type[CurvcertError], str]] = {
    "average pool border": (nn.AvgPool2d(2, padding=2), IMAGE, InvalidInput, "cannot have a border"),
    "average pool divisor": (nn.AvgPool2d(2, divisor_override=0), IMAGE, InvalidInput, "divisor_override"),
    "adaptive size": (nn.AdaptiveAvgPool2d(0), IMAGE, InvalidInput, "positive"),
    "output padding": (
        nn.ConvTranspose2d(2, 1, 3, output_padding=1, dilation=2),
        IMAGE,
        UnsupportedModule,
        "Pad behind",
    ),
    "transposed channels": (nn.ConvTranspose2d(3, 1, 3), IMAGE, InvalidInput, "expected 3 channels"),
    "linear on images": (nn.Linear(5, 2), IMAGE, InvalidInput, "expects 5 features"),
    "signals as images": (nn.Conv1d(2, 1, 3), IMAGE, InvalidInput, "(channels, length)"),
    "max ceil mode": (nn.MaxPool2d(2, ceil_mode=True), IMAGE, UnsupportedModule, "defaults"),
    "max dilation": (nn.MaxPool2d(2, dilation=2), IMAGE, UnsupportedModule, "defaults"),
    "max indices": (nn.MaxPool2d(2, return_indices=True), IMAGE, UnsupportedModule, "defaults"),
    "max pooling of vectors": (nn.MaxPool2d(2), (6, 6), InvalidInput, "batch dimension"),
    "average pooling of vectors": (nn.AvgPool2d(2), (6, 6), InvalidInput, "batch dimension"),
    "max pool too large": (nn.MaxPool2d(7), IMAGE, InvalidInput, "does not fit"),
    "average pool too large": (nn.AvgPool2d(7), IMAGE, InvalidInput, "does not fit"),
    "max padding": (nn.MaxPool2d(2, padding=2), IMAGE, InvalidInput, "The module itself fails"),
    "no statistics": (nn.BatchNorm2d(2, track_running_stats=False), IMAGE, UnsupportedModule, "track_running_stats"),
    "batch norm features": (nn.BatchNorm1d(1), VECTOR, InvalidInput, "expects 1 channels"),
    "batch norm dimensions": (nn.BatchNorm2d(4), VECTOR, InvalidInput, "got shape (4,)"),
    "batch norm 1d on images": (nn.BatchNorm1d(2), IMAGE, InvalidInput, "got shape (2, 6, 6)"),
    "linear features": (nn.Linear(5, 2), VECTOR, InvalidInput, "expects 5 features"),
    "conv channels": (nn.Conv2d(3, 1, 3), IMAGE, InvalidInput, "(3, height, width)"),
    "conv on a vector": (nn.Conv2d(3, 1, 3), VECTOR, InvalidInput, "batch dimension"),
    "conv too large": (nn.Conv2d(2, 1, 7), IMAGE, InvalidInput, "does not fit"),
    "flatten the batch": (nn.Flatten(0), IMAGE, UnsupportedModule, "Keep the batch"),
    "unflatten the batch": (nn.Unflatten(0, (1, 2)), VECTOR, UnsupportedModule, "dimension 0 is the batch"),
    "unflatten wrongly": (nn.Unflatten(1, (3, 2)), VECTOR, InvalidInput, "cannot unflatten"),
    "softplus threshold": (nn.Softplus(threshold=1.0), VECTOR, UnsupportedModule, "threshold of 20"),
    "lazy": (nn.LazyLinear(3), VECTOR, InvalidInput, "no values yet"),
    "meta": (nn.Linear(4, 3, device="meta"), VECTOR, InvalidInput, "no values yet"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("name", OPTIONS)
def test_options_and_shapes(name: str) -> None:
    module, shape, error, says = OPTIONS[name]
    refuse(nn.Sequential(nn.Identity(), module), shape, error, says)


def test_train_mode_names_the_module() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Dropout())).eval()
    model[1][0].train()
    with pytest.raises(InvalidInput, match=r"1\.0 is in train mode.*model\.eval\(\)"):
        curvcert.trace(model, torch.zeros(1, 4))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["weight", "bias", "running_var", "buffer"])
def test_weights_that_are_not_finite(where: str, value: float) -> None:
    model = nn.Sequential(
        nn.Linear(4, 3), nn.BatchNorm1d(3), Function(lambda m, x: x + m.buffer, buffer=torch.zeros(3))
    )
    with torch.no_grad():
        next(t for name, t in model.state_dict().items() if name.endswith(where))[0] = value
    refuse(model, VECTOR, InvalidInput, where, "NaN or infinity")


def test_complex_weights() -> None:
    refuse(nn.Linear(4, 3, dtype=torch.complex64), VECTOR, InvalidInput, "weight is complex", "real networks")


EXAMPLES: dict[str, tuple[object, str]] = {
    "no tensor": ([[1.0]], "is a tensor, got list"),
    "no batch": (torch.zeros(4), r"x\[None\]"),
    "empty batch": (torch.zeros(0, 4), "empty batch"),
    "no features": (torch.zeros(2, 0), "empty batch"),
    "integers": (torch.zeros(1, 4, dtype=torch.int64), r"x\.float\(\)"),
    "booleans": (torch.zeros(1, 4, dtype=torch.bool), "floating-point"),
    "complex": (torch.zeros(1, 4, dtype=torch.complex64), "floating-point"),
    "NaN": (torch.full((1, 4), float("nan")), "finite"),
    "no values": (torch.zeros(1, 4, device="meta"), "without values"),
    "too many features": (torch.zeros(1, 5), "expects 4 features"),
    "an image": (torch.zeros(1, 1, 2, 2), "expects 4 features"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_bad_examples(name: str) -> None:
    example, says = EXAMPLES[name]
    with pytest.raises(InvalidInput, match=says):
        curvcert.trace(mlp(nn.Tanh()).eval(), example)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [n for n in EXAMPLES if n not in ("no batch", "no values", "too many features")])
def test_bad_batches(name: str) -> None:
    net = curvcert.trace(mlp(nn.Tanh()).eval(), torch.zeros(1, 4))
    with pytest.raises(InvalidInput, match="Expected"):
        net(EXAMPLES[name][0])  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="Expected"):
        net.jacobian(EXAMPLES[name][0])  # type: ignore[arg-type]


def test_not_a_module() -> None:
    with pytest.raises(InvalidInput, match=r"Expected an nn\.Module, got function"):
        curvcert.trace(lambda x: x, torch.zeros(1, 4))  # type: ignore[arg-type]


def _random_now_and_then(m: Function, x: Tensor) -> Tensor:
    return x + 1e-3 * torch.rand(4)


def _counts_in_python(m: Function, x: Tensor) -> Tensor:
    m.calls += 1
    return torch.tanh(x)


def _counts_in_a_buffer(m: Function, x: Tensor) -> Tensor:
    m.buffer += 1
    return torch.tanh(x)


def _counts_behind_autograd(m: Function, x: Tensor) -> Tensor:
    m.buffer.data.add_(1)
    return torch.tanh(x)


def _moving_average(m: Function, x: Tensor) -> Tensor:
    m.buffer.mul_(0.9).add_(0.1)
    return torch.tanh(x - m.buffer)


def _new_attribute(m: Function, x: Tensor) -> Tensor:
    m.last = random.random()
    return torch.tanh(x)


CHANGING = [
    _random_now_and_then,
    _counts_in_python,
    _counts_in_a_buffer,
    _counts_behind_autograd,
    _moving_average,
    _new_attribute,
]


@pytest.mark.parametrize("forward", CHANGING, ids=lambda f: f.__name__)
def test_modules_that_change_from_call_to_call(forward: Callable[[Function, Tensor], Tensor]) -> None:
    model = Function(forward, buffer=torch.zeros(4), calls=0).eval()
    state = torch.get_rng_state()
    with pytest.raises(SoundnessError, match=r"changes from call to call.*Remove its randomness or state"):
        curvcert.trace(model, torch.zeros(1, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.buffer, torch.zeros(4))
    assert model.calls == 0


class SecretlyInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu_()


register_activation(SecretlyInPlace, RELU)


def test_a_registered_module_that_overwrites_its_input_without_saying_so() -> None:
    layer = nn.Linear(4, 4)
    nn.init.constant_(layer.bias, 1e6)
    alone = Function(lambda m, x: m.phi(m.a(x)), a=layer, phi=SecretlyInPlace()).eval()
    assert curvcert.trace(alone, torch.zeros(1, 4)).out_shape == (4,)
    skip = Function(lambda m, x: (lambda u: u + m.phi(u))(m.a(x)), a=layer, phi=SecretlyInPlace())
    refuse(skip, VECTOR, UnsupportedModule, "phi: an in-place operation")


class Liar(nn.Module):
    """Its rule says that it is the identity; it is not, far away."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.abs() > 50, 2 * x, x)


@lower.register(Liar)
def _(module: Liar, value: Value, path: str) -> Value:
    return value


def test_a_wrong_rule_is_found_out_far_from_the_example() -> None:
    refuse(nn.Sequential(Liar()), VECTOR, SoundnessError, "differ by")


def test_a_wrong_rule_is_found_out_when_outputs_are_tiny() -> None:
    model = nn.Sequential(Liar(), nn.Linear(4, 3))
    with torch.no_grad():
        model[1].weight.mul_(1e-12)
        model[1].bias.zero_()
    refuse(model, VECTOR, SoundnessError, "differ by")


class Cosine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cos(x)


register_activation(Cosine, declare_activation("cosine", torch.cos, lambda z: -torch.sin(z), (-1.0, 1.0)))


def test_a_declared_activation_is_traced_with_its_assumptions() -> None:
    net = curvcert.trace(mlp(Cosine()).eval(), torch.zeros(1, 4))
    assert net.assumes == (
        "activation 'cosine': slope in [-1, 1], no curvature as declared, sampled only",
        "module Cosine: computes activation 'cosine' as registered, sampled only",
    )
    with pytest.raises(CurvcertError, match="without a curvature range"):
        net.require_smooth()


def test_a_module_that_cannot_be_copied() -> None:
    model = Function(lambda m, x: torch.tanh(x * m.scale), weight=nn.Parameter(torch.ones(4)))
    model.__dict__["scale"] = model.weight * 2
    refuse(model, VECTOR, UnsupportedModule, "cannot be copied", "buffer")


def test_network_arguments() -> None:
    net = curvcert.trace(mlp(nn.Tanh()).eval(), torch.zeros(1, 4))
    for k in (0, 3, -1):
        with pytest.raises(InvalidInput, match="A prefix has 1 to 2 blocks"):
            net.prefix(k)
    for i in (3, -4):
        with pytest.raises(InvalidInput, match="has 3 outputs"):
            net.logit(i)
    with pytest.raises(InvalidInput, match="has 3 outputs"):
        net.difference(0, 3)
    for rows in (torch.zeros(3), torch.zeros(1, 4), torch.full((1, 3), float("nan")), torch.zeros(1, 3) + 1j):
        with pytest.raises(InvalidInput, match="read-out"):
            net.read_out(rows)
    with pytest.raises(InvalidInput, match="at least two outputs"):
        net.logit(0).all_differences()


def test_a_read_out_does_not_share_memory_with_its_rows() -> None:
    net, rows = curvcert.trace(mlp(nn.Tanh()).eval(), torch.zeros(1, 4)), torch.ones(1, 3, dtype=torch.float64)
    read = net.read_out(rows)
    before = read(torch.ones(1, 4))
    rows.zero_()
    assert torch.equal(read(torch.ones(1, 4)), before)
