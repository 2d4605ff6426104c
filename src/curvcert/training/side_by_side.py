"""Several runs at once: on CUDA, a step of all of them is one graph, its branches side by side."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import final

import torch

from curvcert.data import LabelledImages
from curvcert.errors import InvalidInput
from curvcert.training.cuda_graph import captured_or_reason
from curvcert.training.recipe import Recipe
from curvcert.training.trainer import Trainer

ALIKE = ("data", "batch_size", "epochs", "evaluate_every", "checkpoint_every")
"""The fields in which runs side by side agree: they take their steps, and are looked at, together."""


@final
class SideBySide:
    """Runs that advance together.

    A small network leaves most of a GPU idle, and several seeds or settings fill it.  The runs share nothing: each is
    the run that it would be alone, but for rounding.

    >>> from curvcert.data import load
    >>> recipes = [Recipe(data="digits", architecture="digits", epochs=1, seed=seed) for seed in (0, 1)]
    >>> runs = SideBySide(recipes, load("digits", "train"))
    >>> runs.advance()
    >>> [trainer.step for trainer in runs.trainers]
    [1, 1]
    """

    def __init__(
        self,
        recipes: Sequence[Recipe],
        data: LabelledImages,
        device: torch.device | str = "cpu",
        compiled: bool | None = None,
    ) -> None:
        """Start the runs at step 0; `compiled` as for a `Trainer`.

        Raises:
            InvalidInput: there are none, or they differ in a field of `ALIKE`.
        """
        _require_alike(recipes)
        held = data.to(device)
        self.trainers = [Trainer(recipe, held, device, capture=False, compiled=compiled) for recipe in recipes]
        self._replay = None
        self.not_captured = self.trainers[0]._reason_not_to_capture()
        if self.not_captured is None:
            with ExitStack() as undone:
                for trainer in self.trainers:
                    undone.enter_context(trainer._undone())
                self._replay, self.not_captured = captured_or_reason(*(t._advance for t in self.trainers))

    def advance(self) -> None:
        """Take one step of every run."""
        if self._replay is None:
            for trainer in self.trainers:
                trainer.advance()
            return
        for trainer in self.trainers:
            trainer._begin_step()
        self._replay()
        for trainer in self.trainers:
            trainer.step += 1


def _require_alike(recipes: Sequence[Recipe]) -> None:
    if not recipes:
        raise InvalidInput("Runs side by side need at least one recipe, got none.")
    for name in ALIKE:
        found = {getattr(recipe, name) for recipe in recipes}
        if len(found) > 1:
            raise InvalidInput(
                f"Runs side by side have the same {name}, got {', '.join(map(str, sorted(found)))}. Train them apart."
            )
