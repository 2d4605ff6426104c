r"""What is known at the samples themselves: slopes, back-propagated gradients and Jacobians, as upper bounds.

Every number stands for the network in real arithmetic: intervals of slopes hold the true ones, sizes of gradients
include how far the computed ones may be off, and so do norms of Jacobians.  With computed Jacobians
:math:`\hat X_{k-1}` of :math:`x \mapsto x_{k-1}`, off by at most F in the spectral norm, and computed slopes
:math:`\hat S`,

.. math::
    \hat J_k = W_k \hat X_{k-1}, \qquad \hat X_k = H_k \hat X_{k-1} + G_k \mathrm{diag}(\hat S_k) \hat J_k,

each product adds :math:`\gamma_n \||A|\|_2 \|\hat X\|_F` to F.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.drift import Covectors, ball_slopes, carry_gradients, carry_point
from curvcert.bounds.lipschitz.sloped import Slopes
from curvcert.certificates.shell.layers import Layer, Layers
from curvcert.certificates.shell.norms import FLOOR, STEP, congruent_eigenvalues, frobenius_norms, spectral_norms
from curvcert.errors import UnsupportedModule
from curvcert.network import Affine, Block
from curvcert.network.evaluation import Computed, evaluate_with_error
from curvcert.operators import AbstractLinearMap, NormBounds
from curvcert.operators.magnitudes import image_error, rounding_length
from curvcert.rounding import UNIT_ROUNDOFF, gamma, inflate, norm_upper_bound_of_vectors

_LEAST = 2.0**-400
"""Gradients count as at least this large."""


@dataclass(frozen=True, eq=False)
class Jacobian:
    """Bounds on the Jacobian J of one block's z.

    Attributes:
        norm: its norm, (batch,).
        rows: the norms of its rows, (batch, n).
        output: the norm of the Jacobian of the block's output, (batch,).
        gram: the absolute values of J J', (batch or 1, n, n), for the computed J.
        error: how far that may be off in the spectral norm, (batch,).
    """

    norm: Tensor
    rows: Tensor
    output: Tensor
    gram: Tensor
    error: Tensor

    def of_samples(self, index: Tensor) -> "Jacobian":
        """Return the same for some of the samples."""
        gram = self.gram if len(self.gram) == 1 else self.gram[index]
        return Jacobian(self.norm[index], self.rows[index], self.output[index], gram, self.error[index])

    def weighted(self, w: Tensor) -> Tensor:
        r"""Bound :math:`\|\mathrm{diag}(w)^{1/2} J\|_2` for weights w >= 0 of shape (batch, k, n): (batch, k)."""
        peak = inflate(w.amax(dim=2).sqrt(), 0.0)
        root = congruent_eigenvalues(self.gram, w, self.rows).sqrt() + peak * self.error[:, None]
        return inflate(torch.minimum(root, peak * self.norm[:, None]), STEP)


@dataclass(frozen=True, eq=False)
class AtCentre:
    """One block at the samples; everything flat, (batch, n) or (batch, pairs, n), and None for an affine block.

    Attributes:
        layer: the block and its norms.
        z: the pre-activations with their error.
        slopes: intervals that hold the true slopes.
        sizes: bounds on |G' g|, g the gradients of the pairs behind the block.
        sloped: bounds on the norm of diag(S) W.
        growth: bounds on the norm of H + G diag(S) W.
        jacobian: None where it is not formed.
    """

    layer: Layer
    z: Computed | None = None
    slopes: Slopes | None = None
    sizes: Tensor | None = None
    sloped: Tensor | None = None
    growth: Tensor | None = None
    jacobian: Jacobian | None = None

    @cached_property
    def powers(self) -> Tensor:
        """What norms of the sizes are made of: their squares in l2, themselves otherwise."""
        assert self.sizes is not None
        return self.sizes.square() if self.layer.p == 2 else self.sizes

    def of_samples(self, index: Tensor) -> "AtCentre":
        """Return the same for some of the samples."""
        if self.z is None or self.slopes is None or self.sizes is None or self.sloped is None:
            return self
        z, slopes = self.z, self.slopes
        return AtCentre(
            self.layer,
            Computed(z.value[index], z.error[index], z.error_norm[index]),
            Slopes(slopes.lower[index], slopes.upper[index]),
            self.sizes[index],
            self.sloped[index],
            None if self.growth is None else self.growth[index],
            None if self.jacobian is None else self.jacobian.of_samples(index),
        )

    def of_pairs(self, index: Tensor) -> "AtCentre":
        """Return the same for some of the pairs, (batch, fewer) by their places."""
        if self.sizes is None:
            return self
        places = index[:, :, None].expand(-1, -1, self.sizes.shape[2])
        return replace(self, sizes=self.sizes.gather(1, places))


def at_centres(layers: Layers, x: Tensor, label: Tensor, others: Tensor) -> list[AtCentre]:
    """Evaluate everything at a batch, for the pairs f_i - f_label with i in `others`, (batch, pairs)."""
    problem = layers.problem
    evaluation = evaluate_with_error(layers.network, x, problem.norms)
    covectors = carry_gradients(problem, carry_point(problem, evaluation))
    if covectors is None:
        raise UnsupportedModule("The local certificate needs a derivative of every block.")
    found, push = [], _Push.start(layers)
    for k, (layer, z) in enumerate(zip(layers.layers, evaluation.pre_activations, strict=True)):
        last = k == len(layers.layers) - 1
        if isinstance(layer.block, Affine) or z is None:
            found.append(AtCentre(layer))
            push = None if push is None or last else push.image(layer.block.H)
            continue
        flat = Computed(z.value.flatten(1), z.error.flatten(1), z.error_norm)
        slopes = ball_slopes(layer.block, flat, torch.zeros_like(flat.value))
        sizes = _sizes(layer, covectors[k + 1], label, others)
        # Beside its Jacobian the growth of a first layer hardly counts: the cheap norm will do.
        first = push is not None and push.at_start
        sloped = layer.weighted(slopes.steepest) if first else _sloped_norms(layer, slopes)
        jacobian = None
        if push is not None:
            jacobian, push = push.through(layer, flat.value, slopes, last)
        growth = sloped if layer.plain or last else _growth(layer, slopes, sloped, jacobian is not None)
        found.append(AtCentre(layer, flat, slopes, sizes, sloped, growth, jacobian))
    return found


def _sizes(layer: Layer, behind: Covectors, label: Tensor, others: Tensor) -> Tensor:
    """Bound |G' (g_i - g_y)|, entry by entry."""
    block = layer.block
    assert isinstance(block, Block)
    value, shape = behind.value.flatten(2), behind.value.shape[2:]
    index = others[:, :, None].expand(-1, -1, value.shape[2])
    own = value.gather(1, label[:, None, None].expand(-1, 1, value.shape[2]))
    difference = value.gather(1, index) - own
    drift = behind.drift.gather(1, others) + behind.drift.gather(1, label[:, None])
    drift = drift + 2 * UNIT_ROUNDOFF * norm_upper_bound_of_vectors(difference, 1, 2)
    shaped = difference.reshape(*difference.shape[:2], *shape)
    size = block.G.adjoint(shaped).abs() + image_error(block.G.T, shaped)
    # Squares of what is larger than that do not underflow.
    return inflate(size.flatten(2) + (layer.G * drift)[:, :, None], gamma(16)).clamp(min=_LEAST)


def _sloped_norms(layer: Layer, slopes: Slopes) -> Tensor:
    """Bound ||diag(S) W|| for each sample."""
    cheap, factor = layer.weighted(slopes.steepest), layer.factor
    if factor is None:
        return cheap
    matrix, error = factor
    # Each entry of the product rounds once: gamma_n covers it in the Frobenius norm.
    exact = inflate(spectral_norms(slopes.steepest[:, :, None] * matrix), gamma(len(matrix) + 8))
    return torch.minimum(cheap, inflate(exact + slopes.steepest.amax(dim=1) * error, 0.0) + FLOOR)


def _growth(layer: Layer, slopes: Slopes, sloped: Tensor, formed: bool) -> Tensor:
    """Bound ||H + G diag(S) W|| for each sample, by the matrix itself where that is small enough."""
    bound = torch.minimum(layer.H + layer.G * sloped, layer.constant)
    block = layer.block
    if formed and isinstance(block, Block) and block.is_residual:
        n = block.W.in_size
        eye = torch.eye(n, dtype=torch.float64, device=block.c.device).reshape(1, n, *block.in_shape)
        start = _Push(eye, torch.zeros((), dtype=torch.float64, device=block.c.device), layer.norms)
        middle = (slopes.lower + slopes.upper) / 2
        bound = torch.minimum(bound, start.outer(start.inner(block), block, middle, slopes).norm())
    return inflate(bound, STEP)


@dataclass(frozen=True, eq=False)
class _Push:
    """Computed Jacobians of x -> x_k, as images (batch, columns, *shape) of a basis, and how far they may be off.

    At the start, before the first block, `root` may hold R in place of the first W.
    """

    X: Tensor
    error: Tensor
    norms: NormBounds
    root: Tensor | None = None
    at_start: bool = False

    @staticmethod
    def start(layers: Layers) -> "_Push | None":
        if not layers.with_jacobians:
            return None
        zero = torch.zeros((), dtype=torch.float64, device=layers.network.device)
        return _Push(layers.basis, zero, layers.problem.norms, layers.root, at_start=True)

    def norm(self) -> Tensor:
        """Bound the spectral norm."""
        return inflate(spectral_norms(self.X.flatten(2)) + self.error, STEP) + FLOOR

    def rows(self) -> Tensor:
        """Bound the norms of the rows, one a neuron."""
        size = torch.linalg.vector_norm(self.X.flatten(2), dim=1)
        return inflate(size + self.error[..., None], gamma(self.X.shape[1] + 8)) + FLOOR

    def gram(self, rows: Tensor) -> Tensor:
        """Bound the absolute values of the inner products of the computed rows."""
        X = self.X.flatten(2)
        return (X.mT @ X).abs() + gamma(X.shape[1] + 16) * rows[:, :, None] * rows[:, None, :]

    def image(self, A: AbstractLinearMap) -> "_Push":
        """Return A X."""
        error = self.norms.norm(A, 2, 2) * self.error
        if rounding_length(A):
            size = frobenius_norms(self.X.flatten(2))
            error = error + gamma(rounding_length(A) + 1) * self.norms.absolute(A, 2) * size
        return _Push(A.apply(self.X), inflate(error, STEP), self.norms)

    def inner(self, block: Block) -> "_Push":
        """Return the Jacobian of z, or what stands for it."""
        if self.root is None:
            return self.image(block.W)
        return _Push(self.root.reshape(1, len(self.root), *block.W.out_shape), self.error, self.norms)

    def outer(self, J: "_Push", block: Block, S: Tensor, slopes: Slopes) -> "_Push":
        """Return the Jacobian of the block's output, given that of z and computed slopes near the true ones."""
        gap = torch.maximum(slopes.upper - S, S - slopes.lower).amax(dim=1).clamp(min=0.0)
        scaled = S.reshape(len(S), 1, *block.W.out_shape) * J.X
        error = slopes.steepest.amax(dim=1) * J.error + gap * frobenius_norms(J.X.flatten(2))
        error = error + 2 * UNIT_ROUNDOFF * frobenius_norms(scaled.flatten(2))
        result = _Push(scaled, inflate(error, STEP), self.norms).image(block.G)
        if not block.is_residual:
            return result
        skip = self.image(block.H)
        total = result.X + skip.X
        error = result.error + skip.error + 2 * UNIT_ROUNDOFF * frobenius_norms(total.flatten(2))
        return _Push(total, inflate(error, STEP), self.norms)

    def through(self, layer: Layer, z: Tensor, slopes: Slopes, last: bool) -> "tuple[Jacobian, _Push | None]":
        """Return the bounds on the Jacobians of a block, and what goes on to the next."""
        block = layer.block
        assert isinstance(block, Block)
        J = self.inner(block)
        norm, gram = (layer.W, layer.gram) if self.at_start else (J.norm(), None)  # at the start J is W itself
        result = None if last else self.outer(J, block, block.activation.derivative(z), slopes)
        output = inflate(layer.G * slopes.steepest.amax(dim=1) * norm, STEP)
        if result is not None and block.is_residual:
            output = result.norm()
        batch, rows = len(z), J.rows()
        gram = J.gram(rows) if gram is None else gram
        found = Jacobian(norm.expand(batch), rows.expand(batch, -1), output.expand(batch), gram, J.error.expand(batch))
        return found, result
