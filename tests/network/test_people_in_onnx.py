"""The networks of `people.py`, as PyTorch's exporters write them, have the values of `trace`."""

from pathlib import Path

import pytest
import torch

import curvcert
from tests.network.people import REFUSED, ROWS, Row
from tests.network.test_onnx_exporters import exported
from tests.sampling import crossed

SAMPLE = 24
"""One row in so many runs each time."""

NOT_WRITTEN = {
    "hstack": "written with If, on a rank that is known",
    "diagonal": "written with If, on a rank that is known",
    "two index lists": "its indices are computed by what is not read",
    "in-place operations": "written with ScatterND",
    "written into zeros": "written with ScatterND",
    "written into a copy": "written with ScatterElements",
    "AvgPool2d, divisor": "the exporter drops the divisor",
    "optional arguments": "the exporter gives the mask its own value",
}
"""Rows that the older exporter writes in a way that is not read, or as another function."""

TAKEN = [row for row in ROWS if row.name not in {*REFUSED, *NOT_WRITTEN} and not row.options and not row.more]
NAMES = {row.name: row for row in TAKEN}
OPEN = ["MultiheadAttention", "LayerNorm", "GroupNorm", "Softmax module", "GRU"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", crossed(NAMES, every=SAMPLE))
def test_what_is_exported_is_read(name: str, tmp_path: Path) -> None:
    row: Row = NAMES[name]
    model, x = row.model(), row.example()
    assert isinstance(x, torch.Tensor)
    path = tmp_path / "net.onnx"
    try:
        torch.onnx.export(model, (x[:1],), path, dynamo=False, input_names=["x"], opset_version=17)
    except Exception as error:
        pytest.skip(f"the exporter does not write it: {type(error).__name__}")
    net, traced = curvcert.load_onnx(path), curvcert.trace(row.model(), x)
    torch.testing.assert_close(net(x.double()), traced(x.double()), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "dynamo"), crossed(OPEN, [False, True]))
def test_both_exporters_with_an_open_batch(name: str, dynamo: bool, tmp_path: Path) -> None:
    row = NAMES[name]
    net = curvcert.load_onnx(exported(row.model(), row.shape, tmp_path, dynamo))
    x = row.example()
    traced = curvcert.trace(row.model(), x)
    torch.testing.assert_close(net(x.double()), traced(x.double()), rtol=1e-4, atol=1e-4)
