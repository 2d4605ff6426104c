"""Saved certificates for the tests, and how to change one as a forger would: with its seal made anew."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from curvcert.certificates import Certificate, certify
from curvcert.certificates.record import KIND, VERSION
from curvcert.network import Network, trace
from curvcert.network.network_file import save_network
from curvcert.tensor_files import read_tensor_file, write_tensor_file
from tests.certificates.cases import blobs, planar, train

BOX = (-2.0, 3.0)


@dataclass(frozen=True, eq=False)
class Files:
    """A certificate and its network, as files, with the inputs and labels."""

    certificate: Path
    network: Path
    x: np.ndarray
    y: np.ndarray
    held: Certificate


@cache
def shallow(activation: type[nn.Module] = nn.Tanh) -> Network:
    x, y = blobs()
    model = nn.Sequential(nn.Linear(2, 10), activation(), nn.Linear(10, 3))
    return trace(train(model, x, y), x[:1])


def saved(folder: Path, network: Network | None = None, n: int = 8, y: Tensor | None = None, **options: Any) -> Files:
    """Certify a few points of the plane and save everything."""
    network = planar() if network is None else network
    x, labels = blobs(n)
    labels = labels if y is None else y
    certificate = certify(network, x, labels, **{"method": "checkable"} | options)
    held = certificate.save(folder / "certificate.safetensors")
    save_network(network, folder / "network.safetensors")
    return Files(folder / "certificate.safetensors", folder / "network.safetensors", x.numpy(), labels.numpy(), held)


Change = Callable[[dict[str, Any], dict[str, np.ndarray]], object]


def forged(path: Path, change: Change, version: int = VERSION) -> Path:
    """Write a changed copy of a certificate file beside it, properly sealed."""
    header, arrays = read_tensor_file(path, KIND, VERSION)
    arrays = {name: value.copy() for name, value in arrays.items()}
    change(header, arrays)
    return write_tensor_file(path.with_name("forged.safetensors"), KIND, version, header, arrays)
