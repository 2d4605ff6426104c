"""Teach curvcert an activation of your own: declare its constants, and register the module that computes it.

Run it: python examples/custom_activation.py
"""

import torch
from torch import Tensor, nn

import curvcert
from curvcert.activations import declare_activation, register_activation
from curvcert.errors import SoundnessError


class LogCosh(nn.Module):
    """log cosh z: its slope is tanh z, its bend 1 - tanh(z)^2."""

    def forward(self, z: Tensor) -> Tensor:
        """Return log cosh z, without overflow."""
        return z.abs() + torch.log1p(torch.exp(-2 * z.abs())) - 0.6931471805599453


activation = declare_activation("log cosh", LogCosh(), torch.tanh, slope=(-1.0, 1.0), curvature=(0.0, 1.0))
register_activation(LogCosh, activation)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 8), LogCosh(), nn.Linear(8, 3)).eval()
net = curvcert.trace(model, torch.zeros(1, 5))
bound = curvcert.curvature(net, pair=(0, 1))
print(bound)
print("it rests on:", *bound.assumes)  # nothing is proven about a declared activation: bounds say so

try:
    declare_activation("log cosh", LogCosh(), torch.tanh, slope=(-1.0, 1.0), curvature=(0.0, 0.5))
except SoundnessError as error:
    print("refused:", error)
