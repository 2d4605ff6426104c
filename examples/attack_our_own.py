"""Attack curvcert's own claims: a right bound survives, one that is 5% too small is caught.

Run it: python examples/attack_our_own.py
"""

from dataclasses import replace

import torch
from torch import nn

import curvcert
from curvcert.falsifier import falsify, falsify_bound

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).eval()
net = curvcert.trace(model, torch.zeros(1, 4))
x = torch.randn(20, 4)
found = falsify(net, x, None, curvcert.certify(net, x))
print(f"certificate: {found.searches['attacked radius']} radii attacked, {len(found.counterexamples)} violations")

neuron = nn.Sequential(nn.Linear(1, 1), nn.Tanh()).eval()
neuron[0].weight.data.fill_(3.0)
neuron[0].bias.data.zero_()
net = curvcert.trace(neuron, torch.zeros(1, 1))
right = curvcert.lipschitz(net)
wrong = replace(right, value=0.95 * right.value)
for name, bound in {"the bound": right, "95% of it": wrong}.items():
    found = falsify_bound(bound, net, "lipschitz")
    print(f"{name}, {float(bound):.2f}: {len(found.counterexamples)} violations")
