"""The certified samples as a table for a spreadsheet."""

import csv
import io
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from curvcert.certificates import Certificate
from curvcert.certificates.methods import RADII
from curvcert.network import Network

COLUMNS = ("radius", *RADII, "attack_radius", "search_radius", "margin")


def predictions(network: Network, x: Tensor) -> list[int]:
    """Return the classes that the network gives."""
    with torch.no_grad():
        return [k for part in x.split(256) for k in network(part.to(network.device)).flatten(1).argmax(1).tolist()]


def table_of_samples(certificate: Certificate, predicted: Sequence[int], names: Sequence[str] | None = None) -> str:
    """Return a CSV with one row per sample: float64 in full, "inf" for infinity, empty where a method was not run.

    >>> from torch import nn
    >>> from curvcert.certificates import certifier
    >>> from curvcert.network import trace
    >>> net = trace(nn.Sequential(nn.Linear(2, 3), nn.Tanh()).eval(), torch.zeros(1, 2))
    >>> text = table_of_samples(certifier(net, method="liplt")(torch.zeros(1, 2), torch.tensor([1])), [1])
    >>> text.splitlines()[0].split(",")[:6]
    ['sample', 'label', 'predicted', 'correct', 'radius', 'lipschitz']
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["sample", "label", "predicted", "correct", *COLUMNS, "method"])
    missing = [math.nan] * len(certificate)
    radii = {name: value.tolist() for name, value in certificate.radii.items()}
    columns = [radii.get(name, missing) if name in RADII else getattr(certificate, name).tolist() for name in COLUMNS]
    rows = zip(certificate.label.tolist(), predicted, certificate.correct.tolist(), certificate.method, strict=True)
    for k, (label, given, correct, method) in enumerate(rows):
        shown = [str(c) if names is None else as_text(names[c]) for c in (label, given)]
        values = ["" if math.isnan(column[k]) else repr(column[k]) for column in columns]
        writer.writerow([k, *shown, str(correct).lower(), *values, as_text(method)])
    return text.getvalue()


def as_text(cell: str) -> str:
    """Return a cell that no spreadsheet takes for a formula: an apostrophe goes before it; numbers stay numbers.

    >>> as_text("=1+1"), as_text("cat"), as_text("-1.5")
    ("'=1+1", 'cat', '-1.5')
    """
    if not cell.lstrip().startswith(("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell
