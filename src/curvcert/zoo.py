"""The networks that curvcert's results are about, by name: `curvcert.zoo.load("6C2F-ours", seed=0)`.

Each was trained by a recipe and certified in records.  A wheel brings the small ones; a checkout has all whose weights
are kept, in `results/`.  A file is loaded only if it has the digest that was recorded when it was measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch import nn

from curvcert.errors import InvalidInput, meant
from curvcert.training.kept import DIGESTS, FOLDER, load_kept, read_digests

_INSTALLED = Path(__file__).parent / "zoo_files"
_CHECKOUT = Path(__file__).parents[2] / "results"


@final
@dataclass(frozen=True)
class Entry:
    """What is known of a network in the zoo.

    Attributes:
        name: what `load` takes, without the seed.
        seed: of the run that trained it.
        sha256: the digest of its file.
        records: what was measured on it, as files of `results/` without their ending.
        certify: the command that certifies it again, in a checkout.
        available: whether its weights are in the folder that was looked at.
    """

    name: str
    seed: int
    sha256: str
    records: tuple[str, ...]
    certify: str | None
    available: bool


def entries(folder: Path | str | None = None) -> list[Entry]:
    """Return what is known of every network, those too whose weights are not at hand.

    >>> [entry.name for entry in entries() if entry.name.startswith("MNIST-6F")]
    ['MNIST-6F-ccrc', 'MNIST-6F-standard']
    """
    return list(_entries(_results(folder)))


def load(name: str, seed: int = 0, folder: Path | str | None = None) -> nn.Module:
    """Return a network of the zoo, in eval mode, for inputs in [0, 1].

    Args:
        name: such as "6C2F-ours"; `entries` lists them.
        seed: of the run that trained it.
        folder: one that holds `weights/digests.json` and the weights, such as a checkout's `results`; by default this
            checkout's, or what came with the wheel.

    Raises:
        InvalidInput: if there is no such network, or its weights are not at hand.
        InvalidFile: if the file is not the one that was measured.

    >>> load("MNIST-6F-ccrc").training
    False
    """
    results = _results(folder)
    found = list(_entries(results))
    names = list(dict.fromkeys(entry.name for entry in found))
    if name not in names:
        raise InvalidInput(f"The zoo has no network {name!r}. It has {', '.join(names)}.{meant(name, names)}")
    seeds = {entry.seed: entry for entry in found if entry.name == name}
    if seed not in seeds:
        raise InvalidInput(f"{name} was trained with the seeds {', '.join(map(str, seeds))}, got {seed}.")
    if results == _INSTALLED and not seeds[seed].available:
        raise InvalidInput(
            f"The weights of {name} with seed {seed} did not come with this installation. Get a checkout of curvcert, "
            "and pass folder=CHECKOUT/results."
        )
    return load_kept(results, f"{name}-seed{seed}")[0]


def _results(folder: Path | str | None) -> Path:
    """Return the folder to look in: the one that is given, this checkout's, or what came with the wheel."""
    if folder is None:
        return _CHECKOUT if (_CHECKOUT / FOLDER / DIGESTS).is_file() else _INSTALLED
    if not (Path(folder) / FOLDER / DIGESTS).is_file():
        raise InvalidInput(f"{Path(folder) / FOLDER} has no {DIGESTS}. Give the folder results of a checkout.")
    return Path(folder)


def _entries(results: Path) -> Iterator[Entry]:
    for key, facts in read_digests(results).items():
        name, _, seed = key.rpartition("-seed")
        available = facts["file"] is not None and (results / facts["file"]).is_file()
        yield Entry(name, int(seed), facts["sha256"], tuple(facts["records"]), facts.get("certify"), available)
