"""`curvcert certify`: certified radii of a data set, as a file that can be checked, a table and a page."""

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, final

import typer
from rich.table import Table
from torch import Tensor

from curvcert._version import __version__
from curvcert.attacks import Attack
from curvcert.budget import budget_of
from curvcert.certificates import Certificate, Certifier, certifier, with_search
from curvcert.cli import options
from curvcert.cli.inputs import Inputs, load_inputs, require_fit
from curvcert.cli.models import ModelChoice, load_network
from curvcert.cli.output import Output, assumed
from curvcert.cli.requirements import Requirement, radii_to_decide
from curvcert.cli.sample_table import predictions, table_of_samples
from curvcert.cli.saved_parts import Plan, SavedParts, digest_of
from curvcert.cli.searching import ATTACKS, MULTIPLES, RESTARTS, STEPS, nearest_found, require_attack
from curvcert.cli.shared_certification import LOST_AFTER, Found, SharedCertification
from curvcert.errors import InvalidInput
from curvcert.folder_lock import locked
from curvcert.network import Network
from curvcert.network.network_file import network_digest, save_network
from curvcert.norms import validate_p
from curvcert.reporting.collecting import report_data, shown_epsilons
from curvcert.reporting.data import Required
from curvcert.reporting.decimals import percent_ceil, percent_floor
from curvcert.reporting.writing import write_report
from curvcert.training.distributed import place_from, require_device
from curvcert.whole_files import write_whole

INTERRUPTED, REQUIREMENT_MISSED = 130, 1
"""Exit statuses: after Ctrl-C, as shells have it, and where less is proven than `--require` asks for."""

FILES = {
    "certificate": "certificate.safetensors",
    "network": "network.safetensors",
    "samples": "samples.csv",
}
"""What a certification leaves in its folder, whether or not a report is written."""


def certify_command(
    model: options.ModelName,
    data: options.DataName,
    out: Annotated[
        Path,
        typer.Option(
            rich_help_panel=options.OUTPUT,
            help="The folder for the results; it is made if need be.",
            show_default=False,
        ),
    ],
    p: options.Norm = 2.0,
    eps: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=options.CLAIM,
            metavar="EPS,EPS",
            help="Radii to decide, such as 36/255,72/255: quicker, since nothing beyond them is proven. Leave it out "
            "for the largest radii.",
        ),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=options.CLAIM,
            metavar="SHARE@RADIUS",
            help="What must be proven, such as 0.9@36/255: if less is, the exit status is 1. Several are allowed.",
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            rich_help_panel=options.CLAIM,
            help="auto (the best of all), checkable (the best that check can prove again), lipschitz, "
            "anchored-lipschitz, line, linear, quadratic, norms, shell, anchored, product, liplt, lipsdp-recursion, "
            "compositional, unrolled or crc.",
        ),
    ] = "auto",
    box: Annotated[
        tuple[float, float] | None,
        typer.Option(
            rich_help_panel=options.CLAIM,
            metavar="LOW HIGH",
            help="The range of valid inputs; it limits witnesses, not radii.",
        ),
    ] = None,
    inside_box: Annotated[
        bool,
        typer.Option(
            "--inside-box",
            rich_help_panel=options.CLAIM,
            help="Prove the part of each ball that lies inside --box alone.",
        ),
    ] = False,
    threshold: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=options.CLAIM,
            help="For a model of one output: label 1 is where the output is above it, label 0 where it is below.",
        ),
    ] = None,
    normalise: options.Normalise = None,
    weights: options.Weights = None,
    evaluate: options.Evaluate = False,
    input_shape: options.InputShape = None,
    split: options.Split = "test",
    data_folder: options.DataFolder = None,
    labels: options.Labels = None,
    samples: Annotated[
        int | None, typer.Option(rich_help_panel=options.DATA, min=1, help="Only the first samples; all by default.")
    ] = None,
    class_names: Annotated[
        str | None,
        typer.Option(rich_help_panel=options.OUTPUT, metavar="A,B,C", help="Names of the classes, in order."),
    ] = None,
    search: Annotated[
        bool, typer.Option(rich_help_panel=options.SEARCH, help="Look for misclassified points, beside the proofs.")
    ] = True,
    attack: Annotated[
        str,
        typer.Option(
            rich_help_panel=options.SEARCH,
            metavar="NAME",
            help=f"What looks for them: {', '.join(ATTACKS)}. All but pgd need the package of that name.",
        ),
    ] = "pgd",
    seed: Annotated[int, typer.Option(rich_help_panel=options.SEARCH, min=0, help="The seed of that search.")] = 0,
    device: options.Device = "cpu",
    batch_size: Annotated[
        int | None, typer.Option(rich_help_panel=options.RUN, min=1, help="Samples at a time; chosen by default.")
    ] = None,
    budget: options.Budget = None,
    part_size: Annotated[
        int, typer.Option(rich_help_panel=options.RUN, min=1, help="Samples between two savings.")
    ] = 64,
    resume: Annotated[
        bool, typer.Option("--resume", rich_help_panel=options.RUN, help="Go on with the certification in the folder.")
    ] = False,
    lost_after: Annotated[
        float,
        typer.Option(
            rich_help_panel=options.RUN,
            min=2.0,
            metavar="SECONDS",
            help="Under torchrun: rank 0 takes over the parts of a rank that shows no sign of life for so long.",
        ),
    ] = LOST_AFTER,
    report: Annotated[
        bool, typer.Option(rich_help_panel=options.OUTPUT, help="Write report.html, its figures and its data.")
    ] = True,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Prove how far each input can move before its class changes.

    The first 20 embedded digits, by the network that comes with curvcert:

        curvcert certify curvcert.data:load_demo_network digits --samples 20 --box 0 1 --out out

    An ONNX file with its normalisation, on data of your own
    (numpy.savez("data.npz", x=inputs, y=labels)), at two radii:

        curvcert certify net.onnx data.npz --normalise 0.1307 0.3081 --box 0 1 --eps 36/255,72/255 --out out

    In a pipeline, which fails if less than 90% is proven at 36/255:

        curvcert certify net.onnx data.npz --require 0.9@36/255 --out out

    A PyTorch module that a function in net.py returns, with its weights:

        curvcert certify net:make_model mnist --weights weights.safetensors --eval --p inf --out out

    Stopped, or killed? The same command with --resume goes on from the parts
    that were saved, on as many processes as you like.

    Two processes share the work under torchrun; on GPUs, one process per GPU:

        torchrun --standalone --nproc-per-node 2 -m curvcert certify net.onnx data.npz --out out

    The folder then holds certificate.safetensors and network.safetensors for
    `curvcert check`, samples.csv with a row per sample, report.html with figures
    and data, and parts/, which may be removed once the rest is there.
    """
    output = Output(json, quiet)
    required = [Requirement.read(text) for text in require or ()]
    epsilons = radii_to_decide(None if eps is None else options.numbers(eps, "--eps"), required)
    names = None if class_names is None else [name.strip() for name in class_names.split(",")]
    inputs = load_inputs(data, split, data_folder, samples, labels)
    network = load_network(ModelChoice(model, weights, normalise, input_shape, evaluate), inputs.shape)
    network = network.decided(threshold)
    require_fit(network, inputs)
    if names is None and len(inputs.class_names) == network.outputs:
        names = list(inputs.class_names)
    if names is not None and len(names) != network.outputs:
        raise InvalidInput(f"--class-names has {len(names)} names, the model {network.outputs} classes. Give one each.")
    limit = budget_of(budget)
    # A search proves nothing: what time there is goes to the proofs.
    searched_by = attack if search and limit is None else None
    request = Request(validate_p(p), method, epsilons, box, inside_box, searched_by, seed, batch_size, budget)
    request.require_searchable()
    place = place_from()
    here = require_device(str(place.device(device)))
    parts = SavedParts(out / "parts", request.plan(network, inputs, part_size), inputs)
    shares = SharedCertification(parts, place, output, lost_after)

    @cache
    def ready() -> Certifier:  # for the first part that is missing: bounds may take minutes
        if place.is_first:
            output.notice("Bounding the network ...")
        shown = None if place.is_first and not quiet else False
        return certifier(network, request.p, method, box, inside_box, epsilons, here, shown, limit)

    def compute(part: slice) -> Found:
        later = sum(one.stop - one.start for one in parts if one.start > part.start) // place.size
        return certified(ready(), inputs.x[part], inputs.y[part], request, later)

    # One run in a folder; the other ranks of this one write below the lock of the first.
    with locked(out, "curvcert certify") if place.is_first else nullcontext():
        try:
            with shares.opened(resume or place.restarted):
                found = shares.certify(compute)
        except KeyboardInterrupt:
            if place.is_first:
                done = sum(part.stop - part.start for part in parts if parts.certificate_path(part).exists())
                print(
                    f"Stopped: {done} of {len(inputs)} samples are saved in {out}. Go on with --resume.",
                    file=sys.stderr,
                )
            raise typer.Exit(INTERRUPTED) from None
        if found is None:
            return  # the results are rank 0's to write
        certificate, points = found
        certificate = certificate.save(out / FILES["certificate"])
        save_network(network.classified, out / FILES["network"])
        rows = table_of_samples(certificate, predictions(network.to(here), inputs.x), names)
        write_whole(out / FILES["samples"], rows)
        files = {name: out / file for name, file in FILES.items()}
        radii = shown_epsilons(certificate, epsilons)
        _ask_where_nothing_is_correct(certificate, model, output)
        output.show(
            accuracy_table(certificate, radii), *certificate.notes, *assumed(certificate.assumes), *_listed(files)
        )
        if report:
            output.notice("Writing the report ...")
            try:
                facts = report_data(
                    certificate,
                    network=network,
                    x=inputs.x,
                    y=inputs.y,
                    class_names=names,
                    title=f"{model} on {len(inputs)} samples of {data}",
                    command=shlex.join(["curvcert", *sys.argv[1:]]),
                    epsilons=epsilons,
                    searches=() if points is None else (points,),
                    seeds={attack: seed} if searched_by else None,
                    required=[Required(one.verdict(certificate), one.is_met(certificate)) for one in required],
                    check=_command_of_check(files, data, split, data_folder, labels),
                )
                page = {"report": write_report(facts, out / "report.html")}
            except KeyboardInterrupt:
                print(f"Stopped: all is saved in {out} but the report. Write it with --resume.", file=sys.stderr)
                raise typer.Exit(INTERRUPTED) from None
            output.show(*_listed(page))
            files |= page
        output.show(*(one.verdict(certificate) for one in required))
        output.answer(*_answer(certificate, radii, files, required))
        if not all(one.is_met(certificate) for one in required):
            raise typer.Exit(REQUIREMENT_MISSED)


@final
@dataclass(frozen=True)
class Request:
    """What is asked about every sample."""

    p: float
    method: str
    epsilons: tuple[float, ...] | None
    box: tuple[float, float] | None
    inside_box: bool
    attack: str | None
    seed: int
    batch_size: int | None
    budget: float | None = None

    def require_searchable(self) -> None:
        """Raise where the search does not cover what is asked."""
        if self.attack is None:
            return
        require_attack(self.attack, self.epsilons)
        if self.p not in (1.0, 2.0, math.inf):
            raise InvalidInput(f"The search covers p = 1, 2 and inf, got {self.p:g}. Add --no-search.")

    def plan(self, network: Network, inputs: Inputs, part_size: int) -> Plan:
        """Return what the parts will hold; the size of batches and the device change nothing that is claimed."""
        search = {
            "attack": self.attack,
            "multiples": MULTIPLES,
            "steps": STEPS,
            "restarts": RESTARTS,
            "seed": self.seed,
        }
        chosen: dict[str, Any] = {
            "p": "inf" if math.isinf(self.p) else self.p,
            "method": self.method,
            "eps": self.epsilons,
            "box": self.box,
            "inside_box": self.inside_box,
            "search": {**search, "seed": self.seed} if self.attack else None,
        } | ({} if self.budget is None else {"budget": self.budget})
        digests = (network_digest(network.classified), digest_of(inputs.x), digest_of(inputs.y))
        return Plan(__version__, *digests, len(inputs), part_size, chosen)


def certified(ready: Certifier, x: Tensor, y: Tensor, request: Request, later: int) -> Found:
    """Certify samples and search beside it; `later` ones share what is left of a budget."""
    certificate = ready(x, y, request.batch_size, progress=False, later=later)
    if request.attack is None:
        return certificate, None
    here = x.to(ready.network.device)
    found = nearest_found(
        certificate, ready.network, here, request.epsilons or (), request.box, request.seed, request.attack
    )
    return with_search(certificate, ready.network, here, found), Attack(found.broken.cpu(), found.points.cpu())


def _ask_where_nothing_is_correct(certificate: Certificate, model: str, output: Output) -> None:
    if not bool(certificate.correct.any()):
        weights = "" if Path(model).suffix in (".onnx", ".safetensors") else "its weights (--weights), or "
        output.notice(
            f"No sample is classified as its label, so nothing is proven. Does the model lack {weights}"
            "a normalisation (--normalise), or are the labels numbered otherwise?"
        )


def _command_of_check(
    files: Mapping[str, Path], data: str, split: str, folder: Path | None, labels: Path | None
) -> str:
    """Return the command that proves the certificate again."""
    words = ["curvcert", "check", str(files["certificate"]), str(files["network"]), data]
    words += [] if split == "test" else ["--split", split]
    words += [] if labels is None else ["--labels", str(labels)]
    return shlex.join([*words, *(() if folder is None else ("--data-folder", str(folder)))])


def _listed(files: Mapping[str, Path]) -> list[str]:
    return [f"{name}: {path}" for name, path in files.items()]


def _answer(
    certificate: Certificate, epsilons: Sequence[float], files: Mapping[str, Path], required: Sequence[Requirement]
) -> tuple[str, dict[str, Any]]:
    """Return the result in short, and as a machine reads it."""
    evidence = certificate.evidence
    content = {
        "command": "certify",
        "curvcert": __version__,
        "samples": len(certificate),
        "p": certificate.p,
        "inside_box": certificate.inside_box,
        "accuracy": float(certificate.correct.double().mean()),
        "median_radius": float(certificate.radius.median()),
        "at": [
            {
                "eps": eps,
                "certified": certificate.certified_accuracy(eps),
                "not_broken": certificate.searched_accuracy(eps),
            }
            for eps in epsilons
        ],
        "required": [{"share": one.share, "eps": one.radius, "met": one.is_met(certificate)} for one in required],
        "network": None if evidence is None else evidence.network,
        "assumes": certificate.assumes,
        "notes": certificate.notes,
        "files": {name: str(path) for name, path in files.items()},
    }
    counts = {eps: int((certificate.correct & (certificate.radius >= eps)).sum()) for eps in epsilons}
    shares = (f"{percent_floor(count, len(certificate))} at {eps:.4g}" for eps, count in counts.items())
    verdicts = (one.verdict(certificate) for one in required)
    return "\n".join([f"proven: {', '.join(shares)}", *verdicts]), content


def accuracy_table(certificate: Certificate, epsilons: Sequence[float]) -> Table:
    """Return what is proven and what is known, a row for each radius; shares are rounded to their safe sides."""
    table = Table(
        title=f"{len(certificate)} samples in l{certificate.p:g}"
        + (f", inside the box {certificate.box}" if certificate.inside_box else ""),
        caption="accuracy under attack lies between the columns",
    )
    for heading in ("within", "proven at least", "known at most"):
        table.add_column(heading, justify="right")
    total, correct = len(certificate), certificate.correct
    for eps in (0.0, *epsilons):
        standing = correct & (certificate.falsified_radius > eps)
        low, high = (int(found.sum()) for found in (correct & (certificate.radius >= eps), standing))
        table.add_row(f"{eps:.4g}", percent_floor(low, total), percent_ceil(high, total))
    return table
