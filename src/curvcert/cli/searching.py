"""PGD beside a certificate: from just outside each certified ball outward, until a misclassified point is found."""

from collections.abc import Sequence

import torch
from torch import Tensor

from curvcert.attacks import Attack, pgd
from curvcert.certificates import Certificate
from curvcert.network import Network

MULTIPLES = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)
"""Of each sample's certified radius: where to search, unless radii are given."""

STEPS, RESTARTS = 20, 2


def nearest_found(
    certificate: Certificate,
    network: Network,
    x: Tensor,
    epsilons: Sequence[float] = (),
    box: tuple[float, float] | None = None,
    seed: int = 0,
) -> Attack:
    """Search balls of growing radius about each correct sample; the first point found is kept.

    The radii are the given ones that lie beyond the certified one, or `MULTIPLES` of that.  What is found is a
    claim only after `with_search` has evaluated it.

    >>> from torch import nn
    >>> from curvcert.certificates import certify
    >>> from curvcert.network import trace
    >>> model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Tanh()).eval()
    >>> _ = model[0].weight.data.copy_(torch.tensor([[1.0], [-1.0]]))
    >>> net, x = trace(model, torch.zeros(1, 1)), torch.tensor([[0.5]], dtype=torch.float64)
    >>> found = nearest_found(certify(net, x), net, x)
    >>> bool(found.broken[0]), bool(-0.2 < found.points[0, 0] < 0)
    (True, True)
    """
    found = Attack(torch.zeros(len(x), dtype=torch.bool, device=x.device), torch.full_like(x, torch.nan))
    levels = [torch.full_like(certificate.radius, eps) for eps in sorted(epsilons)]
    for radius in levels or [factor * certificate.radius for factor in MULTIPLES]:
        todo = certificate.correct & ~found.broken & radius.isfinite() & (radius > certificate.radius)
        index = todo.nonzero().flatten()
        if len(index):
            here, labels = x[index], certificate.label[index]
            tried = pgd(network, here, labels, radius[index], certificate.p, STEPS, RESTARTS, box, seed)
            found.broken[index] = tried.broken
            found.points[index] = tried.points
    return found
