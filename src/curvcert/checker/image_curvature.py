r"""Curvature constants of all pairs of classes, in l2, of networks of large images.

For a scalar f, :math:`\nabla^2 f = \sum_k J_k^T \mathrm{diag}(u_k \circ \phi''(z_k)) J_k`, u the gradient with respect
to the activations.  With :math:`\gamma` a bound on :math:`\|u\|`, weights w of its entries times phi'', L the constant
of what W reads and Z that of :math:`z = Wx + b`, a term is at most the least of

.. math::
    c\, \gamma L^2 \sup \|Wa \circ Wb\|, \qquad L^2 \lambda_{max}(W^T \mathrm{diag}(w) W), \qquad
    \min(\max_l w_l, c\, \gamma) Z^2,

and, with a matrix M above all :math:`JJ^T`, of :math:`c\, \gamma \sqrt{\lambda_{max}(M^{\circ 2})}` and
:math:`\lambda_{max}(D^{1/2} M D^{1/2})`, D = diag(w).

Gradients come by the sum over paths carried back from the output, and entry by entry by intervals; with maps between
images as kernels throughout.
"""

from collections import Counter

import numpy as np

from curvcert.checker.contraction import contractions
from curvcert.checker.curvature import EIGENVALUE_SIDE, by_jacobians, hadamard
from curvcert.checker.gradients import Interval, weights
from curvcert.checker.image_growth import ImageGrowth, middle, norm_of, pulled_back
from curvcert.checker.model import Activated, Affine, Map, Model, pair_rows, sources_of
from curvcert.checker.outward import (
    Array,
    Enclosed,
    U,
    frobenius,
    lengths,
    raised,
    row_lengths,
    spectral_norm,
    up,
    weighted_eigenvalue,
)
from curvcert.checker.planes import TooDear
from curvcert.checker.wide import MOST_ROWS, columns_scaled, rows_scaled
from curvcert.checker.windows import Window


class ImageCurvature:
    """What each activation adds to the curvature of every f_i - f_j at most.

    `sizes` bounds the 2-norms of the gradients with respect to every value, `entries` encloses those with respect to
    activations entry by entry.
    """

    def __init__(self, model: Model, growth: ImageGrowth) -> None:
        """Bound the gradients; the terms are computed for the side that is asked for."""
        self._model, self._growth = model, growth
        self._rows = pair_rows(model.classes, None)
        self._readers = Counter(source for node in model.nodes for source in sources_of(node))
        self._blocks = contractions(model)
        self._ends = {block.a: k for k, block in self._blocks.items()}
        self.sizes = self._gradient_sizes()
        self.entries = self._gradient_entries()

    def constants(self, side: str) -> Array:
        """Return the sum of all terms, one value per pair, from above, below or both sides."""
        total = np.zeros(len(self._rows))
        for k, node in self._model.activated.items():
            total = total + self._term(k, node, side)
        return up(total, 8 * len(self._model.nodes) + 16)

    def _gradient_sizes(self) -> dict[int, Array]:
        """Bound the 2-norms of the gradients with respect to every value of the model."""
        model, on_torus = self._model, self._sizes_on_torus()
        found = dict.fromkeys(range(len(model.nodes)), np.zeros(len(self._rows)))
        found[len(model.nodes) - 1] = lengths(self._rows, 2, 1)
        whole: dict[int, Array] = {}
        for k in range(len(model.nodes) - 1, 0, -1):
            node = model.nodes[k]
            if k in whole:
                found[k] = np.minimum(found[k], whole[k])
            if isinstance(node, Affine):
                block = self._blocks.get(k)
                if block is not None and self._readers[block.x] == 2:
                    whole[block.x] = up(block.constant * found[k])
                for term in node.terms:
                    sent = norm_of(term.map, 2.0) * found[k]
                    if k == len(model.nodes) - 1:
                        rows, off = pulled_back(term.map, self._rows, np.zeros(len(self._rows)))
                        sent = np.minimum(sent, lengths(rows, 2, 1) + off)
                    found[term.source] = up(found[term.source] + sent, 8)
                continue
            assert isinstance(node, Activated)
            found[k] = np.minimum(found[k], on_torus.get(k, np.inf))
            found[node.source] = up(found[node.source] + node.act.steepest * found[k])
        return found

    def _sizes_on_torus(self) -> dict[int, Array]:
        """Bound the gradients with respect to activations, beside their images too, by the sum over paths.

        None where a value would have to be cropped, or where that is dear.
        """
        model, growth, found = self._model, self._growth, dict[int, Array]()
        if growth.planes.has_crops:
            return found
        try:
            last = len(model.nodes) - 1
            ends = {k: up(lengths(R, 2, 1) + off, 8) for k, R, off in growth.carried_back(last, self._rows)}
            links = {k: self._links_to(node) for k, node in model.activated.items() if node.source not in growth.planes}
            for k in sorted(model.activated, reverse=True):
                total = ends.get(k, np.zeros(len(self._rows)))
                for j in found:
                    node = model.activated[j]
                    plane = node.source in growth.planes
                    if plane and k not in growth.planes:
                        raise TooDear
                    link = growth.planes.link(node.source, k) if plane else links[j].get(k, 0.0)
                    total = total + (growth.planes.slopes(j) if plane else middle(node))[1] * link * found[j]
                found[k] = up(total, 8 * len(model.nodes) + 16)
        except TooDear:
            return {}
        return found

    def _links_to(self, node: Activated) -> dict[int, float]:
        """Bound the norms of all paths to a pre-activation that is no image, from every activation before it."""
        if node.size > MOST_ROWS:
            raise TooDear
        found = {}
        for k, R, off in self._growth.carried_back(node.source, np.eye(node.size)):
            found[k] = raised(spectral_norm(Enclosed(R)) + frobenius(off), 8)
        return found

    def _gradient_entries(self) -> dict[int, Interval]:
        """Enclose every entry of the gradients with respect to activations, by intervals through the maps."""
        model, found = self._model, dict[int, Interval]()
        ends: dict[int, Interval] = {len(model.nodes) - 1: (self._rows, self._rows)}

        def send(source: int, low: Array, high: Array) -> None:
            if source in ends:
                low, high = _down(ends[source][0] + low), _up(ends[source][1] + high)
            cap = self.sizes[source][:, None]
            ends[source] = np.maximum(low, -cap), np.minimum(high, cap)

        for k in range(len(model.nodes) - 1, 0, -1):
            node = model.nodes[k]
            low, high = ends.pop(k)
            if isinstance(node, Affine):
                for term in node.terms:
                    send(term.source, *_through(term.map, low, high, self.sizes[k]))
            elif isinstance(node, Activated):
                found[k] = low, high
                corners = np.array([slope * end for slope in node.act.slope for end in (low, high)])
                slack = 4 * U * np.abs(corners).max(axis=0)
                send(node.source, corners.min(axis=0) - slack, corners.max(axis=0) + slack)
        return found

    def _term(self, k: int, node: Activated, side: str) -> Array:
        weighed, size = weights(node.act, self.entries[k], side), up(node.act.c * self.sizes[k])
        best = up(np.minimum(weighed.max(axis=1), size) * self._growth.values[node.source] ** 2, 8)
        if node.source in self._growth.above:
            best = np.minimum(best, by_jacobians(*self._growth.above[node.source], size, weighed))
        z = self._model.nodes[node.source]
        if not isinstance(z, Affine) or len(z.terms) != 1 or z.terms[0].map is None:
            return best
        W, square = z.terms[0].map, raised(self._growth.values[z.terms[0].source] ** 2)
        rows = _row_lengths(W)
        omega = min(_omega(W), raised(W.norm * float(rows.max())))
        best = np.minimum(best, up(size * omega * square, 8))
        form = up((weighed * rows * rows).sum(axis=1), weighed.shape[1] + 8)
        form = np.minimum(form, up(weighed.max(axis=1) * W.norm**2, 8))
        form = np.minimum(form, up(lengths(weighed, 2, 1) * omega, 8))
        if isinstance(W, Enclosed) and min(W.shape) <= EIGENVALUE_SIDE:
            form = np.minimum(form, [weighted_eigenvalue(W, one) for one in weighed])
        best = np.minimum(best, up(form * square, 8))
        if k in self._ends and self._readers[k] == 1:
            best = np.minimum(best, up(self.sizes[self._ends[k]] * self._whole(k, node) * square, 8))
        return best

    def _whole(self, k: int, node: Activated) -> float:
        r"""Bound the curvature of the contracting block with an activation.

        It is at most :math:`c \|G N^{-1}\| \sup \|Va \circ Vb\|` with :math:`V = N^{1/2} W`, for any diagonal N > 0.
        """
        block = self._blocks[self._ends[k]]
        d, w = block.d, np.maximum(_lengths_by_scale(block.W), 1e-100)
        found = float(np.inf)
        for N in (np.ones_like(d), np.sqrt(d), *(d * w / (d * w**3) ** t for t in (0.5, 0.75))):
            safe = np.where((N > 1e-50) & (N < 1e50), N, 1.0)
            # What the roots and quotients round by, both sides share: no more than a part in 2^48.
            outer, inner = columns_scaled(block.G, 1 / safe).norm, _omega(rows_scaled(block.W, np.sqrt(safe)))
            found = min(found, raised(outer * inner, 64))
        return raised(node.act.c * found, 8)


def _row_lengths(W: Enclosed | Window) -> Array:
    return row_lengths(W, 2) if isinstance(W, Enclosed) else W.row_lengths


def _omega(W: Enclosed | Window) -> float:
    return hadamard(W) if isinstance(W, Enclosed) else W.hadamard


def _lengths_by_scale(W: Enclosed | Window) -> Array:
    """Return about how long the rows are, one number for each row or each channel."""
    if isinstance(W, Enclosed):
        return row_lengths(W, 2)
    found: Array = np.sqrt((W.stencil.kernel**2).sum(axis=(1, 2, 3)))
    return found


def _through(A: Map, low: Array, high: Array, size: Array) -> Interval:
    """Enclose g A for every row g between low and high, no longer than `size`."""
    if A is None:
        return low, high
    centre = 0.5 * (low + high)
    radius = up(np.maximum(high - centre, centre - low))
    middle_row, off = pulled_back(A, centre, np.zeros(len(centre)))
    if isinstance(A, Enclosed):
        columns, width = row_lengths(A.transposed, 2), radius @ A.size
    else:
        # What the entries of the kernel are wrong by counts as a whole.
        columns, width = A.column_lengths, A.size_pulled(radius) + (A.off * lengths(radius, 2, 1))[:, None]
    width = up(width, A.terms + 8) + up(off, 8)[:, None]
    cap = up(size[:, None] * columns[None], 8)
    return np.maximum(_down(middle_row - width), -cap), np.minimum(_up(middle_row + width), cap)


def _up(x: Array) -> Array:
    return x + 4 * U * np.abs(x)


def _down(x: Array) -> Array:
    return x - 4 * U * np.abs(x)
