"""The random choices of an audit: the same for the same seed and index."""

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Draw:
    """Random choices: `pick` for sizes and names, `weights` for numbers."""

    pick: random.Random
    weights: torch.Generator

    @staticmethod
    def of(seed: int, index: int) -> "Draw":
        """Return the choices of one network of an audit: the same for the same seed and index."""
        pick = random.Random(f"{seed}/{index}")
        return Draw(pick, torch.Generator().manual_seed(pick.getrandbits(62)))

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal numbers."""
        return torch.randn(*shape, generator=self.weights, dtype=torch.float64)

    def gain(self) -> float:
        """Return a scale between 0.4 and 3: from nearly linear to saturated."""
        return float(0.4 * 7.5 ** self.pick.random())

    def scaled(self, *shape: int) -> Tensor:
        """Return the weights of a layer, whose outputs are of the order of its inputs times a gain."""
        return self.gain() * self.normal(*shape) / math.sqrt(max(1, math.prod(shape[1:])))
