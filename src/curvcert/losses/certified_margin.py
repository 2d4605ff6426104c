"""The certified-margin loss: cross-entropy of the worst logits that the certificate cannot exclude."""

from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from curvcert.losses.cross_entropy import margin_cross_entropy

MarginCertificate = Literal["curvature", "line"]
"""What a margin is to outlast: the curvature certificate's loss within epsilon, or the line certificate's."""


def lost_within(
    epsilon: float | Tensor, gradient_norms: Tensor, pair_curvature: Tensor, certificate: MarginCertificate
) -> Tensor:
    r"""Return what a margin loses within epsilon, by gradient norm g and curvature K.

    By the curvature certificate :math:`\varepsilon g + \tfrac{\varepsilon^2}{2} K`; by the line certificate, for an f
    that is straight along its gradient, :math:`\varepsilon g` where :math:`K \varepsilon \le g` and
    :math:`\tfrac{g^2}{2K} + \tfrac{\varepsilon^2}{2} K` beyond: never more, and smooth where the two meet.

    >>> g, K = torch.tensor([1.0, 1.0]), torch.tensor([1.0, 4.0])
    >>> lost_within(0.5, g, K, "curvature"), lost_within(0.5, g, K, "line")
    (tensor([0.6250, 1.0000]), tensor([0.5000, 0.6250]))
    """
    along, bent = epsilon * gradient_norms, 0.5 * epsilon * epsilon * pair_curvature
    if certificate == "curvature":
        return along + bent
    curved = epsilon * pair_curvature > gradient_norms
    K = torch.where(curved, pair_curvature, 1.0)
    return torch.where(curved, gradient_norms.square() / (2 * K) + bent, along)


def certified_margin_logits(
    logits: Float[Tensor, "batch classes"],
    y: Int64[Tensor, " batch"],
    gradient_norms: Float[Tensor, "batch _"],
    pair_curvature: Tensor,
    epsilon: float | Tensor,
    certificate: MarginCertificate = "curvature",
) -> Float[Tensor, "batch classes"]:
    r"""Return :math:`z_i = f_i + \varepsilon \|\nabla f_{iy}\| + \tfrac{\varepsilon^2}{2} K_{iy}` for i != y, and f_y.

    By Taylor's theorem :math:`f_i - f_y` stays below :math:`z_i - z_y` on the ball of radius epsilon: where z_y leads,
    the curvature certificate holds there.  With `certificate` "line" f_i is lifted by what the line certificate
    loses instead, see `lost_within`.  `gradient_norms` has one column per class, or one for all.

    >>> logits, y = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    >>> K = torch.tensor([[0.0, 4.0], [4.0, 0.0]])
    >>> certified_margin_logits(logits, y, torch.tensor([[0.0, 3.0]]), K, 0.5)
    tensor([[2., 2.]])
    """
    lift = lost_within(epsilon, gradient_norms, pair_curvature.to(logits.dtype)[y], certificate)
    return logits + lift.scatter(1, y[:, None], 0.0)


def certified_margin_loss(
    logits: Float[Tensor, "batch classes"],
    y: Int64[Tensor, " batch"],
    gradient_norms: Float[Tensor, "batch _"],
    pair_curvature: Tensor,
    epsilon: float | Tensor,
    tau: float = 1.0,
    certificate: MarginCertificate = "curvature",
) -> Float[Tensor, ""]:
    r"""Return :math:`\tau\,\mathrm{CE}(z / \tau, y)` of the certified-margin logits z: it pushes on what certifies.

    >>> logits, y = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    >>> K = torch.tensor([[0.0, 4.0], [4.0, 0.0]])
    >>> loss = certified_margin_loss(logits, y, torch.tensor([[0.0, 3.0]]), K, 0.5)
    >>> bool(torch.isclose(loss, torch.tensor(2.0).log()))
    True
    """
    z = certified_margin_logits(logits, y, gradient_norms, pair_curvature, epsilon, certificate)
    return margin_cross_entropy(z, y, tau)


def ramp(progress: float | Tensor, share: float = 0.4) -> Tensor:
    """Return how much of its final value epsilon has: linear in the progress of training, whole from `share` on.

    >>> [round(float(ramp(t)), 3) for t in (0.0, 0.2, 0.4, 1.0)]
    [0.0, 0.5, 1.0, 1.0]
    """
    progress = torch.as_tensor(progress)
    return (progress / share).clamp(0.0, 1.0) if share > 0 else torch.ones_like(progress, dtype=torch.float32)
