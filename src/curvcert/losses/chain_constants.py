r"""The constants of a plain chain of layers, all at once: the recursions as triangular systems.

For :math:`x_{k+1} = \Phi_k(W_k x_k + b_k)`, k < m, and :math:`f = V x_m`, with slopes :math:`\mu_k \pm \rho_k` and
:math:`N_{kj} = \|W_k \cdots W_j\|`, LipLT is

.. math:: Z_k = \mu_{k-1} \cdots \mu_0 N_{k0} + \sum_{j < k} \rho_j\, \mu_{k-1} \cdots \mu_{j+1} N_{k,j+1} Z_j, \qquad
          L_{k+1} = (|\mu_k| + \rho_k) Z_k,

linear in Z and triangular; so is its mirror image for the gradients of :math:`f_i - f_j` with respect to the
activations, :math:`\gamma_k`, and the paper's recursion for the curvature.  The numbers are those of the recursions in
`bounds`, with norms by power iteration (only the last block's own curvature has no choice of inner norms here); a step
takes a few dozen small operations instead of hundreds, which is what counts on a GPU.  Estimates: for training, never
for a certificate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from curvcert.losses.computed_once import computed_once
from curvcert.losses.gradient_norms import safe_sqrt
from curvcert.network import Network
from curvcert.operators import AbstractLinearMap, Conv2d, Dense, Identity, Reshape
from curvcert.operators.stacked import StackedNorms

BlockBound = Literal["product", "hadamard"]


@dataclass(frozen=True, eq=False)
class Chain:
    """The maps, slopes and curvatures of a network without skips, whose inner blocks end in their activation."""

    maps: tuple[AbstractLinearMap, ...]
    last: AbstractLinearMap
    mu: tuple[float, ...]
    rho: tuple[float, ...]
    c: tuple[float, ...]


def as_chain(network: Network) -> Chain | None:
    """Return the chain that a network is, or None if it is none."""
    units = network.activated if network.is_chain else ()
    if not units or len(units) < len(network.units) or any(unit.is_residual for unit in units):
        return None
    chain = [unit.block for unit in units]
    if not all(isinstance(b.G, Identity) for b in chain[:-1]) or len(network.out_shape) != 1:
        return None
    slopes = [b.activation.slope for b in chain]
    return Chain(
        maps=tuple(b.W for b in chain),
        last=chain[-1].G,
        mu=tuple((alpha + beta) / 2 for alpha, beta in slopes),
        rho=tuple((beta - alpha) / 2 for alpha, beta in slopes),
        c=tuple(b.activation.curvature_c for b in chain),
    )


class ChainConstants(nn.Module):
    """Warm-started estimates of a chain's constants; the vectors they resume from are buffers.

    >>> from curvcert.network import LiveNetwork
    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 2))
    >>> for layer, weight in ((model[0], [[3.0]]), (model[2], [[1.0], [-1.0]])):
    ...     _ = layer.weight.data.copy_(torch.tensor(weight))
    >>> chain = as_chain(LiveNetwork(model, torch.zeros(1, 1))())
    >>> ChainConstants(chain)().pair_lipschitz.detach()
    tensor([[0., 6.],
            [6., 0.]])
    """

    top: Tensor

    def __init__(self, chain: Chain, block_bound: BlockBound = "product", steps: int = 1) -> None:
        """Read a chain; each call takes this many power-iteration steps."""
        super().__init__()
        self.chain, self.block_bound, self.steps = chain, block_bound, steps
        m, device, dtype = len(chain.maps), chain.last.device, chain.last.dtype
        self.stack = StackedNorms([*chain.maps, chain.last])
        self._spans = {interval: number for number, interval in enumerate(self.stack.intervals)}
        forward = _coefficients(m, self._prefix_entry)
        backward = _coefficients(m, self._tail_entry)
        for name, (weights, index) in {"prefix": forward, "tail": backward}.items():
            self.register_buffer(f"_{name}_weights", torch.tensor(weights, dtype=dtype, device=device), False)
            self.register_buffer(f"_{name}_index", torch.tensor(index, device=device), False)
        starts = [(self._mu(0, k - 1), self._spans[0, k]) for k in range(m)]
        self.register_buffer("_start_weights", torch.tensor([w for w, _ in starts], dtype=dtype, device=device), False)
        self.register_buffer("_start_index", torch.tensor([s for _, s in starts], device=device), False)
        diagonal = [self._spans[k, k] for k in range(m + 1)]
        self.register_buffer("_diagonal", torch.tensor(diagonal, device=device), False)
        self.register_buffer("_c", torch.tensor(chain.c, dtype=dtype, device=device), False)
        slopes = [abs(mu) + rho for mu, rho in zip(chain.mu, chain.rho, strict=True)]
        self.register_buffer("_slopes", torch.tensor(slopes, dtype=dtype, device=device), False)
        for k, op in enumerate(chain.maps if block_bound == "hadamard" else ()):
            if _matrix(op) is not None:
                self.register_buffer(f"hadamard_{k}", torch.ones(op.out_size, dtype=dtype, device=device))
        classes = chain.last.out_size
        rows = torch.ones(classes * (classes - 1) // 2, *chain.maps[-1].in_shape, dtype=dtype, device=device)
        self.register_buffer("top", rows / rows.flatten(1).norm(dim=1).reshape(-1, *(1,) * (rows.dim() - 1)))

    def _mu(self, first: int, last: int) -> float:
        """Return the product of the middle slopes of layers first, ..., last."""
        product = 1.0
        for k in range(first, last + 1):
            product *= self.chain.mu[k]
        return product

    def _prefix_entry(self, row: int, j: int) -> tuple[float, int] | None:
        """Return weight and norm of the term with Z_j in Z_row."""
        if not j < row:
            return None
        return self.chain.rho[j] * self._mu(j + 1, row - 1), self._spans[j + 1, row]

    def _tail_entry(self, k: int, j: int) -> tuple[float, int] | None:
        """Return weight and norm of the term with gamma_j in gamma_k."""
        if not k < j < len(self.chain.maps):
            return None
        return self.chain.rho[j] * self._mu(k + 1, j - 1), self._spans[k + 1, j]

    def restart(self) -> None:
        """Put all vectors back to their fixed start."""
        self.stack.restart()
        with torch.no_grad():
            for name, buffer in self.named_buffers():
                if name == "top" or name.startswith("hadamard_"):
                    rows = buffer.flatten(1) if name == "top" else buffer[None]
                    buffer.copy_((torch.ones_like(rows) / rows.shape[1] ** 0.5).reshape(buffer.shape))

    def forward(self) -> "ChainStep":
        """Take a step of all power iterations and return the constants of the weights as they are now."""
        self.stack.refine(self.steps - 1)
        matrices = [_matrix(op) for op in self.chain.maps]
        norms, longest = self.stack.with_longest_rows([*matrices, None])
        return ChainStep(self, norms, longest[:-1])


class ChainStep:
    """The constants at one step, each computed when it is first asked for; all share one set of norms."""

    def __init__(self, owner: ChainConstants, norms: Tensor, longest: Sequence[Tensor | None]) -> None:
        """Read constants from the norms of all intervals, and from the longest rows of the dense layers."""
        self._owner, self._chain, self._longest = owner, owner.chain, longest
        self._norms = norms
        self._layer = self._norms[self._get("_diagonal")]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's parameters, and of these constants."""
        return self._norms.dtype

    def _get(self, name: str) -> Tensor:
        found = getattr(self._owner, name)
        assert isinstance(found, Tensor)
        return found

    @computed_once
    def _reached(self) -> Tensor:
        """Z_0, ..., Z_{m-1}: the constants of x -> W_k x_k."""
        m = len(self._chain.maps)
        A = self._get("_prefix_weights") * self._norms[self._get("_prefix_index")]
        return _solve_unit_lower(A[:m, :m], self._get("_start_weights") * self._norms[self._get("_start_index")])

    @computed_once
    def _prefixes(self) -> Tensor:
        """L_0, ..., L_m: the constants of x -> x_k."""
        return torch.cat([self._reached.new_ones(1), self._get("_slopes") * self._reached])

    @computed_once
    def lipschitz(self) -> Tensor:
        """The l2 Lipschitz constant of the whole network, by LipLT."""
        chain, spans, m = self._chain, self._owner._spans, len(self._chain.maps)
        total = self._owner._mu(0, m - 1) * self._norms[spans[0, m]]
        for j in range(m):
            reach = chain.rho[j] * self._owner._mu(j + 1, m - 1) * self._norms[spans[j + 1, m]]
            total = total + reach * self._reached[j]
        return total

    @computed_once
    def curvature(self) -> Tensor:
        """The l2 curvature of the whole network, by the paper's Algorithm 1."""
        chain, m, L = self._chain, len(self._chain.maps), self._prefixes
        slopes = self._get("_slopes")[:-1]
        spans, last = self._owner._spans, self._layer[m - 1] * self._layer[m]
        behind = chain.mu[-1] * self._norms[spans[m - 1, m]] + chain.rho[-1] * last
        steps = torch.cat([slopes * self._layer[: m - 1], behind[None]])
        outer = torch.cat([torch.ones_like(slopes), self._layer[m][None]])
        added = self._get("_c") * self._omega * outer * L[:m].square()
        # K_{k+1} = added_k + steps_k K_k, K_0 = 0: unknowns K_1, ..., K_m.
        return _solve_unit_lower(torch.diag(steps[1:], -1), added)[-1]

    @computed_once
    def pair_lipschitz(self) -> Tensor:
        """The Lipschitz constant of every f_i - f_j, a symmetric (classes, classes) table with zeros inside."""
        chain, m = self._chain, len(self._chain.maps)
        rows = self._pair_rows
        total = self._owner._mu(0, m - 1) * rows[m]
        for j in range(m):
            total = total + chain.rho[j] * self._owner._mu(j + 1, m - 1) * self._reached[j] * rows[m - 1 - j]
        return total

    @computed_once
    def pair_curvature(self) -> Tensor:
        """The curvature of every f_i - f_j by the unrolled bound, a symmetric (classes, classes) table."""
        m, L = len(self._chain.maps), self._prefixes
        mu = [self._owner._mu(k + 1, m - 1) for k in range(m)]
        seen = torch.stack([mu[k] * self._pair_rows[m - 1 - k] for k in range(m)])
        B = self._get("_tail_weights") * self._norms[self._get("_tail_index")]
        sizes = _solve_unit_upper(B[:m, :m], seen.flatten(1)).reshape(seen.shape)
        weights = (self._get("_c") * self._omega * L[:m].square())[: m - 1]
        inner = torch.tensordot(weights, sizes[: m - 1], 1)
        total: Tensor = inner + self._chain.c[-1] * L[m - 1].square() * self._last_block
        return total

    @computed_once
    def _pair_rows(self) -> list[Tensor]:
        """Tables of the lengths of (v_i - v_j)' W_{m-1} ... W_k, for k = m, ..., 0."""
        classes, rows = self._chain.last.out_size, []
        eye = torch.eye(classes, dtype=self._norms.dtype, device=self._norms.device)
        row = self._chain.last.adjoint(eye)
        rows.append(_distances(row.flatten(1)))
        for op in reversed(self._chain.maps):
            row = op.adjoint(row)
            rows.append(_distances(row.flatten(1)))
        return rows

    @computed_once
    def _omega(self) -> Tensor:
        """Bounds on the curvature of x -> Phi(W x) over c, one per layer."""
        longest = torch.stack(
            [_longest_row(op) if row is None else row for op, row in zip(self._chain.maps, self._longest, strict=True)]
        )
        omega = self._layer[:-1] * longest
        if self._owner.block_bound == "product":
            return omega
        found = [
            self._hadamard(k, matrix) if matrix is not None else omega[k]
            for k, matrix in enumerate(map(_matrix, self._chain.maps))
        ]
        return torch.stack(found)

    def _hadamard(self, k: int, matrix: Tensor) -> Tensor:
        """Return the root of the largest eigenvalue of (W W') squared entry by entry."""
        squares, v = (matrix @ matrix.T).square(), self._get(f"hadamard_{k}")
        with torch.no_grad():
            for _ in range(self._owner.steps):
                image = squares @ v
                v.copy_(image / torch.linalg.vector_norm(image).clamp(min=torch.finfo(v.dtype).tiny))
            direction = v.clone()
        return safe_sqrt(direction @ (squares @ direction))

    @computed_once
    def _last_block(self) -> Tensor:
        """The largest eigenvalue of W' diag|v_i - v_j| W for the last layer's W, a (classes, classes) table."""
        W, classes = self._chain.maps[-1], self._chain.last.out_size
        eye = torch.eye(classes, dtype=self._norms.dtype, device=self._norms.device)
        i, j = torch.triu_indices(classes, classes, offset=1, device=self._norms.device)
        rows = self._chain.last.adjoint(eye)
        weights = (rows[i] - rows[j]).abs()
        with torch.no_grad():
            v = self._get("top")
            for _ in range(self._owner.steps):
                image = W.adjoint(weights * W.apply(v))
                length = torch.linalg.vector_norm(image.flatten(1), dim=1).clamp(min=torch.finfo(v.dtype).tiny)
                v.copy_(image / length.reshape(-1, *(1,) * (v.dim() - 1)))
            direction = v.clone()
        values = (weights * W.apply(direction).square()).flatten(1).sum(dim=1)
        table = values.new_zeros(classes, classes).index_put((i, j), values)
        return table + table.T


def _coefficients(
    m: int, entry: Callable[[int, int], tuple[float, int] | None]
) -> tuple[list[list[float]], list[list[int]]]:
    """Return tables of weights and of places among the norms; weight 0 where there is no term."""
    found = [[entry(row, column) or (0.0, 0) for column in range(m + 1)] for row in range(m + 1)]
    return [[weight for weight, _ in row] for row in found], [[place for _, place in row] for row in found]


def _solve_unit_lower(A: Tensor, right: Tensor) -> Tensor:
    """Return x with x = right + A x, A strictly lower triangular."""
    x: Tensor = torch.linalg.solve_triangular(-A, right[:, None], upper=False, unitriangular=True)
    return x[:, 0]


def _solve_unit_upper(A: Tensor, right: Tensor) -> Tensor:
    """Return x with x = right + A x, A strictly upper triangular."""
    x: Tensor = torch.linalg.solve_triangular(-A, right, upper=True, unitriangular=True)
    return x


def _distances(rows: Tensor) -> Tensor:
    """Return the table of the distances between rows, with gradient 0 where they agree."""
    table: Tensor = torch.linalg.vector_norm(rows[:, None] - rows[None], dim=2)
    return table


def _matrix(op: AbstractLinearMap) -> Tensor | None:
    """Return the matrix of a dense map, behind a flattening or not."""
    factors = getattr(op, "factors", (op,))
    dense = [factor for factor in factors if not isinstance(factor, Reshape)]
    return dense[0].weight if len(dense) == 1 and isinstance(dense[0], Dense) else None


def _longest_row(op: AbstractLinearMap) -> Tensor:
    """Return the length of the longest row; a convolution's border counts like its interior."""
    matrix = op.weight.flatten(1) if isinstance(op, Conv2d) else op.as_matrix()
    with torch.no_grad():
        longest = torch.linalg.vector_norm(matrix, dim=1).argmax()[None]
    # The gradient lies in that row alone.
    length: Tensor = torch.linalg.vector_norm(matrix.index_select(0, longest))
    return length
