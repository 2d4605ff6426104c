r"""Muon: momentum whose step is orthogonalised, for the matrices of a network.

Every matrix moves by an orthogonal one times the rate: the step of a given spectral norm that gains most, to first
order (Jordan et al., 2024; Bernstein and Newhouse, 2024).  A loss with certificates pays for spectral norms, layer by
layer, so this is the geometry to descend in: no direction of a step spends more norm than the others.

The step is that of :math:`U V^T` for the momentum's :math:`U S V^T`, found by the Newton-Schulz iteration that they
give, which needs products only.  Kernels of convolutions are matrices of outputs by the rest; a weight of three
dimensions is a stack of matrices, each with a step of its own.
"""

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor, nn

from curvcert.errors import InvalidInput

MOMENTUM = 0.95
ADAM_SHARE = 0.05
"""The rate of what Adam moves beside Muon, as a share of Muon's."""

_STEPS, _COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)


def orthogonalised(matrix: Tensor) -> Tensor:
    r"""Return about :math:`U V^T` for :math:`U S V^T`: singular values between 0.68 and 1.14, if they were not tiny.

    >>> found = torch.linalg.svdvals(orthogonalised(torch.diag(torch.tensor([5.0, 2.0, 1.0]))))
    >>> bool(((found > 0.6) & (found < 1.2)).all())
    True
    """
    a, b, c = _COEFFICIENTS
    wide = matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT
    X: Tensor = wide / (torch.linalg.matrix_norm(wide, keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        gram = X @ X.mT
        X = a * X + (b * gram + c * (gram @ gram)) @ X
    return X if matrix.shape[-2] <= matrix.shape[-1] else X.mT


@final
class Muon(torch.optim.Optimizer):
    """Muon with Nesterov's momentum; nothing in a step waits for the host, so that it can be captured.

    >>> weight = nn.Parameter(torch.zeros(2, 3))
    >>> weight.grad = torch.tensor([[100.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> Muon([weight], rate=torch.tensor(0.1)).step()
    >>> bool((torch.linalg.svdvals(weight) > 0.06).all())
    True
    """

    def __init__(self, params: Iterable[nn.Parameter], rate: Tensor, weight_decay: float = 0.0) -> None:
        """Take the matrices and kernels to move; `rate` is read at every step."""
        super().__init__(params, {"rate": rate, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move every matrix that has a gradient."""
        if closure is not None:
            raise InvalidInput("Muon takes no closure: compute the gradients, then call step().")
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._move(weight, group["rate"], group["weight_decay"])

    def _move(self, weight: nn.Parameter, rate: Tensor, decay: float) -> None:
        assert weight.grad is not None
        state = self.state[weight]
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        average = state["momentum"].lerp_(weight.grad, 1 - MOMENTUM)
        gradient = weight.grad.lerp(average, MOMENTUM)
        step = orthogonalised(gradient if gradient.dim() == 3 else gradient.flatten(1))
        tall = max(1.0, step.shape[-2] / step.shape[-1]) ** 0.5
        if decay:
            weight.mul_(1 - decay * rate)
        weight.sub_((tall * rate * step).view_as(weight))


def matrices(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return what Muon is for: matrices and kernels, but the last, which makes the logits.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> [tuple(weight.shape) for weight in matrices(model.parameters())]
    [(2, 1, 3, 3), (4, 8)]
    """
    return [parameter for parameter in parameters if parameter.ndim >= 2][:-1]
