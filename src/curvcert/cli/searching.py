"""A search beside a certificate: outward from each certified ball, until a misclassified point is found."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from curvcert.attacks import Attack, autoattack, foolbox, pgd
from curvcert.attacks.outside import FOOLBOX
from curvcert.certificates import Certificate
from curvcert.errors import InvalidInput, meant
from curvcert.network import Network

MULTIPLES = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)
"""Of each sample's certified radius: where to search, unless radii are given."""

STEPS, RESTARTS = 20, 2

ATTACKS = ("pgd", *(f"foolbox-{name}" for name in FOOLBOX), "autoattack")
"""What `--attack` may be.  foolbox's look for the nearest point themselves, the others search balls."""

InBalls = Callable[[Tensor, Tensor, Tensor], Attack]
"""A search of balls: inputs, their labels, and one radius for each."""


def require_attack(attack: str, epsilons: Sequence[float] | None) -> None:
    """Raise unless there is such an attack, and it is told what it needs."""
    if attack not in ATTACKS:
        raise InvalidInput(f"--attack is one of {', '.join(ATTACKS)}, got {attack!r}.{meant(attack, ATTACKS)}")
    if attack == "autoattack" and not epsilons:
        raise InvalidInput("AutoAttack searches balls of given radii. Add them, as in --eps 36/255,72/255.")


def nearest_found(
    certificate: Certificate,
    network: Network,
    x: Tensor,
    epsilons: Sequence[float] = (),
    box: tuple[float, float] | None = None,
    seed: int = 0,
    attack: str = "pgd",
) -> Attack:
    """Search about each correct sample; the first point found is kept.

    Balls are searched at the given radii that lie beyond the certified one, or at `MULTIPLES` of that.  What is found
    is a claim only after `with_search` has evaluated it.

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
    p = certificate.p
    searches: dict[str, InBalls] = {
        "pgd": lambda here, y, eps: pgd(network, here, y, eps, p, STEPS, RESTARTS, box, seed),
        "autoattack": lambda here, y, eps: autoattack(network, here, y, float(eps[0]), p, box, seed),
        "foolbox": lambda here, y, eps: foolbox(network, here, y, name, p, box),
    }
    package, _, name = attack.partition("-")
    found = Attack(torch.zeros(len(x), dtype=torch.bool, device=x.device), torch.full_like(x, torch.nan))
    for radius in _levels(certificate, epsilons, package):
        index = (certificate.correct & ~found.broken & (radius > certificate.radius)).nonzero().flatten()
        if len(index):
            tried = searches[package](x[index], certificate.label[index], radius[index])
            found.broken[index], found.points[index] = tried.broken, tried.points
    return found


def _levels(certificate: Certificate, epsilons: Sequence[float], package: str) -> list[Tensor]:
    """Return the radii to search one after the other; all of space where the attack finds the nearest point itself."""
    given = [math.inf] if package == "foolbox" else sorted(epsilons)
    if given:
        return [torch.full_like(certificate.radius, eps) for eps in given]
    return [factor * certificate.radius for factor in MULTIPLES]
