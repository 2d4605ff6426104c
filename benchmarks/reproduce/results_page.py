"""The page "Results": ours beside the paper's, written from the records alone; templates/results.md has its text."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, read_record
from benchmarks.pages import NOT_YET, filled, table
from benchmarks.reproduce import EXPERIMENTS
from benchmarks.reproduce.complexity import PLAIN as PLAIN_NETWORKS
from benchmarks.reproduce.experiment import RADII
from benchmarks.reproduce.paper_numbers import ATTACKS_6F, ATTACKS_ONE_LIPSCHITZ, LOT_XS, TABLE_1, TANH_SLOPE_AT_2
from benchmarks.reproduce.table1 import BEYOND, PLAIN, RECIPES, Row, all_rows, mean_of_seeds, of_seeds
from curvcert.results import Record
from curvcert.training import read_digests

TEST_SET = 10_000
PAPERS_OWN = {"6C2F": "CCRC", "Lip-3C1F": "SLL+CCRC", "6F": "CCRC"}
"""The paper's own method for each architecture: the row to be above."""

CERTIFICATES = {
    "paper-global": "the paper's bound, sound norms",
    "paper-anchored": "its anchored bound, sound norms",
    PLAIN: "the plain Lipschitz constant of 1",
    "best": "our best certificate",
}
EARLIER = {
    "paper-global": "the paper's SDP bound, for residual blocks as well, sound norms",
    "paper-anchored": "an anchored bound of ours that contains the paper's, sound norms",
}
"""What rows were measured by before the paper's formulas had rows of their own; the global one where blocks skip."""

TEMPLATE = Path(__file__).with_name("templates") / "results.md"


def results_page(folder: Path | str = RESULTS) -> str:
    """Return the page from the records in a folder: the template, its tables, and of every record how it was made.

    >>> "not yet measured" in results_page("no-such-folder")
    True
    """
    records = {name: read_record(name, folder) for name in EXPERIMENTS}
    rows = records["table1"].figures["rows"] if records["table1"] else []

    def picture(name: str, shown: str) -> str:
        return f"![{shown}](images/results/{name}.svg)" if records[name] else ""

    def made(*names: str) -> str:
        return next((f"{_made(record)}." for name in names if (record := records[name])), "")

    tables = {
        "times": _times(records, read_record("reproduce_times", folder)),
        "claim": short_table(records["table1"]),
        "beyond": _beyond(rows),
        "table1": _all_rows(rows),
        "crc-vs-ccrc": _crc(records["crc-vs-ccrc"]),
        "anchored-depth": _depth(records["anchored-depth"]),
        "attacks": _attacks(records["attack-gap"] or records["attack-histogram"]),
        "one-lipschitz-attacks": _one_lipschitz(records["one-lipschitz-attacks"]),
        "curvature-vs-lipschitz": _curvature(records["curvature-vs-lipschitz"]),
        "tanh-anchor": _tanh(records["tanh-anchor"]),
        "two-radii": _two_radii(records["two-radii"]),
        "complexity": _complexity(records["complexity"]),
        "weights": _weights(read_digests(folder)),
    }
    mirrored = [f"{row['attacked']['36/255']:.2f}%" for row in of_seeds(rows, "6C2F", BEYOND)]
    depth = records["anchored-depth"]
    return filled(
        TEMPLATE,
        tables=tables,
        picture=picture,
        made=made,
        mirrored=" and ".join(mirrored),
        anchors=f"{depth.figures['networks'][0]['samples']:,}" if depth else "the",
    )


def _all_rows(rows: list[dict[str, Any]]) -> str:
    lines = [line for model, method in RECIPES for line in _table1_lines(model, method, rows)]
    columns = ("model", "method", "numbers", "seed", "epochs", "clean", *RADII, "PGD at 36 / 72 / 108", "seconds", "on")
    return table(columns, lines)


def _beyond(rows: list[dict[str, Any]]) -> str:
    """Return what a network beyond the paper's architectures reaches, beside one of its size."""
    lines = [["LOT-XS, as reported", "1.6 million", "", *(f"{value:.1f}" for value in LOT_XS), ""]]
    own = _beside_the_reported(rows, "6C2F", BEYOND, LOT_XS[1:])
    lines += [["6C2F and its mirror image", "0.73 million", *cells] for cells in own]
    return table(("model", "parameters", "seed", "clean", *RADII, "above at all three radii"), lines)


def _beside_the_reported(
    rows: list[dict[str, Any]], model: str, method: str, reported: Sequence[float]
) -> list[list[str]]:
    """Return the cells of the mean over seeds, and whether it is above what is reported, and of each seed."""
    mean = mean_of_seeds(rows, model, method)
    if mean is None:
        return [[NOT_YET, *[""] * 5]]
    certified = [mean["certified"][name] for name in RADII]
    above = _above(dict(zip(RADII, zip(certified, reported, strict=True), strict=True)))
    lines = [[f"mean of {mean['seeds']}", *_numbers(mean), above]]
    return lines + [[f"{row['seed']}", *_numbers(row), ""] for row in of_seeds(rows, model, method)]


def _numbers(row: Mapping[str, Any]) -> list[str]:
    return [f"{value:.2f}" for value in (row["clean"], *(row["certified"][name] for name in RADII))]


def short_table(record: Record | None) -> str:
    """Return the table of the claim: for each architecture the paper's row, a mean of two seeds, and ours likewise.

    >>> print(short_table(None).splitlines()[2])
    | 6C2F | CCRC, as the paper reports | mean of 2 | 61.15 | 49.53 | 33.36 | 16.95 |  |
    """
    lines = []
    rows = [row for row in record.figures["rows"] if row["samples"] == TEST_SET] if record else []
    for model, method in PAPERS_OWN.items():
        reported = TABLE_1[model, method]
        numbers = [f"{value:.2f}" for value in reported]
        lines.append([model, f"{method}, as the paper reports", "mean of 2", *numbers, ""])
        own = _beside_the_reported(rows, model, "ours", reported[1:])
        lines += [[model, "ours, by our best certificate", *cells] for cells in own]
    return table(("model", "numbers", "seed", "clean", *RADII, "above at all three radii"), lines)


def _above(pairs: Mapping[str, tuple[float, float]]) -> str:
    """Return whether the first of each pair exceeds the second.

    >>> _above({"36/255": (49.78, 49.53)}), _above({"36/255": (49.0, 49.53)})
    ('**yes**, by 0.25 or more', 'no: 0.53 below at 36/255')
    """
    gains = {name: round(ours - theirs, 2) for name, (ours, theirs) in pairs.items()}
    if min(gains.values()) > 0:
        return f"**yes**, by {min(gains.values()):.2f} or more"
    return "no: " + ", ".join(f"{abs(gain):.2f} below at {name}" for name, gain in gains.items() if gain <= 0)


def _table1_lines(model: str, method: str, rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    if (model, method) in TABLE_1:
        reported = (f"{value:.2f}" for value in TABLE_1[model, method])
        yield [model, method, "as the paper reports", "mean of 2", "1,000", *reported, "", "", ""]
    found = {"/".join(str(row[key]) for key in ("model", "method", "seed", "certificate")): row for row in rows}
    for expected in all_rows():
        if (expected.model, expected.method) == (model, method):
            yield [model, method, *_measured(found.get(expected.name), expected)]


def _measured(row: Mapping[str, Any] | None, expected: Row) -> list[str]:
    """Return the cells of a row, from its certificate on."""
    certificate = CERTIFICATES[expected.certificate]
    if row is None:
        return [f"{certificate}: {NOT_YET}", f"{expected.seed}", *[""] * 8]
    if not row.get("as_stated") and (expected.certificate != "paper-global" or expected.model == "Lip-3C1F"):
        certificate = EARLIER.get(expected.certificate, certificate)
    if row["samples"] != TEST_SET:
        certificate += f", {row['samples']:,} samples"
    certified = [f"{row['certified'][name]:.2f}" for name in RADII]
    left = " / ".join(f"{row['attacked'][name]:.2f}" for name in RADII)
    facts = [f"{row['seed']}", f"{row['epochs']:,}", f"{row['clean']:.2f}"]
    return [certificate, *facts, *certified, left, f"{row['seconds']:.0f}", _machine(row["hardware"])]


def _machine(hardware: Mapping[str, Any]) -> str:
    """Return what a record was made on, in words.

    >>> _machine({"cpu": "AMD EPYC", "machine": "x86_64", "cores": 2})
    'AMD EPYC, 2 cores'
    """
    return str(hardware["gpu"]) if "gpu" in hardware else f"{hardware['cpu']}, {hardware['cores']} cores"


def _crc(record: Record | None) -> str:
    f = record.figures if record else None
    names = {"crc": "CRC (Singla and Feizi, 2020)", "paper": "the paper's bound, sound norms", "ours": "our bound"}
    lines = [
        [
            title,
            f"{f['median_radius'][name]:.4f}" if f else NOT_YET,
            f"{f['mean_radius'][name]:.4f}" if f else "",
            "" if name == "crc" or not f else f"{f['improved_over_crc'][name]:.2f}%",
            "" if name != "ours" or not f else f"{f['ours_over_paper']:.2f}%",
        ]
        for name, title in names.items()
    ]
    return table(("bound", "median radius", "mean radius", "samples above CRC", "samples above the paper's"), lines)


def _depth(record: Record | None) -> str:
    lines = []
    for network in record.figures["networks"] if record else []:
        for whose, kinds in (("the paper's", ("lipschitz", "curvature")), ("ours", ("our_lipschitz", "our_curvature"))):
            cells = [_beside(network[kind]) for kind in kinds]
            lines.append([f"{network['depth']}", whose, *(cell for pair in cells for cell in pair)])
    return table(("layers", "formulas", "global L", "anchored L", "global K", "anchored K"), lines)


def _beside(constant: Mapping[str, float]) -> tuple[str, str]:
    anchored = " ± ".join(_constant(constant[f"anchored_{name}"]) for name in ("mean", "deviation"))
    return _constant(constant["global"]), anchored


def _constant(value: float) -> str:
    """Return a constant with one decimal, large ones with none.

    >>> _constant(11.24), _constant(310105.2)
    ('11.2', '310,105')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _attacks(record: Record | None) -> str:
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
    return table(("", "the paper reports", "measured"), rows)


def _cell(value: float | None, form: str = "") -> str:
    return NOT_YET if value is None else f"{value:{form}}"


def _one_lipschitz(record: Record | None) -> str:
    p, f = ATTACKS_ONE_LIPSCHITZ, record.figures if record else None
    reported = [f"about {p['correct']:,}", f"about {p['attack_certificates']}", f"below {p['largest']}"]
    lines = [["correct samples", reported[0], *[f"{f['correct']:,}" if f else NOT_YET] * 2]]
    for name, key, form, told in (
        ("attack certificates", "attack_certificates", ",", reported[1]),
        ("their largest radius", "largest", ".4f", reported[2]),
        ("misclassified when replayed in another batch", "replayed", ",", ""),
    ):
        lines.append([name, told, *(_cell(f[whose][key] if f else None, form) for whose in ("paper", "ours"))])
    return table(("", "the paper reports", "the paper's K, sound norms", "our K"), lines)


def _curvature(record: Record | None) -> str:
    lines = []
    for name, title in (("paper", "the paper's constants, sound norms"), ("ours", "our constants")):
        f = record.figures[name] if record else None
        measured = [NOT_YET, "", ""]
        if f:
            medians = [f"{f[key]:.4f}" for key in ("median_lipschitz_radius", "median_curvature_radius")]
            measured = [*medians, f"{f['condition_holds']:.2f}%"]
        lines.append([title, *measured])
    return table(("", "median Lipschitz radius", "median curvature radius", "condition holds for"), lines)


def _tanh(record: Record | None) -> str:
    measured = f"{record.figures['anchored_slope_at_2']:.10f}" if record else NOT_YET
    lines = [["anchored slope at 2", f"below {TANH_SLOPE_AT_2}", measured]]
    return table(("", "the paper reports", "measured"), lines)


def _two_radii(record: Record | None) -> str:
    lines = []
    for name, title in (("paper", "the paper's bound, sound norms"), ("ours", "our best certificate")):
        own = record.figures["radii"][name] if record else None
        distance = f"{record.figures['distance']:.4f}" if record else ""
        lines.append(
            [title, f"{own['certified']:.4f}" if own else NOT_YET, distance, f"{own['attack']:.4f}" if own else ""]
        )
    return table(("", "certified radius", "distance", "attack radius"), lines)


def _complexity(record: Record | None) -> str:
    figures = record.figures if record else {"growth_with_depth": {}, "growth_with_width": {}}
    lines = []
    for name, growth in figures["growth_with_depth"].items():
        lines.append([PLAIN_NETWORKS, name, f"{growth:.2f}", f"{figures['growth_with_width'][name]:.2f}"])
    for kind, found in figures.get("families", {}).items():
        lines += [[kind, name, f"{growth:.2f}", ""] for name, growth in found["growth_with_depth"].items()]
    return table(("network", "bound", "with depth", "with width"), lines)


def _times(records: Mapping[str, Record | None], times: Record | None) -> str:
    lines = []
    for name in EXPERIMENTS:
        quick = f"{times.figures['quick'][name]:.1f} s" if times else NOT_YET
        lines.append([f"`{name}`", quick, _full_time(records[name])])
    return table(("experiment", "quick, seconds of the processor", "full"), lines)


def _full_time(record: Record | None) -> str:
    """Return how long a full run took, in words; of Table 1 how long its rows took, all together."""
    if record is None:
        return ""
    if "rows" in record.figures:
        return (
            f"{sum(row['seconds'] for row in record.figures['rows']) / 60:.0f} minutes for its rows, without training"
        )
    seconds = record.config.get("seconds")
    return "" if seconds is None else f"{seconds:,.0f} s, on {_machine(record.hardware)}"


def _weights(digests: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for name, facts in digests.items():
        file = f"`results/{facts['file']}`" if facts["file"] else f"not kept: {facts['why']}"
        file += ", mirrored" if "mirror_of" in facts else ""
        lines.append([name, file, f"`{facts['sha256'][:16]}`", ", ".join(f"`{record}`" for record in facts["records"])])
    return table(("model", "weights in float16", "SHA-256 begins with", "records"), lines)


def _made(record: Record) -> str:
    """Return when, by which command and on what a record was made."""
    if "cpu" not in record.hardware:
        return f"The last row is of {record.created}; `{record.command}` makes all, each row's record names its machine"
    seconds = record.config.get("seconds")
    took = "" if seconds is None else f", in {seconds:,.0f} s with the kept weights there"
    return f"Made on {record.created} by `{record.command}`, on {_machine(record.hardware)}, seed {record.seed}{took}"
