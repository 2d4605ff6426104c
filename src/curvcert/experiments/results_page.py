"""The page "Results": ours beside the paper's, written from the records alone.

python -m curvcert.experiments.results_page results docs/results.md
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from curvcert.errors import InvalidInput
from curvcert.experiments.experiment import RADII
from curvcert.experiments.paper_numbers import ATTACKS_6F, ATTACKS_ONE_LIPSCHITZ, TABLE_1, TANH_SLOPE_AT_2
from curvcert.experiments.reproducing import read_record
from curvcert.experiments.table1 import RECIPES
from curvcert.results import Record

NOT_YET = "not yet measured"
CERTIFICATES = {
    "paper-global": "the paper's bound, sound norms",
    "paper-anchored": "its anchored bound, sound norms",
    "best": "our best certificate",
}

_INTRODUCTION = """# Results

Every table and figure of the paper (Entesari, Sharifi and Fazlyab, *Compositional Curvature Bounds for Deep Neural
Networks*, ICML 2024), ours beside the paper's. The paper's norms were estimated from below, by power iteration; ours
are upper bounds with their rounding accounted for, so a lower number of ours may be the same network told honestly.

This page is written from the records in `results/`. Each record says which command, seed, versions and hardware made
it, and holds a radius for every sample in the `.npz` file beside it:

```python
from pathlib import Path
from curvcert.experiments import EXPERIMENTS, read_record

for name, experiment in EXPERIMENTS.items():
    record = read_record(Path("results"), name)
    print(f"{name:24}", "not yet measured" if record is None else record.command)
```

`curvcert reproduce list` tells what there is, and `curvcert reproduce NAME --quick` runs a small version of it in
seconds, which checks the pipeline and never the figures.
"""


def results_page(folder: Path | str) -> str:
    """Return the page from the records in a folder.

    >>> "not yet measured" in results_page("no-such-folder")
    True
    """
    folder = Path(folder)
    sections = (
        _INTRODUCTION,
        _table1(read_record(folder, "table1")),
        _crc(read_record(folder, "crc-vs-ccrc")),
        _depth(read_record(folder, "anchored-depth")),
        _attacks(read_record(folder, "attack-gap") or read_record(folder, "attack-histogram")),
        _one_lipschitz(read_record(folder, "one-lipschitz-attacks")),
        _curvature(read_record(folder, "curvature-vs-lipschitz")),
        _tanh(read_record(folder, "tanh-anchor")),
        _complexity(read_record(folder, "complexity")),
    )
    return "\n".join(sections)


def _table1(record: Record | None) -> str:
    rows = record.figures["rows"] if record else []
    lines = [line for model, method in RECIPES for line in _table1_lines(model, method, rows)]
    text = (
        "CIFAR-10, l2, in percent of the whole test set unless a number of samples is told. The last column is what "
        "PGD leaves: an upper bound on what any certificate could reach."
    )
    columns = ("model", "method", "numbers", "seed", "epochs", "clean", *RADII, "PGD at 36 / 72 / 108")
    return _section("Table 1: certified accuracy", "table1", text, _table(columns, lines), record)


def _table1_lines(model: str, method: str, rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    if (model, method) in TABLE_1:
        yield [model, method, "as the paper reports", "", "1,000", *(f"{v:g}" for v in TABLE_1[model, method]), ""]
    found = [row for row in rows if (row["model"], row["method"]) == (model, method)]
    for row in found:
        certificate = CERTIFICATES[row["certificate"]]
        if row["samples"] != 10_000:
            certificate += f", {row['samples']:,} samples"
        certified = [f"{row['certified'][name]:.2f}" for name in RADII]
        left = " / ".join(f"{row['attacked'][name]:.2f}" for name in RADII)
        facts = [f"{row['seed']}", f"{row['epochs']:,}", f"{row['clean']:.2f}"]
        yield [model, method, certificate, *facts, *certified, left]
    if not found:
        yield [model, method, NOT_YET, "", "", "", "", "", "", ""]


def _crc(record: Record | None) -> str:
    text = "A 6-layer MNIST network; every radius by CRC's optimiser, so that only the curvature bounds differ."
    f = record.figures if record else None
    names = {"crc": "CRC (Singla and Feizi, 2020)", "paper": "the paper's bound, sound norms", "ours": "our bound"}
    lines = [
        [
            title,
            f"{f['median_radius'][name]:.4f}" if f else NOT_YET,
            "" if name == "crc" or not f else f"{f['improved_over_crc'][name]:.2f}%",
        ]
        for name, title in names.items()
    ]
    table = _table(("bound", "median radius", "samples with a larger radius than CRC's"), lines)
    return _section("CRC against CCRC", "crc-vs-ccrc", text, table, record)


def _depth(record: Record | None) -> str:
    text = "MNIST networks, constants of the vector f: global, and anchored (mean and deviation over the test set)."
    lines = []
    for network in record.figures["networks"] if record else []:
        cells = [_beside(network[name]) for name in ("lipschitz", "curvature")]
        lines.append([f"{network['depth']}", *(cell for pair in cells for cell in pair)])
    columns = ("layers", "global L", "anchored L", "global K", "anchored K")
    return _section("Anchored constants over depth", "anchored-depth", text, _table(columns, lines, 5), record)


def _beside(constant: Mapping[str, float]) -> tuple[str, str]:
    anchored = f"{constant['anchored_mean']:.4g} ± {constant['anchored_deviation']:.2g}"
    return f"{constant['global']:.4g}", anchored


def _attacks(record: Record | None) -> str:
    text = "The curvature-trained 6F at 36/255; accuracies in percent. Every witness was replayed."
    f: Mapping[str, Any] = record.figures if record else {}
    ours, by_paper = f.get("ours", {}), f.get("paper", {})
    rows = (
        ("clean accuracy", f"{ATTACKS_6F['clean']}", _cell(f.get("clean"), ".2f")),
        ("certified accuracy", f"{ATTACKS_6F['certified']}", _cell(f.get("certified"), ".2f")),
        ("accuracy under PGD", f"{ATTACKS_6F['pgd']}", _cell(f.get("pgd"), ".2f")),
        ("attack certificates, our K", "", _cell(ours.get("attack_certificates"))),
        (
            "attack certificates, the paper's K",
            f"{ATTACKS_6F['attack_certificates']}",
            _cell(by_paper.get("attack_certificates")),
        ),
        ("of them within 36/255, our K", "", _cell(ours.get("within"))),
        ("of them within 36/255, the paper's K", f"{ATTACKS_6F['within']}", _cell(by_paper.get("within"))),
        ("robust accuracy at most, by witnesses", f"{ATTACKS_6F['at_most']}", _cell(ours.get("at_most"), ".2f")),
    )
    table = _table(("", "the paper reports", "measured"), [list(row) for row in rows])
    return _section("Attack certificates", "attack-histogram` and `attack-gap", text, table, record)


def _cell(value: float | None, form: str = "") -> str:
    return NOT_YET if value is None else f"{value:{form}}"


def _one_lipschitz(record: Record | None) -> str:
    p, f = ATTACKS_ONE_LIPSCHITZ, record.figures if record else None
    reported = [f"about {p['correct']:,}", f"about {p['attack_certificates']}", f"below {p['largest']}"]
    measured = [NOT_YET] * 3
    if f:
        measured = [f"{f['correct']:,}", f"{f['ours']['attack_certificates']}", f"{f['ours']['largest']:.4f}"]
    names = ("correct samples", "attack certificates", "their largest radius")
    lines = [list(line) for line in zip(names, reported, measured, strict=True)]
    table = _table(("", "the paper reports", "measured"), lines)
    return _section("Attack certificates of a 1-Lipschitz network", "one-lipschitz-attacks", "", table, record)


def _curvature(record: Record | None) -> str:
    text = (
        "The curvature-trained 6F. The paper says that the condition of its proposition holds for every sample, and "
        "shows histograms without numbers."
    )
    lines = []
    for name, title in (("paper", "the paper's constants, sound norms"), ("ours", "our constants")):
        f = record.figures[name] if record else None
        measured = [NOT_YET, "", ""]
        if f:
            medians = [f"{f[key]:.4f}" for key in ("median_lipschitz_radius", "median_curvature_radius")]
            measured = [*medians, f"{f['condition_holds']:.2f}%"]
        lines.append([title, *measured])
    columns = ("", "median Lipschitz radius", "median curvature radius", "condition holds for")
    return _section("Curvature against Lipschitz radii", "curvature-vs-lipschitz", text, _table(columns, lines), record)


def _tanh(record: Record | None) -> str:
    measured = f"{record.figures['anchored_slope_at_2']:.10f}" if record else NOT_YET
    lines = [["anchored slope at 2", f"below {TANH_SLOPE_AT_2}", measured]]
    table = _table(("", "the paper reports", "measured"), lines)
    return _section("The tanh picture", "tanh-anchor", "", table, record)


def _complexity(record: Record | None) -> str:
    text = (
        "Exponents of the time of each bound, over the upper half of the sizes. The appendix counts multiplications, "
        "with one power iteration a norm; ours are proven norms."
    )
    lines = []
    for name, growth in (record.figures["growth_with_depth"] if record else {}).items():
        lines.append([name, f"{growth:.2f}", f"{record.figures['growth_with_width'][name]:.2f}" if record else ""])
    columns = ("bound", "with depth", "with width")
    return _section("Time", "complexity", text, _table(columns, lines, 3), record)


def _section(title: str, command: str, text: str, table: str, record: Record | None) -> str:
    made = ""
    if record is not None:
        where = record.hardware.get("gpu") or record.hardware["cpu"]
        made = f"\nMade on {record.created} by `{record.command}`, on {where}, seed {record.seed}.\n"
    parts = [f"## {title}", f"`curvcert reproduce`: `{command}`.", *([text] if text else []), table]
    return "\n\n".join(parts) + "\n" + made


def _table(columns: tuple[str, ...], lines: list[list[str]], width: int | None = None) -> str:
    """Return a Markdown table; one line that says so where nothing is measured."""
    lines = lines or [[NOT_YET, *[""] * ((width or len(columns)) - 1)]]
    rows = [list(columns), ["---"] * len(columns), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main(words: list[str]) -> None:
    """Write the page."""
    if len(words) != 2:
        raise InvalidInput(f"Expected the folder of the records and the page to write, got {len(words)} words.")
    Path(words[1]).write_text(results_page(words[0]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
