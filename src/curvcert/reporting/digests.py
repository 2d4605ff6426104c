"""SHA-256 digests of what a report is about, over little-endian bytes: the same values, the same digest."""

import hashlib
from dataclasses import fields

import torch
from torch import Tensor

from curvcert.certificates import Certificate
from curvcert.certificates.evidence import matching_inputs, matching_network
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
    tensors = [value for value in values if isinstance(value, Tensor)]
    found = {"certificate": tensor_digest(*tensors, *certificate.radii.values())}
    weights = matching_network(certificate.evidence, network)
    if weights:
        found["network"] = weights
    rows = matching_inputs(certificate.evidence, x)
    if rows is not None:
        found["inputs"] = hashlib.sha256(rows.numpy().tobytes()).hexdigest()
    if y is not None:
        found["labels"] = tensor_digest(y)
    return found
