"""Certify a PyTorch model: how far can each test digit move before its class changes?

Run it: python examples/certify_pytorch.py
"""

import torch
from torch import nn

import curvcert
from curvcert.data import load_digits


def train_briefly() -> nn.Module:
    """Train a small tanh network on the embedded digits; any smooth `nn.Module` would do."""
    torch.manual_seed(0)
    digits = load_digits("train")
    x, y = digits.as_float64().float(), digits.labels
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model.eval()


net = curvcert.trace(train_briefly(), torch.zeros(1, 1, 8, 8))
test = load_digits("test")
x, y = test.as_float64()[:20], test.labels[:20]
certificate = curvcert.certify(net, x, y, box=(0, 1))

print(certificate)
for eps in (0.1, 0.2, 0.4):
    proven, at_most = certificate.certified_accuracy(eps), certificate.attacked_accuracy(eps)
    print(f"within {eps}: the accuracy lies between {proven:.0%} and {at_most:.0%}")
