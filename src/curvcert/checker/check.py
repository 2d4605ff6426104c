"""Verify a saved certificate, with nothing of what made it: from files to a verdict.

Every claim is an inequality, and every one is checked in the direction in which it could be false: a constant must not
be below the checker's own, a radius must not use up more of the margin than there is.  A claim that was lowered (a
smaller radius, a larger constant) is weaker and still true, so it passes.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from curvcert.checker.activations import Declared
from curvcert.checker.claims import Claims, read_claims
from curvcert.checker.evaluation import forward
from curvcert.checker.facts import Facts
from curvcert.checker.lipschitz import DUAL
from curvcert.checker.outward import Array
from curvcert.checker.reading import read_model
from curvcert.checker.samples import Judgement, judged
from curvcert.checker.tables import Tables
from curvcert.checker.verdict import CANNOT, CONTRADICTED, PROVEN, Finding, Verdict
from curvcert.errors import InvalidInput, UnsupportedModule


def check_certificate(
    certificate: Path | str,
    model: Path | str,
    x: NDArray[np.floating],
    y: NDArray[np.integer] | None = None,
    declared: Mapping[str, Declared] = MappingProxyType({}),
) -> Verdict:
    """Verify a certificate file against a network file and the inputs that it is about.

    Args:
        certificate: what `Certificate.save` wrote.
        model: what `save_network` wrote.
        x: the inputs, with the batch dimension.
        y: the labels, if they are to be compared with the certificate's.
        declared: the formulas and slopes of activations of your own, by their names; the verdict says that they are
            believed.

    Raises:
        InvalidFile: if a file is cut short, altered, of another kind or version, or contradicts itself.
        InvalidInput: if x or y do not have the shape of inputs or labels.

    >>> import tempfile, torch, curvcert
    >>> from torch import nn
    >>> from curvcert.network.network_file import save_network
    >>> net = curvcert.trace(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).eval(), torch.zeros(1, 2))
    >>> x = torch.ones(4, 2, dtype=torch.float64)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = curvcert.certify(net, x, method="checkable").save(f"{folder}/certificate")
    ...     _ = save_network(net, f"{folder}/network")
    ...     verdict = check_certificate(f"{folder}/certificate", f"{folder}/network", x.numpy())
    >>> verdict.holds, verdict.status, verdict.radii_proven
    (True, ('proven', 'proven', 'proven', 'proven'), (4, 4))
    """
    claims = read_claims(certificate)
    inputs = _inputs(x, claims)
    labels = None if y is None else _labels(y, len(claims.label))
    try:
        facts = Facts(read_model(model, declared))
    except UnsupportedModule as why:
        return _uniform(claims, CANNOT, f"the model has a part that is not covered: {why}")
    if facts.model.digest != claims.network:
        return _uniform(claims, CONTRADICTED, "the certificate is about another network")
    if facts.model.in_shape != claims.in_shape or facts.model.classes != len(claims.L):
        return _uniform(claims, CONTRADICTED, "the certificate's shapes are not the network's")
    if claims.p not in DUAL:
        return _uniform(claims, CANNOT, f"the checker covers p = 1, 2 and inf, not {claims.p:g}")
    with np.errstate(all="ignore"):
        tables = Tables(facts, claims)
        found = [judged(tables, one, k, None if labels is None else int(labels[k])) for k, one in enumerate(inputs)]
    return _verdict(found).assuming(facts.model.assumes)


def _verdict(found: list[Judgement]) -> Verdict:
    worst = [one.worst or Finding(PROVEN, "") for one in found]
    statuses, reasons = tuple(one.status for one in worst), tuple(one.reason for one in worst)
    return Verdict(statuses, reasons, tuple(one.radius for one in found))


def _uniform(claims: Claims, status: str, reason: str) -> Verdict:
    """Return the verdict that is the same for every sample."""
    finding = (Finding(status, reason),)
    return _verdict([Judgement(finding, False if radius > 0 else None) for radius in claims.radius])


def evaluate_network(model: Path | str, x: NDArray[np.floating]) -> tuple[Array, Array]:
    """Return the outputs of a network file by the checker's own forward pass, and bounds on their errors.

    For comparing the file with the model that it is meant to hold.

    Raises:
        InvalidFile: if the file is cut short, altered, or does not describe a network.
        UnsupportedModule: if the network has a part that the checker does not cover.

    >>> import tempfile, torch, curvcert
    >>> from torch import nn
    >>> from curvcert.network.network_file import save_network
    >>> model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Tanh()).eval()
    >>> _ = model[0].weight.data.copy_(torch.tensor([[0.0], [1.0]]))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_network(curvcert.trace(model, torch.zeros(1, 1)), f"{folder}/network")
    ...     value, error = evaluate_network(path, np.ones((1, 1)))
    >>> value.round(6).tolist(), bool(error.max() < 1e-13)
    ([[0.0, 0.761594]], True)
    """
    facts = Facts(read_model(model))
    inputs = np.ascontiguousarray(x, np.float64)
    if inputs.shape[1:] != facts.model.in_shape:
        raise InvalidInput(f"The network takes inputs of shape {facts.model.in_shape}, got {inputs.shape[1:]}.")
    found = [forward(facts.model, one.reshape(-1)).outputs for one in inputs]
    return np.array([one.value for one in found]), np.array([one.error for one in found])


def _inputs(x: NDArray[np.floating], claims: Claims) -> Array:
    inputs = np.ascontiguousarray(x, np.float64)
    if inputs.shape != (len(claims.label), *claims.in_shape):
        raise InvalidInput(
            f"The certificate is about inputs of shape {(len(claims.label), *claims.in_shape)}, got {inputs.shape}."
        )
    return inputs


def _labels(y: NDArray[np.integer], samples: int) -> NDArray[np.integer]:
    labels = np.asarray(y)
    if labels.shape != (samples,) or labels.dtype.kind not in "iu":
        raise InvalidInput(f"Labels are {samples} whole numbers, got {labels.dtype} of shape {labels.shape}.")
    return labels
