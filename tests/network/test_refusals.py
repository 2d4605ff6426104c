"""What is not recognised is refused, with the path, the type and the remedy; what changes is found out."""

import inspect
import random
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

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
    "Threshold": (nn.Threshold(0.1, 20), VECTOR, ("jumps",)),
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


IMPOSTORS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "forward on the object": (_own_forward, "0: this Tanh"),
    "subclass with its own __call__": (lambda: nn.Sequential(OtherCall()), "0: this OtherCall"),
    "subclass of an activation": (lambda: nn.Sequential(OtherActivation()), "0.round"),
    "subclass of Linear": (lambda: nn.Sequential(OtherForward(4, 4)), "0."),
    "script": (lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 3))), "TorchScript"),
}


@pytest.mark.filterwarnings("ignore:.*jit.*:DeprecationWarning")
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
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_operations_on_what_is_used_again(name: str) -> None:
    """They are what they compute, even where the kink is too far for samples to tell."""
    parts = {"a": nn.Linear(4, 4), "in_place": nn.ReLU(inplace=True), "identity": nn.Identity()}
    nn.init.constant_(parts["a"].bias, 1e6)
    model = Function(IN_PLACE[name], **parts, buffer=torch.zeros(4)).eval()
    x = 1e7 * torch.randn(256, 4, dtype=torch.float64)
    torch.testing.assert_close(curvcert.trace(model, torch.zeros(1, 4))(x), model.double()(x.clone()).detach())


def test_a_buffer_that_is_overwritten_with_what_depends_on_the_input() -> None:
    refuse(Function(_overwrites_a_buffer, buffer=torch.zeros(4)), VECTOR, UnsupportedModule, "a parameter or buffer")


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
    "batch mean": (lambda m, x: x - x.mean(0), "dimension 0, which holds the batch"),
    "mean of everything": (lambda m, x: x.mean(), "joins all samples"),
    "mean of nothing there": (lambda m, x: x.mean(2), "The module itself fails"),
    "mean over one dimension twice": (lambda m, x: x[:, None].mean((1, -2)), "The module itself fails"),
    "sum to one number": (lambda m, x: torch.sum(x, 1), "without a dimension"),
    "cumsum over the batch": (lambda m, x: x.cumsum(0), "dimension 0, which holds the batch"),
    "roll of the batch": (lambda m, x: x.roll(1, 0), "from one sample to another"),
    "roll of everything": (lambda m, x: x.roll(1), "from one sample to another"),
    "repeat of the batch": (lambda m, x: x.repeat(2, 1), "with the batch in dimension 0"),
    "repeat into a new dimension": (lambda m, x: x.repeat(1, 1, 2), "with the batch in dimension 1"),
    "expand of the batch": (lambda m, x: x[:, :1].expand(2, 4), "cannot be recorded"),
    "expand of several": (lambda m, x: x.expand(-1, 8), "The module itself fails"),
    "matrix over the batch": (lambda m, x: m.a.weight[:2, :2] @ x, "cannot be recorded"),
    "matrix that does not fit": (lambda m, x: x @ m.c.weight, "The module itself fails"),
    "einsum of values": (lambda m, x: torch.einsum("bi,bi->b", x, x), "Keep a dimension of size 1"),
    "einsum over the batch": (lambda m, x: torch.einsum("bi,ab->ai", x, torch.ones(2, 2)), "cannot be recorded"),
    "several matrices": (lambda m, x: x[:, None] @ torch.ones(2, 4, 4), "cannot be recorded"),
    "index out of a list": (lambda m, x: x[:, [0, 4]], "out of bounds"),
    "index by reals": (lambda m, x: x[:, torch.ones(2)], "The module itself fails"),
    "mask that does not fit": (lambda m, x: x[:, torch.ones(3, dtype=torch.bool)], "The module itself fails"),
    "choice of samples": (lambda m, x: x.index_select(0, torch.tensor([0])), "from one sample to another"),
    "weights that change": (lambda m, x: x * m.a.weight[0].add_(1), "in-place operation"),
    "a part of a weight in place": (lambda m, x: m.a.weight.t().add_(x[:, None]), "overwrites"),
    "clamp by a value": (lambda m, x: x.clamp(m.a(x), 100), "clamp"),
    "clamp by a tensor": (lambda m, x: x.clamp(m.buffer, 100), "The module itself fails"),
    "clamp to nothing": (lambda m, x: x.clamp(2, 1), "lower < upper"),
    "no clamp": (lambda m, x: x.clamp(), "The module itself fails"),
    "slopes from the input": (lambda m, x: F.prelu(x, x[0, :1]), "from one sample to another"),
    "where": (lambda m, x: torch.where(x > 1e6, 0.0, x), "gt"),
    "index of a sample": (lambda m, x: x[0], "from one sample to another"),
    "slice of the batch": (lambda m, x: x[:1] + x, "from one sample to another"),
    "index by a value": (lambda m, x: x[:, x], "used as indices"),
    "index out of range": (lambda m, x: x[:, 4], "The module itself fails"),
    "empty slice": (lambda m, x: x[:, 3:2], "depends on the input"),
    "too many indices": (lambda m, x: x[:, 0:1, 0], "The module itself fails"),
    "one number for each sample": (lambda m, x: x[:, 0], "without a dimension"),
    "concatenation along the batch": (lambda m, x: torch.cat([x, x]), "with the batch in dimension 0"),
    "concatenation with a constant": (lambda m, x: torch.cat([x, m.a.weight], 1), "The module itself fails"),
    "concatenation that does not fit": (lambda m, x: torch.cat([x, x[:, None]], 1), "The module itself fails"),
    "concatenation into a buffer": (lambda m, x: torch.cat([x, x], 1, out=m.buffer), "cat"),
    "stack along the batch": (lambda m, x: torch.stack([x, x]), "with the batch in dimension 1"),
    "flip of the batch": (lambda m, x: x.flip(0), "from one sample to another"),
    "transpose of the batch": (lambda m, x: x.transpose(0, 1), "with the batch in dimension 1"),
    "permutation of the batch": (lambda m, x: x.permute(1, 0), "with the batch in dimension 1"),
    "permutation that is none": (lambda m, x: x.permute(0, 0), "The module itself fails"),
    "split of the batch": (lambda m, x: x.split(1)[0], "from one sample to another"),
    "split that does not fit": (lambda m, x: x.split([1, 2], 1)[0], "The module itself fails"),
    "no chunks": (lambda m, x: x.chunk(0, 1)[0], "The module itself fails"),
    "narrow beyond the end": (lambda m, x: x.narrow(1, 2, 3), "The module itself fails"),
    "padding of the batch": (lambda m, x: F.pad(x, (0, 0, 1, 1)), "from one sample to another"),
    "padding by one number": (lambda m, x: F.pad(x, (1,)), "The module itself fails"),
    "cropping everything": (lambda m, x: F.pad(x, (-2, -2)), "depends on the input"),
    "wide reflection": (lambda m, x: F.pad(x[:, None], (4, 1), mode="reflect"), "The module itself fails"),
    "unknown padding": (lambda m, x: F.pad(x[:, None], (1, 1), mode="symmetric"), "The module itself fails"),
    "interpolation of vectors": (lambda m, x: F.interpolate(x, 8), "The module itself fails"),
    "interpolation without a size": (lambda m, x: F.interpolate(x[:, None]), "The module itself fails"),
    "shuffle that does not fit": (lambda m, x: F.pixel_shuffle(x.view(-1, 1, 2, 2), 2), "The module itself fails"),
    "batch norm in training": (
        lambda m, x: F.batch_norm(x, m.buffer, m.buffer, training=True),
        "training=self.training",
    ),
    "conv2d that does not fit": (
        lambda m, x: F.conv2d(x.view(-1, 1, 2, 2), torch.ones(1, 2, 1, 1)),
        "The module itself fails",
    ),
    "rounded division": (lambda m, x: torch.div(x, 2, rounding_mode="floor"), "div"),
    "out argument": (lambda m, x: torch.sin(x, out=m.buffer), "sin"),
    "computing with the batch": (lambda m, x: x / (x.shape[0] + 1), "size of the batch"),
    "scaling by the batch": (lambda m, x: x / x.shape[0], "the size of the batch"),
    "flatten everything": (lambda m, x: x.flatten(), "with the batch in dimension 0"),
    "flatten the batch": (lambda m, x: torch.flatten(x, end_dim=1), "with the batch in dimension 0"),
    "view that drops the batch": (lambda m, x: x.view(-1), "with the batch in dimension 0"),
    "view that mixes samples": (lambda m, x: x.view(-1, 2), "with the batch in dimension 0"),
    "view of a fixed batch": (lambda m, x: x.view(2, 4), "cannot be recorded"),
    "view with the batch last": (lambda m, x: x.view(4, x.shape[0]), "from one sample to another"),
    "view in two unknowns": (lambda m, x: x.view(x.size(0), -1, -1), "The module itself fails"),
    "view with a zero": (lambda m, x: x.view(x.size(0), 0, -1), "The module itself fails"),
    "size out of range": (lambda m, x: x / x.size(7), "The module itself fails"),
    "constant too large": (lambda m, x: x + torch.ones(3, 1, 4), "with the batch in dimension 1"),
    "constant for each sample": (lambda m, x: x + torch.ones(2, 4), "cannot be recorded"),
    "complex constant": (lambda m, x: x * 1j, "complex"),
    "complex tensor": (lambda m, x: x * torch.tensor(1j), "constant real number"),
    "NaN constant": (lambda m, x: x * float("nan"), "NaN"),
    "division by zero": (lambda m, x: x / 0.0, "division by zero"),
    "tuple output": (lambda m, x: (x, m.a(x)), "one tensor"),
    "no output": (lambda m, x: None, "one tensor"),
    "constant output": (lambda m, x: m.a.weight, "one tensor"),
    "shape output": (lambda m, x: x.shape, "one tensor"),
    "branch on the input": (_branching, "depends on the values of the input"),
    "loop over the batch": (_loop, "from one sample to another"),
    "error inside": (lambda m, x: m.missing(x), "missing"),
    "beta from the input": (lambda m, x: F.softplus(x, beta=x), "softplus"),
    "wrong argument": (lambda m, x: F.hardtanh(x, 1.0, -1.0), "The module itself fails"),
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


BY_CHANCE: dict[str, Callable[[Function, Tensor], object]] = {
    "weights by chance": lambda m, x: x + torch.rand(4),
    "dropout in eval": lambda m, x: F.dropout(x),
    "dropout by position": lambda m, x: F.dropout(x, 0.5, True),
    "random shape": lambda m, x: x + torch.randn_like(x),
}


@pytest.mark.parametrize("name", BY_CHANCE)
def test_modules_that_draw_are_refused(name: str) -> None:
    refuse(Function(BY_CHANCE[name]), VECTOR, SoundnessError, "random numbers")


BY_THE_BATCH: dict[str, Callable[[Function, Tensor], object]] = {
    "index by the batch": lambda m, x: x[:, : x.shape[0]],
    "squeeze of whatever": lambda m, x: x.squeeze(),
}


@pytest.mark.parametrize("name", BY_THE_BATCH)
def test_modules_that_differ_by_the_size_of_the_batch_are_refused(name: str) -> None:
    refuse(Function(BY_THE_BATCH[name]), VECTOR, SoundnessError, "for a batch of")


REMEDIES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "unknown": (lambda: Function(lambda m, x: torch.fft.fft(x)), "fft_r2c is unknown to curvcert"),
    "jump": (lambda: Function(lambda m, x: x.sign()), "no Lipschitz constant"),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_what_is_not_covered_has_its_own_remedy(name: str) -> None:
    make, says = REMEDIES[name]
    refuse(make(), VECTOR, UnsupportedModule, says)


def test_a_call_is_named_with_the_line_that_it_stands_in() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Function(lambda m, x: torch.relu(x) * torch.erf(x).floor()))
    line = inspect.currentframe().f_lineno - 1
    refuse(model, VECTOR, UnsupportedModule, "floor", f"(test_refusals.py, line {line})")
    cast = Function(lambda m, x: 1 + x.half())
    refuse(cast, VECTOR, UnsupportedModule, "rounds to torch.float16", f"(test_refusals.py, line {line + 3})")


def test_a_missing_batch_dimension_is_seen() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(24, 3)).eval()
    with pytest.raises(InvalidInput, match="is the batch dimension missing"):
        curvcert.trace(model, torch.zeros(4, 6))
    with pytest.raises(InvalidInput, match=r"1: mat1 and mat2.*its batch dimension\.$"):
        curvcert.trace(model, torch.zeros(4, 7))


def test_a_call_inside_a_submodule_is_named_with_its_path() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), Function(lambda m, x: x.sign()))
    refuse(nn.Sequential(nn.Identity(), inner), VECTOR, UnsupportedModule, "1.1.sign", ", line ")


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def test_a_missing_input() -> None:
    refuse(TwoInputs(), VECTOR, InvalidInput, "missing 1 required positional argument: 'y'")


OPTIONS: dict[str, tuple[nn.Module, tuple[int, ...], type[CurvcertError], str]] = {
    "average pool border": (nn.AvgPool2d(2, padding=2), IMAGE, InvalidInput, "The module itself fails"),
    "average pool divisor": (nn.AvgPool2d(2, divisor_override=0), IMAGE, InvalidInput, "The module itself fails"),
    "adaptive size": (nn.AdaptiveAvgPool2d(0), IMAGE, InvalidInput, "positive"),
    "output padding": (
        nn.ConvTranspose2d(2, 1, 3, output_padding=1, dilation=2),
        IMAGE,
        UnsupportedModule,
        "Pad behind",
    ),
    "transposed channels": (nn.ConvTranspose2d(3, 1, 3), IMAGE, InvalidInput, "expected 3 channels"),
    "linear on images": (nn.Linear(5, 2), IMAGE, InvalidInput, "The module itself fails"),
    "signals as images": (nn.Conv1d(2, 1, 3), IMAGE, InvalidInput, "The module itself fails"),
    "max dilation": (nn.MaxPool2d(2, dilation=2), IMAGE, UnsupportedModule, "dilation"),
    "max indices": (nn.MaxPool2d(2, return_indices=True), IMAGE, UnsupportedModule, "output="),
    "max pooling of vectors": (nn.MaxPool2d(2), (6, 6), InvalidInput, "whole numbers"),
    "average pooling of vectors": (nn.AvgPool2d(2), (6, 6), InvalidInput, "whole numbers"),
    "max pool too large": (nn.MaxPool2d(7), IMAGE, InvalidInput, "The module itself fails"),
    "average pool too large": (nn.AvgPool2d(7), IMAGE, InvalidInput, "The module itself fails"),
    "max padding": (nn.MaxPool2d(2, padding=2), IMAGE, InvalidInput, "The module itself fails"),
    "no statistics": (nn.BatchNorm2d(2, track_running_stats=False), IMAGE, UnsupportedModule, "track_running_stats"),
    "batch norm features": (nn.BatchNorm1d(1), VECTOR, InvalidInput, "The module itself fails"),
    "batch norm dimensions": (nn.BatchNorm2d(4), VECTOR, InvalidInput, "The module itself fails"),
    "batch norm 1d on images": (nn.BatchNorm1d(2), IMAGE, InvalidInput, "The module itself fails"),
    "linear features": (nn.Linear(5, 2), VECTOR, InvalidInput, "The module itself fails"),
    "conv channels": (nn.Conv2d(3, 1, 3), IMAGE, InvalidInput, "The module itself fails"),
    "conv on a vector": (nn.Conv2d(3, 1, 3), VECTOR, InvalidInput, "batch dimension"),
    "conv too large": (nn.Conv2d(2, 1, 7), IMAGE, InvalidInput, "The module itself fails"),
    "flatten the batch": (nn.Flatten(0), IMAGE, UnsupportedModule, "first dimension"),
    "unflatten the batch": (nn.Unflatten(0, (1, 2)), VECTOR, UnsupportedModule, "cannot be recorded"),
    "unflatten wrongly": (nn.Unflatten(1, (3, 2)), VECTOR, InvalidInput, "The module itself fails"),
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
    "too many features": (torch.zeros(1, 5), "0: mat1 and mat2"),
    "an image": (torch.zeros(1, 1, 2, 2), "0: mat1 and mat2"),
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
    skip = Function(lambda m, x: (lambda u: u + m.phi(u))(m.a(x)), a=layer, phi=SecretlyInPlace()).eval()
    x = 1e7 * torch.randn(256, 4, dtype=torch.float64)
    torch.testing.assert_close(curvcert.trace(skip, torch.zeros(1, 4))(x), skip.double()(x.clone()).detach())


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


def test_a_weight_that_was_computed_from_another_is_the_value_that_it_has() -> None:
    model = Function(lambda m, x: torch.tanh(x * m.scale), weight=nn.Parameter(torch.ones(4))).eval()
    model.__dict__["scale"] = model.weight * 2
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(curvcert.trace(model, torch.zeros(1, 4))(x), torch.tanh(2 * x))


def test_a_module_that_cannot_be_copied() -> None:
    refuse(Function(lambda m, x: torch.tanh(x), lock=threading.Lock()), VECTOR, UnsupportedModule, "cannot be copied")


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
