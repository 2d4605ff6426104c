r"""A network as every bound reads it: a graph of nodes in float64, each computed from earlier ones."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import pairwise
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from curvcert.activations.base import no_curvature
from curvcert.errors import InvalidInput, UnsupportedBlock, UnsupportedModule
from curvcert.network.block import AbstractBlock, Affine, fold_offset, image
from curvcert.network.nodes import (
    AbstractNode,
    AffineNode,
    ElementwiseNode,
    MaxPoolNode,
    ProductNode,
    Term,
    require_order,
)
from curvcert.network.picture import network_html
from curvcert.network.rewriting.chain import Chain, Link, chain_of, expanded
from curvcert.network.rewriting.fusion import fused
from curvcert.network.rewriting.products import as_squares, is_plain, with_slopes_within_reach
from curvcert.network.rewriting.units import AbstractUnit, ActivatedUnit, units_of, units_of_chain
from curvcert.network.sweeps import AbstractBackward, AbstractForward
from curvcert.operators import AbstractLinearMap, Dense, Identity, Reshape
from curvcert.operators.base import Shape

_PROBES, _STEP = 32, 2.0**-10
"""How many steps, at least, tell how far values move, and how far these go."""


@final
@dataclass(frozen=True, eq=False, repr=False)
class Network:
    """A feed-forward graph of affine maps, elementwise activations, max-pooling and products of values.

    Made by `curvcert.trace` or `curvcert.load_onnx`.  Evaluates in float64 on batches; `source_dtype` is that of
    the module it came from.  A network that is a composition of the paper's blocks has them as `blocks`.
    """

    nodes: tuple[AbstractNode, ...]
    source_dtype: torch.dtype = torch.float64
    made_of: Chain | None = None
    """The blocks that the nodes were made of, where they were: the chain view as given, rather than found again."""
    logits: "Network | None" = None
    """A simpler network with its outputs in the same order: that before a last softmax or log-softmax; or, where it
    ends in a normalisation of the whole sample and a linear head, the outputs times the size that is divided by.
    """

    threshold: float | None = None
    """Of a network that `with_threshold` made: its outputs are this number and the one output that it had."""

    def __post_init__(self) -> None:
        require_order(self.nodes)

    @staticmethod
    def of_blocks(blocks: Sequence[AbstractBlock], source_dtype: torch.dtype = torch.float64) -> "Network":
        """Return the composition of blocks, the first applied first."""
        if not blocks:
            raise InvalidInput("A Network needs at least one block.")
        for left, right in pairwise(blocks):
            if left.out_shape != right.in_shape:
                raise InvalidInput(f"Block {right.name!r} takes {right.in_shape}, got {left.out_shape}.")
        nodes, chain = expanded(blocks)
        return Network(nodes, source_dtype, chain)

    @cached_property
    def chain(self) -> Chain:
        """The paper's blocks that the network is a composition of, and where their values stand among the nodes.

        Raises:
            UnsupportedBlock: if it is none.
        """
        if self.made_of is not None:
            return self.made_of
        found = next(self._maps(), Identity((), torch.float64))
        like = Identity((), found.dtype, found.device)
        return chain_of(self.nodes, like, self.live)

    @property
    def is_chain(self) -> bool:
        """Whether the network is a composition of blocks."""
        try:
            return bool(self.chain)
        except UnsupportedBlock:
            return False

    @property
    def blocks(self) -> tuple[AbstractBlock, ...]:
        """The blocks of a network that is a chain, the first applied first; refused where it is none."""
        return tuple(link.block for link in self.chain)

    @cached_property
    def units(self) -> tuple[AbstractUnit, ...]:
        """The network as blocks that each read one or several earlier values; those of a chain are its `blocks`."""
        return units_of_chain(self.nodes, self.chain) if self.is_chain else units_of(self.nodes)

    @property
    def pools(self) -> bool:
        """Whether there is max-pooling, for which many bounds have no rule."""
        return any(isinstance(node, MaxPoolNode) for node in self.nodes)

    @property
    def activated(self) -> tuple[ActivatedUnit, ...]:
        """The units that have an activation."""
        return tuple(unit.activated for unit in self.units if unit.activated is not None)

    def up_to(self, value: int) -> "Network":
        """Return the network whose output is one of the values inside."""
        if not 0 < value < len(self.nodes):
            raise InvalidInput(f"A value inside is one of 1 to {len(self.nodes) - 1}, got {value}.")
        if self.is_chain:
            return self.prefix(next(k for k, link in enumerate(self.chain, 1) if link.output == value))
        return Network(fused(self.nodes, value), self.source_dtype)

    @property
    def classified(self) -> "Network":
        """The network that tells classes apart: without a last softmax or normalisation, which keep their order."""
        return self if self.logits is None else self.logits.classified

    def with_threshold(self, threshold: float) -> "Network":
        """Return the network with the outputs (threshold, f) for one output f: class 1 is where f is above it.

        >>> from torch import nn
        >>> from curvcert.network import trace
        >>> net = trace(nn.Linear(2, 1).eval(), torch.zeros(1, 2)).with_threshold(0.5)
        >>> float(net(torch.zeros(1, 2))[0, 0]), net.out_shape
        (0.5, (2,))
        """
        if self.outputs != 1:
            raise InvalidInput(
                f"A threshold is for a network of one output, this one has {self.outputs}. Leave it out."
            )
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not math.isfinite(threshold):
            raise InvalidInput(f"A threshold is a finite number, got {threshold!r}.")
        last = len(self.nodes) - 1
        column = Dense(torch.tensor([[0.0], [1.0]], dtype=torch.float64, device=self.device))
        below = Reshape(self.out_shape, (1,), torch.float64, self.device)
        offset = torch.tensor([float(threshold), 0.0], dtype=torch.float64, device=self.device)
        head = AffineNode((Term(last, column @ below),), offset, "threshold")
        return Network(fused((*self.nodes, head), last + 1), self.source_dtype, threshold=float(threshold))

    def decided(self, threshold: float | None) -> "Network":
        """Return the network that a certificate with this threshold is about, given it or what it was made of."""
        if threshold is None or self.threshold == threshold:
            return self
        return self.with_threshold(threshold)

    @cached_property
    def for_bounds(self) -> "Network":
        """The same function as bounds read it, see `rewriting.products`: itself, unless it multiplies values, or has
        functions without a largest slope.
        """
        generator = torch.Generator("cpu").manual_seed(0)
        shape = (_PROBES, *self.in_shape)
        return self.for_bounds_about(torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") / 2)

    def for_bounds_about(self, x: Tensor) -> "Network":
        """Return the same as `for_bounds`, with products scaled by how far their factors move about some points."""
        nodes = self.nodes
        if any(isinstance(node, ProductNode) for node in nodes):
            nodes = as_squares(nodes, self._moves(x.to(self.device)))
        nodes = with_slopes_within_reach(nodes)
        return self if nodes is self.nodes else Network(nodes, self.source_dtype)

    @property
    def has_constants(self) -> bool:
        """Whether every activation has a largest slope: if not, there are constants over balls alone."""
        return is_plain(self.nodes)

    def _moves(self, x: Tensor) -> list[Tensor | None]:
        """Return about how far each entry of a value moves with random steps from some points; any answer is sound."""
        generator = torch.Generator("cpu").manual_seed(1)
        x = x.repeat(-(-_PROBES // len(x)), *(1 for _ in self.in_shape))
        step = torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu").to(self.device)
        values, others = self.values(x), self.values(x + _STEP * step)
        moved = ((after - before).square().mean(dim=0).sqrt() for before, after in zip(values, others, strict=True))
        return [each if bool(each.isfinite().all()) else None for each in moved]

    @property
    def in_shape(self) -> Shape:
        """Shape of one input, without the batch dimension."""
        return self.nodes[0].shape

    @property
    def out_shape(self) -> Shape:
        """Shape of one output, without the batch dimension."""
        return self.nodes[-1].shape

    @property
    def outputs(self) -> int:
        """Number of outputs: classes, for a classifier."""
        return int(torch.Size(self.out_shape).numel())

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        found = next(self._maps(), None)
        return torch.device("cpu") if found is None else found.device

    def _maps(self) -> Iterator[AbstractLinearMap]:
        return (term.map for node in self.nodes if isinstance(node, AffineNode) for term in node.terms)

    @property
    def live(self) -> bool:
        """Whether the maps are a module's own parameters, as `LiveNetwork` makes them: for estimates only."""
        return any(node.offset.is_meta for node in self.nodes if isinstance(node, AffineNode))

    @property
    def assumes(self) -> tuple[str, ...]:
        """What a user declared about the activations, and we could only sample."""
        found = (line for node in self.nodes if isinstance(node, ElementwiseNode) for line in node.activation.assumes)
        return tuple(dict.fromkeys(found))

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs for a batch of inputs."""
        return self.values(x)[-1]

    def in_source_dtype(self, x: Tensor) -> Tensor:
        """Return the outputs as computed in the arithmetic of the dtype of the module that the network came from."""
        return self.in_dtype(x, self.source_dtype)

    def in_dtype(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the outputs as computed in the arithmetic of a dtype.

        On a GPU float32 is as IEEE has it, not TF32, to which torch by default rounds the factors of convolutions.
        """
        inputs = self.require_batch(x).to(dtype)
        with _ieee_products():
            return _Values().sweep(self.nodes, inputs)[-1]

    def values(self, x: Tensor) -> list[Tensor]:
        """Return the value of every node for a batch of inputs."""
        return _Values().sweep(self.nodes, self.require_batch(x))

    def jacobian(self, x: Tensor) -> Tensor:
        """Return the Jacobians at a batch of inputs, of shape (batch, outputs, *in_shape)."""
        values = self.values(x)
        eye = torch.eye(self.outputs, dtype=torch.float64, device=values[0].device)
        g = eye.reshape(1, self.outputs, *self.out_shape).expand(len(values[0]), *(-1,) * (1 + len(self.out_shape)))
        return self.pulled_back(values, g)

    def pulled_back(self, values: Sequence[Tensor], g: Tensor) -> Tensor:
        """Return Df(x)' g for covectors g of shape (batch, rows, *out_shape), given the values of all nodes at x."""
        return _Covectors(values).sweep(self.nodes, g)[0]

    def behind(self, front: "Network") -> "Network":
        """Return the network x -> self(front(x))."""
        if front.out_shape != self.in_shape:
            raise InvalidInput(f"A network on {self.in_shape} cannot stand behind one that gives {front.out_shape}.")
        first = len(front.nodes) - 1
        number = {k: first + k for k in range(len(self.nodes))}
        nodes = (*front.nodes, *(node.renumbered(number) for node in self.nodes[1:]))
        return Network(fused(nodes, len(nodes) - 1), self.source_dtype)

    def prefix(self, k: int) -> "Network":
        """Return the network of the first k blocks."""
        if not 1 <= k <= len(self.blocks):
            raise InvalidInput(f"A prefix has 1 to {len(self.blocks)} blocks, got {k}.")
        return Network.of_blocks(self.blocks[:k], self.source_dtype)

    def read_out(self, rows: Tensor) -> "Network":
        """Return the network whose outputs are linear functionals of this one's, one per row."""
        if rows.dim() != 2 or rows.shape[1] != self.outputs:
            raise InvalidInput(f"A read-out needs rows of {self.outputs} numbers, got shape {tuple(rows.shape)}.")
        if rows.is_complex() or not bool(torch.isfinite(rows).all()):
            raise InvalidInput(f"A read-out needs finite real rows, got {rows.dtype}, or NaN or infinity.")
        return self._read_out(rows)

    def _read_out(self, rows: Tensor) -> "Network":
        found = next(self._maps(), None)
        dtype = torch.float64 if found is None else found.dtype
        weight = rows.detach().to(device=self.device, dtype=dtype, copy=True)
        A = Dense(weight) @ Reshape(self.out_shape, (self.outputs,), dtype, self.device)
        nodes = (*self.nodes, AffineNode((Term(len(self.nodes) - 1, A),), self._no_offset(A), "read-out"))
        last = self.nodes[-1]
        if isinstance(last, AffineNode) and (len(last.terms) == 1 or not self.is_chain):
            # A last layer and what reads it are one map, whose norm may be far below the product of both.
            offset, error = fold_offset(A, last.offset, last.offset_error)
            terms = tuple(Term(term.source, A @ term.map) for term in last.terms)
            nodes = (*self.nodes[:-1], AffineNode(terms, offset, last.name, error))
        return Network(nodes, self.source_dtype, self._chain_read_out(A, len(nodes) - 1) if self.is_chain else None)

    def _no_offset(self, A: AbstractLinearMap) -> Tensor:
        return torch.zeros(A.out_shape, dtype=torch.float64, device="meta" if self.live else self.device)

    def _chain_read_out(self, A: AbstractLinearMap, output: int) -> Chain:
        """Return the chain with a map behind it: part of its last block, where that has a place for it."""
        last = self.chain[-1]
        block = last.block.read_out(A)
        if block is not None:
            return (*self.chain[:-1], Link(block, last.z, output))
        return (*self.chain, Link(Affine(A, self._no_offset(A), name="read-out"), None, output))

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
        if self.made_of is not None:
            return Network.of_blocks([block.to(device) for block in self.blocks], self.source_dtype)
        logits = None if self.logits is None else self.logits.to(device)
        nodes = tuple(node.to(device) for node in self.nodes)
        return Network(nodes, self.source_dtype, logits=logits, threshold=self.threshold)

    def require_batch(self, x: Tensor | np.ndarray) -> Tensor:
        """Return the batch in float64, or raise if it is not one of this network's inputs."""
        x = tensor_of(x)
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

    @property
    def is_smooth(self) -> bool:
        """Whether every node has a curvature constant."""
        nodes = (node for node in self.nodes if isinstance(node, ElementwiseNode))
        return not self.pools and all(node.activation.curvature is not None for node in nodes)

    def require_smooth(self) -> None:
        """Raise unless every node has a curvature constant."""
        for node in self.nodes:
            if isinstance(node, ElementwiseNode) and node.activation.curvature is None:
                raise no_curvature(node.activation)
            if isinstance(node, MaxPoolNode):
                raise UnsupportedModule(
                    f"{node.name or 'A node'} is a MaxPool: its derivative jumps, so it has no curvature constant. Ask "
                    "for lipschitz, or replace it by average pooling."
                )

    def _unit(self, i: int) -> Tensor:
        if not -self.outputs <= i < self.outputs:
            raise InvalidInput(f"Output {i} does not exist: this network has {self.outputs} outputs.")
        row = torch.zeros(1, self.outputs, dtype=torch.float64, device=self.device)
        row[0, i] = 1.0
        return row

    def __repr__(self) -> str:
        if not self.is_chain:
            lines = [f"Network({self.in_shape} -> {self.out_shape}, {len(self.nodes)} nodes"]
            lines += [
                f"  {k} {node.name}: {type(node).__name__} of {node.sources}" for k, node in enumerate(self.nodes)
            ]
            return "\n".join(lines) + ")"
        lines = [f"Network({self.in_shape} -> {self.out_shape}, {len(self.blocks)} blocks"]
        lines += [
            f"  {b.name or k}: {type(b).__name__} {b.in_shape} -> {b.out_shape}" for k, b in enumerate(self.blocks)
        ]
        return "\n".join(lines) + ")"

    def _repr_html_(self) -> str:
        return network_html(self.nodes, self.assumes)


class _Values(AbstractForward[Tensor]):
    """Values of a batch, in its own dtype: float64, or another for replaying."""

    def affine(self, node: AffineNode, values: Sequence[Tensor]) -> Tensor:
        images = [image(term.map, value) for term, value in zip(node.terms, values, strict=True)]
        return reduce(torch.add, images) + node.offset.to(images[0].dtype)

    def elementwise(self, node: ElementwiseNode, value: Tensor) -> Tensor:
        return node.activation.value(value)

    def max_pool(self, node: MaxPoolNode, value: Tensor) -> Tensor:
        return node.pool.evaluate(value)

    def product(self, node: ProductNode, left: Tensor, right: Tensor) -> Tensor:
        return left * right


class _Covectors(AbstractBackward[Tensor]):
    """Covectors, (batch, rows, *shape) for each node, pulled back through the derivatives at known values."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._values = values

    def joined(self, k: int, arriving: Sequence[Tensor]) -> Tensor:
        return reduce(torch.add, arriving)

    def affine(self, k: int, node: AffineNode, value: Tensor) -> Sequence[Tensor]:
        return [term.map.adjoint(value) for term in node.terms]

    def elementwise(self, k: int, node: ElementwiseNode, value: Tensor) -> Tensor:
        return node.activation.derivative(self._values[node.source]).unsqueeze(1) * value

    def max_pool(self, k: int, node: MaxPoolNode, value: Tensor) -> Tensor:
        return node.pool.pull_back(self._values[node.source], value)

    def product(self, k: int, node: ProductNode, value: Tensor) -> tuple[Tensor, Tensor]:
        left, right = (self._values[source].unsqueeze(1) for source in node.sources)
        return right * value, left * value


def tensor_of(value: Any) -> Any:
    """Return an array of numbers as a tensor, and anything else as it is.

    >>> tensor_of(np.zeros((1, 2))).shape
    torch.Size([1, 2])
    """
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind not in "biuf":
        raise InvalidInput(f"Expected an array of real numbers, got {value.dtype}.")
    return torch.as_tensor(np.ascontiguousarray(value))


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
