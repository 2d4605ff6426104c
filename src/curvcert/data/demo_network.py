"""The embedded network: a small smooth classifier of the digits, trained by scripts/train_demo_network.py."""

import torch
from safetensors.torch import load
from torch import nn

from curvcert.data.embedded import read_embedded

INPUT_SHAPE = (1, 8, 8)


def demo_architecture() -> nn.Sequential:
    """Return the untrained network: two convolutions and two dense layers with tanh between.

    Inputs are the digits in [0, 1].  The weights are random: `load_demo_network` loads the trained ones.
    """
    return nn.Sequential(
        nn.Conv2d(1, 8, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.Conv2d(8, 16, kernel_size=4, stride=2, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(256, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


def load_demo_network() -> nn.Sequential:
    """Return the trained network, float32 and in eval mode.

    Raises:
        InvalidInput: if the embedded file is not the one that was shipped.

    >>> model = load_demo_network()
    >>> model.training, sum(weight.numel() for weight in model.parameters())
    (False, 10698)
    """
    weights = load(read_embedded("demo_network.safetensors"))
    with torch.device("meta"):  # no random numbers are drawn
        model = demo_architecture()
    model.load_state_dict(weights, assign=True)
    return model.eval()
