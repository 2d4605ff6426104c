"""Everything about a model that no input changes, computed once: norms, prefix constants, tables of pairs."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from curvcert.checker import curvature, lipschitz
from curvcert.checker.chain import chain_of
from curvcert.checker.evaluation import Passed, Vector
from curvcert.checker.findings import require, require_proof
from curvcert.checker.gradients import gradient_sizes, value_gradients
from curvcert.checker.growth import Growth
from curvcert.checker.image_curvature import ImageCurvature
from curvcert.checker.image_growth import ImageGrowth, behind
from curvcert.checker.lipschitz import Linear, Metric
from curvcert.checker.model import Affine, Model
from curvcert.checker.outward import Array, row_lengths, up
from curvcert.checker.pieces import Blocks
from curvcert.checker.units import units_of
from curvcert.errors import UnsupportedModule

_NOTHING = 2.0**-900


@dataclass(frozen=True, eq=False)
class Facts:
    """A model's own constants; each is computed when first asked for."""

    model: Model

    @property
    def smooth(self) -> bool:
        """Whether every activation has a Lipschitz derivative."""
        return all(node.act.smooth for node in self.model.activated.values())

    @property
    def declared(self) -> bool:
        """Whether of some activation no more is known than its values and the range of its slopes."""
        return any(not node.act.smooth and node.act.bends is None for node in self.model.activated.values())

    def require_smooth(self) -> None:
        """Stop where curvature constants are claimed and there are none, or no engine for them."""
        require(self.smooth or self.declared, "a network with kinks has no curvature constants")
        require_proof(self.smooth, "of declared activations the slopes are known, and no curvature", engine=False)

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks of the network: those of a chain, or of a graph.

        Raises:
            UnsupportedModule: if it is one of large images; those are known by their constants alone.
        """
        if self.model.wide:
            raise UnsupportedModule("images too large for the engines of matrices")
        chain = chain_of(self.model)
        pieces = units_of(self.model) if chain is None else chain
        return Blocks(pieces, self.model.classes, chain is not None)

    def neurons(self, passed: Passed) -> list[Vector | None]:
        """Return the pre-activation of every block; None for an affine one."""
        return [None if piece.act is None else passed.values[piece.z] for piece in self.blocks.pieces]

    @property
    def parts(self) -> list[Linear]:
        """The blocks about their middle slopes, in l2."""
        return self.growth.parts

    @cached_property
    def growth(self) -> Growth:
        """Lipschitz constants of all inner values, in l2."""
        return self._growth(2.0)

    @cached_property
    def metrics(self) -> list[Metric] | None:
        """LipSDP's matrices, None for a network with skips."""
        return lipschitz.metrics(self.blocks)

    @cached_property
    def value_gradients(self) -> dict[int, Array]:
        """Bounds on the gradients with respect to the values between blocks, for every pair."""
        return value_gradients(self.blocks, self.parts, self.gradient_sizes)

    @cached_property
    def gradient_sizes(self) -> list[Array]:
        """Bounds on the gradients with respect to the activations, for every pair."""
        return gradient_sizes(self.blocks, self.growth, value_gradients(self.blocks, self.parts))

    @cached_property
    def hadamards(self) -> list[float]:
        """The Hadamard norms of every piece's W."""
        return [0.0 if piece.W is None else curvature.hadamard(piece.W) for piece in self.blocks.pieces]

    @cached_property
    def rows(self) -> list[Array]:
        """The lengths of the rows of every piece's W."""
        return [np.zeros(0) if piece.W is None else row_lengths(piece.W, 2) for piece in self.blocks.pieces]

    @cached_property
    def rows_of_parts(self) -> list[list[Array]]:
        """The same for what of W belongs to each value that a block reads."""
        found = []
        for piece in self.blocks.pieces:
            found.append([] if piece.W is None else [row_lengths(part, 2) for part in piece.split(piece.W)])
        return found

    @cached_property
    def first_output(self) -> float | None:
        """What the first output is everywhere, where nothing that it reads counts: a threshold's; None elsewhere."""
        last = self.model.nodes[-1]
        if not isinstance(last, Affine) or any(term.map is None for term in last.terms):
            return None
        maps = [term.map for term in last.terms if term.map is not None]
        # Bounds on products of nothing but zeros are not 0, but far below anything.
        constant = all(A.size_on(np.ones(A.shape[1]))[0] < _NOTHING for A in maps)
        return float(last.offset[0]) if constant else None

    @cached_property
    def deviations(self) -> Array:
        """What the margin of a pair loses because the module departs from phi, as a table of classes."""
        total = np.zeros(self.model.classes * (self.model.classes - 1) // 2)
        deviant = {k: node for k, node in self.model.activated.items() if node.deviation}
        if deviant and self.model.wide:
            sizes = behind(self.model)
            lost = sum(sizes[k] * np.sqrt(node.size) * node.deviation for k, node in deviant.items())
            total = total + lost
        elif deviant:
            for piece, size in zip(self.blocks.pieces, self.gradient_sizes, strict=True):
                if piece.a in deviant:
                    total = total + size * np.sqrt(deviant[piece.a].size) * deviant[piece.a].deviation
        return self.table(up(total, 8 * len(self.model.nodes) + 8))

    @cached_property
    def K(self) -> Array:
        """Curvature constants of f_i - f_j in l2, as a table of classes."""
        found = self.table(self._from("both"))
        return np.minimum(found, np.maximum(self.K_above, self.K_above.T)) if self._uneven else found

    @property
    def _uneven(self) -> bool:
        """Whether an activation bends further to one side than to the other."""
        ranges = [node.act.second.range for node in self.model.activated.values()]
        return any(abs(low + high) > 1e-6 * max(-low, high) for low, high in ranges)

    @cached_property
    def K_above(self) -> Array:
        """What bounds the largest eigenvalue of the second derivative of f_i - f_y in l2, a row for each y."""
        if not self._uneven:
            return self.K
        above, below = self._from("above"), self._from("below")
        n = self.model.classes
        table, (i, j) = np.zeros((n, n)), np.triu_indices(n, 1)
        table[j, i], table[i, j] = above, below
        return table

    def _from(self, side: str) -> Array:
        """Return the least of a sum of terms and of the other bounds from that side, one value per pair."""
        if self.model.wide:
            return self.image_curvature.constants(side)
        parts = (self.blocks, self.growth, self.metrics, self.gradient_sizes, self.value_gradients)
        terms = self.terms if side == "both" else curvature.unrolled(*parts, side)
        found = up(np.sum(terms, axis=0), 8 * len(terms) + 16)
        found = np.minimum(found, curvature.compositional(self.blocks, self.growth, self.curvatures, side))
        single = curvature.one_hidden_layer(self.blocks, side)
        return found if single is None else np.minimum(found, single)

    @cached_property
    def terms(self) -> list[Array]:
        """What each block adds to the curvature of f_i - f_j in l2 at most, one value per pair."""
        return curvature.unrolled(self.blocks, self.growth, self.metrics, self.gradient_sizes, self.value_gradients)

    @cached_property
    def least_terms(self) -> list[Array]:
        """The same, also by the larger of what a block adds from above and from below."""
        if not self._uneven:
            return self.terms
        parts = (self.blocks, self.growth, self.metrics, self.gradient_sizes, self.value_gradients)
        above, below = (curvature.unrolled(*parts, side) for side in ("above", "below"))
        return [np.minimum(both, np.maximum(a, b)) for both, a, b in zip(self.terms, above, below, strict=True)]

    @cached_property
    def curvatures(self) -> dict[int, float]:
        """Curvature constants of all inner values, in l2."""
        return curvature.inside(self.blocks, self.growth)

    def L(self, p: float) -> Array:
        """Lipschitz constants of f_i - f_j with respect to the p-norm, p = 1, 2 or inf, as a table of classes."""
        if self.model.wide:
            return self._wide_L(p)
        found = self._euclidean
        if p == 2:
            return self.table(found)
        # ||x||_2 <= n^(1/2 - 1/p) ||x||_p for p > 2, and ||x||_2 <= ||x||_1.
        n = self.model.nodes[0].size
        found = up(found * (np.sqrt(n) if p == np.inf else 1.0), 8)
        return self.table(np.minimum(found, self._growth(p).pairs()))

    def _wide_L(self, p: float) -> Array:
        found = self.image_growth(2.0).pairs()
        if p != 2:
            n = self.model.nodes[0].size
            found = up(found * (np.sqrt(n) if p == np.inf else 1.0), 8)
            found = np.minimum(found, self.image_growth(p).pairs())
        return self.table(found)

    def image_growth(self, p: float) -> ImageGrowth:
        """Return the Lipschitz constants of a network of large images."""
        if p not in self._image_growths:
            self._image_growths[p] = ImageGrowth(self.model, p)
        return self._image_growths[p]

    @cached_property
    def image_curvature(self) -> ImageCurvature:
        """What bounds the curvature of a network of large images."""
        return ImageCurvature(self.model, self.image_growth(2.0))

    @cached_property
    def _image_growths(self) -> dict[float, ImageGrowth]:
        return {}

    @cached_property
    def _euclidean(self) -> Array:
        found = self.growth.pairs()
        if self.metrics is None:
            return found
        return np.minimum(found, lipschitz.lipsdp_constants(self.blocks, self.metrics[-1]))

    def parts_in(self, p: float) -> list[Linear]:
        """Return the blocks about their middle slopes, with norms p -> p."""
        if p not in self._parts:
            self._parts[p] = [lipschitz.linearised(piece, p) for piece in self.blocks.pieces]
        return self._parts[p]

    @cached_property
    def _parts(self) -> dict[float, list[Linear]]:
        return {}

    def _growth(self, p: float) -> Growth:
        return Growth(self.blocks, self.parts_in(p), p)

    def table(self, values: Array) -> Array:
        """Return one value per pair as a symmetric table with zeros on its diagonal."""
        n = self.model.classes
        table = np.zeros((n, n))
        i, j = np.triu_indices(n, 1)
        table[i, j] = table[j, i] = values
        return table
