"""The embedded part of MNIST: 500 test images, and a network that was trained for large certificates.

The images are the first of MNIST's test set (Y. LeCun, C. Cortes and C. J. C. Burges), CC BY-SA 3.0; see NOTICE.
The network is 784-100-100-100-100-100-10 with tanh, trained by the recipe `mnist-6f`.
"""

from itertools import pairwise

import torch
from safetensors.torch import load
from torch import nn

from curvcert.data.embedded import read_embedded
from curvcert.data.labelled import LabelledImages

WIDTHS = (784, 100, 100, 100, 100, 100, 10)


def load_mnist_sample() -> LabelledImages:
    """Return the embedded test images of MNIST, in the order of the test set.

    >>> sample = load_mnist_sample()
    >>> len(sample), sample.shape
    (500, (1, 28, 28))
    """
    tensors = load(read_embedded("mnist_test.safetensors"))
    return LabelledImages(tensors["images"], tensors["labels"].to(torch.int64), max_value=255)


def load_mnist_network() -> nn.Sequential:
    """Return the embedded MNIST classifier, float32 and in eval mode; it takes images in [0, 1].

    Its weights are kept in float16, which float32 holds exactly.

    >>> model = load_mnist_network()
    >>> model.training, sum(weight.numel() for weight in model.parameters())
    (False, 119910)
    """
    weights = load(read_embedded("mnist_network.safetensors"))
    with torch.device("meta"):  # no random numbers are drawn
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(WIDTHS):
            layers += [nn.Linear(inputs, outputs), nn.Tanh()]
        model = nn.Sequential(*layers[:-1])
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, assign=True)
    return model.eval()
