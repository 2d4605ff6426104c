"""What a certificate carries beside its radii, so that others can check it: digests and constants."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from torch import Tensor

from curvcert.errors import UnsupportedBlock, UnsupportedOperator
from curvcert.network import Network
from curvcert.network.network_file import network_digest


@final
@dataclass(frozen=True, eq=False)
class Evidence:
    """The digests and the constants behind a certificate.

    Attributes:
        network: the digest of the network's blocks; empty where no file can describe them.
        inputs: the SHA-256 of every sample's float64 bytes, one row of 32 bytes a sample.
        L: Lipschitz constants of f_i - f_j, a table of classes; NaN where none were used.
        K: curvature constants of f_i - f_j, likewise.
        names: the methods behind the two tables.
        K_used: for each sample and class, the curvature constant that its radius used: global or anchored.
        slack: how far the radii were lowered when they were saved, relatively; 0 before.
    """

    network: str
    inputs: Tensor
    L: Tensor
    K: Tensor
    names: tuple[str, str]
    K_used: Tensor
    slack: float = 0.0


def describable_digest(network: Network) -> str:
    """Return the network's digest, or nothing where it has parts that no file describes."""
    try:
        return network_digest(network)
    except (UnsupportedBlock, UnsupportedOperator):
        return ""


def input_digests(x: Tensor) -> Tensor:
    """Return the SHA-256 of each sample's shape and little-endian float64 bytes, one row a sample.

    >>> rows = input_digests(torch.zeros(2, 3))
    >>> tuple(rows.shape), bool((rows[0] == rows[1]).all())
    ((2, 32), True)
    """
    samples = np.ascontiguousarray(x.detach().cpu().double().numpy(), "<f8")
    start = f"{list(samples.shape[1:])}".encode()
    digests = b"".join(hashlib.sha256(start + sample.tobytes()).digest() for sample in samples)
    return torch.from_numpy(np.frombuffer(digests, np.uint8).copy()).reshape(len(samples), 32)


def joined_evidence(parts: Sequence[Evidence | None]) -> Evidence | None:
    """Return the evidence of consecutive batches as one, or None if one of them has none."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return replace(
        known[0],
        inputs=torch.cat([part.inputs for part in known]),
        K_used=torch.cat([part.K_used for part in known]),
    )
