"""Batches from images that live on the device: shuffled, augmented and scaled there.

All random numbers of an epoch are drawn at once, on the CPU, from (seed, epoch) alone.  So a run resumes at
(epoch, step) without a random state, every process of a distributed run knows the whole epoch, and every device
sees the same one.
"""

from dataclasses import dataclass, fields
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64, UInt8
from torch import Tensor

from curvcert.data.augmentation import Augmentation, cropped, jittered
from curvcert.data.labelled import LabelledImages
from curvcert.errors import InvalidInput

ORDER, OFFSETS, FLIPS, JITTERS = range(4)
"""Each kind of number has a random stream of its own: turning flips on changes no crop."""


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The random numbers of an epoch: row k is for the k-th sample that is seen.

    Attributes:
        order: which sample it is; a permutation, cut to whole batches.
        offsets: where its crop begins in the padded image, down and across, from 0 to twice the padding.
        flips: whether it is mirrored.
        jitters: its brightness, contrast and saturation factors and its turn of the hue; 1, 1, 1, 0 if off.
    """

    order: Int64[Tensor, " n"]
    offsets: Int64[Tensor, "n 2"]
    flips: Bool[Tensor, " n"]
    jitters: Float[Tensor, "n 4"]

    def __len__(self) -> int:
        return len(self.order)

    def copy_(self, other: "EpochPlan") -> "EpochPlan":
        """Overwrite the tensors with those of another plan of the same loader, and return self.

        The tensors stay where they are, so that a captured CUDA graph that reads them reads the new epoch.
        """
        if len(other) != len(self):
            raise InvalidInput(f"Expected a plan of {len(self)} samples, as this one, got one of {len(other)}.")
        for column in fields(self):
            getattr(self, column.name).copy_(getattr(other, column.name))
        return self


@final
class DeviceLoader:
    """Batches of a data set that is held on a device as bytes.

    An epoch is `steps_per_epoch` whole batches; the fewer than `batch_size` samples at the end of its permutation
    are left out of it, other ones in each epoch.

    >>> data = LabelledImages(torch.arange(10, dtype=torch.uint8).reshape(10, 1, 1, 1), torch.arange(10), max_value=255)
    >>> loader = DeviceLoader(data, batch_size=4, seed=0)
    >>> plan = loader.plan(epoch=0)
    >>> x, y = loader.batch(plan, step=1)
    >>> loader.steps_per_epoch, torch.equal(y, plan.order[4:8]), torch.equal(x.flatten(), y / 255)
    (2, True, True)
    """

    def __init__(
        self,
        data: LabelledImages,
        batch_size: int,
        seed: int = 0,
        augmentation: Augmentation | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Move the data to the device, as bytes; dtype is that of the batches."""
        augmentation = Augmentation() if augmentation is None else augmentation
        augmentation.validate_for(data.shape)
        if not 1 <= batch_size <= len(data):
            raise InvalidInput(f"The batch size is from 1 to the number of images, {len(data)}, got {batch_size}.")
        if seed < 0:
            raise InvalidInput(f"The seed is at least 0, got {seed}.")
        if not dtype.is_floating_point:
            raise InvalidInput(f"The batches are of a floating-point dtype, got {dtype}.")
        self.data = data.to(device)
        self.batch_size = batch_size
        self.seed = seed
        self.augmentation = augmentation
        self.dtype = dtype
        self._white = torch.tensor(data.max_value, dtype=dtype, device=self.data.images.device)
        self._within = torch.arange(batch_size, device=self.data.images.device)

    @property
    def device(self) -> torch.device:
        """The device that holds the images, and on which plans and batches are made."""
        return self.data.images.device

    @property
    def steps_per_epoch(self) -> int:
        """The number of whole batches in the data."""
        return len(self.data) // self.batch_size

    def plan(self, epoch: int) -> EpochPlan:
        """Return the random numbers of an epoch, a function of (seed, epoch) and the settings alone.

        The numbers are Philox's, by numpy: a seed may have any length, where torch's CPU generator
        keeps the low 32 bits.
        """
        if epoch < 0:
            raise InvalidInput(f"Epochs count from 0, got {epoch}.")
        n, augmentation = self.steps_per_epoch * self.batch_size, self.augmentation
        low, high = np.array(augmentation.jitter.ranges).T
        order = self._stream(epoch, ORDER).permutation(len(self.data))[:n].astype(np.int64)
        offsets = self._stream(epoch, OFFSETS).integers(0, 2 * augmentation.crop, (n, 2), np.int64, endpoint=True)
        flips = (self._stream(epoch, FLIPS).random(n) < 0.5) & augmentation.flip
        jitters = low + (high - low) * self._stream(epoch, JITTERS).random((n, 4))
        return EpochPlan(
            torch.from_numpy(order).to(self.device),
            torch.from_numpy(offsets).to(self.device),
            torch.from_numpy(flips).to(self.device),
            torch.from_numpy(jitters).to(self.device, self.dtype),
        )

    def _stream(self, epoch: int, kind: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=(epoch, kind))))

    def batch(
        self, plan: EpochPlan, step: int | Int[Tensor, ""], rank: int = 0, world: int = 1
    ) -> tuple[Float[Tensor, "b c h w"], Int64[Tensor, " b"]]:
        """Return the images, in [0, 1], and the labels of a step; of `world` processes, the share of `rank`.

        The shares of the ranks, one after another, are the whole batch; they differ by one sample at most.  The step
        may be an integer tensor without dimensions on the device: it is read there, without waiting for it, so that
        one captured CUDA graph serves every step.  (A step in a tensor is not checked; one past the end is an index
        error of torch's.)
        """
        share = self._share(plan, step, rank, world)
        rows = self._within[share] + step * self.batch_size
        index = plan.order.index_select(0, rows)
        offsets, flips = plan.offsets.index_select(0, rows), plan.flips.index_select(0, rows)
        pixels = cropped(self.data.images, index, offsets, flips, self.augmentation)
        x = jittered(self._scaled(pixels), plan.jitters.index_select(0, rows), self.augmentation.jitter)
        return x, self.data.labels.index_select(0, index)

    def _scaled(self, pixels: UInt8[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        # A quotient of tensors is rounded once; by a Python number CUDA multiplies with its rounded reciprocal.
        return pixels.to(self.dtype) / self._white

    def _share(self, plan: EpochPlan, step: int | Tensor, rank: int, world: int) -> slice:
        if len(plan) != self.steps_per_epoch * self.batch_size:
            raise InvalidInput(
                f"Expected a plan of {self.steps_per_epoch * self.batch_size} samples, got one of {len(plan)}. "
                f"Make it with this loader's plan(epoch)."
            )
        if isinstance(step, Tensor):
            if step.ndim != 0 or step.dtype not in (torch.int32, torch.int64):
                raise InvalidInput(
                    f"A step in a tensor is int32 or int64 without dimensions, got {step.dtype} "
                    f"of shape {tuple(step.shape)}."
                )
        elif not 0 <= step < self.steps_per_epoch:
            raise InvalidInput(f"Steps are from 0 to {self.steps_per_epoch - 1}, got {step}.")
        if not 0 <= rank < world <= self.batch_size:
            raise InvalidInput(
                f"Expected a rank from 0 to world - 1, and a sample for each of at most {self.batch_size} ranks, the "
                f"batch size, got rank {rank} and world {world}. Start fewer processes, or enlarge the batch."
            )
        return slice(rank * self.batch_size // world, (rank + 1) * self.batch_size // world)
