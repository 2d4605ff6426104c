"""Certificates beside what a search found: merged into one interval per sample, and told apart."""

from dataclasses import replace

import torch
from torch import Tensor

from curvcert.attacks import Attack
from curvcert.certificates.attack_radius import replays
from curvcert.certificates.certificate import Certificate
from curvcert.certificates.evidence import matching_inputs, matching_network
from curvcert.errors import InvalidInput, SoundnessError
from curvcert.network import Network
from curvcert.rounding import norm_upper_bound_of_vectors


def with_search(certificate: Certificate, network: Network, x: Tensor, attack: Attack) -> Certificate:
    """Return the certificate with the nearest points that a search found in `search_radius`.

    Every point is evaluated anew, and one that is not strictly misclassified does not count, nor does one outside of
    the box where the radii are about its inside.  A point inside a
    certified ball would refute the certificate: that raises, and so does another network, or other inputs, than what
    was certified.

    >>> from curvcert.attacks import pgd
    >>> from curvcert.certificates import certify
    >>> from torch import nn
    >>> from curvcert.network import trace
    >>> model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Tanh()).eval()
    >>> _ = model[0].weight.data.copy_(torch.tensor([[1.0], [-1.0]]))
    >>> net, x = trace(model, torch.zeros(1, 1)), torch.tensor([[0.5]], dtype=torch.float64)
    >>> cert = certify(net, x)
    >>> merged = with_search(cert, net, x, pgd(net, x, cert.label, 0.6, restarts=1))
    >>> bool(merged.radius[0] <= 0.5 < merged.falsified_radius[0] < 0.601)
    True
    """
    network = network.decided(certificate.threshold)
    x = network.require_batch(x).to(network.device)
    if len(x) != len(certificate) or attack.points.shape != x.shape:
        raise InvalidInput(f"The search has {len(attack.points)} points, the certificate {len(certificate)} samples.")
    matching_network(certificate.evidence, network)
    matching_inputs(certificate.evidence, x)
    found = attack.broken.to(x.device) & certificate.correct
    points = torch.where(found.reshape(-1, *(1,) * (x.dim() - 1)), attack.points.to(x), x)
    if certificate.inside_box and certificate.box is not None:
        found = found & certificate.box.contains(points)
    found = found & replays(network, points, certificate.label)
    distance = norm_upper_bound_of_vectors((points - x).flatten(1), certificate.p, 1)
    if bool((found & (distance < certificate.radius)).any()):
        raise SoundnessError(
            "A search found a misclassified point inside a certified ball. Please report this network."
        )
    nearest = torch.minimum(certificate.search_radius, torch.where(found, distance, torch.inf))
    return replace(certificate, search_radius=nearest)
