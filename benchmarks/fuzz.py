"""Damaged and forged files of every kind, each read in a process that is watched.

Claim: of more than 10,000 such files none makes curvcert run code, end as by a fault of its own (exit status 3), take
more than 1 GB of memory, that of Python and PyTorch included, or more than ten seconds of processor time.
Hardware: whatever it runs on; the record says which.  Linux, which tells the peak of a process's memory.
Trials: `--cases` of each kind of file, in turn cut and damaged byte by byte, forged and sealed anew, and replaced by
a pickle that would run code.  Case k of a kind is the same file each time.

A case that breaks the claim is left in `--keep`, and the command fails.

    python -m benchmarks.fuzz [--cases 1000] [--kinds KIND ...] [--quick]
"""

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from torch import nn

from benchmarks import forgeries
from benchmarks.damages import DAMAGES
from benchmarks.forged_data import DATA_KINDS, data_files
from benchmarks.forgeries import CANARY, Forge
from benchmarks.fuzzed_networks import NETWORKS, small
from benchmarks.harness import ROOT, write_record
from curvcert import cli
from curvcert.attacks import Attack
from curvcert.certificates import Certificate, certify, load_certificate
from curvcert.certificates.record import KIND as CERTIFICATE
from curvcert.certificates.record import VERSION as CERTIFICATE_VERSION
from curvcert.checker import check_certificate
from curvcert.checker.files import read
from curvcert.checker.model import network_digest
from curvcert.cli.inputs import Inputs, load_inputs
from curvcert.cli.models import ModelChoice, load_network
from curvcert.cli.saved_parts import Plan, SavedParts, digest_of
from curvcert.errors import CurvcertError, InvalidInput
from curvcert.falsifier import Counterexample, load_counterexample, replay, save_counterexample
from curvcert.network import Network, load_onnx, trace
from curvcert.network.network_file import KIND as NETWORK
from curvcert.network.network_file import VERSION as NETWORK_VERSION
from curvcert.network.network_file import save_network
from curvcert.network.network_reading import load_network as read_network
from curvcert.nn.architectures import architecture
from curvcert.properties import load_vnnlib
from curvcert.tensor_files import read_tensor_file, safetensors_content, write_tensor_file
from curvcert.training import Recipe, load_model, load_recipe, save_model
from curvcert.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint

MOST_SECONDS, MOST_BYTES = 10.0, 2**30
FAULT = 3
_HARD_SECONDS, _HARD_BYTES = 60, 4 * 2**30
"""When the system ends the process, waiting included: what goes so far is a violation, and must not take the machine
with it."""

_BLOCK = 3000
"""Cases that one process reads, of as many kinds as these are enough for: to write the valid files takes seconds."""

_CODE = (
    "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "pickle.find_class",
    "socket.bind", "socket.connect", "subprocess.Popen", "ctypes.dlopen", "code.__new__", "shutil.rmtree",
)  # fmt: skip
"""Events of Python's own audit that no reading of a file may cause."""


@dataclass(frozen=True)
class Specimen:
    """A valid file of some kind, how it is forged, and what reads it."""

    file: Path
    forge: Forge
    read: Callable[[Path], object]


@dataclass(frozen=True)
class Outcome:
    """What became of a case: how reading it ended, and what it took."""

    kind: str
    case: int
    ended: str
    status: int
    seconds: float
    memory: int
    code: tuple[str, ...]

    @property
    def broken(self) -> str | None:
        """What of the claim does not hold, if anything."""
        if self.code:
            return f"ran code: {', '.join(self.code)}"
        if self.status == FAULT:
            return f"ended by a fault: {self.ended}"
        if self.seconds > MOST_SECONDS:
            return f"took {self.seconds:.1f} s"
        return f"took {self.memory / 2**20:.0f} MiB" if self.memory > MOST_BYTES else None


def specimens(folder: Path) -> dict[str, Specimen]:
    """Write a valid file of every kind into a folder."""
    certified = {kind: _certified(kind, folder) for kind in NETWORKS}
    net, x, certificate = certified["network"]
    saved, network = _pair("network", folder)
    arrays, labels, about_it = x.numpy(), certificate.label.numpy(), certificate.evidence
    assert about_it is not None
    one = trace(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).eval(), torch.zeros(1, 4))
    decided, score = folder / "decided.safetensors", save_network(one.with_threshold(0.1), folder / "score.safetensors")
    certify(one, x, threshold=0.1, method="unrolled").save(decided)
    data = folder / "data.npz"
    np.savez(data, x=arrays, y=labels)
    plan = Plan("0", about_it.network, digest_of(x), digest_of(certificate.label), 3, 3, _OPTIONS)
    parts = SavedParts(folder / "parts", plan, Inputs(x, certificate.label, "data"))
    parts.open(False)
    parts.save(slice(0, 3), certificate, Attack(torch.ones(3, dtype=torch.bool), x.clone()))
    trained, weights = folder / "model.safetensors", folder / "weights.safetensors"
    recipe = Recipe(data="digits", architecture="digits")
    save_model(trained, architecture("digits"), recipe)
    _save_weights(weights)
    written = folder / "recipe.toml"
    written.write_text(_RECIPE)
    kept = save_checkpoint(folder / "checkpoints", Checkpoint(7, {"w": torch.ones(5), "v": torch.ones(2, 3)}, {"a": 1}))
    zero = torch.zeros(4, dtype=torch.float64)
    u = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    example = Counterexample("lipschitz", "a guess", net, zero, zero + 1, u, 2.0, "ball", zero, 2.0, claimed=0.1)
    shown = save_counterexample(example, folder / "example.safetensors")
    stated = folder / "spec.vnnlib"
    stated.write_text(_PROPERTY)
    exported = folder / "net.onnx"
    exported.write_bytes(_exported())
    of_tokens = folder / "tokens.onnx"
    of_tokens.write_bytes(_of_tokens())

    def in_parts(_: Path) -> object:
        return parts.opened() and parts.load(slice(0, 3))

    return {
        "certificate": Specimen(saved, forgeries.sealed, lambda file: _checked(file, network, arrays, labels)),
        **{kind: _network(kind, folder, found[1]) for kind, found in certified.items()},
        **{f"{kind}, read by the library": _network(kind, folder, found[1], True) for kind, found in certified.items()},
        "counterexample": Specimen(shown, forgeries.sealed, lambda file: replay(load_counterexample(file))),
        "part of a certification": Specimen(parts.certificate_path(slice(0, 3)), forgeries.sealed, in_parts),
        "search": Specimen(parts.search_path(slice(0, 3)), forgeries.sealed, in_parts),
        "plan": Specimen(folder / "parts" / "plan.json", forgeries.plan, in_parts),
        "model": Specimen(trained, forgeries.model, load_model),
        "weights": Specimen(weights, forgeries.tensors, lambda file: load_network(_with_weights(file))),
        "checkpoint": Specimen(kept / "checkpoint.json", forgeries.index, lambda file: load_checkpoint(file.parent)),
        "shard": Specimen(kept / "shard-00000.safetensors", forgeries.tensors, lambda f: load_checkpoint(f.parent)),
        "recipe": Specimen(written, forgeries.recipe, load_recipe),
        "data": Specimen(data, forgeries.archive, lambda file: load_inputs(str(file))),
        "property": Specimen(stated, forgeries.statement, load_vnnlib),
        "ONNX": Specimen(exported, forgeries.graph, load_onnx),
        "ONNX of tokens": Specimen(of_tokens, forgeries.graph, load_onnx),
        "certificate of one output": Specimen(
            decided, forgeries.sealed, lambda file: _checked(file, score, arrays, None)
        ),
        **{kind: Specimen(*parts) for kind, parts in data_files(folder).items()},
    }


def _pair(kind: str, folder: Path) -> tuple[Path, Path]:
    return folder / f"{kind} certificate.safetensors", folder / f"{kind}.safetensors"


def _certified(kind: str, folder: Path) -> tuple[Network, torch.Tensor, Certificate]:
    """Write a network and a certificate of it."""
    make, shape, method = NETWORKS[kind]
    torch.manual_seed(0)
    net = trace(make().eval(), torch.zeros(1, *shape))
    x = torch.rand(3, *shape, dtype=torch.float64)
    certificate = certify(net, x, box=(0.0, 1.0), method=method)
    certificate_path, network_path = _pair(kind, folder)
    certificate.save(certificate_path)
    save_network(net, network_path)
    return net, x, certificate


def _network(kind: str, folder: Path, x: torch.Tensor, library: bool = False) -> Specimen:
    """Return a network file as one that the library reads, or that the checker does beside a certificate of it."""
    saved, network = _pair(kind, folder)
    header, held = read_tensor_file(saved, CERTIFICATE, CERTIFICATE_VERSION)

    def check(file: Path) -> object:
        # A forger makes both: a certificate of another network would be sent back before any engine ran.
        about = header | {"network": network_digest(read(file, NETWORK, NETWORK_VERSION))}
        return check_certificate(
            write_tensor_file(saved, CERTIFICATE, CERTIFICATE_VERSION, about, held), file, x.numpy()
        )

    return Specimen(network, forgeries.sealed, (lambda file: read_network(file)(x)) if library else check)


KINDS = [
    "certificate", *NETWORKS, *(f"{kind}, read by the library" for kind in NETWORKS), "counterexample",
    "part of a certification", "search", "plan", "model", "weights", "checkpoint", "shard", "recipe", "data",
    "property", "ONNX", "ONNX of tokens", "certificate of one output", *DATA_KINDS,
]  # fmt: skip
_OPTIONS: dict[str, Any] = {"p": 2.0, "method": "unrolled", "eps": None, "box": (0.0, 1.0), "search": {"seed": 0}}
_RECIPE = """data = "digits"
architecture = "digits"
activation = "tanh"
loss = "crm"
epochs = 30
tau = 0.25
learning_rate = 1e-3
flip = false
epsilons = [0.1, "36/255"]
"""
_PROPERTY = """; violated where Y_1 is as large as Y_0, or twice Y_2 is above it
(declare-const X_0 Real) (declare-const X_1 Real)
(declare-const Y_0 Real) (declare-const Y_1 Real) (declare-const Y_2 Real)
(assert (<= X_0 0.1)) (assert (>= X_0 (- 0.1)))
(assert (and (<= X_1 1e-1) (>= X_1 (* 2 -0.05))))
(assert (or (and (<= Y_0 Y_1)) (and (> (+ Y_2 Y_2) Y_0) (>= (- Y_1 Y_2 3) .5))))
"""


def _checked(certificate: Path, network: Path, x: Any, y: Any) -> object:
    load_certificate(certificate)
    return check_certificate(certificate, network, x, y)


def _with_weights(file: Path) -> ModelChoice:
    return ModelChoice("benchmarks.fuzzed_networks:small", file, None, "4")


def _save_weights(path: Path) -> None:
    arrays = {name: value.numpy() for name, value in small().state_dict().items()}
    path.write_bytes(safetensors_content({}, arrays))


def _of_tokens() -> bytes:
    """Return an ONNX file with a fixed batch, a GRU, a normalisation, attention by hand, and heads beside the batch."""
    draw = np.random.default_rng(0)
    constants = {
        "W": draw.standard_normal((1, 12, 3)), "R": draw.standard_normal((1, 12, 4)),
        "B": draw.standard_normal((1, 24)),
        "s": draw.standard_normal(4), "V": draw.standard_normal((12, 2)),
    }  # fmt: skip
    whole = {"gone": [1], "heads": [-1, 2, 2], "back": [1, -1]}
    tensors = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in constants.items()]
    tensors += [numpy_helper.from_array(np.array(value), name) for name, value in whole.items()]
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], name="turn", perm=[1, 0, 2]),
        helper.make_node("GRU", ["t", "W", "R", "B"], ["g"], name="gru", hidden_size=4, linear_before_reset=1),
        helper.make_node("Squeeze", ["g", "gone"], ["h"], name="squeeze"),
        helper.make_node("LayerNormalization", ["h", "s"], ["l"], name="norm"),
        helper.make_node("Reshape", ["l", "heads"], ["q"], name="heads"),
        helper.make_node("Transpose", ["q"], ["u"], name="by_heads", perm=[1, 0, 2]),
        helper.make_node("Transpose", ["u"], ["v"], name="keys", perm=[0, 2, 1]),
        helper.make_node("MatMul", ["u", "v"], ["a"], name="scores"),
        helper.make_node("Softmax", ["a"], ["p"], name="softmax", axis=-1),
        helper.make_node("MatMul", ["p", "u"], ["o"], name="mix"),
        helper.make_node("Reshape", ["o", "back"], ["f"], name="back"),
        helper.make_node("MatMul", ["f", "V"], ["y"], name="last"),
    ]
    source = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 3])
    target = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "net", [source], [target], tensors)
    return bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    )


def _exported() -> bytes:
    """Return an ONNX file with a convolution, a pooling, a formula, a computed shape and a dense end."""
    draw = np.random.default_rng(0)
    constants = {
        "K": draw.standard_normal((2, 1, 3, 3)), "c": draw.standard_normal(2), "W": draw.standard_normal((18, 3)),
    }  # fmt: skip
    tensors = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in constants.items()]
    tensors += [numpy_helper.from_array(np.array(value), name) for name, value in (("one", [1]), ("rest", [-1]))]
    nodes = [
        helper.make_node("Conv", ["x", "K", "c"], ["z"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("Sigmoid", ["z"], ["s"], name="sigmoid"),
        helper.make_node("Mul", ["z", "s"], ["h"], name="silu"),
        helper.make_node("AveragePool", ["h"], ["p"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Shape", ["p"], ["n"], name="shape"),
        helper.make_node("Slice", ["n", "zero", "one"], ["b"], name="slice"),
        helper.make_node("Concat", ["b", "rest"], ["r"], name="concat", axis=0),
        helper.make_node("Reshape", ["p", "r"], ["f"], name="reshape"),
        helper.make_node("Gemm", ["f", "W"], ["y"], name="gemm", alpha=0.5),
    ]
    tensors.append(numpy_helper.from_array(np.array([0]), "zero"))
    source = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", 1, 6, 6])
    target = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "net", [source], [target], tensors)
    opset = [helper.make_opsetid("", 17)]
    return bytes(helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString())


def made(specimen: Specimen, content: bytes, kind: str, case: int) -> bytes:
    """Return case number so and so of a kind: a file made from the valid one."""
    draw = random.Random(f"{kind} {case}")
    if case % 20 == 19:
        return forgeries.pickled(content, draw)
    if case % 2:
        return specimen.forge(content, draw)
    return bytes(DAMAGES[case // 2 % len(DAMAGES)](bytearray(content), draw))


class Watch:
    """What Python's audit tells of this process while a file is read."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._on = str(folder), False
        self.found: list[str] = []
        sys.addaudithook(self._heard)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Listen for a while."""
        self.found, self._on = [], True
        try:
            yield
        finally:
            self._on = False

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._on:
            return
        if event in _CODE:
            self.found.append(f"{event} {args!r:.80}")
        if event == "open" and self._writes(*args):
            self.found.append(f"opened {args[0]!r:.80} to write")

    def _writes(self, path: Any, mode: Any, flags: Any) -> bool:
        wanted = bool(isinstance(mode, str) and set(mode) & set("wax+"))
        wanted |= isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        inside = isinstance(path, str) and (path.startswith(self._folder) or path in ("/dev/null", _PEAK))
        return wanted and not inside


_PEAK = "/proc/self/clear_refs"


def judged(specimen: Specimen, kind: str, case: int, watch: Watch) -> Outcome:
    """Read the file as it is now, and return how that ended."""
    Path(_PEAK).write_text("5")  # the peak of memory starts anew
    start = time.process_time()
    with watch.watching():
        try:
            specimen.read(specimen.file)
            ended, status = "read", 0
        except Exception as error:
            ended = type(error).__name__
            status = cli.told(error)[0]
            if not isinstance(error, CurvcertError):
                ended += f": {str(error)[:200]}"
    seconds = time.process_time() - start
    code = list(watch.found)
    if Path(CANARY).exists():
        code.append(f"{CANARY} is there")
        Path(CANARY).unlink()
    return Outcome(kind, case, ended, status, seconds, _peak(), tuple(code))


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def work(kinds: Sequence[str], cases: range) -> None:
    """Read cases of some kinds, and print a line before and after each: what a process of its own does."""
    resource.setrlimit(resource.RLIMIT_DATA, (_HARD_BYTES, _HARD_BYTES))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        os.chdir(folder)
        valid, watch = specimens(folder), Watch(folder)
        for kind in kinds:
            specimen = valid[kind]
            content = specimen.file.read_bytes()
            specimen.read(specimen.file)  # what libraries load when they are first used is not the files' doing
            for case in cases:
                specimen.file.write_bytes(made(specimen, content, kind, case))
                print(json.dumps({"kind": kind, "begun": case}), flush=True)
                signal.alarm(_HARD_SECONDS)
                print(json.dumps(asdict(judged(specimen, kind, case, watch))), flush=True)
                signal.alarm(0)
            specimen.file.write_bytes(content)
        os.chdir(ROOT)


def read_apart(kinds: Sequence[str], cases: range) -> list[Outcome]:
    """Return what became of cases, read by a process of its own; a case that ends it is a fault, and the last.

    Raises:
        InvalidInput: if the process ends beside the cases.
    """
    command = [sys.executable, "-m", "benchmarks.fuzz", "--work", str(cases.start), str(cases.stop), "--kinds", *kinds]
    path = os.pathsep.join([str(Path(cli.__file__).parents[2]), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace")
    told = [json.loads(line) for line in done.stdout.splitlines()]
    found = [Outcome(**{**each, "code": tuple(each["code"])}) for each in told if "begun" not in each]
    if told and "begun" in told[-1]:
        ended = f"the process ended with {done.returncode}: {done.stderr[-300:]}"
        return [*found, Outcome(told[-1]["kind"], told[-1]["begun"], ended, FAULT, 0.0, 0, ())]
    if done.returncode:
        raise InvalidInput(f"The reading of {kinds} could not be watched: {done.stderr[-2000:]}")
    return found


def campaign(kinds: Sequence[str], cases: int, keep: Path, console: Console) -> tuple[dict[str, Any], list[str]]:
    """Read so many cases of each kind; return the figures, and what broke the claim."""
    figures: dict[str, Any] = {}
    broken: list[str] = []
    together: list[Outcome] = []
    for k, kind in enumerate(kinds):
        at_once = max(1, _BLOCK // cases)
        if k % at_once == 0:
            together = read_apart(kinds[k : k + at_once], range(min(_BLOCK, cases)))
        found = [outcome for outcome in together if outcome.kind == kind]
        while len(found) < cases:  # of many cases, or where one has ended the process
            found += read_apart([kind], range(len(found), min(len(found) + _BLOCK, cases)))
        ended = Counter(outcome.ended for outcome in found)
        figures[kind] = {
            "cases": len(found),
            "ended": dict(sorted(ended.items())),
            "most_seconds": round(max(outcome.seconds for outcome in found), 3),
            "most_mebibytes": round(max(outcome.memory for outcome in found) / 2**20),
        }
        console.print(f"{kind}: {figures[kind]}", markup=False)
        for outcome in found:
            if outcome.broken is not None:
                broken.append(f"{kind}, case {outcome.case}: {outcome.broken}")
                console.print(broken[-1], markup=False, style="red")
                _keep(keep, kind, outcome.case)
    return figures, broken


def _keep(keep: Path, kind: str, case: int) -> None:
    keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        specimen = specimens(Path(folder))[kind]
        content = made(specimen, specimen.file.read_bytes(), kind, case)
        (keep / f"{kind.replace(' ', '-')}-{case}{specimen.file.suffix}").write_bytes(content)


def main() -> None:
    """Damage, forge, read and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1_000, help="of each kind")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="where what breaks the claim is left")
    parser.add_argument("--quick", action="store_true", help="20 of each kind, and no record")
    parser.add_argument("--work", nargs=2, type=int, metavar=("FIRST", "STOP"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.kinds, range(*options.work))
        return
    console = Console(soft_wrap=True)
    cases = 20 if options.quick else options.cases
    figures, broken = campaign(options.kinds, cases, options.keep, console)
    total = sum(each["cases"] for each in figures.values())
    console.print(f"{total} files, {len(broken)} of them break the claim")
    if not options.quick and options.kinds == KINDS:
        config = {"cases": cases, "most_seconds": MOST_SECONDS, "most_mebibytes": MOST_BYTES / 2**20, "threads": 1}
        command = f"python -m benchmarks.fuzz --cases {cases}"
        content = {"files": total, "broken": broken, "kinds": figures}
        console.print(f"recorded in {write_record('fuzz', command, 0, config, content)}")
    raise SystemExit(1 if broken else 0)


if __name__ == "__main__":
    main()
