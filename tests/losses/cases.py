"""Models and objectives as data."""

from collections.abc import Callable

import torch
from torch import nn

from curvcert.losses import (
    AbstractObjective,
    CertifiedMargin,
    CertifiedRadiusMaximisation,
    Constants,
    CurvatureRegularised,
    LipschitzMargin,
    LocallyCertifiedMargin,
    RadiusReward,
    Standard,
)
from curvcert.nn import SLLConv2d, SLLDense

F64 = torch.float64


def dense(dtype: torch.dtype = F64) -> nn.Sequential:
    torch.manual_seed(3)
    layers = (nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    return nn.Sequential(*layers).to(dtype)


def conv() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.Softplus(),
        nn.Conv2d(2, 3, 2, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(3 * 2 * 2, 3),
    ).to(F64)


def sll() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        SLLConv2d(2, 3, 3), nn.Flatten(), SLLDense(2 * 3 * 3, 7, "tanh"), nn.Tanh(), nn.Linear(18, 3)
    ).to(F64)


MODELS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "dense": (dense, (4,)),
    "conv": (conv, (1, 4, 4)),
    "SLL": (sll, (2, 3, 3)),
}

OBJECTIVES: dict[str, Callable[[Constants], AbstractObjective]] = {
    "standard": lambda constants: Standard(tau=0.5),
    "curvature": lambda constants: CurvatureRegularised(constants, tau=0.5, nu=1.0),
    "lipschitz-margin": lambda constants: LipschitzMargin(constants, tau=0.5),
    "radius-reward": lambda constants: RadiusReward(constants),
    "radius-reward, runner-up": lambda constants: RadiusReward(constants, gradients="runner-up"),
    "crm": lambda constants: CertifiedRadiusMaximisation(constants, target=0.8),
    "certified-margin": lambda constants: CertifiedMargin(constants, epsilon=0.3),
    "certified-margin, runner-up": lambda constants: CertifiedMargin(constants, epsilon=0.3, gradients="runner-up"),
    "certified-margin, line": lambda constants: CertifiedMargin(constants, epsilon=0.3, certificate="line"),
    "certified-margin, quadratic": lambda constants: LocallyCertifiedMargin(constants, epsilon=0.3),
}
