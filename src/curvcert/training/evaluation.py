"""How a model does on the way: its accuracy, and an estimate of what could be certified."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from curvcert.data import LabelledImages
from curvcert.errors import CurvcertError
from curvcert.losses import Constants, StepConstants, logits_and_pair_norms, straight_line_radii

_BATCH = 250


def evaluate(model: nn.Module, data: LabelledImages, epsilons: Sequence[float], samples: int) -> dict[str, float]:
    """Return the accuracy on the first samples and, for each epsilon, an estimate of the certified accuracy.

    The estimate is the line certificate of a model that is straight along its gradients, with norms by power iteration:
    cheap, and no certificate.  Models without a curvature constant have none.

    >>> from curvcert.data import load
    >>> from curvcert.nn.architectures import architecture
    >>> sorted(evaluate(architecture("digits"), load("digits", "test"), [0.1], 50))
    ['accuracy', 'certified_estimate_0.1']
    """
    images, labels = data.images[:samples], data.labels[:samples]
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    K, L = _pair_constants(model, data, device)
    parts = [
        _radii_estimate(model, (x.to(device).to(torch.float32) / data.max_value), y.to(device), K, L)
        for x, y in zip(images.split(_BATCH), labels.split(_BATCH), strict=True)
    ]
    model.train(was_training)
    correct, radii = (torch.cat(column) for column in zip(*parts, strict=True))
    found = {"accuracy": float(correct.double().mean())}
    if radii.isnan().all():
        return found
    return found | {f"certified_estimate_{eps:.4g}": float((radii >= eps).double().mean()) for eps in epsilons}


def _pair_constants(
    model: nn.Module, data: LabelledImages, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return the curvature of every pair of classes, or else its Lipschitz constant; None for what there is not."""
    with torch.no_grad():
        try:
            now: StepConstants = Constants(model, torch.zeros(1, *data.shape, device=device), steps=30)()
        except CurvcertError:
            return None, None
        try:
            return now.pair_curvature, None
        except CurvcertError:
            return None, now.pair_lipschitz


def _radii_estimate(
    model: nn.Module, x: Tensor, y: Tensor, K: Tensor | None, L: Tensor | None
) -> tuple[Tensor, Tensor]:
    if K is None:
        with torch.no_grad():
            logits = model(x)
        radii = torch.full_like(logits[:, 0], torch.nan) if L is None else _lipschitz_radii(logits, y, L)
    else:
        logits, norms = logits_and_pair_norms(model, x, y)
        radii = straight_line_radii(logits, y, norms, K).detach()
    correct = logits.detach().argmax(dim=1) == y
    return correct, torch.where(correct, radii, torch.where(radii.isnan(), radii, 0.0))


def _lipschitz_radii(logits: Tensor, y: Tensor, L: Tensor) -> Tensor:
    """Return the least of the margins over the Lipschitz constants of the pairs."""
    margins = logits.gather(1, y[:, None]) - logits
    return (margins / L[y]).scatter(1, y[:, None], torch.inf).amin(dim=1)
