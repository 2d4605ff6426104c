"""Decide a property in VNN-LIB: does any grey level within 0.01 turn this digit into another one?

The file says what would violate it. On an ONNX file the same is: curvcert verify net.onnx spec.vnnlib
Run it: python examples/verify_property.py
"""

import tempfile
from pathlib import Path

import torch

import curvcert
from curvcert.data import load_demo_network, load_digits
from curvcert.properties import decide, load_vnnlib

net = curvcert.trace(load_demo_network(), torch.zeros(1, 1, 8, 8))
test = load_digits("test")
x, label = test.as_float64()[0].flatten(), int(test.labels[0])


def spec(eps: float) -> str:
    """Return the property of all inputs within eps of x, coordinate by coordinate."""
    lines = [f"(declare-const X_{k} Real)" for k in range(64)] + [f"(declare-const Y_{k} Real)" for k in range(10)]
    for k, value in enumerate(x.tolist()):
        lines += [f"(assert (<= X_{k} {value + eps:.9f}))", f"(assert (>= X_{k} {value - eps:.9f}))"]
    others = " ".join(f"(>= Y_{k} Y_{label})" for k in range(10) if k != label)
    return "\n".join([*lines, f"(assert (or {others}))"])


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "spec.vnnlib"
    for eps in (0.01, 0.2):
        path.write_text(spec(eps))
        found = decide(net, load_vnnlib(path), timeout=20)
        print(f"within {eps}: {found.verdict}, {found.reason}")
        if found.witness is not None:
            print(f"a {int(net(found.witness[None]).argmax())} in place of a {label}, proven")
