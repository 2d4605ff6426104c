"""`curvcert certify` and `curvcert check`: files that agree with the library, and a run that survives being killed."""

import csv
import dataclasses
import json
import math
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import curvcert
from curvcert.certificates import load_certificate
from curvcert.cli.models import ModelChoice, load_network
from curvcert.cli.requirements import Requirement
from curvcert.data import load_demo_network, load_digits
from curvcert.tensor_files import read_tensor_file, write_tensor_file
from tests.cli.running import Runner, command, environment, write_npz

DEMO = "curvcert.data:load_demo_network"
QUICK = ("--samples", 6, "--part-size", 4, "--method", "compositional", "--no-report")


def digits(count: int) -> tuple[Tensor, Tensor]:
    data = load_digits("test")
    return data.as_float64()[:count], data.labels[:count]


def test_what_is_required_decides_the_status(folder: Path, run: Runner) -> None:
    words = ("certify", DEMO, "digits", *QUICK, "--box", 0, 1, "--no-search", "--eps", 0.001)
    met = run(*words, "--require", "0.5@0.001", "--require", "0@1", "--out", "met")
    assert met.status == 0, met.err
    assert "Required 0.5@0.001: met, 100.0% proven." in met.out
    missed = run(*words, "--require", "0.5@0.001", "--require", "0.5@1", "--json", "--out", "missed")
    assert missed.status == 1, missed.err
    found = json.loads(missed.out)
    assert [(each["share"], each["eps"], each["met"]) for each in found["required"]] == [
        (0.5, 0.001, True),
        (0.5, 1.0, False),
    ]
    # What is required is decided too, and all is written.
    assert [each["eps"] for each in found["at"]] == [0.001, 1.0]
    assert len(load_certificate(folder / "missed" / "certificate.safetensors")) == 6
    short = run(*words, "--require", "1@1", "--quiet", "--out", "short")
    assert (short.status, short.out.splitlines()[-1][:24]) == (1, "Required 1@1: MISSED, 0.")


def test_a_budget_is_kept_and_told(folder: Path, run: Runner) -> None:
    words = ("certify", "nets:small", "digits", "--samples", 70, "--no-report", "--out", folder / "short")
    ran = run(*words, "--budget", "1e-6")
    assert ran.status == 0, ran.err
    cert = load_certificate(folder / "short" / "certificate.safetensors")
    assert cert.steps is not None and cert.steps.tolist() == [1] * 70
    assert bool((cert.radius[cert.correct] > 0).all())
    assert any("budget" in note for note in cert.notes)
    assert run(*words, "--budget", "0").status == 2


def test_a_requirement_that_attacks_refute_says_so() -> None:
    certificate = curvcert.certify(
        curvcert.trace(load_demo_network(), torch.zeros(1, 1, 8, 8)), *digits(4), method="product"
    )
    broken = dataclasses.replace(certificate, attack_radius=torch.full((4,), 0.1, dtype=torch.float64))
    one = Requirement.read("0.5@0.2")
    assert "At most 0.0% can be: attacks broke the others." in one.verdict(broken)
    assert "Up to 100.0% is open." in one.verdict(certificate)


@pytest.mark.parametrize("text", ["0.9", "2@0.1", "-1@0.1", "0.9@0", "0.9@x", "@", "0.9@inf"])
def test_a_requirement_that_is_none_is_told(folder: Path, run: Runner, text: str) -> None:
    ran = run("certify", DEMO, "digits", *QUICK, "--require", text, "--out", "out")
    assert ran.status == 2
    assert "--require expects" in ran.err
    assert not (folder / "out").exists()


def test_the_files_hold_what_the_library_computes(folder: Path, run: Runner) -> None:
    words = (
        "nets:small",
        "digits",
        "--samples",
        6,
        "--part-size",
        4,
        "--box",
        0,
        1,
        "--eps",
        "1/50,0.1",
        "--out",
        "out",
    )
    ran = run("certify", *words)
    assert ran.status == 0, ran.err
    for text in ("6 samples in l2", "proven at least", "0.02", "report: out/report.html"):
        assert text in ran.out
    names = {path.name for path in (folder / "out").iterdir()}
    assert {"certificate.safetensors", "network.safetensors", "samples.csv", "report.html", "report.json"} < names

    with torch.random.fork_rng(devices=[]):
        network = load_network(ModelChoice("nets:small"), (1, 8, 8))
    expected = curvcert.certify(network, *digits(6), box=(0, 1), epsilons=[0.02, 0.1])
    found = load_certificate(folder / "out" / "certificate.safetensors")
    torch.testing.assert_close(found.radius, expected.radius, rtol=1e-8, atol=0)
    assert bool((found.radius <= expected.radius).all())
    assert bool((found.radius <= found.search_radius).all())
    with (folder / "out" / "samples.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["radius"]) for row in rows] == found.radius.tolist()
    assert [int(row["label"]) for row in rows] == digits(6)[1].tolist()
    assert [int(row["predicted"]) for row in rows] == network(digits(6)[0]).argmax(dim=1).tolist()
    assert [row["correct"] == "true" for row in rows] == found.correct.tolist()
    assert json.loads((folder / "out" / "report.json").read_text())["at_epsilons"]["epsilons"] == [0.02, 0.1]


def test_radii_inside_the_box(folder: Path, run: Runner) -> None:
    words = ("--samples", 4, "--method", "linear", "--p", "inf", "--box", 0, 1, "--inside-box", "--out", "out")
    ran = run("certify", DEMO, "digits", *words)
    assert ran.status == 0, ran.err
    assert "4 samples in linf, inside the box [0, 1]" in ran.out
    found = load_certificate(folder / "out" / "certificate.safetensors")
    assert found.inside_box and str(found.box) == "[0, 1]"
    page, data = ((folder / "out" / name).read_text() for name in ("report.html", "report.json"))
    assert "and inside the box [0, 1], before" in page and "a box limits witnesses, not radii" not in page
    assert json.loads(data)["inside_box"] is True and json.loads(data)["box"] == "[0, 1]"
    other = run("certify", DEMO, "digits", *words[:-3], "--resume", "--out", "out")
    assert other.status == 2 and "inside_box (now false, then true)" in other.err


def test_a_machine_reads_one_object(folder: Path, run: Runner) -> None:
    ran = run("certify", DEMO, "digits", *QUICK, "--p", "inf", "--no-search", "--json", "--out", "out")
    assert (ran.status, ran.err, ran.out.count("\n")) == (0, "Bounding the network ...\n", 1)
    found = json.loads(ran.out)
    certificate = load_certificate(folder / "out" / "certificate.safetensors")
    assert found["p"] == "inf" and math.isinf(certificate.p)
    assert found["median_radius"] == float(certificate.radius.median())
    assert [row["certified"] for row in found["at"]] == [
        certificate.certified_accuracy(row["eps"]) for row in found["at"]
    ]
    assert all(Path(path).is_file() for path in found["files"].values())
    quiet = run("certify", DEMO, "digits", *QUICK, "--quiet", "--out", "other")
    assert (quiet.status, quiet.out[:8], quiet.out.count("\n"), quiet.err) == (0, "proven: ", 1, "")


def test_a_bar_with_the_time_left_on_a_terminal_only(
    folder: Path, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("certify", "nets:small", "digits", "--samples", 4, "--part-size", 2, "--no-report", "--method", "liplt")
    assert "certifying" not in run(*words, "--out", "dark").err
    monkeypatch.setenv("FORCE_COLOR", "1")  # as rich tells a terminal
    error = run(*words, "--out", "bright").err
    assert "certifying" in error
    assert "4/4" in error


def test_data_of_your_own_with_names_and_a_normalisation(folder: Path, run: Runner) -> None:
    x, y = digits(4)
    write_npz(folder / "data.npz", 2 * x.numpy().astype(np.float32), y.numpy())
    names = ",".join("abcdefghij")
    words = ("--no-report", "--no-search", "--method", "liplt", "--quiet")
    assert run("certify", DEMO, "digits", "--samples", 4, *words, "--out", "plain").status == 0
    scaled = run("certify", DEMO, "data.npz", *words, "--normalise", 0, 2, "--class-names", names, "--out", "scaled")
    assert scaled.status == 0, scaled.err
    # Inputs twice as large, divided by two in the model: radii twice as large.
    plain, twice = (load_certificate(folder / out / "certificate.safetensors").radius for out in ("plain", "scaled"))
    torch.testing.assert_close(twice, 2 * plain, rtol=1e-7, atol=0)
    rows = (folder / "scaled" / "samples.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in rows[1:]] == ["abcdefghij"[k] for k in y.tolist()]


def test_one_output_and_a_threshold(folder: Path, run: Runner) -> None:
    (folder / "scores.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef make():\n    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double().eval()\n"
    )
    x = np.random.default_rng(0).standard_normal((6, 3))
    write_npz(folder / "data.npz", x, np.array([0, 1] * 3))
    ran = run("certify", "scores:make", "data.npz", "--out", "out")
    assert ran.status == 2 and "--threshold 0" in ran.err
    words = ("--threshold", -0.1, "--method", "liplt", "--no-search")
    assert run("certify", "scores:make", "data.npz", *words, "--out", "out").status == 0
    assert "threshold -0.1" in (folder / "out" / "report.html").read_text()
    assert load_certificate(folder / "out" / "certificate.safetensors").threshold == -0.1
    for model in ("out/network.safetensors", "scores:make"):
        ran = run("check", "out/certificate.safetensors", model, "data.npz")
        assert (ran.status, "The certificate holds" in ran.out) == (0, True), ran.out


@pytest.mark.slow
def test_a_check_proves_refuses_and_says_so_by_its_status(folder: Path, run: Runner) -> None:
    assert run("certify", DEMO, "digits", *QUICK, "--quiet", "--out", "out").status == 0
    ran = run("check", "out/certificate.safetensors", "out/network.safetensors", "digits")
    assert ran.status == 0
    for text in ("The certificate holds: 6 proven.", "6 of 6 (100%)", "Rechecked:", "Taken as given:", "you mean"):
        assert text in ran.out
    ran = run("check", "out/certificate.safetensors", DEMO, "digits", "--json")
    found = json.loads(ran.out)
    assert (ran.status, found["counts"], found["radii"]) == (0, {"proven": 6}, {"proven": 6, "claimed": 6})
    assert not any("the model you mean" in line for line in found["given"])

    header, arrays = read_tensor_file("out/certificate.safetensors", "curvcert-certificate", 2)
    larger = {name: value * 4 if name in ("radius", "pair_radius") else value for name, value in arrays.items()}
    write_tensor_file("forged.safetensors", "curvcert-certificate", 2, header, larger)
    ran = run("check", "forged.safetensors", DEMO, "digits", "--quiet")
    assert ran.status == 1
    assert ran.out.startswith("NOT PROVEN:")
    unknown = {name: value for name, value in arrays.items() if name != "method"} | {"method": 0 * arrays["method"]}
    new = {"methods": ["new"], "proven_by": [["new"]]}
    write_tensor_file("unknown.safetensors", "curvcert-certificate", 2, header | new, unknown)
    ran = run("check", "unknown.safetensors", DEMO, "digits", "--quiet")
    assert (ran.status, ran.out) == (4, "NOT PROVEN: 6 cannot check.\n")
    ran = run("check", "out/certificate.safetensors", "nets:small", "digits", "--json")
    assert (ran.status, json.loads(ran.out)["holds"]) == (1, False)
    assert "another network" in json.loads(ran.out)["reasons"][0]
    assert run("check", "out/certificate.safetensors", DEMO, "digits", "--split", "train", "--quiet").status == 1
    ran = run("check", "out/certificate.safetensors", "out/network.safetensors", "digits", "--eval")
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    x, y = digits(2)
    write_npz(folder / "few.npz", x.numpy(), y.numpy())
    ran = run("check", "out/certificate.safetensors", DEMO, "few.npz")
    assert (ran.status, ran.err) == (
        2,
        "InvalidInput: out/certificate.safetensors is about 6 samples, few.npz has 2. Give the same data.\n",
    )


def test_a_folder_is_not_mixed_with_another_run(folder: Path, run: Runner) -> None:
    assert run("certify", "nets:small", "digits", *QUICK, "--quiet", "--out", "out").status == 0
    again = ("certify", "nets:small", "digits", *QUICK, "--out", "out", "--quiet")
    assert "already holds a certification" in run(*again).err
    for words, name in (
        (("--method", "liplt"), 'method (now "liplt", then "compositional")'),
        (("--box", 0, 1), "box (now [0.0, 1.0], then null)"),
        (("--samples", 5), "inputs ("),
        (("--part-size", 3), "part_size (now 3, then 4)"),
        (("--seed", 3), "search ("),
        (("--p", "inf"), 'p (now "inf", then 2.0)'),
        (("--eps", "1/10"), "eps (now [0.1], then null)"),
        (("--normalise", 0, 2), "network ("),
    ):
        ran = run(*again, "--resume", *words)
        assert ran.status == 2
        assert f"holds another certification, which differs in {name}" in ran.err
    resumed = run(*again, "--resume", "--batch-size", 1)
    assert (resumed.status, resumed.err) == (0, "")


def test_a_damaged_or_foreign_part_is_computed_again(folder: Path, run: Runner) -> None:
    words = ("certify", "nets:small", "digits", *QUICK, "--out", "out")
    assert run(*words, "--quiet").status == 0
    whole = (folder / "out" / "certificate.safetensors").read_bytes()
    first, second = sorted((folder / "out" / "parts").glob("part-*"))
    content = bytearray(second.read_bytes())
    content[-9] ^= 1
    second.write_bytes(content)
    ran = run(*words, "--resume")
    assert (ran.status, ran.err.count("Samples 4 .. 5 are computed again")) == (0, 1)
    assert (folder / "out" / "certificate.safetensors").read_bytes() == whole
    first.write_bytes(second.read_bytes())
    assert "is about another network, other inputs" in run(*words, "--resume").err
    sorted((folder / "out" / "parts").glob("search-*"))[0].unlink()
    assert "Samples 0 .. 3 are computed again: There is no file" in run(*words, "--resume").err
    assert (folder / "out" / "certificate.safetensors").read_bytes() == whole


PARTS = 40
"""Many small parts, so that a signal after the first ones meets a run that is far from its end on any machine."""
LONG = (DEMO, "digits", "--samples", PARTS, "--part-size", 1, "--method", "compositional", "--no-report")


def stopped(folder: Path, how: signal.Signals, after: int, *words: object) -> tuple[int, str, list[Path]]:
    """Start a process, end it once so many parts are saved; return its status, what it said, and the parts."""
    with subprocess.Popen(
        command("certify", *LONG, "--out", "out", *words),
        cwd=folder,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A job in the background inherits that Ctrl-C is ignored; a person's terminal does not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        deadline = time.monotonic() + 120
        while len(list((folder / "out").glob("parts/part-*"))) < after:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(how)
        _, error = process.communicate(timeout=60)
    parts = sorted((folder / "out" / "parts").glob("part-*"))
    assert after <= len(parts) < PARTS
    assert not (folder / "out" / "certificate.safetensors").exists()
    return process.returncode, error, parts


@pytest.mark.slow
def test_a_run_that_was_stopped_and_killed_ends_as_if_nothing_had_happened(folder: Path, run: Runner) -> None:
    status, error, parts = stopped(folder, signal.SIGINT, 1)
    assert status == 130
    assert f"Stopped: {len(parts)} of {PARTS} samples are saved in out. Go on with --resume." in error
    assert "Traceback" not in error
    status, _, parts = stopped(folder, signal.SIGKILL, len(parts) + 1, "--resume")
    assert status == -signal.SIGKILL
    before = {path: path.stat().st_mtime_ns for path in parts}
    assert run("certify", *LONG, "--out", "out", "--resume", "--quiet").status == 0
    assert {path: path.stat().st_mtime_ns for path in parts} == before
    assert run("certify", *LONG, "--out", "whole", "--quiet").status == 0
    for name in ("samples.csv", "certificate.safetensors", "network.safetensors"):
        assert (folder / "out" / name).read_bytes() == (folder / "whole" / name).read_bytes()


def test_what_is_all_saved_is_not_bounded_again(folder: Path, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("certify", DEMO, "digits", *QUICK, "--out", "out")
    assert "Bounding the network" in run(*words).err
    (folder / "out" / "samples.csv").unlink()
    monkeypatch.setattr("curvcert.cli.certify.certifier", None)
    ran = run(*words, "--resume")
    assert (ran.status, ran.err) == (0, "")
    assert "6 samples in l2" in ran.out
    assert (folder / "out" / "samples.csv").exists()


@pytest.mark.slow
def test_a_report_that_is_stopped_loses_nothing(folder: Path, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    words = ("certify", DEMO, "digits", *QUICK[:-1], "--out", "out")
    with monkeypatch.context() as patched:
        patched.setattr("curvcert.cli.certify.report_data", stopped)
        ran = run(*words)
    assert ran.status == 130
    assert "6 samples in l2" in ran.out
    assert "all is saved in out but the report. Write it with --resume." in ran.err
    assert run(*words, "--resume").status == 0
    assert (folder / "out" / "report.html").exists()


def test_an_affine_model_has_a_report_too(folder: Path, run: Runner) -> None:
    (folder / "affine.py").write_text(
        "from torch import nn\n\n\ndef make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()\n"
    )
    ran = run("certify", "affine:make", "digits", "--samples", 3, "--out", "out")
    assert ran.status == 0, ran.err
    looseness = json.loads((folder / "out" / "report.json").read_text())["looseness"]
    assert looseness["hessian_found"] == 0.0
    bounds = [bound["value"] for bound in looseness["breakdowns"] if bound["constant"] == "L"]
    assert 0.99 * min(bounds) < looseness["slope_found"] <= min(bounds)


@pytest.mark.skipif(os.name != "posix", reason="rights of files are told otherwise here")
def test_the_files_to_hand_on_have_the_rights_of_any_other(folder: Path, run: Runner) -> None:
    assert run("certify", DEMO, "digits", *QUICK, "--out", "out").status == 0
    (folder / "any").write_text("")
    for name in ("certificate.safetensors", "network.safetensors"):
        assert (folder / "out" / name).stat().st_mode == (folder / "any").stat().st_mode


def test_where_no_sample_is_correct_it_asks_why(folder: Path, run: Runner) -> None:
    digits = load_digits("test")
    write_npz(folder / "data.npz", digits.as_float64()[:2], (digits.labels[:2] + 1) % 10)
    words = ("--out", "out", "--method", "lipschitz", "--no-search", "--no-report")
    ran = run("certify", "curvcert.data:load_demo_network", "data.npz", *words)
    assert ran.status == 0 and "--weights" in ran.err and "labels numbered otherwise" in ran.err
