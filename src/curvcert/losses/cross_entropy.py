"""Cross-entropy with a temperature and a margin."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from curvcert.errors import InvalidInput


def margin_cross_entropy(
    logits: Float[Tensor, "batch classes"],
    y: Int64[Tensor, " batch"],
    tau: float = 1.0,
    margin: float | Tensor = 0.0,
) -> Float[Tensor, ""]:
    r"""Return the mean of :math:`\tau\,\mathrm{CE}((f(x) - \mathrm{margin}\, u_y) / \tau, y)`.

    The paper's loss has margin :math:`\nu \sqrt{2} L`: a network that is L-Lipschitz is right on the whole unit ball
    around x if :math:`f_y` leads by that much.  With margin 0 and tau 1 it is the plain cross-entropy.

    Reference: Prach and Lampert (ECCV 2022); Entesari et al. (ICML 2024), appendix `appendix:hyperparameters`.

    >>> logits, y = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    >>> round(float(margin_cross_entropy(logits, y, tau=0.5, margin=1.0)), 6) == round(0.5 * math.log(2), 6)
    True
    """
    if not tau > 0:
        raise InvalidInput(f"The temperature tau must be positive, got {tau}.")
    own = torch.zeros_like(logits).scatter(1, y[:, None], 1.0)
    return tau * F.cross_entropy((logits - margin * own) / tau, y)


def lipschitz_margin(nu: float, lipschitz: Tensor) -> Tensor:
    r"""Return the margin :math:`\nu \sqrt{2} L` of the paper's loss.

    >>> lipschitz_margin(1.0, torch.tensor(2.0))
    tensor(2.8284)
    """
    return nu * math.sqrt(2.0) * lipschitz


def accuracy(logits: Float[Tensor, "batch classes"], y: Int64[Tensor, " batch"]) -> Float[Tensor, ""]:
    """Return the fraction of samples whose largest logit is the label's.

    >>> float(accuracy(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])))
    0.5
    """
    return (logits.argmax(dim=1) == y).to(torch.float32).mean()
