"""The gallery: what each of some 300 networks gets, of every kind that people bring.

Claim: no search contradicts a bound in l2 or linf, and the median certified radius is positive and never beaten by an
attack.  Over balls of 1% of an input's norm the Lipschitz bound is at most 20 times what a search finds, over balls of
0.3% the curvature bound likewise, but for attention, recurrent networks and normalisations in linf.
Hardware: a CPU.
Trials: for each network of `tests/network/people.py`, with a random linear head of three classes behind it, SAMPLES
random inputs, in l2 and linf.

    python -m benchmarks.gallery [--part 0 --parts 4] [--networks SwiGLU attention]

Each part adds its networks to the record.
"""

import argparse
import math
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import curvcert
from benchmarks.harness import ROOT, figures_of, read_record, write_record
from benchmarks.pages import table, with_parts
from curvcert.bounds.types import Ball, Bound
from curvcert.certificates import certify
from curvcert.errors import UnsupportedActivation, UnsupportedModule
from curvcert.falsifier import falsify
from curvcert.falsifier.bound_search import BoundKind, BoundSearch, Target
from curvcert.network import Network
from tests.network.people import REFUSED, ROWS, Row

NAME, SAMPLES, CLASSES = "gallery", 3, 3
PAGE = ROOT / "docs" / "gallery.md"
NORMS = {"l2": 2.0, "linf": math.inf}
REACH: Mapping[BoundKind, float] = {"lipschitz": 0.01, "curvature": 0.003}
"""How large a ball is, as a share of its centre's norm."""
MOST = 20.0
"""How many times what a search finds a bound over such a ball may be."""
TOLD = ("attention", "transformer", "gru", "lstm", "rnn", "elman", "layernorm", "groupnorm", "instancenorm2d")
"""Kinds for which that is only told."""
MANY, TOO_MANY = 30, 40
"""Nodes beyond which radii are by linear relaxation alone, and beyond which no curvature is asked for."""

NETWORKS = {row.name: row for row in ROWS if row.name not in REFUSED}


def is_told(name: str) -> bool:
    """Whether the factor of a network is told and not required."""
    return any(kind in name.lower() for kind in TOLD)


def classifier(row: Row) -> tuple[Network, Tensor]:
    """Return a row's network with a linear head of three classes, and inputs of its own."""
    net = curvcert.trace(row.model(), row.example(), **dict(row.options))
    generator = torch.Generator().manual_seed(3)
    head = torch.randn(CLASSES, net.outputs, generator=generator, dtype=torch.float64) / math.sqrt(net.outputs)
    x = torch.randn(SAMPLES, *net.in_shape, generator=generator, dtype=torch.float64)
    return net.read_out(head), x


def measured(row: Row, ascents: int = 12, steps: int = 8) -> dict[str, Any]:
    """Return what a network gets: bounds over what searches found, radii, and what contradicted any of it."""
    net, x = classifier(row)
    found: dict[str, Any] = {"nodes": len(net.nodes), "contradicted": 0}
    begun = time.perf_counter()
    for norm, p in NORMS.items():
        for kind in REACH:
            ratio, above = _ratio(net, x, p, kind, ascents, steps)
            found[f"{kind} {norm}"] = ratio
            found["contradicted"] += above
        method = "auto" if len(net.nodes) <= MANY else "linear"
        cert = certify(net, x, p=p, method=method, progress=False)
        attacks = falsify(net, x, None, cert, restarts=2, steps=steps)
        found[f"radius {norm}"] = _number(cert.radius.median())
        found["contradicted"] += len(attacks.counterexamples) + attacks.unconfirmed
    return found | {"seconds": time.perf_counter() - begun}


def _ratio(net: Network, x: Tensor, p: float, kind: BoundKind, ascents: int, steps: int) -> tuple[Any, int]:
    """Return the largest ratio of a bound to what a search finds, or why there is none; and how often it is below."""
    if kind == "curvature" and len(net.nodes) > TOO_MANY:
        return "not asked for", 0
    radius = REACH[kind] * torch.linalg.vector_norm(x.flatten(1), p, dim=1)
    try:
        bound = _bound(net, x, radius, p, kind)
    except (UnsupportedActivation, UnsupportedModule) as error:
        return str(error).split(".")[0], 0
    target = Target.of(net, None if kind == "lipschitz" else (0, 1))
    search = BoundSearch(net, kind, p, p, target, Ball(x, radius), ascents, steps)
    searches = search.run()
    findings = search.compare(bound.value, searches, f"{kind} of the gallery")
    best = torch.zeros(len(x), dtype=torch.float64)
    for each in searches:
        best = best.scatter_reduce(0, each.sample, each.ascended.value.cpu(), "amax")
    ratio = bound.value / best.clamp(min=1e-300)
    # Where nothing bends, both are 0 but for rounding.
    ratio = torch.where(bound.value <= 1e-9, 1.0, ratio)
    return _number(ratio.max()), len(findings.counterexamples) + findings.unconfirmed


def _bound(net: Network, x: Tensor, radius: Tensor, p: float, kind: BoundKind) -> Bound:
    if kind == "lipschitz":
        return curvcert.lipschitz(net, p, at=x, radius=radius)
    return curvcert.curvature(net, p, at=x, radius=radius, pair=(0, 1))


def _number(value: Tensor) -> Any:
    return float(value) if bool(value.isfinite()) else "infinite"


def gallery_table() -> str:
    """Return every network with what it gets."""
    columns = ("network", "L, l2", "L, linf", "K, l2", "K, linf", "radius, l2", "radius, linf")
    keys = [f"{kind} {norm}" for kind in (*REACH, "radius") for norm in NORMS]
    return table(columns, [[name, *(_cell(found[key]) for key in keys)] for name, found in figures_of(NAME).items()])


def summary() -> str:
    """Return the gallery in a few sentences."""
    networks = figures_of(NAME)
    beyond = [name for name, found in networks.items() if not is_within(found)]
    others = [name for name in beyond if not is_told(name)]
    contradicted = sum(found["contradicted"] for found in networks.values())
    flat = [name for name, found in networks.items() if 0.0 in (found["radius l2"], found["radius linf"])]
    return (
        f"{len(networks)} networks; {contradicted} claims contradicted by a search; median radii of 0: {len(flat)}.\n\n"
        f"Bounds over {MOST:g} times what a search finds: {', '.join(beyond) or 'none'}. Of these neither attention,\n"
        f"nor recurrent, nor a normalisation: {', '.join(others) or 'none'}."
    )


def is_within(found: Mapping[str, Any]) -> bool:
    """Whether all bounds of a network are near enough to what searches found."""
    numbers = (found[f"{kind} {norm}"] for kind in REACH for norm in NORMS)
    return all(value <= MOST for value in numbers if not isinstance(value, str))


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value if value == "infinite" else "none"
    return f"{value:.3g}"


def gallery_page() -> str:
    """Return the page of the gallery with its table written anew."""
    return with_parts(PAGE, {"in words": summary, "gallery": gallery_table})


def main() -> None:
    """Measure a part of the networks, and keep what is known of the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS), metavar="NAME")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in asked.networks[asked.part :: asked.parts]:
        found = measured(NETWORKS[name])
        print(name, found, flush=True)
        before = read_record(NAME)
        known = {**(before.figures if before is not None else {}), name: found}
        figures = {name: known[name] for name in NETWORKS if name in known}
        write_record(NAME, "python -m benchmarks.gallery", 0, {"samples": SAMPLES, "reach": dict(REACH)}, figures)


if __name__ == "__main__":
    main()
