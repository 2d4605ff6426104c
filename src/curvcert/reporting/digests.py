"""SHA-256 digests of what a report is about, over little-endian bytes: the same values, the same digest."""

import hashlib
from dataclasses import fields

import torch
from torch import Tensor

from curvcert.certificates import Certificate
from curvcert.certificates.evidence import describable_digest, input_digests
from curvcert.errors import InvalidInput
from curvcert.network import Network


def tensor_digest(*tensors: Tensor) -> str:
    """Return the SHA-256 of the tensors' values as little-endian float64, one after the other, with their shapes.

    >>> tensor_digest(torch.zeros(2)) == tensor_digest(torch.zeros(2, dtype=torch.float64))
    True
    >>> tensor_digest(torch.zeros(2)) == tensor_digest(torch.zeros(1, 2))
    False
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(tensor.detach().cpu().to(torch.float64).contiguous().numpy().astype("<f8").tobytes())
    return digest.hexdigest()


def digests_of(certificate: Certificate, network: Network | None, x: Tensor | None, y: Tensor | None) -> dict[str, str]:
    """Return the digests of a certificate and of what it was made from, as far as that is known.

    The inputs' digest is over the digests of the samples, one after the other.

    Raises:
        InvalidInput: if the certificate tells that it is of another network or of other inputs.
    """
    values = (getattr(certificate, part.name) for part in fields(certificate))
    found = {"certificate": tensor_digest(*(value for value in values if isinstance(value, Tensor)))}
    weights = _network_digest(certificate, network)
    if weights:
        found["network"] = weights
    rows = _input_digests(certificate, x)
    if rows is not None:
        found["inputs"] = hashlib.sha256(rows.numpy().tobytes()).hexdigest()
    if y is not None:
        found["labels"] = tensor_digest(y)
    return found


def _network_digest(certificate: Certificate, network: Network | None) -> str:
    """Return the network's digest; empty where it is not known, or the network has parts that no file describes."""
    recorded = "" if certificate.evidence is None else certificate.evidence.network
    given = "" if network is None else describable_digest(network)
    if recorded and given and recorded != given:
        raise InvalidInput(
            f"The network is not the one that was certified: its digest is {given}, the certificate says {recorded}."
        )
    return recorded or given


def _input_digests(certificate: Certificate, x: Tensor | None) -> Tensor | None:
    recorded = None if certificate.evidence is None else certificate.evidence.inputs.cpu()
    if x is None:
        return recorded
    given = input_digests(x)
    if recorded is not None and not torch.equal(recorded, given):
        differing = int((recorded != given).any(dim=1).sum())
        raise InvalidInput(f"x is not what was certified: {differing} of {len(given)} samples differ.")
    return given
