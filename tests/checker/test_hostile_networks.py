"""Small files that ask for much: refused before anything is formed, or checked in bounded memory and time."""

import json
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from curvcert.checker import evaluate_network
from curvcert.checker.limits import MOST_ENTRIES, require_passes, require_room
from curvcert.checker.reading import read_model
from curvcert.errors import InvalidFile, UnsupportedModule
from curvcert.tensor_files import write_tensor_file

KIND, VERSION = "curvcert-network", 2
SIDE = 4096


@contextmanager
def modest(seconds: float = 2.0, megabytes: float = 300) -> Iterator[None]:
    """Fail if what happens inside takes long, or much memory."""
    tracemalloc.start()
    start = time.process_time()
    try:
        yield
        assert time.process_time() - start < seconds
        assert tracemalloc.get_traced_memory()[1] < megabytes * 2**20
    finally:
        tracemalloc.stop()


def written(path: Path, inputs: list[int], nodes: list[dict[str, Any]], *weights: np.ndarray) -> Path:
    arrays = {f"t{k}": np.asarray(weight, np.float64) for k, weight in enumerate(weights)}
    file = write_tensor_file(path / "network.safetensors", KIND, VERSION, {"in_shape": inputs, "nodes": nodes}, arrays)
    assert file.stat().st_size < 2**18
    return file


def affine(map_: dict[str, Any], source: int = 0, offset: str = "t0") -> dict[str, Any]:
    return {"kind": "affine", "terms": [{"source": source, "map": map_}], "offset": offset, "offset_error": None}


def tanh(source: int) -> dict[str, Any]:
    activation = {"name": "tanh", "deviation": 0.0, "declared": []}
    return {"kind": "elementwise", "source": source, "activation": activation}


def identity(size: int = SIDE) -> dict[str, Any]:
    return {"map": "identity", "in_shape": [size], "out_shape": [size]}


ZEROS = np.zeros(SIDE)
SCALED = {"map": "scaled", "factor": 0.3, "of": identity()}
POOL = {"map": "average_pool", "image_shape": [1, 64, 64], "stride": [1, 1]}
CONV = {"map": "conv", "weight": "t1", "stride": [1, 1], "dilation": [1, 1], "padding_mode": "zeros", "groups": 1}
HUGE: dict[str, tuple[dict[str, Any], tuple[np.ndarray, ...]]] = {
    "a window of billions": (POOL | {"kernel_size": [60000, 60000], "padding": [60000, 60000]}, (ZEROS,)),
    "a sum of identities": ({"map": "sum", "terms": [SCALED] * 40}, (ZEROS,)),
    "a product of identities": ({"map": "product", "factors": [SCALED] * 40}, (ZEROS,)),
    "a circuit of identities": (
        {"map": "circuit", "steps": [[{"source": k, "map": SCALED}] for k in range(40)]},
        (ZEROS,),
    ),
    "a kernel that is mostly padding": (
        CONV | {"image_shape": [1, 1, 1], "padding": [[99, 99], [99, 99]]},
        (np.zeros(100 * 100), np.zeros((1, 1, 100, 100))),
    ),
    "an image of billions": (
        CONV | {"image_shape": [1, 2**15, 2**15], "padding": [[0, 0], [0, 0]]},
        (ZEROS, [[[[1.0]]]]),
    ),
    "a segment of billions": ({"map": "segment", "total": 2**30, "start": 0, "shape": [SIDE]}, (ZEROS,)),
    "a zero of billions": ({"map": "zero", "in_shape": [2**20, 2**10], "out_shape": [SIDE]}, (ZEROS,)),
    "a selection from billions": ({"map": "flip", "shape": [2**20, 2**10], "axes": [0]}, (ZEROS,)),
    "a permutation of billions": ({"map": "permutation", "in_shape": [2**20, 2**10], "axes": [1, 0]}, (ZEROS,)),
}


@pytest.mark.parametrize("name", HUGE)
def test_a_map_cannot_take_the_memory(tmp_path: Path, name: str) -> None:
    map_, weights = HUGE[name]
    inputs = [1] if "mostly padding" in name else [SIDE]
    path = written(tmp_path, inputs, [affine(map_)], *weights)
    with modest(megabytes=1000), pytest.raises((UnsupportedModule, InvalidFile)):
        read_model(path)


def residual(depth: int) -> list[dict[str, Any]]:
    """x + tanh(x), again and again: no weights at all."""
    nodes: list[dict[str, Any]] = []
    for k in range(depth):
        x = 2 * k
        nodes.append(tanh(x))
        terms = [{"source": source, "map": identity()} for source in (x, x + 1)]
        nodes.append({"kind": "affine", "terms": terms, "offset": "t0", "offset_error": None})
    return nodes


def test_nodes_without_weights_cannot_take_the_memory(tmp_path: Path) -> None:
    path = written(tmp_path, [SIDE], residual(60), ZEROS)
    with modest(), pytest.raises(UnsupportedModule, match="numbers in all"):
        evaluate_network(path, np.zeros((1, SIDE)))


def test_classes_cannot_take_the_memory(tmp_path: Path) -> None:
    path = written(tmp_path, [2000], [tanh(0)])
    with modest(), pytest.raises(UnsupportedModule, match="pairs of 2000 classes"):
        read_model(path)


def deep(width: int, depth: int) -> list[dict[str, Any]]:
    """A chain of equal layers that share one small description, and two classes."""
    scaled = SCALED | {"of": identity(width)}
    nodes = [affine(scaled)]
    for k in range(1, depth):
        nodes += [tanh(2 * k - 1), affine(scaled, 2 * k)]
    return [*nodes, affine({"map": "dense", "weight": "t1"}, 2 * depth - 1, "t2")]


def test_depth_cannot_take_the_time(tmp_path: Path) -> None:
    def file(width: int, depth: int) -> Path:
        weights = np.zeros(width), np.zeros((2, width)), np.zeros(2)
        return written(tmp_path, [width], deep(width, depth), *weights)

    assert read_model(file(100, 200)).classes == 2
    with modest(), pytest.raises(UnsupportedModule, match="scales"):
        read_model(file(800, 103))


def test_kernels_cannot_take_the_time() -> None:
    require_passes([3072, 32768, 512, 10], [0, 2**20, 2**24, 0], [2], 10)
    with pytest.raises(UnsupportedModule, match="multiplications"):
        require_passes([3072, 32768, 1600, 10], [0, 2**31, 2**31, 0], [2], 10)
    with pytest.raises(UnsupportedModule, match="numbers in all"):
        require_passes([2**24, 10], [0, 0], [], 10)


def test_maps_and_headers_are_nested_within_bounds(tmp_path: Path) -> None:
    nested = identity(2)
    for _ in range(70):
        nested = {"map": "transposed", "of": nested}
    with modest(), pytest.raises(InvalidFile, match="too deeply nested"):
        read_model(written(tmp_path, [2], [affine(nested)], np.zeros(2)))
    for _ in range(200):
        nested = {"map": "transposed", "of": nested}
    with modest(), pytest.raises(InvalidFile, match=r"nested 27\d deep"):
        read_model(written(tmp_path, [2], [affine(nested)], np.zeros(2)))


@pytest.mark.parametrize(
    "text", ["[" * 10**6, '{"a":' * 10**5, "[" + "0," * 2**21 + "0]", '{"":[' + "{}," * 2**19 + "{}]}"]
)
def test_a_header_cannot_take_the_memory(tmp_path: Path, text: str) -> None:
    path = tmp_path / "network.safetensors"
    for header in (text, json.dumps({"__metadata__": {"kind": KIND, "version": "2", "seal": "", "header": text}})):
        path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
        with modest(megabytes=200), pytest.raises(InvalidFile):
            read_model(path)


def test_a_network_is_never_too_large_by_its_own_weights() -> None:
    sizes = [SIDE] * 8 + [10]
    weights = sum(n * m for n, m in pairwise(sizes))
    sources = [[], *([k] for k in range(8))]
    with pytest.raises(UnsupportedModule, match="entries in all"):
        require_room(sizes, sources, [], MOST_ENTRIES)
    require_room(sizes, sources, [], MOST_ENTRIES + 2 * weights)


def test_convolutions_are_the_sums_that_they_stand_for(tmp_path: Path) -> None:
    """Position by position, tap by tap: with groups, strides, dilation, and both kinds of padding."""
    draw = np.random.default_rng(0)
    cases = [(1, (1, 1), (1, 1)), (2, (2, 1), (1, 2)), (4, (1, 2), (2, 1))]
    for mode in ("zeros", "circular"):
        for groups, stride, dilation in cases:
            K, x, padding = draw.normal(size=(4, 4 // groups, 2, 3)), draw.normal(size=(4, 5, 6)), ((1, 0), (2, 1))
            y = _dense_convolution(K, x, stride, dilation, padding, groups, mode)
            conv = CONV | {"image_shape": [4, 5, 6], "stride": [*stride], "dilation": [*dilation], "groups": groups}
            conv |= {"padding": [list(side) for side in padding], "padding_mode": mode}
            path = written(tmp_path, [4, 5, 6], [affine(conv)], np.zeros(y.size), K)
            value, error = evaluate_network(path, x[None])
            assert (np.abs(value[0] - y.reshape(-1)) <= error[0] + 1e-14).all()


def _dense_convolution(K: np.ndarray, x: np.ndarray, stride, dilation, padding, groups: int, mode: str) -> np.ndarray:
    padded = np.pad(x, ((0, 0), *padding), mode="wrap" if mode == "circular" else "constant")
    outputs, per_group, *taps = K.shape
    height, width = (
        (n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(padded.shape[1:], taps, stride, dilation, strict=True)
    )
    y = np.zeros((outputs, height, width))
    for o, i, j in np.ndindex(*y.shape):
        first = o // (outputs // groups) * per_group
        for c, a, b in np.ndindex(*K.shape[1:]):
            place = i * stride[0] + a * dilation[0], j * stride[1] + b * dilation[1]
            y[o, i, j] += K[o, c, a, b] * padded[first + c, *place]
    return y


def test_pools_are_means_of_their_windows(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    x = draw.normal(size=(2, 5, 6))
    pool = {"map": "average_pool", "image_shape": [2, 5, 6], "kernel_size": [2, 3], "stride": [2, 1], "padding": [1, 1]}
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1)))
    y = np.array(
        [[[padded[c, 2 * i : 2 * i + 2, j : j + 3].mean() for j in range(6)] for i in range(3)] for c in (0, 1)]
    )
    value, error = evaluate_network(written(tmp_path, [2, 5, 6], [affine(pool)], np.zeros(y.size)), x[None])
    assert (np.abs(value[0] - y.reshape(-1)) <= error[0] + 1e-14).all()
