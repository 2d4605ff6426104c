r"""Rewards for certified radii: :math:`\lambda\,1\{C(x) = y\}\,g(\underline\varepsilon(x))`, g convex, decreasing."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from curvcert.losses.gradient_norms import safe_sqrt

Decreasing = Callable[[Tensor], Tensor]


def exponential(radius: Tensor) -> Tensor:
    """Return exp(-r), the example of the paper.

    >>> exponential(torch.zeros(1))
    tensor([1.])
    """
    return (-radius).exp()


def hinge(target: float) -> Decreasing:
    """Return r -> max(target - r, 0): radii above the target are left alone.

    >>> hinge(1.0)(torch.tensor([0.25, 2.0]))
    tensor([0.7500, 0.0000])
    """
    return lambda radius: (target - radius).clamp(min=0.0)


def reward(
    logits: Float[Tensor, "batch classes"],
    y: Int64[Tensor, " batch"],
    radius: Float[Tensor, " batch"],
    g: Decreasing = exponential,
) -> Float[Tensor, ""]:
    r"""Return the mean of :math:`1\{C(x) = y\}\,g(\underline\varepsilon(x))`: only correct samples count.

    >>> logits, y = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
    >>> float(reward(logits, y, torch.zeros(2)))
    0.5
    """
    correct = logits.argmax(dim=1) == y
    return torch.where(correct, g(radius), 0.0).mean()


def curvature_radii(
    logits: Float[Tensor, "batch classes"],
    y: Int64[Tensor, " batch"],
    gradient_norms: Float[Tensor, "batch _"],
    pair_curvature: Tensor,
) -> Float[Tensor, " batch"]:
    r"""Return the least :math:`2m / (g + \sqrt{g^2 + 2Km})` over the other classes; 0 where a margin is negative.

    >>> logits, K = torch.tensor([[1.5, 0.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    >>> curvature_radii(logits, torch.tensor([0]), torch.tensor([[0.0, 1.0]]), K)
    tensor([1.])
    """
    m = margins(logits, y).clamp(min=0.0)
    root = safe_sqrt(gradient_norms.square() + 2 * pair_curvature.to(logits.dtype)[y] * m)
    radii = 2 * m / (gradient_norms + root).clamp(min=torch.finfo(logits.dtype).tiny)
    return radii.scatter(1, y[:, None], torch.inf).amin(dim=1)


def straight_line_radii(
    logits: Float[Tensor, "batch classes"],
    y: Int64[Tensor, " batch"],
    gradient_norms: Float[Tensor, "batch _"],
    pair_curvature: Tensor,
) -> Float[Tensor, " batch"]:
    r"""Return the least radius of the line certificate if every f_i - f_y were straight along its gradient.

    That is m / g where :math:`K m \le g^2`, and :math:`\sqrt{2Km - g^2} / K` beyond; 0 where a margin is negative.

    >>> logits, y = torch.tensor([[1.5, 0.0]]), torch.tensor([0])
    >>> for K in (0.5, 2.0):
    ...     straight_line_radii(logits, y, torch.ones(1, 2), torch.tensor([[0.0, K], [K, 0.0]]))
    tensor([1.5000])
    tensor([1.1180])
    """
    K, m = pair_curvature.to(logits.dtype)[y], margins(logits, y).clamp(min=0.0)
    tiny = torch.finfo(logits.dtype).tiny
    straight = m / gradient_norms.clamp(min=tiny)
    curved = K * m > gradient_norms.square()
    bent = safe_sqrt((2 * K * m - gradient_norms.square()).clamp(min=0.0)) / K.clamp(min=tiny)
    return torch.where(curved, bent, straight).scatter(1, y[:, None], torch.inf).amin(dim=1)


def soft_lipschitz_radii(
    logits: Float[Tensor, "batch classes"], y: Int64[Tensor, " batch"], pair_lipschitz: Tensor, sharpness: float = 5.0
) -> Float[Tensor, " batch"]:
    r"""Return the soft minimum :math:`-\tfrac1t \log \sum_{i \ne y} \exp(-t\,(f_y - f_i) / L_{iy})` of the radii.

    Certified radius maximisation (CRM) rewards it; it is below the least radius by at most log(classes - 1) / t.

    Reference: Fazlyab et al. (NeurIPS 2023), `Certified robustness via dynamic margin maximization`.

    >>> logits, L = torch.tensor([[3.0, 1.0]]), torch.tensor([[0.0, 4.0], [4.0, 0.0]])
    >>> soft_lipschitz_radii(logits, torch.tensor([0]), L)
    tensor([0.5000])
    """
    # Below eps a constant counts as eps: radii stay finite, and so do their gradients.
    L = pair_lipschitz.to(logits.dtype)[y].scatter(1, y[:, None], 1.0).clamp(min=torch.finfo(logits.dtype).eps)
    scaled = (-sharpness * margins(logits, y) / L).scatter(1, y[:, None], -torch.inf)
    return -scaled.logsumexp(dim=1) / sharpness


def margins(logits: Float[Tensor, "batch classes"], y: Int64[Tensor, " batch"]) -> Float[Tensor, "batch classes"]:
    """Return f_y - f_i for every class i.

    >>> margins(torch.tensor([[3.0, 1.0]]), torch.tensor([0]))
    tensor([[0., 2.]])
    """
    return logits.gather(1, y[:, None]) - logits
