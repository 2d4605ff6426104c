"""Certified radii of networks that are no chain of layers: gates, skips around two activations, attention, recurrence.

Claim: the median certified radius over an attack's is at least 0.3 for a SwiGLU network, a residual network with two
activations per block and a U-Net-like classifier, 0.2 for a block of a vision transformer and 0.1 for a GRU.
Hardware: a CPU, or with `--device cuda` a GPU; radii do not depend on it but for rounding.
Trials: the first SAMPLES test images of the embedded digits that each network classifies correctly, in l2 and linf.

Every network is trained here, from a fixed seed, by cross-entropy on the training half alone, with shifted images and
noise; none is trained for certificates.  The attack is PGD with restarts, bisected for each sample.

    python -m benchmarks.any_network [--networks swiglu gru]

Each network that is measured replaces its figures in the record.
"""

import argparse
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import read_record, write_record
from benchmarks.peers import FARTHEST, attacked
from curvcert.certificates import certify
from curvcert.data import load_digits
from curvcert.network import trace

NAME, SAMPLES, BATCH = "any_network", 20, 64
NORMS = {"l2": 2.0, "linf": math.inf}


class SwiGLU(nn.Module):
    """Two gated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value, self.out = nn.Linear(64, 32), nn.Linear(64, 32), nn.Linear(32, 16)
        self.second_gate, self.second_value, self.last = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = x.flatten(1)
        x = self.out(F.silu(self.gate(x)) * self.value(x))
        logits: Tensor = self.last(F.silu(self.second_gate(x)) * self.second_value(x))
        return logits


class TwoPerBlock(nn.Module):
    """Residual blocks with two activations each."""

    def __init__(self, width: int = 40, blocks: int = 2) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, width), nn.Linear(width, 10)
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.outer = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.first(x.flatten(1))
        for inner, outer in zip(self.inner, self.outer, strict=True):
            x = x + torch.tanh(outer(torch.tanh(inner(x))))
        logits: Tensor = self.last(x)
        return logits


class UNet(nn.Module):
    """Down twice, up once, joined with what was there, and a linear head."""

    def __init__(self, c: int = 6) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, c, 3, padding=1), nn.Conv2d(c, c, 3, 2, 1)
        self.middle, self.up = nn.Conv2d(c, c, 3, 2, 1), nn.ConvTranspose2d(c, c, 2, 2)
        self.joined, self.last = nn.Conv2d(2 * c, c, 3, padding=1), nn.Linear(16 * c, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        half = torch.tanh(self.b(torch.tanh(self.a(x))))
        up = torch.tanh(self.up(torch.tanh(self.middle(half))))
        logits: Tensor = self.last(torch.tanh(self.joined(torch.cat([up, half], 1))).flatten(1))
        return logits


class ViT(nn.Module):
    """One block of a vision transformer on patches of the image: four of 4 x 4 pixels, or its eight rows."""

    def __init__(self, tokens: int = 4, d: int = 12, heads: int = 2, inner: int = 24) -> None:
        super().__init__()
        self.tokens, self.d, self.heads = tokens, d, heads
        self.embed, self.places = nn.Linear(64 // tokens, d), nn.Parameter(torch.randn(tokens, d) * 0.1)
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down, self.last = nn.Linear(d, inner), nn.Linear(inner, d), nn.Linear(d, 10)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        if self.tokens == 4:
            x = x.view(-1, 2, 4, 2, 4).permute(0, 1, 3, 2, 4).reshape(-1, 4, 16)
        x = self.embed(x.view(-1, self.tokens, 64 // self.tokens)) + self.places
        y, split = self.norms[0](x), (-1, self.tokens, self.heads, self.d // self.heads)
        q, k, v = (part(y).view(*split).transpose(1, 2) for part in (self.q, self.k, self.v))
        shares = (q @ k.transpose(-1, -2) / math.sqrt(split[3])).softmax(-1)
        x = x + self.out((shares @ v).transpose(1, 2).reshape(-1, self.tokens, self.d))
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        logits: Tensor = self.last(self.norms[2](x.mean(1)))
        return logits


class GRU(nn.Module):
    """A gated recurrent unit over the eight rows of the image."""

    def __init__(self, d: int = 20) -> None:
        super().__init__()
        self.d, self.read, self.state, self.last = d, nn.Linear(8, 3 * d), nn.Linear(d, 3 * d), nn.Linear(d, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        read, d = self.read(x.view(-1, 8, 8)), self.d
        h = 0 * read[:, 0, :d]
        for step in range(8):
            new, old = read[:, step], self.state(h)
            reset, update = (torch.sigmoid((new + old)[:, k * d : (k + 1) * d]) for k in (0, 1))
            proposed = torch.tanh(new[:, 2 * d :] + reset * old[:, 2 * d :])
            h = proposed + update * (h - proposed)
        logits: Tensor = self.last(h)
        return logits


@dataclass(frozen=True)
class Kind:
    """A network, how long it is trained, and the share of the attack's radius that it should reach."""

    make: Callable[[], nn.Module]
    must: float
    epochs: int = 100
    noise: float = 0.05
    methods: tuple[str, ...] = ("linear", "quadratic")


LINEAR = ("linear",)
"""Where models to second order take more than a minute per sample."""

KINDS: Mapping[str, Kind] = {
    "swiglu": Kind(SwiGLU, 0.3, epochs=60),
    "two per block": Kind(TwoPerBlock, 0.3, epochs=60),
    "u-net": Kind(UNet, 0.3, epochs=60, methods=LINEAR),
    "gru": Kind(GRU, 0.1, methods=LINEAR),
    "vit of 4 tokens": Kind(ViT, 0.2, epochs=120, noise=0.15, methods=("quadratic",)),
    "vit of 8 tokens": Kind(lambda: ViT(tokens=8), 0.2, epochs=120, noise=0.15, methods=LINEAR),
}


def trained(kind: Kind) -> nn.Module:
    """Return a network trained on the digits from seed 0."""
    torch.manual_seed(0)
    model, data = kind.make(), load_digits("train")
    images, labels = data.as_float64().float(), data.labels
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=1e-2)
    steps = kind.epochs * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 6e-3, total_steps=steps)
    for _ in range(kind.epochs):
        for index in torch.randperm(len(images))[: len(images) // BATCH * BATCH].view(-1, BATCH):
            x = images[index]
            if torch.rand(()) < 0.5:
                down, right = torch.randint(0, 3, (2,)).tolist()
                x = F.pad(x, (1, 1, 1, 1))[:, :, down : down + 8, right : right + 8]
            x = x + kind.noise * torch.randn_like(x)
            optimiser.zero_grad()
            F.cross_entropy(model(x), labels[index], label_smoothing=0.02).backward()
            optimiser.step()
            schedule.step()
    return model.eval()


def measured(kind: Kind, samples: int, device: str, methods: tuple[str, ...]) -> dict[str, Any]:
    """Return the figures of one network."""
    model, test = trained(kind), load_digits("test")
    images = test.as_float64()
    network = trace(model, images[:1].float())
    right = network(images).argmax(dim=1) == test.labels
    index = right.nonzero().flatten()[:samples]
    x, y = images[index], test.labels[index]
    found: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "accuracy": float(right.double().mean()),
        "samples": len(x),
        "must": kind.must,
    }
    for name, p in NORMS.items():
        attack = attacked(network, x, y, p, FARTHEST[name])
        for method in methods:
            start = time.perf_counter()
            radius = certify(network, x, y, p, method=method, device=device, progress=False).radius.cpu()
            found[f"{name} {method}"] = {
                "radius": float(radius.median()),
                "attack": float(attack.median()),
                "share": float(radius.median() / attack.median()),
                "median of shares": float((radius / attack).median()),
                "above the attack": int((radius > attack).sum()),
                "seconds per sample": (time.perf_counter() - start) / len(x),
            }
            print(name, method, found[f"{name} {method}"], flush=True)
    return found


def main() -> None:
    """Measure some of the networks and keep what is known of the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", nargs="+", help="of certify; by default those that each network's time allows")
    asked = parser.parse_args()
    for name in asked.networks:
        print(name, flush=True)
        kind = KINDS[name]
        found = measured(kind, asked.samples, asked.device, tuple(asked.methods or kind.methods))
        before = read_record(NAME)
        known = {**(before.figures if before is not None else {}), name: found}
        figures = {name: known[name] for name in KINDS if name in known}
        config = {"samples": asked.samples, "device": asked.device}
        write_record(NAME, "python -m benchmarks.any_network", 0, config, figures)


if __name__ == "__main__":
    main()
