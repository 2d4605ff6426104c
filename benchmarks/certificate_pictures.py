"""What certificates look like: accuracy against radius, and some witnesses.

Claim: none; it draws what `certify` and PGD give for a small network on the embedded test digits.
Hardware: whatever it runs on; the record says which.
Trials: one 64-32-10 tanh network, trained here with weight decay so that its curvature is small; all test digits.

    python -m benchmarks.certificate_pictures
"""

from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from benchmarks.harness import write_record
from benchmarks.networks import dense
from curvcert.attacks import pgd
from curvcert.certificates import certify, with_search
from curvcert.data import load_digits
from curvcert.network import trace
from curvcert.reporting import draw_accuracy, draw_witnesses

SEED = 0
DIGITS = 360
RADII = [k / 100 for k in range(121)]
IMAGES = Path(__file__).parents[1] / "docs" / "images"


def trained() -> nn.Sequential:
    """Train the network for a few seconds."""
    torch.manual_seed(SEED)
    data = load_digits("train")
    x, y = data.as_float64().float(), data.labels
    model = nn.Sequential(nn.Flatten(), *dense(64, 32, 10))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3)
    for _ in range(300):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model.eval()


def main() -> None:
    """Certify, attack, draw and record."""
    torch.set_num_threads(1)  # the order of sums, and so the last digits, depend on it
    network = trace(trained(), torch.zeros(1, 1, 8, 8))
    digits = load_digits("test")
    x, y = digits.as_float64()[:DIGITS], digits.labels[:DIGITS]
    certificate = certify(network, x, y, box=(0, 1))
    for eps in RADII[4::4]:
        attack = pgd(network, x, y, eps, steps=50, restarts=2, box=(0.0, 1.0), seed=SEED)
        certificate = with_search(certificate, network, x, attack)
    draw_accuracy(certificate, IMAGES / "certificate-accuracy.svg", RADII)
    draw_witnesses(certificate, network, x, IMAGES / "certificate-witnesses.png")
    witnesses = int((certificate.attack_radius.isfinite() & certificate.correct).sum())
    figures = {
        "digits": DIGITS,
        "correct": float(certificate.correct.double().mean()),
        "median_radius": float(certificate.radius.median()),
        "witnesses": witnesses,
        "radii": RADII,
        "certified": [certificate.certified_accuracy(eps) for eps in RADII],
        "attacked": [certificate.attacked_accuracy(eps) for eps in RADII],
        "searched": [certificate.searched_accuracy(eps) for eps in RADII],
    }
    path = write_record("certificate_pictures", "python -m benchmarks.certificate_pictures", SEED, {}, figures)
    Console().print(f"{certificate}; recorded in {path}")


if __name__ == "__main__":
    main()
