"""From an nn.Module to a Network: `curvcert.trace(model, example_input)`.

The module runs once on a tensor without numbers, and every operation of torch that it calls is written down
(`recording.py`), then read as values of one sample (`aten.py`).  What has no rule is refused by name; the result is
compared with the module itself.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curvcert.errors import InvalidInput, UnsupportedModule
from curvcert.network.aten import output_of, read
from curvcert.network.batched import BATCH, Batched
from curvcert.network.builder import Value, start
from curvcert.network.building import built
from curvcert.network.faithful import require_one_function, surroundings_kept
from curvcert.network.lowering import has_a_rule_of_its_own
from curvcert.network.network import Network, tensor_of
from curvcert.network.recording import Slot, Tape, Unrecorded, record
from curvcert.network.signature import Joined, Output, own_copy, unwrapped
from curvcert.network.verification import failure, float64_copy, lacks_a_batch, require_equal_forward, require_traceable


def trace(
    model: nn.Module,
    example_input: Tensor | np.ndarray | Sequence[Tensor | np.ndarray],
    output: Output = None,
    fixed: Sequence[int] = (),
) -> Network:
    """Turn a module in eval mode into a `Network`, exactly, or say what is in the way.

    Covers what is built from linear layers (dense, convolutions and their adjoints, average pooling, interpolation,
    BatchNorm and Dropout in eval mode, weights in functional calls), arithmetic with constants (a normalisation), every
    activation of the table, and whatever moves, picks, repeats or joins the entries of a sample, joined by skips and
    sums in any way, layers and values used many times included; ReLU-like kinks and max-pooling for Lipschitz bounds.
    "Networks" in the documentation has the list.
    `example_input` gives the input's shape, batch dimension included; an array is taken in the dtype of the weights.

    The weights are copied in float64, as the exact values that they hold, and are never multiplied
    together.  Three coefficients are rounded to float64 once, and the Network is the one with the rounded
    value: the factor and offset of a batch normalisation, 1/d in a division by d, 1/k in a mean of k.
    What folding rounds off offsets is bounded and carried along (`Block.b_error`, `Block.c_error`).

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).eval()
    >>> trace(model, torch.zeros(1, 2))
    Network((2,) -> (1,), 1 blocks
      1: Block (2,) -> (1,))

    Raises:
        UnsupportedModule: a part that curvcert does not recognise, with its path and the remedy.
        InvalidInput: train mode, NaN weights, a wrong shape or dtype, an empty batch.
        SoundnessError: the module and the network disagree on random inputs.
    """
    # Weights made in inference mode could not be differentiated through later.
    with torch.inference_mode(False), torch.no_grad(), surroundings_kept():
        plain = unwrapped(model)
        examples = _examples(plain, example_input)
        for example in examples:
            require_traceable(plain, example)
        if len({len(example) for example in examples}) != 1:
            raise InvalidInput(f"Expected inputs with one batch, got {[tuple(x.shape) for x in examples]}.")
        asked = _of_one_tensor(plain, examples, fixed, output)
        example = asked.joined(examples) if isinstance(asked, Joined) else examples[0]
        dtype = next((weight.dtype for weight in _weights(plain)), example.dtype)
        twin = float64_copy(asked)
        try:
            tape = recorded(twin, example.to(torch.float64), dtype)
            if not isinstance(tape.output, Slot) and twin is not asked and not isinstance(asked, Joined):
                asked = Joined(plain, examples, fixed, output)
                twin = float64_copy(asked)
                tape = recorded(twin, example.to(torch.float64), dtype)
            value = meaning(tape, plain, example)
        except InvalidInput as error:
            if lacks_a_batch(twin, example, dtype):
                raise InvalidInput(
                    f"{error} The module itself fails on the example of shape {tuple(example.shape)}, and takes a "
                    "batch of it: is the batch dimension missing? Then pass x[None]."
                ) from error
            raise
        network = built(value, source_dtype=_dtype_of(plain))
        require_one_function(own_copy(asked), float64_copy(asked), example)
        require_equal_forward(twin, network, example, dtype)
    return network


def _examples(model: Any, given: Any) -> tuple[Tensor, ...]:
    """Return the example inputs as tensors; arrays in the dtype of the weights."""
    many = isinstance(given, tuple | list) and all(isinstance(x, Tensor | np.ndarray) for x in given) and len(given) > 0
    found = []
    for x in given if many else (given,):
        tensor = tensor_of(x)
        if isinstance(model, nn.Module) and isinstance(x, np.ndarray):
            tensor = tensor.to(next(_weights(model), tensor))
        found.append(tensor)
    return tuple(found)


def _of_one_tensor(model: nn.Module, examples: tuple[Tensor, ...], fixed: Sequence[int], output: Output) -> nn.Module:
    """Return the module as one of one tensor, if it is not yet."""
    if any(type(k) is not int or not 0 <= k < len(examples) for k in fixed) or len(set(fixed)) >= len(examples):
        raise InvalidInput(
            f"fixed={tuple(fixed)} holds inputs by their number, 0 to {len(examples) - 1}, and leaves one free."
        )
    if len(examples) > 1 or output is not None:
        return Joined(model, examples, fixed, output)
    return model


def _dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of the module's weights; float64 if it has none."""
    return next((weight.dtype for weight in _weights(model)), torch.float64)


def _weights(model: nn.Module) -> Iterator[Tensor]:
    return (weight for weight in model.parameters() if weight.dtype.is_floating_point)


def recorded(model: nn.Module, example: Tensor, own: torch.dtype | None = None) -> Tape:
    """Return what a module does; with `own`, it is a copy in float64 of one in that dtype."""
    x = torch.empty(BATCH, *example.shape[1:], dtype=example.dtype, device=example.device)
    try:
        return record(model, (x,), has_a_rule_of_its_own, own)
    except Unrecorded as error:
        itself = failure(model, example, own)
        if itself is not None:
            raise InvalidInput(
                f"{error.path}{itself}. The module itself fails on inputs of shape {tuple(example.shape)}. Check "
                "the example's shape, and its batch dimension."
            ) from error
        raise UnsupportedModule(
            f"{type(model).__name__}: its forward pass cannot be recorded ({error}). Write it without branches, loops "
            "or Python numbers that depend on the input's values."
        ) from error


def meaning(tape: Tape, model: nn.Module, example: Tensor, live: bool = False) -> Value:
    """Return the value that a tape ends with, over the numbers that the weights have now."""
    name = type(model).__name__
    if not isinstance(tape.output, Slot):
        raise UnsupportedModule(
            f"The output of {name}: expected one tensor that depends on the input, got {type(tape.output).__name__}. "
            "Say which one: trace(model, x, output=...)."
        )
    shape = tuple(example.shape[1:])
    value = start(shape, example.device, example.dtype if live else torch.float64, live=live)
    return output_of(read(tape, [Batched(value)]), tape.output, name)
