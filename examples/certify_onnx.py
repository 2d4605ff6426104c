"""Certify an ONNX file: export a network, load the file, and certify what it computes.

It needs two packages more: pip install 'curvcert[onnx]'
Run it: python examples/certify_onnx.py
"""

import tempfile
from pathlib import Path

import torch

import curvcert
from curvcert.data import load_demo_network, load_digits

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "digits.onnx"
    torch.onnx.export(
        load_demo_network().eval(),
        (torch.zeros(2, 1, 8, 8),),
        path,
        dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        verbose=False,
    )
    net = curvcert.load_onnx(path)  # compared with onnxruntime before it is returned

test = load_digits("test")
x, y = test.as_float64()[:20], test.labels[:20]
certificate = curvcert.certify(net, x, y, method="lipschitz")  # the quickest; leave it out for the largest radii
print(net)
print(f"{int(certificate.correct.sum())} of 20 correct, median radius {float(certificate.radius.median()):.3f}")
