"""What goes beside a release: pip itself, without any index, makes the lock file and refuses what it does not name."""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts import release

pytestmark = pytest.mark.slow


def wheel(folder: Path, name: str, version: str, *metadata: str) -> Path:
    """Write a package that holds nothing."""
    info = f"{name}-{version}.dist-info"
    about = "\n".join(["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *metadata, ""])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", about)
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    """A release that needs two packages, one of them for an extra; a third is not needed."""
    folder, others = tmp_path / "dist", tmp_path / "others"
    folder.mkdir()
    others.mkdir()
    needs = ["Requires-Dist: first_part>=1", "Provides-Extra: onnx", 'Requires-Dist: second; extra == "onnx"']
    extras = ["Provides-Extra: data", "Provides-Extra: tensorboard"]
    wheel(folder, "curvcert", "1.2", "License: Apache-2.0", *needs, *extras)
    wheel(others, "first_part", "1.5", "License: BSD-3-Clause", "Requires-Dist: second")
    wheel(others, "second", "2.0")
    wheel(others, "third", "3.0")
    return folder


def options(dist: Path) -> list[str]:
    return ["--no-index", "--find-links", str(dist.parent / "others")]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_lock_file_names_what_is_needed_by_its_hash(dist: Path) -> None:
    files = release.main(dist, options(dist))
    assert [path.name for path in files] == ["curvcert-1.2.lock", "curvcert-1.2.cdx.json", "SHA256SUMS"]
    others = {path.name: digest(path) for path in dist.parent.joinpath("others").iterdir()}
    assert [line for line in files[0].read_text().splitlines() if not line.startswith("#")] == [
        f"first-part==1.5 --hash=sha256:{others['first_part-1.5-py3-none-any.whl']}",
        f"second==2.0 --hash=sha256:{others['second-2.0-py3-none-any.whl']}",
    ]
    assert str(dist.parent) not in "".join(path.read_text() for path in files)
    install = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--require-hashes"]
    command = [*install, *options(dist), "-r", str(files[0])]
    assert subprocess.run(command, capture_output=True).returncode == 0
    wheel(dist.parent / "others", "second", "2.0", "Summary: another one")
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode != 0 and "HASH" in refused.stderr.upper()


def test_the_bill_of_materials_says_what_needs_what(dist: Path) -> None:
    bill = json.loads(release.main(dist, options(dist))[1].read_text())
    own = bill["metadata"]["component"]
    assert own["hashes"] == [{"alg": "SHA-256", "content": digest(next(dist.glob("*.whl")))}]
    assert own["licenses"] == [{"license": {"name": "Apache-2.0"}}]
    assert [(one["name"], one["version"]) for one in bill["components"]] == [("first-part", "1.5"), ("second", "2.0")]
    assert bill["components"][0]["licenses"] == [{"license": {"name": "BSD-3-Clause"}}]
    needs = {one["ref"]: one["dependsOn"] for one in bill["dependencies"]}
    first, second = "pkg:pypi/first-part@1.5", "pkg:pypi/second@2.0"
    assert needs == {"pkg:pypi/curvcert@1.2": [first, second], first: [second], second: []}


def test_the_digests_are_those_of_all_files(dist: Path) -> None:
    *_, sums = release.main(dist, options(dist))
    assert release.main(dist, options(dist))[2].read_text() == sums.read_text()
    found = dict(line.split("  ")[::-1] for line in sums.read_text().splitlines())
    assert found == {path.name: digest(path) for path in dist.iterdir() if path != sums}
    assert len(found) == 3
