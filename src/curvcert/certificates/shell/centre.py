r"""What is known at the samples themselves: slopes, back-propagated gradients and Jacobians, as upper bounds.

Every number stands for the network in real arithmetic: intervals of slopes hold the true ones, sizes of gradients
include how far the computed ones may be off, and so do norms of Jacobians.  With computed Jacobians
:math:`\hat X_{k-1}` of :math:`x \mapsto x_{k-1}`, off by at most F in the spectral norm, and computed slopes
:math:`\hat S`,

.. math::
    \hat J_k = W_k \hat X_{k-1}, \qquad \hat X_k = H_k \hat X_{k-1} + G_k \mathrm{diag}(\hat S_k) \hat J_k,

each product adds :math:`\gamma_n \||A|\|_2 \|\hat X\|_F` to F.

Behind plain blocks that are too wide, the Jacobian of :math:`z_k` is :math:`\nu_{k-1} C_k` with
:math:`C_k = W_k \cdots W_1` and an error of at most :math:`\|W_k\| e_{k-1}`.  With the middle :math:`\mu` of all
slopes of a block, and half their range h,

.. math::
    \nu_k = \mu_k \nu_{k-1}, \qquad e_k = h_k \|J_k\| + |\mu_k| \|W_k\| e_{k-1},

since :math:`D_k J_k - \nu_k C_k = (D_k - \mu_k) J_k + \mu_k (J_k - \nu_{k-1} C_k)`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from curvcert.budget import checkpoint
from curvcert.certificates.shell.layers import Layer, Layers, Root
from curvcert.certificates.shell.norms import FLOOR, STEP, congruent_eigenvalues, frobenius_norms, spectral_norms
from curvcert.errors import UnsupportedModule
from curvcert.network import Block
from curvcert.network.evaluation import Computed
from curvcert.network.rewriting.units import ActivatedUnit
from curvcert.operators import AbstractLinearMap, NormBounds
from curvcert.operators.magnitudes import rounding_length
from curvcert.propagation.analysis import AtPoints
from curvcert.propagation.covectors import Covectors, activation_gradients
from curvcert.propagation.slopes import Slopes
from curvcert.rounding import UNIT_ROUNDOFF, Upper, gamma, inflate, least, lengths

_LEAST = 2.0**-400
"""Gradients count as at least this large."""


@dataclass(frozen=True, eq=False)
class Jacobian:
    """Bounds on the Jacobian J of one block's z.

    Attributes:
        norm: its norm, (batch,).
        rows: the norms of its rows, (batch, n).
        output: the norm of the Jacobian of the block's output, (batch,).
        gram: the absolute values of J J', (batch or 1, n, n), for the computed J over its scale.
        error: how far that may be off in the spectral norm, (batch,).
        scale: a number for each sample, (batch,), or 1.
        matrix: the computed J itself, (batch, n, columns), where it is kept.
    """

    norm: Tensor
    rows: Tensor
    output: Tensor
    gram: Tensor
    error: Tensor
    scale: Tensor
    matrix: Tensor | None = None

    def of_samples(self, index: Tensor) -> "Jacobian":
        """Return the same for some of the samples."""
        gram = self.gram if len(self.gram) == 1 else self.gram[index]
        matrix = None if self.matrix is None else self.matrix[index]
        each = (self.norm[index], self.rows[index], self.output[index])
        return Jacobian(*each, gram, self.error[index], self.scale[index], matrix)

    def weighted(self, w: Tensor) -> Tensor:
        r"""Bound :math:`\|\mathrm{diag}(w)^{1/2} J\|_2` for weights w >= 0 of shape (batch, k, n): (batch, k)."""
        peak, root = Upper(w.amax(dim=2)).root(), Upper(congruent_eigenvalues(self.gram, w, self.rows)).root()
        root = root * self.scale[:, None] + peak * self.error[:, None]
        return least(root, peak * self.norm[:, None]).bound

    def sharpened(self, bound: Tensor, w: Tensor) -> Tensor:
        """Return the lesser of a bound on the same, for one weight per sample, and that by the matrix with its signs.

        `w` is (batch, n), and the bound (batch,); it stays as it is where the matrix was not kept.
        """
        if self.matrix is None:
            return bound
        root = w.sqrt()
        exact = spectral_norms(root[:, :, None] * self.matrix) + root.amax(dim=1) * self.error
        return torch.minimum(bound, inflate(exact, STEP) + FLOOR)


@final
@dataclass(frozen=True, eq=False)
class AtAffine:
    """A block without an activation, of which nothing depends on the samples."""

    layer: Layer

    def of_samples(self, index: Tensor) -> "AtAffine":
        """Return the same for some of the samples."""
        return self

    def of_pairs(self, index: Tensor) -> "AtAffine":
        """Return the same for some of the pairs."""
        return self


@final
@dataclass(frozen=True, eq=False)
class AtBent:
    """A block with an activation at the samples; everything flat, (batch, n) or (batch, pairs, n).

    Attributes:
        layer: the block and its norms.
        block: the block itself.
        z: the pre-activations with their error.
        slopes: intervals that hold the true slopes.
        sizes: bounds on |G' g|, g the gradients of the pairs behind the block.
        sloped: bounds on the norm of diag(S) W.
        growth: bounds on the norm of H + G diag(S) W.
        jacobian: None where it is not formed.
        steepness: in its place where those of later blocks are formed, a bound on its norm anywhere.
    """

    layer: Layer
    block: Block
    z: Computed
    slopes: Slopes
    sizes: Tensor
    sloped: Tensor
    growth: Tensor
    jacobian: Jacobian | None
    steepness: Tensor | None

    @cached_property
    def powers(self) -> Tensor:
        """What norms of the sizes are made of: their squares in l2, themselves otherwise."""
        return self.sizes.square() if self.layer.p == 2 else self.sizes

    def of_samples(self, index: Tensor) -> "AtBent":
        """Return the same for some of the samples."""
        return AtBent(
            self.layer,
            self.block,
            self.z.of_samples(index),
            self.slopes.of_samples(index),
            self.sizes[index],
            self.sloped[index],
            self.growth[index],
            None if self.jacobian is None else self.jacobian.of_samples(index),
            self.steepness,
        )

    def of_pairs(self, index: Tensor) -> "AtBent":
        """Return the same for some of the pairs, (batch, fewer) by their places."""
        places = index[:, :, None].expand(-1, -1, self.sizes.shape[2])
        return replace(self, sizes=self.sizes.gather(1, places))


AtCentre = AtAffine | AtBent
"""One block at the samples."""


def pair_gradients(at: AtPoints, label: Tensor, others: Tensor) -> dict[int, Covectors]:
    """Return the gradients of f_i - f_label with i in `others`, (batch, pairs), at the values that units give."""
    if at.gradients is None:
        raise UnsupportedModule("The shell certificate needs a derivative of every block.")
    values = [unit.output for unit in at.facts.network.activated]
    return {value: at.gradients[value].differences(label, others) for value in values}


def at_centres(layers: Layers, at: AtPoints, gradients: Mapping[int, Covectors]) -> list[AtCentre]:
    """Return what holds at a batch, for the pairs with these gradients at the values that units give."""
    found, pushes = list[AtCentre](), _Push.start(layers)
    product, root = _Product.start(at.evaluation.values[0].value), layers.root
    # Behind the convolutions of a trained 6C2F, signs make the norms of weighted Jacobians about half as large; the
    # radii of three dense networks hardly changed (at most 0.04%), at a third more time.
    kept = all(each.drift.shape[1] == 1 for each in gradients.values()) and layers.jacobians_from != 0
    for k, layer in enumerate(layers.layers):
        unit, last = layer.unit, k == len(layers.layers) - 1
        # Jacobians are formed from some unit on, and all that later ones read is formed as well.
        push = _Push.stacked([pushes[source] for source in unit.sources]) if unit.sources[0] in pushes else None
        bent = unit.activated
        if bent is None:
            found.append(AtAffine(layer))
            if push is not None and not last:
                pushes[unit.output] = push.image(unit.H)
            continue
        flat, slopes = at.evaluation.values[bent.z].flat, at.slopes[bent.hidden].flat
        sizes = _sizes(layer, bent.block, gradients[unit.output])
        if k == layers.jacobians_from and push is None and root is not None:
            push = product.push(layer, bent.block, root)
        # Beside its Jacobian the growth of a first layer hardly counts, nor that of the last: the cheap norm will do.
        cheap = last or k == layers.jacobians_from
        sloped = layer.weighted(slopes.steepest) if cheap else _sloped_norms(layer, slopes)
        jacobian, steepness = None, None
        if push is not None:
            jacobian, result = push.through(layer, bent.block, flat.value, slopes, last, kept)
            if result is not None:
                pushes[unit.output] = result
        elif layers.jacobians_from is not None:
            steepness = layers.steepness(k)
            product = product.through(layer, slopes, steepness)
        growth = sloped if layer.plain or last else _growth(layer, bent, slopes, sloped, jacobian is not None)
        found.append(AtBent(layer, bent.block, flat, slopes, sizes, sloped, growth, jacobian, steepness))
    return found


def _sizes(layer: Layer, block: Block, behind: Covectors) -> Tensor:
    """Bound |G' g|, entry by entry."""
    size, drift = activation_gradients(block, behind, layer.p, layer.norms)
    # Squares of what is larger than that do not underflow.
    return (Upper(size.flatten(2)) + drift[:, :, None]).bound.clamp(min=_LEAST)


def _sloped_norms(layer: Layer, slopes: Slopes) -> Tensor:
    """Bound ||diag(S) W|| for each sample."""
    cheap, factor = layer.weighted(slopes.steepest), layer.factor
    if factor is None:
        return cheap
    matrix, error = factor
    # Each entry of the product rounds once: gamma_n covers it in the Frobenius norm.
    exact = Upper(spectral_norms(slopes.steepest[:, :, None] * matrix), len(matrix))
    return torch.minimum(cheap, (Upper(slopes.steepest.amax(dim=1)) * error + exact + FLOOR).bound)


def _growth(layer: Layer, unit: ActivatedUnit, slopes: Slopes, sloped: Tensor, formed: bool) -> Tensor:
    """Bound ||H + G diag(S) W|| for each sample, by the matrix itself where that is small enough."""
    bound = torch.minimum(layer.H + layer.G * sloped, layer.constant)
    block = unit.block
    if formed and block.is_residual:
        n = block.W.in_size
        eye = torch.eye(n, dtype=torch.float64, device=block.c.device).reshape(1, n, *block.in_shape)
        start = _Push(eye, torch.zeros((), dtype=torch.float64, device=block.c.device), layer.norms)
        middle = (slopes.lower + slopes.upper) / 2
        bound = torch.minimum(bound, start.outer(start.inner(block), block, middle, slopes).norm())
    return inflate(bound, STEP)


@dataclass(frozen=True, eq=False)
class _Product:
    """The Jacobian of x -> x_k as a number times the product of all W so far, (batch,), and how far that is off.

    `size` bounds the norm of the product.
    """

    number: Tensor
    error: Tensor
    size: Tensor

    @staticmethod
    def start(x: Tensor) -> "_Product":
        return _Product(x.new_ones(len(x)), x.new_zeros(len(x)), x.new_ones(()))

    def through(self, layer: Layer, slopes: Slopes, steepness: Tensor) -> "_Product":
        checkpoint()
        low, high = slopes.lower.amin(dim=1), slopes.upper.amax(dim=1)
        middle = (low + high) / 2
        half = torch.maximum(high - middle, middle - low)
        number = middle * self.number
        size = inflate(layer.W * self.size, 0.0)
        # The number rounds, and what stands for mu nu times the product is off by that.
        error = half * steepness + middle.abs() * layer.W * self.error + 2 * UNIT_ROUNDOFF * number.abs() * size
        return _Product(number, inflate(error, STEP), size)

    def push(self, layer: Layer, block: Block, root: Root) -> "_Push":
        """Return the Jacobian of the next z, that of this block."""
        error, shape, R = layer.W * self.error, block.W.out_shape, root.transposed
        X = self.number.reshape(-1, *[1] * (1 + len(shape))) * R.reshape(1, len(R), *shape)
        error = error + 2 * UNIT_ROUNDOFF * frobenius_norms(X.flatten(2))
        error, scale = inflate(error, STEP), self.number.abs()
        known = _Known(inflate(scale * root.norm + error, STEP), root.gram, scale)
        return _Push(X, error, layer.norms, known=known, at_z=True)


@dataclass(frozen=True, eq=False)
class _Known:
    """What is known of the Jacobian of z at the start without looking at it: see `Jacobian`."""

    norm: Tensor
    gram: Tensor | None
    scale: Tensor


@dataclass(frozen=True, eq=False)
class _Push:
    """Computed Jacobians of x -> x_k, as images (batch, columns, *shape) of a basis, and how far they may be off.

    At the input `root` may hold R in place of the only W that reads it; behind a front it is `at_z`, the Jacobian of
    the next unit's z already.
    """

    X: Tensor
    error: Tensor
    norms: NormBounds
    root: Tensor | None = None
    known: _Known | None = None
    at_z: bool = False
    at_input: bool = False

    @staticmethod
    def start(layers: Layers) -> "dict[int, _Push]":
        """Return what is known of the input's Jacobian, by its number; nothing where Jacobians start later."""
        if layers.jacobians_from != 0:
            return {}
        zero = torch.zeros((), dtype=torch.float64, device=layers.network.device)
        root = None if layers.root is None else layers.root.transposed
        return {0: _Push(layers.basis, zero, layers.problem.norms, root, at_input=True)}

    @staticmethod
    def stacked(pushes: "list[_Push]") -> "_Push":
        """Return the Jacobian of several values, stacked."""
        if len(pushes) == 1:
            return pushes[0]
        batch = max(len(push.X) for push in pushes)
        X = torch.cat([push.X.expand(batch, *push.X.shape[1:]).flatten(2) for push in pushes], dim=2)
        error = torch.stack([push.error.expand(batch) for push in pushes]).square().sum(dim=0).sqrt()
        return _Push(X, inflate(error, STEP) + FLOOR, pushes[0].norms)

    def norm(self) -> Tensor:
        """Bound the spectral norm."""
        return inflate(spectral_norms(self.X.flatten(2)) + self.error, STEP) + FLOOR

    def rows(self) -> Tensor:
        """Bound the norms of the rows, one per neuron."""
        return (lengths(self.X.flatten(2), 1) + self.error[..., None] + FLOOR).bound

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
        if self.at_z:
            return self
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

    def through(
        self, layer: Layer, block: Block, z: Tensor, slopes: Slopes, last: bool, kept: bool
    ) -> "tuple[Jacobian, _Push | None]":
        """Return the bounds on the Jacobians of a block, with its matrix if that is to be kept, and what goes on."""
        J = self.inner(block)
        known = self.known or _Known(J.norm(), None, torch.ones_like(J.error))
        if self.at_input:  # J is W itself
            known = _Known(layer.W, layer.gram, torch.ones_like(J.error))
        norm, gram = known.norm, known.gram
        result = None if last else self.outer(J, block, block.activation.derivative(z), slopes)
        output = inflate(layer.G * slopes.steepest.amax(dim=1) * norm, STEP)
        if result is not None and block.is_residual:
            output = result.norm()
        batch, rows = len(z), J.rows()
        gram = J.gram(rows) if gram is None else gram
        # At the start the matrix is the widest, and the same for all but for a number.
        matrix = J.X.flatten(2).mT if kept and self.known is None and not self.at_input else None
        each = (norm.expand(batch), rows.expand(batch, -1), output.expand(batch))
        return Jacobian(*each, gram, J.error.expand(batch), known.scale.expand(batch), matrix), result
