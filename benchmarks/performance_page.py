"""The tables of the page "Performance and scale", from the records: each stands between two marks that name it."""

from benchmarks.harness import RESULTS, ROOT, figures_of, read_record
from benchmarks.pages import table, with_parts
from curvcert.results import Record

PAGE = ROOT / "docs" / "performance.md"
LOSSES = {"standard": "cross-entropy", "curvature": "the paper's loss", "certified-margin": "certified margin"}
MODELS = ("6F", "6C2F")


def training_table() -> str:
    """Return the steps a second of every loss, without and with augmentation, and the kernels of a step."""
    speeds = figures_of("gpu_training")["steps per second"]
    lines: list[list[str]] = []
    for model in MODELS:
        for loss, title in LOSSES.items():
            plain, augmented = speeds[f"{model}, {loss}"], speeds[f"{model}, {loss}, augmented"]
            kernels = f"{plain['kernels a step']}" if "kernels a step" in plain else ""
            lines.append([model, title, f"{plain['median']:,.0f}", f"{augmented['median']:,.0f}", kernels])
    return table(("network", "loss", "steps/s", "with crop and flip", "kernels a step"), lines)


def side_by_side_table() -> str:
    """Return the steps a second of several seeds side by side, all runs together."""
    speeds = figures_of("gpu_side_by_side")["steps per second"]
    counts = (1, 2, 4)
    lines: list[list[str]] = []
    for loss, title in LOSSES.items():
        known = [speeds[f"6F, {loss}, {count} seeds"]["median"] for count in counts]
        lines.append([title, *(f"{speed:,.0f}" for speed in known)])
    return table(("6F", "1 run", *(f"{count} seeds side by side" for count in counts[1:])), lines)


def global_table() -> str:
    """Return the seconds that constants and radii of 10,000 points take, beside their Jacobians."""
    lines: list[list[str]] = []
    for found in figures_of("certification_cuda")["measurements"]:
        seconds = [found["constants_seconds"], found["timings"]["certificate"]["median_s"]]
        jacobian = found["timings"]["jacobian"]["median_s"]
        lines.append([found["network"], *(f"{s:.2f} s" for s in (*seconds, sum(seconds), jacobian))])
    return table(("network", "constants", "radii", "together", "ten-row Jacobians alone"), lines)


def local_table() -> str:
    """Return the seconds that our best certificate takes to decide three radii, and to find the largest ones."""
    lines: list[list[str]] = []
    for found in (figures_of(f"shell_{model}_cuda") for model in MODELS):
        decided = f"{found['deciding_s']:.1f} s for {found['points']:,} images"
        full = f"{found['radii_s']:.1f} s for {found['full_points']:,} images"
        lines.append([found["model"], LOSSES[found["loss"]], f"{found['prepare_s']:.1f} s", decided, full])
    return table(("network", "loss", "constants", "three radii decided", "largest radii found"), lines)


def shared_table() -> str:
    """Return the seconds of the same by the records of Table 1."""
    lines: list[list[str]] = []
    for row in figures_of("table1")["rows"]:
        if row["certificate"] == "best" and row["samples"] == 10_000 and "gpu" in row["hardware"]:
            lines.append([row["model"], row["method"], f"{row['seed']}", f"{row['seconds']:.1f}"])
    return table(("network", "trained by", "seed", "seconds for 10,000 images"), lines)


def laptop_table() -> str:
    """Return what constants and five samples take beside 1,000 ten-row Jacobians, before and now."""
    lines: list[list[str]] = []
    for name, found in figures_of("laptop")["networks"].items():
        both = (found.get("before", {}), found["ratios"])
        told = [(one, stage) for stage in ("constants", "five samples") for one in both]
        shown = [_times(one[stage]) if stage in one else "" for one, stage in told]
        lines.append([name, f"{found['seconds']['jacobians']:.1f} s", *shown, f"{found['peak_gib']:.1f} GiB"])
    heads = ("constants before", "now", "five samples before", "now ", "memory")
    return table(("network", "1,000 Jacobians", *heads), lines)


def _times(ratio: float | None) -> str:
    return "not done" if ratio is None else f"{ratio:.2f}"


def gpu_records() -> dict[str, Record]:
    """Return the records that a benchmark made on a GPU, by name."""
    records = {path.stem: read_record(path.stem) for path in sorted(RESULTS.glob("*.json"))}
    made = {name: each for name, each in records.items() if each and each.command.startswith("python -m benchmarks.")}
    return {name: each for name, each in made.items() if each.config.get("device", "cpu") != "cpu"}


def code_of(record: Record) -> str:
    """Return which code a record measured; of the older ones it is known at what commit they were added."""
    code = record.config["code"]
    if code["commit"] is None:
        return f"not recorded; the record is of `{code['recorded_in'][:12]}`"
    return f"`{code['commit'][:12]}`{', changed' if code['changed'] else ''}"


def records_table() -> str:
    """Return every record that a benchmark made on a GPU, and the commit whose code it measured."""
    lines: list[list[str]] = []
    for name, record in gpu_records().items():
        lines.append([f"`results/{name}.json`", record.created, record.config["device"], code_of(record)])
    return table(("record", "made on", "GPU", "commit of the code"), lines)


def ratios() -> str:
    """Return what a regularised step costs beside a plain one, and a certificate beside its Jacobians, on a CPU."""
    step = figures_of("training_step")["ratio"]
    certificate = figures_of("certification_cpu")["measurements"][0]["ratio"]
    return (
        f"On two CPU cores, as ratios in one run: a curvature-regularised step of 6F takes {step:.2f} times a plain "
        f"one; certifying takes\n{certificate:.2f} times the ten-row Jacobian of the same points."
    )


PARTS = {
    "training": training_table,
    "side by side": side_by_side_table,
    "global": global_table,
    "local": local_table,
    "shared": shared_table,
    "ratios": ratios,
    "laptop": laptop_table,
    "records": records_table,
}


def performance_page() -> str:
    """Return the page with every part written anew."""
    return with_parts(PAGE, PARTS)
