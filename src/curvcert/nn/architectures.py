"""The architectures of the paper and the small network of the digits, by name.

Each takes images in [0, 1] of shape (batch, channels, height, width) and returns ten logits.  The weights are
random; a mean to subtract from the channels is part of the model, so that radii are those of the raw images.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MappingProxyType

from torch import Tensor, nn

from curvcert.errors import InvalidInput, meant
from curvcert.nn.activations import Normalise
from curvcert.nn.linear import PadChannels, ScaledAveragePool2d, UnitRowLinear
from curvcert.nn.named import ActivationChoice, make_activation
from curvcert.nn.sll import SLLConv2d, SLLDense

CLASSES = 10
MeanShift = Sequence[float] | Tensor | None

_CONVOLUTIONS = ((32, 3, 1, 1), (32, 4, 2, 1), (64, 3, 1, 1), (64, 4, 2, 1), (64, 3, 1, 1), (64, 4, 2, 1))
"""The convolutional layers of 6C2F: channels, kernel, stride, padding."""


def dense(
    in_features: int, widths: Sequence[int], activation: ActivationChoice = "tanh", mean_shift: MeanShift = None
) -> nn.Sequential:
    """Return a fully connected network: flattened images, layers of the given widths, ten logits.

    >>> len(dense(4, [8, 8]))
    6
    """
    layers = _dense_layers((in_features, *widths), activation)
    return nn.Sequential(*_shift(mean_shift), nn.Flatten(), *layers, nn.Linear((in_features, *widths)[-1], CLASSES))


def six_f(activation: ActivationChoice = "tanh", mean_shift: MeanShift = None) -> nn.Sequential:
    """Return 6F for CIFAR-10: 3072-1024-512-256-256-128-10, 3.9 million parameters.

    >>> import torch
    >>> with torch.device("meta"):
    ...     six_f()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    return dense(3072, (1024, 512, 256, 256, 128), activation, mean_shift)


def six_c_two_f(activation: ActivationChoice = "tanh", mean_shift: MeanShift = None) -> nn.Sequential:
    """Return 6C2F for CIFAR-10: six convolutions, every other with stride 2, and two dense layers.

    >>> import torch
    >>> with torch.device("meta"):
    ...     six_c_two_f()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    layers: list[nn.Module] = []
    inputs = 3
    for channels, kernel, stride, padding in _CONVOLUTIONS:
        layers += [nn.Conv2d(inputs, channels, kernel, stride, padding), make_activation(activation)]
        inputs = channels
    layers += [nn.Flatten(), *_dense_layers((1024, 512), activation), nn.Linear(512, CLASSES)]
    return nn.Sequential(*_shift(mean_shift), *layers)


def lip_3c1f(
    activation: ActivationChoice = "tanh",
    mean_shift: MeanShift = None,
    channels: int = 15,
    hidden_channels: int | None = None,
    hidden: int = 1024,
) -> nn.Sequential:
    """Return Lip-3C1F for CIFAR-10: 1-Lipschitz, every layer of it, with a unit-row last layer.

    Channels padded to 15, three SLL convolutions, average pooling by 4 scaled by 4, an SLL dense layer with 1,024
    inner units on the 960 features.  The activation needs slopes in [0, 1].

    >>> import torch
    >>> lip_3c1f(channels=4, hidden=8)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    features = channels * 8 * 8
    return nn.Sequential(
        *_shift(mean_shift),
        PadChannels(channels),
        *(SLLConv2d(channels, hidden_channels, 3, activation) for _ in range(3)),
        ScaledAveragePool2d(4),
        nn.Flatten(),
        SLLDense(features, hidden, activation),
        UnitRowLinear(features, CLASSES),
    )


def mnist_dense(depth: int, activation: ActivationChoice = "tanh", mean_shift: MeanShift = None) -> nn.Sequential:
    """Return the k-layer network for MNIST, 784-100-...-100-10 with k = depth layers, 3 to 6.

    >>> sum(isinstance(layer, nn.Linear) for layer in mnist_dense(4))
    4

    Raises:
        InvalidInput: if the depth is not 3, 4, 5 or 6.
    """
    if depth not in (3, 4, 5, 6):
        raise InvalidInput(f"mnist_dense has a depth of 3, 4, 5 or 6 layers, got {depth!r}. See `dense` for others.")
    return dense(784, (100,) * (depth - 1), activation, mean_shift)


def digits(activation: ActivationChoice = "tanh", mean_shift: MeanShift = None) -> nn.Sequential:
    """Return the small network of the embedded digits: two convolutions, two dense layers, 10,698 parameters.

    >>> import torch
    >>> digits()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    return nn.Sequential(
        *_shift(mean_shift),
        nn.Conv2d(1, 8, kernel_size=3, padding=1),
        make_activation(activation),
        nn.Conv2d(8, 16, kernel_size=4, stride=2, padding=1),
        make_activation(activation),
        nn.Flatten(),
        *_dense_layers((256, 32), activation),
        nn.Linear(32, CLASSES),
    )


ARCHITECTURES: Mapping[str, Callable[..., nn.Sequential]] = MappingProxyType(
    {
        "6F": six_f,
        "6C2F": six_c_two_f,
        "Lip-3C1F": lip_3c1f,
        **{f"MNIST-{depth}F": partial(mnist_dense, depth) for depth in (3, 4, 5, 6)},
        "digits": digits,
    }
)
"""What makes each architecture, by name; all take `activation` and `mean_shift`."""

INPUT_SHAPES: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {
        **dict.fromkeys(("6F", "6C2F", "Lip-3C1F"), (3, 32, 32)),
        **{f"MNIST-{depth}F": (1, 28, 28) for depth in (3, 4, 5, 6)},
        "digits": (1, 8, 8),
    }
)
"""The shape of one image of each architecture: channels, height, width."""


def architecture(name: str, activation: ActivationChoice = "tanh", mean_shift: MeanShift = None) -> nn.Sequential:
    """Return an architecture by its name, with random weights.

    Args:
        name: one of `ARCHITECTURES`.
        activation: a name ("tanh", "centred_softplus", ...), a module, or what makes one.
        mean_shift: a mean for each channel, subtracted from the images by the model itself.

    >>> import torch
    >>> model = architecture("MNIST-3F", activation="centred_softplus", mean_shift=[0.13])
    >>> model(torch.zeros(2, *INPUT_SHAPES["MNIST-3F"])).shape
    torch.Size([2, 10])

    Raises:
        InvalidInput: if the name is not known, or the mean has another number of channels than the images.
        UnsupportedActivation: if the architecture needs an activation with slopes in [0, 1].
    """
    if name not in ARCHITECTURES:
        raise InvalidInput(
            f"Unknown architecture {name!r}. Choose one of: {', '.join(ARCHITECTURES)}.{meant(name, ARCHITECTURES)}"
        )
    channels = INPUT_SHAPES[name][0]
    if mean_shift is not None and len(mean_shift) != channels:
        raise InvalidInput(f"{name} takes images of {channels} channels, got a mean shift of {len(mean_shift)}.")
    return ARCHITECTURES[name](activation=activation, mean_shift=mean_shift)


def _shift(mean: MeanShift) -> list[nn.Module]:
    """Return the layer that subtracts the mean, or none."""
    return [] if mean is None else [Normalise(mean, [1.0] * len(mean))]


def _dense_layers(sizes: Sequence[int], activation: ActivationChoice) -> list[nn.Module]:
    """Return a linear layer and an activation for each pair of sizes in a row."""
    return [layer for n, m in pairwise(sizes) for layer in (nn.Linear(n, m), make_activation(activation))]
