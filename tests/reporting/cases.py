"""Certificates to report: one made by certifying, and ones made up to sit at every edge."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvcert.attacks import Attack, pgd
from curvcert.certificates import Certificate, certify, with_search
from curvcert.network import Network, trace

HOSTILE = ("</script><script>window.hacked=1</script>", "<img src=x onerror='window.hacked=1'>", '{{ 7 * 7 }} & "q"')


@dataclass(frozen=True, eq=False)
class Case:
    """A certificate with what it was made from."""

    certificate: Certificate
    network: Network
    x: Tensor
    y: Tensor
    searches: tuple[Attack, ...]


def certified(samples: int = 40, seed: int = 0) -> Case:
    """Certify random images with a small random network, and search around them."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 3)).eval()
        x = torch.rand(samples, 1, 8, 8, dtype=torch.float64)
    network = trace(model, torch.zeros(1, 1, 8, 8))
    y = network(x).argmax(dim=1)
    y[::7] = (y[::7] + 1) % 3
    certificate = certify(network, x, y, box=(0, 1), progress=False)
    attack = pgd(network, x, y, 0.5, steps=10, restarts=1, box=(0.0, 1.0))
    return Case(with_search(certificate, network, x, attack), network, x, y, (attack,))


def made_up(
    samples: int,
    classes: int = 3,
    shape: tuple[int, ...] = (4,),
    correct: bool = True,
    radius: float | None = None,
    local: bool = False,
) -> Certificate:
    """Make up a certificate that is consistent: each radius below the distance of its witness."""
    generator = torch.Generator().manual_seed(samples)
    radii = torch.rand(samples, generator=generator, dtype=torch.float64)
    radii = radii if radius is None else torch.full_like(radii, radius)
    right = torch.full((samples,), correct)
    radii = torch.where(right, radii, 0.0)
    label = torch.arange(samples) % classes
    pairs = radii[:, None].expand(-1, classes).scatter(1, label[:, None], math.inf if correct else 0.0)
    attack = torch.where(torch.arange(samples) % 2 == 0, 2 * radii, math.inf)
    shown = (attack.isfinite() & right).nonzero().flatten()
    return Certificate(
        label=label,
        correct=right,
        radius=radii,
        radii={"lipschitz": radii / 2} | ({"shell": radii} if local else {}),
        pair_radius=pairs.clone(),
        method=("liplt",) * samples,
        proven_by={"liplt": ("liplt",)},
        attack_radius=torch.where(right, attack, 0.0),
        witness_index=shown,
        witness_points=torch.zeros(len(shown), *shape, dtype=torch.float64),
        search_radius=torch.where(right, math.inf, 0.0).to(torch.float64),
        margin=radii,
        curvature_wins=torch.zeros(samples, dtype=torch.bool),
        comparison_known=torch.zeros(samples, dtype=torch.bool),
        p=2.0,
    )
