"""`curvcert.certify`: certified radii, attack radii and witnesses for a batch or a data set."""

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from curvcert.bounds.curvature.anchored import anchored_curvature_bound
from curvcert.bounds.lipschitz.problem import Problem, all_pairs
from curvcert.bounds.types import Anchor, Global
from curvcert.certificates.attack_radius import Box, attack_witnesses
from curvcert.certificates.certificate import Certificate, concatenate
from curvcert.certificates.constants import (
    PairConstants,
    global_constants,
    pair_deviations,
    pair_table,
    require_method,
)
from curvcert.certificates.evidence import DigestPool, Evidence, describable_digest
from curvcert.certificates.line import Line, LineQuery, line_radii
from curvcert.certificates.pointwise import Pointwise, evaluate_points
from curvcert.certificates.radii import (
    combined_radius,
    curvature_beats_lipschitz,
    curvature_radius,
    lipschitz_radius,
)
from curvcert.certificates.shell import Layers, Query, layers_of, shell_radii
from curvcert.errors import InvalidInput, UnsupportedActivation, UnsupportedModule
from curvcert.memory import spare_elements
from curvcert.network import Block, Network
from curvcert.norms import validate_p
from curvcert.progress import sign_of_life

_BATCH_ELEMENTS = 2**24
"""Numbers that the gradients of one batch may take by default, on a processor."""

_COPIES = 12
"""How many tensors of the size of a batch's gradients in front of the widest layer are held at once, and some room."""

_LARGEST_BATCH = 2048
"""Samples in one batch at most, so that a bar moves; a large batch pays on an accelerator alone."""

_ANCHORED_BATCH = 64

ANCHORED_WIDTH = 256
"""The widest layer for which "auto" computes anchored constants beside local ones: an eigenproblem a pair and layer."""

_WORTHWHILE = 1e-3
"""The local certificate runs where it could gain more than this, relative to the radius that is known."""


@final
@dataclass(frozen=True, eq=False)
class Certifier:
    """A network's constants, computed once, ready to certify any number of inputs; made by `certifier`."""

    network: Network
    p: float
    method: str
    box: Box | None
    epsilons: tuple[float, ...]
    constants: PairConstants
    deviations: Tensor
    pairs: Problem
    digest: str
    layers: Layers | None
    line: Line | None
    anchors: bool

    def __call__(
        self,
        x: Tensor | Iterable[Any],
        y: Tensor | None = None,
        batch_size: int | None = None,
        progress: bool | None = None,
    ) -> Certificate:
        """Certify inputs; the arguments are those of `certify`."""
        shown = progress if progress is not None else Console(stderr=True).is_terminal
        parts, digests = [], []
        bars = Progress(console=Console(stderr=True), transient=True) if shown else nullcontext()
        with DigestPool() as pool, bars as bar:
            total = len(x) if isinstance(x, Tensor) else None
            task = None if bar is None else bar.add_task("certifying", total=total)
            for inputs, labels in _batches(self.network, x, y, batch_size):
                pending = pool.start(inputs)
                parts += _within_memory(self, inputs.to(self.network.device), labels)
                # A source may write its next batch to the same place.
                digests.append(pending())
                if bar is not None and task is not None:
                    bar.advance(task, len(inputs))
        certificate = concatenate(parts)
        assert certificate.evidence is not None
        return replace(certificate, evidence=replace(certificate.evidence, inputs=torch.cat(digests)))


def certify(
    network: Network,
    x: Tensor | Iterable[Any],
    y: Tensor | None = None,
    p: float = 2,
    method: str = "auto",
    box: Box | None = None,
    epsilons: Sequence[float] | None = None,
    batch_size: int | None = None,
    device: torch.device | str | None = None,
    progress: bool | None = None,
) -> Certificate:
    r"""Certify how far each input can move, in the p-norm, before the class changes: provably.

    Args:
        network: a classifier, from `curvcert.trace`.
        x: inputs, with the batch dimension; or a DataLoader, or any iterable of (x, y) batches.
        y: labels; the predicted classes by default.
        p: the norm, 1 <= p <= inf.
        method: "auto" (the best of all, a sample), "lipschitz", "anchored", "local" (bounds over balls, see
            `certificates.shell`), "line" (the network along the gradient and curvature across it, in l2, see
            `certificates.line`), or one bound by its name: "product", "liplt", "lipsdp-recursion", "compositional",
            "unrolled", "crc".
        box: (lo, hi), the range of valid inputs; it limits witnesses, not radii.
        epsilons: radii to decide: what cheap bounds decide is not given to expensive ones.
        batch_size: samples at a time; chosen to bound the memory by default, and halved when it runs out.
        device: where to compute; the network's own by default.
        progress: show what goes on; by default on a terminal.

    >>> from torch import nn
    >>> from curvcert.network import trace
    >>> model = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 2)).eval()
    >>> for layer, weight in ((model[0], [[1.0], [-1.0]]), (model[2], [[1.0, 0.0], [0.0, 1.0]])):
    ...     _ = layer.weight.data.copy_(torch.tensor(weight)), layer.bias.data.zero_()
    >>> cert = certify(trace(model, torch.zeros(1, 1)), torch.tensor([[0.5]]))
    >>> bool(0.4 < cert.radius[0] <= 0.5)
    True
    """
    return certifier(network, p, method, box, epsilons, device, progress)(x, y, batch_size, progress)


def certifier(
    network: Network,
    p: float = 2,
    method: str = "auto",
    box: Box | None = None,
    epsilons: Sequence[float] | None = None,
    device: torch.device | str | None = None,
    progress: bool | None = None,
) -> Certifier:
    """Compute what certificates of a network need, once, for many calls; the arguments are those of `certify`.

    >>> from torch import nn
    >>> from curvcert.network import trace
    >>> ready = certifier(trace(nn.Sequential(nn.Linear(2, 3), nn.Tanh()).eval(), torch.zeros(1, 2)))
    >>> len(ready(torch.zeros(4, 2))), len(ready(torch.ones(5, 2)))
    (4, 5)
    """
    if not isinstance(network, Network):
        raise InvalidInput(
            f"certify expects a Network, got {type(network).__name__}. Make one with curvcert.trace(model, example)."
        )
    if network.outputs < 2:
        raise InvalidInput("certify needs at least two classes, this network has one output. Use curvcert.lipschitz.")
    if sum(size > 1 for size in network.out_shape) > 1:
        raise InvalidInput(
            f"certify expects one logit a class, got outputs of shape {network.out_shape}. End the model with a "
            "pooling or a layer that leaves the classes."
        )
    require_method(method)
    if box is not None and not (len(box) == 2 and box[0] < box[1]):
        raise InvalidInput(f"box is (lowest, highest) with lowest < highest, got {box!r}.")
    wanted = tuple(float(eps) for eps in epsilons or ())
    if any(not 0 < eps < math.inf for eps in wanted):
        raise InvalidInput(f"epsilons are positive, finite radii, got {list(epsilons or ())}.")
    p = validate_p(p)
    network = network if device is None else network.to(device)
    with sign_of_life("bounding the network: minutes where it has convolutions, on a CPU", progress):
        pairs = all_pairs(network, p)
        # Shells take the global constants along.
        constants = global_constants(network, pairs, "auto" if method in ("local", "line") else method)
        pairs = replace(pairs)  # the same norms, without the matrices of this question
        deviations = pair_table(pair_deviations(pairs), network)
        layers, notes = _layers(network, pairs, method)
        anchors, more = _anchors(network, method, layers)
        constants, digest = replace(constants, notes=(*constants.notes, *notes, *more)), describable_digest(network)
        line = _line(network, pairs, constants, deviations, method)
    return Certifier(network, p, method, box, wanted, constants, deviations, pairs, digest, layers, line, anchors)


def _line(network: Network, pairs: Problem, constants: PairConstants, deviations: Tensor, method: str) -> Line | None:
    """Prepare the line certificate: in l2, with a curvature, where it is asked for."""
    if method == "line" and pairs.p != 2:
        raise InvalidInput(f"The line certificate needs p = 2, got p = {pairs.p:g}. Use method='auto' for the best.")
    if method not in ("auto", "line") or pairs.p != 2 or not constants.names[1]:
        return None
    return Line(Problem(network, 2, 2, Global(), scalars=True, norms=pairs.norms), deviations)


def _anchors(network: Network, method: str, layers: Layers | None) -> tuple[bool, tuple[str, ...]]:
    """Tell whether anchored constants are computed; "auto" skips them where they cost much beside local ones."""
    widest = max((block.W.out_size for block in network.blocks if isinstance(block, Block)), default=0)
    if method == "auto" and layers is not None and widest > ANCHORED_WIDTH:
        reason = f"anchored skipped: a layer of {widest} neurons (over {ANCHORED_WIDTH}), and local bounds apply"
        return False, (reason,)
    return method in ("auto", "anchored"), ()


def _layers(network: Network, pairs: Problem, method: str) -> tuple[Layers | None, tuple[str, ...]]:
    """Prepare bounds over balls where they are asked for; "auto" skips them where they don't apply, and says why."""
    if method not in ("auto", "local", "line"):
        return None, ()
    try:
        return layers_of(pairs, network), ()
    except (UnsupportedActivation, UnsupportedModule) as error:
        if method != "auto":
            raise
        return None, (f"local skipped: {error}",)


def _batches(
    network: Network, x: Tensor | Iterable[Any], y: Tensor | None, batch_size: int | None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    widest = max([math.prod(network.in_shape), *(math.prod(block.out_shape) for block in network.blocks)])
    held = _COPIES * network.outputs * widest
    fitting = max(1, min(_LARGEST_BATCH, spare_elements(network.device, _COPIES * _BATCH_ELEMENTS) // held))
    size = fitting if batch_size is None else batch_size
    if size < 1:
        raise InvalidInput(f"batch_size must be at least 1, got {batch_size}.")
    if isinstance(x, Tensor):
        source: Iterable[Any] = [(x, y)]
    else:
        if y is not None:
            raise InvalidInput(
                f"With y, x is a tensor, got {type(x).__name__}: pass torch.as_tensor(x). The batches of an iterable "
                "bring their labels along, as (x, y)."
            )
        source = x
    for item in source:
        inputs, labels = item if isinstance(item, tuple | list) else (item, None)
        inputs = network.require_batch(inputs)
        labels = _labels(network, labels, len(inputs))
        for start in range(0, len(inputs), size):
            part = slice(start, start + size)
            yield inputs[part], None if labels is None else labels[part].to(network.device)


def _labels(network: Network, y: Tensor | None, batch: int) -> Tensor | None:
    if y is None:
        return None
    y = torch.as_tensor(y)
    if y.shape != (batch,) or y.dtype.is_floating_point or y.dtype.is_complex or y.dtype == torch.bool:
        raise InvalidInput(f"y is one whole number a sample ({batch}), got shape {tuple(y.shape)} of {y.dtype}.")
    if bool(((y < 0) | (y >= network.outputs)).any()):
        raise InvalidInput(f"Labels lie in 0 .. {network.outputs - 1}, got {int(y.min())} .. {int(y.max())}.")
    return y.long()


def _within_memory(request: Certifier, x: Tensor, y: Tensor | None) -> list[Certificate]:
    """Certify a batch, in halves if the memory does not hold it."""
    try:
        return [_certify_batch(request, x, y)]
    except (torch.cuda.OutOfMemoryError, MemoryError):
        if len(x) == 1:
            raise
    half = len(x) // 2
    rest = None if y is None else y[half:]
    return _within_memory(request, x[:half], None if y is None else y[:half]) + _within_memory(request, x[half:], rest)


@torch.no_grad()
def _certify_batch(request: Certifier, x: Tensor, y: Tensor | None) -> Certificate:
    inside = _inside(request.box, x)
    L_name, K_name = request.constants.names
    # Where a network has Lipschitz constants alone its gradients serve nobody, and would take most of the time.
    useful = bool(K_name) or request.layers is not None
    points = evaluate_points(request.network, x, y, request.p, request.pairs.norms, request.deviations, useful)
    L, K = request.constants.L[points.label], request.constants.K[points.label]
    radii = {name: value for name, value in _pair_radii(points, L, K).items() if not bool(value.isnan().all())}
    labels = {"lipschitz": L_name, "curvature": K_name, "combined": f"{K_name} with {L_name}"}
    labels |= {"local": "local", "line": "line"}
    # By global constants the line is cheap, and goes first; over balls it comes last, for what is still to gain.
    radii |= _with_line(request, x, points, radii, None)
    local: dict[str, Tensor] = {}
    if request.epsilons and request.method == "auto":
        # Shells cost less than anchored constants: where radii are to be decided they go first, with global ones.
        local = _with_shells(request, x, points, (L, K), radii)
        radii |= local
    undecided = _undecided(request, points, radii)
    if request.anchors and K_name and bool(undecided.any()):
        K = _with_anchored(request, x, points, K, undecided)
        radii |= {name: value for name, value in _pair_radii(points, L, K).items() if not bool(value.isnan().all())}
        labels |= {"curvature": "anchored", "combined": f"anchored with {L_name}"}
        if request.method == "anchored":
            radii = {"curvature": radii["curvature"]}
        local = {}
    if not local:
        local = _with_shells(request, x, points, (L, K), radii)
    # Asked for by name it stands alone, unless the global constants were to decide what they can.
    radii = local if request.method == "local" and not request.epsilons else radii | local
    radii |= _with_line(request, x, points, radii, request.layers)
    if request.method == "line" and not request.epsilons:
        radii = {"line": radii["line"]}
    attack, witness = attack_witnesses(
        request.network, x, points, torch.where(K.isnan(), torch.inf, K), request.p, request.box
    )
    attack = torch.where(inside | ~points.correct, attack, torch.inf)
    certificate = _assembled(request, points, radii, labels, (attack, witness), K, request.constants.notes)
    tables = request.constants
    # Digests of the inputs are computed meanwhile, from where the inputs came from.
    pending = torch.empty(len(x), 0, dtype=torch.uint8)
    evidence = Evidence(request.digest, pending, tables.L, tables.K, tables.names, K)
    return replace(certificate, evidence=evidence)


def _pair_radii(points: Pointwise, L: Tensor, K: Tensor) -> dict[str, Tensor]:
    """Return the radius of every class by each formula; NaN where a constant is missing."""
    m, g = points.margin, points.gradient_norm
    found = {
        "lipschitz": torch.where(L.isnan(), torch.nan, lipschitz_radius(m, L)),
        "curvature": torch.where(K.isnan(), torch.nan, curvature_radius(m, g, K)),
    }
    both = L.isnan() | K.isnan()
    found["combined"] = torch.where(both, torch.nan, combined_radius(m, g, K, L))
    return {name: value.scatter(1, points.label[:, None], torch.inf) for name, value in found.items()}


def _undecided(request: Certifier, points: Pointwise, radii: dict[str, Tensor]) -> Tensor:
    """Tell which samples an expensive bound could still serve: all the correct ones, unless radii are given."""
    if not request.epsilons or request.method not in ("auto", "local"):
        return points.correct
    best = _largest(radii).amin(dim=1)
    ceiling = _ceiling(points)
    useful = torch.zeros_like(points.correct)
    for eps in request.epsilons:
        # No bound from the gradient at x certifies beyond the linear limit m / g.
        useful |= (best < eps) & (ceiling >= eps)
    return useful & points.correct


def _largest(radii: dict[str, Tensor]) -> Tensor:
    """Return the largest radius of every class, 0 where none is known."""
    return torch.stack([value.nan_to_num(nan=0.0, posinf=torch.inf) for value in radii.values()]).amax(dim=0)


def _ceiling(points: Pointwise) -> Tensor:
    """Return the linear limit min m / g of every sample, which no bound from the gradient at x exceeds."""
    return (points.margin / points.gradient_norm.clamp(min=1e-300)).amin(dim=1)


def _could_gain(points: Pointwise, radii: dict[str, Tensor]) -> Tensor:
    """Tell which samples a bound from the gradient at x could still serve."""
    return _ceiling(points) > _largest(radii).amin(dim=1) * (1 + _WORTHWHILE)


def _with_anchored(request: Certifier, x: Tensor, points: Pointwise, K: Tensor, todo: Tensor) -> Tensor:
    """Return the table of constants with anchored ones where they are smaller; one label at a time, for its pairs."""
    K = K.clone()
    for label in points.label[todo].unique().tolist():
        problem, others = _pairs_with(request, label)
        for part in (todo & (points.label == label)).nonzero().flatten().split(_ANCHORED_BATCH):
            bound = anchored_curvature_bound(replace(problem, scope=Anchor(x[part]))).value
            K[part[:, None], others] = torch.minimum(K[part[:, None], others], bound)
    return K


def _pairs_with(request: Certifier, label: int) -> tuple[Problem, Tensor]:
    """Return the problem of the scalars f_i - f_label, and the classes i."""
    network = request.network
    others = torch.tensor([i for i in range(network.outputs) if i != label], device=network.device)
    eye = torch.eye(network.outputs, dtype=torch.float64, device=network.device)
    rows = network.read_out(eye[others] - eye[label])
    return Problem(rows, request.p, request.p, Global(), scalars=True, norms=request.pairs.norms), others


def _with_shells(
    request: Certifier, x: Tensor, points: Pointwise, constants: tuple[Tensor, Tensor], radii: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return local radii of every class, at least those before; NaN where a sample is decided or cannot gain."""
    if request.layers is None or request.method == "line":
        return {}
    L, K = constants
    known = _largest(radii)
    best = known.amin(dim=1)
    todo = _undecided(request, points, radii) & best.isfinite()
    if request.method == "auto" or request.epsilons:
        todo &= _could_gain(points, radii)
    found = radii.get("local", torch.full_like(known, torch.nan)).clone()
    # Nothing is left to gain where every class has an infinite radius.
    found = torch.where((points.correct & best.isinf())[:, None], known, found)
    index = todo.nonzero().flatten()
    if len(index):
        everywhere = _largest(_pair_radii(points, L, request.constants.K[points.label]))
        query = Query(x, points.label, points.margin, points.gradient_norm, K, L, known, everywhere, request.epsilons)
        found[index] = torch.fmax(found[index], shell_radii(request.layers, query.part(index)))
    return {"local": found}


def _with_line(
    request: Certifier, x: Tensor, points: Pointwise, radii: dict[str, Tensor], layers: Layers | None
) -> dict[str, Tensor]:
    """Return radii of every class by the line; NaN where a sample is decided, in "auto" also where another is as far.

    Without layers, by global curvatures alone: that is cheap, and comes before anything that is not.
    """
    if request.line is None or points.gradient is None or request.method not in ("auto", "line"):
        return {}
    known = _largest(radii)
    best = known.amin(dim=1)
    # Nothing is left to gain where every class has an infinite radius.
    found = torch.where((points.correct & best.isinf())[:, None], known, torch.nan)
    todo = points.correct & best.isfinite()
    if request.epsilons:
        todo &= best < max(request.epsilons)
    index = todo.nonzero().flatten()
    if len(index):
        limit = points.margin / points.gradient_norm.clamp(min=1e-300)
        K = request.constants.K[points.label]
        query = LineQuery(x, points.label, points.gradient, limit, K, known).part(index)
        found[index] = line_radii(request.line, query, request.epsilons, layers)
    if request.method == "auto":
        # What it does not raise it is not named for.
        found = torch.where(found > known, found, torch.nan)
    return {"line": torch.fmax(found, radii["line"]) if "line" in radii else found}


def _inside(box: Box | None, x: Tensor) -> Tensor:
    """Tell which samples lie in the box; warn where they look like raw bytes."""
    if box is None:
        return torch.ones(len(x), dtype=torch.bool, device=x.device)
    inside = ((x >= box[0]) & (x <= box[1])).flatten(1).all(dim=1)
    if not bool(inside.all()):
        lowest, highest = float(x.min()), float(x.max())
        if box == (0, 1) and lowest >= 0 and 2 <= highest <= 255:
            warnings.warn(
                f"Inputs go up to {highest:g} where the box is [0, 1]: these look like bytes. Divide them by 255. "
                "Their radii hold for the inputs as they are; no witness is claimed for them.",
                UserWarning,
                stacklevel=4,
            )
        else:
            raise InvalidInput(
                f"Inputs lie in [{lowest:g}, {highest:g}], outside the box {box}. Widen it or scale them."
            )
    return inside


def _assembled(
    request: Certifier,
    points: Pointwise,
    radii: dict[str, Tensor],
    labels: dict[str, str],
    attack: tuple[Tensor, Tensor],
    K: Tensor,
    notes: tuple[str, ...],
) -> Certificate:
    names = list(radii)
    stacked = torch.stack([value.nan_to_num(nan=0.0, posinf=torch.inf) for value in radii.values()])
    pair_radius = stacked.amax(dim=0)
    radius, weakest = pair_radius.min(dim=1)
    radius = torch.where(points.correct, radius, 0.0)
    winner = stacked.argmax(dim=0).gather(1, weakest[:, None]).squeeze(1)
    shortest = radii["lipschitz"].amin(dim=1) if "lipschitz" in radii else torch.full_like(radius, torch.nan)
    wins = curvature_beats_lipschitz(points.margin, points.gradient_norm, K, shortest[:, None])
    return Certificate(
        label=points.label,
        correct=points.correct,
        radius=radius,
        lipschitz_radius=_least(radii.get("lipschitz"), points, radius),
        curvature_radius=_least(radii.get("curvature"), points, radius),
        local_radius=_least(radii.get("local"), points, radius),
        pair_radius=torch.where(points.correct[:, None], pair_radius, 0.0),
        method=tuple(
            labels[names[k]] if ok else "misclassified"
            for k, ok in zip(winner.tolist(), points.correct.tolist(), strict=True)
        ),
        attack_radius=attack[0],
        witness=attack[1],
        search_radius=torch.where(points.correct, torch.inf, 0.0).to(torch.float64),
        margin=points.margin.amin(dim=1),
        curvature_wins=wins.scatter(1, points.label[:, None], True).all(dim=1) & points.correct,
        p=request.p,
        assumes=request.network.assumes,
        notes=notes,
    )


def _least(value: Tensor | None, points: Pointwise, like: Tensor) -> Tensor:
    if value is None:
        return torch.full_like(like, torch.nan)
    return torch.where(points.correct, value.amin(dim=1), 0.0)
