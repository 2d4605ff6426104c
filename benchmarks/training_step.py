"""A training step with the paper's curvature regulariser, against a plain one: what estimated norms cost.

Claim: on a CPU a step of 6F at batch 256 with the regulariser takes at most 1.5 times as long as one without.
Hardware: whatever it runs on; the record says which.
Trials: the same batch and weights; the two steps take turns.

The regulariser is the paper's Algorithm 1 with LipLT constants, every norm a warm-started power iteration.

    python -m benchmarks.training_step [--quick]
"""

import argparse
from collections.abc import Callable

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.harness import ratios, time_interleaved, write_record
from benchmarks.networks import dense
from curvcert.activations import TANH
from curvcert.bounds.curvature.compositional import compositional_bound
from curvcert.bounds.lipschitz.problem import Problem
from curvcert.bounds.types import Global
from curvcert.network import Block, Network
from curvcert.operators import AbstractLinearMap, Dense, Identity, Zero
from curvcert.operators.estimates import NormEstimates

SEED = 0
WEIGHT = 1e-4


def live_network(model: nn.Sequential) -> Network:
    """Return the blocks of a dense model over its own parameters, so that norms of them have gradients."""
    maps: list[AbstractLinearMap] = [Dense(layer.weight) for layer in model if isinstance(layer, nn.Linear)]
    blocks = []
    for k, W in enumerate(maps[:-1]):
        G = maps[-1] if k == len(maps) - 2 else Identity(W.out_shape, W.dtype, W.device)
        b, c = (torch.zeros(shape, dtype=torch.float64) for shape in (W.out_shape, G.out_shape))
        blocks.append(Block(Zero(W.in_shape, G.out_shape, W.dtype, W.device), G, W, b, c, TANH, f"{k}"))
    return Network(tuple(blocks))


def steps(widths: tuple[int, ...], batch: int) -> dict[str, Callable[[], None]]:
    """Return a plain and a regularised training step of two models with the same weights."""
    torch.manual_seed(SEED)
    plain, regularised = dense(*widths), dense(*widths)
    regularised.load_state_dict(plain.state_dict())
    x, y = torch.rand(batch, widths[0]), torch.randint(widths[-1], (batch,))
    norms = NormEstimates()

    def curvature() -> Tensor:
        norms.start_step()
        problem = Problem(live_network(regularised), 2, 2, Global())
        return compositional_bound(problem, norms, ["product"]).value

    def step(model: nn.Sequential, penalty: Callable[[], Tensor] | None) -> Callable[[], None]:
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-4)

        def run() -> None:
            optimiser.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(x), y)
            if penalty is not None:
                loss = loss + WEIGHT * penalty().float()
            loss.backward()
            optimiser.step()

        return run

    return {"plain": step(plain, None), "regularised": step(regularised, curvature)}


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small network, and no record")
    options = parser.parse_args()
    widths = (64, 32, 32, 10) if options.quick else (3072, 1024, 512, 256, 256, 128, 10)
    timings = time_interleaved(steps(widths, 256), repeats=3 if options.quick else 30, warmup=3)
    ratio = ratios(timings, against="plain")["regularised"]
    Console().print(f"regularised / plain = {ratio:.2f}")
    if not options.quick:
        figures = {"ratio": ratio, "timings": {name: timing.as_figures() for name, timing in timings.items()}}
        config = {"widths": list(widths), "batch": 256, "threads": torch.get_num_threads()}
        write_record("training_step", "python -m benchmarks.training_step", SEED, config, figures)


if __name__ == "__main__":
    main()
