"""What is checked before and after a module is traced."""

import copy

import torch
from torch import Tensor, nn

from curvcert.errors import InvalidInput, SoundnessError
from curvcert.network.block import Block
from curvcert.network.network import Network

_TOLERANCE = 1e-9
_SAMPLES = 4


def require_traceable(model: nn.Module, example_input: Tensor) -> None:
    """Raise unless the module is in eval mode with finite real weights, and the example is a batch."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"trace expects an nn.Module, got {type(model).__name__}.")
    if not isinstance(example_input, Tensor) or example_input.dim() < 2:
        got = tuple(example_input.shape) if isinstance(example_input, Tensor) else type(example_input).__name__
        raise InvalidInput(f"trace expects an example input with its batch dimension, got {got}. Add one: x[None].")
    if not example_input.dtype.is_floating_point:
        raise InvalidInput(f"trace expects a real floating-point example, got {example_input.dtype}. Use x.float().")
    if len(example_input) == 0:
        raise InvalidInput("trace expects at least one example, got an empty batch.")
    for path, module in model.named_modules():
        if module.training:
            raise InvalidInput(
                f"{path or type(model).__name__} is in train mode, where dropout and batch statistics make the output "
                "random. Call model.eval() first."
            )
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype.is_complex:
            raise InvalidInput(f"{path} is complex ({tensor.dtype}); curvcert covers real networks.")
        if tensor.dtype.is_floating_point and not bool(torch.isfinite(tensor).all()):
            raise InvalidInput(f"{path} holds NaN or infinity. Check the training run or the file it came from.")


def require_equal_forward(model: nn.Module, network: Network, example_input: Tensor) -> None:
    """Raise unless a float64 copy of the module and the network agree near the example."""
    twin = copy.deepcopy(model).to(torch.float64)
    generator = torch.Generator().manual_seed(0)
    shape = (_SAMPLES, *example_input.shape[1:])
    noise = torch.randn(shape, generator=generator, dtype=torch.float64).to(example_input.device)
    x = torch.cat([example_input[:1].to(torch.float64), example_input[:1].to(torch.float64) + noise])
    with torch.no_grad():
        expected, again, got = twin(x), twin(x), network(x)
    if not isinstance(expected, Tensor) or expected.shape != got.shape:
        shape_or_type = tuple(expected.shape) if isinstance(expected, Tensor) else type(expected).__name__
        raise SoundnessError(f"The module returns {shape_or_type}, its trace {tuple(got.shape)}.")
    if not torch.equal(expected, again):
        raise SoundnessError(
            "The module's output changes from call to call on the same input, so no bound holds for it. "
            "Remove its randomness or state."
        )
    deviation = sum(block.activation.deviation for block in network.blocks if isinstance(block, Block))
    scale = float(expected.abs().max()) + 1.0
    gap = float((expected - got).abs().max())
    if not gap <= _TOLERANCE * scale + 1e3 * deviation:
        raise SoundnessError(
            f"The module and its trace differ by {gap:.3g} on random inputs (outputs up to {scale:.3g}). "
            "A hook, a parametrisation or a subclass with its own forward pass is the usual cause."
        )
