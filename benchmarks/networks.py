"""The paper's networks on CIFAR-10, freshly initialised: what the benchmarks measure bounds of."""

import resource
from itertools import pairwise

from torch import nn

SIX_F = (3072, 1024, 512, 256, 256, 128, 10)


def dense(*widths: int) -> nn.Sequential:
    """Return a dense network with tanh between its layers."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def six_f() -> nn.Sequential:
    """Return 6F on images: 3072-1024-512-256-256-128-10."""
    return nn.Sequential(nn.Flatten(), *dense(*SIX_F))


def six_c_two_f() -> nn.Sequential:
    """Return 6C2F: six convolutions and two dense layers."""
    shapes = [(3, 32, 3, 1), (32, 32, 4, 2), (32, 64, 3, 1), (64, 64, 4, 2), (64, 64, 3, 1), (64, 64, 4, 2)]
    layers: list[nn.Module] = []
    for inputs, outputs, kernel, stride in shapes:
        layers += [nn.Conv2d(inputs, outputs, kernel, stride, padding=1), nn.Tanh()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 512), nn.Tanh(), nn.Linear(512, 10))


def peak_gib() -> float:
    """Return the largest memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
