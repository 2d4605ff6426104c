"""Write what goes beside a release: python scripts/release.py DIST [OPTIONS OF PIP...].

For the wheel in DIST: a lock file with the hash of every package that it and its extras for users bring along, a bill
of materials (CycloneDX), and the digests of all files.  Versions are those of constraints.txt.  What pip would install,
and its hashes, are pip's own report; nothing is installed, and `--no-index --find-links FOLDER` needs no network.
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
EXTRAS = "data,onnx,tensorboard"
"""What a user may want beside curvcert itself."""

Package = dict[str, Any]


def main(folder: Path, options: list[str]) -> list[Path]:
    """Write the files, and return their paths."""
    (wheel,) = folder.glob("*.whl")
    report = pip_report(f"{wheel}[{EXTRAS}]", options)
    packages = sorted(report["install"], key=name_of)
    own = next(package for package in packages if package["download_info"]["url"].endswith(wheel.name))
    others = [package for package in packages if package is not own]
    stem = f"{name_of(own)}-{own['metadata']['version']}"
    written = {
        folder / f"{stem}.lock": lock(others, report["environment"]),
        folder / f"{stem}.cdx.json": json.dumps(bill(own, others), indent=1) + "\n",
    }
    for path, content in written.items():
        path.write_text(content, encoding="utf-8")
    sums = folder / "SHA256SUMS"
    files = sorted(path for path in folder.iterdir() if path.is_file() and path != sums)
    sums.write_text("".join(f"{digest(path)}  {path.name}\n" for path in files), encoding="utf-8")
    return [*written, sums]


def pip_report(wanted: str, options: list[str]) -> dict[str, Any]:
    """Return what pip would install, as it tells it."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    command += ["-c", str(ROOT / "constraints.txt"), *options, wanted]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def lock(packages: list[Package], environment: dict[str, str]) -> str:
    """Return the lock file: pip installs from it what has these digests, and nothing else."""
    where = ", ".join(environment[key] for key in ("sys_platform", "platform_machine"))
    lines = [
        f"# For Python {environment['python_version']} on {where}.  Written by `make release`.",
        "# pip install --require-hashes -r THIS_FILE, then the wheel itself with --no-deps.",
    ]
    lines += [f"{name_of(one)}=={one['metadata']['version']} --hash=sha256:{digest_of(one)}" for one in packages]
    return "\n".join(lines) + "\n"


def bill(own: Package, others: list[Package]) -> dict[str, Any]:
    """Return the bill of materials."""
    known = {name_of(package): reference(package) for package in (own, *others)}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component(own)},
        "components": [component(package) for package in others],
        "dependencies": [
            {"ref": reference(package), "dependsOn": sorted(needed(package, known))} for package in (own, *others)
        ],
    }


def component(package: Package) -> dict[str, Any]:
    """Return a package as the bill lists it."""
    about = package["metadata"]
    found: dict[str, Any] = {
        "type": "library",
        "bom-ref": reference(package),
        "name": name_of(package),
        "version": about["version"],
        "purl": reference(package),
        "hashes": [{"alg": "SHA-256", "content": digest_of(package)}],
    }
    if about.get("license_expression"):
        found["licenses"] = [{"expression": about["license_expression"]}]
    elif about.get("license"):
        found["licenses"] = [{"license": {"name": about["license"].splitlines()[0][:80]}}]
    return found


def needed(package: Package, known: dict[str, str]) -> set[str]:
    """Return what a package requires of what is installed with it."""
    extras = ["", *(EXTRAS.split(",") if name_of(package) == "curvcert" else ())]
    wanted = [Requirement(text) for text in package["metadata"].get("requires_dist", ())]
    meant = [one for one in wanted if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in extras)]
    return {known[name] for one in meant if (name := canonicalize_name(one.name)) in known}


def name_of(package: Package) -> str:
    """Return the normal form of a package's name."""
    return canonicalize_name(package["metadata"]["name"])


def reference(package: Package) -> str:
    """Return the package URL."""
    return f"pkg:pypi/{name_of(package)}@{package['metadata']['version']}"


def digest_of(package: Package) -> str:
    """Return the SHA-256 of the file that pip chose: from its index, or of the file itself where there is none."""
    told = package["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
    if told:
        return str(told)
    place = urlsplit(package["download_info"]["url"])
    if place.scheme != "file":
        raise SystemExit(f"pip tells no SHA-256 of {name_of(package)}. Take an index that has them.")
    return digest(Path(unquote(place.path)))


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    for file in main(Path(sys.argv[1]), sys.argv[2:]):
        print(file)
