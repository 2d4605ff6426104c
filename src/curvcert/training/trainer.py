"""The state of a training run and the step that advances it: everything on the device, nothing looked at.

A step reads no value on the host and draws no random number (the epoch's plan holds them), so that it runs at the
device's speed, can be captured as one CUDA graph, and goes on bit for bit from a checkpoint.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from curvcert.data import LabelledImages
from curvcert.data.augmentation import Augmentation, ColourJitter
from curvcert.data.device_loader import DeviceLoader
from curvcert.errors import InvalidInput
from curvcert.losses import Constants, accuracy
from curvcert.nn.architectures import INPUT_SHAPES, architecture
from curvcert.training.checkpoint import Checkpoint
from curvcert.training.cuda_graph import captured_or_reason, missing_compiler, training_arithmetic
from curvcert.training.distributed import ALONE, Ranks
from curvcert.training.model_file import finished
from curvcert.training.muon import ADAM_SHARE, Muon, matrices
from curvcert.training.objective import make_multiplier, make_objective
from curvcert.training.recipe import Recipe, recipe_from_dict

MAY_CHANGE = ("evaluate_every", "evaluate_samples", "checkpoint_every", "epsilons")
"""The fields that may differ on resuming: they decide what is shown and kept, not what is computed."""

COMPILE_FROM = 20_000
"""Steps of a run from which on compiling pays: it takes about half a minute, and saves about a millisecond a step."""


@final
class Trainer:
    """A model, what it minimises, its optimiser and its data, at some step of a run.

    >>> from curvcert.data import load
    >>> recipe = Recipe(data="digits", architecture="digits", epochs=1)
    >>> trainer = Trainer(recipe, load("digits", "train"))
    >>> trainer.advance()
    >>> trainer.step, trainer.total_steps, sorted(trainer.read_tally())
    (1, 5, ['accuracy', 'curvature', 'learning_rate', 'loss', 'weight'])
    """

    def __init__(
        self,
        recipe: Recipe,
        data: LabelledImages,
        device: torch.device | str = "cpu",
        capture: bool = True,
        ranks: Ranks = ALONE,
        compiled: bool | None = None,
    ) -> None:
        """Start a run at step 0, its weights drawn from the recipe's seed.

        On CUDA the step is captured as one graph; where that fails, or `capture` is off, it runs eagerly, and
        `not_captured` says why.  Its pieces are compiled first if `compiled` says so, by default where the run is long
        enough to gain the time back; where that fails, `not_compiled` says why.

        Of several ranks each takes its share of every batch; their states stay the same.
        """
        self.recipe, self.device, self.ranks = recipe, torch.device(device), ranks
        self.loader = DeviceLoader(data, recipe.batch_size, recipe.seed, _augmentation(recipe), self.device)
        self.model = make_model(recipe, data).to(self.device)
        example = torch.zeros(1, *data.shape, device=self.device)
        self.objective = make_objective(recipe, self.model, example).to(self.device)
        self.multiplier = make_multiplier(recipe).to(self.device)
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.average = copy.deepcopy(self.model) if recipe.weight_average else None
        self._rate = torch.tensor(recipe.learning_rate, device=self.device)
        self._adam_rate = self._rate.clone() if recipe.optimiser == "muon" else self._rate
        self._optimisers = self._make_optimisers()
        self._count = torch.zeros((), dtype=torch.int64, device=self.device)
        self._tally = torch.zeros(4, device=self.device)
        self._plan = self.loader.plan(0)
        self.step = 0
        self._run: Callable[[], None] = self._advance
        self.not_captured: str | None = None
        self._loss = ALONE.loss_of(self.model, self.objective, self.multiplier)
        self.not_compiled: str | None = None
        self._batch = self.loader.batch
        with self._undone():
            self._advance()  # norms and the optimiser make their buffers at their first calls
            self._compile(compiled)
            self.not_captured = self._reason_not_to_capture() if capture else "it was asked not to be"
            if self.not_captured is None:
                replay, self.not_captured = captured_or_reason(self._advance)
                self._run = replay or self._advance
        self._loss = ranks.loss_of(self.model, self.objective, self.multiplier)

    @property
    def steps_per_epoch(self) -> int:
        """Steps in one pass over the data."""
        return self.loader.steps_per_epoch

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.recipe.epochs * self.steps_per_epoch

    @property
    def trained(self) -> nn.Sequential:
        """The model that the run is for: the average of the weights, where the recipe asks for one."""
        return self.model if self.average is None else self.average

    def _make_optimisers(self) -> list[torch.optim.Optimizer]:
        """Return Adam for all, or Muon for the matrices and Adam for the rest."""
        recipe = self.recipe
        moved = matrices(self._parameters) if recipe.optimiser == "muon" else []
        known = {id(weight) for weight in moved}
        adam = torch.optim.Adam(
            [weight for weight in self._parameters if id(weight) not in known],
            lr=self._adam_rate,
            betas=(recipe.beta1, recipe.beta2),
            weight_decay=recipe.weight_decay,
            fused=True,
            capturable=self.device.type == "cuda",
        )
        return [Muon(moved, self._rate, recipe.weight_decay), adam] if moved else [adam]

    def advance(self) -> None:
        """Take one step."""
        self._begin_step()
        self._run()
        self.step += 1

    def _begin_step(self) -> None:
        if self.step % self.steps_per_epoch == 0:
            self._plan.copy_(self.loader.plan(self.step // self.steps_per_epoch))

    def _advance(self) -> None:
        place, size = self.ranks.place, self.recipe.batch_size
        x, y = self._batch(self._plan, self._count % self.steps_per_epoch, place.rank, place.size)
        progress = (self._count / self.total_steps).to(torch.float32)
        self._rate.copy_(_cosine(progress, self.recipe.learning_rate, self.recipe.final_learning_rate))
        if self._adam_rate is not self._rate:
            self._adam_rate.copy_(ADAM_SHARE * self._rate)
        for optimiser in self._optimisers:
            optimiser.zero_grad(set_to_none=True)
        found = self._loss(x, y, progress)
        self.ranks.differentiate(found, len(y), size)
        if self.recipe.clip:
            nn.utils.clip_grad_norm_(self._parameters, self.recipe.clip)
        for optimiser in self._optimisers:
            optimiser.step()
        right = accuracy(found.logits.detach(), y)
        with torch.no_grad():
            curvature = torch.zeros_like(right) if found.curvature is None else found.curvature.to(right)
            means = torch.stack([torch.ones_like(right), found.loss.detach().to(right), right, curvature])
            means = self.ranks.averaged(means, len(y), size)
            self.multiplier.update(means[2])
            self._tally += means
            if self.average is not None:
                for mean, parameter in zip(self.average.parameters(), self.model.parameters(), strict=True):
                    mean.lerp_(parameter, 1 - self.recipe.weight_average)
            self._count += 1

    def read_tally(self) -> dict[str, float]:
        """Return the means since the last reading; this waits for the device."""
        count, *sums = self._tally.tolist()
        self._tally.zero_()
        means = [value / count if count else math.nan for value in sums]
        found = dict(zip(("loss", "accuracy", "curvature"), means, strict=True))
        return {**found, "weight": float(self.multiplier.value), "learning_rate": float(self._rate)}

    def checkpoint(self) -> Checkpoint:
        """Return everything that the rest of the run depends on."""
        facts = {"recipe": self.recipe.as_dict(), "torch": torch.__version__}
        return Checkpoint(self.step, {key: value.cpu() for key, value in self._tensors().items()}, facts)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint.

        Raises:
            InvalidInput: it belongs to another recipe, or its tensors are not those of this run.
        """
        recipe = checkpoint.facts.get("recipe")
        if not isinstance(recipe, dict):
            raise InvalidInput("The checkpoint does not say which recipe it belongs to. Resume from another one.")
        kept = recipe_from_dict(recipe, "The checkpoint's recipe")
        if found := self.recipe.difference(kept, MAY_CHANGE):
            name, now, then = found
            raise InvalidInput(
                f"The checkpoint was made with {name} = {then!r}, this run has {now!r}. Resume with "
                "the same recipe, or start afresh in another folder."
            )
        self._restore_tensors(checkpoint.tensors)
        self.step = checkpoint.step
        self._plan.copy_(self.loader.plan(min(self.step, self.total_steps - 1) // self.steps_per_epoch))

    def _tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the state, by name; they are the state, not copies."""
        groups: dict[str, dict[str, Any]] = {
            "model": self.model.state_dict(),
            "objective": self.objective.state_dict(),
            "multiplier": self.multiplier.state_dict(),
            "average": {} if self.average is None else self.average.state_dict(),
            "optimiser": {
                f"{k}.{name}": optimiser.state[p][name]
                for k, p in enumerate(self._parameters)
                for optimiser in self._optimisers
                if p in optimiser.state
                for name in sorted(optimiser.state[p])
            },
            "run": {"count": self._count, "tally": self._tally, "random_state": torch.get_rng_state()},
        }
        return {f"{group}.{name}": tensor for group, found in groups.items() for name, tensor in found.items()}

    @torch.no_grad()
    def _restore_tensors(self, tensors: Any) -> None:
        own = self._tensors()
        if own.keys() != tensors.keys():
            odd = sorted(own.keys() ^ tensors.keys())[0]
            raise InvalidInput(f"The checkpoint's tensors are not those of this run: {odd} is in one of them only.")
        for key, tensor in own.items():
            if tensors[key].shape != tensor.shape or tensors[key].dtype != tensor.dtype:
                raise InvalidInput(
                    f"The checkpoint's {key} is {tensors[key].dtype} of shape {tuple(tensors[key].shape)}, "
                    f"expected {tensor.dtype} of {tuple(tensor.shape)}."
                )
            if key == "run.random_state":
                torch.set_rng_state(tensors[key])
            else:
                tensor.copy_(tensors[key])

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Undo the steps that are taken inside: a run at step 0 is fresh again."""
        fresh = {key: value.clone() for key, value in self._tensors().items()}
        yield
        self._restore_tensors({key: fresh.get(key, torch.zeros_like(v)) for key, v in self._tensors().items()})
        for module in self.objective.modules():
            if isinstance(module, Constants):
                module.restart()

    def _compile(self, wanted: bool | None) -> None:
        self.not_compiled = self._reason_not_to_compile(wanted)
        if self.not_compiled is not None:
            return
        self.objective.compile_pieces()
        self._batch = torch.compile(self.loader.batch, fullgraph=True)
        try:
            with training_arithmetic():
                self._advance()
        except Exception as error:  # the step itself has run before: whatever this is, compiling did it
            self.objective.compiled, self._batch = None, self.loader.batch
            self.not_compiled = (str(error) or type(error).__name__).splitlines()[0]

    def _reason_not_to_compile(self, wanted: bool | None) -> str | None:
        if wanted is False:
            return "it was asked not to be"
        if self.device.type != "cuda":
            return f"the device is {self.device.type}, and only CUDA gains"
        if not self.ranks.place.alone:
            return "several ranks share it"
        if wanted is None and self.total_steps < COMPILE_FROM:
            return f"{self.total_steps} steps are too few to gain back the time that compiling takes"
        return missing_compiler()

    def _reason_not_to_capture(self) -> str | None:
        if self.device.type != "cuda":
            return f"the device is {self.device.type}, and only CUDA has graphs"
        if not self.ranks.place.alone:
            return "several ranks share it, and what they exchange is not captured"
        return None


def make_model(recipe: Recipe, data: LabelledImages) -> nn.Sequential:
    """Return the recipe's architecture with weights drawn from its seed; torch's random state is left as it was.

    Raises:
        InvalidInput: the architecture takes images of another shape than the data's.
    """
    if recipe.architecture in INPUT_SHAPES and INPUT_SHAPES[recipe.architecture] != data.shape:
        raise InvalidInput(
            f"{recipe.architecture} takes images of shape {INPUT_SHAPES[recipe.architecture]}, "
            f"{recipe.data} has {data.shape}. Choose an architecture for this data."
        )
    mean = None
    if recipe.mean_shift:
        mean = [float(data.images[:, k].double().mean() / data.max_value) for k in range(data.shape[0])]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = architecture(recipe.architecture, recipe.activation, mean)
    finished(model, recipe)  # One without a mirror image is refused now, not after hours.
    return model


def _augmentation(recipe: Recipe) -> Augmentation:
    jitter = ColourJitter(recipe.brightness, recipe.contrast, recipe.saturation, recipe.hue)
    return Augmentation(crop=recipe.crop, crop_mode=recipe.crop_mode, flip=recipe.flip, jitter=jitter)


def _cosine(progress: Tensor, start: float, end: float) -> Tensor:
    return end + (start - end) * 0.5 * (1 + torch.cos(math.pi * progress))
