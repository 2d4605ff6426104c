import json
import math
import platform
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from curvcert.errors import InvalidInput
from curvcert.results import Record, hardware, record_of_this_run, versions

FIELDS = {
    "name": "norms",
    "command": "make bench",
    "created": "2024-07-21",
    "versions": {"torch": "2.13.0"},
    "hardware": {"cpu": "a processor", "cores": 2},
    "seed": 0,
    "config": {"repeats": 3},
    "figures": {"ratio": 1.5, "layers": [{"norm": 2.0}]},
}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_survives_a_file(tmp_path: Path) -> None:
    record = Record(**FIELDS)
    path = record.write(tmp_path / "new folder" / "record.json")
    assert Record.read(path) == record
    assert json.loads(path.read_text())["schema"] == 1


@given(figures=st.dictionaries(st.text(), json_values, max_size=4))
def test_survives_json(figures) -> None:
    record = Record(**{**FIELDS, "figures": figures})
    assert Record.from_json(record.to_json()) == record


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("created", "21/07/2024", "YYYY-MM-DD"),
        ("name", "", "must not be empty"),
        ("command", "", "must not be empty"),
        ("figures", {"ratio": math.nan}, r"figures\.ratio is nan"),
        ("figures", {"layers": [{"norm": math.inf}]}, r"figures\.layers\[0\]\.norm is inf"),
        ("figures", {"shape": (1, 2)}, r"figures\.shape is of type tuple"),
        ("config", {1: "one"}, "keys of a record are strings"),
    ],
)
def test_refuses_what_a_record_cannot_hold(field: str, value: object, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        Record(**{**FIELDS, field: value})


@pytest.mark.parametrize(("field", "value"), [("seed", "0"), ("seed", True), ("figures", [1.0])])
def test_read_refuses_wrong_types(tmp_path: Path, field: str, value: object) -> None:
    content = {"schema": 1, **FIELDS, field: value}
    with pytest.raises((InvalidInput, TypeError), match=field):
        Record.from_json(json.dumps(content))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not JSON", "is JSON"),
        ("[]", "schema 1"),
        (json.dumps(FIELDS), "schema 1"),
        (json.dumps({"schema": 2, **FIELDS}), "schema 1"),
        (json.dumps({"schema": 1, **FIELDS, "host": "x"}), "unknown fields: host"),
        (json.dumps({"schema": 1, "name": "norms"}), "missing or unknown fields: command"),
    ],
)
def test_read_names_the_file_that_is_no_record(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=says) as caught:
        Record.read(path)
    assert "broken.json" in str(caught.value)


def test_this_run_names_versions_and_no_host() -> None:
    record = record_of_this_run("norms", "make bench", 0, {}, {})
    assert record.versions["python"] == platform.python_version()
    assert {"curvcert", "torch"} <= set(record.versions)
    assert socket.gethostname() not in json.dumps(record.hardware).split('"')
    assert hardware()["cores"] >= 1


def test_a_package_that_is_not_installed_is_left_out() -> None:
    assert set(versions(("curvcert", "no-such-package"))) == {"python", "curvcert"}


def test_every_record_kept_in_the_repository_is_valid() -> None:
    for path in (Path(__file__).parents[1] / "results").glob("*.json"):
        Record.read(path)
