"""Operators of hand-made ONNX files mean what onnxruntime computes."""

import math

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import curvcert
from curvcert.errors import InvalidInput, UnsupportedActivation, UnsupportedModule
from curvcert.network import Block
from curvcert.network.nodes import ElementwiseNode
from curvcert.network.onnx_import import load_onnx
from curvcert.operators import Conv2d
from tests.network.onnx_models import agree, built, loaded, node, random, several

W, K, C = random(4, 3), random(3, 2, 3, 3), random(3, seed=1)
V, M, ROWS = ["b", 4], ["b", 2, 7, 6], ["b", 5, 4]
STATISTICS = {"s": random(2), "o": random(2, seed=1), "m": random(2, seed=2), "v": abs(random(2, seed=3)) + 0.1}
INTS = lambda *numbers: np.array(numbers, dtype=np.int64)  # noqa: E731

# name -> nodes, shape of the input, constants, opset
MODELS = {
    "gemm": ([node("Gemm", "x", "W", "c")], V, {"W": W, "c": C}, 17),
    "gemm without bias": ([node("Gemm", "x", "W")], V, {"W": W}, 13),
    "gemm with everything": (
        [node("Gemm", "x", "W", "c", alpha=0.3, beta=-1.7, transB=1)], V, {"W": W.T.copy(), "c": C[None]}, 9,
    ),
    "gemm with one number for a bias": ([node("Gemm", "x", "W", "c")], V, {"W": W, "c": C[:1]}, 17),
    "matmul and add": (
        [node("MatMul", "x", "W", to="z"), node("Add", "c", "z")], V, {"W": W, "c": C}, 9,
    ),
    "matmul on rows": ([node("MatMul", "x", "W", to="z"), node("Tanh", "z")], ROWS, {"W": W}, 17),
    "matmul on one row": ([node("MatMul", "x", "W", to="z"), node("Add", "z", "c")], ["b", 1, 4], {"W": W, "c": C}, 17),
    "matmul on images": ([node("MatMul", "x", "W")], ["b", 2, 5, 4], {"W": W}, 17),
    "matmul from the left": ([node("MatMul", "A", "x")], ROWS, {"A": random(2, 5)}, 17),
    "matmul from the left on columns": ([node("MatMul", "A", "x")], ["b", 5, 1], {"A": random(2, 5)}, 17),
    "conv": ([node("Conv", "x", "K", "c", pads=[1, 1, 1, 1])], M, {"K": K, "c": C}, 9),
    "conv, uneven pads": ([node("Conv", "x", "K", pads=[0, 2, 1, 0], strides=[2, 1])], M, {"K": K}, 17),
    "conv, dilated": ([node("Conv", "x", "K", dilations=[2, 1], strides=[1, 3], pads=[1, 0, 2, 1])], M, {"K": K}, 17),
    "conv, grouped": ([node("Conv", "x", "K", "c", group=2)], M, {"K": random(4, 1, 2, 3), "c": random(4)}, 17),
    "conv, same upper": ([node("Conv", "x", "K", auto_pad="SAME_UPPER", strides=[2, 3])],
        M, {"K": random(3, 2, 4, 2)}, 17),
    "conv, same lower": ([node("Conv", "x", "K", auto_pad="SAME_LOWER", strides=[2, 1])],
        M, {"K": random(3, 2, 4, 2)}, 17),
    "conv, valid": ([node("Conv", "x", "K", auto_pad="VALID")], M, {"K": K}, 11),
    "pad before conv": (
        [node("Pad", "x", "p", to="z"), node("Conv", "z", "K", pads=[1, 0, 0, 0])],
        M, {"K": K, "p": INTS(0, 0, 1, 0, 0, 0, 2, 1)}, 17,
    ),
    "pad by attribute": ([node("Pad", "x", pads=[0, 0, 1, 0, 0, 0, 2, 1])], M, {}, 9),
    "pad by axes": ([node("Pad", "x", "p", "", "a")], M, {"p": INTS(1, 2), "a": INTS(-1)}, 18),
    "pad channels, crop the height": (
        [node("Pad", "x", "p", to="z"), node("Tanh", "z")], M, {"p": INTS(0, 1, -1, 0, 0, 2, -2, 1)}, 17,
    ),
    "pad that two windows read": (
        [node("Pad", "x", "p", to="z"), node("Conv", "z", "K", to="a"), node("Conv", "z", "K", to="b"),
         node("Add", "a", "b")],
        M, {"K": K, "p": INTS(0, 0, 1, 0, 0, 0, 2, 1)}, 17,
    ),
    "pad, then tanh": (
        [node("Pad", "x", "p", "v", to="z"), node("Tanh", "z")],
        M, {"p": INTS(0, 0, 1, 0, 0, 0, 2, 1), "v": np.float32(0)}, 17,
    ),
    "pad before average pooling": (
        [node("Pad", "x", "p", to="z"), node("AveragePool", "z", kernel_shape=[3, 2], strides=[2, 2])],
        M, {"p": INTS(0, 0, 1, 0, 0, 0, 2, 1)}, 17,
    ),
    "wide pad before average pooling": (
        [node("Pad", "x", "p", to="z"), node("AveragePool", "z", kernel_shape=[3, 2])],
        M, {"p": INTS(0, 0, 2, 1, 0, 0, 2, 1)}, 17,
    ),
    "average pool": ([node("AveragePool", "x", kernel_shape=[2, 3], strides=[2, 1])], M, {}, 9),
    "average pool, border counts": (
        [node("AveragePool", "x", kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1)], M, {}, 17,
    ),
    "average pool, uneven border counts": (
        [node("AveragePool", "x", kernel_shape=[3, 3], pads=[1, 0, 0, 1], count_include_pad=1)], M, {}, 17,
    ),
    "average pool, border does not count": (
        [node("AveragePool", "x", kernel_shape=[3, 3], pads=[1, 0, 2, 1], strides=[2, 2])], M, {}, 17,
    ),
    "average pool, same": (
        [node("AveragePool", "x", kernel_shape=[2, 3], auto_pad="SAME_LOWER", strides=[2, 2])], M, {}, 17,
    ),
    "average pool, dilated": ([node("AveragePool", "x", kernel_shape=[2, 2], dilations=[2, 3])], M, {}, 19),
    "average pool, ceil without effect": (
        [node("AveragePool", "x", kernel_shape=[1, 2], strides=[2, 2], ceil_mode=1)], M, {}, 17,
    ),
    "global average pool": ([node("GlobalAveragePool", "x", to="z"), node("Flatten", "z")], M, {}, 9),
    "reduce mean by attribute": ([node("ReduceMean", "x", axes=[2, 3], keepdims=0)], M, {}, 13),
    "reduce mean by input": ([node("ReduceMean", "x", "a", keepdims=1)], M, {"a": INTS(-1, -2)}, 18),
    "reduce mean over width": ([node("ReduceMean", "x", "a", keepdims=0)], M, {"a": INTS(3)}, 18),
    "batch norm": (
        [node("BatchNormalization", "x", "s", "o", "m", "v", epsilon=0.1)], M, STATISTICS, 9,
    ),
    "batch norm of vectors": ([node("BatchNormalization", "x", "s", "o", "m", "v")], ["b", 2], STATISTICS, 15),
    "flatten": ([node("Flatten", "x", axis=-3)], M, {}, 13),
    "flatten behind a dimension of one": ([node("Flatten", "x", axis=2)], ["b", 1, 3], {}, 13),
    "reshape 0 -1": ([node("Reshape", "x", "r")], M, {"r": INTS(0, -1)}, 13),
    "reshape 0 0 -1": ([node("Reshape", "x", "r")], M, {"r": INTS(0, 0, -1)}, 13),
    "reshape -1": ([node("Reshape", "x", "r")], M, {"r": INTS(-1, 7, 12)}, 9),
    "transpose to the end": ([node("Transpose", "x", perm=[0, 2, 3, 1]), ], M, {}, 9),
    "transpose, then conv": (
        [node("Transpose", "x", perm=[0, 3, 1, 2], to="t"), node("Conv", "t", "K", to="z"), node("Tanh", "z", to="h"),
         node("Transpose", "h", perm=[0, 2, 3, 1], to="u"), node("Flatten", "u")],
        ["b", 5, 4, 2], {"K": K}, 17,
    ),
    "transpose of ones": ([node("Transpose", "x", perm=[0, 2, 1, 3])], ["b", 1, 3, 2], {}, 17),
    "concatenation with its activation": (
        [node("Tanh", "x", to="h"), node("Concat", "x", "h", "x", axis=-1)], M, {}, 13,
    ),
    "slice": ([node("Slice", "x", "a", "e", "d", "s", to="z"), node("Tanh", "z")],
        M, {"a": INTS(1, -1), "e": INTS(2**40, -9), "d": INTS(2, 3), "s": INTS(3, -2)}, 13),
    "slice by attributes": ([node("Slice", "x", starts=[0, 1], ends=[9, -1], axes=[1, -1])], M, {}, 9),
    "slice of the whole batch": (
        [node("Slice", "x", "a", "e")], V, {"a": INTS(0, 1), "e": INTS(2**31 - 1, 3)}, 17,
    ),
    "split": (
        [several("Split", ["a", "b"], "x", "s", axis=1), node("Tanh", "b", to="h"), node("Concat", "h", "a", axis=1)],
        ["b", 5], {"s": INTS(2, 3)}, 13,
    ),
    "split into equal parts": ([several("Split", ["a", "b"], "x", axis=3), node("Sub", "b", "a")], M, {}, 13),
    "split by attribute": ([several("Split", ["a", "y"], "x", axis=1, split=[3, 1])], V, {}, 9),
    "split by a number": ([several("Split", ["a", "y"], "x", axis=2, num_outputs=2)], M, {}, 18),
    "gather one": ([node("Gather", "x", "i", axis=2)], M, {"i": np.int64(-2)}, 13),
    "gather some": ([node("Gather", "x", "i", axis=3)], M, {"i": INTS(5, 3, 1)}, 13),
    "gather one, keeping the axis": ([node("Gather", "x", "i", axis=1)], V, {"i": INTS(-1)}, 13),
    "squeeze, unsqueeze": (
        [node("Unsqueeze", "x", "a", to="z"), node("Squeeze", "z", "b")],
        ["b", 2, 1, 3], {"a": INTS(1, -1), "b": INTS(3)}, 13,
    ),
    "squeeze, unsqueeze by attribute": (
        [node("Unsqueeze", "x", axes=[2], to="z"), node("Squeeze", "z", axes=[2])], ["b", 2], {}, 9,
    ),
    "normalisation": (
        [node("Sub", "x", "m", to="z"), node("Div", "z", "s")],
        M, {"m": random(1, 2, 1, 1), "s": random(2, 1, 1, seed=5)}, 17,
    ),
    "constants on the left": (
        [node("Sub", "c", "x", to="z"), node("Mul", "d", "z", to="u"), node("Neg", "u", to="t"), node("Tanh", "t")],
        V, {"c": np.float32(0.3), "d": random(4)}, 17,
    ),
    "a shape computed on the way": (
        [node("Shape", "x", to="n"), node("Gather", "n", "0", to="g"), node("Unsqueeze", "g", "z0", to="u"),
         node("Concat", "u", "r", to="t", axis=0), node("Reshape", "x", "t")],
        M, {"0": np.int64(0), "z0": INTS(0), "r": INTS(-1)}, 13,
    ),
    "a shape cut from a shape": (
        [node("Shape", "x", to="n"), node("Slice", "n", "a", "b", to="head"), node("Slice", "n", "b", "e", to="tail"),
         node("Gather", "tail", "i", to="h"), node("Gather", "tail", "j", to="w"), node("Mul", "h", "w", to="hw"),
         helper.make_node("Cast", ["hw"], ["hwi"], to=TensorProto.INT64),
         node("Concat", "head", "hwi", to="t", axis=0), node("Reshape", "x", "t")],
        M, {"a": INTS(0), "b": INTS(2), "e": INTS(9), "i": INTS(0), "j": INTS(1)}, 13,
    ),
    "shape with a start": (
        [node("Shape", "x", to="n", end=1), node("Concat", "n", "r", to="t", axis=0), node("Reshape", "x", "t")],
        M, {"r": INTS(84)}, 15,
    ),
    "weights rearranged on the way": (
        [node("Transpose", "W", to="T"), node("Identity", "T", to="I"), node("Mul", "I", "two", to="J"),
         node("MatMul", "x", "J")],
        V, {"W": W.T.copy(), "two": np.float32(2)}, 17,
    ),
    "constant nodes": (
        [node("Constant", to="c", value_float=0.5), node("Constant", to="r", value_ints=[0, 4]),
         node("Mul", "x", "c", to="z"), node("Reshape", "z", "r")], ["b", 2, 2], {}, 13,
    ),
    "dropout": ([node("Dropout", "x", ratio=0.3, to="z"), node("Tanh", "z")], V, {}, 10),
    "dropout with inputs": ([node("Dropout", "x", "r", "t")], V, {"r": np.float32(0.3), "t": np.array(False)}, 13),
    "residual": (
        [node("Gemm", "x", "W", to="z"), node("Tanh", "z", to="h"), node("Gemm", "h", "U", to="g"),
         node("Add", "x", "g")],
        V, {"W": W, "U": random(3, 4, seed=7)}, 17,
    ),
    "difference": ([node("Tanh", "x", to="h"), node("Sub", "h", "x")], V, {}, 17),
    "max pool": ([node("MaxPool", "x", kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 1, 0])], M, {}, 12),
    "clip": ([node("Clip", "x", "a", "b")], V, {"a": np.float32(-0.4), "b": np.float32(0.3)}, 17),
    "clip by attribute": ([node("Clip", "x", min=0.0, max=6.0)], V, {}, 9),
    "clip from below": ([node("Clip", "x", "a")], V, {"a": np.float32(0.3)}, 17),
    "clip from above": ([node("Clip", "x", "", "a")], V, {"a": np.float32(0.3)}, 17),
    "gather in no order": ([node("Gather", "x", "i", axis=1)], V, {"i": INTS(2, 0, -1, 2)}, 13),
    "conv of signals": ([node("Conv", "x", "K", "c", pads=[2, 1], strides=[2])], ["b", 2, 6],
        {"K": random(3, 2, 3), "c": C}, 17),
    "conv of signals, same": ([node("Conv", "x", "K", auto_pad="SAME_UPPER", group=2)], ["b", 2, 6],
        {"K": random(4, 1, 4)}, 17),
    "transposed conv": (
        [node("ConvTranspose", "x", "K", "c", pads=[1, 0, 0, 2], strides=[2, 3], output_padding=[1, 0])],
        M, {"K": random(2, 3, 3, 4), "c": C}, 17,
    ),
    "transposed conv of signals": (
        [node("ConvTranspose", "x", "K", dilations=[2], group=2)], ["b", 2, 6], {"K": random(2, 2, 3)}, 17,
    ),
    "average pool of signals": (
        [node("AveragePool", "x", kernel_shape=[3], pads=[1, 0], strides=[2])], ["b", 2, 7], {}, 17,
    ),
    "max pool of signals": ([node("MaxPool", "x", kernel_shape=[3], pads=[1, 1])], ["b", 2, 7], {}, 17),
    "mean over channels": ([node("ReduceMean", "x", axes=[1], keepdims=0)], M, {}, 13),
    "mean over channels and width": ([node("ReduceMean", "x", "a")], M, {"a": INTS(1, 3)}, 18),
    "sum": ([node("ReduceSum", "x", "a", keepdims=0)], M, {"a": INTS(2)}, 13),
    "sums so far": ([node("CumSum", "x", "a")], M, {"a": np.int64(-1)}, 14),
    "reflected padding": ([node("Pad", "x", "p", mode="reflect")], M, {"p": INTS(0, 0, 1, 2, 0, 0, 2, 1)}, 17),
    "padding by the edge": ([node("Pad", "x", "p", mode="edge")], M, {"p": INTS(0, 1, 0, 2, 0, 0, 2, 1)}, 17),
    "padding that wraps": ([node("Pad", "x", "p", mode="wrap")], M, {"p": INTS(0, 0, 1, 2, 0, 0, 2, 1)}, 19),
    "padding by a number": (
        [node("Pad", "x", "p", "v")], M, {"p": INTS(0, 0, 1, -1, 0, 0, 0, 1), "v": np.float32(0.7)}, 17,
    ),
    "resize": (
        [node("Resize", "x", "", "s", coordinate_transformation_mode="asymmetric", nearest_mode="floor")],
        M, {"s": np.float32([1, 1, 2, 3])}, 13,
    ),
    "resize to a size": (
        [node("Shape", "x", to="n", end=2), node("Concat", "n", "s", to="t", axis=0),
         node("Resize", "x", "", "", "t", mode="linear", coordinate_transformation_mode="pytorch_half_pixel")],
        M, {"s": INTS(7, 9)}, 15,
    ),
    "resize to corners": (
        [node("Shape", "x", to="n", end=2), node("Concat", "n", "s", to="t", axis=0),
         node("Resize", "x", "", "", "t", mode="linear", coordinate_transformation_mode="align_corners")],
        M, {"s": INTS(5, 3)}, 15,
    ),
    "depth to space": ([node("DepthToSpace", "x", blocksize=2)], ["b", 8, 2, 3], {}, 13),
    "depth to space by rows": ([node("DepthToSpace", "x", blocksize=2, mode="CRD")], ["b", 8, 2, 3], {}, 13),
    "space to depth": ([node("SpaceToDepth", "x", blocksize=2)], ["b", 2, 4, 6], {}, 13),
    "parametric relu": ([node("PRelu", "x", "s")], M, {"s": random(2, 1, 1)}, 16),
    "parametric relu of one slope": ([node("PRelu", "x", "s")], V, {"s": random(1)}, 16),
    "hard sigmoid": ([node("HardSigmoid", "x", alpha=0.3)], V, {}, 13),
    "hard swish": ([node("HardSwish", "x")], V, {}, 14),
    "abs": ([node("Abs", "x")], V, {}, 13),
    "cosine": ([node("Cos", "x")], V, {}, 13),
    "cast to itself": ([helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)], V, {}, 17),
    "softmax": ([node("Softmax", "x")], V, {}, 17),
    "softmax of an old opset": ([node("Softmax", "x", axis=1)], ["b", 2, 3], {}, 11),
    "softmax along channels": ([node("Softmax", "x", axis=1)], ["b", 2, 3], {}, 13),
    "log-softmax": ([node("LogSoftmax", "x", axis=-1)], V, {}, 13),
    "layer norm": ([node("LayerNormalization", "x", "s", "o", epsilon=0.1)],
        ["b", 3, 4], {"s": random(4), "o": random(4, seed=1)}, 17),
    "layer norm over two axes": ([node("LayerNormalization", "x", "s", axis=1)], ["b", 3, 4], {"s": random(3, 4)}, 17),
    "rms norm": ([node("RMSNormalization", "x", "s", epsilon=0.1)], ["b", 3, 4], {"s": random(4)}, 23),
    "group norm": ([node("GroupNormalization", "x", "s", "o", num_groups=2, epsilon=0.1)],
        ["b", 4, 3, 2], {"s": random(4), "o": random(4, seed=1)}, 21),
    "group norm by groups": ([node("GroupNormalization", "x", "s", "o", num_groups=2, epsilon=0.1)],
        ["b", 4, 3, 2], {"s": random(2), "o": random(2, seed=1)}, 18),
    "instance norm": ([node("InstanceNormalization", "x", "s", "o", epsilon=0.1)],
        M, {"s": random(2), "o": random(2, seed=1)}, 17),
    "gate": ([node("Tanh", "x", to="t"), node("Mul", "x", "t")], V, {}, 17),
    "swiglu": (
        [node("MatMul", "x", "W", to="a"), node("Sigmoid", "a", to="s"), node("Mul", "a", "s", to="g"),
         node("Mul", "x", "g")], V, {"W": random(4, 4)}, 17,
    ),
    "square": ([node("Mul", "x", "x")], V, {}, 17),
    "powers": ([node("Tanh", "x", to="t"), node("Add", "t", "2", to="u"), node("Pow", "u", "p")],
        V, {"2": np.float32(2), "p": np.float32(-1.5)}, 17),
    "quotient": ([node("Exp", "x", to="e"), node("Div", "c", "e")], V, {"c": random(4)}, 17),
    "exp, log, sqrt, reciprocal": (
        [node("Exp", "x", to="e"), node("Add", "e", "1", to="f"), node("Sqrt", "f", to="g"), node("Log", "g", to="h"),
         node("Add", "h", "1", to="i"), node("Reciprocal", "i")], V, {"1": np.float32(1)}, 17,
    ),
    "matmul of values": (
        [node("Transpose", "x", perm=[0, 2, 1], to="t"), node("MatMul", "x", "t", to="a"), node("Softmax", "a", to="s"),
         node("MatMul", "s", "x")], ["b", 3, 4], {}, 17,
    ),
    "einsum": ([node("Einsum", "x", "x", equation="bij,bkj->bik")], ["b", 3, 4], {}, 13),
    "einsum with a weight": ([node("Einsum", "x", "W", equation="bij, jk -> bik")], ["b", 3, 4], {"W": W}, 13),
    "attention": ([node("Attention", "x", "x", "x", q_num_heads=2, kv_num_heads=2)], ["b", 3, 4], {}, 23),
    "batch behind the sequence": (
        [node("Transpose", "x", perm=[1, 0, 2], to="t"), node("MatMul", "t", "W", to="u"), node("Tanh", "u", to="h"),
         node("Transpose", "h", perm=[1, 0, 2])], ROWS, {"W": W}, 17,
    ),
    **{
        f"{op}, {direction}": (
            [node("Transpose", "x", perm=[1, 0, 2], to="t"),
             several(op, ["h", "last"], "t", "W", "R", "B", hidden_size=2, direction=direction, **options),
             node("Transpose", "h", perm=[2, 0, 1, 3], to="u"), node("Flatten", "u", to="f"),
             node("Transpose", "last", perm=[1, 0, 2], to="v"), node("Flatten", "v", to="g"),
             node("Concat", "f", "g", axis=1)],
            ["b", 3, 4],
            {"W": random(d, 2 * n, 4), "R": random(d, 2 * n, 2, seed=1), "B": random(d, 4 * n, seed=2)}, 14,
        )
        for op, n, options in (("RNN", 1, {}), ("GRU", 3, {"linear_before_reset": 1}), ("LSTM", 4, {}))
        for direction, d in (("forward", 1), ("reverse", 1), ("bidirectional", 2))
    },
    "gru, the reset before": (
        [node("Transpose", "x", perm=[1, 0, 2], to="t"), several("GRU", ["", "h"], "t", "W", "R", "B", hidden_size=2),
         node("Squeeze", "h", "0")],
        ["b", 3, 4], {"W": random(1, 6, 4), "R": random(1, 6, 2), "B": random(1, 12), "0": INTS(0)}, 14,
    ),
    "where by a sign": (
        [node("Greater", "x", "0", to="g"), node("Mul", "x", "a", to="l"), node("Where", "g", "x", "l")],
        V, {"0": np.float32(0), "a": np.float32(0.1)}, 17,
    ),
    "where by a constant": ([node("Where", "m", "x", "c")], V, {"m": np.array([True, False, True, True]),
        "c": random(4)}, 17),
    "largest and least": ([node("Max", "x", "c", to="a"), node("Min", "a", "d")], V, {"c": C[:1], "d": random(4)}, 13),
    "largest along an axis": ([node("ReduceMax", "x", axes=[2])], ["b", 2, 3], {}, 13),
    "norms": ([node("ReduceL2", "x", axes=[2], to="a"), node("ReduceL1", "x", axes=[2], to="b"),
        node("Add", "a", "b")], ["b", 2, 3], {}, 13),
    "log of sums of exp": ([node("ReduceLogSumExp", "x", axes=[2])], ["b", 2, 3], {}, 13),
    "sum and mean of several": ([node("Sum", "x", "x", "c", to="a"), node("Mean", "a", "x")], V, {"c": random(4)}, 13),
    "conv of volumes": ([node("Conv", "x", "K", "c", pads=[1, 0, 1, 0, 1, 1])], ["b", 2, 3, 4, 3],
        {"K": random(3, 2, 2, 2, 2), "c": C}, 17),
    "transposed conv of volumes": ([node("ConvTranspose", "x", "K", strides=[2, 1, 1])], ["b", 2, 2, 3, 2],
        {"K": random(2, 2, 2, 2, 2)}, 17),
    "pooling with cut windows": ([node("AveragePool", "x", kernel_shape=[4, 4], strides=[4, 4], ceil_mode=1)],
        ["b", 2, 6, 6], {}, 19),
    "prelu along the width": ([node("PRelu", "x", "s")], M, {"s": random(6)}, 16),
    "a constant that enlarges": ([node("Add", "x", "c")], ["b", 1], {"c": random(1, 3)}, 17),
    "a constant for every sample": (
        [node("Shape", "x", to="n"), node("Slice", "n", "0", "1", to="b"), node("Concat", "b", "2", to="s", axis=0),
         node("Expand", "c", "s", to="d"), node("Concat", "d", "x", axis=1)],
        V, {"0": INTS(0), "1": INTS(1), "2": INTS(2), "c": random(1, 2)}, 17,
    ),
    "heads joined with the batch": (
        [node("Shape", "x", to="n"), node("Gather", "n", "0", to="b"), node("Mul", "b", "2", to="h"),
         node("Unsqueeze", "h", "a", to="hh"), node("Concat", "hh", "r", to="s", axis=0),
         node("Reshape", "x", "s", to="u"),
         node("Transpose", "u", perm=[0, 2, 1], to="t"), node("MatMul", "u", "t", to="v"),
         node("Unsqueeze", "b", "a", to="bb"),
         node("Concat", "bb", "q", to="z", axis=0), node("Reshape", "v", "z")],
        ["b", 2, 3, 4], {"0": np.int64(0), "2": np.int64(2), "a": INTS(0), "r": INTS(3, 4), "q": INTS(-1)}, 13,
    ),
    "sums from behind": ([node("CumSum", "x", "a", reverse=1, exclusive=1)], V, {"a": np.int64(1)}, 14),
    "resize by cubes": (
        [node("Resize", "x", "", "s", mode="cubic")], M, {"s": np.float32([1, 1, 2, 1.5])}, 13,
    ),
    "gather elements": ([node("GatherElements", "x", "i", axis=1)], [1, 4], {"i": np.array([[0, 3, 3]])}, 13),
    "gather by places": (
        [node("Transpose", "x", perm=[1, 2, 0], to="t"), node("GatherND", "t", "i", to="g"),
         node("Transpose", "g", perm=[1, 0])], ["b", 2, 3], {"i": np.array([[0, 2], [1, 1], [0, -1], [0, 2]])}, 13,
    ),
    "gather by a table": ([node("Gather", "x", "i", axis=1)], V, {"i": np.array([[0, 3], [1, 1]])}, 13),
    "tile, expand": ([node("Tile", "x", "t", to="a"), node("Unsqueeze", "a", "1", to="b"), node("Expand", "b", "e")],
        V, {"t": INTS(1, 2), "1": INTS(1), "e": INTS(3, 1)}, 13),
    "a triangle": ([node("Trilu", "x", upper=0)], ["b", 3, 3], {}, 14),
    "upsample": ([node("Upsample", "x", "s")], M, {"s": np.float32([1, 1, 2, 3])}, 9),
    "upsample by attribute": ([node("Upsample", "x", scales=[1.0, 1.0, 2.0, 3.0])], M, {}, 7),
    "local responses": ([node("LRN", "x", size=3)], ["b", 4, 2, 2], {}, 13),
    "shrink": ([node("Shrink", "x", bias=0.5)], V, {}, 13),
    "dead code": ([node("Exp", "x", to="unused"), node("Tanh", "x")], V, {}, 17),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_values_are_onnxruntimes(name: str, tmp_path) -> None:
    nodes, shape, constants, opset = MODELS[name]
    model = built(nodes, shape, constants, opset)
    agree(loaded(model, tmp_path), model, batch=3 if shape[0] == "b" else shape[0])


@pytest.mark.parametrize("opset", [7, 8, 9, 11, 13, 17, 18, 20, 21, 22, 24, 26])
def test_every_opset(opset: int, tmp_path) -> None:
    nodes = [
        node("Conv", "x", "K", "c", to="z"),
        node("Elu", "z", to="h"),
        node("GlobalAveragePool", "h", to="g"),
        node("Flatten", "g", to="f"),
        node("MatMul", "f", "W"),
    ]
    model = built(nodes, M, {"K": K, "c": C, "W": random(3, 2)}, opset)
    network = loaded(model, tmp_path)
    agree(network, model)
    assert len(network.blocks) == 1
    assert network.blocks[0].name == "Elu_h"


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("raw", [True, False])
def test_every_type_of_weights(dtype, raw: bool, tmp_path) -> None:
    array = random(4, 3).astype(dtype)
    model = built([node("Gemm", "x", "W", to="z"), node("Tanh", "z")], V, {"W": array}, dtype=dtype)
    if not raw:
        kind = model.graph.initializer[0].data_type
        typed = helper.make_tensor("W", kind, array.shape, array.flatten().tolist())
        assert not typed.raw_data
        model.graph.initializer[0].CopyFrom(typed)
    network = loaded(model, tmp_path)
    agree(network, model, dtype=torch.from_numpy(array).dtype)
    # The weights are the exact values.
    assert torch.equal(network.blocks[0].W.weight, torch.from_numpy(array.astype(np.float64)).T)


def test_a_fixed_batch(tmp_path) -> None:
    nodes = [node("Reshape", "x", "r", to="z"), node("Tanh", "z")]
    model = built(nodes, [2, 3, 2], {"r": INTS(2, 6)})
    network = loaded(model, tmp_path)
    agree(network, model, batch=2)
    assert network(torch.zeros(5, 3, 2)).shape == (5, 6)


def test_open_sizes_are_given(tmp_path) -> None:
    model = built([node("Conv", "x", "K")], ["b", 2, "h", None], {"K": K})
    agree(loaded(model, tmp_path, input_shape=(2, 5, 8)), model)


def test_padding_joins_the_convolution(tmp_path) -> None:
    nodes, shape, constants, _ = MODELS["pad before conv"]
    op = loaded(built(nodes, shape, constants), tmp_path).blocks[0].H
    assert isinstance(op, Conv2d)
    assert op.padding == ((2, 2), (0, 1))


def test_weights_in_a_file_of_their_own(tmp_path) -> None:
    model = built([node("Gemm", "x", "W")], V, {"W": W})
    path = tmp_path / "net.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    assert (tmp_path / "w.bin").stat().st_size == W.nbytes
    agree(load_onnx(path), built([node("Gemm", "x", "W")], V, {"W": W}))


# What each formula is, in the spellings of several exporters.
HALF, ROOT, ONE = np.float32(0.5), np.float32(np.sqrt(2)), np.float32(1)
FORMULAS = {
    "gelu, as torch writes it": (
        "gelu",
        [node("Div", "x", "r", to="a"), node("Erf", "a", to="b"), node("Add", "b", "1", to="c"),
         node("Mul", "x", "c", to="d"),
         node("Mul", "d", "h")],
        {"r": ROOT, "1": ONE, "h": HALF},
    ),
    "gelu, the half first": (
        "gelu",
        [node("Mul", "x", "r", to="a"), node("Erf", "a", to="b"), node("Add", "1", "b", to="c"),
         node("Mul", "h", "x", to="d"),
         node("Mul", "c", "d")],
        {"r": np.float32(np.sqrt(0.5)), "1": ONE, "h": HALF},
    ),
    "gelu by tanh": (
        "gelu_tanh",
        [node("Pow", "x", "3", to="a"), node("Mul", "a", "k", to="b"), node("Add", "x", "b", to="c"),
         node("Mul", "c", "r", to="d"),
         node("Tanh", "d", to="e"), node("Add", "e", "1", to="f"), node("Mul", "x", "h", to="g"),
         node("Mul", "g", "f")],
        {"3": np.float32(3), "k": np.float32(0.044715), "r": np.float32(np.sqrt(2 / np.pi)), "1": ONE, "h": HALF},
    ),
    "gelu by tanh, products for the power": (
        "gelu_tanh",
        [node("Mul", "x", "x", to="s"), node("Mul", "s", "x", to="a"), node("Mul", "a", "k", to="b"),
         node("Add", "x", "b", to="c"),
         node("Mul", "c", "r", to="d"), node("Tanh", "d", to="e"), node("Add", "e", "1", to="f"),
         node("Mul", "x", "f", to="g"),
         node("Mul", "g", "h")],
        {"k": np.float32(0.044715), "r": np.float32(np.sqrt(2 / np.pi)), "1": ONE, "h": HALF},
    ),
    "silu": ("silu", [node("Sigmoid", "x", to="a"), node("Mul", "x", "a")], {}),
    "quick gelu": (
        "silu",
        [node("Mul", "x", "c", to="a"), node("Sigmoid", "a", to="s"), node("Mul", "x", "s")],
        {"c": np.float32(1.702)},
    ),
    "gaussian": ("gaussian", [node("Mul", "x", "x", to="a"), node("Mul", "a", "c", to="b"), node("Exp", "b")],
    {"c": np.float32(-0.7)}),
    "logistic": (
        "sigmoid",
        [node("Neg", "x", to="a"), node("Exp", "a", to="b"), node("Add", "b", "1", to="d"), node("Reciprocal", "d")],
        {"1": ONE},
    ),
    "mish": ("mish", [node("Softplus", "x", to="a"), node("Tanh", "a", to="b"), node("Mul", "b", "x")], {}),
    "softsign": ("softsign", [node("Abs", "x", to="a"), node("Add", "a", "1", to="b"),
    node("Div", "x", "b")], {"1": ONE}),
    "isru": (
        "isru",
        [node("Mul", "x", "x", to="a"), node("Add", "a", "1", to="b"), node("Sqrt", "b", to="c"),
         node("Div", "x", "c")],
        {"1": ONE},
    ),
    "softplus with a threshold": (
        "softplus(2)",
        [node("Mul", "x", "2", to="a"), node("Softplus", "a", to="b"), node("Div", "b", "2", to="c"),
         node("Greater", "a", "t", to="g"),
         node("Where", "g", "x", "c")],
        {"2": np.float32(2), "t": np.float32(20)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("scaled", [False, True])
def test_formulas_written_out(name: str, scaled: bool, tmp_path) -> None:
    act, nodes, constants = FORMULAS[name]
    after = []
    for item in nodes:
        item = onnx.NodeProto.FromString(item.SerializeToString())
        item.input[:] = ["v" if name == "x" else name for name in item.input]
        after.append(item)
    before = node("Mul", "x", "three", to="v") if scaled else node("MatMul", "x", "W", to="v")
    model = built([before, *after], V, {**constants, "three": np.float32(3), "W": random(4, 4)})
    network = loaded(model, tmp_path)
    (block,) = (b for b in network.blocks if isinstance(b, Block))
    assert block.activation.name.startswith(act)
    agree(network, model)
    assert 0 < float(curvcert.curvature(network)) < 100


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_with_another_constant_are_refused_or_what_they_say(name: str, tmp_path) -> None:
    _, nodes, constants = FORMULAS[name]
    for key in constants.keys() - {"t", "2", "3"}:  # x^3.00003 is NaN below 0
        changed = {**constants, key: np.float32(constants[key] * 1.00001)}
        if key in "hc":  # a factor in front, or inside what any factor may stand
            model = built(nodes, V, changed)
            agree(loaded(model, tmp_path), model)
            continue
        # Another function than the table's: read as what it is, or refused.
        try:
            network = loaded(built(nodes, V, changed), tmp_path)
        except UnsupportedModule as error:
            assert "unknown" in str(error) or "no largest slope" in str(error)
            continue
        agree(network, built(nodes, V, changed))
        names = {found.activation.name for found in network.nodes if isinstance(found, ElementwiseNode)}
        assert not names & {"gelu", "gelu_tanh", "softsign", "isru"}


EDGE = 1 + 2.0**-21.3


@pytest.mark.parametrize("edge", [EDGE, 1 / EDGE])
def test_bounds_are_about_the_constants_that_the_file_has(edge: float, tmp_path) -> None:
    _, nodes, constants = FORMULAS["gelu, the half first"]
    nodes = [onnx.NodeProto.FromString(item.SerializeToString()) for item in nodes]
    for item in nodes:
        item.input[:] = ["v" if name == "x" else name for name in item.input]
    coefficient = np.float32(edge * np.sqrt(0.5))
    model = built(
        [node("MatMul", "x", "W", to="v"), *nodes], ["b", 1], {**constants, "r": coefficient, "W": ONE[None, None]}
    )
    network = loaded(model, tmp_path)
    s = float(coefficient) * np.sqrt(2)
    bend = s * 2 / np.sqrt(2 * np.pi)  # the second derivative of x Phi(sx) at 0
    assert bend <= float(curvcert.curvature(network)) <= bend * (1 + 1e-9)
    # The margin: at x the network's value is the file's, not that of GELU.
    x = torch.tensor([[1.4]], dtype=torch.float64)
    assert float(network(x)) == pytest.approx(1.4 * 0.5 * (1 + math.erf(float(coefficient) * 1.4)), rel=1e-14)


def test_selu_has_the_constants_of_the_file(tmp_path) -> None:
    steep = loaded(
        built(
            [node("MatMul", "x", "W", to="v"), node("Selu", "v", alpha=1.7, gamma=1.1)],
            ["b", 1],
            {"W": ONE[None, None]},
        ),
        tmp_path,
    )
    exact = float(np.float32(1.7)) * float(np.float32(1.1))
    assert exact <= float(curvcert.lipschitz(steep)) <= exact * (1 + 1e-9)


def test_a_softplus_with_another_gain_is_no_softplus(tmp_path) -> None:
    _, nodes, constants = FORMULAS["softplus with a threshold"]
    nodes = [onnx.NodeProto.FromString(item.SerializeToString()) for item in nodes]
    nodes[2].input[1] = "gain"
    with pytest.raises(UnsupportedModule, match="jumps"):
        loaded(built(nodes, V, {**constants, "gain": np.float32(np.nextafter(np.float32(2), np.float32(3)))}), tmp_path)


def test_softplus_with_a_low_threshold_is_refused(tmp_path) -> None:
    _, nodes, constants = FORMULAS["softplus with a threshold"]
    with pytest.raises(InvalidInput, match="jumps"):
        loaded(built(nodes, V, {**constants, "t": np.float32(5)}), tmp_path)


def test_kinks_have_no_curvature(tmp_path) -> None:
    network = loaded(built([node("Elu", "x", alpha=0.5)], V), tmp_path)
    assert 1.0 <= float(curvcert.lipschitz(network)) < 1.0 + 1e-9
    with pytest.raises(UnsupportedActivation, match="kink"):
        curvcert.curvature(network)


@pytest.mark.parametrize(
    ("op", "opset", "attributes"),
    [
        ("Tanh", 9, {}), ("Sigmoid", 9, {}), ("Softplus", 9, {}), ("Softsign", 9, {}), ("Erf", 9, {}), ("Sin", 9, {}),
        ("Atan", 9, {}), ("Relu", 9, {}), ("LeakyRelu", 9, {"alpha": 0.2}), ("LeakyRelu", 16, {}), ("Selu", 9, {}),
        ("Elu", 9, {}), ("Elu", 9, {"alpha": 2.0}), ("Celu", 12, {"alpha": 2.0}), ("Mish", 18, {}), ("Gelu", 20, {}),
        ("Gelu", 20, {"approximate": "tanh"}), ("Swish", 24, {}),
    ],
)  # fmt: skip
def test_activations(op: str, opset: int, attributes, tmp_path) -> None:
    model = built([node(op, "x", **attributes)], V, opset=opset)
    agree(loaded(model, tmp_path), model)


def test_a_formula_whose_part_is_used_again(tmp_path) -> None:
    nodes = [node("Sigmoid", "x", to="a"), node("Mul", "x", "a", to="s"), node("Add", "s", "a")]
    model = built(nodes, V)
    network = loaded(model, tmp_path)
    agree(network, model)
    names = {found.activation.name for found in network.nodes if isinstance(found, ElementwiseNode)}
    assert names == {"sigmoid", "silu"}


def test_bounds_hold_on_a_transposed_network(tmp_path) -> None:
    nodes, shape, constants, opset = MODELS["transpose, then conv"]
    network = loaded(built(nodes, shape, constants, opset), tmp_path)
    x = torch.randn(20, *network.in_shape, dtype=torch.float64)
    jacobians = network.jacobian(x).flatten(2)
    assert float(curvcert.lipschitz(network)) >= float(torch.linalg.matrix_norm(jacobians, 2).max())
    change = torch.linalg.matrix_norm(jacobians[1:] - jacobians[:-1], 2) / (x[1:] - x[:-1]).flatten(1).norm(dim=1)
    assert float(curvcert.curvature(network)) >= float(change.max())
    assert bool((curvcert.certify(network, x[:2], method="lipschitz").radius > 0).all())
