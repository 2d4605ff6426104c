"""Two certificates side by side: what each proves at the same perturbations, and sample by sample where they agree."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from curvcert._version import __version__
from curvcert.certificates import Certificate
from curvcert.errors import InvalidInput
from curvcert.reporting.charts import AccuracyChart, accuracy_chart
from curvcert.reporting.collecting import common_grid, curves, shown_epsilons
from curvcert.reporting.decimals import percent_ceil, percent_floor, significant_floor
from curvcert.reporting.page import template_of


@final
@dataclass(frozen=True, eq=False)
class Comparison:
    """Two certificates in the same norm, the names that they go by, and the perturbations to look at."""

    names: tuple[str, str]
    both: tuple[Certificate, Certificate]
    epsilons: tuple[float, ...]

    @property
    def same_samples(self) -> bool:
        """Whether both are about the same inputs, in the same order."""
        first, second = (certificate.evidence for certificate in self.both)
        return first is not None and second is not None and torch.equal(first.inputs, second.inputs)

    def rows(self) -> list[tuple[str, tuple[str, str]]]:
        """Return what stands side by side: a title, and a value for each."""
        found: list[tuple[str, list[str]]] = [
            ("samples", [f"{len(one):,}" for one in self.both]),
            ("correct", [percent_floor(int(one.correct.sum()), len(one)) for one in self.both]),
            ("median certified radius", [significant_floor(float(one.radius.median())) for one in self.both]),
        ]
        for eps in self.epsilons:
            low = [int((one.correct & (one.radius >= eps)).sum()) for one in self.both]
            high = [int((one.correct & (one.falsified_radius > eps)).sum()) for one in self.both]
            pairs = list(zip(low, high, self.both, strict=True))
            found.append((f"proven at {eps:.4g}, at least", [percent_floor(a, len(one)) for a, _, one in pairs]))
            found.append((f"known at {eps:.4g}, at most", [percent_ceil(b, len(one)) for _, b, one in pairs]))
        return [(title, (values[0], values[1])) for title, values in found]

    def conclusions(self) -> list[str]:
        """Say which proves more, and where both are about the same samples, how often."""
        first, second = self.names
        told = []
        for eps in self.epsilons:
            proven = [one.certified_accuracy(eps) for one in self.both]
            more = (
                f"{self.names[proven[1] > proven[0]]} proves more" if proven[0] != proven[1] else "both prove as much"
            )
            counts = zip(proven, map(len, self.both), strict=True)
            shares = [percent_floor(round(share * count), count) for share, count in counts]
            told.append(f"Within {eps:.6g} {more}: {' and '.join(shares)}.")
        if not self.same_samples:
            return [*told, "They are about different samples, so nothing is said sample by sample."]
        one, other = (certificate.radius for certificate in self.both)
        larger = int((one > other).sum()), int((one < other).sum()), int((one == other).sum())
        return [
            *told,
            f"Of the same {len(one):,} samples {first} has the larger radius on {larger[0]:,}, {second} on "
            f"{larger[1]:,}; they are equal on {larger[2]:,}.",
        ]

    def page(self) -> str:
        """Return the comparison as one HTML page."""
        charts = self._charts()
        context: dict[str, Any] = {
            "names": self.names,
            "norm": f"l{self.both[0].p:g}",
            "conclusions": self.conclusions(),
            "rows": self.rows(),
            "charts": charts,
            "lines": {line.name: line for chart in charts for line in chart.lines}.values(),
            "version": __version__,
        }
        return template_of("compare.html").render(context)

    def _charts(self) -> list[AccuracyChart]:
        grid = common_grid(self.both, self.epsilons)
        return [accuracy_chart(curves(one, grid, "certified radii"), len(one)) for one in self.both]


def compare(
    first: Certificate,
    second: Certificate,
    names: tuple[str, str] = ("A", "B"),
    epsilons: Sequence[float] | None = None,
) -> Comparison:
    """Put two certificates side by side, at given perturbations or at four round ones.

    Raises:
        InvalidInput: if they are about different norms, or only one is about the inside of a box.

    >>> from torch import nn
    >>> from curvcert.certificates import certify
    >>> model, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh()).eval(), torch.zeros(4, 2)
    >>> both = [certify(model, x, method=method) for method in ("product", "product")]
    >>> print(compare(*both, epsilons=[0.0]).conclusions()[0])
    Within 0 both prove as much: 100.0% and 100.0%.
    """
    if (first.p, first.inside_box) != (second.p, second.inside_box):
        raise InvalidInput(
            f"Radii compare in one norm, and both inside their boxes or neither: got l{first.p:g} and l{second.p:g}"
            f"{'' if first.inside_box == second.inside_box else ', and one is about the inside of its box'}."
        )
    one, other = first.cpu(), second.cpu()
    larger = max((one, other), key=lambda certificate: float(certificate.radius.nan_to_num(posinf=0.0).max()))
    return Comparison(names, (one, other), shown_epsilons(larger, epsilons))
