"""Everything about a model that no input changes, computed once: norms, prefix constants, tables of pairs."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from curvcert.checker import curvature, lipschitz
from curvcert.checker.chain import Chain, chain_of
from curvcert.checker.evaluation import Passed, Vector
from curvcert.checker.lipschitz import Linear, Metric, Reached, Sizes
from curvcert.checker.model import Model
from curvcert.checker.outward import Array, row_lengths, up
from curvcert.errors import UnsupportedModule


@dataclass(frozen=True, eq=False)
class Facts:
    """A model's own constants; each is computed when first asked for."""

    model: Model

    @property
    def smooth(self) -> bool:
        """Whether every activation has a Lipschitz derivative."""
        return all(node.act.smooth for node in self.model.activated.values())

    @cached_property
    def chain(self) -> Chain:
        """The blocks of the network."""
        found = chain_of(self.model)
        if found is None:
            raise UnsupportedModule("a network that is no chain of blocks")
        return found

    def neurons(self, passed: Passed) -> list[Vector | None]:
        """Return the pre-activation of every piece; None for an affine one."""
        return [None if piece.act is None else passed.values[piece.z] for piece in self.chain.pieces]

    @cached_property
    def sizes(self) -> list[Sizes]:
        """The 2-norms of every piece's maps."""
        return lipschitz.norms_of(self.chain)

    @cached_property
    def parts(self) -> list[Linear]:
        """The pieces about their middle slopes, in l2."""
        return self._parts(2.0)

    @cached_property
    def reached(self) -> Reached:
        """Lipschitz constants of all inner values, in l2."""
        return lipschitz.reached(self.chain, self.parts, 2.0)

    @property
    def prefixes(self) -> list[float]:
        """Lipschitz constants up to every piece, in l2."""
        return self.reached.before

    @cached_property
    def metrics(self) -> list[Metric] | None:
        """LipSDP's matrices, None for a network with skips."""
        return lipschitz.metrics(self.chain)

    @cached_property
    def gradient_sizes(self) -> list[Array]:
        """Bounds on the gradients with respect to the activations, for every pair."""
        return curvature.gradient_sizes(self.chain, self.parts)

    @cached_property
    def hadamards(self) -> list[float]:
        """The Hadamard norms of every piece's W."""
        return [0.0 if piece.W is None else curvature.hadamard(piece.W) for piece in self.chain.pieces]

    @cached_property
    def rows(self) -> list[Array]:
        """The lengths of the rows of every piece's W."""
        return [np.zeros(0) if piece.W is None else row_lengths(piece.W, 2) for piece in self.chain.pieces]

    @cached_property
    def deviations(self) -> Array:
        """What the margin of a pair loses because the module departs from phi, as a table of classes."""
        pieces = self.chain.pieces
        total = np.zeros(self.model.classes * (self.model.classes - 1) // 2)
        if any(node.deviation for node in self.model.activated.values()):
            for piece, size in zip(pieces, self.gradient_sizes, strict=True):
                if piece.W is not None:
                    total = total + size * np.sqrt(len(piece.W.value)) * self.model.activated[piece.a].deviation
        return self.table(up(total, 8 * len(pieces) + 8))

    @cached_property
    def K(self) -> Array:
        """Curvature constants of f_i - f_j in l2, as a table of classes."""
        found = curvature.unrolled(self.chain, self.parts, self.prefixes, self.metrics, self.gradient_sizes, self.sizes)
        found = np.minimum(found, curvature.compositional(self.chain, self.parts, self.prefixes, self.sizes))
        single = curvature.one_hidden_layer(self.chain)
        return self.table(found if single is None else np.minimum(found, single))

    def L(self, p: float) -> Array:
        """Lipschitz constants of f_i - f_j with respect to the p-norm, p = 1, 2 or inf, as a table of classes."""
        found = self._euclidean
        if p == 2:
            return self.table(found)
        # ||x||_2 <= n^(1/2 - 1/p) ||x||_p for p > 2, and ||x||_2 <= ||x||_1.
        n = self.model.nodes[0].size
        found = up(found * (np.sqrt(n) if p == np.inf else 1.0), 8)
        parts = self._parts(p)
        own = lipschitz.pair_constants(self.chain, parts, lipschitz.reached(self.chain, parts, p), p)
        return self.table(np.minimum(found, own))

    @cached_property
    def _euclidean(self) -> Array:
        found = lipschitz.pair_constants(self.chain, self.parts, self.reached, 2.0)
        if self.metrics is None:
            return found
        return np.minimum(found, lipschitz.lipsdp_constants(self.chain, self.metrics[-1]))

    def _parts(self, p: float) -> list[Linear]:
        return [lipschitz.linearised(piece, p, size) for piece, size in zip(self.chain.pieces, self.sizes, strict=True)]

    def table(self, values: Array) -> Array:
        """Return one value a pair as a symmetric table with zeros on its diagonal."""
        n = self.model.classes
        table = np.zeros((n, n))
        i, j = np.triu_indices(n, 1)
        table[i, j] = table[j, i] = values
        return table
