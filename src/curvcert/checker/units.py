r"""Any graph as blocks that each read one or several values: :math:`Hx + G\Phi(Wx + b) + c`, x stacked.

A sum that only one activation reads belongs to its block, and so does a skip around it, :math:`x + G\Phi(Wx + b)`,
whose constant no sum of norms can match, and a last affine map.
"""

from collections import Counter

from curvcert.checker.model import Activated, Affine, Model, sources_of
from curvcert.checker.outward import Enclosed, beside, plus
from curvcert.checker.pieces import Piece, identity


def units_of(model: Model) -> tuple[Piece, ...]:
    """Return the blocks of a network, in the order of their outputs."""
    return _Units(model).found()


class _Units:
    """The nodes of a network, by who reads them."""

    def __init__(self, model: Model) -> None:
        self._nodes = model.nodes
        self._readers: list[list[int]] = [[] for _ in model.nodes]
        for k, node in enumerate(model.nodes):
            for source in sources_of(node):
                self._readers[source].append(k)
        self._ends: set[int] = set()

    def found(self) -> tuple[Piece, ...]:
        pieces: dict[int, Piece] = {}
        inside: set[int] = set()
        for k, node in enumerate(self._nodes):
            if isinstance(node, Affine) and k not in pieces:
                sources, H = self._merged(node)
                pieces[k] = Piece(self._sizes(sources), node.size, H, k, sources=sources)
            elif isinstance(node, Activated):
                piece = self._block(k, node)
                pieces[piece.output] = piece
                self._ends |= {piece.output} - {k}
                inside |= {k, node.source} - {piece.output, *piece.sources}
        return tuple(pieces[k] for k in sorted(pieces) if k not in inside)

    def _block(self, k: int, node: Activated) -> Piece:
        inner = self._nodes[node.source]
        # The end of a block with a skip is a value of its own, even where only an activation reads it.
        own = len(self._readers[node.source]) == 1 and node.source not in self._ends
        if isinstance(inner, Affine) and own:
            sources, W = self._merged(inner)
        else:
            sources, W = (node.source,), identity(node.size)
        end = self._end(k, sources)
        if end is None:
            return Piece(self._sizes(sources), node.size, None, k, None, W, node.act, node.source, k, sources)
        outer = self._nodes[end]
        assert isinstance(outer, Affine)
        maps = dict(zip(*self._parts(outer), strict=True))
        G, H = maps.pop(k), next(iter(maps.values()), None)
        return Piece(self._sizes(sources), outer.size, H, end, G, W, node.act, node.source, k, sources)

    def _end(self, k: int, sources: tuple[int, ...]) -> int | None:
        """Return the sum that a block with the activation k ends in; None where k itself does."""
        if len(self._readers[k]) != 1:
            return None
        end = self._readers[k][0]
        others = Counter(sources_of(self._nodes[end])) - Counter([k])
        if not isinstance(self._nodes[end], Affine):
            return None
        around = len(sources) == 1 and set(others) == set(sources)
        return end if around or (not others and end == len(self._nodes) - 1) else None

    def _parts(self, node: Affine) -> tuple[tuple[int, ...], list[Enclosed]]:
        """Return the values that a sum reads, each once, and their maps."""
        found: dict[int, Enclosed] = {}
        for term in node.terms:
            A = identity(node.size) if term.matrix is None else term.matrix
            found[term.source] = plus(found[term.source], A) if term.source in found else A
        return tuple(found), list(found.values())

    def _merged(self, node: Affine) -> tuple[tuple[int, ...], Enclosed]:
        sources, maps = self._parts(node)
        return sources, beside(maps)

    def _sizes(self, sources: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._nodes[source].size for source in sources)
