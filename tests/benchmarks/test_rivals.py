import json

import pytest
import torch

from benchmarks import rivals


@pytest.mark.slow
def test_the_curvature_of_a_pair_is_below_so_robusts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "STEPS", 30)
    found = rivals.beside_so_robust(rivals.QUICK[1], None)
    assert all(ratio < 1 for ratio in found["over_so_robust"].values())
    assert found["largest_hessian_found"] <= found["ours"]["both"]
    json.dumps(found, allow_nan=False)


def test_so_robusts_formula_bounds_one_hidden_layer_exactly() -> None:
    W, row = torch.tensor([[3.0], [1.0]]).double(), torch.tensor([[2.0, -5.0]]).double()
    below, above = rivals.so_robust([W, row], "softplus")
    assert below == pytest.approx(0.25 * 5) and above == pytest.approx(0.25 * 2 * 9)
    assert rivals.so_robust([W, row], "tanh")[0] == pytest.approx(0.7699 * (2 * 9 + 5 * 1))
