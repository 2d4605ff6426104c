"""Damaged and forged files: a named error or no proof, never a crash, never a pass, and quickly."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.damages import mutations
from curvcert.certificates import load_certificate
from curvcert.certificates.record import KIND, VERSION
from curvcert.checker import check_certificate
from curvcert.checker.reading import read_model
from curvcert.errors import CurvcertError, InvalidFile
from curvcert.network import trace
from curvcert.network.network_file import save_network
from curvcert.tensor_files import read_tensor_file, write_tensor_file
from tests.certificates.saved import BOX, Files, forged, saved, shallow

COUNT = 150


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return saved(tmp_path_factory.mktemp("hostile"), shallow(), n=12, method="unrolled", box=BOX)


def test_a_damaged_certificate_is_refused_by_name(files, tmp_path) -> None:
    path = tmp_path / "damaged.safetensors"
    for damaged in mutations(files.certificate.read_bytes(), COUNT, seed=1):
        path.write_bytes(damaged)
        start = time.perf_counter()
        with pytest.raises(InvalidFile):
            load_certificate(path)
        with pytest.raises(InvalidFile):
            check_certificate(path, files.network, files.x, files.y)
        assert time.perf_counter() - start < 5


def test_a_damaged_network_is_refused_by_name(files, tmp_path) -> None:
    path = tmp_path / "damaged.safetensors"
    for damaged in mutations(files.network.read_bytes(), COUNT, seed=2):
        path.write_bytes(damaged)
        with pytest.raises(InvalidFile):
            read_model(path)
        with pytest.raises(InvalidFile):
            check_certificate(files.certificate, path, files.x, files.y)


def _forged_networks(header: dict, arrays: dict, count: int) -> Iterator[tuple[dict, dict]]:
    """Yield properly sealed networks with damage inside: in the description, or in the weights."""
    draw = np.random.default_rng(3)
    text = json.dumps(header)
    for k in range(count):
        changed, weights = text, {name: value.copy() for name, value in arrays.items()}
        if k % 3 == 0:
            words = [
                '"source": 1',
                '"t0"',
                '"t3"',
                "[2]",
                '"dense"',
                '"identity"',
                "null",
                '"zero"',
                '"map"',
                '"affine"',
                "0.0",
                '"source"',
                '"source": 1',
            ]
            old, new = draw.choice(words, 2)
            changed = text.replace(old, new, int(draw.integers(1, 3)))
        elif k % 3 == 1:
            name = f"t{draw.integers(len(weights))}"
            weights[name].flat[draw.integers(weights[name].size)] = draw.choice([np.nan, np.inf, 1e300, -1e200, 1e99])
        else:
            place = int(draw.integers(len(text)))
            changed = text[:place] + str(draw.choice(list('0123456789[]{}",:e-'))) + text[place + 1 :]
        try:
            yield json.loads(changed), weights
        except ValueError:
            continue


def test_a_forged_network_never_passes(files, tmp_path) -> None:
    header, arrays = read_tensor_file(files.network, "curvcert-network", 2)
    path = tmp_path / "forged.safetensors"
    tried = 0
    for changed, weights in _forged_networks(header, arrays, COUNT):
        same = changed == header and all(np.array_equal(weights[name], arrays[name]) for name in arrays)
        if same or not isinstance(changed, dict):
            continue
        tried += 1
        write_tensor_file(path, "curvcert-network", 2, changed, weights)
        with suppress(CurvcertError):
            assert not check_certificate(files.certificate, path, files.x, files.y).holds
    assert tried > COUNT // 3


def _entries(arrays: dict) -> Iterator[tuple[str, int]]:
    for name, value in arrays.items():
        for k in range(value.size):
            if name != "inputs" or k % 16 == 0:
                yield name, k


def test_every_number_of_a_certificate_counts(tmp_path) -> None:
    """Change each entry of each array, seal the file anew: it is refused, unless the claim became weaker."""
    files = saved(tmp_path, shallow(), n=2, method="unrolled", box=BOX)
    header, arrays = read_tensor_file(files.certificate, KIND, VERSION)
    weaker = {"radius": -1, "pair_radius": -1, "radii.curvature": -1, "margin": -1, "K_used": 1, "K": 1}
    refused = 0
    for name, k in _entries(arrays):
        for direction in (-1, 1):
            forgery = {key: value.copy() for key, value in arrays.items()}
            _change(forgery[name], k, direction)
            if np.array_equal(forgery[name], arrays[name], equal_nan=forgery[name].dtype.kind == "f"):
                continue
            path = write_tensor_file(tmp_path / "forged.safetensors", KIND, VERSION, header, forgery)
            if _holds(path, files):
                lost = name == "curvature_wins" and not forgery[name].reshape(-1)[k]
                # No radius rests on a box that witnesses alone keep to.
                told = name in ("search_radius", "box")
                assert told or lost or weaker.get(name) == direction, (name, k, direction)
            else:
                refused += 1
    assert refused > 60


def _change(value: np.ndarray, k: int, direction: int) -> None:
    flat = value.reshape(-1)
    match value.dtype.kind:
        case "f":
            flat[k] = flat[k] + direction * max(1e-3, 0.3 * abs(flat[k])) if np.isfinite(flat[k]) else 0.5
        case "b":
            flat[k] = not flat[k]
        case "u":
            flat[k] ^= 1
        case _:
            flat[k] += direction


def _holds(path, files: Files) -> bool:
    try:
        return check_certificate(path, files.network, files.x, files.y).holds
    except CurvcertError:
        return False


HEADERS = {
    "samples": (0, -1, 2**40, "two", None, 1.5, True),
    "classes": (1, 10**9, [3]),
    "in_shape": ([], [3], [2, 1], 2, [0], [2**40]),
    "p": (1, "inf", 0.5, "nan", 1e400, None, [2]),
    "network": ("", "0" * 64, 7),
    "names": ([], ["a", "b", "c"], [1, 2], "ab"),
    "methods": ([], ["a", "b"], [None]),
    "made_by": ([], [["a"], ["b"], ["c"]], ["a", "b"], [[1], [2]], "ab"),
    "proven_by": ([], [["misclassified"]], [["lipsdp-recursion"]], [[None]], [["unrolled"], ["liplt"]]),
    "assumes": ("x", [1]),
    "notes": ([1], None),
}


@pytest.mark.parametrize("field", HEADERS)
def test_every_header_field_that_matters_counts(files, field) -> None:
    for value in HEADERS[field]:
        if value == 1e400:
            continue
        path = forged(files.certificate, lambda header, arrays, value=value: header.update({field: value}))
        assert not _holds(path, files), value


def test_a_description_cannot_keep_the_checker_busy(tmp_path) -> None:
    network = trace(nn.Sequential(nn.Linear(2, 3), nn.Tanh()).eval(), torch.zeros(1, 2))
    header, arrays = read_tensor_file(save_network(network, tmp_path / "network"), "curvcert-network", 2)
    affine = header["nodes"][0]
    identity = {"map": "identity", "in_shape": [2], "out_shape": [2]}
    nested = identity
    for _ in range(100):
        nested = {"map": "transposed", "of": nested}
    conv = {
        "map": "conv",
        "weight": affine["terms"][0]["map"]["weight"],
        "image_shape": [1, 2**15, 2**15],
        "stride": [1, 1],
        "padding": [[60000, 60000], [60000, 60000]],
        "dilation": [1, 1],
        "groups": 1,
        "padding_mode": "zeros",
    }
    wide = {"map": "identity", "in_shape": [2**20, 2**10], "out_shape": [2**20, 2**10]}
    many = {"map": "sum", "terms": [identity] * 3000}
    for k, bad in enumerate((nested, conv, wide, many, {"map": "product", "factors": [wide] * 4})):
        nodes = [affine | {"terms": [{"source": 0, "map": bad}]}, *header["nodes"][1:]]
        changed = header | {"nodes": nodes}
        path = write_tensor_file(tmp_path / f"{k}", "curvcert-network", 2, changed, arrays)
        start = time.perf_counter()
        with pytest.raises(CurvcertError):
            read_model(path)
        assert time.perf_counter() - start < 2
