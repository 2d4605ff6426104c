"""The figures that pages quote are those of the records."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.command_line import PAGES
from benchmarks.harness import read_record
from benchmarks.performance_page import PAGE, code_of, gpu_records
from benchmarks.reproduce.results_page import short_table
from benchmarks.settings import SETTINGS
from curvcert.results import Record
from tests.command_lines import Line, parse

ROOT = Path(__file__).parents[1]
TRAINED = Record.read(ROOT / "results/training.json").figures
README = (ROOT / "README.md").read_text(encoding="utf-8")


def row(recipe: str) -> str:
    """Return the line of a table that a recipe's record gives."""
    found = TRAINED[recipe]
    shares = (found["clean"], *found["certified"].values())
    return f"| `{recipe}` | " + " | ".join(f"{100 * share:.1f}" for share in shares) + " |"


@pytest.mark.parametrize("recipe", sorted(TRAINED))
def test_the_training_tables_hold_the_record(recipe: str) -> None:
    assert row(recipe) in (ROOT / "docs/train.md").read_text(encoding="utf-8")


def test_plain_training_certifies_less_at_every_radius() -> None:
    ours, plain = (TRAINED[name]["certified"] for name in ("digits", "digits-standard"))
    assert ours.keys() == plain.keys()
    assert all(ours[eps] > plain[eps] for eps in ours)


def test_the_readme_quotes_mnist() -> None:
    found = TRAINED["mnist-6f"]
    assert f"{100 * found['clean']:.1f}% accurate" in README
    assert f"on {100 * found['certified']['0.5']:.1f}%" in README


def test_the_readme_quotes_the_local_certificate() -> None:
    networks = Record.read(ROOT / "results/shell.json").figures["networks"]
    ratios = {n["training"]: n["median_of_local_over_paper"] for n in networks if n["network"] == "784-100^5-10"}
    assert f"{ratios['standard']:.2f} times the paper's" in README
    assert f"{ratios['regularised']:.2f} times on a curvature-trained one" in README
    with_line = {n["training"]: n["median_of_line_over_paper"] for n in networks if n["network"] == "784-100^5-10"}
    assert f"{with_line['regularised']:.2f} times there" in README
    page = (ROOT / "docs/line-certificate.md").read_text()
    shallow, deep = (n for n in networks if n["training"] == "regularised")
    assert f"{shallow['line_share_of_limit']:.2f} of that limit" in page
    assert f"{deep['line_share_of_limit']:.2f} with five" in page
    assert f"({shallow['share_of_limit']:.2f} and {deep['share_of_limit']:.2f} by the local certificate)" in page


def test_the_readme_quotes_the_audit_which_found_nothing() -> None:
    audit = Record.read(ROOT / "results/audit.json").figures
    assert audit["violations"] == 0
    assert f"{audit['checks']:,} checks" in README
    assert f"{audit['networks']:,} random networks" in README


def test_the_page_quotes_the_audit_of_graphs_which_found_nothing() -> None:
    audit, page = Record.read(ROOT / "results/audit_graphs.json").figures, (ROOT / "docs/audit.md").read_text()
    assert audit["violations"] == 0
    assert f"{audit['checks']:,} checks on {audit['networks']} networks of eleven families" in page
    assert len(audit["families"]) == 11


def test_the_readme_shows_the_short_table_of_results() -> None:
    record = read_record("table1")
    assert record is not None
    assert short_table(record) in README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_holds_the_records(page: Path) -> None:
    assert PAGES[page]() == page.read_text(encoding="utf-8"), "run: python -m benchmarks pages"


def test_every_record_of_a_gpu_is_found() -> None:
    named = {path.stem for path in (ROOT / "results").glob("*.json") if re.search("cuda|gpu", path.stem)}
    assert named | {"settings"} <= gpu_records().keys()


@pytest.mark.parametrize("name", sorted(gpu_records()))
def test_a_record_of_a_gpu_names_the_commit_and_the_page_shows_it(name: str) -> None:
    record = gpu_records()[name]
    code = record.config["code"]
    commit = code["commit"] or code["recorded_in"]
    assert re.fullmatch("[0-9a-f]{40}", commit) and (code["commit"] is None or isinstance(code["changed"], bool))
    row = f"| `results/{name}.json` | {record.created} | {record.config['device']} | {code_of(record)} |"
    assert commit[:12] in row and row in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name, each in gpu_records().items() if not each.config["code"]["commit"]])
def test_an_older_record_is_of_the_commit_that_it_names(name: str) -> None:
    record = gpu_records()[name]
    shown = ["git", "-C", str(ROOT), "show", f"{record.config['code']['recorded_in']}:results/{name}.json"]
    done = subprocess.run(shown, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no history here")
    then = Record.from_json(done.stdout)
    assert (then.figures, then.created, then.command) == (record.figures, record.created, record.command)


@pytest.mark.parametrize(
    ("model", "method", "seed"), [("6F", "CCRC", 0), ("6F", "ours", 0), ("6C2F", "ours", 0), ("Lip-3C1F", "ours", 0)]
)
def test_the_page_on_the_line_quotes_table_1(model: str, method: str, seed: int) -> None:
    page = (ROOT / "docs/line-certificate.md").read_text(encoding="utf-8")
    row = Record.read(ROOT / f"results/table1/{model}-{method}-{seed}-best.json").figures
    quoted = [f"{row['certified'][radius]:.2f} of {row['attacked'][radius]:.2f}" for radius in row["certified"]]
    assert f"| {model}, {method} | {' | '.join(quoted)} |" in page


@pytest.mark.parametrize(
    ("optimiser", "rate", "setting"),
    [
        ("`adam`", 0.001, "adam"),
        ("`adam`, `beta1` 0.9, `beta2` 0.99", 0.002, "adam-averages-0.002"),
        ("`muon`", 0.015, "muon-0.015"),
    ],
)
def test_the_page_on_training_quotes_the_settings(optimiser: str, rate: float, setting: str) -> None:
    page = (ROOT / "docs/train.md").read_text(encoding="utf-8")
    runs = {run["setting"]: run for run in Record.read(ROOT / "results/settings.json").figures["runs"]}
    found = [f"{value:.1f}" for value in (runs[f"6C2F-{setting}"]["clean"], *runs[f"6C2F-{setting}"]["estimated"])]
    assert f"| {optimiser} | {rate} | {' | '.join(found)} |" in page


def test_the_page_on_certificates_quotes_the_witnesses() -> None:
    page = (ROOT / "docs/certificates.md").read_text(encoding="utf-8")
    found = Record.read(ROOT / "results/certificate_pictures.json").figures
    at = found["radii"].index(0.3)
    assert (
        found["witnesses"] == round(found["correct"] * found["digits"]) and f"All {found['witnesses']} digits" in page
    )
    assert (
        found["attacked"][at] == found["searched"][at] and f"an accuracy of {100 * found['attacked'][at]:.1f}%" in page
    )


def test_the_settings_of_the_record_are_those_of_the_benchmark() -> None:
    runs = Record.read(ROOT / "results/settings.json").figures["runs"]
    assert {run["setting"]: run["changes"] for run in runs} == SETTINGS


def recorded_commands() -> Iterator[str]:
    """Yield every command that a record, a row of one or a kept network names."""
    found: dict[str, list[str]] = {"command": [], "make": [], "certify": []}
    for path in sorted((ROOT / "results").rglob("*.json")):
        for key, value in entries(json.loads(path.read_text(encoding="utf-8"))):
            if key in found and value is not None:
                found[key].append(value)
    assert all(found.values())
    yield from dict.fromkeys(command for commands in found.values() for command in commands)


def entries(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key of a JSON file with its value, however deep."""
    if isinstance(content, dict):
        yield from content.items()
    for part in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from entries(part)


def test_every_recorded_command_is_one_that_there_is() -> None:
    commands = list(recorded_commands())
    assert len({command.split()[0] for command in commands}) > 1
    for command in commands:
        parse(Line(command))
