"""From a certificate to what a report shows: counts, quantiles, tables, pictures and provenance."""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from statistics import median_high, median_low

import torch
from torch import Tensor

from curvcert._version import __version__
from curvcert.attacks import Attack
from curvcert.certificates import Certificate
from curvcert.errors import InvalidInput
from curvcert.network import Network
from curvcert.reporting.data import (
    ClassRow,
    Curve,
    Curves,
    Histogram,
    Provenance,
    ReportData,
    Required,
    Samples,
)
from curvcert.reporting.decimals import nice_ceiling
from curvcert.reporting.digests import digests_of
from curvcert.reporting.gallery import make_gallery
from curvcert.reporting.looseness import looseness_on_record, measure_looseness
from curvcert.results import hardware, versions

GRID = 200
"""Steps of the grid that curves are evaluated on."""

BINS = 25
BATCH = 1024

_METHOD_TITLES = {
    "radius": "certified, best method",
    "lipschitz_radius": "certified, Lipschitz alone",
    "curvature_radius": "certified, curvature alone",
    "local_radius": "certified, shells where run",
}


def report_data(
    certificate: Certificate,
    network: Network | None = None,
    x: Tensor | None = None,
    y: Tensor | None = None,
    class_names: Sequence[str] | None = None,
    title: str | None = None,
    command: str | None = None,
    epsilons: Sequence[float] | None = None,
    searches: Sequence[Attack] = (),
    seeds: Mapping[str, int] | None = None,
    required: Sequence[Required] = (),
    check: str | None = None,
) -> ReportData:
    """Compute everything that a report of a certificate shows; the arguments are those of `report`.

    `required` is what was to be proven, and `check` the command that proves the certificate's file again.

    >>> from torch import nn
    >>> from curvcert.certificates import certify
    >>> from curvcert.network import trace
    >>> net = trace(nn.Sequential(nn.Linear(2, 3), nn.Tanh()).eval(), torch.zeros(1, 2))
    >>> data = report_data(certify(net, torch.zeros(4, 2)), epsilons=[0.0])
    >>> len(data.samples), data.correct, data.at_epsilons.certified.counts
    (4, 4, (4,))
    """
    certificate = certificate.cpu()
    network = None if network is None else network.decided(certificate.threshold)
    x = _inputs(certificate, network, x)
    _require_same_labels(certificate, y)
    classes = _class_names(certificate, class_names)
    asked = shown_epsilons(certificate, epsilons)
    provenance = _provenance(certificate, network, x, y, command, seeds)
    predicted = _predictions(certificate, network, x)
    return ReportData(
        title=title or "Certificate report",
        p=certificate.p,
        labelled=y is not None,
        classes=classes,
        epsilons=asked,
        at_epsilons=curves(certificate, asked, "asked"),
        ranges=_ranges(certificate, asked),
        histograms=_histograms(certificate),
        samples=_samples(certificate, predicted),
        per_class=_per_class(certificate, asked),
        looseness=looseness_on_record(certificate) if network is None else measure_looseness(network, certificate, x),
        gallery=make_gallery(certificate, x, network, predicted, searches),
        provenance=provenance,
        assumes=certificate.assumes,
        notes=certificate.notes,
        box=None if certificate.box is None else str(certificate.box),
        inside_box=certificate.inside_box,
        required=tuple(required),
        check=check,
        entries=_entries(x),
    )


def curves(certificate: Certificate, epsilons: Sequence[float], name: str) -> Curves:
    """Count, for every perturbation, the samples that each method certifies and those that no point has broken."""
    found = [
        Curve(key, title, "at least", _at_least(getattr(certificate, key)[certificate.correct], epsilons))
        for key, title in _METHOD_TITLES.items()
        if key == "radius" or _was_run(getattr(certificate, key), certificate.correct)
    ]
    attack, nearest = (
        radii[certificate.correct] for radii in (certificate.attack_radius, certificate.falsified_radius)
    )
    found.append(Curve("attack", "not broken by a witness", "at most", _beyond(attack, epsilons)))
    if _searched(certificate):
        found.append(Curve("search", "not broken by a witness or a search", "at most", _beyond(nearest, epsilons)))
    return Curves(name, tuple(epsilons), tuple(found))


def _inputs(certificate: Certificate, network: Network | None, x: Tensor | None) -> Tensor | None:
    if len(certificate) == 0:
        raise InvalidInput("There is nothing to report: the certificate has no samples.")
    if x is None:
        return None
    certified = (len(certificate), *certificate.in_shape)
    if x.shape != certified:
        raise InvalidInput(f"x must be the inputs that were certified, of shape {certified}, got {tuple(x.shape)}.")
    if network is not None:
        network.require_batch(x)
    return x.detach().cpu().to(torch.float64)


def _entries(x: Tensor | None) -> int | None:
    """Return how many values an input has, if all of them look like those of pixels."""
    if x is None or float(x.min()) < 0 or not 0 < float(x.max()) <= 1:
        return None
    return x[0].numel()


def _require_same_labels(certificate: Certificate, y: Tensor | None) -> None:
    if y is None:
        return
    if y.shape != certificate.label.shape:
        raise InvalidInput(f"y is one label per sample ({len(certificate)}), got shape {tuple(y.shape)}.")
    differing = int((y.cpu() != certificate.label).sum())
    if differing:
        raise InvalidInput(
            f"y differs from the classes that were certified at {differing} of {len(certificate)} samples. "
            "Certify with these labels, or leave out y to report the certified classes."
        )


def _class_names(certificate: Certificate, names: Sequence[str] | None) -> tuple[str, ...]:
    count = certificate.pair_radius.shape[1]
    if names is None:
        return tuple(str(k) for k in range(count))
    if len(names) != count:
        raise InvalidInput(f"class_names has {len(names)} names, the certificate {count} classes. Give one per class.")
    return tuple(str(name) for name in names)


def shown_epsilons(certificate: Certificate, epsilons: Sequence[float] | None) -> tuple[float, ...]:
    """Return the perturbations of the tables: those that were asked for, or four round ones."""
    if epsilons is None:
        top = _largest(certificate.radius)
        return tuple(float(f"{top * k / 5:.3g}") for k in range(1, 5))
    wanted = tuple(sorted({float(eps) for eps in epsilons}))
    if not wanted or any(not 0 <= eps < math.inf for eps in wanted):
        raise InvalidInput(f"epsilons are finite radii of at least 0, at least one, got {list(epsilons)}.")
    return wanted


def _largest(radii: Tensor) -> float:
    finite = radii[radii.isfinite()]
    return nice_ceiling(float(finite.max()) if len(finite) else 0.0)


def _ranges(certificate: Certificate, asked: Sequence[float]) -> tuple[Curves, ...]:
    """Return curves over the certified radii and, where that goes much further, over all that is known."""
    near = nice_ceiling(max(_largest(certificate.radius), *asked))
    far = max(near, _largest(certificate.falsified_radius))
    found = [curves(certificate, _grid(near), "certified radii")]
    if far > 1.5 * near:
        found.append(curves(certificate, _grid(far), "everything known"))
    return tuple(found)


def common_grid(certificates: Sequence[Certificate], asked: Sequence[float]) -> tuple[float, ...]:
    """Return perturbations for the curves of several certificates, as far as the largest certified radius."""
    return _grid(nice_ceiling(max(*(_largest(one.radius) for one in certificates), *asked)))


def _grid(top: float) -> tuple[float, ...]:
    return tuple(float(f"{top * k / GRID:.6g}") for k in range(GRID + 1))


def _at_least(radii: Tensor, epsilons: Sequence[float]) -> tuple[int, ...]:
    ordered = radii[~radii.isnan()].sort().values
    below = torch.searchsorted(ordered, torch.tensor(epsilons, dtype=torch.float64), right=False)
    return tuple(len(ordered) - k for k in below.tolist())


def _beyond(radii: Tensor, epsilons: Sequence[float]) -> tuple[int, ...]:
    ordered = radii.sort().values
    within = torch.searchsorted(ordered, torch.tensor(epsilons, dtype=torch.float64), right=True)
    return tuple(len(ordered) - k for k in within.tolist())


def _was_run(radii: Tensor, correct: Tensor) -> bool:
    return bool((~radii[correct].isnan()).any())


def _searched(certificate: Certificate) -> bool:
    return bool(certificate.search_radius[certificate.correct].isfinite().any())


def _histograms(certificate: Certificate) -> tuple[Histogram, ...]:
    """Return histograms of the correct samples' radii, on one scale unless they lie far apart."""
    correct = certificate.correct
    found = [("radius", "certified radii", certificate.radius[correct])]
    found.append(("attack", "attack radii, by witnesses", certificate.attack_radius[correct]))
    if _searched(certificate):
        found.append(("search", "attack radii, by a search", certificate.search_radius[correct]))
    tops = [_largest(radii) if bool(radii.isfinite().any()) else 0.0 for _, _, radii in found]
    common = max(tops) if min((top for top in tops if top > 0), default=0.0) * 4 >= max(tops) else 0.0
    return tuple(
        _histogram(name, title, radii, nice_ceiling(common or top))
        for (name, title, radii), top in zip(found, tops, strict=True)
    )


def _histogram(name: str, title: str, radii: Tensor, top: float) -> Histogram:
    finite = radii[radii.isfinite()]
    edges = tuple(float(f"{top * k / BINS:.6g}") for k in range(BINS + 1))
    inner = torch.tensor(edges[1:-1], dtype=torch.float64)
    counts = torch.bincount(torch.bucketize(finite, inner, right=True), minlength=BINS)
    return Histogram(name, title, edges, tuple(counts.tolist()), len(radii) - len(finite))


def _predictions(certificate: Certificate, network: Network | None, x: Tensor | None) -> tuple[int | None, ...]:
    """Return the classes that the network gives; without it only those of the correct samples are known."""
    if network is not None and x is not None:
        with torch.no_grad():
            parts = [network(part.to(network.device)).flatten(1).argmax(dim=1).cpu() for part in x.split(BATCH)]
        return tuple(torch.cat(parts).tolist())
    pairs = zip(certificate.label.tolist(), certificate.correct.tolist(), strict=True)
    return tuple(label if correct else None for label, correct in pairs)


def _samples(certificate: Certificate, predicted: tuple[int | None, ...]) -> Samples:
    rivals = certificate.pair_radius.argmin(dim=1).tolist()
    labels, correct = certificate.label.tolist(), certificate.correct.tolist()
    known = zip(labels, correct, rivals, strict=True)
    return Samples(
        label=tuple(labels),
        predicted=predicted,
        runner_up=tuple(rival if ok and rival != label else None for label, ok, rival in known),
        correct=tuple(correct),
        radius=tuple(certificate.radius.tolist()),
        lipschitz_radius=tuple(certificate.lipschitz_radius.tolist()),
        curvature_radius=tuple(certificate.curvature_radius.tolist()),
        local_radius=tuple(certificate.local_radius.tolist()),
        attack_radius=tuple(certificate.attack_radius.tolist()),
        search_radius=tuple(certificate.search_radius.tolist()),
        margin=tuple(certificate.margin.tolist()),
        method=certificate.method,
        radii={name: tuple(value.tolist()) for name, value in certificate.radii.items()},
    )


def _per_class(certificate: Certificate, epsilons: Sequence[float]) -> tuple[ClassRow, ...]:
    """Return one row per class that occurs; medians over its correct samples, NaN where there are none."""
    rows = []
    for label in certificate.label.unique().tolist():
        own = certificate.label == label
        right = own & certificate.correct
        radii, broken = certificate.radius[right], certificate.falsified_radius[right]
        rows.append(
            ClassRow(
                label=label,
                samples=int(own.sum()),
                correct=int(right.sum()),
                certified=_at_least(radii, epsilons),
                standing=_beyond(broken, epsilons),
                median_radius=median_low(radii.tolist()) if len(radii) else math.nan,
                median_falsified=median_high(broken.tolist()) if len(broken) else math.nan,
            )
        )
    return tuple(rows)


def _provenance(
    certificate: Certificate,
    network: Network | None,
    x: Tensor | None,
    y: Tensor | None,
    command: str | None,
    seeds: Mapping[str, int] | None,
) -> Provenance:
    return Provenance(
        command=command,
        created=datetime.now(UTC).date().isoformat(),
        versions={"curvcert": __version__} | versions(),
        hardware=hardware(),
        seeds=dict(seeds or {}),
        digests=digests_of(certificate, network, x, y),
        network=None if network is None else repr(network),
    )
