"""Certified radii beside CROWN's and an attack's, on the same points of the same networks.

Claim: in l2, linf and l1 the median radius is at least CROWN's on every network that auto_LiRPA bounds.
Hardware: CPU, one process; all times are those of the processor, so that what else runs there does not count.
Trials: the first SAMPLES test images of each network that it classifies correctly.

CROWN is auto_LiRPA's (Verified-Intelligence, BSD 3-Clause), in float64, with a bisection over radii of its own for
each sample; its rounding is not accounted for.  auto_LiRPA is not a dependency: where it is not installed, and where it
has no rule for an activation, that column stays empty.  The attack is PGD with restarts, bisected likewise.

    python -m benchmarks.peers --networks "tanh 64-64^2-10" --samples 50
"""

import argparse
import copy
import importlib
import math
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.harness import measured_code, read_record, write_record
from benchmarks.peer_networks import PEERS, Peer
from curvcert.attacks import pgd
from curvcert.certificates import certify
from curvcert.network import Network, trace

NAME, SAMPLES, BISECTIONS = "peers", 50, 12
NORMS = {"l2": 2.0, "linf": math.inf, "l1": 1.0}
FARTHEST = {"l2": 8.0, "linf": 1.0, "l1": 32.0}
"""Where the search for an adversarial point begins."""

ATTACK_STEPS, ATTACK_RESTARTS = 60, 3

ALPHA_STEPS, ALPHA_RATES, ALPHA_BISECTIONS = 20, (0.1, 0.5), 6
ALPHA_MOST = 1.5
"""How far beyond CROWN's radius that of alpha-CROWN is looked for."""

Holds = Callable[[Tensor], Tensor]


def bisected(holds: Holds, high: Tensor, low: Tensor | None = None, times: int = BISECTIONS) -> Tensor:
    """Return the largest radii, up to `high`, that hold, each sample's own; those of `low` are known to."""
    low = torch.zeros_like(high) if low is None else low
    for _ in range(times):
        middle = (low + high) / 2
        good = holds(middle)
        low, high = torch.where(good, middle, low), torch.where(good, high, middle)
    return low


def attacked(net: Network, x: Tensor, y: Tensor, p: float, farthest: float) -> Tensor:
    """Return the distances of the nearest adversarial points that PGD finds."""
    nearest = torch.full((len(x),), farthest, dtype=torch.float64)

    def holds(radius: Tensor) -> Tensor:
        found = pgd(net, x, y, radius, p, ATTACK_STEPS, ATTACK_RESTARTS)
        distance = torch.linalg.vector_norm((found.points - x).flatten(1), p, dim=1)
        nearest[found.broken] = torch.minimum(nearest, distance)[found.broken]
        return ~found.broken

    bisected(holds, nearest.clone())
    return nearest


class Crown:
    """CROWN of auto_LiRPA for one network and some samples."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self._lirpa = importlib.import_module("auto_LiRPA")
        self._x = x
        self._bounded = self._lirpa.BoundedModule(_with_their_gelu(model), torch.zeros_like(x[:1]), device="cpu")
        self._rate: float | None = None
        eye = torch.eye(int(model(x[:1]).shape[1]), dtype=torch.float64)
        others = torch.stack([torch.cat([torch.arange(k), torch.arange(k + 1, len(eye))]) for k in y.tolist()])
        self._rows = eye[y][:, None] - eye[others]
        # With convolutions auto_LiRPA takes one l2 or l1 radius for a whole batch.
        self._single = any(isinstance(module, nn.Conv2d) for module in model.modules())

    def holds(self, p: float, radius: Tensor) -> Tensor:
        """Whether every margin stays positive within the ball of each sample."""
        if self._single and not math.isinf(p):
            return torch.cat([self._proven(p, slice(k, k + 1), radius[k]) for k in range(len(radius))])
        return self._proven(p, slice(None), radius[:, None])

    def holds_optimised(self, p: float, radius: Tensor) -> Tensor:
        """Whether they do with slopes that are optimised, at one rate or another."""
        proven = torch.zeros(len(radius), dtype=torch.bool)
        for rate in ALPHA_RATES:
            options = {"iteration": ALPHA_STEPS, "lr_alpha": rate, "early_stop_patience": ALPHA_STEPS}
            self._bounded.set_bound_opts({"optimize_bound_args": options})
            self._rate = rate
            proven |= self.holds(p, radius)
        self._rate = None
        return proven

    def _proven(self, p: float, part: slice, radius: Tensor) -> Tensor:
        x = self._x[part]
        if math.isinf(p):
            r = radius.reshape(-1, *(1,) * (x.dim() - 1))
            ball = self._lirpa.PerturbationLpNorm(norm=p, x_L=x - r, x_U=x + r)
        else:
            ball = self._lirpa.PerturbationLpNorm(norm=p, eps=radius)
        bounded = (self._lirpa.BoundedTensor(x, ball),)
        method = "CROWN" if self._rate is None else "CROWN-Optimized"
        with torch.set_grad_enabled(self._rate is not None):
            lower, _ = self._bounded.compute_bounds(x=bounded, C=self._rows[part], method=method, bound_upper=False)
        proven: Tensor = (lower > 0).all(dim=1)
        return proven


def _with_their_gelu(model: nn.Module) -> nn.Module:
    """Return a copy with auto_LiRPA's own module for GELU: it has a rule for that, and none for torch's."""
    gelu, copied = importlib.import_module("auto_LiRPA.operators.gelu").GELU, copy.deepcopy(model)
    for name, child in copied.named_children():
        if isinstance(child, nn.GELU):
            setattr(copied, name, gelu())
    return copied


def crown_of(model: nn.Module, x: Tensor, y: Tensor) -> Crown | str:
    """Return CROWN for a network, or why there is none."""
    try:
        found = Crown(model, x, y)
        found.holds(math.inf, torch.full((len(x),), 1e-3, dtype=torch.float64))
    except ImportError as error:
        return f"not installed: {error}"
    except NotImplementedError as error:
        return f"auto_LiRPA: {str(error)[:80]}"
    return found


def timed(compute: Callable[[], Any]) -> tuple[Any, float]:
    """Return what is computed, and the processor's seconds."""
    start = time.process_time()
    return compute(), time.process_time() - start


def compared(
    peer: Peer, samples: int, folder: Path, norms: Mapping[str, float], console: Console, alpha: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the figures of one network, one norm after the other; with `alpha`, those of alpha-CROWN alone."""
    module = peer.model(folder)
    images, labels = peer.images()
    net = trace(module, images[:1].float())
    with torch.no_grad():
        right = (net(images).argmax(dim=1) == labels).nonzero().flatten()[:samples]
    x, y = images[right], labels[right]
    torch.set_default_dtype(torch.float64)  # auto_LiRPA makes constants of the default type
    crown = crown_of(module.double(), x, y)
    for name, p in norms.items():
        attack = attacked(net, x, y, p, FARTHEST[name])
        figures = _optimised(crown, p, attack) if alpha else _in_one_norm(net, crown, x, y, p, attack)
        console.print(f"    {name}: {figures}", highlight=False, markup=False)
        yield name, figures
    torch.set_default_dtype(torch.float32)


def _in_one_norm(net: Network, crown: Crown | str, x: Tensor, y: Tensor, p: float, attack: Tensor) -> dict[str, Any]:
    ours, seconds = timed(lambda: certify(net, x, y, p, progress=False))
    linear, linear_seconds = timed(lambda: certify(net, x, y, p, method="linear", progress=False))
    found: dict[str, Any] = {
        "samples": len(x),
        "attack": _median(attack),
        "ours": _median(ours.radius),
        "ours / attack": _median(ours.radius / attack),
        "above the attack": int((ours.radius > attack).sum()),
        "ours_s": seconds,
        "proven by": dict(Counter(ours.method).most_common()),
        "attack certificates": int(ours.attack_radius.isfinite().sum()),
        "linear alone": _median(linear.radius),
        "linear alone_s": linear_seconds,
    }
    if isinstance(crown, str):
        return {**found, "no CROWN": crown}
    with torch.no_grad():
        radii, seconds = timed(lambda: bisected(lambda r: crown.holds(p, r), attack.clone()))
    asked = (float(radii.median()),)
    _, deciding = timed(lambda: certify(net, x, y, p, epsilons=asked, progress=False))
    ratio = (ours.radius / radii)[radii > 0]
    return {
        **found,
        "CROWN": _median(radii),
        "ours / CROWN": found["ours"] / _median(radii) if _median(radii) else math.inf,
        "median of ratios": _median(ratio),
        "below CROWN": int((ours.radius < 0.999 * radii).sum()),
        "CROWN_s": seconds,
        "deciding_s": deciding,
        "deciding / CROWN_s": deciding / seconds,
    }


def _optimised(crown: Crown | str, p: float, attack: Tensor) -> dict[str, Any]:
    if isinstance(crown, str):
        return {}
    with torch.no_grad():
        low = bisected(lambda r: crown.holds(p, r), attack.clone())
    high = torch.minimum(ALPHA_MOST * low, attack)
    radii, seconds = timed(lambda: bisected(lambda r: crown.holds_optimised(p, r), high, low, ALPHA_BISECTIONS))
    return {"alpha-CROWN": _median(radii), "alpha-CROWN_s": seconds}


def _median(values: Tensor) -> float:
    return float(f"{statistics.median(values.tolist()):.6g}")


def main() -> None:
    """Compare and record, each norm as it ends; what is not asked for keeps what is recorded of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=PEERS, metavar="NAME", default=list(PEERS))
    parser.add_argument("--norms", nargs="+", choices=NORMS, default=list(NORMS))
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--models", type=Path, default=Path("runs/peers"), help="where trained networks are kept")
    parser.add_argument("--auto-lirpa", type=Path, help="a folder that auto_LiRPA is installed in")
    parser.add_argument("--missing", action="store_true", help="only what the record does not hold")
    parser.add_argument("--alpha", action="store_true", help="add alpha-CROWN to what the record holds")
    parser.add_argument("--dry", action="store_true", help="record nothing")
    options = parser.parse_args()
    if options.auto_lirpa is not None:
        sys.path.append(str(options.auto_lirpa))
    warnings.filterwarnings("ignore", module="auto_LiRPA")
    torch.set_num_threads(1)
    console = Console(soft_wrap=True)
    for name in options.networks:
        held = {norm for norm, each in _recorded().get(name, {}).items() if not options.alpha or "alpha-CROWN" in each}
        norms = {norm: NORMS[norm] for norm in options.norms if not (options.missing and norm in held)}
        if not norms:
            continue
        console.print(name)
        for norm, figures in compared(PEERS[name], options.samples, options.models, norms, console, options.alpha):
            if not options.dry:
                _record(name, norm, figures, options.alpha)


def _recorded() -> dict[str, Any]:
    before = read_record(NAME)
    return {} if before is None else dict(before.figures["networks"])


def _record(name: str, norm: str, figures: Mapping[str, Any], added: bool) -> None:
    known = _recorded()
    before = known.get(name, {})
    alpha = {key: value for key, value in before.get(norm, {}).items() if key.startswith("alpha-CROWN")}
    one = {**before[norm], **figures} if added else {**figures, **alpha, "code": measured_code()}
    known[name] = {**before, norm: one}
    config = {
        "bisections": BISECTIONS,
        "attack": f"PGD, {ATTACK_STEPS} steps, {ATTACK_RESTARTS} restarts",
        "alpha-CROWN": f"{ALPHA_STEPS} steps, the better of rates {ALPHA_RATES}, {ALPHA_BISECTIONS} bisections",
    }
    ordered = {each: known[each] for each in PEERS if each in known}
    write_record(NAME, "python -m benchmarks.peers --auto-lirpa DIR", 0, config, {"networks": ordered})


if __name__ == "__main__":
    main()
