"""The large audit: what it asked for can be recorded, and what was counted adds up."""

from benchmarks.audit import configuration, merged
from benchmarks.harness import new_record


def test_what_was_asked_for_is_a_record(tmp_path) -> None:
    found = merged([{"seed": 0, "checks": 3, "closest": {"radius": 0.5}}])
    record = new_record("audit", "python -m benchmarks.audit", 0, configuration(60, 0, 1_000_000), found)
    assert record.write(tmp_path / "audit.json").is_file()
    assert record.config["efforts"]["radii"]["parts"] == ["certificates", "outputs"]
