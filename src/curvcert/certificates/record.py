"""The saved certificate: one sealed safetensors file, its header in the metadata, no code in it.

A file is read with suspicion: every array that belongs there and no other, of the right type and shape, no NaN where
none may be, and no claim that another claim of the same file contradicts.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvcert._version import __version__
from curvcert.boxes import Box
from curvcert.certificates.evidence import Evidence
from curvcert.errors import InvalidFile, InvalidInput
from curvcert.tensor_files import Arrays, read_tensor_file, write_tensor_file

KIND, VERSION = "curvcert-certificate", 2

SLACK = 2.0**-30
"""What saving takes off radii and adds to constants, relatively, for the rounding of a checker."""

_LOWERED = ("radius", "pair_radius", "margin")
_RADII = "radii."
"""What the names of the arrays of `radii` begin with; a method's name is what follows."""

_PER_SAMPLE = {
    "label": "<i8",
    "correct": "|b1",
    "curvature_wins": "|b1",
    "comparison_known": "|b1",
    "method": "<i8",
    "radius": "<f8",
    "attack_radius": "<f8",
    "search_radius": "<f8",
    "margin": "<f8",
}
_HEADER = {
    *("curvcert", "p", "samples", "classes", "in_shape", "network", "names", "methods", "assumes", "notes"),
    *("made_by", "proven_by", "inside_box"),
}
_METHOD_NAME = re.compile("[a-z0-9-]{1,40}")


def saved_fields(held: Mapping[str, Any], witnesses: bool) -> dict[str, Any]:
    """Return a certificate's fields as they are saved: rounded to the safe side by `SLACK`, once."""
    evidence = held["evidence"]
    if evidence is None or not evidence.network:
        raise InvalidInput(
            "This certificate names no network, so that it cannot be checked: it was not made by certify, or the "
            "network has maps that no file describes. Replace those by curvcert's own layers."
        )
    saved = dict(held)
    if evidence.slack == 0.0:
        for name in _LOWERED:
            saved[name] = _lowered(saved[name])
        saved["radii"] = {name: _lowered(value) for name, value in saved["radii"].items()}
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
        saved |= {name: saved[name][:0] for name in ("witness_index", "witness_points")}
        saved["attack_radius"] = torch.where(saved["correct"], torch.inf, 0.0).to(torch.float64)
    return saved


def _lowered(value: Tensor) -> Tensor:
    return value - SLACK * value.abs().nan_to_num(nan=0.0, posinf=0.0)


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
    arrays |= {f"{_RADII}{name}": value.numpy() for name, value in saved["radii"].items()}
    arrays |= {name: saved[name].numpy() for name in ("witness_index", "witness_points")}
    if saved["steps"] is not None:
        arrays["steps"] = saved["steps"].numpy()
    if saved["box"] is not None:
        arrays["box"] = saved["box"].to_array().numpy()
    header = {
        "curvcert": __version__,
        "p": "inf" if math.isinf(saved["p"]) else saved["p"],
        "samples": len(saved["label"]),
        "classes": len(evidence.L),
        "in_shape": list(saved["witness_points"].shape[1:]),
        "network": evidence.network,
        "names": list(evidence.names),
        "made_by": [list(names) for names in evidence.made_by],
        "methods": methods,
        "proven_by": [list(saved["proven_by"][text]) for text in methods],
        "assumes": list(saved["assumes"]),
        "notes": list(saved["notes"]),
        "inside_box": saved["inside_box"],
        **({} if saved["threshold"] is None else {"threshold": saved["threshold"]}),
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
    _require_box(path, arrays, header["inside_box"])
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}
    method = tuple(header["methods"][code] for code in tensors.pop("method").tolist())
    names = (header["names"][0], header["names"][1])
    made_by = (tuple(header["made_by"][0]), tuple(header["made_by"][1]))
    inputs, L, K, K_used = (tensors.pop(name) for name in ("inputs", "L", "K", "K_used"))
    box = tensors.pop("box", None)
    radii = {name.removeprefix(_RADII): tensors.pop(name) for name in list(tensors) if name.startswith(_RADII)}
    return {
        **tensors,
        "radii": radii,
        "method": method,
        "proven_by": dict(zip(header["methods"], map(tuple, header["proven_by"]), strict=True)),
        "p": float(header["p"]),
        "assumes": tuple(header["assumes"]),
        "notes": tuple(header["notes"]),
        "inside_box": header["inside_box"],
        "threshold": header.get("threshold"),
        "box": None if box is None else Box(box[0], box[1], box.dim() == 2 + len(header["in_shape"])),
        "evidence": Evidence(header["network"], inputs, L, K, names, made_by, K_used, SLACK),
    }


def _require(path: Path | str, holds: bool, what: str) -> None:
    if not holds:
        raise InvalidFile(f"{path} is not a sound certificate file: {what}.")


def _require_header(path: Path | str, header: dict[str, Any]) -> None:
    known = _HEADER | ({"threshold"} & set(header))
    _require(path, set(header) == known, f"missing or unknown header fields: {sorted(set(header) ^ known)}")
    threshold = header.get("threshold", 0.0)
    number = isinstance(threshold, int | float) and not isinstance(threshold, bool) and math.isfinite(threshold)
    _require(path, number, "its threshold is not a finite number")
    _require(path, "threshold" not in header or header["classes"] == 2, "it has a threshold, and not two classes")
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
    _require(path, isinstance(header["inside_box"], bool), "inside_box is neither true nor false")
    for name, words in (("made_by", "names"), ("proven_by", "methods")):
        listed = isinstance(header[name], list) and all(isinstance(item, list) for item in header[name])
        listed = listed and all(isinstance(item, str) for each in header[name] for item in each)
        _require(path, listed, f"{name} is not a list of lists of strings")
        _require(path, len(header[name]) == len(header[words]), f"{words} and {name} are not of one length")
    _require(path, len(header["names"]) == 2, "it does not name the methods of two tables")
    _require(path, len(set(header["methods"])) == len(header["methods"]), "a method is listed twice")
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
    radii = [name for name in arrays if name.startswith(_RADII) and _METHOD_NAME.fullmatch(name[len(_RADII) :])]
    expected |= {name: ("<f8", (n,)) for name in radii}
    shown = len(arrays["witness_index"].reshape(-1)) if "witness_index" in arrays else 0
    expected |= {"witness_index": ("<i8", (shown,)), "witness_points": ("<f8", (shown, *in_shape))}
    expected |= {"steps": ("<i8", (n,))} if "steps" in arrays else {}
    if "box" in arrays:
        shapes = [(2,), (2, *in_shape), (2, n, *in_shape)]
        expected["box"] = ("<f8", arrays["box"].shape if arrays["box"].shape in shapes else shapes[1])
    _require(path, set(arrays) == set(expected), f"missing or unknown arrays: {sorted(set(arrays) ^ set(expected))}")
    for name, (dtype, shape) in expected.items():
        value = arrays[name]
        got = f"{value.dtype.str} of shape {value.shape}"
        _require(path, (value.dtype.str, value.shape) == (dtype, shape), f"{name} is {got}, not {dtype} of {shape}")


def _require_box(path: Path | str, arrays: Arrays, inside: bool) -> None:
    _require(path, "box" in arrays or not inside, "its radii are about the inside of a box that it does not hold")
    if "box" not in arrays:
        return
    (lower, upper), points, index = arrays["box"], arrays["witness_points"], arrays["witness_index"]
    _require(path, bool((lower <= upper).all()), "a side of its box is NaN, or the lower above the upper")
    if lower.ndim == points.ndim:
        lower, upper = lower[index], upper[index]
    _require(path, bool(((points >= lower) & (points <= upper)).all()), "a witness lies outside of the box")


def _require_consistency(path: Path | str, header: dict[str, Any], arrays: Arrays) -> None:
    label, correct, radius = arrays["label"], arrays["correct"].astype(bool), arrays["radius"]
    raw = (arrays[name].view(np.uint8) for name in ("correct", "curvature_wins", "comparison_known"))
    _require(path, all(bool((flags <= 1).all()) for flags in raw), "a truth value is neither 0 nor 1")
    _require(path, bool(((label >= 0) & (label < header["classes"])).all()), "a label is not a class")
    codes = arrays["method"]
    _require(path, bool(((codes >= 0) & (codes < len(header["methods"]))).all()), "a method has no name")
    for name in ("radius", "pair_radius", "attack_radius", "search_radius"):
        _require(path, bool((arrays[name] >= 0).all()), f"{name} has a negative entry or NaN")
    if "steps" in arrays:
        _require(path, bool((arrays["steps"] >= 0).all()), "a sample has fewer than no steps")
    for name in ("L", "K", "K_used", *(name for name in arrays if name.startswith(_RADII))):
        _require(path, not bool((arrays[name] < 0).any()), f"{name} has a negative entry")
    _require(path, not bool(np.isnan(arrays["margin"]).any()), "margin has a NaN")
    least = np.where(correct, arrays["pair_radius"].min(axis=1), 0.0)
    _require(path, bool((radius == least).all()), "a radius is not the least of its pairs'")
    known, wins = arrays["comparison_known"].astype(bool), arrays["curvature_wins"].astype(bool)
    _require(path, bool((correct | ~known).all() and (known | ~wins).all()), "a comparison is told and not known")
    _require(path, bool((radius[~correct] == 0).all()), "a misclassified sample has a radius")
    _require(path, bool((arrays["attack_radius"][~correct] == 0).all()), "a misclassified sample has an attack radius")
    nearest = np.minimum(arrays["attack_radius"], arrays["search_radius"])
    _require(path, bool((radius[correct] <= nearest[correct]).all()), "a radius reaches beyond a misclassified point")
    index, given = arrays["witness_index"], np.zeros(len(correct), bool)
    in_order = bool((np.diff(index) > 0).all()) and bool(((index >= 0) & (index < len(correct))).all())
    _require(path, in_order, "the samples with a witness are not given in order")
    given[index] = True
    _require(path, bool(np.isfinite(arrays["witness_points"]).all()), "a witness is not finite")
    shown = correct & np.isfinite(arrays["attack_radius"])
    _require(path, bool((given | ~shown).all()), "an attack radius has no witness")
