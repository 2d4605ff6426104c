"""The weight of a regulariser, moved so that the training accuracy stays near a target."""

import torch
from torch import Tensor, nn

from curvcert.errors import InvalidInput


class Multiplier(nn.Module):
    r"""The primal-dual weight :math:`\lambda \leftarrow \max\{\lambda + \eta (A - \varepsilon), \lambda_{min}\}`.

    A is a moving average of the accuracy on mini-batches, :math:`\varepsilon` the accuracy to keep.  While the model
    is more accurate than that, the regulariser gains weight.  Everything is a buffer, and nothing looks at a value,
    so that an update runs on the device and a checkpoint keeps it.

    Reference: Entesari et al. (ICML 2024), appendix `appendix:hyperparameters`.  Erratum: the paper writes min for
    max, which would hold lambda at or below its least value.

    >>> weight = Multiplier(0.01, least=0.01, step=0.05, target=0.6, average=1.0)
    >>> weight.update(torch.tensor(0.8))
    >>> round(float(weight.value), 6)
    0.02
    >>> weight.update(torch.tensor(0.0))
    >>> round(float(weight.value), 6)
    0.01
    """

    value: Tensor
    accuracy: Tensor

    def __init__(
        self, value: float, least: float = 0.01, step: float = 0.05, target: float = 0.6, average: float = 0.001
    ) -> None:
        """Start at a value, with an average accuracy of 0."""
        super().__init__()
        if not 0 <= average <= 1:
            raise InvalidInput(f"The share of a new accuracy in the average lies in [0, 1], got {average}.")
        self.least, self.step, self.target, self.average = least, step, target, average
        self.register_buffer("value", torch.tensor(float(value)))
        self.register_buffer("accuracy", torch.tensor(0.0))

    @torch.no_grad()
    def update(self, accuracy: Tensor) -> None:
        """Take in the accuracy of one mini-batch."""
        self.accuracy.lerp_(accuracy.to(self.accuracy), self.average)
        self.value.add_(self.step * (self.accuracy - self.target)).clamp_(min=self.least)
