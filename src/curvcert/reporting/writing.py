"""`curvcert.report`: a certificate as a page for a person, with its figures and its data beside it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from curvcert.attacks import Attack
from curvcert.certificates import Certificate
from curvcert.errors import InvalidInput
from curvcert.network import Network
from curvcert.network.network import tensor_of
from curvcert.reporting.collecting import report_data
from curvcert.reporting.data import ReportData
from curvcert.reporting.figures import draw_figures
from curvcert.reporting.page import render
from curvcert.whole_files import write_whole


def report(
    certificate: Certificate,
    path: str | Path,
    network: Network | None = None,
    x: Tensor | np.ndarray | None = None,
    y: Tensor | np.ndarray | None = None,
    class_names: Sequence[str] | None = None,
    title: str | None = None,
    command: str | None = None,
    epsilons: Sequence[float] | float | None = None,
    searches: Sequence[Attack] = (),
    seeds: Mapping[str, int] | None = None,
) -> Path:
    """Write a certificate as one HTML page that needs no network connection, and return its path.

    Beside out.html it writes out.json, the numbers in full, and the figures as out-accuracy, out-radii and
    out-layers, each .png and .svg.

    Args:
        certificate: from `curvcert.certify`, or `with_search` for an upper curve by PGD.
        path: where to write; the name ends in .html.
        network: the network; with it the report shows bounds layer by layer, and the classes of witnesses.
        x: the inputs that were certified; with them come the gallery and, with the network too, a search for
            large slopes and Hessians.
        y: the labels; checked against those that were certified.
        class_names: one name per class.
        title: the heading of the page.
        command: the command that made the certificate, to be shown.
        epsilons: perturbations to tabulate; four round ones by default.
        searches: what `curvcert.attacks` found, for the gallery; each point shown is evaluated anew.
        seeds: the seeds of whatever was random, by name.

    >>> import tempfile, torch
    >>> from torch import nn
    >>> from curvcert.certificates import certify
    >>> from curvcert.network import trace
    >>> net, x = trace(nn.Sequential(nn.Linear(2, 3), nn.Tanh()).eval(), torch.zeros(1, 2)), torch.zeros(4, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = report(certify(net, x), Path(folder) / "out.html", net, x)
    ...     print(page.name, sorted(file.suffix for file in page.parent.glob("out-accuracy.*")))
    out.html ['.png', '.svg']
    """
    if not isinstance(certificate, Certificate):
        raise InvalidInput(
            f"report expects a Certificate, got {type(certificate).__name__}. Make one with curvcert.certify."
        )
    if network is not None and not isinstance(network, Network):
        raise InvalidInput(
            f"report expects a Network, got {type(network).__name__}. Make one with curvcert.trace(model, x[:1])."
        )
    inputs: Tensor | None = tensor_of(x)
    labels: Tensor | None = tensor_of(y)
    asked = [epsilons] if isinstance(epsilons, int | float) else epsilons
    data = report_data(certificate, network, inputs, labels, class_names, title, command, asked, searches, seeds)
    return write_report(data, path)


def write_report(data: ReportData, path: str | Path) -> Path:
    """Write the page, the JSON and the figures of a report's data; return the path of the page.

    Raises:
        InvalidInput: if the path does not end in .html.
        CannotWrite: if its folder cannot be written to.
    """
    path = Path(path)
    if path.suffix.lower() not in (".html", ".htm"):
        raise InvalidInput(f"A report is an HTML page: expected a name that ends in .html, got {path.name!r}.")
    page = render(data)
    write_whole(path.with_suffix(".json"), data.to_json())
    draw_figures(data, path.with_suffix(""))
    return write_whole(path, page)
