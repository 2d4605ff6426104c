r"""LipLT with slopes for every neuron and sample: its z-form as seen from a point.

Only differences from x occur in an anchored bound, so every neuron has its own interval of quotients, with middle
:math:`\mu` and half its width :math:`\rho`.  With the path maps P of the network whose activations are multiplications
by :math:`\mu`, one problem per sample,

.. math:: Z_k(x) = \|P_{k0}\| + \sum_{i < k} \|P_{ki}\, \mathrm{diag}(\rho_i)\| \, Z_i(x)

bounds :math:`\|\Delta z_k\| / \|\Delta x\|`, and outputs likewise.  Nodes of one level are also bounded together, as in
`growth.py`.  It is not monotone in the slopes: whoever asks takes the least of this and of the global constant.

The maps are formed, sample by sample, with a bound on their error in the Frobenius norm: so this is for networks whose
neurons fit into a few small matrices.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.problem import Problem
from curvcert.network.nodes import AbstractNode, ElementwiseNode
from curvcert.norms import conjugate
from curvcert.operators.verified import largest_eigenvalues_upper_bound
from curvcert.propagation.neuron_maps import Enclosed, NeuronMaps, neuron_maps
from curvcert.propagation.slopes import Slopes
from curvcert.rounding import UNIT_ROUNDOFF, Upper, gamma, least, norm_upper_bound_of_vectors, total

_ELEMENTS = 2**20
"""Numbers in the matrices of all neurons over the input and each other, up to which they are formed for a sample."""


_BATCH_ELEMENTS = 2**23
"""Numbers in all the maps of a batch that are held at once."""

_Norm = Callable[[Tensor], Tensor]
"""A norm of every matrix of a batch, (batch,), or of each of their rows, (batch, rows)."""


def path_constants(problem: Problem, slopes: Mapping[int, Slopes], values: Sequence[int]) -> dict[int, Tensor]:
    """Return constants of x -> v for values that units end in, one per sample, the output in its final norm.

    `slopes` holds those of every activation by its number.  Nothing is returned where the maps would be too large, or
    where the norm is none of 1, 2 and inf.
    """
    if reason_against_paths(problem) is not None:
        return {}
    nodes, end = problem.network.nodes, len(problem.network.nodes) - 1
    affine = tuple(k for k in values if k != end and not isinstance(nodes[k], ElementwiseNode))
    maps = problem.once(f"neurons and values {affine}", lambda: neuron_maps(nodes, affine))
    order = [k for level in maps.levels for k in level]
    lower = torch.cat([slopes[k].lower.flatten(1) for k in order], dim=1)
    upper = torch.cat([slopes[k].upper.flatten(1) for k in order], dim=1)
    size = max(1, _BATCH_ELEMENTS // maps.z.value.numel())
    pieces = []
    for part in zip(lower.split(size), upper.split(size), strict=True):
        paths = _Paths(problem, maps, *part)
        found = {k: paths.of(maps.values[k], paths.norm) for k in affine}
        found |= {k: paths.behind(k) for k in values if k != end and k not in affine and k > 0}
        pieces.append(found | {end: paths.of(maps.output, paths.functionals if problem.scalars else paths.norm)})
    return {k: torch.cat([found[k] for found in pieces]) for k in pieces[0]}


def reason_against_paths(problem: Problem) -> str | None:
    """Say why the maps are not formed, or None."""
    nodes = problem.network.nodes
    if problem.network.pools:
        return "no rule for a MaxPool"
    if problem.p not in (1.0, 2.0, math.inf) or not (problem.scalars or problem.q == problem.p):
        return "paths are bounded for p = q = 1, 2 and inf"
    neurons = sum(_numel(node) for node in nodes if isinstance(node, ElementwiseNode))
    elements = neurons * (neurons + _numel(nodes[0]))
    if neurons == 0:
        return "there is no activation"
    return f"maps of {elements:.2g} numbers for each sample (over {_ELEMENTS})" if elements > _ELEMENTS else None


def _numel(node: AbstractNode) -> int:
    return torch.Size(node.shape).numel()


@dataclass(frozen=True, eq=False)
class _Rows:
    """Computed path maps to some rows, (batch, rows, columns), and their error in the Frobenius norm, (batch,)."""

    value: Tensor
    error: Tensor


class _Paths:
    """The path maps of a batch, level by level, and the constants that they give."""

    def __init__(self, problem: Problem, maps: NeuronMaps, lower: Tensor, upper: Tensor) -> None:
        self._p, self._maps = problem.p, maps
        order = [k for level in maps.levels for k in level]
        self._mu = (lower + upper) / 2
        self._rho = Upper(torch.maximum(upper - self._mu, self._mu - lower), 1).bound
        self._steepest = torch.maximum(lower.abs(), upper.abs())
        ends = list(accumulate(maps.sizes))
        places = {k: slice(end - size, end) for k, end, size in zip(order, ends, maps.sizes, strict=True)}
        self._places = [{k: places[k] for k in level} for level in maps.levels]
        self._activations: list[_Rows] = []
        self._levels: list[Tensor] = []
        self._nodes: dict[int, Tensor] = {}
        for level in self._places:
            self._add(level)

    def of(self, rows: Enclosed, norm: _Norm) -> Tensor:
        """Bound the growth of rows that are linear in the input and in activations of the levels so far."""
        return self._growth(self._images(rows), norm)

    def behind(self, activation: int) -> Tensor:
        """Bound the growth of an activation."""
        place = next(level[activation] for level in self._places if activation in level)
        return (Upper(self._steepest[:, place].amax(dim=1)) * self._nodes[activation]).bound

    def norm(self, A: Tensor) -> Tensor:
        """Bound the p -> p norm of every matrix."""
        if self._p != 2:
            return Upper(A.abs()).sum(1 if self._p == 1 else 2).amax(1).bound
        wide = A if A.shape[1] <= A.shape[2] else A.mT
        error = Upper(_frobenius(A)).square() * gamma(wide.shape[2] + 2)
        return Upper(largest_eigenvalues_upper_bound(wide @ wide.mT, error.bound)).root().bound

    def functionals(self, A: Tensor) -> Tensor:
        """Bound the norm of every row as a functional."""
        return norm_upper_bound_of_vectors(A, conjugate(self._p), 2)

    def _add(self, level: Mapping[int, slice]) -> None:
        """Bound one level, and keep its activations as linear in the input and in what of activations is not linear."""
        start, stop = _hull(level)
        found = self._images(Enclosed(self._maps.z.value[start:stop], self._maps.z.error[start:stop]))
        whole = self._growth(found, self.norm)
        alone = {k: whole for k in level}
        if len(level) > 1:
            parts = {k: found.value[:, s.start - start : s.stop - start] for k, s in level.items()}
            alone = {k: self._growth(_Rows(part, found.error), self.norm) for k, part in parts.items()}
            whole = torch.minimum(whole, norm_upper_bound_of_vectors(torch.stack([*alone.values()]), self._p, 0))
        self._levels.append(whole)
        self._nodes |= {k: torch.minimum(one, whole) for k, one in alone.items()}
        mu = self._mu[:, start:stop]
        linear = mu[:, :, None] * found.value
        error = Upper(mu.abs().amax(dim=1)) * found.error + Upper(_frobenius(linear)) * (2 * UNIT_ROUNDOFF)
        rest = torch.eye(stop - start, dtype=mu.dtype, device=mu.device).expand(len(mu), -1, -1)
        between = linear.new_zeros(*linear.shape[:2], self._maps.inputs + start - linear.shape[2])
        self._activations.append(_Rows(torch.cat([linear, between, rest], dim=2), error.bound))

    def _images(self, A: Enclosed) -> _Rows:
        r"""Return the path maps to rows: A times the input and the activations, each over the input and the rests.

        With A off by E and the activations T by F, computed products are off by
        :math:`\|A\| F + (\|E\| + \gamma \|A\|)(\|T\| + F)` at most.
        """
        inputs, batch = self._maps.inputs, len(self._mu)
        width = self._activations[-1].value.shape[2] if self._activations else inputs
        value = A.value.new_zeros(batch, len(A.value), width)
        value[:, :, :inputs] = A.value[:, :inputs]
        size = Upper(torch.full_like(self._mu[:, 0], float(inputs))).root()
        error = Upper(torch.zeros_like(self._mu[:, 0]))
        start = inputs
        for rows in self._activations:
            columns = slice(start, start + rows.value.shape[1])
            start = columns.stop
            if bool(A.value[:, columns].any() or A.error[:, columns].any()):
                value[:, :, : rows.value.shape[2]] += A.value[:, columns] @ rows.value
                size, error = size + _frobenius(rows.value), error + rows.error
        norm, off = (norm_upper_bound_of_vectors(part.flatten(), 2, 0) for part in (A.value, A.error))
        rounding = Upper(norm) * gamma(A.value.shape[1] + len(self._places) + 4) + off
        return _Rows(value, (error * norm + rounding * (size + error)).bound)

    def _growth(self, rows: _Rows, norm: _Norm) -> Tensor:
        """Sum up the path from the input, and what each level adds by what of it is not linear."""
        inputs = self._maps.inputs
        parts = [Upper(self._known(rows.value[:, :, :inputs], rows.error, norm))]
        for level, whole in zip(self._places, self._levels, strict=False):
            place = slice(*_hull(level))
            if inputs + place.stop > rows.value.shape[2]:
                break
            share = self._share(rows, place, norm, whole)
            if len(level) > 1:
                each = [self._share(rows, part, norm, self._nodes[k]) for k, part in level.items()]
                share = least(share, total(each))
            parts.append(share)
        return total(parts).bound

    def _share(self, rows: _Rows, place: slice, norm: _Norm, Z: Tensor) -> Upper:
        inputs, rho = self._maps.inputs, self._rho[:, place]
        weighed = rows.value[:, :, inputs + place.start : inputs + place.stop] * rho[:, None, :]
        # Every entry rounds once: in the spectral norm that may be more than the same part of the whole.
        error = Upper(rho.amax(dim=1)) * rows.error + Upper(_frobenius(weighed)) * (2 * UNIT_ROUNDOFF)
        share = self._known(weighed, error.bound, norm)
        return Upper(share) * (Z if share.dim() == 1 else Z[:, None])

    def _known(self, A: Tensor, error: Tensor, norm: _Norm) -> Tensor:
        """Bound the norm of what A stands for: an error is longer in other norms than in the Frobenius norm."""
        found = norm(A)
        off = Upper(error) if self._p == 2 else Upper(error) * math.sqrt(max(A.shape[1:])) * (1 + 2 * UNIT_ROUNDOFF)
        return (off + found if found.dim() == 1 else off[:, None] + found).bound


def _frobenius(A: Tensor) -> Tensor:
    return norm_upper_bound_of_vectors(A.flatten(1), 2, 1)


def _hull(level: Mapping[int, slice]) -> tuple[int, int]:
    return min(place.start for place in level.values()), max(place.stop for place in level.values())
