"""A network as every bound reads it: a tuple of blocks in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from curvcert.errors import InvalidInput, UnsupportedModule
from curvcert.network.block import AbstractBlock, Affine, Block
from curvcert.operators import Dense, Reshape
from curvcert.operators.base import Shape


@final
@dataclass(frozen=True, eq=False, repr=False)
class Network:
    """A composition of blocks, the first applied first.

    Made by `curvcert.trace` or `curvcert.load_onnx`.  Evaluates in float64 on batches; `source_dtype` is that of
    the module it came from.
    """

    blocks: tuple[AbstractBlock, ...]
    source_dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        if not self.blocks:
            raise InvalidInput("A Network needs at least one block.")
        for left, right in pairwise(self.blocks):
            if left.out_shape != right.in_shape:
                raise InvalidInput(f"Block {right.name!r} takes {right.in_shape}, got {left.out_shape}.")

    @property
    def in_shape(self) -> Shape:
        """Shape of one input, without the batch dimension."""
        return self.blocks[0].in_shape

    @property
    def out_shape(self) -> Shape:
        """Shape of one output, without the batch dimension."""
        return self.blocks[-1].out_shape

    @property
    def outputs(self) -> int:
        """Number of outputs: classes, for a classifier."""
        return int(torch.Size(self.out_shape).numel())

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        block = next((b for b in self.blocks if isinstance(b, Block | Affine)), None)
        return torch.device("cpu") if block is None else block.H.device

    @property
    def live(self) -> bool:
        """Whether the maps are a module's own parameters, as `LiveNetwork` makes them: for estimates only."""
        return any(b.c.is_meta for b in self.blocks if isinstance(b, Block | Affine))

    @property
    def assumes(self) -> tuple[str, ...]:
        """What a user declared about the activations, and we could only sample."""
        found = (line for b in self.blocks if isinstance(b, Block) for line in b.activation.assumes)
        return tuple(dict.fromkeys(found))

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs for a batch of inputs."""
        return reduce(lambda y, block: block.evaluate(y), self.blocks, self.require_batch(x))

    def in_source_dtype(self, x: Tensor) -> Tensor:
        """Return the outputs as computed in the arithmetic of the dtype of the module that the network came from.

        On a GPU that is float32 as IEEE has it, not TF32, to which torch by default rounds the factors of convolutions.
        """
        inputs = self.require_batch(x).to(self.source_dtype)
        with _ieee_products():
            return reduce(lambda y, block: block.evaluate(y), self.blocks, inputs)

    def states(self, x: Tensor) -> list[Tensor]:
        """Return the input of every block and, last, the output of the network."""
        found = [self.require_batch(x)]
        for block in self.blocks:
            found.append(block.evaluate(found[-1]))
        return found

    def pre_activations(self, x: Tensor) -> list[Tensor]:
        """Return z = W x + b of every block that has an activation."""
        pairs = zip(self.blocks, self.states(x), strict=False)
        return [block.pre_activation(state) for block, state in pairs if isinstance(block, Block)]

    def jacobian(self, x: Tensor) -> Tensor:
        """Return the Jacobians at a batch of inputs, of shape (batch, outputs, *in_shape)."""
        states = self.states(x)
        eye = torch.eye(self.outputs, dtype=torch.float64, device=states[0].device)
        g = eye.reshape(1, self.outputs, *self.out_shape).expand(len(states[0]), *(-1,) * (1 + len(self.out_shape)))
        for block, state in zip(reversed(self.blocks), reversed(states[:-1]), strict=True):
            g = block.pull_back(state, g)
        return g

    def prefix(self, k: int) -> "Network":
        """Return the network of the first k blocks."""
        if not 1 <= k <= len(self.blocks):
            raise InvalidInput(f"A prefix has 1 to {len(self.blocks)} blocks, got {k}.")
        return replace(self, blocks=self.blocks[:k])

    def read_out(self, rows: Tensor) -> "Network":
        """Return the network whose outputs are linear functionals of this one's, one a row."""
        if rows.dim() != 2 or rows.shape[1] != self.outputs:
            raise InvalidInput(f"A read-out needs rows of {self.outputs} numbers, got shape {tuple(rows.shape)}.")
        if rows.is_complex() or not bool(torch.isfinite(rows).all()):
            raise InvalidInput(f"A read-out needs finite real rows, got {rows.dtype}, or NaN or infinity.")
        return self._read_out(rows)

    def _read_out(self, rows: Tensor) -> "Network":
        last = self.blocks[-1]
        dtype = last.H.dtype if isinstance(last, Block | Affine) else torch.float64
        weight = rows.detach().to(device=self.device, dtype=dtype, copy=True)
        A = Dense(weight) @ Reshape(self.out_shape, (self.outputs,), dtype, self.device)
        block = last.read_out(A)
        if block is not None:
            return replace(self, blocks=(*self.blocks[:-1], block))
        c = torch.zeros(A.out_shape, dtype=torch.float64, device=self.device)
        return replace(self, blocks=(*self.blocks, Affine(A, c, name="read-out")))

    def logit(self, i: int) -> "Network":
        """Return the scalar network f_i."""
        return self.read_out(self._unit(i))

    def difference(self, i: int, j: int) -> "Network":
        """Return the scalar network f_i - f_j."""
        return self.read_out(self._unit(i) - self._unit(j))

    def all_differences(self) -> "Network":
        """Return the network of all f_i - f_j, i < j, in the order of `itertools.combinations`."""
        if self.outputs < 2:
            raise InvalidInput("Pairs need at least two outputs, this network has one. Leave out `pair`.")
        i, j = torch.combinations(torch.arange(self.outputs)).T
        eye = torch.eye(self.outputs, dtype=torch.float64)
        return self._read_out(eye[i] - eye[j])

    def to(self, device: torch.device | str) -> "Network":
        """Return the same network on another device."""
        return replace(self, blocks=tuple(block.to(device) for block in self.blocks))

    def require_batch(self, x: Tensor) -> Tensor:
        """Return the batch in float64, or raise if it is not one of this network's inputs."""
        if not isinstance(x, Tensor) or x.dim() == 0 or tuple(x.shape[1:]) != self.in_shape:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InvalidInput(f"Expected a batch of shape (batch, {', '.join(map(str, self.in_shape))}), got {got}.")
        if len(x) == 0:
            raise InvalidInput("Expected at least one input, got an empty batch.")
        if not x.dtype.is_floating_point:
            raise InvalidInput(f"Expected real floating-point inputs, got {x.dtype}. Convert and scale them first.")
        if not bool(torch.isfinite(x).all()):
            raise InvalidInput("Expected finite inputs, got NaN or infinity.")
        return x.to(torch.float64)

    def require_smooth(self) -> None:
        """Raise unless every block has a curvature constant."""
        for block in self.blocks:
            if isinstance(block, Block):
                _ = block.activation.curvature_c
            elif not isinstance(block, Affine):
                raise UnsupportedModule(
                    f"{block.name or 'A block'} is a {type(block).__name__}: its derivative jumps, so it has no "
                    "curvature constant. Ask for lipschitz, or replace it by average pooling."
                )

    def _unit(self, i: int) -> Tensor:
        if not -self.outputs <= i < self.outputs:
            raise InvalidInput(f"Output {i} does not exist: this network has {self.outputs} outputs.")
        row = torch.zeros(1, self.outputs, dtype=torch.float64, device=self.device)
        row[0, i] = 1.0
        return row

    def __repr__(self) -> str:
        lines = [f"Network({self.in_shape} -> {self.out_shape}, {len(self.blocks)} blocks"]
        lines += [
            f"  {b.name or k}: {type(b).__name__} {b.in_shape} -> {b.out_shape}" for k, b in enumerate(self.blocks)
        ]
        return "\n".join(lines) + ")"


@contextmanager
def _ieee_products() -> Iterator[None]:
    """Have float32 products and convolutions keep all bits of their factors, and leave the settings as found."""
    kinds = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = [kind.fp32_precision for kind in kinds]
    try:
        for kind in kinds:
            kind.fp32_precision = "ieee"
        yield
    finally:
        for kind, precision in zip(kinds, before, strict=True):
            kind.fp32_precision = precision
