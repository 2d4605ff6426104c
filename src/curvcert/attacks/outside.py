"""Attacks of other packages, where these are installed: some of foolbox's, and AutoAttack.

What they return is only a proposal, as our own is: nothing counts before the network has been evaluated on it anew.
"""

import math
from collections.abc import Mapping
from importlib import import_module
from typing import Any, final

import torch
from torch import Tensor, nn

from curvcert.attacks.pgd import Attack, Classifier
from curvcert.errors import InvalidInput

FOOLBOX = {
    "ddn": {2.0: "DDNAttack"},
    "deepfool": {2.0: "L2DeepFoolAttack", math.inf: "LinfDeepFoolAttack"},
    "ead": {1.0: "EADAttack"},
}
"""foolbox's searches for the nearest point, by norm."""

_NORMS = {1.0: "L1", 2.0: "L2", math.inf: "Linf"}
_FEW = ["apgd-ce", "fab", "square"]
"""AutoAttack's parts that need no four classes."""


def foolbox(
    classifier: Classifier, x: Tensor, y: Tensor, name: str, p: float = 2, box: tuple[float, float] | None = None
) -> Attack:
    """Look for the nearest misclassified point of each sample by an attack of foolbox's: a name of `FOOLBOX`.

    Raises:
        InvalidInput: if foolbox is not installed, or the attack is not for this norm.
    """
    package = _package("foolbox", "pip install foolbox")
    attack = getattr(package.attacks, _known(FOOLBOX[name], p, name))()
    if box is None:  # foolbox asks for one: far enough around
        low, high = float(x.min()), float(x.max())
        box = low - max(1.0, high - low), high + max(1.0, high - low)
    model = package.PyTorchModel(_Module(classifier).eval(), bounds=box, device=x.device)
    _, points, broken = attack(model, x, package.criteria.Misclassification(y), epsilons=None)
    return _attack(points, broken, x)


def autoattack(
    classifier: Classifier,
    x: Tensor,
    y: Tensor,
    eps: float,
    p: float = 2,
    box: tuple[float, float] | None = None,
    seed: int = 0,
) -> Attack:
    """Search the p-ball of radius eps about each image by AutoAttack (Croce & Hein 2020).

    Raises:
        InvalidInput: if it is not installed, p is none of 1, 2 and inf, or x are no images with the box (0, 1).
    """
    package = _package("autoattack", "pip install git+https://github.com/fra31/auto-attack")
    if box != (0.0, 1.0) or x.dim() != 4:
        raise InvalidInput(
            f"AutoAttack takes images of shape (channels, height, width) in the box (0, 1), got samples of shape "
            f"{tuple(x.shape[1:])} and the box {box}. Pass box=(0, 1), or choose another attack."
        )
    images = x.to(torch.float32)  # it computes in no other

    def rounded(points: Tensor) -> Tensor:
        return classifier(points.to(x)).to(torch.float32)

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        classes = rounded(images[:1]).shape[1]
        chosen: dict[str, Any] = {"version": "standard"}
        if classes < 4:
            chosen = {"version": "custom", "attacks_to_run": _FEW}
        adversary = package.AutoAttack(
            _Module(rounded), _known(_NORMS, p, "autoattack"), eps, seed, False, device=str(x.device), **chosen
        )
        for part in (adversary.fab, adversary.apgd_targeted):
            part.n_target_classes = min(9, classes - 1)
        points = adversary.run_standard_evaluation(images, y, bs=len(x))
        broken = rounded(points).argmax(dim=1) != y
    return _attack(points, broken, x)


@final
class _Module(nn.Module):
    """A function as the module that other packages ask for."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(x)


def _package(name: str, remedy: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise InvalidInput(f"This attack needs {name}, which is not installed: {remedy}") from error


def _known(names: Mapping[float, str], p: float, attack: str) -> str:
    if p not in names:
        raise InvalidInput(f"{attack} covers p = {', '.join(f'{q:g}' for q in names)}, got {p:g}.")
    return names[p]


def _attack(points: Tensor, broken: Tensor, x: Tensor) -> Attack:
    found = broken.detach() & points.flatten(1).isfinite().all(dim=1)
    column = found.reshape(-1, *(1,) * (x.dim() - 1))
    return Attack(found, torch.where(column, points.detach().to(x), torch.nan))
