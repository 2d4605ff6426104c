"""Layers and architectures; importing this package is enough for `curvcert.trace` to know the layers."""

from curvcert.nn.activations import ISRU, Arctan, CentredSoftplus, Erf, Gaussian, Normalise, Sin
from curvcert.nn.architectures import (
    ARCHITECTURES,
    INPUT_SHAPES,
    architecture,
    dense,
    digits,
    lip_3c1f,
    mnist_dense,
    six_c_two_f,
    six_f,
)
from curvcert.nn.ensemble import mirror_image, side_by_side, with_mirror_image
from curvcert.nn.linear import PadChannels, ScaledAveragePool2d, UnitRowLinear
from curvcert.nn.named import ACTIVATION_MODULES, ActivationChoice, make_activation
from curvcert.nn.sll import SLLConv2d, SLLDense

__all__ = [
    "ACTIVATION_MODULES",
    "ARCHITECTURES",
    "INPUT_SHAPES",
    "ISRU",
    "ActivationChoice",
    "Arctan",
    "CentredSoftplus",
    "Erf",
    "Gaussian",
    "Normalise",
    "PadChannels",
    "SLLConv2d",
    "SLLDense",
    "ScaledAveragePool2d",
    "Sin",
    "UnitRowLinear",
    "architecture",
    "dense",
    "digits",
    "lip_3c1f",
    "make_activation",
    "mirror_image",
    "mnist_dense",
    "side_by_side",
    "six_c_two_f",
    "six_f",
    "with_mirror_image",
]
