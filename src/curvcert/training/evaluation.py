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
    cheap, and no certificate.  A model without a curvature constant has none.

    >>> from curvcert.data import load
    >>> from curvcert.nn.architectures import architecture
    >>> sorted(evaluate(architecture("digits"), load("digits", "test"), [0.1], 50))
    ['accuracy', 'certified_estimate_0.1']
    """
    images, labels = data.images[:samples], data.labels[:samples]
    device = next(model.parameters()).device
    parts = [
        _radii_estimate(model, (x.to(device).to(torch.float32) / data.max_value), y.to(device), K)
        for K in [_pair_curvature(model, data, device)]
        for x, y in zip(images.split(_BATCH), labels.split(_BATCH), strict=True)
    ]
    correct, radii = (torch.cat(column) for column in zip(*parts, strict=True))
    found = {"accuracy": float(correct.double().mean())}
    if radii.isnan().all():
        return found
    return found | {f"certified_estimate_{eps:.4g}": float((radii >= eps).double().mean()) for eps in epsilons}


def _pair_curvature(model: nn.Module, data: LabelledImages, device: torch.device) -> Tensor | None:
    example = torch.zeros(1, *data.shape, device=device)
    try:
        constants = Constants(model, example, steps=30)
    except CurvcertError:
        return None
    with torch.no_grad():
        now: StepConstants = constants()
        return now.pair_curvature


def _radii_estimate(model: nn.Module, x: Tensor, y: Tensor, K: Tensor | None) -> tuple[Tensor, Tensor]:
    logits, norms = logits_and_pair_norms(model, x, y)
    correct = logits.detach().argmax(dim=1) == y
    if K is None:
        return correct, torch.full_like(logits[:, 0].detach(), torch.nan)
    radii = straight_line_radii(logits, y, norms, K).detach()
    return correct, torch.where(correct, radii, 0.0)
