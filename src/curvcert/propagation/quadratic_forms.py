r"""Functions of the outputs beside an expansion (`expansion.py`), and a quadratic form that bounds them over a ball."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from curvcert.network.nodes import AffineNode
from curvcert.operators import AbstractLinearMap
from curvcert.operators.magnitudes import rounding_length
from curvcert.operators.trust_region import QuadraticForm
from curvcert.propagation.expansion import Expansion
from curvcert.propagation.expansion_remainders import Ball
from curvcert.propagation.tangents import Forward, Swept, swept_back
from curvcert.rounding import TINY, UNIT_ROUNDOFF, Upper, gamma, inflate, least, lengths, root_above, total

_PROBES = 8
"""Random directions beside the gradient, by which neurons are weighed against each other."""

_SPARE = 1.2
"""How much more of the remainders a form takes in than its first weights need."""

_YOUNG = 2.0**-20
"""What squares give up, relatively, so that what rounding adds to their roots stands apart; exact beside 1."""

_SHARE = 0.1
"""How much of a neuron's weight is decided by all directions rather than by the gradient's."""


class Functions:
    """Linear functions of the outputs, rows (functions, outputs): their gradients, and covectors on the activations."""

    def __init__(self, expansion: Expansion, rows: Tensor) -> None:
        """Carry the rows back."""
        facts = expansion.facts
        self.expansion = expansion
        shaped = rows.reshape(len(rows), *facts.network.out_shape)
        self._swept = swept_back(facts, expansion.slopes, len(facts.network.nodes) - 1, shaped, expansion.slopes)
        self.gradient, self.u = self._swept.start.flatten(1), self._swept.kept

    def rounding(self, ball: Ball) -> Tensor:
        """Bound what rounding, and what is not known of slopes, adds over a ball: (functions,)."""
        expansion = self.expansion
        found = Upper(torch.zeros_like(self.gradient[:, 0]))
        for value, size in self._swept.sizes.items():
            found += Upper(size) * expansion.defects[value] * ball.t
        for value, lost in self._swept.lost.items():
            found += (Upper(expansion.sizes[value]) * ball.t + ball.rest[value][1]) * lost
        for k, u in self.u.items():
            own = expansion.neurons[k]
            off = Upper(own.slope_error) * ball.steps[k].far + 2 * own.node.activation.deviation
            found += Upper(u.flatten(1).abs()) @ off.flatten(0)
        return found.bound


class Form:
    """One quadratic form for some functions over a ball, and all smaller ones about the same point."""

    def __init__(self, functions: Functions, some: Sequence[int], ball: Ball) -> None:
        """Make the matrix; the first function is the one that the neurons' weights are chosen for."""
        self.functions, self.expansion, self._ball = functions, functions.expansion, ball
        self._some = list(some)
        self._quotients = {k: self._worst_quotients(k) for k in functions.u}
        self.coupling, sizes = self._balanced()
        none = dict.fromkeys(functions.u, torch.zeros_like(self.expansion.sizes[0]))
        first = self._by_value({k: self._with_coupling(k, none[k]) for k in functions.u})
        self.shares = {k: _SPARE * share for k, share in self._needed(first, sizes).items()}
        self._weights = self._by_value({k: self._with_coupling(k, self.shares[k]) for k in functions.u})
        needed = self._needed(self._weights, sizes)
        self._missing = {k: inflate((needed[k] - self.shares[k]).clamp(min=0.0), 4 * UNIT_ROUNDOFF) for k in needed}
        self.form = self._matrix()

    def rises(self, some: Sequence[int], balls: Sequence[Ball]) -> Tensor:
        """Bound how far some of the functions rise over balls that are no larger: (functions, balls)."""
        index = list(some)
        t = torch.tensor([ball.t for ball in balls], dtype=torch.float64, device=self.expansion.device)
        main = self.form.largest(self.functions.gradient[index], t)
        rest = torch.stack([self.fixed(ball)[index] for ball in balls], dim=1)
        return main + rest + 4 * UNIT_ROUNDOFF * (main.abs() + rest)

    def fixed(self, ball: Ball) -> Tensor:
        """Bound what the functions rise by over a ball beside their gradients and the form: (functions,)."""
        return (Upper(self.residual(ball)) + self._crossed(ball) + self.functions.rounding(ball)).bound

    def residual(self, ball: Ball) -> Tensor:
        """Bound half the weighted squares of R, less what the form has of the remainders for them."""
        squares = beyond = Upper(torch.zeros_like(self.expansion.sizes[0]))
        for z, weight in self._weights.items():
            r, R = ball.rest[z]
            v = weight.clamp(min=0.0)
            squares += least(Upper(R).square() * v.amax(), (Upper(r).square() * v).sum()) / 2.0
            beyond += Upper(ball.small[z]).square() * v.amax() * ((1 + 1 / _YOUNG) / 2)
        for k, missing in self._missing.items():
            beyond += Upper(ball.remainders[k][1]).square() * missing / 2.0
        return least(squares, beyond).bound

    def _needed(self, weights: Mapping[int, Tensor], sizes: Mapping[int, Tensor]) -> dict[int, Tensor]:
        r"""Return :math:`\kappa` with :math:`\sum_l v_l^+ R_l^2 \le \sum_i \kappa_i |\rho_i|^2`, but for rounding.

        For each pre-activation :math:`(\sum_i p_i s_i)^2 \le (\sum_i p_i \hat s_i) \sum_i p_i s_i^2 / \hat s_i`, with
        any positive :math:`\hat s`: those that are expected along the gradient.
        """
        expansion, none = self.expansion, Upper(torch.zeros_like(self.expansion.sizes[0]))
        found = dict.fromkeys(self.functions.u, none)
        for z, weight in weights.items():
            v = weight.clamp(min=0.0)
            norms = {k: Upper(expansion.weighted_path_norm(z, k, v)) for k in found if (z, k) in expansion.path_norms}
            whole = total([none, *(norm * sizes[k] for k, norm in norms.items())]) * (1 + _YOUNG)
            for k, norm in norms.items():
                found[k] += whole * norm / sizes[k]
        return {k: share.bound for k, share in found.items()}

    def _crossed(self, ball: Ball) -> Tensor:
        """Bound what rounding, and a module's own deviation, add to the products of the form and of R."""
        expansion, found = self.expansion, Upper(torch.zeros_like(self.expansion.sizes[0]))
        for value, size in self._sizes.items():
            found += Upper(size) * expansion.defects[value] * ball.t * ball.t
        for value, lost in self._lost.items():
            found += Upper(lost) * ball.t * ball.rest[value][1]
        for k, own in expansion.neurons.items():
            if k in self._sizes:
                # The float in front rounds as well.
                off = 2 * own.node.activation.deviation * root_above(own.slope.numel())
                found += Upper(self._sizes[k], 1) * off * ball.t
        return found.bound

    def _worst_quotients(self, k: int) -> Tensor:
        """Return w: the largest weight of each neuron over the functions."""
        u, steps = self.functions.u[k][self._some], self._ball.steps[k]
        both = torch.maximum(u * steps.low, u * steps.high).amax(dim=0)
        return both + 4 * UNIT_ROUNDOFF * both.abs() + TINY

    def _with_coupling(self, k: int, share: Tensor) -> Tensor:
        inverse = 1 / self.coupling[k] if k in self.coupling else 0.0
        # The inverse rounds, and its sum with the share.
        crossed = (Upper(self._ball.steps[k].q, 2).square() * (inverse + share) / 4.0).bound
        whole = self._quotients[k] + crossed
        return whole + 4 * UNIT_ROUNDOFF * (whole.abs() + crossed)

    def _by_value(self, weights: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Add up the weights of all activations of a pre-activation."""
        found: dict[int, Tensor] = {}
        for k, weight in weights.items():
            z = self.expansion.neurons[k].node.source
            whole = found[z] + weight if z in found else weight
            found[z] = whole + 4 * UNIT_ROUNDOFF * whole.abs()
        return found

    def _swept(self, weights: Mapping[int, Tensor], tangents: Callable[[int], Tensor], keep: Collection[int]) -> Swept:
        """Carry weights times tangents back from all pre-activations."""
        expansion, last = self.expansion, self.expansion.last

        def added(z: int) -> Tensor | None:
            return weights[z] * tangents(z).reshape(-1, *weights[z].shape) if z in weights and z != last else None

        start = weights[last] * tangents(last).reshape(-1, *weights[last].shape)
        return swept_back(expansion.facts, expansion.slopes, last, start, keep, added)

    def _balanced(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Choose D where it costs about the least along the gradient, and guess how long the remainders are there.

        Any positive weights are sound.
        """
        expansion, nodes = self.expansion, self.expansion.facts.network.nodes
        g = self.functions.gradient[self._some[0]]
        generator = torch.Generator().manual_seed(0)
        probes = torch.randn(_PROBES, len(g), generator=generator, dtype=torch.float64).to(g)
        d = torch.cat([(g / torch.linalg.vector_norm(g).clamp(min=1e-300))[None], probes])
        values = Forward(expansion.facts, expansion.slopes).sweep(
            nodes[: expansion.last + 1], d.reshape(-1, *nodes[0].shape)
        )
        swept = self._swept(self._by_value(self._quotients), lambda z: values[z], expansion.slopes)
        chosen, sizes = {}, {}
        for k, own in expansion.neurons.items():
            q, moved = self._ball.steps[k].q, _mixed(values[own.node.source])
            sizes[k] = (torch.linalg.vector_norm(q * moved) * self._ball.t / 2).clamp(min=1e-100)
            if k in swept.kept:
                weight = q * moved / (2 * _mixed(swept.kept[k])).clamp(min=1e-200)
            else:
                continue
            typical = weight.median().clamp(min=1e-200)
            chosen[k] = weight.clamp(min=1e-4 * typical, max=1e4 * typical)
        return chosen, sizes

    def _narrower(self) -> dict[int, tuple[int, AbstractLinearMap]]:
        """Return, for activations that one narrower affine value alone reads, that value and the map to it."""
        found: dict[int, tuple[int, AbstractLinearMap]] = {}
        nodes = self.expansion.facts.network.nodes[: self.expansion.last + 1]
        for k in self.expansion.slopes:
            uses = [
                (value, term.map)
                for value, node in enumerate(nodes)
                if isinstance(node, AffineNode)
                for term in node.terms
                if term.source == k
            ]
            alone = sum(k in node.sources for node in nodes) == len(uses) == 1
            if alone and uses[0][1].out_size < uses[0][1].in_size:
                found[k] = uses[0]
        return found

    def _matrix(self) -> QuadraticForm:
        r"""Return M + sum C' D C, and a bound on what rounding did to it.

        :math:`C = A^T B` behind a map A to a narrower value with covectors B alone, so :math:`C^T D C = B^T A (D C)`.
        """
        expansion, narrower = self.expansion, self._narrower()
        matrix = torch.empty(expansion.inputs, expansion.inputs, dtype=torch.float64, device=expansion.device)
        factors, sums = _Factors(expansion.inputs), _Sums()
        keep = {*self.coupling, *(value for value, _ in narrower.values())}
        for part in expansion.parts:
            swept = self._swept(self._weights, partial(expansion.tangents, part=part), keep)
            matrix[part] = swept.start.flatten(1)
            sums.add("size", swept.sizes)
            sums.add("lost", swept.lost)
            for k in self.coupling:
                weighted = self.coupling[k] * swept.kept[k]
                if k in narrower:
                    value, A = narrower[k]
                    factors.put(k, part, swept.kept[value], A.apply(weighted))
                    sums.add("weighted", {k: weighted})
                else:
                    factors.put(k, part, swept.kept[k], weighted)
        self._sizes, self._lost = sums.roots("size"), sums.roots("lost")
        # Forming what is added to the last value rounds once, as `swept_back` has it for all others.
        last = expansion.last
        forming = Upper(2 * UNIT_ROUNDOFF * self._sizes[last])
        self._lost[last] = (forming + self._lost.get(last, 0.0)).bound
        matrix = (matrix + matrix.mT) / 2
        error = self._swept_error() + lengths(matrix) * gamma(4)
        for k in list(factors.left):
            product, off = factors.product(k)
            matrix = matrix + (product + product.mT) / 2
            # What is added may nearly cancel what was there: each sum rounds by its own size, or that before it.
            error += off + lengths(matrix) * gamma(4)
            if k in narrower:
                value, A = narrower[k]
                image = Upper(self._sizes[value]) * expansion.facts.norms.absolute(A, 2) * gamma(rounding_length(A) + 2)
                error += (image + self._lost[k]) * sums.roots("weighted")[k]
        return QuadraticForm(matrix, error.bound)

    def _swept_error(self) -> Upper:
        """Return what the defects of the tangents, and the losses of the sweep back, do to M."""
        error = Upper(torch.zeros_like(self.expansion.sizes[0]))
        for value, size in self._sizes.items():
            error += Upper(2 * size) * self.expansion.defects[value]
        for value, lost in self._lost.items():
            error += Upper(2 * lost) * self.expansion.sizes[value]
        return error


class _Factors:
    """Pairs of matrices whose products are wanted, filled in a few rows at a time."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.left: dict[int, Tensor] = {}
        self._right: dict[int, Tensor] = {}

    def put(self, k: int, part: slice, left: Tensor, right: Tensor) -> None:
        """Note some rows of both."""
        for store, rows in ((self.left, left), (self._right, right)):
            if k not in store:
                store[k] = rows.new_empty(self._rows, rows[0].numel())
            store[k][part] = rows.flatten(1)

    def product(self, k: int) -> tuple[Tensor, Upper]:
        """Return the product of a pair, which is let go, and what rounding did to it."""
        left, right = self.left.pop(k), self._right.pop(k)
        return left @ right.mT, lengths(left) * lengths(right) * gamma(left.shape[1] + 8)


class _Sums:
    """Sums of squares by name and value."""

    def __init__(self) -> None:
        self._squares: dict[str, dict[int, Upper]] = {}

    def add(self, name: str, rows: Mapping[int, Tensor]) -> None:
        """Add the squares of some numbers of each value."""
        known = self._squares.setdefault(name, {})
        for k, more in rows.items():
            square = lengths(more).square()
            known[k] = known[k] + square if k in known else square

    def roots(self, name: str) -> dict[int, Tensor]:
        """Return bounds on the roots of the sums."""
        return {k: (square.root() + TINY).bound for k, square in self._squares.get(name, {}).items()}


def _mixed(x: Tensor) -> Tensor:
    """Return the root of the square along the gradient and a share of that in all directions."""
    return (x[0].square() + _SHARE * x[1:].square().mean(dim=0)).sqrt()
