"""What is proven about a model while it trains, for a training loop of one's own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import numpy as np
from torch import Tensor, nn

from curvcert.certificates import Certificate, certify
from curvcert.errors import InvalidInput
from curvcert.network import trace
from curvcert.network.network import tensor_of


@final
class CertifiedLog:
    """Certify a model every few epochs, and write what is proven to TensorBoard.

    Calling it certifies the model as it is: in eval mode and in float64, from a copy, so that training goes on as if it
    had not been called.  The numbers are a certificate's, not estimates, so take few samples.

    Args:
        x: inputs to certify, with their batch dimension.
        y: their labels.
        epsilons: the radii at which to tell the certified accuracy; nothing beyond them is proven.
        writer: a `torch.utils.tensorboard.SummaryWriter`, or anything with `add_scalar(name, value, step)`.
        every: certify at each step that is a multiple of this; at the others nothing is done.
        p: the norm.
        method: of `certify`.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
    >>> log = CertifiedLog(torch.zeros(5, 2), torch.zeros(5, dtype=torch.long), epsilons=0.1)
    >>> sorted(log(model, step=0))
    ['accuracy', 'certified_accuracy_0.1', 'curvature', 'lipschitz', 'median_radius']
    >>> model.training
    True
    """

    def __init__(
        self,
        x: Tensor | np.ndarray,
        y: Tensor | np.ndarray,
        epsilons: Sequence[float] | float,
        writer: Any = None,
        every: int = 1,
        p: float = 2,
        method: str = "auto",
    ) -> None:
        if every < 1:
            raise InvalidInput(f"every counts steps, at least 1, got {every}.")
        self._x, self._y = tensor_of(x), tensor_of(y)
        self._epsilons = (float(epsilons),) if isinstance(epsilons, int | float) else tuple(map(float, epsilons))
        self._writer, self._every, self._p, self._method = writer, every, p, method

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        """Return, and write, what is proven at this step; nothing at a step that is left out."""
        if step % self._every:
            return {}
        with _evaluating(model):
            like = next(model.parameters())
            network = trace(model, self._x[:1].to(like))
            certificate = certify(
                network, self._x, self._y, self._p, self._method, epsilons=self._epsilons, progress=False
            )
        found = _numbers(certificate, self._epsilons)
        if self._writer is not None:
            for name, value in found.items():
                self._writer.add_scalar(f"certified/{name}", value, step)
        return found


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode, and every part of it back into the mode that it was in."""
    before = [(part, part.training) for part in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for part, mode in before:
            part.training = mode


def _numbers(certificate: Certificate, epsilons: Sequence[float]) -> dict[str, float]:
    """Return the shares, the median radius, and the largest constants of two classes, where there are any."""
    found = {
        "accuracy": float(certificate.correct.double().mean()),
        "median_radius": float(certificate.radius.median()),
    }
    found |= {f"certified_accuracy_{eps:.4g}": certificate.certified_accuracy(eps) for eps in epsilons}
    evidence = certificate.evidence
    if evidence is not None:
        for name, table in (("lipschitz", evidence.L), ("curvature", evidence.K)):
            largest = float(table.amax())  # NaN where the table was not made
            found |= {name: largest} if largest == largest else {}
    return found
