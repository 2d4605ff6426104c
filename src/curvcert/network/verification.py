"""What is checked before and after a module is traced."""

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from curvcert.errors import InvalidInput, SoundnessError, UnsupportedModule
from curvcert.network.evaluation import evaluate_with_error
from curvcert.network.faithful import require_nothing_changed
from curvcert.network.network import Network
from curvcert.network.nodes import ElementwiseNode
from curvcert.network.recording import InFloat64
from curvcert.network.signature import own_copy

_TOLERANCE = 1e-9
_SCALES = (0.0, 1e-2, 1.0, 1.0, 1.0, 1.0, 10.0, 100.0, 1000.0)
"""The random inputs lie around the example, at these distances: what a module does far away counts too."""
_MOST_ROWS, _MOST_NUMBERS = 128, 2**18
"""How many rows there are at most, and how many numbers in the largest value of the network."""


def require_traceable(model: nn.Module, example_input: Tensor) -> None:
    """Raise unless the module is in eval mode with finite real weights, and the example is a batch."""
    require_recordable(model, example_input)
    exported = any(map(_is_guard, model.modules()))
    for path, module in model.named_modules():
        if module.training and not exported:
            raise InvalidInput(
                f"{path or type(model).__name__} is in train mode, where dropout and batch statistics make the output "
                "random. Call model.eval() first."
            )


def require_recordable(model: nn.Module, example_input: Tensor) -> None:
    """Raise unless the module has finite real weights and only its class's forward pass, and the example is a batch."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"Expected an nn.Module, got {type(model).__name__}.")
    _require_batch(example_input)
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        _require_finite(tensor, path)
        if tensor.device != example_input.device:
            raise InvalidInput(
                f"{path} is on {tensor.device} and the example input on {example_input.device}. Bring them together."
            )
    for path, module in model.named_modules():
        _require_plain(module, path or type(model).__name__)


def lacks_a_batch(twin: nn.Module, example_input: Tensor, own: torch.dtype) -> bool:
    """Whether the module fails on the example, but not on a batch of it."""
    x = example_input.detach().to(torch.float64)
    return failure(twin, x, own) is not None and failure(twin, x[None], own) is None


def failure(module: nn.Module, x: Tensor, own: torch.dtype | None) -> Exception | None:
    """Return the error that a module raises on an input; with `own`, it is a copy in float64 of one in that dtype."""
    try:
        with nullcontext() if own is None else InFloat64(own):
            module(x.clone())
    except Exception as error:  # whatever the user's forward pass raises
        return error
    return None


def _require_batch(example_input: Tensor) -> None:
    if not isinstance(example_input, Tensor):
        raise InvalidInput(
            f"The example input is a tensor, got {type(example_input).__name__}. Pass torch.zeros(1, *shape)."
        )
    if example_input.dim() < 2:
        got = tuple(example_input.shape)
        raise InvalidInput(f"Expected an example input with its batch dimension, got {got}. Add one: x[None].")
    if not example_input.dtype.is_floating_point:
        raise InvalidInput(f"Expected a real floating-point example, got {example_input.dtype}. Use x.float().")
    if example_input.numel() == 0:
        raise InvalidInput(
            f"Expected at least one example with at least one feature, got an empty batch: "
            f"shape {tuple(example_input.shape)}."
        )
    if example_input.is_meta or not bool(torch.isfinite(example_input).all()):
        raise InvalidInput("Expected a finite example, got NaN or infinity, or a tensor without values.")


def _require_plain(module: nn.Module, path: str) -> None:
    """Raise if calling the module does more, or something else, than the forward pass of its class."""
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedModule(f"{path}: {name} is a TorchScript module. Trace the module that it was made from.")
    own_call = type(module).__call__ is not nn.Module.__call__ and not isinstance(module, fx.GraphModule)
    if ("forward" in vars(module) or own_call) and not _is_guard(module):
        raise UnsupportedModule(
            f"{path}: this {name} has a forward or __call__ of its own, put on the object or around its class "
            "(torch.compile does so). Trace the original module, or define a class with that forward."
        )


def _is_guard(module: nn.Module) -> bool:
    """Whether a module only checks the inputs of an exported one, whose graph says what is random in it."""
    return type(module).__module__.startswith("torch.export.")


def _require_finite(tensor: Tensor, path: str) -> None:
    if is_lazy(tensor) or tensor.is_meta:
        raise InvalidInput(f"{path} has no values yet. Run the model once, or load its weights.")
    if tensor.dtype.is_complex:
        raise InvalidInput(f"{path} is complex ({tensor.dtype}); curvcert covers real networks.")
    if tensor.dtype.is_floating_point and not bool(torch.isfinite(tensor).all()):
        raise InvalidInput(f"{path} holds NaN or infinity. Check the training run or the file it came from.")


def float64_copy(model: nn.Module) -> nn.Module:
    """Return a copy in float64, to record and to compare with, so that the model itself is left alone."""
    return own_copy(model).double()


def require_equal_forward(twin: nn.Module, network: Network, example_input: Tensor, own: torch.dtype) -> None:
    """Raise unless a float64 copy of the module and the network agree, near the example and far from it."""
    largest = max(math.prod(node.shape) for node in network.nodes)
    x = _random_inputs(example_input, _MOST_ROWS if largest * _MOST_ROWS <= _MOST_NUMBERS else len(_SCALES))
    with require_nothing_changed(twin):
        expected, again = _called(twin, x, own), [_called(twin, x[:2], own) for _ in range(2)]
    expected, x = _within_reach(expected, x)
    got, error, peak = _evaluated(network, x)
    if not isinstance(expected, Tensor) or expected.shape != got.shape:
        shape_or_type = tuple(expected.shape) if isinstance(expected, Tensor) else type(expected).__name__
        raise SoundnessError(f"The module returns {shape_or_type}, its trace {tuple(got.shape)}.")
    if not torch.equal(*again):
        raise SoundnessError(
            "The module's output or its state changes from call to call on the same input, so no bound holds for it. "
            "Remove its randomness or state."
        )
    # Far from the example an exponential may overflow, in both: nothing is to be compared there.
    known = peak.isfinite()
    if not bool(known[0]):
        raise InvalidInput("The module's values overflow on the example itself. Scale the inputs or the weights.")
    if not bool(known.all()):
        x, expected = x[known], expected[known]
        got, error, peak = _evaluated(network, x)
    # What rounding explains, but never more than _TOLERANCE of the largest number on the way.
    rounding = torch.minimum(1e3 * error, _TOLERANCE * peak)
    activations = [node.activation for node in network.nodes if isinstance(node, ElementwiseNode)]
    declared = sum(activation.deviation for activation in activations if activation.assumes)
    slack = _TOLERANCE * _peak(expected) + rounding + 1e3 * declared
    if not _within(expected, got, slack):
        gap = float(_peak(expected - got).max())
        raise SoundnessError(
            f"The module and its trace differ by {gap:.3g} on random inputs (outputs up to "
            f"{float(expected.abs().max()):.3g}). An in-place change or a registered rule is the usual cause."
        )
    _require_rows_apart(twin, x, expected, slack, own)


def _evaluated(network: Network, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the network's output, its largest error in each row, and the largest number on the way to it.

    Errors are bounded for the first rows, at every distance twice: three times the work, and what they are in
    proportion to the numbers on the way tells of the other rows.
    """
    few, rest = x[: 2 * len(_SCALES)], x[2 * len(_SCALES) :]
    known = evaluate_with_error(network, few)
    peak = torch.stack([_peak(computed.value) for computed in known.values]).amax(0)
    error = _peak(known.output.error)
    if not len(rest):
        return known.output.value, error, peak
    values = network.values(rest)
    far = torch.stack([_peak(value) for value in values]).amax(0)
    share = (error / peak).nan_to_num(0.0, 0.0, 0.0).max()
    whole = torch.cat([known.output.value, values[-1]])
    return whole, torch.cat([error, share * far]), torch.cat([peak, far])


def _require_rows_apart(twin: nn.Module, x: Tensor, expected: Tensor, slack: Tensor, own: torch.dtype) -> None:
    """Raise unless a row of the output is the same whatever rows, and however many, are computed with it."""
    roomy = len(x) > len(_SCALES)
    for n in (1, 2, 3, 33) if roomy else (1, 2):
        if not _within(_called(twin, x[:n], own), expected[:n], 2 * slack[:n]):
            raise SoundnessError(f"The module computes something else for a batch of {n} than for one of {len(x)}.")
    few = x[: 5 if roomy else 2]
    for k in range(len(few)):
        others = [row for row in range(len(few)) if row != k]
        without = few.clone()
        without[k] = math.nan
        if not _within(_called(twin, without, own)[others], expected[others], 2 * slack[others]):
            raise SoundnessError(
                f"Sample {k} of a batch changes what the module computes for the others, so no bound holds for one of "
                "them. Remove what joins the samples of a batch."
            )


def _within(left: Tensor, right: Tensor, slack: Tensor) -> bool:
    return left.shape == right.shape and bool((_peak(left - right) <= slack).all())


def _within_reach(expected: Any, x: Tensor) -> tuple[Any, Tensor]:
    """Leave out the farthest inputs that the module overflows on, as e^x does in a softplus written out."""
    if not isinstance(expected, Tensor) or len(expected) != len(x):
        return expected, x
    far = torch.tensor(_SCALES, device=x.device).repeat(-(-len(x) // len(_SCALES)))[: len(x)] >= _SCALES[-1]
    kept = torch.isfinite(expected).reshape(len(x), -1).all(dim=1) | ~far
    return expected[kept], x[kept]


def _random_inputs(example_input: Tensor, rows: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    centre = example_input[:1].detach().to(torch.float64)
    noise = torch.randn(rows, *centre.shape[1:], generator=generator, dtype=torch.float64, device="cpu")
    scales = torch.tensor(_SCALES, dtype=torch.float64, device="cpu").repeat(-(-rows // len(_SCALES)))[:rows]
    return centre + (scales.reshape(-1, *(1,) * (centre.dim() - 1)) * noise).to(centre.device)


def _called(module: nn.Module, x: Tensor, own: torch.dtype) -> Any:
    """Call the module on a copy of x, since it may overwrite its input; a GPU sums in the same order every time."""
    try:
        with InFloat64(own), torch.backends.cudnn.flags(enabled=True, deterministic=True):
            return module(x.clone())
    except Exception as error:
        raise InvalidInput(
            f"The module itself fails on float64 inputs of shape {tuple(x.shape)}: {error}. "
            "Check the example's shape; tensors that are not parameters or buffers stay in their own dtype."
        ) from error


def _peak(x: Tensor) -> Tensor:
    """Return the largest magnitude in each sample."""
    return x.abs().flatten(1).amax(dim=1)
