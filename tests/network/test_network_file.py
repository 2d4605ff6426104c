"""Networks as files: every map and every graph comes back with its digest, and means the same to the checker."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from curvcert.activations import TANH, declare_activation, softplus, torch_softplus
from curvcert.checker import evaluate_network
from curvcert.errors import InvalidFile, UnsupportedActivation
from curvcert.network import Network
from curvcert.network.builder import start
from curvcert.network.network_file import KIND, VERSION, network_digest, save_network
from curvcert.network.network_reading import load_network
from curvcert.tensor_files import read_tensor_file, write_tensor_file
from tests.graph_families import GRAPHS, IDS, Graph, finished
from tests.operators.cases import CASES, F64, Case, randn
from tests.operators.cases import IDS as MAPS


def require_the_same(network: Network, path: Path) -> None:
    """Compare a network with what its file holds, as we read it and as the checker does."""
    again = load_network(save_network(network, path))
    x = randn(3, *network.in_shape, seed=5)
    assert network_digest(again) == network_digest(network)
    assert torch.equal(again(x), network(x))
    if "taps meet" in path.name:  # the one map that the checker does not cover
        return
    values, errors = evaluate_network(path, x.numpy())
    gap = (torch.from_numpy(values) - network(x).flatten(1)).abs()
    assert bool((gap <= torch.from_numpy(errors) + 1e-12 * (1 + network(x).flatten(1).abs())).all())


@pytest.mark.parametrize("case", CASES, ids=MAPS)
def test_every_map_survives_a_file(case: Case, tmp_path: Path) -> None:
    op = case.make()
    value = start(op.in_shape, torch.device("cpu")).activate(TANH, "tanh").linear(op, randn(*op.out_shape, seed=3))
    require_the_same(finished(value), tmp_path / case.name)


@pytest.mark.parametrize("graph", GRAPHS, ids=IDS)
def test_every_graph_survives_a_file(graph: Graph, tmp_path: Path) -> None:
    require_the_same(graph.network(), tmp_path / "net")


@pytest.mark.parametrize("activation", [softplus(2.0), torch_softplus(1.0, 20.0)], ids=["softplus", "torch softplus"])
def test_the_deviation_of_an_activation_survives_a_file(activation: Any, tmp_path: Path) -> None:
    network = finished(start((2,), torch.device("cpu")).activate(activation, "softplus"))
    again = load_network(save_network(network, tmp_path / "net"))
    assert again.nodes[1].activation.deviation == activation.deviation
    assert network_digest(again) == network_digest(network)


def test_a_declared_activation_is_not_in_a_file(tmp_path: Path) -> None:
    mine = declare_activation("mine", torch.tanh, lambda z: 1 - torch.tanh(z) ** 2, slope=(0.0, 1.0))
    network = finished(start((2,), torch.device("cpu")).activate(mine, "mine"))
    with pytest.raises(UnsupportedActivation, match="its formula is not in the file"):
        load_network(save_network(network, tmp_path / "net"))


def test_files_that_are_sealed_and_senseless_are_refused(tmp_path: Path) -> None:
    path = save_network(GRAPHS[0].network(), tmp_path / "net")
    header, arrays = read_tensor_file(path, KIND, VERSION)
    first = header["nodes"][0]
    for change in (
        {"in_shape": [0]}, {"in_shape": "wide"}, {"nodes": None}, {"nodes": [{"kind": "lambda"}]},
        {"nodes": [first | {"terms": []}]}, {"nodes": [first | {"offset": "t99"}]},
        {"nodes": [first | {"terms": [{"source": 5, "map": first["terms"][0]["map"]}]}]},
        {"nodes": [first | {"terms": [{"source": 0, "map": {"map": "magic"}}]}]},
        {"nodes": [{"kind": "elementwise", "source": 0, "activation": {"name": "tanh", "deviation": -1.0}}]},
    ):  # fmt: skip
        write_tensor_file(path, KIND, VERSION, header | change, arrays)
        with pytest.raises(InvalidFile):
            load_network(path)
    write_tensor_file(path, KIND, VERSION, header, arrays | {"t0": arrays["t0"] * float("nan")})
    with pytest.raises(InvalidFile, match="not finite"):
        load_network(path)


POOL = {"image_shape": [1, 4, 4], "stride": [1, 1]}
CONV = {"map": "conv", "weight": "t1", "stride": [1, 1], "dilation": [1, 1], "padding_mode": "zeros", "groups": 1}
WIDE = {"map": "zero", "in_shape": [4], "out_shape": [2**27]}
SCALED = {"map": "scaled", "factor": 0.3, "of": {"map": "identity", "in_shape": [4]}}
ASKING: dict[str, dict[str, Any]] = {
    "a window of billions": POOL | {"map": "average_pool", "kernel_size": [2**15, 2**15], "padding": [2**14, 2**14]},
    "padding by billions": CONV | {"image_shape": [1, 4, 4], "padding": [[2**27, 2**27], [2**27, 2**27]]},
    "an image of billions": CONV | {"image_shape": [1, 2**16, 2**16], "padding": [[0, 0], [0, 0]]},
    "a detour of billions": {
        "map": "product", "factors": [{"map": "zero", "in_shape": [2**27], "out_shape": [4]}, WIDE],
    },
    "a great number of maps": {"map": "sum", "terms": [SCALED] * 70_000},
    "steps without weights": {"map": "circuit", "steps": [[{"source": k, "map": SCALED}] for k in range(70_000)]},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKING)
def test_a_small_file_cannot_ask_for_much(name: str, tmp_path: Path) -> None:
    node = {"kind": "affine", "terms": [{"source": 0, "map": ASKING[name]}], "offset": "t0", "offset_error": None}
    arrays = {"t0": torch.zeros(4, dtype=F64).numpy(), "t1": torch.ones(1, 1, 1, 1, dtype=F64).numpy()}
    path = write_tensor_file(tmp_path / "net", KIND, VERSION, {"in_shape": [4], "nodes": [node]}, arrays)
    tracemalloc.start()
    with pytest.raises(InvalidFile, match="asks for more"):
        load_network(path)
    assert tracemalloc.get_traced_memory()[1] < 2**28
    tracemalloc.stop()


@pytest.mark.parametrize("stride", [[1, 1], [0, 1]])
def test_a_pool_of_a_small_file_cannot_ask_for_much(stride: list[int], tmp_path: Path) -> None:
    pool = {"kind": "max_pool", "source": 0, "image_shape": [1, 4, 4], "kernel_size": [2**15, 2**15]}
    pool |= {"stride": stride, "padding": [2**15, 2**15]}
    arrays = {"t0": torch.zeros(4, dtype=F64).numpy()}
    path = write_tensor_file(tmp_path / "net", KIND, VERSION, {"in_shape": [1, 4, 4], "nodes": [pool]}, arrays)
    with pytest.raises(InvalidFile, match=r"asks for more|zero"):
        load_network(path)


@pytest.mark.parametrize("name", ["t0", "spare"])
def test_weights_are_float64(name: str, tmp_path: Path) -> None:
    path = save_network(GRAPHS[0].network(), tmp_path / "net")
    header, arrays = read_tensor_file(path, KIND, VERSION)
    write_tensor_file(path, KIND, VERSION, header, arrays | {name: torch.zeros(10, dtype=torch.uint8).numpy()})
    with pytest.raises(InvalidFile, match="not float64"):
        load_network(path)


def test_a_header_of_very_many_values_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    header = {"in_shape": [4], "nodes": [[]] * 2**20}
    path = write_tensor_file(tmp_path / "net", KIND, VERSION, header, {})
    with pytest.raises(InvalidFile, match="values, the limit is"):
        load_network(path)


SLICE = {"map": "slice", "in_shape": [4], "out_shape": [2], "starts": [1], "steps": [1]}
FLIP = {"map": "flip", "shape": [4], "axes": [0]}


@pytest.mark.parametrize("entry", [
    SLICE | {"starts": [3]}, SLICE | {"starts": [-1]}, SLICE | {"starts": None}, SLICE | {"steps": [0]},
    SLICE | {"steps": [1, 1]}, SLICE | {"out_shape": [5]}, FLIP | {"axes": [1]}, FLIP | {"axes": 0},
    FLIP | {"shape": []},
], ids=str)  # fmt: skip
def test_selections_that_do_not_fit_are_refused_by_both_readers(entry: dict[str, Any], tmp_path: Path) -> None:
    header = {"in_shape": [4], "nodes": [{"kind": "affine", "terms": [{"source": 0, "map": entry}]}]}
    header["nodes"][0] |= {"offset": "t0", "offset_error": None}
    size = 4 if entry["map"] == "flip" else 2
    path = write_tensor_file(tmp_path / "net", KIND, VERSION, header, {"t0": torch.zeros(size, dtype=F64).numpy()})
    with pytest.raises(InvalidFile):
        load_network(path)
    with pytest.raises(InvalidFile):
        evaluate_network(path, torch.zeros(1, 4, dtype=F64).numpy())
