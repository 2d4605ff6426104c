"""Add the curvature regulariser to an ordinary training loop, and see what it brings in proven radii.

Run it: python examples/train_regularised.py
"""

import torch
from torch import nn

import curvcert
from curvcert.data import load_digits
from curvcert.losses import CurvatureRegulariser

train, test = load_digits("train"), load_digits("test")
x, y = train.as_float64().float(), train.labels


def trained(weight: float) -> nn.Module:
    """Train a small network, its curvature weighed into the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    curvature = CurvatureRegulariser(model, x[:1])  # a differentiable estimate: for training, not for certificates
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(120):
        optimiser.zero_grad()
        (nn.functional.cross_entropy(model(x), y) + weight * curvature()).backward()
        optimiser.step()
    return model.eval()


for weight in (0.0, 0.01):
    net = curvcert.trace(trained(weight), x[:1])
    certificate = curvcert.certify(net, test.as_float64()[:30], test.labels[:30])
    accuracy, proven = certificate.correct.double().mean(), certificate.certified_accuracy(0.3)
    K = float(curvcert.curvature(net))
    print(f"weight {weight}: accuracy {accuracy:.0%}, certified within 0.3: {proven:.0%}, curvature at most {K:.1f}")
