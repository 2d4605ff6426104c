r"""The LipSDP recursion of a chain of images, frequency by frequency.

On a torus (`operators/torus.py`) the matrices of the recursion are block-circulant as long as the multiplier t is one
number per layer: at each frequency f, with the path map :math:`\hat P(f)` from one activation to the next and the area
A of the strides between them,

.. math:: S(f) = \tfrac1A \hat P(f)\, \hat X^{-1} \hat P(f)^*,

a matrix of the size of the channels, and one multiplier for all f.  What is behind a map V to a vector, such as a dense
layer, is :math:`N^{-2} \sum_f \hat V \hat X^{-1} \hat V^*`.  The slopes are those of the hull with 0, as beside every
image.  At each layer the recursion goes on from its own matrices, or from :math:`L^2 I` by LipLT where that gives less.

S is block-circulant, so the largest eigenvalue of its entries squared is that of

.. math:: \sum_\tau S(\tau)^{\circ 2} = N^{-2} \sum_f |S(f)|^{\circ 2} .
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.inverse_metric import dominating, gains, inverse_metric
from curvcert.bounds.lipschitz.on_torus import Images
from curvcert.operators.base import Shape
from curvcert.operators.frequencies import Exit, Frequencies, State, Through
from curvcert.operators.planes import Slopes
from curvcert.operators.verified import largest_eigenvalue_upper_bound
from curvcert.rounding import TINY, UNIT_ROUNDOFF, Upper, gamma, least, lengths


@final
@dataclass(frozen=True, eq=False)
class ImageCongruence:
    """S or more, for what a layer reads its activations from: (h, rows, w, columns, blocks, outputs, outputs).

    `end` is the number of the pre-activation on the torus, `shape` its shape.
    """

    S: Tensor
    frequencies: Frequencies
    end: int
    shape: Shape

    @property
    def hadamard(self) -> Tensor:
        """A bound on the root of the largest eigenvalue of S squared entry by entry."""
        weights = self.frequencies.multiplicity()[:, None, None, None, None, None]
        squares = torch.view_as_real(self.S).square().sum(dim=-1) * (weights / self.frequencies.count(self.end))
        total = squares.sum(dim=(0, 1, 2, 3))
        rounding = lengths(total, -2, -1).amax() * (2 * gamma(self.S.shape[:4].numel() + 16))
        bound = largest_eigenvalue_upper_bound((total + total.mT) / 2, rounding.bound)
        return (Upper(bound) + TINY).root().bound

    @property
    def matrix(self) -> tuple[Tensor, Tensor]:
        r"""The matrix on the image, :math:`S_{(o, i), (o', j)} = S_{o o'}(i - j)`, and a bound on its error."""
        S = self.S if self.S.shape[4] == 1 else _block_diagonal(self.S)
        channels, height, width = self.shape
        lags = self.frequencies.at_lags(S[..., 0, :, :], self.end, height, width)
        rows, columns = (torch.arange(n, device=S.device) for n in (height, width))
        spread = lags[:, :, (rows[:, None] - rows) % (2 * height - 1)][
            ..., (columns[:, None] - columns) % (2 * width - 1)
        ]
        # (o, o', i, j, k, l) for the positions (i, k) and (j, l)
        n = channels * height * width
        matrix = spread.permute(0, 2, 4, 1, 3, 5).reshape(n, n)
        size = lengths(torch.view_as_real(S), -3, -2, -1).amax()
        error = size * (4 * (self.S.shape[:4].numel() + 32) * UNIT_ROUNDOFF * height * width)
        return (matrix + matrix.mT) / 2, error.bound


@final
@dataclass(frozen=True, eq=False)
class ImageRecursion:
    r"""What the recursion says of images.

    `layers` has the congruence of every activation by its number, `scales` bounds :math:`\|X^{-1}\|` behind it.
    `behind` is the map from the last image to what reads it, times a root of :math:`X^{-1}`.
    """

    layers: dict[int, ImageCongruence]
    scales: dict[int, Tensor]
    behind: Through

    @property
    def congruence(self) -> tuple[Tensor, Tensor]:
        """S of what reads the last image, and a bound on its error in the 2-norm."""
        through = self.behind
        rounding = Upper(through.gram.diagonal(), through.length).sum() * gamma(through.length + 8)
        error = (Upper(2 * through.norm) + through.error) * through.error + rounding
        return (through.gram + through.gram.mT) / 2, error.bound


def image_recursion(images: Images, door: Exit) -> ImageRecursion | None:
    """Run the recursion through the images of a chain up to the exit `door`; None where there are too many frequencies.

    All of them take part in one multiplier, so that they have to be held at once.
    """
    frequencies = images.torus.all_frequencies()
    if frequencies is None:
        return None
    node = {images.place(k): k for k in images.number}
    growth, layers, scales = images.torus.constants, dict[int, ImageCongruence](), dict[int, Tensor]()
    roots, start = [frequencies.multiple(0, growth[0])], 0
    for k, slopes in images.torus.bent.items():
        value = images.torus.values[k]
        z = value.uses[0].source
        ways = [(frequencies.norm(state, start, z), state) for state in _path_maps(start, z, roots, frequencies)]
        norm, state = min(ways, key=lambda found: float(found[0]))
        largest = Upper(norm).square().bound
        S, error = frequencies.gram(state, start, z, norm)
        if k in node:
            layers[node[k]] = ImageCongruence(dominating(S, error), frequencies, z, value.shape)
            # The steepest slope is a sum, and taken twice.
            steepest = abs(slopes.mu) + slopes.rho
            scales[node[k]] = least(Upper(largest, 2) * steepest * steepest, Upper(growth[k]).square()).bound
        own = _root(slopes, S, error, largest, frequencies)
        roots, start = [frequencies.multiple(k, growth[k]), *([] if own is None else [own])], k
    throughs = [frequencies.behind(door, state, start) for state in _path_maps(start, door.source, roots, frequencies)]
    return ImageRecursion(layers, scales, min(throughs, key=lambda found: float(found.norm)))


def _path_maps(start: int, end: int, roots: list[State], frequencies: Frequencies) -> list[State]:
    """Return the map from one value to a later one behind each of some roots."""
    return [next(state for k, state in frequencies.states(start, root) if k == end) for root in roots]


def _root(slopes: Slopes, S: Tensor, error: Tensor, largest: Tensor, frequencies: Frequencies) -> State | None:
    """Return a root of the metric behind an activation; None where a multiple of the identity is no worse."""
    alpha, beta = slopes.mu - slopes.rho, slopes.mu + slopes.rho
    if not gains(alpha, beta):
        return None
    Y = inverse_metric(S, error, largest, alpha, beta)
    return None if Y is None else frequencies.root(Y)


def _block_diagonal(S: Tensor) -> Tensor:
    """Return block-diagonal matrices as one block."""
    blocks, size = S.shape[4], S.shape[-1]
    whole = S.new_zeros(*S.shape[:4], 1, blocks, size, blocks, size)
    for block in range(blocks):
        whole[..., 0, block, :, block, :] = S[..., block, :, :]
    return whole.flatten(-2).flatten(-3, -2)
