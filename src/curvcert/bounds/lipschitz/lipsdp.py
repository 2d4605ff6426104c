r"""LipSDP with a multiplier for each neuron, near its optimum, for any graph: no solver, and one proof in the end.

The quadratic form of `multipliers.py` bounds outputs for any multipliers :math:`T \ge 0`.  They are searched for in
floating point, for every scalar output by itself or for a vector, from those of the LipSDP recursion on; then one
Cholesky factorisation of :math:`[[M(T), C^T], [C, \rho I]]`, with all that rounding did to it, proves
:math:`L \le \sqrt\rho` for the multipliers that were found, whatever they are.

The slopes may be those of the activations, those seen from a point (only quotients from x occur in its differences) or
those over a ball: each sample then has multipliers of its own.  Weighted rows of a layer in place of C bound how far
its pre-activations move together (`weighted_reaches`): curvatures are made of that.  Powers of two bring the neurons of
every node to the same size, exactly.  Where fewer rows read the input than it has coordinates, it is replaced by as
many: with :math:`B B^T \preceq R R^T`, :math:`B = RQ` for a Q with :math:`\|Q\| \le 1`, so that a bound for R serves B.

Reference: Fazlyab et al. (NeurIPS 2019); any multipliers give a bound, and the optimum is their LipSDP-neuron.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from curvcert.bounds.lipschitz.analyses import at_anchor, over_balls
from curvcert.bounds.lipschitz.liplt import growth
from curvcert.bounds.lipschitz.multipliers import QuadraticForm, best_multipliers, first_multipliers
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Anchor, Bound, Global, LayerTerm
from curvcert.network.nodes import ElementwiseNode
from curvcert.operators.verified import dominating_factor, inverse_form_upper_bound
from curvcert.propagation.neuron_maps import Enclosed, NeuronMaps, neuron_maps
from curvcert.rounding import TINY, Upper, gamma, inflate, norm_upper_bound_of_vectors, power_of_two

_POWER_STEPS = 12
"""Steps towards the direction in which a network moves furthest; any direction shows that a search cannot pay."""


def reason_to_skip_search(problem: Problem, most_work: float, together: bool = False) -> str | None:
    """Say why no multipliers are to be had, or None; `together` asks for one search for all scalar outputs."""
    nodes, q = problem.network.nodes, problem.q
    if problem.p != 2 or (q != 2 and not problem.scalars):
        return "lipsdp: needs p = q = 2"
    if problem.network.pools:
        return "lipsdp: no rule for a MaxPool"
    if not any(isinstance(node, ElementwiseNode) for node in nodes):
        return "lipsdp: there is no activation to choose multipliers for"
    size, inputs = _size(problem), math.prod(problem.network.in_shape)
    if 8 * (12 * size**2 + 6 * size * (inputs + size)) > problem.norms.memory_budget:
        return f"lipsdp: matrices of {size} rows are over the memory budget"
    samples = 1 if isinstance(problem.scope, Global) else len(problem.scope.x)
    problems = samples * (problem.network.outputs if problem.scalars and not together else 1)
    if problems * size**3 > most_work:
        return f"lipsdp: takes long ({problems} x size {size}), ask for it by its name"
    return None


def _size(problem: Problem) -> int:
    nodes, outputs = problem.network.nodes, problem.network.outputs
    neurons = sum(math.prod(node.shape) for node in nodes if isinstance(node, ElementwiseNode))
    return neurons + min(math.prod(problem.network.in_shape), neurons) + (1 if problem.scalars else outputs)


def lipsdp_bound(problem: Problem) -> Bound:
    """Bound the l2 Lipschitz constant of a network, or of each of its outputs, by the best multipliers found."""
    scaled = problem.once("neurons of one size", lambda: _scaled(problem))
    per_sample = [_solved(problem, scaled, *slopes) for slopes in _slopes(problem, scaled)]
    value = torch.stack([found.value for found in per_sample])
    largest = torch.stack([found.largest for found in per_sample])
    if isinstance(problem.scope, Global):
        value, largest = value[0], largest[0]
    value = torch.minimum(value, growth(problem, problem.norms).of_output()) if bool(value.isinf().any()) else value
    names = [problem.network.nodes[k].name for level in scaled.maps.levels for k in level]
    per_layer = tuple(
        LayerTerm(name, "largest multiplier", part, "lipsdp")
        for name, part in zip(names, largest.unbind(dim=-1), strict=True)
    )
    return problem.norms.result(
        problem.shaped(value), 2, problem.q, problem.scope, "lipsdp", per_layer, problem.network.assumes
    )


@dataclass(frozen=True, eq=False)
class _Scaled:
    """The form with all neurons and outputs brought to the same size by powers of two.

    A neuron's dz and da are those of the network divided by `before` and `behind`, the outputs by `outputs`.
    """

    maps: NeuronMaps
    form: QuadraticForm
    before: Tensor
    behind: Tensor
    outputs: Tensor

    @cached_property
    def places(self) -> dict[int, slice]:
        """The neurons of each node."""
        order, ends = (k for level in self.maps.levels for k in level), accumulate(self.maps.sizes)
        return {k: slice(end - size, end) for k, end, size in zip(order, ends, self.maps.sizes, strict=True)}


def _scaled(problem: Problem) -> _Scaled:
    nodes = problem.network.nodes
    maps = neuron_maps(nodes)
    order = [k for level in maps.levels for k in level]
    columns = torch.ones(maps.z.value.shape[1], dtype=torch.float64, device=maps.z.value.device)
    before, done = torch.ones_like(columns[maps.inputs :]), 0
    slopes = []
    for k, size in zip(order, maps.sizes, strict=True):
        node, rows = nodes[k], slice(done, done + size)
        assert isinstance(node, ElementwiseNode)
        alpha, beta = node.activation.slope
        slopes.append(torch.tensor([[alpha], [beta]], dtype=columns.dtype, device=columns.device).expand(2, size))
        before[rows] = power_of_two((maps.z.value[rows].abs() * columns).amax())
        steepest = torch.tensor(max(abs(alpha), abs(beta)), dtype=columns.dtype, device=columns.device)
        columns[maps.inputs + done : maps.inputs + done + size] = before[rows] * power_of_two(steepest)
        done += size
    outputs = power_of_two((maps.output.value.abs() * columns).amax())
    Z, C = _times(maps.z, 1 / before[:, None], columns), _times(maps.output, 1 / outputs, columns)
    Z, C, inputs = _with_fewer_inputs(Z, C, maps.inputs)
    behind = columns[maps.inputs :]
    sizes = dict(zip(order, maps.sizes, strict=True))
    levels = tuple(sum(sizes[k] for k in level) for level in maps.levels)
    alpha, beta = torch.cat(slopes, dim=1) * (before / behind)
    return _Scaled(maps, QuadraticForm(Z, C, alpha, beta, inputs, levels), before, behind, outputs)


def _times(matrix: Enclosed, rows: Tensor, columns: Tensor) -> Enclosed:
    """Return a matrix with rows and columns multiplied by powers of two; what underflows is in the error."""
    return Enclosed(matrix.value * columns * rows, matrix.error * columns * rows + TINY)


def _with_fewer_inputs(Z: Enclosed, C: Enclosed, inputs: int) -> tuple[Enclosed, Enclosed, int]:
    """Return the same with the input replaced by as many coordinates as rows read it, if those are fewer.

    See the module's docstring: what is lost is the rounding of a Cholesky factorisation.
    """
    B = torch.cat([Z.value[:, :inputs], C.value[:, :inputs]])
    off = torch.cat([Z.error[:, :inputs], C.error[:, :inputs]])
    reading = (B != 0).any(dim=1) | (off > TINY).any(dim=1)
    count = int(reading.sum())
    if not 0 < count < inputs:
        return Z, C, inputs
    size, error = (norm_upper_bound_of_vectors(part.flatten(), 2, 0) for part in (B, off))
    gram = B[reading] @ B[reading].mT
    lost = Upper(size) * size * gamma(inputs + 2) + Upper(error) * (Upper(2 * size) + error)
    R = dominating_factor(gram, lost.bound)
    factor = B.new_zeros(len(B), count)
    factor[reading] = R

    def replaced(matrix: Enclosed, rows: slice) -> Enclosed:
        value = torch.cat([factor[rows], matrix.value[:, inputs:]], dim=1)
        return Enclosed(value, torch.cat([torch.zeros_like(factor[rows]), matrix.error[:, inputs:]], dim=1))

    n = len(Z.value)
    return replaced(Z, slice(0, n)), replaced(C, slice(n, None)), count


def _slopes(problem: Problem, scaled: _Scaled) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the slopes of all neurons, as scaled, for each sample of the scope; once for the global one."""
    scope, ratio = problem.scope, scaled.before / scaled.behind
    if isinstance(scope, Global):
        yield scaled.form.alpha, scaled.form.beta
        return
    found = at_anchor(problem).seen if isinstance(scope, Anchor) else over_balls(problem).slopes
    parts = [found[k] for level in scaled.maps.levels for k in level]
    lower = torch.cat([part.lower.flatten(1) for part in parts], dim=1) * ratio
    upper = torch.cat([part.upper.flatten(1) for part in parts], dim=1) * ratio
    yield from zip(lower, upper, strict=True)


@dataclass(frozen=True, eq=False)
class _Solved:
    """A constant for each scalar output, or one for the vector; and the largest multiplier of each node."""

    value: Tensor
    largest: Tensor


def _solved(problem: Problem, scaled: _Scaled, alpha: Tensor, beta: Tensor) -> _Solved:
    """Search for multipliers and prove the constants that they give; inf where that fails."""
    form = scaled.form.with_slopes(alpha, beta)
    first = first_multipliers(form) if _is_finite(form) else None
    if first is None:
        count = problem.network.outputs
        nothing = torch.full((count,) if problem.scalars else (), torch.inf, dtype=alpha.dtype, device=alpha.device)
        return _Solved(nothing, nothing[..., None].expand(*nothing.shape, len(scaled.maps.sizes)))
    found = [(part, best_multipliers(part, start)) for part, start in _questions(form, first, problem.scalars)]
    values = torch.stack([proven_constant(part, T) for part, T in found]) * scaled.outputs
    largest = torch.stack([_largest(scaled, T) for _, T in found])
    values = inflate(values, 0.0)
    return _Solved(values, largest) if problem.scalars else _Solved(values[0], largest[0])


def _is_finite(form: QuadraticForm) -> bool:
    parts = (form.Z.value, form.Z.error, form.C.value, form.C.error, form.alpha, form.beta)
    return all(bool(torch.isfinite(part).all()) for part in parts)


def _questions(form: QuadraticForm, first: Tensor, scalars: bool) -> Iterator[tuple[QuadraticForm, Tensor]]:
    """Yield every form whose outputs are bounded together, with multipliers to start from."""
    rows = len(form.C.value)
    if not scalars:
        yield form, first
        return
    for k in range(rows):
        yield form.with_output(Enclosed(form.C.value[k : k + 1], form.C.error[k : k + 1])), first


def _largest(scaled: _Scaled, T: Tensor) -> Tensor:
    """Return the largest multiplier of each node, in the network's own units."""
    return torch.stack([part.amax() for part in (T / scaled.behind / scaled.behind).split(list(scaled.maps.sizes))])


def proven_constant(form: QuadraticForm, T: Tensor) -> Tensor:
    r"""Return a proven :math:`\sqrt{\lambda_{max}(C M(T)^{-1} C^T)}` for any multipliers; inf where M is not definite.

    Multipliers below 0 count as 0, which is one of the choices.
    """
    return inflate(_proven_square(form, T).sqrt(), 0.0)


def _proven_square(form: QuadraticForm, T: Tensor) -> Tensor:
    T = T.clamp(min=0.0)
    M = form.matrix(T)
    _, exponent = torch.frexp(M.diagonal().clamp(min=TINY))
    D = torch.ldexp(torch.ones_like(M.diagonal()), -(exponent // 2))
    C_error = norm_upper_bound_of_vectors((form.C.error * D).flatten(), 2, 0)
    return inverse_form_upper_bound(D[:, None] * M * D, form.C.value * D, form.matrix_error(T, D), C_error)


def weighted_reaches(
    problem: Problem, weights: Mapping[int, Tensor], wanted: Mapping[int, Tensor]
) -> dict[int, Tensor]:
    r"""Bound :math:`\sum_l w_l |\Delta z_l|^2 / \|\Delta x\|^2` over the neurons of a node for each row w of weights.

    Nodes are named by their numbers; those of the first level, which are linear in the input, are left out, and all
    where the search would take more than `Problem.most_work`.  Multipliers are searched for each row by itself where
    that leaves room, and otherwise for the mean of all rows.  A row is left at inf where its bound cannot be below what
    is wanted, since one network with these slopes attains more.
    """
    if reason_to_skip_search(problem, problem.most_work, together=True) is not None:
        return {}
    scaled = problem.once("neurons of one size", lambda: _scaled(problem))
    form = scaled.form.with_slopes(scaled.form.alpha, scaled.form.beta)
    first = first_multipliers(form) if _is_finite(form) else None
    if first is None:
        return {}
    alone, found = reason_to_skip_search(problem, problem.most_work) is None, {}
    for number, level in enumerate(scaled.maps.levels[1:], 1):
        earlier = scaled.places[level[0]].start
        form_there = form.before_level(number, earlier)
        for k in level:
            roots = weights[k].flatten(1).sqrt() * scaled.before[scaled.places[k]]
            rows, size = form.rows(scaled.places[k], earlier), wanted[k]
            found[k] = torch.full_like(size, torch.inf)
            if bool((pays := _attained(form_there, rows, roots) < size).any()):
                found[k][pays] = _reaches(form_there, rows, first[:earlier], roots[pays], alone)
    return found


def _attained(form: QuadraticForm, rows: Enclosed, roots: Tensor) -> Tensor:
    """Return what the network attains whose slopes are all the largest, as computed: no multipliers give less."""
    eye = torch.eye(len(form.beta), dtype=form.beta.dtype, device=form.beta.device)
    inner = form.beta[:, None] * form.Z.value
    activations = torch.linalg.solve_triangular(
        eye - inner[:, form.inputs :], inner[:, : form.inputs], upper=False, unitriangular=True
    )
    J = rows.value[:, : form.inputs] + rows.value[:, form.inputs :] @ activations
    v = torch.ones(len(roots), J.shape[1], dtype=J.dtype, device=J.device)
    for _ in range(_POWER_STEPS):
        v = torch.nn.functional.normalize((roots.square() * (v @ J.mT)) @ J, dim=1)
    attained: Tensor = (roots * (v @ J.mT)).square().sum(dim=1)
    return attained


def _reaches(form: QuadraticForm, rows: Enclosed, first: Tensor, roots: Tensor, alone: bool) -> Tensor:
    """Return the bounds of one node, given the form over the levels before it and the roots of the weights."""
    unit = power_of_two(roots.amax())
    roots = roots / unit
    shared = roots.square().mean(dim=0, keepdim=True).sqrt().expand_as(roots)
    values, T = [], first
    for place, (root, wanted) in enumerate(zip(roots, roots if alone else shared, strict=True)):
        if alone or place == 0:
            T = best_multipliers(form.with_output(_weighed(rows, wanted)), first)
        values.append(_proven_square(form.with_output(_weighed(rows, root)), T))
    return (Upper(torch.stack(values)) * unit * unit).bound


def _weighed(rows: Enclosed, roots: Tensor) -> Enclosed:
    """Return diag(roots) A; the roots themselves and the products round."""
    value = roots[:, None] * rows.value
    return Enclosed(value, (Upper(rows.error) * roots[:, None] + Upper(value.abs()) * gamma(4)).bound)
