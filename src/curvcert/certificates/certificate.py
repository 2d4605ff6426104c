"""What `certify` returns: radii, methods and witnesses, sample by sample, and what they add up to."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from curvcert import html
from curvcert.boxes import Box, joined_boxes
from curvcert.certificates.evidence import Evidence, joined_evidence
from curvcert.certificates.record import read_certificate_file, saved_fields, write_certificate_file
from curvcert.errors import InvalidInput

CERTIFIED, ATTACKED = "#0072B2", "#D55E00"
"""Okabe and Ito's colours, apart for every kind of colour vision."""


@final
@dataclass(frozen=True, eq=False, repr=False)
class Certificate:
    r"""Certified radii of a batch of inputs, in the inputs' own units and the p-norm.

    In the closed ball of `radius` the network, in real arithmetic, keeps `label` strictly largest: proven.  On the way
    to the boundary less than the margin is used up, since the one is rounded up and the other down.
    `attack_radius` is the distance of `witness`, a point that it misclassifies: shown by evaluation.

    Attributes:
        label: the class that is certified.
        correct: whether the network gives that class at the input itself.
        radius: the best certified radius, rounded down; 0 where not correct.
        radii: for the name of every way to a radius that was run, one for each sample, NaN where it was not run:
            "lipschitz", by Lipschitz constants, "anchored-lipschitz", by those with the sample fixed; "curvature" and
            "anchored", by the gradient and a curvature constant, global or with the sample fixed; "combined", by
            global Lipschitz constants and either curvature; "shell", by bounds over balls; "line"; "linear", by linear
            relaxation over balls; "quadratic", by Taylor models of order 2 over balls; "norms", carried over from
            another norm.
        pair_radius: for each class, the radius within which it stays below the label; inf for the label.
        method: the method behind `radius`, in words, for each sample.
        proven_by: for each of these, the names of the methods that it puts together.
        attack_radius: ||witness - x||_p, inf where there is none, 0 where not correct.
        witness_index: the samples, in order, that are correct and have a witness.
        witness_points: their misclassified points.
        search_radius: the distance of the nearest misclassified point that a search such as PGD found, see
            `with_search`; inf where none, 0 where not correct.
        margin: f_y - max f_i, rounded down.
        curvature_wins: whether the condition of `prop:compare` holds, by the larger radius of both Lipschitz constants.
        comparison_known: whether the sample is correct and both radii were computed; other samples do not count.
        p: the norm of the radii.
        assumes: what a user declared about the activations, and we only sampled.
        box: the range of valid inputs, where one was given; every witness lies in it.
        inside_box: whether radii are about the cut of the ball with the box alone.  One that holds all of the box is
            infinite: no valid input is misclassified, however far.
        notes: what was chosen and what was skipped, and why.
        steps: with a budget, how many steps of the plan were done for each sample; None where all were.
        threshold: for a network of one output, above which its label is 1; None for any other.
        evidence: what an independent checker needs beside the radii: digests and constants.
    """

    label: Tensor
    correct: Tensor
    radius: Tensor
    radii: Mapping[str, Tensor]
    pair_radius: Tensor
    method: tuple[str, ...]
    proven_by: Mapping[str, tuple[str, ...]]
    attack_radius: Tensor
    witness_index: Tensor
    witness_points: Tensor
    search_radius: Tensor
    margin: Tensor
    curvature_wins: Tensor
    comparison_known: Tensor
    p: float
    assumes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    steps: Tensor | None = None
    evidence: Evidence | None = None
    box: Box | None = None
    inside_box: bool = False
    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.inside_box and self.box is None:
            raise InvalidInput("A certificate about the inside of a box names the box: inside_box needs box.")

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, samples: int | slice | Sequence[int] | Tensor) -> "Certificate":
        """Return the certificate of one sample, or of some: by number, slice, numbers or a mask."""
        numbers = torch.arange(len(self), device=self.label.device)
        try:
            index = numbers[samples if isinstance(samples, int | slice) else torch.as_tensor(samples).cpu()].reshape(-1)
        except (IndexError, TypeError, ValueError) as error:
            raise IndexError(f"This certificate has {len(self)} samples, counted from 0; got {samples!r}.") from error
        return self._part(index)

    def __iter__(self) -> Iterator["Certificate"]:
        """Return the certificates of single samples, one after the other."""
        return (self[k] for k in range(len(self)))

    def _part(self, index: Tensor) -> "Certificate":
        alike = {
            f.name: getattr(self, f.name)[index]
            for f in fields(self)
            if isinstance(getattr(self, f.name), Tensor) and f.name not in ("witness_index", "witness_points")
        }
        # Where the witness of every sample stands among them; samples may be asked for twice, and in any order.
        witnesses = torch.arange(len(self.witness_index), device=self.label.device)
        place = torch.full_like(self.label, -1).index_copy(0, self.witness_index, witnesses)
        chosen = place[index]
        methods = tuple(self.method[k] for k in index.tolist())
        return replace(
            self,
            **alike,
            witness_index=(chosen >= 0).nonzero().flatten(),
            witness_points=self.witness_points[chosen[chosen >= 0]],
            radii={name: value[index] for name, value in self.radii.items()},
            method=methods,
            proven_by={name: found for name, found in self.proven_by.items() if name in methods},
            evidence=None if self.evidence is None else self.evidence.part(index),
            box=None if self.box is None else self.box.part(index),
        )

    @property
    def in_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.witness_points.shape[1:])

    @property
    def lipschitz_radius(self) -> Tensor:
        """The radius by Lipschitz constants alone; NaN where that was not run."""
        return self._radius("lipschitz")

    @property
    def curvature_radius(self) -> Tensor:
        """The radius by the gradient and a curvature constant alone, the better of both; NaN where none was run."""
        return torch.fmax(self._radius("curvature"), self._radius("anchored"))

    @property
    def local_radius(self) -> Tensor:
        """The radius by bounds over balls; NaN where that was not run."""
        return self._radius("shell")

    def _radius(self, name: str) -> Tensor:
        found = self.radii.get(name)
        return torch.full_like(self.radius, torch.nan) if found is None else found

    @property
    def witness(self) -> Tensor:
        """The misclassified point of every sample, NaN where there is none: as much memory as the samples take."""
        found = self.witness_points.new_full((len(self), *self.in_shape), torch.nan)
        return found.index_copy(0, self.witness_index, self.witness_points)

    def cpu(self) -> "Certificate":
        """Return the same certificate with all numbers in the memory of the host."""
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: value.cpu() for name, value in held.items() if isinstance(value, Tensor)}
        return replace(self, **moved, radii={name: value.cpu() for name, value in self.radii.items()})

    def certified_accuracy(self, eps: float) -> float:
        """Return the fraction of all samples that are correct and certified at eps: a lower bound on robustness."""
        return float(((self.radius >= _eps(eps)) & self.correct).double().mean())

    def attacked_accuracy(self, eps: float) -> float:
        """Return the fraction of all samples without a witness within eps: an upper bound on robustness."""
        return float(((self.attack_radius > _eps(eps)) & self.correct).double().mean())

    def gap(self, eps: float) -> float:
        """Return the fraction of all samples that are neither certified nor attacked at eps."""
        return self.attacked_accuracy(eps) - self.certified_accuracy(eps)

    def searched_accuracy(self, eps: float) -> float:
        """Return the fraction of all samples that neither a witness nor a search has broken within eps."""
        return float(((self.falsified_radius > _eps(eps)) & self.correct).double().mean())

    @property
    def falsified_radius(self) -> Tensor:
        """The distance of the nearest misclassified point known, from a witness or from a search."""
        return torch.minimum(self.attack_radius, self.search_radius)

    def interval(self) -> Tensor:
        """Return [certified, falsified] for every sample: the true radius lies between them."""
        return torch.stack([self.radius, self.falsified_radius], dim=1)

    def save(self, path: Path | str, witnesses: bool = True) -> "Certificate":
        """Write the certificate to a file that `curvcert check` verifies, and return what the file holds.

        Saved radii and margins are lowered, constants and attack radii raised, by a part in 2**30: room for the
        rounding of an independent checker.  Every saved number is still a bound.  `witnesses=False` leaves out
        the misclassified points, and with them the attack radii: inf, as if none were found.

        Raises:
            InvalidInput: if the network has parts that no file describes.
        """
        here = self.cpu()
        saved = saved_fields({f.name: getattr(here, f.name) for f in fields(here)}, witnesses)
        write_certificate_file(path, saved)
        return Certificate(**saved)

    def summary(self, epsilons: Sequence[float] | float = ()) -> str:
        """Say in words what is proven, and at each of some radii what share of the samples.

        >>> from torch import nn
        >>> from curvcert.certificates import certify
        >>> from curvcert.network import trace
        >>> net = trace(nn.Linear(1, 2).eval(), torch.zeros(1, 1))
        >>> print(certify(net, torch.zeros(4, 1)).summary([0.0]))  # doctest: +ELLIPSIS
        4 samples in l2, 100.0% correct; median certified radius ...
        within 0: 100.0% certified, 0.0% between the proof and the nearest misclassified point known
        """
        lines = [
            f"{len(self)} samples in l{self.p:g}, {100 * float(self.correct.double().mean()):.1f}% correct; median "
            f"certified radius {float(self.radius.median()):.4g}{self._where}"
        ]
        lines += [
            f"within {eps:g}: {100 * self.certified_accuracy(eps):.1f}% certified, "
            f"{100 * (self.searched_accuracy(eps) - self.certified_accuracy(eps)):.1f}% between the proof and the "
            "nearest misclassified point known"
            for eps in _several(epsilons)
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, list[Any]]:
        """Return a column for every number that there is one of per sample: `pandas.DataFrame(cert.to_dict())`."""
        return {
            "label": self.label.tolist(),
            "correct": self.correct.tolist(),
            "radius": self.radius.tolist(),
            "method": list(self.method),
            "attack_radius": self.attack_radius.tolist(),
            "search_radius": self.search_radius.tolist(),
            "margin": self.margin.tolist(),
        } | {f"radius by {name}": value.tolist() for name, value in self.radii.items()}

    def to_dataframe(self) -> Any:
        """Return the columns of `to_dict` as a pandas data frame.

        Raises:
            InvalidInput: if pandas is not installed.
        """
        try:
            return import_module("pandas").DataFrame(self.to_dict())
        except ModuleNotFoundError as error:
            raise InvalidInput(
                "to_dataframe needs pandas: pip install pandas. to_dict gives the same columns."
            ) from error

    def __repr__(self) -> str:
        share, median = float(self.correct.double().mean()), float(self.radius.median())
        witnesses = int((self.attack_radius.isfinite() & self.correct).sum())
        return (
            f"Certificate({len(self)} samples in l{self.p:g}: {100 * share:.1f}% correct, "
            f"median radius {median:.4g}, {witnesses} witnesses{self._where})"
        )

    @property
    def _where(self) -> str:
        """What the radii are about, if not the whole ball."""
        return f", inside the box {self.box}" if self.inside_box else ""

    def curve(self, epsilons: Sequence[float] | float | None = None) -> tuple[list[float], dict[str, list[float]]]:
        """Return radii, by default from 0 to where nothing is left to see, and the three accuracies there.

        >>> from torch import nn
        >>> from curvcert.certificates import certify
        >>> from curvcert.network import trace
        >>> radii, shares = certify(trace(nn.Linear(1, 2).eval(), torch.zeros(1, 1)), torch.zeros(4, 1)).curve()
        >>> len(radii), list(shares)
        (101, ['certified', 'attacked', 'searched'])
        """
        known = torch.cat([self.radius[self.correct], self.falsified_radius[self.correct]])
        most = float(known[known.isfinite()].amax()) if bool(known.isfinite().any()) else 0.0
        radii = [(most or 1.0) * k / 100 for k in range(101)] if epsilons is None else _several(epsilons)
        return radii, {
            "certified": [self.certified_accuracy(eps) for eps in radii],
            "attacked": [self.attacked_accuracy(eps) for eps in radii],
            "searched": [self.searched_accuracy(eps) for eps in radii],
        }

    def plot(self, axes: Any = None, epsilons: Sequence[float] | float | None = None) -> Any:
        """Draw certified accuracy against the radius, with what witnesses and a search leave; return the axes.

        Args:
            axes: matplotlib's, to draw into; new ones by default.
            epsilons: the radii at which to look; by default from 0 to where nothing is left to see.
        """
        if axes is None:
            axes = import_module("matplotlib.pyplot").subplots(figsize=(6.4, 3.6), layout="constrained")[1]
        radii, shares = self.curve(epsilons)
        percent = {name: [100 * share for share in found] for name, found in shares.items()}
        # Between two points a lower bound has the next one's height, an upper bound the last one's.
        low, high = {"where": "pre", "color": CERTIFIED}, {"where": "post", "color": ATTACKED}
        axes.fill_between(
            radii, percent["certified"], percent["searched"], color="#999999", alpha=0.25, label="not known"
        )
        axes.step(radii, percent["attacked"], **high, linestyle="--", label="at most, by witnesses")
        if bool(self.search_radius[self.correct].isfinite().any()):
            axes.step(radii, percent["searched"], **high, label="at most, by witnesses and a search")
        axes.step(radii, percent["certified"], **low, label="at least, certified")
        axes.set(xlabel=f"size of the perturbation (l{self.p:g})", ylabel="robust accuracy, %")
        axes.set(xlim=(0, max(radii)), ylim=(0, 100))
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
        return axes

    def _repr_html_(self) -> str:
        rows: list[tuple[str, object]] = [
            ("samples", len(self)),
            ("norm", f"l{self.p:g}"),
            ("correct", f"{100 * float(self.correct.double().mean()):.1f}%"),
            ("median certified radius", f"{float(self.radius.median()):.4g}"),
            ("witnesses", int((self.attack_radius.isfinite() & self.correct).sum())),
        ]
        rows += [("inside the box", self.box)] if self.inside_box else []
        rows += [("assumes", line) for line in self.assumes]
        radii, shares = self.curve()
        curves = {
            "at least, certified": (shares["certified"], CERTIFIED, "at least"),
            "at most, by an attack": (shares["searched"], ATTACKED, "at most"),
        }
        return html.table(rows) + html.staircases(radii, curves, f"accuracy against the radius (l{self.p:g})")


def load_certificate(path: Path | str) -> Certificate:
    """Return the certificate that a file holds, equal field by field to what `Certificate.save` returned.

    Loading checks that the file is whole and does not contradict itself; whether its claims are true is what
    `curvcert check` tells.

    Raises:
        InvalidFile: if the file is cut short, altered, of another kind or version, or contradicts itself.

    >>> import tempfile
    >>> from torch import nn
    >>> from curvcert.certificates import certify
    >>> from curvcert.network import trace
    >>> net = trace(nn.Sequential(nn.Linear(2, 3), nn.Tanh()).eval(), torch.zeros(1, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = certify(net, torch.ones(4, 2)).save(f"{folder}/certificate.safetensors")
    ...     loaded = load_certificate(f"{folder}/certificate.safetensors")
    >>> bool((loaded.radius == saved.radius).all()), loaded.method == saved.method
    (True, True)
    """
    return Certificate(**read_certificate_file(path))


def concatenate(parts: Sequence[Certificate]) -> Certificate:
    """Return the certificates of consecutive batches as one."""
    if not parts:
        raise InvalidInput("There is nothing to certify: the data set is empty.")
    if len({(part.p, part.inside_box) for part in parts}) > 1:
        raise InvalidInput("These certificates are about different norms, or only some about the inside of a box.")
    joined: dict[str, Any] = {
        f.name: torch.cat([getattr(part, f.name) for part in parts])
        for f in fields(Certificate)
        if isinstance(getattr(parts[0], f.name), Tensor)
    }
    starts = [0, *accumulate(len(part) for part in parts)]
    joined["witness_index"] = torch.cat(
        [part.witness_index + start for part, start in zip(parts, starts, strict=False)]
    )
    names = dict.fromkeys(name for part in parts for name in part.radii)
    radii = {name: torch.cat([part._radius(name) for part in parts]) for name in names}
    methods = tuple(name for part in parts for name in part.method)
    proven_by = {text: names for part in parts for text, names in part.proven_by.items()}
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    return replace(
        parts[0],
        **joined,
        radii=radii,
        method=methods,
        proven_by=proven_by,
        notes=notes,
        evidence=joined_evidence([part.evidence for part in parts]),
        box=joined_boxes([part.box for part in parts]),
    )


def _several(epsilons: Sequence[float] | float) -> list[float]:
    return [float(eps) for eps in ([epsilons] if isinstance(epsilons, int | float) else epsilons)]


def _eps(eps: float) -> float:
    if not eps >= 0:
        raise InvalidInput(f"eps must be at least 0, got {eps}.")
    return eps
