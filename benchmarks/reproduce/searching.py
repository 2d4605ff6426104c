"""What a search finds beside the certificates: the nearest misclassified points, and whether they contradict them."""

import torch
from torch import Tensor

from benchmarks.reproduce.models import Subject
from curvcert.attacks import pgd
from curvcert.certificates.attack_radius import replays
from curvcert.errors import SoundnessError
from curvcert.rounding import norm_upper_bound_of_vectors


def searched_distances(
    subject: Subject, radii: list[float], steps: int = 50, restarts: int = 2, seed: int = 0, batch: int = 1000
) -> Tensor:
    """Return the distance of the nearest misclassified point that PGD finds within each radius; inf where none.

    The search runs in the model's own dtype; a point counts where it replays in float64 as well.
    """
    dtype, nearest = next(subject.model.parameters()).dtype, []
    for x, y in zip(subject.x.split(batch), subject.y.split(batch), strict=True):
        best = torch.full((len(x),), torch.inf, dtype=torch.float64, device=x.device)
        for eps in radii:
            # A little short of eps, so that rounding in the search does not put a point outside.
            attack = pgd(subject.model_logits, x.to(dtype), y, eps * (1 - 1e-5), 2, steps, restarts, None, seed)
            found = torch.where(attack.broken.reshape(-1, *(1,) * (x.dim() - 1)), attack.points.double(), x)
            distance = norm_upper_bound_of_vectors((found - x).flatten(1), 2, 1)
            hit = attack.broken & replays(subject.network, found, y)
            best = torch.minimum(best, torch.where(hit, distance, torch.inf))
        nearest.append(best)
    return torch.cat(nearest)


def require_consistent(radius: Tensor, correct: Tensor, distance: Tensor) -> None:
    """Raise if a search found a misclassified point inside a certified ball.

    >>> require_consistent(torch.tensor([0.1]), torch.tensor([True]), torch.tensor([0.2]))
    """
    inside = correct & (distance < radius)
    if bool(inside.any()):
        k = int(inside.nonzero()[0])
        raise SoundnessError(
            f"A search found a misclassified point at {float(distance[k]):.6g} from sample {k}, inside its certified "
            f"radius {float(radius[k]):.6g}. Please report this network."
        )
