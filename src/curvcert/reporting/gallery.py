"""The weakest and the strongest samples, with the nearest misclassified points that are known."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from curvcert.attacks import Attack
from curvcert.certificates import Certificate
from curvcert.certificates.attack_radius import replays
from curvcert.errors import InvalidInput
from curvcert.network import Network
from curvcert.norms import vector_norm
from curvcert.reporting.data import Exhibit, Gallery
from curvcert.reporting.pictures import amplification_of, draw_input, draw_step, form_of
from curvcert.rounding import inflate

EACH = 8
FIRST = 200
"""How many samples have a picture to be shown when they are chosen."""


def make_gallery(
    certificate: Certificate,
    x: Tensor | None,
    network: Network | None,
    predicted: Sequence[int | None],
    searches: Sequence[Attack],
) -> Gallery:
    """Return up to eight correct samples of the smallest radii, as many others of the largest, and the first ones.

    A misclassified point is the certificate's witness, or one that a search found where that is nearer; the
    latter counts only where the network, evaluated here, misclassifies it.
    """
    if x is None:
        return Gallery(missing="The gallery needs the inputs. Pass x to report.")
    correct = certificate.correct.nonzero().flatten()
    if len(correct) == 0:
        return Gallery(missing="No sample is classified correctly, so none has a radius to rank by.")
    ranked = correct[certificate.radius[correct].argsort(stable=True)].tolist()
    weakest = ranked[:EACH]
    strongest = ranked[len(weakest) :][-EACH:][::-1]
    low, high = _span(x[ranked])
    first = range(min(FIRST, len(certificate)))
    points = _nearest_points(certificate, x, sorted({*weakest, *strongest, *first}), network, searches)

    def exhibit(index: int) -> Exhibit:
        rival = int(certificate.pair_radius[index].argmin())
        plain = Exhibit(
            index=index,
            label=int(certificate.label[index]),
            predicted=predicted[index],
            radius=float(certificate.radius[index]),
            runner_up=rival if rival != int(certificate.label[index]) else None,
            picture=draw_input(x[index], low, high),
        )
        return _with_point(plain, x[index], points.get(index), network, (low, high), certificate.p)

    shape = tuple(x.shape[1:])
    form = f"{form_of(shape)}s of shape {' x '.join(map(str, shape))}, {low:.3g} drawn black and {high:.3g} white"
    return Gallery(tuple(map(exhibit, weakest)), tuple(map(exhibit, strongest)), tuple(map(exhibit, first)), form)


def _nearest_points(
    certificate: Certificate, x: Tensor, shown: Sequence[int], network: Network | None, searches: Sequence[Attack]
) -> dict[int, tuple[Tensor, str]]:
    """Return the nearest misclassified point known of each sample shown, and where it comes from."""
    shown = [index for index in shown if bool(certificate.correct[index])]
    known = [index for index in shown if bool(certificate.attack_radius[index].isfinite())]
    places = {sample: place for place, sample in enumerate(certificate.witness_index.tolist())}
    # A misclassified input is its own witness, and none is stored.
    points = certificate.witness_points
    found = {index: (points[places[index]] if index in places else x[index], "witness") for index in known}
    if not searches:
        return found
    if network is None:
        raise InvalidInput("The points of a search are evaluated anew before they are shown. Pass network to report.")
    distance = certificate.attack_radius.tolist()
    for attack in searches:
        if attack.points.shape != x.shape:
            raise InvalidInput(f"A search has points of shape {tuple(attack.points.shape)}, x is {tuple(x.shape)}.")
        for index in (index for index in shown if bool(attack.broken[index])):
            point = attack.points[index].cpu().to(torch.float64)
            away = _distance(point, x[index], certificate.p)
            if away < distance[index] and _breaks(network, point, certificate.label[index]):
                distance[index], found[index] = away, (point, "search")
    return found


def _breaks(network: Network, point: Tensor, label: Tensor) -> bool:
    return bool(replays(network, point[None].to(network.device), label[None].to(network.device)))


def _with_point(
    plain: Exhibit,
    x: Tensor,
    known: tuple[Tensor, str] | None,
    network: Network | None,
    span: tuple[float, float],
    p: float,
) -> Exhibit:
    if known is None:
        return plain
    point, source = known
    step, (low, high) = point - x, span
    factor = amplification_of(step, high - low)
    return replace(
        plain,
        broken_picture=draw_input(point, low, high),
        step_picture=draw_step(step, factor, high - low),
        amplification=factor,
        distance=_distance(point, x, p),
        broken_class=None if network is None else _class(network, point),
        source=source,
    )


def _distance(point: Tensor, x: Tensor, p: float) -> float:
    return float(inflate(vector_norm((point - x).flatten()[None], p, dim=1), 1e-14))


def _class(network: Network, point: Tensor) -> int:
    return int(network(point[None].to(network.device)).flatten(1).argmax(dim=1))


def _span(x: Tensor) -> tuple[float, float]:
    """Return the values drawn black and white: 0 and 1 where the inputs lie between, else their extremes."""
    low, high = float(x.min()), float(x.max())
    if low >= 0 and 0 < high <= 1:
        return 0.0, 1.0
    return (low, high) if high > low else (low, low + 1.0)
