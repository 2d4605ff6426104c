"""What an ONNX file may not hold is refused by name; a damaged or hostile one ends in a named error, quickly."""

import random as python_random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

import curvcert
from curvcert.errors import CurvcertError, InvalidInput, SoundnessError, UnsupportedModule
from curvcert.network.onnx_file import imported
from curvcert.network.onnx_import import load_onnx
from curvcert.network.onnx_operators import OPERATORS
from tests.network.onnx_models import built, loaded, node, random, several

V, M = ["b", 4], ["b", 2, 6, 6]
INTS = lambda *numbers: np.array(numbers, dtype=np.int64)  # noqa: E731
STATISTICS = {"s": random(2), "o": random(2), "m": random(2), "v": abs(random(2))}


No, Bad = UnsupportedModule, InvalidInput

# name -> nodes, shape, constants, error, words
REFUSED = {
    "prelu by a value": ([node("PRelu", "x", "x")], V, {}, No, "PRelu"),
    "transposed conv with a shape": (
        [node("ConvTranspose", "x", "K", output_shape=[9, 9])], M, {"K": random(2, 1, 3, 3)}, No, "output_shape",
    ),
    "transposed conv for other channels": (
        [node("ConvTranspose", "x", "K")], M, {"K": random(3, 1, 3, 3)}, Bad, "3 channels",
    ),
    "transposed conv of billions": (
        [node("ConvTranspose", "x", "K", strides=[4096, 4096])], M, {"K": random(2, 1, 3, 3)}, Bad, "covers",
    ),
    "resize of the batch": ([node("Resize", "x", "", "s")], M, {"s": np.float32([2, 1, 1, 1])}, No, "batch"),
    "resize to a fixed batch": ([node("Resize", "x", "", "", "s")], M, {"s": INTS(2, 2, 8, 8)}, No, "batch"),
    "resize to billions": ([node("Resize", "x", "", "s")], M, {"s": np.float32([1, 1, 4096, 4096])}, Bad, "covers"),
    "sums over the batch": ([node("CumSum", "x", "a")], V, {"a": np.int64(0)}, No, "batch"),
    "blocks that do not fit": ([node("DepthToSpace", "x", blocksize=3)], M, {}, Bad, "do not fit"),
    "concatenation of samples": ([node("Concat", "x", "x", axis=0)], V, {}, No, "batch"),
    "concatenation with a constant": ([node("Concat", "x", "c", axis=1)], V, {"c": random(1, 4)}, Bad, "Concat"),
    "gemm over the batch": ([node("Gemm", "x", "W", transA=1)], ["b", 4], {"W": random(4, 3)}, Bad, "features"),
    "clip by a value": ([node("Clip", "x", "x")], V, {}, No, "one constant"),
    "a jump": ([node("Floor", "x")], V, {}, No, "jumps"),
    "an unknown operator": ([node("Det", "x")], ["b", 3, 3], {}, No, "Det_y"),
    "the largest entry's number": ([node("ArgMax", "x", axis=1)], V, {}, No, "ArgMax"),
    "mask of values": (
        [node("Greater", "x", "c", to="g"), node("Where", "g", "x", "d")], V,
        {"c": random(1), "d": np.float32(0)}, No, "gt",
    ),
    "exponent of a value": ([node("Pow", "x", "x")], V, {}, No, "exponent"),
    "lstm with peepholes": (
        [several("LSTM", ["y"], "x", "W", "R", "", "", "", "", "P", hidden_size=1)], ["b", 2, 4],
        {"W": random(1, 4, 4), "R": random(1, 4, 1), "P": random(1, 3)}, No, "peepholes",
    ),
    "product of large matrices": (
        [node("Transpose", "x", perm=[0, 2, 1], to="t"), node("MatMul", "x", "t")], ["b", 3000, 2], {}, Bad, "covers",
    ),
    "concatenation that does not fit": (
        [node("Unsqueeze", "x", "a", to="u"), node("Concat", "x", "u", axis=1)], V, {"a": INTS(1)}, No, "joined",
    ),
    "slice of the batch": ([node("Slice", "x", "a", "b")], V, {"a": INTS(0), "b": INTS(1)}, No, "batch"),
    "empty slice": ([node("Slice", "x", "b", "a", "b")], V, {"a": INTS(0), "b": INTS(1)}, No, "depend"),
    "a slice that moves": ([node("Slice", "x", "x", "x")], V, {}, No, "Slice_y"),
    "split that does not fit": (
        [several("Split", ["y", "z"], "x", "s", axis=1)], V, {"s": INTS(1, 1)}, Bad, "do not make up",
    ),
    "split into too many": ([several("Split", ["y", "z", "u"], "x", axis=1)], V, {}, Bad, "3 parts"),
    "split of the batch": ([several("Split", ["y", "z"], "x")], V, {}, No, "batch"),
    "gather beyond the end": ([node("Gather", "x", "i", axis=1)], V, {"i": INTS(4)}, Bad, "choice of entries"),
    "gather of one sample": ([node("Gather", "x", "i", axis=0)], V, {"i": np.int64(0)}, No, "batch"),
    "gather by a value": ([node("Gather", "x", "x", axis=1)], V, {}, No, "choice of entries"),
    "transpose of the batch": ([node("Transpose", "x", perm=[1, 0])], V, {}, No, "batch"),
    "transpose by default": ([node("Transpose", "x")], V, {}, No, "batch"),
    "transpose twice the same": ([node("Transpose", "x", perm=[0, 0])], V, {}, Bad, "order"),
    "flatten everything": ([node("Flatten", "x", axis=0)], V, {}, No, "batch"),
    "flatten into the batch": ([node("Flatten", "x", axis=2)], M, {}, No, "batch"),
    "reshape mixes samples": ([node("Reshape", "x", "r")], V, {"r": INTS(-1, 2)}, No, "batch"),
    "reshape with a batch of its own": ([node("Reshape", "x", "r")], V, {"r": INTS(1, -1)}, No, "batch"),
    "reshape loses the batch": ([node("Reshape", "x", "r")], V, {"r": INTS(-1)}, No, "batch"),
    "reshape that does not fit": ([node("Reshape", "x", "r")], V, {"r": INTS(0, 3)}, Bad, "Reshape_y"),
    "shape arithmetic on the batch": (
        [node("Shape", "x", to="n"), node("Mul", "n", "n", to="m"), node("Reshape", "x", "m")],
        V, {}, No, "size of the batch",
    ),
    "squeeze of the batch": ([node("Squeeze", "x", "a")], V, {"a": INTS(0)}, No, "batch"),
    "squeeze of whatever": ([node("Squeeze", "x")], V, {}, No, "axes"),
    "mean over samples": ([node("ReduceMean", "x", axes=[0])], M, {}, No, "batch"),
    "mean over everything": ([node("ReduceMean", "x")], M, {}, No, "batch"),
    "gemm, weight first": ([node("Gemm", "W", "x", transB=1)], V, {"W": random(3, 4)}, No, "batch"),
    "gemm that does not fit": ([node("Gemm", "x", "W")], V, {"W": random(5, 3)}, Bad, "5 features"),
    "gemm with a vector": ([node("Gemm", "x", "W")], V, {"W": random(4)}, Bad, "2 dimensions"),
    "matmul over the batch": ([node("MatMul", "W", "x")], V, {"W": random(3, 4)}, Bad, "features"),
    "NaN": ([node("Gemm", "x", "W.0")], V, {"W.0": random(4, 3) * np.float32("nan")}, Bad, "W.0"),
    "infinite bias": ([node("Add", "x", "c")], V, {"c": np.float32("inf")}, Bad, "'c'"),
    "division by zero": ([node("Div", "x", "c")], V, {"c": np.float32(0)}, Bad, "zero"),
    "a constant for each sample": ([node("Add", "x", "c")], [3, 4], {"c": random(3, 4)}, No, "sample"),
    "conv of too large a kernel": ([node("Conv", "x", "K")], M, {"K": random(1, 2, 7, 7)}, Bad, "fit"),
    "conv for other channels": ([node("Conv", "x", "K")], M, {"K": random(1, 3, 3, 3)}, Bad, "Conv_y"),
    "conv, negative pads": ([node("Conv", "x", "K", pads=[-1, 0, 0, 0])], M, {"K": random(1, 2, 3, 3)}, No, "pads"),
    "conv, huge pads": (
        [node("Conv", "x", "K", pads=[2**23] * 4)], M, {"K": random(1, 2, 3, 3)}, Bad, "covers",
    ),
    "conv, same, stride over the window": (
        [node("Conv", "x", "K", auto_pad="SAME_UPPER", strides=[3, 1])], M, {"K": random(1, 2, 1, 3)}, No, "stride",
    ),
    "a flag that is none": ([node("ReduceMean", "x", axes=[2, 3], keepdims=2)], M, {}, Bad, "keepdims"),
    "conv, stride 0": ([node("Conv", "x", "K", strides=[0, 1])], M, {"K": random(1, 2, 3, 3)}, Bad, "strides"),
    "max pooling, dilated": ([node("MaxPool", "x", kernel_shape=[2, 2], dilations=[2, 2])], M, {}, No, "dila"),
    "padding by ones": ([node("Pad", "x", "p", "v")], M, {"p": INTS(*[1] * 8), "v": np.float32(1)}, No, "batch"),
    "padded batch": ([node("Pad", "x", "p")], M, {"p": INTS(1, 0, 0, 0, 0, 0, 0, 0)}, No, "batch"),
    "padding by billions": ([node("Pad", "x", "p")], M, {"p": INTS(0, 0, 0, 2**40, 0, 0, 0, 0)}, Bad, "covers"),
    "cropping everything": ([node("Pad", "x", "p")], M, {"p": INTS(0, 0, -4, 0, 0, 0, -3, 0)}, Bad, "nothing is left"),
    "dropout in training": (
        [node("Dropout", "x", "r", "t")], V, {"r": np.float32(0.5), "t": np.array(True)}, No, "eval",
    ),
    "dropout's mask": ([several("Dropout", ["d", "y"], "x")], V, {}, No, "further output"),
    "batch norm in training": (
        [node("BatchNormalization", "x", "s", "o", "m", "v", training_mode=1)], M, STATISTICS, No, "eval",
    ),
    "batch norm of other channels": (
        [node("BatchNormalization", "x", "s", "o", "m", "v")], ["b", 3], STATISTICS, Bad, "channels",
    ),
    "cast": ([several("Cast", ["y"], "x", to=TensorProto.DOUBLE)], V, {}, No, "Cast_y"),
    "selu of one's own": ([node("Selu", "x", alpha=-1.0)], V, {}, Bad, "positive alpha"),
    "old opset": ([node("Tanh", "x")], V, {}, No, "opset"),
    "opset of the future": ([node("Tanh", "x")], V, {}, No, "opset"),
    "open size": ([node("Tanh", "x")], ["b", "n"], {}, Bad, "input_shape"),
    "no batch": ([node("Tanh", "x")], [4], {}, Bad, "batch"),
    "an input of billions": ([node("Tanh", "x")], ["b", 2**40, 2**20], {}, Bad, "covers"),
    "a batch of billions": ([node("Tanh", "x")], [2**40, 4], {}, Bad, "covers"),
    "missing initialiser": ([node("Gemm", "x", "W")], V, {}, Bad, "missing"),
    "cycle": ([node("Add", "x", "b", to="a"), node("Tanh", "a", to="b"), node("Tanh", "b")], V, {}, Bad, "cycle"),
    "one name twice": ([node("Tanh", "x"), node("Tanh", "x")], V, {}, Bad, "taken"),
    "constant output": ([node("Tanh", "x", to="z"), node("Neg", "c")], V, {"c": random(4)}, No, "depend"),
    "control flow": (
        [node("If", "x", then_branch=helper.make_graph([], "g", [], []))], V, {}, No, "If_y",
    ),
    "another domain": ([node("Gelu", "x", domain="com.microsoft")], V, {}, No, "com.microsoft"),
    "attribute of another type": ([node("Flatten", "x", axis=1.5)], V, {}, Bad, "axis"),
    "integer weights": ([node("Exp", "W", to="E"), node("Add", "x", "E")], V, {"W": INTS(1)}, Bad, "onnxruntime"),
    "empty weights": ([node("Gemm", "x", "W")], V, {"W": np.zeros((4, 0), np.float32)}, Bad, "empty"),
    "quantised weights": ([node("Add", "x", "W")], V, {"W": np.zeros(4, np.uint8)}, No, "element type"),
}  # fmt: skip
OPSETS = {
    "mean over samples": 13,
    "mean over everything": 13,
    "a flag that is none": 13,
    "old opset": 6,
    "opset of the future": 999,
}


def peak_of(work: Callable[[], object]) -> int:
    """Return how many bytes some work takes at its peak, beside what the process held before."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the system does not tell the peak of a process")
    work()  # once before, so that what the libraries take for themselves is there
    with Path("/proc/self/clear_refs").open("w") as file:
        file.write("5")
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, tmp_path) -> None:
    nodes, shape, constants, error, words = REFUSED[name]
    with pytest.raises(error) as caught:
        loaded(built(nodes, shape, constants, OPSETS.get(name, 17)), tmp_path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_input_and_one_output(tmp_path) -> None:
    model = built([node("Tanh", "x"), node("Sin", "x", to="z")], V)
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    with pytest.raises(UnsupportedModule, match="one output"):
        loaded(model, tmp_path)
    model = built([node("Add", "x", "z")], V)
    model.graph.input.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, V))
    with pytest.raises(UnsupportedModule, match="one input"):
        loaded(model, tmp_path)


def test_input_shape_must_fit(tmp_path) -> None:
    model = built([node("Tanh", "x")], ["b", 4])
    for shape in ((5,), (4, 1), (0,), ("4",)):
        with pytest.raises(InvalidInput, match="input_shape"):
            loaded(model, tmp_path, input_shape=shape)


def test_integer_inputs(tmp_path) -> None:
    model = built([node("Tanh", "x")], V)
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    with pytest.raises(UnsupportedModule, match="float"):
        loaded(model, tmp_path)


class TestFiles:
    def test_no_file(self, tmp_path) -> None:
        for path in (tmp_path / "missing.onnx", tmp_path):
            with pytest.raises(InvalidInput, match="no such file"):
                load_onnx(path)

    @pytest.mark.parametrize("data", [b"", b"not a model at all", bytes(range(256)) * 20, b"\x00" * 100])
    def test_no_model(self, data: bytes, tmp_path) -> None:
        (tmp_path / "net.onnx").write_bytes(data)
        with pytest.raises(InvalidInput, match=r"net\.onnx"):
            load_onnx(tmp_path / "net.onnx")

    def test_more_numbers_declared_than_there(self, tmp_path) -> None:
        model = built([node("Gemm", "x", "W")], V, {"W": random(4, 3)})
        for dims in ((2**40, 2**40), (4, 4), (-1, 3)):
            model.graph.initializer[0].dims[:] = dims
            with pytest.raises(InvalidInput, match="'W'"):
                loaded(model, tmp_path)

    @pytest.mark.parametrize(
        ("entries", "words"),
        [
            ({"location": "../w.bin"}, "outside"),
            ({"location": "/etc/hostname"}, "outside"),
            ({"location": "link/w.bin"}, "outside"),
            ({"location": ""}, "outside"),
            ({"location": "none.bin"}, "missing"),
            ({"location": "w\0.bin"}, "names no file"),
            ({"location": "w" * 5000}, "names no file"),
            ({"location": "loop"}, "names no file|missing"),
            ({"location": "w.bin", "offset": "5"}, "numbers"),
            ({"location": "w.bin", "offset": "0", "length": str(2**50)}, "damaged"),
            ({"location": "w.bin", "offset": "-4"}, "damaged"),
            ({"location": "w.bin", "offset": "x"}, "no number"),
        ],
    )
    def test_weights_elsewhere(self, entries: dict[str, str], words: str, tmp_path) -> None:
        folder = tmp_path / "model"
        folder.mkdir()
        for place in (tmp_path, folder):
            (place / "w.bin").write_bytes(random(4, 3).tobytes())
        (folder / "link").symlink_to(tmp_path)
        (folder / "loop").symlink_to(folder / "loop")
        model = built([node("Gemm", "x", "W")], V, {"W": random(4, 3)})
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)
        with pytest.raises(InvalidInput, match=words):
            loaded(model, folder)

    def test_a_constant_node_elsewhere(self, tmp_path) -> None:
        (tmp_path / "w.bin").write_bytes(random(4).tobytes())
        tensor = TensorProto(data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value="w.bin")
        with pytest.raises(UnsupportedModule, match="another file"):
            loaded(built([node("Constant", to="c", value=tensor), node("Add", "x", "c")], V), tmp_path)

    def test_growth_is_bounded(self, tmp_path) -> None:
        start = time.perf_counter()
        doubled = [node("Add", f"v{k}", f"v{k}", to=f"v{k + 1}") for k in range(60)]
        network = loaded(built([node("Identity", "x", to="v0"), *doubled, node("Tanh", "v60")], V), tmp_path)
        assert len(network.nodes) < 70
        added = [node("Add", f"v{k}", f"v{k - 1}", to=f"v{k + 1}") for k in range(1, 60)]
        ends = [node("Identity", "x", to="v0"), node("Neg", "x", to="v1")]
        network = loaded(built([*ends, *added, node("Tanh", "v60")], V), tmp_path)
        assert len(network.nodes) < 70 and not network.is_chain  # as a block, it would be a sum of 10^12 maps
        assert float(curvcert.lipschitz(network)) == pytest.approx(5.91287e11, rel=1e-5)
        joined = [node("Concat", f"c{k}", f"c{k}", to=f"c{k + 1}", axis=0) for k in range(60)]
        model = built([*joined, node("Add", "x", "c60")], V, {"c0": random(4)})
        with pytest.raises(InvalidInput, match="covers"):
            loaded(model, tmp_path)
        model = built(
            [node("Add", "r", "c", to="m"), node("Add", "x", "m")], V, {"r": random(1, 5000), "c": random(5000, 1)}
        )
        with pytest.raises(InvalidInput, match="covers"):
            loaded(model, tmp_path)
        assert time.perf_counter() - start < 10

    def test_what_the_output_does_not_need_is_not_computed(self, tmp_path) -> None:
        model = built(
            [
                node("ConstantOfShape", "s", to="dead"),
                node("Add", "dead", "dead", to="more"),
                node("If", "c", to="branch", then_branch=helper.make_graph([], "g", [], [])),
                node("Tanh", "x"),
            ],
            V,
            {"s": INTS(20_000, 20_000), "c": np.array(True), "unused": random(3)},
        )
        assert peak_of(lambda: loaded(model, tmp_path)) < 2**27
        assert len(loaded(model, tmp_path).nodes) == 2

    def test_small_files_cannot_ask_for_much(self, tmp_path) -> None:
        side = 2**12
        fill = [node("ConstantOfShape", "s", to="W")]
        layers = [node("MatMul", f"v{k}", "W", to=f"v{k + 1}") for k in range(40)]
        chain = [node("Identity", "x", to="v0"), *fill, *layers, node("Tanh", "v40")]
        asking = {
            "weights": built(chain, ["b", side], {"s": INTS(side, side)}),
            "constants": built(
                [*fill, *(node("Neg", "W" if k == 0 else f"c{k}", to=f"c{k + 1}") for k in range(40)),
                 node("MatMul", "x", "c40")],
                ["b", side], {"s": INTS(side, side)},
            ),
            "values": built(
                [node("Identity", "x", to="v0"), *(node("Add", f"v{k}", "c", to=f"v{k + 1}") for k in range(40)),
                 node("Tanh", "v40")],
                ["b", 7_000_000], {"c": np.float32(1)},
            ),
        }  # fmt: skip
        for model in asking.values():
            assert len(model.SerializeToString()) < 5000

            def refused(model=model) -> None:
                with pytest.raises(InvalidInput, match="for a file of this size"):
                    loaded(model, tmp_path)

            assert peak_of(refused) < 2**29

    def test_an_operator_defined_anew_is_refused(self, tmp_path) -> None:
        model = built([node("Tanh", "x")], V)
        own = helper.make_function("", "Tanh", ["a"], ["b"], [node("Neg", "a", to="b")], model.opset_import)
        model.functions.append(own)
        with pytest.raises(UnsupportedModule, match="defines the operator 'Tanh' anew"):
            loaded(model, tmp_path)

    def test_nested_powers_are_bounded(self, tmp_path) -> None:
        powers = [node("Mul", f"v{k}", f"v{k}", to=f"v{k + 1}") for k in range(200)]
        model = built([node("Add", "x", "c", to="v0"), *powers, node("Tanh", "v200")], V, {"c": np.float32(1)})
        start = time.perf_counter()
        assert len(loaded(model, tmp_path).nodes) < 210
        assert time.perf_counter() - start < 5

    def test_mutations_end_in_a_named_error_or_a_network(self, tmp_path) -> None:
        nodes = [
            node("Conv", "x", "K", "c", pads=[1, 0, 1, 2], strides=[1, 2], to="z"),
            node("Sigmoid", "z", to="s"),
            node("Mul", "z", "s", to="h"),
            node("AveragePool", "h", kernel_shape=[2, 2], to="p"),
            node("Reshape", "p", "r", to="f"),
            node("Gemm", "f", "W", alpha=0.5),
        ]
        constants = {"K": random(1, 2, 3, 3), "c": random(1), "r": INTS(0, -1), "W": random(10, 2)}
        model = built(nodes, M, constants)
        loaded(model, tmp_path)
        data = model.SerializeToString()
        generator = python_random.Random(0)
        path, outcomes = tmp_path / "net.onnx", {True: 0, False: 0}
        start = time.perf_counter()
        for trial in range(300):
            damaged = bytearray(data)
            for _ in range(generator.randint(1, 4)):
                damaged[generator.randrange(len(damaged))] = generator.randrange(256)
            cut = len(damaged) if trial % 4 else generator.randrange(1, len(damaged))
            path.write_bytes(damaged[:cut])
            try:
                load_onnx(path)
                outcomes[True] += 1
            except CurvcertError as error:
                assert str(error)
                outcomes[False] += 1
        assert min(outcomes.values()) > 10
        assert time.perf_counter() - start < 30


def test_a_wrong_rule_is_found_out(tmp_path, monkeypatch) -> None:
    model = built([node("Flatten", "x", to="f"), node("Gemm", "f", "W")], M, {"W": random(72, 3)})

    def off(given) -> torch.Tensor:
        return gemm(given) + torch.full((3,), 1e-3, dtype=torch.float64)

    gemm = OPERATORS["Gemm"]
    loaded(model, tmp_path)
    monkeypatch.setitem(OPERATORS, "Gemm", off)
    with pytest.raises(SoundnessError, match="onnxruntime"):
        loaded(model, tmp_path)


def test_the_extra_is_named_where_it_is_missing(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(CurvcertError, match=r"pip install 'curvcert\[onnx\]'"):
        imported("onnxruntime")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(CurvcertError, match=r"pip install 'curvcert\[onnx\]'"):
        load_onnx(tmp_path / "net.onnx")


def test_one_gelu_is_not_the_other(tmp_path, monkeypatch) -> None:
    model = built([node("Gelu", "x")], V, opset=20)
    loaded(model, tmp_path)
    monkeypatch.setitem(OPERATORS, "Gelu", lambda given: torch.nn.functional.gelu(given.tensor(), approximate="tanh"))
    with pytest.raises(SoundnessError, match="more than rounding explains"):
        loaded(model, tmp_path)


def test_torch_is_left_alone(tmp_path) -> None:
    state = torch.random.get_rng_state()
    loaded(built([node("Tanh", "x")], V), tmp_path)
    assert torch.equal(state, torch.random.get_rng_state())
