"""The ranks of a run under torchrun: who they are, what they average, and how they stop together.

A process that torchrun did not start is alone: nothing here then touches torch.distributed.
"""

import gc
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast, final
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from curvcert.errors import CurvcertError, InvalidInput
from curvcert.losses import AbstractObjective
from curvcert.losses.objectives import Objective
from curvcert.training.multiplier import Multiplier

T = TypeVar("T")

_PATIENCE = timedelta(days=30)
"""How long ranks wait for one that evaluates or certifies; one that dies closes its connection, which tells at once."""

_REMEDY = "Start the command with torchrun, or unset these variables for one process."
_RESUME = "Go on from the last checkpoint with --resume, on any number of ranks."


class RanksApart(CurvcertError, RuntimeError):
    """The ranks of a run cannot go on together: one of them is gone, or they hold different values."""


@final
@dataclass(frozen=True)
class Place:
    """One process among those of a run.

    Attributes:
        rank: its number, from 0.
        size: how many there are.
        local: its number on its machine, which is that of its GPU; None if it was not told.
        restarts: how often torchrun has started the command again after a failure (`--max-restarts`).

    >>> [Place(rank, 3).share(10) for rank in range(3)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 10, None)]
    """

    rank: int = 0
    size: int = 1
    local: int | None = None
    restarts: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise InvalidInput(f"Expected a rank from 0 to {self.size - 1}, of {self.size}, got {self.rank}. {_REMEDY}")

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes and speaks."""
        return self.rank == 0

    @property
    def restarted(self) -> bool:
        """Whether the command was started before, and is to go on from what that left."""
        return self.restarts > 0

    @property
    def alone(self) -> bool:
        """Whether there is no other process."""
        return self.size == 1

    def share(self, total: int) -> slice:
        """Return this rank's part of so many samples; the parts follow one another and are all of them."""
        return slice(self.rank * total // self.size, (self.rank + 1) * total // self.size)

    def device(self, name: torch.device | str) -> torch.device:
        """Return the device of this rank: each its own GPU, where `name` is "cuda" without a number.

        Raises:
            InvalidInput: there is no such device, or no GPU for this rank.

        >>> Place(1, 2, local=1).device("cpu")
        device(type='cpu')
        """
        try:
            device = torch.device(name)
        except RuntimeError as error:
            reason = str(error).split("\n")[0].rstrip(".")
            raise InvalidInput(f"Cannot compute on {str(name)!r}: {reason}. Choose another, such as cpu.") from error
        if self.alone or device.type != "cuda" or device.index is not None:
            return device
        if self.local is None:
            raise InvalidInput(
                f"Expected LOCAL_RANK to tell the GPU of rank {self.rank}, got none. Set it, or name one: cuda:0."
            )
        if self.local >= torch.cuda.device_count():
            raise InvalidInput(
                f"Expected a GPU for each rank of this machine, got {torch.cuda.device_count()} for LOCAL_RANK "
                f"{self.local}. Start no more ranks than GPUs (--nproc-per-node), or compute on cpu."
            )
        return torch.device("cuda", self.local)


def require_device(name: torch.device | str) -> str:
    """Return the name of a device that this machine has.

    >>> require_device("cpu")
    'cpu'

    Raises:
        InvalidInput: it has no such device.
    """
    try:
        torch.zeros((), device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).split("\n")[0].rstrip(".")
        raise InvalidInput(f"Cannot compute on {str(name)!r}: {reason}. Choose another device, such as cpu.") from error
    return str(name)


def place_from(environment: Mapping[str, str] | None = None) -> Place:
    """Return what torchrun's variables say: RANK, WORLD_SIZE, LOCAL_RANK; without them, a process alone.

    Raises:
        InvalidInput: one of them is missing, or is not such a number.

    >>> place_from({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    Place(rank=1, size=2, local=1, restarts=0)
    >>> place_from({}).alone
    True
    """
    values = os.environ if environment is None else environment
    told = {name: values.get(name) for name in ("RANK", "WORLD_SIZE")}
    if told["RANK"] is None and told["WORLD_SIZE"] is None:
        return Place()
    for name, value in told.items():
        if value is None:
            other = next(other for other in told if other != name)
            raise InvalidInput(f"Expected RANK and WORLD_SIZE, got {other}={told[other]} without {name}. {_REMEDY}")
    return Place(
        _whole(values, "RANK", 0),
        _whole(values, "WORLD_SIZE", 1),
        _whole(values, "LOCAL_RANK", 0) if "LOCAL_RANK" in values else None,
        _whole(values, "TORCHELASTIC_RESTART_COUNT", 0) if "TORCHELASTIC_RESTART_COUNT" in values else 0,
    )


def _whole(values: Mapping[str, str], name: str, least: int) -> int:
    text = values[name]
    if not text.isdecimal() or int(text) < least:
        raise InvalidInput(f"{name} is a whole number, at least {least}, got {text!r}. {_REMEDY}")
    return int(text)


@final
@dataclass(frozen=True, eq=False)
class Ranks:
    """Processes that train together; `joined` makes them.

    What they agree on goes over a group of its own, in the memory of the hosts: no GPU waits for it.

    >>> alone = Ranks()
    >>> alone.agreed(lambda: 7), alone.gathered("x"), alone.any(False)
    (7, ['x'], False)
    """

    place: Place = Place()
    device: torch.device = torch.device("cpu")
    hosts: "ReferenceType[dist.ProcessGroup] | None" = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.place.is_first

    def averaged(self, values: Tensor, rows: int, total: int) -> Tensor:
        """Return the mean over the whole batch of `total` samples from the means over this rank's `rows`."""
        if self.place.alone:
            return values
        weighted = values * rows
        dist.all_reduce(weighted)
        return weighted / total

    def differentiate(self, found: Objective, rows: int, total: int) -> None:
        r"""Add the gradient of the whole batch's objective to the parameters', from this rank's `rows` of it.

        The objective is a mean over samples plus what depends on the weights alone.  So with b of B samples on each
        of W ranks it is the mean over ranks of :math:`(b W / B)` times theirs, whether or not W divides B.
        """
        if self.place.alone:
            found.backward()
        else:  # in one pass: a rank that begins a second one has already sent its gradients
            (found.loss * (rows * self.place.size / total)).backward()

    def _hosts(self) -> "dist.ProcessGroup":
        group = None if self.hosts is None else self.hosts()
        if group is None:
            raise RanksApart("Expected ranks that are joined, got some that have parted. Stay inside `with joined()`.")
        return group

    def gathered(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank."""
        if self.place.alone:
            return [value]
        found: list[Any] = [None] * self.place.size
        dist.all_gather_object(found, value, group=self._hosts())
        return cast(list[T], found)

    def any(self, wanted: bool) -> bool:
        """Whether any rank wants it."""
        return any(self.gathered(wanted))

    def agreed(self, action: Callable[[], T]) -> T:
        """Do something on every rank; an error on one of them is raised on all."""
        if self.place.alone:
            return action()
        result, error = _tried(action)
        errors = self.gathered(None if error is None else _portable(error))
        other = next((found for found in errors if found is not None), None)
        if error is not None:
            raise error
        if other is not None:
            raise other
        return cast(T, result)

    def first(self, action: Callable[[], T]) -> T | None:
        """Do something on rank 0 while the others wait, and return its result there; its error is raised on all."""
        return self.agreed(lambda: action() if self.is_first else None)

    def from_first(self, action: Callable[[], T]) -> T:
        """Do something on rank 0 and return its result on all."""
        result = self.first(action)
        if self.place.alone:
            return cast(T, result)
        shared: list[Any] = [result]
        dist.broadcast_object_list(shared, src=0, group=self._hosts())
        return cast(T, shared[0])

    def require_same(self, value: object, what: str) -> None:
        """Raise, on all ranks, unless they hold the same value."""
        own, *others = self.gathered(value)
        for rank, other in enumerate(others, start=1):
            if other != own:
                raise RanksApart(f"Expected {what} of rank 0 on all ranks, rank {rank} has another one. {_RESUME}")

    def loss_of(self, model: nn.Module, objective: AbstractObjective, multiplier: Multiplier) -> nn.Module:
        """Return (x, y, progress) -> Objective; over several ranks its gradients are averaged.

        The buffers (singular vectors, lambda) are rank 0's on every rank, at every step.  Those that are made at a
        first call must be there before.
        """
        together = _Together(model, objective, multiplier)
        if self.place.alone:
            return together
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(together, device_ids=devices)


ALONE = Ranks()
"""One process, on its own."""


@final
class _Together(nn.Module):
    """All that has a state in a step, as one module."""

    def __init__(self, model: nn.Module, objective: AbstractObjective, multiplier: Multiplier) -> None:
        super().__init__()
        self.model, self.objective, self.multiplier = model, objective, multiplier

    def forward(self, x: Tensor, y: Tensor, progress: Tensor) -> Objective:
        found: Objective = self.objective(self.model, x, y, progress, self.multiplier.value)
        return found


@contextmanager
def joined(place: Place, device: torch.device | str = "cpu") -> Iterator[Ranks]:
    """Join the other ranks, by gloo on the CPU and nccl on CUDA, and leave them at the end, whatever happens.

    Raises:
        InvalidInput: there is no such device, or nothing says where the ranks meet.
        RanksApart: a rank is gone.

    >>> with joined(Place()) as ranks:
    ...     ranks.is_first, ranks.place.alone
    (True, True)
    """
    here = place.device(device)
    if place.alone:
        yield Ranks(place, here)
        return
    if not dist.is_available():
        raise InvalidInput("This build of torch has no torch.distributed. Install another, or start one process.")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InvalidInput(f"Expected MASTER_ADDR and MASTER_PORT beside RANK, got no {missing[0]}. {_REMEDY}")
    if here.type == "cuda":
        torch.cuda.set_device(here)
    with _lost_ranks_named(), _leaving(here.type == "cuda"):
        store, *_ = next(dist.rendezvous("env://", place.rank, place.size))  # type: ignore[attr-defined]
        dist.init_process_group(
            "nccl" if here.type == "cuda" else "gloo",
            # torchrun keeps its store over a restart, and with it the addresses of processes that are gone.
            store=dist.PrefixStore(f"start-{place.restarts}", store),  # type: ignore[attr-defined]
            rank=place.rank,
            world_size=place.size,
            device_id=here if here.type == "cuda" else None,
        )
        yield Ranks(place, here, ref(dist.new_group(backend="gloo", timeout=_PATIENCE)))


@contextmanager
def _leaving(nccl: bool) -> Iterator[None]:
    """Destroy the process groups at the end, and with them their threads.

    Those of gloo hold tensors of Python's: left to the end of the interpreter, they abort the process.  So whatever
    holds a group goes first: a trainer that is part of a cycle, or a local variable that a traceback keeps.
    """
    try:
        yield
    except BaseException as error:
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__context__
        if nccl and dist.group.WORLD is not None:  # to destroy it would wait for ranks that may never come
            dist.group.WORLD.abort()
        raise
    finally:
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _lost_ranks_named() -> Iterator[None]:
    """Turn what gloo and nccl say when a connection breaks into an error with a name."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        lost = isinstance(error, dist.DistError) or "gloo" in text.lower() or "NCCL" in text
        if isinstance(error, CurvcertError) or not lost:
            raise
        reason = text.split("\n")[0].rstrip(".")
        raise RanksApart(f"Another rank is gone, or cannot be reached: {reason}. {_RESUME}") from error


def _tried(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:
        return None, error


def _portable(error: Exception) -> Exception:
    """Return an error as another process can read it."""
    if isinstance(error, CurvcertError | OSError):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
