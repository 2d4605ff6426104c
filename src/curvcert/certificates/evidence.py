"""What a certificate carries beside its radii, so that others can check it: digests and constants."""

import hashlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Self, final

import numpy as np
import torch
from torch import Tensor

from curvcert.errors import InvalidInput, UnsupportedModule, UnsupportedOperator
from curvcert.network import Network
from curvcert.network.network_file import network_digest

_THREADS = 4
_JOB_BYTES = 2**22
"""About how much one thread hashes at a time."""


@final
@dataclass(frozen=True, eq=False)
class Evidence:
    """The digests and the constants behind a certificate.

    Attributes:
        network: the digest of the network's nodes; empty where no file can describe them.
        inputs: the SHA-256 of every sample's float64 bytes, one row of 32 bytes per sample.
        L: Lipschitz constants of f_i - f_j, a table of classes; NaN where none were used.
        K: curvature constants of f_i - f_j, likewise.
        names: how the two tables were made, in words.
        made_by: the names of the methods behind each of them.
        K_used: for each sample and class, the curvature constant that its radius used: global or anchored.
        slack: how far the radii were lowered when they were saved, relatively; 0 before.
    """

    network: str
    inputs: Tensor
    L: Tensor
    K: Tensor
    names: tuple[str, str]
    made_by: tuple[tuple[str, ...], tuple[str, ...]]
    K_used: Tensor
    slack: float = 0.0

    def part(self, index: Tensor) -> "Evidence":
        """Return that of some of the samples."""
        return replace(self, inputs=self.inputs[index.to(self.inputs.device)], K_used=self.K_used[index])


def describable_digest(network: Network) -> str:
    """Return the network's digest, or nothing where it has parts that no file describes."""
    try:
        return network_digest(network)
    except (UnsupportedModule, UnsupportedOperator):
        return ""


def input_digests(x: Tensor) -> Tensor:
    """Return the SHA-256 of each sample's shape and little-endian float64 bytes, one row per sample.

    >>> rows = input_digests(torch.zeros(2, 3))
    >>> tuple(rows.shape), bool((rows[0] == rows[1]).all())
    ((2, 32), True)
    """
    with DigestPool() as pool:
        return pool.start(x)()


def matching_network(evidence: Evidence | None, network: Network | None) -> str:
    """Return the network's digest; empty where it is not known, or the network has parts that no file describes.

    Raises:
        InvalidInput: if the evidence is of another network.
    """
    recorded = "" if evidence is None else evidence.network
    given = "" if network is None else describable_digest(network.classified)
    if recorded and given and recorded != given:
        raise InvalidInput(
            f"The network is not the one that was certified: its digest is {given}, the certificate says {recorded}."
        )
    return recorded or given


def matching_inputs(evidence: Evidence | None, x: Tensor | None) -> Tensor | None:
    """Return the digests of the samples, as far as they are known.

    Raises:
        InvalidInput: if the evidence is of other inputs.
    """
    recorded = None if evidence is None else evidence.inputs.cpu()
    if x is None:
        return recorded
    given = input_digests(x)
    if recorded is not None and not torch.equal(recorded, given):
        differing = int((recorded != given).any(dim=1).sum()) if recorded.shape == given.shape else len(given)
        raise InvalidInput(f"x is not what was certified: {differing} of {len(given)} samples differ.")
    return given


@final
class DigestPool:
    """Threads that hash inputs while others compute: hashing leaves the interpreter to them.

    >>> with DigestPool() as pool:
    ...     digests = pool.start(torch.zeros(2, 3))
    >>> bool((digests() == input_digests(torch.zeros(2, 3))).all())
    True
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=error[0] is not None)

    def start(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin with a batch; what comes back waits for its digests and returns them."""
        size = max(1, _JOB_BYTES // (8 * max(1, math.prod(x.shape[1:]))))
        # To the host first: a thread of the pool would not wait for the stream that the caller computes on.
        jobs = [self._pool.submit(_digests, part) for part in x.detach().cpu().split(size)]
        return lambda: torch.cat([job.result() for job in jobs])


def _digests(x: Tensor) -> Tensor:
    samples = np.ascontiguousarray(x.double().numpy(), "<f8").reshape(len(x), -1)
    start = hashlib.sha256(f"{list(x.shape[1:])}".encode())
    found = []
    for sample in samples:
        digest = start.copy()
        digest.update(sample.data)
        found.append(digest.digest())
    return torch.frombuffer(bytearray(b"".join(found)), dtype=torch.uint8).reshape(len(x), 32)


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
