"""The saved certificate: one sealed safetensors file, its header in the metadata, no code in it.

A file is read with suspicion: every array that belongs there and no other, of the right type and shape, no NaN where
none may be, and no claim that another claim of the same file contradicts.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvcert._version import __version__
from curvcert.certificates.evidence import Evidence
from curvcert.errors import InvalidFile, InvalidInput
from curvcert.tensor_files import Arrays, read_tensor_file, write_tensor_file

KIND, VERSION = "curvcert-certificate", 1

SLACK = 2.0**-30
"""What saving takes off radii and adds to constants, relatively, for the rounding of a checker."""

_LOWERED = ("radius", "lipschitz_radius", "curvature_radius", "local_radius", "pair_radius", "margin")
_PER_SAMPLE = {
    "label": "<i8",
    "correct": "|b1",
    "curvature_wins": "|b1",
    "method": "<i8",
    "radius": "<f8",
    "lipschitz_radius": "<f8",
    "curvature_radius": "<f8",
    "local_radius": "<f8",
    "attack_radius": "<f8",
    "search_radius": "<f8",
    "margin": "<f8",
}
_HEADER = {"curvcert", "p", "samples", "classes", "in_shape", "network", "names", "methods", "assumes", "notes"}


def saved_fields(held: Mapping[str, Any], witnesses: bool) -> dict[str, Any]:
    """Return a certificate's fields as they are saved: rounded to the safe side by `SLACK`, once."""
    evidence = held["evidence"]
    if evidence is None or not evidence.network:
        raise InvalidInput(
            "This certificate names no network, so that it cannot be checked: it was not made by certify, or the "
            "network has maps that no file describes. Replace those by curvcert's own layers."
        )
    saved = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in held.items()}
    if evidence.slack == 0.0:
        for name in _LOWERED:
            saved[name] = saved[name] - SLACK * saved[name].abs().nan_to_num(nan=0.0, posinf=0.0)
        saved["attack_radius"] = saved["attack_radius"] * (1 + SLACK)
        K_used = evidence.K_used.cpu() * (1 + SLACK)
        saved["evidence"] = replace(
            evidence,
            inputs=evidence.inputs.cpu(),
            L=evidence.L.cpu() * (1 + SLACK),
            K=evidence.K.cpu() * (1 + SLACK),
            K_used=K_used,
            slack=SLACK,
        )
    if not witnesses:
        saved["witness"] = torch.full_like(saved["witness"], torch.nan)
        saved["attack_radius"] = torch.where(saved["correct"], torch.inf, 0.0).to(torch.float64)
    return saved


def write_certificate_file(path: Path | str, saved: Mapping[str, Any]) -> Path:
    """Write fields as `saved_fields` returned them."""
    evidence: Evidence = saved["evidence"]
    methods = sorted(set(saved["method"]))
    arrays: Arrays = {
        name: saved[name].numpy().astype(dtype) for name, dtype in _PER_SAMPLE.items() if name != "method"
    }
    arrays["method"] = np.array([methods.index(name) for name in saved["method"]], "<i8")
    arrays["pair_radius"] = saved["pair_radius"].numpy()
    arrays["inputs"] = evidence.inputs.numpy()
    arrays |= {"L": evidence.L.numpy(), "K": evidence.K.numpy(), "K_used": evidence.K_used.numpy()}
    if bool((~saved["witness"].isnan()).any()):
        arrays["witness"] = saved["witness"].numpy()
    header = {
        "curvcert": __version__,
        "p": "inf" if math.isinf(saved["p"]) else saved["p"],
        "samples": len(saved["label"]),
        "classes": len(evidence.L),
        "in_shape": list(saved["witness"].shape[1:]),
        "network": evidence.network,
        "names": list(evidence.names),
        "methods": methods,
        "assumes": list(saved["assumes"]),
        "notes": list(saved["notes"]),
    }
    return write_tensor_file(path, KIND, VERSION, header, arrays)


def read_certificate_file(path: Path | str) -> dict[str, Any]:
    """Return the fields of a certificate from a file.

    Raises:
        InvalidFile: if it is cut short, altered, of another kind or version, or contradicts itself.
    """
    header, arrays = read_tensor_file(path, KIND, VERSION)
    _require_header(path, header)
    n, classes = header["samples"], header["classes"]
    _require_arrays(path, arrays, n, classes, tuple(header["in_shape"]))
    _require_consistency(path, header, arrays)
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}
    method = tuple(header["methods"][code] for code in tensors.pop("method").tolist())
    names = (header["names"][0], header["names"][1])
    inputs, L, K, K_used = (tensors.pop(name) for name in ("inputs", "L", "K", "K_used"))
    witness = tensors.pop("witness", None)
    if witness is None:
        # Where already misclassified the input is its own witness; without it the place stays empty.
        witness = torch.full((n, *header["in_shape"]), torch.nan, dtype=torch.float64)
    return {
        **tensors,
        "witness": witness,
        "method": method,
        "p": float(header["p"]),
        "assumes": tuple(header["assumes"]),
        "notes": tuple(header["notes"]),
        "evidence": Evidence(header["network"], inputs, L, K, names, K_used, SLACK),
    }


def _require(path: Path | str, holds: bool, what: str) -> None:
    if not holds:
        raise InvalidFile(f"{path} is not a sound certificate file: {what}.")


def _require_header(path: Path | str, header: dict[str, Any]) -> None:
    _require(path, set(header) == _HEADER, f"missing or unknown header fields: {sorted(set(header) ^ _HEADER)}")
    counts = [header["samples"], header["classes"], *_list(header["in_shape"])]
    whole = all(isinstance(count, int) and not isinstance(count, bool) and 0 < count < 2**31 for count in counts)
    _require(path, whole and isinstance(header["in_shape"], list), "its sizes are not positive whole numbers")
    _require(path, len(header["in_shape"]) <= 8 and header["classes"] >= 2, "its sizes make no sense")
    p = header["p"]
    proper = p == "inf" or (isinstance(p, int | float) and not isinstance(p, bool) and 1 <= p < math.inf)
    _require(path, proper, "p is not a norm's number")
    for name in ("names", "methods", "assumes", "notes"):
        strings = isinstance(header[name], list) and all(isinstance(item, str) for item in header[name])
        _require(path, strings, f"{name} is not a list of strings")
    _require(path, len(header["names"]) == 2, "it does not name the methods of two tables")
    digest = header["network"]
    hexadecimal = isinstance(digest, str) and len(digest) == 64 and set(digest) <= set("0123456789abcdef")
    _require(path, hexadecimal and isinstance(header["curvcert"], str), "the network's digest is not a SHA-256")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [None]


def _require_arrays(path: Path | str, arrays: Arrays, n: int, classes: int, in_shape: tuple[int, ...]) -> None:
    expected: dict[str, tuple[str, tuple[int, ...]]] = {name: (dtype, (n,)) for name, dtype in _PER_SAMPLE.items()}
    expected["inputs"] = ("|u1", (n, 32))
    expected |= {name: ("<f8", (n, classes)) for name in ("pair_radius", "K_used")}
    expected |= {name: ("<f8", (classes, classes)) for name in ("L", "K")}
    if "witness" in arrays:
        expected["witness"] = ("<f8", (n, *in_shape))
    _require(path, set(arrays) == set(expected), f"missing or unknown arrays: {sorted(set(arrays) ^ set(expected))}")
    for name, (dtype, shape) in expected.items():
        value = arrays[name]
        got = f"{value.dtype.str} of shape {value.shape}"
        _require(path, (value.dtype.str, value.shape) == (dtype, shape), f"{name} is {got}, not {dtype} of {shape}")


def _require_consistency(path: Path | str, header: dict[str, Any], arrays: Arrays) -> None:
    label, correct, radius = arrays["label"], arrays["correct"].astype(bool), arrays["radius"]
    raw = arrays["correct"].view(np.uint8), arrays["curvature_wins"].view(np.uint8)
    _require(path, all(bool((flags <= 1).all()) for flags in raw), "a truth value is neither 0 nor 1")
    _require(path, bool(((label >= 0) & (label < header["classes"])).all()), "a label is not a class")
    codes = arrays["method"]
    _require(path, bool(((codes >= 0) & (codes < len(header["methods"]))).all()), "a method has no name")
    for name in ("radius", "pair_radius", "attack_radius", "search_radius"):
        _require(path, bool((arrays[name] >= 0).all()), f"{name} has a negative entry or NaN")
    for name in ("lipschitz_radius", "curvature_radius", "local_radius", "L", "K", "K_used"):
        _require(path, not bool((arrays[name] < 0).any()), f"{name} has a negative entry")
    _require(path, not bool(np.isnan(arrays["margin"]).any()), "margin has a NaN")
    least = np.where(correct, arrays["pair_radius"].min(axis=1), 0.0)
    _require(path, bool((radius == least).all()), "a radius is not the least of its pairs'")
    _require(path, bool((radius[~correct] == 0).all()), "a misclassified sample has a radius")
    _require(path, bool((arrays["attack_radius"][~correct] == 0).all()), "a misclassified sample has an attack radius")
    nearest = np.minimum(arrays["attack_radius"], arrays["search_radius"])
    _require(path, bool((radius[correct] <= nearest[correct]).all()), "a radius reaches beyond a misclassified point")
    shown = correct & np.isfinite(arrays["attack_radius"])
    witness = arrays.get("witness")
    given = np.zeros(len(correct), bool) if witness is None else np.isfinite(witness.reshape(len(correct), -1)).all(1)
    _require(path, bool((given | ~shown).all()), "an attack radius has no witness")
