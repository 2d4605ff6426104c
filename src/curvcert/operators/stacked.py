r"""Norms of all intervals of a chain of maps, estimated together.

LipLT needs the norms of :math:`A_k \cdots A_j` for all j <= k.  One power-iteration step for all of them takes
two passes over the maps: forward, each map is applied once to the stacked vectors of the intervals that pass
through it; backward, its adjoint.  At the vectors u and v of an interval, :math:`\sigma = u^T A_k \cdots A_j v` has
the gradient :math:`l\, r^T` in each map, r the vector that enters it and l the one that comes back: the gradient of all
norms in one map is one product too.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from curvcert.operators.base import AbstractLinearMap


class StackedNorms(nn.Module):
    """Warm-started norms of all intervals of a chain of maps; the singular vectors are buffers.

    The vectors that pass through map k form a grid: a row for each end e >= k, a column for each start j <= k.  So
    those that end there are the first row, and those that start there the last column: slices, never copies.

    >>> from curvcert.operators.dense import Dense
    >>> A, B = Dense(torch.diag(torch.tensor([3.0, 1.0]))), Dense(torch.diag(torch.tensor([1.0, 5.0])))
    >>> norms = StackedNorms([A, B])
    >>> for _ in range(50):
    ...     values = norms()
    >>> norms.intervals, values
    ([(0, 0), (0, 1), (1, 1)], tensor([3., 5., 5.]))
    """

    def __init__(self, maps: Sequence[AbstractLinearMap]) -> None:
        """Take maps of which each can be applied to what the one before it gives, the first applied first."""
        super().__init__()
        self.maps = tuple(maps)
        count, device = len(self.maps), self.maps[0].device
        self.intervals = [(j, k) for k in range(count) for j in range(k + 1)]
        for k, op in enumerate(self.maps):
            self.register_buffer(f"start_{k}", _directions(count - k, op))
        place = {interval: number for number, interval in enumerate(self.intervals)}
        cells = [place[j, e] for k in range(count) for e in range(k, count) for j in range(k + 1)]
        members = nn.functional.one_hot(torch.tensor(cells), len(place)).T
        self.register_buffer("_members", members.to(device, self.maps[0].dtype), persistent=False)

    def forward(self) -> Tensor:
        """Take one step for all intervals and return their norms, differentiable in the weights of the maps."""
        return self.with_longest_rows([None] * len(self.maps))[0]

    def with_longest_rows(self, matrices: Sequence[Tensor | None]) -> tuple[Tensor, list[Tensor | None]]:
        """Return the norms and, for maps whose matrix is given, the length of its longest row.

        The row's gradient is one more rank-one term, so it rides along in the product of the norms'.
        """
        rows = [None if matrix is None else _longest_row(matrix) for matrix in matrices]
        images, lengths, directions, longest = self._forward(rows)
        sums = self._backward(images, directions)
        # Every map of an interval gives the same number, with the gradient in its own weights.
        total = self._buffer("_members") @ torch.cat(sums)
        return torch.cat(lengths) + (total - total.detach()), longest

    @torch.no_grad()
    def refine(self, steps: int) -> None:
        """Take steps without a value."""
        for _ in range(steps):
            images, _, directions, _ = self._forward([None] * len(self.maps))
            self._backward(images, directions)

    @torch.no_grad()
    def restart(self) -> None:
        """Put all vectors back to their fixed start."""
        for k, op in enumerate(self.maps):
            self._buffer(f"start_{k}").copy_(_directions(len(self.maps) - k, op))

    def _buffer(self, name: str) -> Tensor:
        found = getattr(self, name)
        assert isinstance(found, Tensor)
        return found

    def _forward(
        self, rows: Sequence[tuple[Tensor, Tensor] | None]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor | None]]:
        """Return, for every map, the images, lengths and directions of those that end there, and a row's length."""
        images: list[Tensor] = []
        lengths: list[Tensor] = []
        directions: list[Tensor] = []
        longest: list[Tensor | None] = []
        for k, (op, row) in enumerate(zip(self.maps, rows, strict=True)):
            start = self._buffer(f"start_{k}")[:, None]
            x = start.clone() if k == 0 else torch.cat([images[-1][1:].detach(), start], dim=1)
            flat = x.flatten(0, 1)
            if row is not None:
                flat = torch.cat([flat, row[1].reshape(1, *op.in_shape)])
            y = op.apply(flat)
            longest.append(None if row is None else y[-1].flatten().index_select(0, row[0]).sum())
            y = y[: x.shape[0] * x.shape[1]].unflatten(0, x.shape[:2])
            with torch.no_grad():
                length, direction = _units(y[0])
            images.append(y)
            lengths.append(length)
            directions.append(direction)
        return images, lengths, directions, longest

    def _backward(self, images: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
        """Send the vectors back, keep where they arrive, and return u' A v, differentiable, for every cell."""
        sums: list[Tensor] = []
        returning: Tensor | None = None
        for k in reversed(range(len(self.maps))):
            with torch.no_grad():
                ending = directions[k][None]
                left = ending if returning is None else torch.cat([ending, returning])
                back = self.maps[k].adjoint(left.flatten(0, 1)).unflatten(0, left.shape[:2])
                self._buffer(f"start_{k}").copy_(_units(back[:, k])[1])
                returning = back[:, :k]
            sums.append((left * images[k]).flatten(2).sum(dim=2).flatten())
        return sums[::-1]


@torch.no_grad()
def _longest_row(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the place of the longest row, and the row made a unit."""
    lengths = torch.linalg.vector_norm(matrix, dim=1)
    place = lengths.argmax()[None]
    return place, _units(matrix.index_select(0, place))[1][0]


def _units(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lengths of the rows, and the rows made units; zero rows stay zero."""
    length = torch.linalg.vector_norm(x.flatten(1), dim=1)
    safe = length.clamp(min=torch.finfo(x.dtype).tiny)
    return length, x / safe.reshape(-1, *(1,) * (x.dim() - 1))


def _directions(count: int, op: AbstractLinearMap) -> Tensor:
    """Return fixed unit vectors, so that a run does not depend on the global random state."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(count, op.in_size, generator=generator, dtype=torch.float64)
    unit: Tensor = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return unit.reshape(count, *op.in_shape).to(op.dtype).to(op.device)
