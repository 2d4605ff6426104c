"""A certification shared by several processes, by files alone: one that is killed holds nobody up, and loses nothing.

Part k belongs to rank k mod the number of ranks.  Every rank saves its parts; rank 0 waits for those of the others,
computes the parts of a rank that has ended or shows no sign of life, and reads all of them back.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from rich.progress import Progress

from curvcert.attacks import Attack
from curvcert.certificates import Certificate
from curvcert.certificates.certificate import concatenate
from curvcert.certificates.evidence import input_digests
from curvcert.cli.heartbeats import Heart, Watch, forget
from curvcert.cli.output import Output
from curvcert.cli.saved_parts import SavedParts
from curvcert.errors import InvalidFile, InvalidInput, SoundnessError
from curvcert.training.distributed import Place

LOST_AFTER = 30.0
"""Seconds without a sign of life after which rank 0 takes over a rank's parts."""

_POLL = 0.1
_STARTS_WITHIN = 10
"""Times `lost_after`: how long the other ranks wait for rank 0 to open the folder."""

Found = tuple[Certificate, Attack | None]


@final
@dataclass(frozen=True, eq=False)
class SharedCertification:
    """The parts of a certification as one of several ranks sees them."""

    parts: SavedParts
    place: Place
    output: Output
    lost_after: float = LOST_AFTER

    @contextmanager
    def opened(self, resume: bool) -> Iterator[None]:
        """Open the folder, or wait until rank 0 has; while inside, show signs of life to the other ranks."""
        folder, rank = self.parts.folder, self.place.rank
        if self.place.is_first:
            self.parts.open(resume)
            forget(folder)
        else:
            self._wait_for_first()
        if self.place.alone:
            yield
            return
        with Heart(folder, rank):
            yield
        if self.place.is_first:
            forget(folder)

    def _wait_for_first(self) -> None:
        """Return once rank 0 is at work on this plan, or has left nothing to do here."""
        watch, until = Watch(self.parts.folder, 0, self.lost_after), time.monotonic() + _STARTS_WITHIN * self.lost_after
        while not (self.parts.opened() and (watch.alive() or self._nothing_is_missing())):
            if time.monotonic() > until:
                raise InvalidInput(
                    f"Expected rank 0 at work in {self.parts.folder.parent}, got no sign of life for "
                    f"{_STARTS_WITHIN * self.lost_after:g} s. Start it with the same options and the same folder."
                )
            time.sleep(_POLL)

    def _nothing_is_missing(self) -> bool:
        return all(self.parts.certificate_path(part).exists() for part in self._of(self.place.rank))

    def _of(self, rank: int) -> list[slice]:
        return [part for part in self.parts if self.parts.owner(part, self.place.size) == rank]

    def certify(self, compute: Callable[[slice], Found]) -> Found | None:
        """Compute and save what is missing; on rank 0 return the certificate of all samples, on others None."""
        found: dict[int, Found] = {}
        with self.output.progress() if self.place.is_first else Progress(disable=True) as bar:
            task = bar.add_task("certifying", total=len(self.parts.inputs))
            for part in self._of(self.place.rank):
                one = self._known(part) or self.parts.save(part, *compute(part))
                if self.place.is_first:  # the others need not hold what they have saved
                    found[part.start] = one
                bar.advance(task, part.stop - part.start)
            if not self.place.is_first:
                return None
            for part, one in self._of_others(compute):
                found[part.start] = one
                bar.advance(task, part.stop - part.start)
        return self._merged([found[part.start] for part in self.parts])

    def _known(self, part: slice) -> Found | None:
        try:
            return self.parts.load(part)
        except InvalidFile as error:
            self.output.notice(f"Samples {part.start} .. {part.stop - 1} are computed again: {error}")
            return None

    def _of_others(self, compute: Callable[[slice], Found]) -> Iterator[tuple[slice, Found]]:
        """Yield the parts of the other ranks as they come, and compute those that will not come."""
        missing = {rank: deque(self._of(rank)) for rank in range(1, self.place.size)}
        watches = {rank: Watch(self.parts.folder, rank, self.lost_after) for rank in missing}
        told = False
        while any(missing.values()):
            some = False
            for rank, left in missing.items():
                found = self._brought(left[0], rank, watches[rank], compute) if left else None
                if found is not None:
                    some = True
                    yield left.popleft(), found
            if not some:
                told = told or self._tell_waiting(missing)
                time.sleep(_POLL)

    def _brought(self, part: slice, rank: int, watch: Watch, compute: Callable[[slice], Found]) -> Found | None:
        """Return a part of another rank: None while that rank may still bring it."""
        gone = watch.gone()  # before the look at the file, which may be the last that the rank did
        try:
            known = self.parts.load(part)
        except InvalidFile:  # its rank computes it again
            known = None
        if known is not None or not gone:
            return known
        self.output.notice(f"Samples {part.start} .. {part.stop - 1} are computed here: rank {rank} is gone.")
        return self.parts.save(part, *compute(part))

    def _tell_waiting(self, missing: Mapping[int, deque[slice]]) -> bool:
        waited_for = ", ".join(str(rank) for rank, left in missing.items() if left)
        self.output.notice(
            f"Waiting for parts of rank {waited_for}; they are computed here after {self.lost_after:g} s without a "
            "sign of life."
        )
        return True

    def _merged(self, found: list[Found]) -> Found:
        """Join the parts, and make sure that they are about every sample, once and in order."""
        certificate = concatenate([one for one, _ in found])
        inputs, evidence = self.parts.inputs, certificate.evidence
        whole = (
            evidence is not None
            and torch.equal(certificate.label, inputs.y)
            and torch.equal(evidence.inputs, input_digests(inputs.x))
        )
        if not whole:
            raise SoundnessError(
                f"Expected parts about {len(inputs)} samples, each once, got {len(certificate)} or others. "
                f"Remove {self.parts.folder} and certify again."
            )
        searches = [search for _, search in found if search is not None]
        if not searches:
            return certificate, None
        points = {name: torch.cat([getattr(one, name) for one in searches]) for name in ("broken", "points")}
        return certificate, Attack(**points)
