"""What a user installs: the wheel holds the data, the type marker and the version that the package says."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import curvcert
from curvcert.data.embedded import SHA256

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file)


def test_wheel_holds_the_data_and_the_type_marker(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {f"curvcert/data/files/{name}" for name in SHA256} | {"curvcert/py.typed"} <= names


def test_wheel_holds_every_module_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/curvcert").rglob("*.py")}
    packaged = {name for name in wheel.namelist() if not name.startswith("curvcert-")}
    assert {name for name in packaged if name.endswith(".py")} == modules
    assert all(name.startswith("curvcert/") for name in packaged)


def test_wheel_has_the_version_and_the_licence(wheel: zipfile.ZipFile) -> None:
    info = f"curvcert-{curvcert.__version__}.dist-info"
    assert f"Version: {curvcert.__version__}\n" in wheel.read(f"{info}/METADATA").decode()
    assert {f"{info}/licenses/LICENSE", f"{info}/licenses/NOTICE"} <= set(wheel.namelist())


def test_constraints_are_exact_versions_from_nowhere_in_particular() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)


def test_constraints_cover_what_is_installed() -> None:
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for requirement in (*project["dependencies"], *extras["dev"], *extras["docs"]):
        assert re.split(r"[\[>=<]", requirement)[0].lower() in pinned


def test_wheel_brings_small_networks_of_the_zoo(wheel: zipfile.ZipFile) -> None:
    zoo = {info.filename: info.file_size for info in wheel.infolist() if "/zoo_files/weights/" in info.filename}
    assert "curvcert/zoo_files/weights/digests.json" in zoo
    assert sum(name.endswith(".safetensors") for name in zoo) >= 5
    assert sum(zoo.values()) <= 5 * 2**20


def test_hosted_tests_run_on_every_version_that_the_classifiers_name() -> None:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = [found[1] for line in classifiers if (found := re.search(r":: Python :: (3\.\d+)$", line))]
    matrix = re.search(r"python: \[(.*)\]", (ROOT / ".github/workflows/tests.yml").read_text())
    assert matrix is not None
    assert re.findall(r'"([\d.]+)"', matrix[1]) == named
