"""The command that injects faults: it finds what tests find, and fails where that would show nothing."""

import ast
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import audit_page, harness, teeth
from benchmarks.faults import AUDITED, FAULTS, GROUPS, Fault
from curvcert.activations import TANH
from curvcert.bounds.lipschitz import lipschitz
from curvcert.errors import InvalidInput
from curvcert.falsifier import falsify_bound, save_counterexample
from curvcert.falsifier.random_networks import single_neuron
from curvcert.results import Record

SOURCE = '''def area(a, b):
    """Return a times b."""
    if a < 0:
        a = -a
    return (
        a
        * b
    )


def unused():
    return 1
'''
TESTS = "from curvcert.areas import area\n\n\ndef test_area():\n    assert area(-2, 3) == 6\n"


def fault(name: str, old: str, new: str) -> Fault:
    return Fault(name, "areas.py", old, new, ("tests/test_areas.py",), "", "An area is another one.")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one module and one test, which needs none of pytest's plugins."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    files = {"src/curvcert/__init__.py": "", "src/curvcert/areas.py": SOURCE, "tests/test_areas.py": TESTS}
    for name, text in {**files, "pyproject.toml": "[tool.pytest.ini_options]\n", "README.md": "Areas."}.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "root"


def test_every_fault_fits_todays_source() -> None:
    assert len(FAULTS) >= 36
    assert max(Counter(each.name for each in FAULTS).values()) == 1
    assert all(each.name == each.name.replace(" ", "-") and each.claim.endswith(".") for each in FAULTS)
    for each in FAULTS:
        source = (teeth.ROOT / each.file).read_text(encoding="utf-8")
        ast.parse(teeth.patched(source, each, Path("mark")))
        assert all((teeth.ROOT / path).is_file() for path in each.tests), each.name


def test_what_an_audit_is_to_find_is_a_fault() -> None:
    assert set(AUDITED) <= {each.name for each in FAULTS} and len(set(AUDITED)) == len(AUDITED)


def test_a_fault_is_found_by_an_audit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit of this library is a file with a counterexample, or none."""
    example = root.parent / "example.safetensors"
    network = single_neuron(TANH, 3.0)
    short = replace(lipschitz(network), value=torch.tensor(2.8, dtype=torch.float64))
    save_counterexample(falsify_bound(short, network, "lipschitz").counterexamples[0], example)
    (root / "src/curvcert/__main__.py").write_text(
        "import pathlib, shutil, sys\nfrom curvcert.areas import area\nif area(2, 3) == 6:\n    sys.exit(0)\n"
        f"out = pathlib.Path(sys.argv[sys.argv.index('--out') + 1])\nout.mkdir()\nshutil.copy({str(example)!r}, out)\n"
        "sys.exit(1)\n"
    )
    found, _ = teeth.bite_by(
        teeth.require_audited,
        [fault("sum", "* b", "+ b"), fault("same", "* b", "* (b + 0)")],
        root,
        Console(quiet=True),
    )
    assert found["sum"]["found"] and found["sum"]["claim"]
    assert not found["same"]["found"] and "ended with 0" in found["same"]["why"]


def test_a_fault_is_found_by_the_checker(root: Path) -> None:
    """The record of checks of this library says what became of one sample."""
    (root / "benchmarks").mkdir()
    (root / "benchmarks/checks.py").write_text(
        "import sys\nfrom curvcert.areas import area\n"
        "status = {6: 'proven', 5: 'contradicted', 9: 'cannot check'}[area(2, 3)]\n"
        "print({'statuses': {status: 1}})\nsys.exit(0 if status == 'proven' else 1)\n"
    )
    faults = [
        fault("sum", "* b", "+ b"),
        fault("same", "* b", "* (b + 0)"),
        fault("unclear", "a\n        * b", "b\n        * b"),
        fault("elsewhere", "return 1", "return 2"),
    ]
    found, _ = teeth.bite_by(teeth.require_checked, faults, root, Console(quiet=True))
    assert found["sum"]["found"] and found["sum"]["status"] == "contradicted"
    assert not any(found[name]["found"] for name in ("same", "unclear", "elsewhere"))
    assert "ended with 0" in found["same"]["why"] and "did not run" in found["elsewhere"]["why"]


def test_the_page_tells_every_fault_and_who_finds_it() -> None:
    counts, faults = audit_page.counts_table().splitlines(), audit_page.faults_table().splitlines()
    assert (len(counts), len(faults)) == (2 + len(GROUPS), 2 + len(FAULTS))
    assert all(int(cell.split("|")[3]) <= int(cell.split("|")[2]) for cell in counts[2:])
    found = audit_page.outcomes()
    assert all(found["tests"].get(each.name) for each in FAULTS)
    assert all(found["audit"].get(name) for name in AUDITED)


def test_the_mark_stands_in_front_of_the_statement_that_changes() -> None:
    text = teeth.patched(SOURCE, fault("sum", "a\n        * b", "a\n        + b"), Path("mark"))
    assert text == SOURCE.replace("* b", "+ b").replace("    return (", "    open('mark', 'w').close()\n    return (")
    with pytest.raises(InvalidInput, match="stands there 2 times"):
        teeth.patched(SOURCE, fault("twice", "return", "yield"), Path("mark"))
    with pytest.raises(InvalidInput, match="nothing can stand in front"):
        teeth.patched("x = 1; y = 2\n", fault("second", "y = 2", "y = 3"), Path("mark"))


def test_the_command_tells_what_was_found_and_appends_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = (
        fault("sum", "* b", "+ b"),
        fault("the-same", "* b", "* (b + 0)"),
        fault("elsewhere", "return 1", "return 2"),
    )
    monkeypatch.setattr(harness, "RESULTS", root.parent / "results")
    monkeypatch.setattr(teeth, "ROOT", root)
    monkeypatch.setattr(teeth, "FAULTS", faults)
    monkeypatch.setattr(teeth, "commit_of", lambda _: "0" * 40)
    for arguments, status in (([], 1), (["--fault", "sum"], 0)):
        with pytest.raises(SystemExit) as ended:
            teeth.main(arguments)
        assert ended.value.code == status
    both, again = Record.read(root.parent / "results/teeth.json").figures["runs"]
    assert {name: found["found"] for name, found in both["faults"].items()} == {
        "sum": True,
        "the-same": False,
        "elsewhere": False,
    }
    assert both["faults"]["sum"]["test"] == "tests/test_areas.py::test_area"
    assert both["faults"]["the-same"]["why"] == "not found by tests/test_areas.py"
    assert both["faults"]["elsewhere"]["why"].startswith("its line did not run")
    assert list(again["faults"]) == ["sum"]
    assert (root / "src/curvcert/areas.py").read_text() == SOURCE
    with pytest.raises(SystemExit):
        teeth.main(["--fault", "nothing"])


@pytest.mark.parametrize("tests", [TESTS.replace("6", "7"), ""], ids=["a failure", "no tests"])
def test_a_copy_that_reports_anything_shows_nothing(root: Path, tests: str) -> None:
    (root / "tests/test_areas.py").write_text(tests)
    found, clean = teeth.bite([fault("sum", "* b", "+ b")], root, Console(quiet=True))
    assert not found["sum"]["found"] and "without a fault" in found["sum"]["why"]
    assert clean == {}


def test_tests_that_take_too_long_are_no_proof(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teeth, "LIMIT", 0.0)
    found, _ = teeth.bite([fault("sum", "* b", "+ b")], root, Console(quiet=True))
    assert "at most 0 are allowed" in found["sum"]["why"]
