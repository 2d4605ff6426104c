"""Losses that make certificates large: for curvcert's own loop, and for anybody else's.

The functions are formulas on tensors; the objectives compute the logits, gradients and constants that those need.
Constants in a loss are estimates: right for training, never for a certificate.
"""

from curvcert.losses.certified_margin import (
    MarginCertificate,
    certified_margin_logits,
    certified_margin_loss,
    lost_within,
    ramp,
)
from curvcert.losses.constants import Constants, StepConstants
from curvcert.losses.cross_entropy import accuracy, lipschitz_margin, margin_cross_entropy
from curvcert.losses.gradient_norms import logits_and_pair_norms, logits_and_runner_up_norm
from curvcert.losses.objectives import (
    AbstractObjective,
    CertifiedMargin,
    CertifiedRadiusMaximisation,
    CurvatureRegularised,
    CurvatureRegulariser,
    LipschitzMargin,
    LocallyCertifiedMargin,
    Objective,
    RadiusReward,
    Standard,
)
from curvcert.losses.radius_reward import (
    curvature_radii,
    exponential,
    hinge,
    reward,
    soft_lipschitz_radii,
    straight_line_radii,
)

__all__ = [
    "AbstractObjective",
    "CertifiedMargin",
    "CertifiedRadiusMaximisation",
    "Constants",
    "CurvatureRegularised",
    "CurvatureRegulariser",
    "LipschitzMargin",
    "LocallyCertifiedMargin",
    "MarginCertificate",
    "Objective",
    "RadiusReward",
    "Standard",
    "StepConstants",
    "accuracy",
    "certified_margin_logits",
    "certified_margin_loss",
    "curvature_radii",
    "exponential",
    "hinge",
    "lipschitz_margin",
    "logits_and_pair_norms",
    "logits_and_runner_up_norm",
    "lost_within",
    "margin_cross_entropy",
    "ramp",
    "reward",
    "soft_lipschitz_radii",
    "straight_line_radii",
]
