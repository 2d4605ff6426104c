"""Networks whose files the campaign forges: between them they hold every kind of node, and most kinds of maps."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Gates(nn.Module):
    """Products of values: a normalisation, a gate and attention; max-pooling, indices and reversals."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.value, self.end = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        gated = self.gate(self.norm(x)).sigmoid() * self.value(x)
        tokens = gated.reshape(-1, 4, 2)
        mixed = ((tokens @ tokens.transpose(1, 2)).softmax(-1) @ tokens).flatten(1)
        pooled = nn.functional.max_pool1d(gated[:, None], 2, 1, 1)[:, 0, :8]
        logits: Tensor = self.end(torch.cat((mixed.flip(1).roll(1, 1), pooled), 1))
        return logits


class Images(nn.Module):
    """Convolutions of all kinds, pooling, interpolation, borders, slices and concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.second = nn.Conv2d(2, 4, 3, stride=2, padding=2, dilation=2, groups=2)
        self.back, self.end = nn.ConvTranspose2d(4, 2, 2, stride=2), nn.Linear(50, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        z = torch.tanh(self.norm(self.first(x)))
        small, resized = nn.functional.avg_pool2d(z, 2), nn.functional.interpolate(z, size=(3, 3), mode="bilinear")
        wide = self.back(nn.functional.silu(self.second(z)))[:, :, 1:4, :3]
        joined = torch.cat((small, resized, 0.5 * wide + nn.functional.pad(z[:, :, :2, :2], (1, 0, 1, 0))), 1)
        logits: Tensor = self.end(nn.functional.softplus(joined.permute(0, 2, 3, 1)).flatten(1)[:, :50])
        return logits


def large() -> nn.Module:
    """Return a network of few weights whose images are too large for matrices."""
    first, pool = nn.Conv2d(1, 4, 3, padding=1), nn.AvgPool2d(24)
    return nn.Sequential(first, nn.Tanh(), pool, nn.Flatten(), nn.Linear(64, 3))


def small() -> nn.Module:
    """Return the network of most specimens."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).eval()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "network": (small, (4,), "unrolled"),
    "network of products": (Gates, (4,), "linear"),
    "network of images": (Images, (1, 6, 6), "checkable"),
    "network of large images": (large, (1, 96, 96), "liplt"),
}
"""What makes each, the shape of its inputs, and the method that it is certified by."""
