import json
import sys

import pytest

from benchmarks import norm_bounds


@pytest.mark.parametrize("case", norm_bounds.QUICK_CASES, ids=str)
def test_measures_a_layer(case) -> None:
    figures = norm_bounds.measure(case, repeats=1)
    # The reference is itself rounded: a dense SVD is right to a few ulps.
    assert figures["certified"] >= figures["exact"] * (1 - 1e-14)
    assert figures["estimated"] <= figures["exact"] * (1 + 1e-12)
    json.dumps(figures, allow_nan=False)


def test_references_agree() -> None:
    op = norm_bounds.QUICK_CASES[-1].operator()
    assert norm_bounds.lanczos_norm(op) == pytest.approx(norm_bounds.dense_norm(op), rel=1e-12)


def test_quick_run_prints_a_table(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["norm_bounds", "--quick", "--repeats", "1"])
    norm_bounds.main()
    assert "l2 norms" in capsys.readouterr().out


def test_all_layers_of_both_networks_are_there() -> None:
    assert len(norm_bounds.cases(quick=False)) == 2 * 6 + 4
