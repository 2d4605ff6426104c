"""What a report shows, as plain numbers and strings: no tensors, so that it can be kept as JSON."""

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Side = Literal["at least", "at most"]


@dataclass(frozen=True)
class Curve:
    """How many samples stand at each perturbation: a proven lower bound, or an upper bound shown by points."""

    name: str
    title: str
    side: Side
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Curves:
    """Curves on one grid of perturbations; `name` tells which range the grid covers."""

    name: str
    epsilons: tuple[float, ...]
    curves: tuple[Curve, ...]

    def curve(self, name: str) -> Curve | None:
        """Return the curve of that name, if there is one."""
        return next((curve for curve in self.curves if curve.name == name), None)

    @property
    def certified(self) -> Curve:
        """The best lower bound."""
        return next(curve for curve in self.curves if curve.name == "radius")

    @property
    def falsified(self) -> Curve:
        """The best upper bound: with a search where there was one."""
        return self.curve("search") or next(curve for curve in self.curves if curve.name == "attack")


@dataclass(frozen=True)
class Histogram:
    """How many samples fall between consecutive edges, and how many lie at no finite place."""

    name: str
    title: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    infinite: int


@dataclass(frozen=True)
class Samples:
    """One entry per sample in every column; `predicted` and `runner_up` are None where they are not known."""

    label: tuple[int, ...]
    predicted: tuple[int | None, ...]
    runner_up: tuple[int | None, ...]
    correct: tuple[bool, ...]
    radius: tuple[float, ...]
    lipschitz_radius: tuple[float, ...]
    curvature_radius: tuple[float, ...]
    local_radius: tuple[float, ...]
    attack_radius: tuple[float, ...]
    search_radius: tuple[float, ...]
    margin: tuple[float, ...]
    method: tuple[str, ...]
    radii: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True)
class ClassRow:
    """What is known about the samples of one class; counts at `ReportData.epsilons`."""

    label: int
    samples: int
    correct: int
    certified: tuple[int, ...]
    standing: tuple[int, ...]
    median_radius: float
    median_falsified: float


@dataclass(frozen=True)
class LayerShare:
    """One line of a breakdown: a layer's quantity, and its share of the whole where the lines add up to it."""

    layer: str
    quantity: str
    value: float
    method: str
    share: float | None


@dataclass(frozen=True)
class Breakdown:
    """One bound on L or K of a pair of classes, layer by layer."""

    constant: Literal["L", "K"]
    method: str
    value: float
    layers: tuple[LayerShare, ...]


@dataclass(frozen=True)
class Looseness:
    """Bounds on a pair's constants by every method that applies, beside the largest that a search found.

    `missing` tells, for each thing that is not there, why.
    """

    pair: tuple[int, int]
    decides: int
    breakdowns: tuple[Breakdown, ...]
    slope_found: float | None
    hessian_found: float | None
    points: int
    steps: int
    missing: tuple[str, ...] = ()

    def of(self, constant: Literal["L", "K"]) -> tuple[Breakdown, ...]:
        """Return the bounds on L or on K, the smallest first."""
        return tuple(sorted((b for b in self.breakdowns if b.constant == constant), key=lambda b: b.value))


@dataclass(frozen=True)
class Exhibit:
    """A sample of the gallery: its picture, the misclassified point, and the step between, as PNG data URIs."""

    index: int
    label: int
    predicted: int | None
    radius: float
    runner_up: int | None
    picture: str
    broken_picture: str | None = None
    step_picture: str | None = None
    amplification: float | None = None
    distance: float | None = None
    broken_class: int | None = None
    source: str | None = None


@dataclass(frozen=True)
class Gallery:
    """The weakest and the strongest samples, and the first ones as they come; `missing` tells why there is none."""

    weakest: tuple[Exhibit, ...] = ()
    strongest: tuple[Exhibit, ...] = ()
    first: tuple[Exhibit, ...] = ()
    form: str = ""
    missing: str = ""


@dataclass(frozen=True)
class Provenance:
    """What it takes to make the numbers again, and to tell whether they are the same."""

    command: str | None
    created: str
    versions: dict[str, str]
    hardware: dict[str, Any]
    seeds: dict[str, int]
    digests: dict[str, str]
    network: str | None


@dataclass(frozen=True)
class Required:
    """What was to be proven, and whether it is: a sentence, and its sense."""

    verdict: str
    met: bool


@dataclass(frozen=True)
class ReportData:
    """Everything that a report shows.  Counts are whole numbers of samples; radii are exact float64 values."""

    title: str
    p: float
    labelled: bool
    classes: tuple[str, ...]
    epsilons: tuple[float, ...]
    at_epsilons: Curves
    ranges: tuple[Curves, ...]
    histograms: tuple[Histogram, ...]
    samples: Samples
    per_class: tuple[ClassRow, ...]
    looseness: Looseness | None
    gallery: Gallery
    provenance: Provenance
    assumes: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    box: str | None = None
    inside_box: bool = False
    required: tuple[Required, ...] = ()
    check: str | None = None
    entries: int | None = None
    """How many values one input has, where all lie between 0 and 1 as those of images do."""

    @property
    def norm(self) -> str:
        """The name of the norm, such as l2 or l-infinity."""
        return "l∞" if math.isinf(self.p) else f"l{self.p:g}"

    @property
    def correct(self) -> int:
        """How many samples are classified as their label."""
        return sum(self.samples.correct)

    def to_json(self) -> str:
        """Return the data as JSON text: infinity as the string "inf", NaN as null."""
        return json.dumps(_plain(asdict(self)), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
