"""On an accelerator a step is one captured graph, and takes the weights where the CPU takes them."""

from collections.abc import Callable, Iterator

import pytest
import torch

from curvcert.data import LabelledImages
from curvcert.training import Recipe, SideBySide, Trainer
from curvcert.training.cuda_graph import missing_compiler

pytestmark = pytest.mark.gpu

LOSSES = {
    "standard": {"loss": "standard"},
    "curvature": {"loss": "curvature", "weight_step": 0.05},
    "certified-margin": {"loss": "certified-margin", "epsilon": 0.1, "clip": 1.0, "weight_average": 0.9},
    "runner-up": {"loss": "certified-margin", "epsilon": 0.1, "gradients": "runner-up", "block_bound": "hadamard"},
    "crm": {"loss": "crm"},
}


def images() -> LabelledImages:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (256, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return LabelledImages(pixels, torch.randint(0, 10, (256,), generator=generator), 255)


def recipe(architecture: str = "6F", **fields: object) -> Recipe:
    chosen = {"batch_size": 32, "epochs": 4, "crop": 4, "flip": True, "brightness": 0.2, "tau": 0.25} | fields
    return Recipe(data="cifar10", architecture=architecture, **chosen)  # type: ignore[arg-type]


def after(trainer: Trainer, steps: int) -> list[torch.Tensor]:
    for _ in range(steps):
        trainer.advance()
    return [p.detach().cpu().clone() for p in trainer.trained.parameters()]


def require_close(found: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).norm()) <= tolerance * max(float(b.norm()), 1e-3)


@pytest.fixture
def never_waiting() -> Iterator[Callable[[], None]]:
    """Let anything that waits for the device be an error, from the call on to the end of the test."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", LOSSES)
def test_steps_agree_with_the_cpu(name: str) -> None:
    wanted = after(Trainer(recipe(**LOSSES[name]), images(), "cpu"), 3)
    eager = Trainer(recipe(**LOSSES[name]), images(), "cuda", capture=False)
    require_close(after(eager, 3), wanted, 1e-3)
    graph = Trainer(recipe(**LOSSES[name]), images(), "cuda")
    assert graph.not_captured is None
    # A captured step rounds factors to TF32, 10 bits.
    require_close(after(graph, 3), wanted, 2e-2)


@pytest.mark.parametrize("architecture", ["6C2F", "Lip-3C1F"])
def test_convolutions_are_captured_too(architecture: str) -> None:
    chosen = recipe(architecture, loss="certified-margin", epsilon=0.1, gradients="runner-up")
    graph = Trainer(chosen, images(), "cuda")
    assert graph.not_captured is None
    eager = Trainer(chosen, images(), "cuda", capture=False)
    require_close(after(graph, 3), after(eager, 3), 2e-2)


def test_muon_is_captured_and_agrees_with_the_cpu() -> None:
    chosen = recipe(optimiser="muon", learning_rate=0.005)
    graph = Trainer(chosen, images(), "cuda")
    assert graph.not_captured is None
    require_close(after(graph, 3), after(Trainer(chosen, images(), "cpu"), 3), 5e-2)


def test_a_step_never_waits_for_the_device(never_waiting: Callable[[], None]) -> None:
    trainer = Trainer(recipe(loss="curvature", weight_step=0.05), images(), "cuda")
    trainer.advance()
    never_waiting()
    for _ in range(trainer.steps_per_epoch - 1):
        trainer.advance()


@pytest.mark.skipif(missing_compiler() is not None, reason=f"cannot compile: {missing_compiler()}")
@pytest.mark.parametrize("name", ["curvature", "certified-margin"])
def test_compiled_steps_agree_with_eager_ones(name: str) -> None:
    compiled = Trainer(recipe(**LOSSES[name]), images(), "cuda", compiled=True)
    assert (compiled.not_compiled, compiled.not_captured) == (None, None)
    eager = Trainer(recipe(**LOSSES[name]), images(), "cuda", compiled=False)
    assert eager.not_compiled == "it was asked not to be"
    require_close(after(compiled, 3), after(eager, 3), 1e-2)


def test_short_runs_are_not_compiled() -> None:
    assert "too few" in str(Trainer(recipe(), images(), "cuda").not_compiled)


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    whole = Trainer(recipe(), images(), "cuda")
    after(whole, 5)
    kept = whole.checkpoint()
    wanted = after(whole, 6)
    again = Trainer(recipe(), images(), "cuda")
    again.restore(kept)
    assert all(torch.equal(a, b) for a, b in zip(after(again, 6), wanted, strict=True))


def test_runs_side_by_side_are_one_graph() -> None:
    recipes = [recipe(seed=0), recipe(seed=1, epsilon=0.3)]
    together = SideBySide(recipes, images(), "cuda")
    assert together.not_captured is None
    for _ in range(5):
        together.advance()
    for trainer, alone in zip(together.trainers, recipes, strict=True):
        found = [p.detach().cpu() for p in trainer.trained.parameters()]
        require_close(found, after(Trainer(alone, images(), "cuda"), 5), 1e-3)
