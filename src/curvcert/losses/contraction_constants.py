r"""The constants of a stack of SLL layers: every layer is 1-Lipschitz by construction, so curvatures add up.

For :math:`x_{k+1} = x_k - W_k^T D_k \phi_k(W_k x_k + b_k)` and :math:`f = V x_m`, with fixed maps of norm 1 in between,

.. math:: L = \|V\|, \qquad K = \|V\| \sum_k \omega_k, \qquad
          L_{ij} = \|v_i - v_j\|, \qquad K_{ij} \le \|v_i - v_j\| \sum_{k < m} \omega_k
          + c_m \lambda_{max}\big(W_m^T \mathrm{diag}|D_m W_m (v_i - v_j)|\, W_m\big),

where the last layer is weighed by the gradient that reaches it if nothing stands between it and V.  A layer's own
constant is (`bounds.curvature.block_contraction`, with :math:`M = D^{1/2}`)

.. math:: \omega = c \|D^{1/2} W\|\, \sqrt{\lambda_{max}\big((D^{1/4} WW^T D^{1/4})^{\circ 2}\big)}
          \quad\text{("hadamard")} \qquad\text{or, never less,}\qquad c \|D^{1/2} W\|^2 \max_l \|W_l\|
          \quad\text{("product")}.

The layers are read from the modules themselves; nothing waits for the device, so that a step can be captured in a CUDA
graph.  Estimates, with norms by power iteration: for training, never for a certificate.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvcert.activations import from_module
from curvcert.losses.chain_constants import BlockBound
from curvcert.losses.computed_once import computed_once
from curvcert.losses.gradient_norms import safe_sqrt
from curvcert.nn import Normalise, PadChannels, ScaledAveragePool2d, SLLConv2d, SLLDense, UnitRowLinear

PowerStep = Callable[[Tensor], Tensor]

_ISOMETRIES = (PadChannels, ScaledAveragePool2d, nn.Flatten, nn.Identity)
"""Fixed maps of norm 1."""


@dataclass(frozen=True, eq=False)
class SLLStack:
    """SLL layers, the shape of each one's input, the curvature constant c of its activation, and the last linear map.

    `before` and `behind` are the norms of the fixed maps on either side of each layer; `folded` tells whether the last
    layer is dense with nothing between it and the last map.
    """

    layers: tuple[SLLDense | SLLConv2d, ...]
    shapes: tuple[tuple[int, ...], ...]
    before: tuple[float, ...]
    behind: tuple[float, ...]
    c: tuple[float, ...]
    last: nn.Linear | UnitRowLinear
    folded: bool

    @property
    def fixed(self) -> float:
        """The norm of all fixed maps together."""
        return self.before[0] * self.behind[0]


def as_sll_stack(model: nn.Module, example_input: Tensor) -> SLLStack | None:
    """Return the stack that a module is, or None if it is none: an `nn.Sequential` of known layers, a linear map last.

    >>> model = nn.Sequential(PadChannels(2), SLLConv2d(2), nn.Flatten(), UnitRowLinear(18, 3))
    >>> as_sll_stack(model, torch.zeros(1, 1, 3, 3)).shapes
    ((2, 3, 3),)
    >>> as_sll_stack(nn.Sequential(nn.Tanh(), nn.Linear(2, 2)), torch.zeros(1, 2)) is None
    True
    """
    *inner, last = leaves(model)
    if not isinstance(last, nn.Linear | UnitRowLinear) or type(last) not in (nn.Linear, UnitRowLinear):
        return None
    if any(type(module) not in (SLLDense, SLLConv2d, Normalise, *_ISOMETRIES) for module in inner):
        return None
    layers = {k: module for k, module in enumerate(inner) if isinstance(module, SLLDense | SLLConv2d)}
    shapes = _input_shapes(inner, example_input.to(last.weight))
    if not layers or len(shapes[-1]) != 1:
        return None
    norms = [_fixed_norm(module) for module in inner]
    final = max(layers)
    return SLLStack(
        layers=tuple(layers.values()),
        shapes=tuple(shapes[k] for k in layers),
        before=tuple(math.prod(norms[:k]) for k in layers),
        behind=tuple(math.prod(norms[k:]) for k in layers),
        c=tuple(from_module(layer.activation).curvature_c for layer in layers.values()),
        last=last,
        folded=isinstance(layers[final], SLLDense) and final == len(inner) - 1,
    )


def leaves(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of nested `nn.Sequential`s in their order; the module itself if it is none."""
    if type(model) is not nn.Sequential:
        yield model
        return
    for module in model:
        yield from leaves(module)


def _fixed_norm(module: nn.Module) -> float:
    return float((1.0 / module.std).max()) if isinstance(module, Normalise) else 1.0


@torch.no_grad()
def _input_shapes(modules: list[nn.Module], x: Tensor) -> list[tuple[int, ...]]:
    """Return the shape of each module's input, and of the last one's output."""
    shapes = []
    for module in modules:
        shapes.append(tuple(x.shape[1:]))
        x = module(x)
    return [*shapes, tuple(x.shape[1:])]


class ContractionConstants(nn.Module):
    """Warm-started estimates of the constants of a stack; the vectors they resume from are buffers.

    >>> layer, last = SLLDense(1), nn.Linear(1, 2)  # x - (2 / w) tanh(w x), then (1, -1)
    >>> with torch.no_grad():
    ...     _ = layer.weight.fill_(3.0), layer.log_scale.zero_(), last.weight.copy_(torch.tensor([[1.0], [-1.0]]))
    >>> now = ContractionConstants(as_sll_stack(nn.Sequential(layer, last), torch.zeros(1, 1)))()
    >>> now.pair_lipschitz.detach()
    tensor([[0., 2.],
            [2., 0.]])
    >>> abs(now.pair_curvature[0, 1].item() - 2 * 2 * 3 * 4 / 27**0.5) < 1e-5
    True
    """

    def __init__(self, stack: SLLStack, block_bound: BlockBound = "product", steps: int = 1) -> None:
        """Read a stack; each call takes this many power-iteration steps."""
        super().__init__()
        self.stack, self.block_bound, self.steps = stack, block_bound, steps
        weight = stack.last.weight
        classes, features = weight.shape
        sizes: dict[str, tuple[int, ...]] = {f"right_{k}": (1, *shape) for k, shape in enumerate(stack.shapes)}
        if block_bound == "hadamard":
            sizes |= {f"hadamard_{k}": (1, len(layer.weight)) for k, layer in enumerate(stack.layers)}
        sizes["readout"] = (1, classes)
        if stack.folded:
            sizes["top"] = (classes * (classes - 1) // 2, features)
        self._names = tuple(sizes)
        for name, size in sizes.items():
            self.register_buffer(name, torch.empty(size, dtype=weight.dtype, device=weight.device))
        pairs = torch.triu_indices(classes, classes, offset=1, device=weight.device)
        self.register_buffer("_pairs", pairs, persistent=False)
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Put all vectors back to their fixed start."""
        generator = torch.Generator().manual_seed(0)
        for name in self._names:
            buffer = self.vector(name)
            start = torch.randn(buffer.shape, generator=generator, dtype=torch.float64)
            # A nonnegative matrix has a nonnegative leading vector.
            start = start.abs() if name.startswith("hadamard") else start
            buffer.copy_(_unit(start))

    def vector(self, name: str) -> Tensor:
        """Return the buffer of that name."""
        found = getattr(self, name)
        assert isinstance(found, Tensor)
        return found

    def forward(self) -> "ContractionStep":
        """Return the constants of the weights as they are now; each takes its steps when it is first asked for."""
        return ContractionStep(self)


class ContractionStep:
    """The constants at one step, each computed when it is first asked for."""

    def __init__(self, owner: ContractionConstants) -> None:
        """Read constants of the weights as they are now."""
        self._owner, self._stack = owner, owner.stack

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's parameters, and of these constants."""
        return self._stack.last.weight.dtype

    @computed_once
    def lipschitz(self) -> Tensor:
        """The l2 Lipschitz constant of the whole network: the norm of its last map."""
        gram = self._read_out @ self._read_out.mT
        direction = self._refined("readout", lambda v: v @ gram.detach())
        return self._stack.fixed * safe_sqrt((direction * (direction @ gram)).sum())

    @computed_once
    def curvature(self) -> Tensor:
        """The l2 curvature of the whole network, the paper's shortcut: a sum over the layers, then the last map."""
        # `lipschitz` counts all the fixed maps, a layer's term those before it twice and those behind it once.
        return self.lipschitz / self._stack.fixed * torch.stack(self._terms).sum()

    @computed_once
    def pair_lipschitz(self) -> Tensor:
        """The Lipschitz constant of every f_i - f_j, a symmetric (classes, classes) table with zeros inside."""
        return self._stack.fixed * self._distances

    @computed_once
    def pair_curvature(self) -> Tensor:
        """The curvature of every f_i - f_j: a sum over the layers, the last weighed by the gradient that reaches it."""
        if not self._stack.folded:
            return self._distances * torch.stack(self._terms).sum()
        last = self._stack.c[-1] * self._stack.before[-1] ** 2 * self._last_layer
        return last if len(self._terms) == 1 else last + self._distances * torch.stack(self._terms[:-1]).sum()

    @computed_once
    def _read_out(self) -> Tensor:
        last = self._stack.last
        return last.effective() if isinstance(last, UnitRowLinear) else last.weight

    @computed_once
    def _distances(self) -> Tensor:
        """The table of the distances between rows of V, with gradient 0 where they agree."""
        lengths: Tensor = torch.linalg.vector_norm(self._read_out[:, None] - self._read_out[None], dim=2)
        return lengths

    @computed_once
    def _effective(self) -> list[tuple[Tensor, Tensor]]:
        return [layer.effective() for layer in self._stack.layers]

    @computed_once
    def _terms(self) -> list[Tensor]:
        """What each layer adds to the curvature, behind the fixed maps and in front of V."""
        sides = zip(self._stack.before, self._stack.behind, self._stack.c, strict=True)
        return [before**2 * behind * c * self._omega(k) for k, (before, behind, c) in enumerate(sides)]

    def _omega(self, k: int) -> Tensor:
        """Return the constant of layer k over c."""
        weight, d = self._effective[k]
        r = self._squared_norm(k, _scaled(d.sqrt(), weight))
        if self._owner.block_bound == "product":
            longest: Tensor = torch.linalg.vector_norm(weight.flatten(1), dim=1).amax()
            return r * longest
        squares = _squared_products(_scaled(d.sqrt().sqrt(), weight))
        direction = self._refined(f"hadamard_{k}", lambda v: v @ squares.detach())
        return safe_sqrt(r * (direction * (direction @ squares)).sum())

    def _squared_norm(self, k: int, weight: Tensor) -> Tensor:
        """Return the squared norm of layer k's linear map with another weight in its place."""
        layer = self._stack.layers[k]

        def image(v: Tensor, A: Tensor) -> Tensor:
            return F.conv2d(v, A, padding=layer.padding) if isinstance(layer, SLLConv2d) else v @ A.mT

        def back(y: Tensor, A: Tensor) -> Tensor:
            return F.conv_transpose2d(y, A, padding=layer.padding) if isinstance(layer, SLLConv2d) else y @ A

        fixed = weight.detach()
        direction = self._refined(f"right_{k}", lambda v: back(image(v, fixed), fixed))
        return image(direction, weight).square().sum()

    @computed_once
    def _last_layer(self) -> Tensor:
        """The largest eigenvalue of W' diag|D W (v_i - v_j)| W for the last layer, a (classes, classes) table."""
        weight, d = self._effective[-1]
        i, j = self._owner.vector("_pairs")
        rows = self._read_out @ weight.mT * d
        sizes, fixed = (rows[i] - rows[j]).abs(), weight.detach()
        direction = self._refined("top", lambda v: (sizes.detach() * (v @ fixed.mT)) @ fixed)
        values = (sizes * (direction @ weight.mT).square()).sum(dim=1)
        table = values.new_zeros(len(rows), len(rows)).index_put((i, j), values)
        return table + table.mT

    def _refined(self, name: str, step: PowerStep) -> Tensor:
        """Take steps of a power iteration and return its unit vectors, which the buffer keeps."""
        vector = self._owner.vector(name)
        with torch.no_grad():
            direction = vector
            for _ in range(self._owner.steps):
                direction = _unit(step(direction))
            vector.copy_(direction)
        return direction


def _unit(rows: Tensor) -> Tensor:
    """Return the rows made units; zero rows stay zero."""
    length: Tensor = torch.linalg.vector_norm(rows.flatten(1), dim=1).clamp(min=torch.finfo(rows.dtype).tiny)
    return rows / length.reshape(-1, *(1,) * (rows.dim() - 1))


def _scaled(factors: Tensor, weight: Tensor) -> Tensor:
    """Return diag(factors) W as a weight or a kernel."""
    return factors.reshape(-1, *(1,) * (weight.dim() - 1)) * weight


def _squared_products(weight: Tensor) -> Tensor:
    """Return (VV') squared entry by entry, for a convolution on the infinite plane summed over all lags."""
    if weight.dim() == 2:
        return (weight @ weight.mT).square()
    height, width = weight.shape[2:]
    return F.conv2d(weight, weight, padding=(height - 1, width - 1)).square().sum(dim=(2, 3))
