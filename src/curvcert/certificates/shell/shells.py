r"""The local certificate: bounds on how far gradients move within balls, integrated over shells.

A grid of equal shells reaches to T, no further than the linear limit :math:`\min_i m_i / g_i`, one for all pairs of a
sample.  A second grid ends where the first pair stopped on the first one, if something is still to be decided there.
"""

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from curvcert.certificates.radii import decided
from curvcert.certificates.shell.ball import over_balls
from curvcert.certificates.shell.centre import AtCentre, at_centres, pair_gradients
from curvcert.certificates.shell.gradient_change import gradient_change
from curvcert.certificates.shell.integral import Pairs, Spent, integrate_shell
from curvcert.certificates.shell.layers import Layers
from curvcert.memory import spare_elements
from curvcert.propagation.analysis import AtPoints
from curvcert.rounding import Upper, gamma

SHELLS = (8, 16)
"""Shells of the first grid, which finds where the first pair stops, and of the second, which ends there."""

_FARTHEST = 16.0
"""The first grid reaches no further than this many times the radius by global constants."""

_LARGEST = 1e100
"""No grid reaches further, so that nothing overflows."""

_CHUNK_ELEMENTS = 2**24
"""Numbers that the Jacobians and the gradients of the samples in hand may take, on a processor."""


@dataclass(frozen=True, eq=False)
class Query:
    """Samples and classes to certify, with what is known: margins, gradient norms, constants and radii so far.

    `at` and `label` are the samples; the others are (batch, classes), with anything at the label itself.  `known` are
    the best radii, `everywhere` those by global constants: they alone set the grid, so that a smaller K can only
    help.  Where radii are to be decided, `epsilons`, it is asked which of them are reached and no more.
    """

    at: AtPoints
    label: Tensor
    m: Tensor
    g: Tensor
    K: Tensor
    L: Tensor
    known: Tensor
    everywhere: Tensor
    epsilons: tuple[float, ...] = ()

    @property
    def farthest(self) -> float:
        """Nothing is asked for beyond."""
        return decided(max(self.epsilons, default=math.inf))

    def part(self, index: Tensor) -> "Query":
        """Return the query about some of the samples."""
        tensors = {f.name: getattr(self, f.name)[index] for f in fields(self) if f.name not in ("at", "epsilons")}
        return replace(self, at=self.at.of_samples(index), **tensors)


def shell_radii(layers: Layers, query: Query) -> Tensor:
    """Return a certified radius of every class, (batch, classes), inf at the label.

    Classes that are known to stay below the label up to the end of the first grid are not looked at: they get
    that end, which is no less than the sample's own radius.
    """
    # On an accelerator size pays.
    device = query.label.device
    size = max(1, spare_elements(device, _CHUNK_ELEMENTS) // numbers_of_sample(layers))
    pieces = torch.arange(len(query.label), device=device).split(size)
    return torch.cat([_radii(layers, query.part(index)) for index in pieces])


def gradient_growth(layers: Layers, centres: list[AtCentre], t: Tensor) -> Tensor:
    r"""Bound :math:`\kappa` with :math:`|\nabla F(x') - \nabla F(x)| \le \kappa |x' - x|` within t of x, (batch,)."""
    change = gradient_change(over_balls(centres, t, math.prod(layers.network.in_shape)), t, 1)
    return (Upper(change.linear[:, 0]) / t).bound


def numbers_of_sample(layers: Layers) -> int:
    """Return how many numbers one sample takes."""
    hidden = [unit.widest for unit in layers.network.activated]
    states = [math.prod(layer.unit.block.out_shape) for layer in layers.layers]
    widest = max([*hidden, *states, 1])
    squares = max([n * n for n in hidden if n <= 1024], default=0)
    return _numbers_of_jacobians(layers) + 4 * squares + layers.network.outputs * (4 * sum(hidden) + 4 * widest)


def _numbers_of_jacobians(layers: Layers) -> int:
    if layers.jacobians_from is None:
        return 0
    behind = layers.layers[layers.jacobians_from :]
    sizes = [layer.unit.widest for layer in behind if layer.unit.activated is not None]
    sizes += [math.prod(layer.unit.block.out_shape) for layer in behind]
    return 6 * max(sizes) * layers.columns


def _radii(layers: Layers, query: Query) -> Tensor:
    farthest, others = _grid_end(query)
    pairs = Pairs(query.m, query.g, query.K, query.L).chosen(others)
    centres = at_centres(layers, query.at, pair_gradients(query.at, query.label, others))
    inputs = math.prod(layers.network.in_shape)
    spent, end = _walk(centres, pairs, farthest, SHELLS[0], inputs)
    radius, known = spent.radius, query.known.gather(1, others)
    short = _short(spent, end, known, query.epsilons).nonzero().flatten()
    if len(short):
        nearer = centres if len(short) == len(end) else [at.of_samples(short) for at in centres]
        radius[short] = _refined(nearer, pairs.of_samples(short), radius[short], end[short], inputs)
    table = farthest[:, None].expand_as(query.m).scatter(1, others, radius)
    # The integral is never above that with global constants alone, but the grid may end short of their radius.
    return torch.maximum(table, query.everywhere).scatter(1, query.label[:, None], torch.inf)


def _short(spent: Spent, end: Tensor, known: Tensor, epsilons: tuple[float, ...]) -> Tensor:
    """Tell which samples a second grid could serve: those that stopped, and with a radius to decide before its end."""
    stopped = ~spent.open_.all(dim=1)
    if not epsilons:
        return stopped
    reached = torch.maximum(spent.radius, known).amin(dim=1)
    useful = torch.zeros_like(stopped)
    for eps in epsilons:
        useful |= (reached < eps) & (end >= eps)
    return stopped & useful


def _refined(centres: list[AtCentre], pairs: Pairs, radius: Tensor, end: Tensor, inputs: int) -> Tensor:
    """Return the radii by a second grid, or those of the first where they are larger."""
    # Only pairs that stopped short of the new end can still be the sample's first to stop.
    order = radius.argsort(dim=1)
    urgent = order[:, : int((radius < end[:, None]).sum(dim=1).amax().clamp(min=1))]
    fewer = [at.of_pairs(urgent) for at in centres]
    again, _ = _walk(fewer, pairs.chosen(urgent), end, SHELLS[1], inputs)
    return radius.scatter(1, urgent, torch.maximum(again.radius, radius.gather(1, urgent)))


def _grid_end(query: Query) -> tuple[Tensor, Tensor]:
    """Return the end of the first grid, and the classes to look at, most urgent first: the same number per sample."""
    known = query.known.scatter(1, query.label[:, None], torch.inf)
    limit = (query.m / query.g.clamp(min=1e-300)).scatter(1, query.label[:, None], torch.inf).amin(dim=1)
    everywhere = query.everywhere.scatter(1, query.label[:, None], torch.inf).amin(dim=1)
    farthest = torch.minimum(limit, _FARTHEST * everywhere).clamp(max=min(query.farthest, _LARGEST)) * (1 - gamma(16))
    count = int((known < farthest[:, None]).sum(dim=1).amax().clamp(min=1))
    return farthest, known.argsort(dim=1)[:, :count]


def _walk(centres: list[AtCentre], pairs: Pairs, end: Tensor, shells: int, inputs: int) -> tuple[Spent, Tensor]:
    """Integrate over equal shells up to `end`; return the radii, and where the shell ends that first stopped a pair."""
    spent, low, stopped = Spent.nothing(pairs), torch.zeros_like(end), end
    for j in range(1, shells + 1):
        high = end * (j / shells)
        ball = over_balls(centres, high, inputs)
        change = gradient_change(ball, high, pairs.m.shape[1])
        spent = integrate_shell(spent, pairs, change, low, high)
        # The first pair to stop gives the sample's radius: the others need not go on.
        whole = spent.open_.all(dim=1)
        spent = replace(spent, open_=spent.open_ & whole[:, None])
        stopped = torch.where(whole, stopped, torch.minimum(stopped, high))
        if not bool(whole.any()):
            break
        low = high
    return spent, stopped
