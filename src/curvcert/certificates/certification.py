"""`curvcert.certify`: certified radii, attack radii and witnesses for a batch or a data set."""

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, final

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress, TaskID
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from curvcert.bounds.lipschitz.problem import all_pairs
from curvcert.boxes import Box, BoxSides
from curvcert.budget import Budget, OutOfTime, budget_of
from curvcert.certificates.attack_radius import attack_witnesses, walked_witnesses
from curvcert.certificates.certificate import Certificate, concatenate
from curvcert.certificates.checkable import checkable
from curvcert.certificates.constants import Tables, global_constants, pair_deviations, pair_table
from curvcert.certificates.evidence import DigestPool, Evidence, describable_digest
from curvcert.certificates.methods import (
    CERTIFICATE_METHODS,
    AbstractCertificateMethod,
    AbstractStep,
    ByConstants,
    Question,
    Samples,
    Wanted,
)
from curvcert.certificates.pointwise import evaluate_points
from curvcert.certificates.radii import curvature_beats_lipschitz
from curvcert.errors import InvalidInput, UnsupportedActivation, UnsupportedModule, meant
from curvcert.memory import spare_elements
from curvcert.network import Network, trace
from curvcert.network.network import tensor_of
from curvcert.norms import validate_p
from curvcert.progress import at_work, is_watched, shown_by, sign_of_life

_LOG = logging.getLogger(__name__)

_BATCH_ELEMENTS = 2**24
"""Numbers that the gradients of one batch may take by default, on a processor."""

_COPIES = 12
"""How many tensors of the size of a batch's gradients in front of the widest layer are held at once, and some room."""

_SAMPLES_AT_ONCE = 256
"""Samples of a data set that are read together."""

Inputs = Tensor | np.ndarray | Dataset[Any] | Iterable[Any]
"""What inputs may be given as."""

_LARGEST_BATCH = 2048
"""Samples in one batch at most, so that a bar moves; a large batch pays on an accelerator alone."""


@final
@dataclass(frozen=True, eq=False)
class Certifier:
    """A network's constants, computed once, ready to certify any number of inputs; made by `certifier`."""

    question: Question
    plan: tuple[AbstractStep, ...]
    only: str | None
    """The one way to a radius that was asked for by its name, if nothing else is to be told."""
    box: Box | None
    inside_box: bool
    digest: str
    notes: tuple[str, ...]
    budget: Budget | None = None
    """The time for all of it, which began with the constants."""
    threshold: float | None = None

    @property
    def network(self) -> Network:
        """The network that it certifies."""
        return self.question.network

    def __call__(
        self,
        x: Tensor | Iterable[Any],
        y: Tensor | None = None,
        batch_size: int | None = None,
        progress: bool | None = None,
        later: int = 0,
    ) -> Certificate:
        """Certify inputs; the arguments are those of `certify`.

        What is left of a budget is shared equally among these samples and `later` ones, if these are a tensor.
        """
        console = Console(stderr=True)
        shown = progress if progress is not None else is_watched(console)
        parts, digests, done = [], [], 0
        bars = Progress(console=console, transient=True) if shown else nullcontext()
        with DigestPool() as pool, bars as bar:
            total = len(x) if isinstance(x, Tensor) else None
            share = _shares(self.budget, None if total is None else total + later)
            task = None if bar is None else bar.add_task("certifying", total=total)
            for inputs, labels in _batches(self.network, x, y, batch_size):
                pending = pool.start(inputs)
                own = None if self.box is None else self.box.part(slice(done, done + len(inputs)))
                shown_step = nullcontext() if bar is None or task is None else shown_by(partial(_shown_on, bar, task))
                done += len(inputs)
                with shown_step:
                    parts += _within_memory(self, inputs.to(self.network.device), labels, own, share(done))
                _LOG.info("certified %d samples", done)
                # A source may write its next batch to the same place.
                digests.append(pending())
                if bar is not None and task is not None:
                    bar.advance(task, len(inputs))
        if self.box is not None and self.box.per_sample and len(self.box.lower) != done:
            raise InvalidInput(
                f"The box has the sides of {len(self.box.lower)} samples, got {done}. Give one per sample."
            )
        certificate = self._with_what_was_left_out(concatenate(parts))
        assert certificate.evidence is not None
        return replace(certificate, evidence=replace(certificate.evidence, inputs=torch.cat(digests)))

    def _with_what_was_left_out(self, certificate: Certificate) -> Certificate:
        """Add notes if a budget cut the plan short for some of the samples."""
        if certificate.steps is None or self.budget is None:
            return certificate
        within, notes = f"the budget of {self.budget.seconds:g} s", list(certificate.notes)
        if bool((certificate.steps < len(self.plan)).any()):
            plan = ", ".join(step.way for step in self.plan)
            notes.append(f"cut short by {within}: `steps` counts how many of these were done for each sample: {plan}")
        if bool((certificate.correct & (certificate.radius == 0)).any()):
            notes.append(f"a radius of 0 is that of a sample of which nothing was proven within {within}")
        return replace(certificate, notes=tuple(notes))


def certify(
    network: Network | nn.Module,
    x: Inputs,
    y: Tensor | np.ndarray | None = None,
    p: float = 2,
    method: str = "auto",
    box: BoxSides | Box | None = None,
    inside_box: bool = False,
    epsilons: Sequence[float] | float | None = None,
    batch_size: int | None = None,
    device: torch.device | str | None = None,
    progress: bool | None = None,
    budget: float | Budget | None = None,
    threshold: float | None = None,
) -> Certificate:
    r"""Certify how far each input can move, in the p-norm, before the class changes: provably.

    Args:
        network: a classifier: a module in eval mode, or the network that `curvcert.trace` or `curvcert.load_onnx` made
            of it, which spares tracing it again.
        x: inputs, with the batch dimension, as a tensor or an array; or a Dataset of samples; or a DataLoader, or any
            iterable of (x, y) batches.
        y: labels; the predicted classes by default.
        p: the norm, 1 <= p <= inf.
        method: "auto" (the best of all, for each sample), "checkable" (the best of those that `curvcert check` can
            prove again), "lipschitz", "anchored-lipschitz" (with the sample fixed), "anchored", "shell" (or "local":
            bounds over balls, see `certificates.shell`), "line" (the network along the gradient and curvature across
            it, in l2, see `certificates.line`), "linear" (linear relaxation over balls, kinks included, see
            `certificates.methods.linear`), "quadratic" (Taylor models of order 2 over balls, see
            `certificates.methods.quadratic`), "norms" (carried over from other norms, see
            `certificates.methods.norms`), or one bound by its name: "product", "liplt", "lipsdp-recursion",
            "compositional", "unrolled", "crc".
        box: (lo, hi), the range of valid inputs: numbers, or tensors of the shape of an input or of x.  It limits
            witnesses, not radii.
        inside_box: prove the cut of the ball with the box alone: radii grow, and a radius that holds all of the box is
            infinite.
        epsilons: radii to decide: what cheap bounds decide is not given to expensive ones.
        batch_size: samples at a time; chosen to bound the memory by default, and halved when it runs out.
        device: where to compute; the network's own by default.
        progress: show what goes on; by default on a terminal, or in a notebook with ipywidgets.
        budget: seconds for all of it: half of them at most for constants beyond the cheapest, the rest shared by the
            samples.  It cuts a fixed plan short, which goes from cheap to dear; `notes` and `steps` say where.  What
            is left depends on the machine, and is proven.
        threshold: for a network of one output: label 1 is where the output is above it, label 0 where it is below; on
            it the radius is 0.

    >>> from torch import nn
    >>> from curvcert.network import trace
    >>> model = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 2)).eval()
    >>> for layer, weight in ((model[0], [[1.0], [-1.0]]), (model[2], [[1.0, 0.0], [0.0, 1.0]])):
    ...     _ = layer.weight.data.copy_(torch.tensor(weight)), layer.bias.data.zero_()
    >>> cert = certify(trace(model, torch.zeros(1, 1)), torch.tensor([[0.5]]))
    >>> bool(0.4 < cert.radius[0] <= 0.5)
    True
    """
    limit = budget_of(budget)
    x, y = source_of(x), None if y is None else torch.as_tensor(y)
    _require_labels_of_a_tensor(x, y)
    if isinstance(network, nn.Module):
        network, x = _traced(network, x)
    ready = certifier(network, p, method, box, inside_box, epsilons, device, progress, limit, threshold)
    return ready(x, y, batch_size, progress)


def source_of(x: Inputs) -> Tensor | Iterable[Any]:
    """Return inputs as `Certifier` takes them: an array as a tensor, the samples of a data set in batches."""
    if isinstance(x, Dataset) and not isinstance(x, IterableDataset):
        return DataLoader(x, batch_size=_SAMPLES_AT_ONCE)
    if isinstance(x, str) or not isinstance(x, Iterable):
        raise InvalidInput(f"x is a tensor, an array, a data set or an iterable of batches, got {type(x).__name__}.")
    found: Tensor | Iterable[Any] = tensor_of(x)
    return found


def _traced(model: nn.Module, x: Tensor | Iterable[Any]) -> tuple[Network, Tensor | Iterable[Any]]:
    """Trace a module by the first input; a source that is read only once loses nothing by it."""
    if isinstance(x, Tensor):
        first = x
    else:
        batches = iter(x)
        ahead = next(batches, None)
        if ahead is None:
            raise InvalidInput("There is nothing to certify: the data set is empty.")
        first, x = torch.as_tensor(ahead[0] if isinstance(ahead, tuple | list) else ahead), chain([ahead], batches)
    if first.dim() == 1:
        raise InvalidInput(f"Expected a batch of inputs, got shape {tuple(first.shape)}. For one sample pass x[None].")
    like = next((weight for weight in model.parameters() if weight.dtype.is_floating_point), first)
    try:
        return trace(model, first[:1].to(like)), x
    except (InvalidInput, UnsupportedModule) as error:
        if _runs(model, first[None].to(like)) and not _runs(model, first[:1].to(like)):
            raise InvalidInput(
                f"The model takes x of shape {tuple(first.shape)} as one sample, not as a batch: pass x[None]."
            ) from error
        raise


def _runs(model: nn.Module, x: Tensor) -> bool:
    try:
        with torch.no_grad():
            model(x)
    except Exception:  # whatever the user's forward pass raises
        return False
    return True


def certifier(
    network: Network,
    p: float = 2,
    method: str = "auto",
    box: BoxSides | Box | None = None,
    inside_box: bool = False,
    epsilons: Sequence[float] | float | None = None,
    device: torch.device | str | None = None,
    progress: bool | None = None,
    budget: float | Budget | None = None,
    threshold: float | None = None,
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
    network = network.decided(threshold)
    if network.outputs < 2:
        raise InvalidInput(
            "certify needs at least two classes, this network has one output. Say where it decides, "
            "certify(..., threshold=0.0), for the labels 0 (below) and 1 (above)."
        )
    if sum(size > 1 for size in network.out_shape) > 1:
        raise InvalidInput(
            f"certify expects one logit per class, got outputs of shape {network.out_shape}. End the model with a "
            "pooling or a layer that leaves the classes."
        )
    limit = budget_of(budget)
    chosen, is_wanted = _chosen(method)
    if inside_box and box is None:
        raise InvalidInput("inside_box needs the box: pass box=(lowest, highest) as well.")
    within = None if box is None else Box.of(box, network.in_shape)
    given = () if epsilons is None else (epsilons,) if isinstance(epsilons, int | float) else tuple(epsilons)
    wanted = tuple(map(float, given))
    if any(not 0 < eps < math.inf for eps in wanted):
        raise InvalidInput(f"epsilons are positive, finite radii, got {list(given)}.")
    p = validate_p(p)
    network = network if device is None else network.to(device)
    simpler = () if network.classified is network else (_SIMPLER,)
    network = network.classified
    started = time.monotonic()
    with sign_of_life("bounding the network: minutes where it has convolutions, on a CPU", progress):
        tables = _BEST if chosen is None else chosen.tables
        if method == "checkable":
            tables, is_wanted = checkable(network, p)
        question, plan, notes = _asked(network.for_bounds, p, wanted, chosen, is_wanted, tables, limit)
    constants = ", ".join(name for name in question.constants.names if name) or "no constants"
    _LOG.info("bounded the network in %.1f s: %s", time.monotonic() - started, constants)
    only = None if chosen is None or wanted else chosen.way
    decides = () if network.threshold is None else (_DECIDES.format(network.threshold),)
    notes = (*simpler, *decides, *question.constants.notes, *notes)
    for note in notes:
        _LOG.info("%s", note)
    digest, decides_at = describable_digest(network), network.threshold
    return Certifier(question, plan, only, within, inside_box, digest, notes, limit, decides_at)


def _asked(
    network: Network,
    p: float,
    epsilons: tuple[float, ...],
    chosen: AbstractCertificateMethod | None,
    is_wanted: Wanted,
    tables: Tables,
    budget: Budget | None = None,
) -> tuple[Question, tuple[AbstractStep, ...], tuple[str, ...]]:
    """Compute what one method, or the best of those that are wanted, needs of a network; and plan."""
    pairs = all_pairs(network, p)
    early = None if budget is None else budget.until(budget.elapsed + (budget.seconds - budget.elapsed) / 2)
    constants = global_constants(network, pairs, tables, early)
    pairs = replace(pairs)  # the same norms, without the matrices of this question
    deviations = pair_table(pair_deviations(pairs), network)

    def elsewhere(q: float, radii: tuple[float, ...], is_wanted: Wanted) -> tuple[Question, Sequence[AbstractStep]]:
        return _asked(network, q, radii, None, is_wanted, _BEST)[:2]

    question = Question(network, p, epsilons, constants, deviations, pairs, chosen is not None, elsewhere)
    return question, *_plan(question, chosen, is_wanted, budget)


_SIMPLER = (
    "The network ends in a softmax or a normalisation, which changes no class: certified, named and saved is the "
    "network without it (net.classified)."
)

_DECIDES = (
    "One output: label 1 is where it is above the threshold {!r}, label 0 where it is below; on it the radius is 0."
)

_BEST = Tables("auto", "auto", required=False)
"""The constants that all methods together need."""


def _chosen(method: str) -> tuple[AbstractCertificateMethod | None, Wanted]:
    """Return the method of a name, or None for the best of those that are wanted."""
    name = "shell" if method == "local" else method
    if name in _TOGETHER:
        return None, lambda method: True
    if name not in CERTIFICATE_METHODS:
        names = (*_TOGETHER, *CERTIFICATE_METHODS)
        raise InvalidInput(f"Unknown method {method!r}. Choose one of: {', '.join(names)}.{meant(method, names)}")
    return CERTIFICATE_METHODS[name], lambda method: True


_TOGETHER = ("auto", "checkable")
"""What stands for the best of several methods."""


def _plan(
    question: Question, chosen: AbstractCertificateMethod | None, is_wanted: Wanted, budget: Budget | None
) -> tuple[tuple[AbstractStep, ...], tuple[str, ...]]:
    """Return the steps of a method, or of all, the cheapest first, and why some do not apply."""
    steps: list[AbstractStep] = [ByConstants()]
    notes = []
    for method in CERTIFICATE_METHODS.values() if chosen is None else (chosen,):
        if chosen is None and not (method.in_auto and is_wanted(method)):
            continue
        try:
            with nullcontext() if budget is None else budget.limits():
                steps += method.steps(question)
        except OutOfTime:
            if budget is None:
                raise  # that of a budget around this one
            notes.append(f"{method.name} skipped: the budget of {budget.seconds:g} s was spent")
        except (UnsupportedActivation, UnsupportedModule) as error:
            if chosen is not None:
                raise
            notes.append(f"{method.name} skipped: {error}")
    return tuple(sorted(steps, key=lambda step: step.cost)), tuple(notes)


def _batches(
    network: Network, x: Tensor | Iterable[Any], y: Tensor | None, batch_size: int | None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    widest = max([math.prod(network.in_shape), *(math.prod(unit.block.out_shape) for unit in network.units)])
    held = _COPIES * network.outputs * widest
    fitting = max(1, min(_LARGEST_BATCH, spare_elements(network.device, _COPIES * _BATCH_ELEMENTS) // held))
    size = fitting if batch_size is None else batch_size
    if size < 1:
        raise InvalidInput(f"batch_size must be at least 1, got {batch_size}.")
    if isinstance(x, Tensor):
        source: Iterable[Any] = [(x, y)]
    else:
        _require_labels_of_a_tensor(x, y)
        source = x
    for item in source:
        inputs, labels = item if isinstance(item, tuple | list) else (item, None)
        inputs = network.require_batch(inputs)
        labels = _labels(network, labels, len(inputs))
        for start in range(0, len(inputs), size):
            part = slice(start, start + size)
            yield inputs[part], None if labels is None else labels[part].to(network.device)


def _require_labels_of_a_tensor(x: Tensor | Iterable[Any], y: Tensor | None) -> None:
    if y is not None and not isinstance(x, Tensor):
        raise InvalidInput(
            "With y, x is a tensor or an array: a list of samples becomes one by np.stack(x). The batches of a data "
            "set or an iterable bring their labels along, as (x, y)."
        )


def _labels(network: Network, y: Tensor | None, batch: int) -> Tensor | None:
    if y is None:
        return None
    y = torch.as_tensor(y)
    if y.shape != (batch,) or y.dtype.is_floating_point or y.dtype.is_complex or y.dtype == torch.bool:
        raise InvalidInput(f"y is one whole number per sample ({batch}), got shape {tuple(y.shape)} of {y.dtype}.")
    if bool(((y < 0) | (y >= network.outputs)).any()):
        raise InvalidInput(f"Labels lie in 0 .. {network.outputs - 1}, got {int(y.min())} .. {int(y.max())}.")
    return y.long()


def _shares(budget: Budget | None, total: int | None) -> Callable[[int], Budget | None]:
    """Return what tells when the work on the first samples has to end: each has the same share of what is left.

    Where their number is not known before, they have all of it together.
    """
    if budget is None or total is None:
        return lambda done: budget
    begun = budget.elapsed
    return lambda done: budget.until(begun + (budget.seconds - begun) * done / total)


def _shown_on(bar: Progress, task: TaskID, what: str) -> None:
    bar.update(task, description=f"certifying: {what}")


def _within_memory(
    request: Certifier, x: Tensor, y: Tensor | None, box: Box | None, budget: Budget | None
) -> list[Certificate]:
    """Certify a batch, in halves if the memory does not hold it."""
    try:
        return [_certify_batch(request, x, y, box, budget)]
    except (torch.cuda.OutOfMemoryError, MemoryError):
        if len(x) == 1:
            raise
    half, found = len(x) // 2, []
    for part in (slice(half), slice(half, None)):
        own = None if box is None else box.part(part)
        found += _within_memory(request, x[part], None if y is None else y[part], own, budget)
    return found


@torch.no_grad()
def _certify_batch(
    request: Certifier, x: Tensor, y: Tensor | None, box: Box | None, budget: Budget | None
) -> Certificate:
    inside, question = _inside(box, x, request.inside_box), request.question
    # Where a network has Lipschitz constants alone its gradients serve nobody, and would take most of the time.
    useful = bool(question.constants.names[1]) or any(step.needs_gradients for step in request.plan)
    # A forward pass alone, for m / L, is all that a spent budget leaves.
    useful &= budget is None or not budget.is_spent
    points = evaluate_points(question.outputs, x, y, question.deviations, useful)
    walked = None
    if useful and not question.alone and question.constants.names[1]:
        # Quick, and it spares the steps the samples that have a witness within all that is to be decided.
        anywhere = question.constants.above.T[points.label]
        walked = walked_witnesses(question.outputs, x, points, anywhere, question.deviations, box)
    samples = Samples(question, x, points, box if request.inside_box else None, walked and walked[0])
    done = _run(request.plan, samples, budget)
    K = torch.where(samples.below.isnan(), torch.inf, samples.below)
    if useful or budget is None:
        attack, witness = attack_witnesses(question.network, x, points, K, question.p, box)
    else:
        attack, witness = torch.where(points.correct, torch.inf, 0.0).to(torch.float64), torch.zeros_like(x)
    if walked is not None:
        closer = points.correct & (walked[0] < attack)
        attack, witness[closer] = torch.where(closer, walked[0], attack), walked[1][closer]
    attack = torch.where(inside | ~points.correct, attack, torch.inf)
    certificate = _assembled(request, samples, attack, witness)
    tables = question.constants
    # Digests of the inputs are computed meanwhile, from where the inputs came from.
    pending = torch.empty(len(x), 0, dtype=torch.uint8)
    evidence = Evidence(request.digest, pending, tables.L, tables.K, tables.names, tables.made_by, samples.K)
    steps = None if budget is None else torch.full_like(points.label, done)
    return replace(certificate, evidence=evidence, box=box, inside_box=request.inside_box, steps=steps)


def _run(plan: Sequence[AbstractStep], samples: Samples, budget: Budget | None) -> int:
    """Run the steps of a plan while time is left, the first to its end, and return how many were done."""
    for k, step in enumerate(plan):
        try:
            with at_work(step.way), nullcontext() if budget is None or k == 0 else budget.limits():
                step.run(samples)
        except OutOfTime:
            if budget is None:
                raise
            return k
    return len(plan)


def _inside(box: Box | None, x: Tensor, required: bool) -> Tensor:
    """Return which samples lie in the box; warn where they look like raw bytes."""
    if box is None:
        return torch.ones(len(x), dtype=torch.bool, device=x.device)
    inside = box.contains(x)
    if not bool(inside.all()):
        lowest, highest = float(x.min()), float(x.max())
        unit = bool((box.lower == 0).all() and (box.upper == 1).all())
        if unit and not required and lowest >= 0 and 2 <= highest <= 255:
            warnings.warn(
                f"Inputs go up to {highest:g} where the box is [0, 1]: these look like bytes. Divide them by 255. "
                "Their radii hold for the inputs as they are; no witness is claimed for them.",
                UserWarning,
                stacklevel=4,
            )
        else:
            raise InvalidInput(
                f"The box {box} does not contain x: {int((~inside).sum())} of {len(x)} inputs, all in [{lowest:g}, "
                f"{highest:g}], lie outside of it. Widen it or scale them."
            )
    return inside


def _assembled(request: Certifier, samples: Samples, attack: Tensor, witness: Tensor) -> Certificate:
    points, question = samples.points, request.question
    radii = samples.radii
    if request.only is not None:
        radii = {request.only: radii.get(request.only, samples.none)}
    # The paper's condition compares with the best radius by Lipschitz constants, global or from the sample on.
    zeroth = (radii.get(name, samples.none).amin(dim=1) for name in ("lipschitz", "anchored-lipschitz"))
    shortest = torch.fmax(*zeroth)
    wins = curvature_beats_lipschitz(points.margin, points.gradient_norm, samples.K, shortest[:, None])
    wins = wins.scatter(1, points.label[:, None], True).all(dim=1)
    compared = ~shortest.isnan() & ~samples.K.scatter(1, points.label[:, None], 0.0).isnan().any(dim=1)
    names = list(radii)
    stacked = torch.stack([value.nan_to_num(nan=0.0, posinf=torch.inf) for value in radii.values()])
    pair_radius = stacked.amax(dim=0)
    radius, weakest = pair_radius.min(dim=1)
    radius = torch.where(points.correct, radius, 0.0)
    winner = stacked.argmax(dim=0).gather(1, weakest[:, None]).squeeze(1)
    shown = (attack.isfinite() & points.correct).nonzero().flatten()
    method = tuple(
        samples.names.get(names[k], names[k]) if ok else "misclassified"
        for k, ok in zip(winner.tolist(), points.correct.tolist(), strict=True)
    )
    named = {"misclassified": ("misclassified",)} | {
        samples.names.get(name, name): samples.proven_by.get(name, (name,)) for name in names
    }
    return Certificate(
        label=points.label,
        correct=points.correct,
        radius=radius,
        radii={name: torch.where(points.correct, value.amin(dim=1), 0.0) for name, value in radii.items()},
        pair_radius=torch.where(points.correct[:, None], pair_radius, 0.0),
        method=method,
        proven_by={name: named[name] for name in dict.fromkeys(method)},
        attack_radius=attack,
        witness_index=shown,
        witness_points=witness[shown],
        search_radius=torch.where(points.correct, torch.inf, 0.0).to(torch.float64),
        margin=points.margin.amin(dim=1),
        curvature_wins=wins & compared & points.correct,
        comparison_known=compared & points.correct,
        p=question.p,
        assumes=question.network.assumes,
        notes=request.notes,
        threshold=request.threshold,
    )
