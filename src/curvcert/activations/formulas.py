"""The activations and their first two derivatives, stable at every magnitude, differentiable by autograd.

Each is elementwise and keeps the dtype of its argument.  Exponentials are taken of nonpositive numbers, and
a product that would be 0 x inf in a tail is evaluated at a clamped argument, where it is 0 already.
"""

import math

import torch
from torch import Tensor

INVERSE_SQRT_2 = math.sqrt(0.5)
INVERSE_SQRT_2PI = 1 / math.sqrt(2 * math.pi)
TWO_OVER_SQRT_PI = 2 / math.sqrt(math.pi)
SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715
SELU_ALPHA = 1.6732632423543772848170429916717
SELU_SCALE = 1.0507009873554804934193349852946


def magnitude(z: Tensor) -> Tensor:
    """Return |z|, with the right-hand derivative 1 at 0 (torch.abs has 0 there).

    >>> magnitude(torch.tensor([-2.0, 3.0]))
    tensor([2., 3.])
    """
    return torch.where(z >= 0, z, -z)


def tanh_derivative(z: Tensor) -> Tensor:
    """Return 4w / (1 + w)^2 with w = e^(-2|z|)."""
    w = torch.exp(-2 * magnitude(z))
    return 4 * w / ((1 + w) * (1 + w))


def tanh_second(z: Tensor) -> Tensor:
    """Return -2 tanh(z) tanh'(z)."""
    return -2 * torch.tanh(z) * tanh_derivative(z)


def sigmoid_derivative(z: Tensor) -> Tensor:
    """Return w / (1 + w)^2 with w = e^(-|z|)."""
    w = torch.exp(-magnitude(z))
    return w / ((1 + w) * (1 + w))


def sigmoid_second(z: Tensor) -> Tensor:
    """Return -tanh(z/2) sigmoid'(z)."""
    return -torch.tanh(0.5 * z) * sigmoid_derivative(z)


def softplus_value(z: Tensor, beta: float) -> Tensor:
    """Return max(z, 0) + log(1 + e^(-beta |z|)) / beta."""
    positive = torch.where(z >= 0, z, torch.zeros_like(z))
    return positive + torch.log1p(torch.exp(-beta * magnitude(z))) / beta


def elu_value(z: Tensor, alpha: float, length: float = 1.0) -> Tensor:
    """Return z for z > 0 and alpha (e^(z/length) - 1) otherwise."""
    return torch.where(z > 0, z, alpha * torch.expm1(z.clamp(max=0) / length))


def elu_derivative(z: Tensor, alpha: float, length: float = 1.0) -> Tensor:
    """Return 1 for z > 0 and (alpha/length) e^(z/length) otherwise."""
    return torch.where(z > 0, torch.ones_like(z), alpha / length * torch.exp(z.clamp(max=0) / length))


def celu_second(z: Tensor, alpha: float) -> Tensor:
    """Return 0 for z > 0 and e^(z/alpha) / alpha otherwise (from the left at 0)."""
    return torch.where(z > 0, torch.zeros_like(z), torch.exp(z.clamp(max=0) / alpha) / alpha)


def normal_cdf(z: Tensor) -> Tensor:
    """Return Phi(z) = erfc(-z / sqrt 2) / 2."""
    return 0.5 * torch.erfc(-z * INVERSE_SQRT_2)


def normal_density(z: Tensor) -> Tensor:
    """Return e^(-z^2 / 2) / sqrt(2 pi)."""
    return INVERSE_SQRT_2PI * torch.exp(-0.5 * z * z)


def gelu_value(z: Tensor) -> Tensor:
    """Return z Phi(z)."""
    return z * normal_cdf(z)


def gelu_derivative(z: Tensor) -> Tensor:
    """Return Phi(z) + z Phi'(z)."""
    near = z.clamp(-40, 40)
    return normal_cdf(z) + near * normal_density(near)


def gelu_second(z: Tensor) -> Tensor:
    """Return (2 - z^2) Phi'(z)."""
    near = z.clamp(-40, 40)
    return (2 - near * near) * normal_density(near)


def gelu_tanh_value(z: Tensor) -> Tensor:
    """Return z sigmoid(2u) = z (1 + tanh u) / 2 with u = sqrt(2/pi) (z + 0.044715 z^3)."""
    near = z.clamp(-30, 30)
    return z * torch.sigmoid(2 * SQRT_2_OVER_PI * (near + GELU_CUBIC * near**3))


def gelu_tanh_derivative(z: Tensor) -> Tensor:
    """Return sigmoid(2u) + z tanh'(u) u' / 2."""
    near = z.clamp(-30, 30)
    u = SQRT_2_OVER_PI * (near + GELU_CUBIC * near**3)
    du = SQRT_2_OVER_PI * (1 + 3 * GELU_CUBIC * near * near)
    return torch.sigmoid(2 * u) + 0.5 * near * tanh_derivative(u) * du


def gelu_tanh_second(z: Tensor) -> Tensor:
    """Return tanh'(u) (u' + z u'' / 2 - z tanh(u) u'^2)."""
    near = z.clamp(-30, 30)
    u = SQRT_2_OVER_PI * (near + GELU_CUBIC * near**3)
    du = SQRT_2_OVER_PI * (1 + 3 * GELU_CUBIC * near * near)
    ddu = 6 * SQRT_2_OVER_PI * GELU_CUBIC * near
    return tanh_derivative(u) * (du + 0.5 * near * ddu - near * torch.tanh(u) * du * du)


def silu_value(z: Tensor) -> Tensor:
    """Return z sigmoid(z)."""
    return z * torch.sigmoid(z)


def silu_derivative(z: Tensor) -> Tensor:
    """Return sigmoid(z) + z sigmoid'(z)."""
    return torch.sigmoid(z) + z * sigmoid_derivative(z)


def silu_second(z: Tensor) -> Tensor:
    """Return (2 - z tanh(z/2)) sigmoid'(z)."""
    return (2 - z * torch.tanh(0.5 * z)) * sigmoid_derivative(z)


def mish_gate(z: Tensor) -> Tensor:
    """Return t = tanh(softplus(z)), a rational function of w = e^(-|z|)."""
    w = torch.exp(-magnitude(z))
    right = (1 + 2 * w) / (1 + 2 * w + 2 * w * w)
    left = (w * w + 2 * w) / (w * w + 2 * w + 2)
    return torch.where(z >= 0, right, left)


def mish_gate_derivative(z: Tensor) -> Tensor:
    """Return t' = 4e (1 + e) / (e^2 + 2e + 2)^2 with e = e^z, in terms of w = e^(-|z|)."""
    w = torch.exp(-magnitude(z))
    right = 4 * w * w * (1 + w) / (1 + 2 * w + 2 * w * w) ** 2
    left = 4 * w * (1 + w) / (w * w + 2 * w + 2) ** 2
    return torch.where(z >= 0, right, left)


def mish_gate_second(z: Tensor) -> Tensor:
    """Return t'' = 4e (2 + 2e - 3e^2 - 2e^3) / (e^2 + 2e + 2)^3, likewise."""
    w = torch.exp(-magnitude(z))
    right = 4 * w * w * (2 * w**3 + 2 * w * w - 3 * w - 2) / (1 + 2 * w + 2 * w * w) ** 3
    left = 4 * w * (2 + 2 * w - 3 * w * w - 2 * w**3) / (w * w + 2 * w + 2) ** 3
    return torch.where(z >= 0, right, left)


def mish_value(z: Tensor) -> Tensor:
    """Return z tanh(softplus(z))."""
    return z * mish_gate(z)


def mish_derivative(z: Tensor) -> Tensor:
    """Return t + z t'."""
    return mish_gate(z) + z * mish_gate_derivative(z)


def mish_second(z: Tensor) -> Tensor:
    """Return 2t' + z t''."""
    return 2 * mish_gate_derivative(z) + z * mish_gate_second(z)


def sin_second(z: Tensor) -> Tensor:
    """Return -sin(z)."""
    return -torch.sin(z)


def arctan_derivative(z: Tensor) -> Tensor:
    """Return r = 1 / (1 + z^2)."""
    return torch.reciprocal(1 + z * z)


def arctan_second(z: Tensor) -> Tensor:
    """Return -2 z r^2."""
    r = arctan_derivative(z)
    return -2 * (z * r) * r


def erf_derivative(z: Tensor) -> Tensor:
    """Return (2 / sqrt pi) e^(-z^2)."""
    return TWO_OVER_SQRT_PI * torch.exp(-z * z)


def erf_second(z: Tensor) -> Tensor:
    """Return -2 z erf'(z)."""
    return -2 * (z * erf_derivative(z))


def gaussian_value(z: Tensor) -> Tensor:
    """Return e^(-z^2)."""
    return torch.exp(-z * z)


def gaussian_derivative(z: Tensor) -> Tensor:
    """Return -2 z e^(-z^2)."""
    near = z.clamp(-40, 40)
    return -2 * (near * gaussian_value(near))


def gaussian_second(z: Tensor) -> Tensor:
    """Return (4 z^2 - 2) e^(-z^2)."""
    near = z.clamp(-40, 40)
    return (4 * near * near - 2) * gaussian_value(near)


def tanhshrink_value(z: Tensor) -> Tensor:
    """Return z - tanh(z)."""
    return z - torch.tanh(z)


def tanhshrink_derivative(z: Tensor) -> Tensor:
    """Return tanh(z)^2."""
    t = torch.tanh(z)
    return t * t


def tanhshrink_second(z: Tensor) -> Tensor:
    """Return 2 tanh(z) tanh'(z)."""
    return -tanh_second(z)


def hardswish_value(z: Tensor) -> Tensor:
    """Return z min(max(z + 3, 0), 6) / 6."""
    return z * ((z + 3).clamp(0, 6) / 6)


def hardswish_derivative(z: Tensor) -> Tensor:
    """Return z/3 + 1/2 on [-3, 3], 0 below and 1 beyond: at both jumps the slope of the curved piece."""
    inner = z.clamp(-3, 3) / 3 + 0.5
    return torch.where(z < -3, torch.zeros_like(z), torch.where(z > 3, torch.ones_like(z), inner))


def softshrink_value(z: Tensor, width: float) -> Tensor:
    """Return z brought nearer to 0 by the width, 0 at most."""
    return z - z.clamp(-width, width)


def softshrink_derivative(z: Tensor, width: float) -> Tensor:
    """Return 0 on (-width, width] and 1 elsewhere."""
    return 1 - hardtanh_derivative(z, -width, width)


def softsign_value(z: Tensor) -> Tensor:
    """Return z / (1 + |z|)."""
    return z / (1 + magnitude(z))


def softsign_derivative(z: Tensor) -> Tensor:
    """Return r^2 with r = 1 / (1 + |z|)."""
    r = torch.reciprocal(1 + magnitude(z))
    return r * r


def softsign_second(z: Tensor) -> Tensor:
    """Return -2 sign(z) r^3 (from the right at 0)."""
    r = torch.reciprocal(1 + magnitude(z))
    cube = 2 * r * r * r
    return torch.where(z >= 0, -cube, cube)


def isru_root(z: Tensor) -> Tensor:
    """Return r = 1 / sqrt(1 + z^2), without overflow."""
    return torch.reciprocal(torch.hypot(torch.ones_like(z), z))


def isru_value(z: Tensor) -> Tensor:
    """Return z / sqrt(1 + z^2)."""
    return z * isru_root(z)


def isru_derivative(z: Tensor) -> Tensor:
    """Return r^3."""
    r = isru_root(z)
    return r * r * r


def isru_second(z: Tensor) -> Tensor:
    """Return -3 z r^5."""
    r = isru_root(z)
    return -3 * (z * r) * (r * r) * (r * r)


def leaky_relu_value(z: Tensor, slope: float) -> Tensor:
    """Return z for z > 0 and slope z otherwise."""
    return torch.where(z > 0, z, slope * z)


def step(z: Tensor, at: float, left: float, right: float) -> Tensor:
    """Return left up to the point `at` and right beyond it."""
    return torch.where(z > at, torch.full_like(z, right), torch.full_like(z, left))


def hardtanh_derivative(z: Tensor, lower: float, upper: float) -> Tensor:
    """Return 1 on (lower, upper] and 0 elsewhere."""
    return ((z > lower) & (z <= upper)).to(z.dtype)
