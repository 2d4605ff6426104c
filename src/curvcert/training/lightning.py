"""`CertifiedLog` as a callback of Lightning; imported by its own name, since Lightning is an extra."""

from collections.abc import Callable
from typing import Any, final

from lightning.pytorch import Callback
from torch import nn

from curvcert.training.callbacks import CertifiedLog


def _itself(module: nn.Module) -> nn.Module:
    return module


@final
class CertifiedCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Log what is proven about a model at the end of each epoch of validation, to every logger of the trainer.

    `ModelCheckpoint(monitor="certified/certified_accuracy_0.1", mode="max")` then keeps the best certified model.

    Args:
        log: what to certify, and when: its steps are epochs.
        network: picks the classifier out of the LightningModule, such as `lambda module: module.model`; the module
            itself by default.
    """

    def __init__(self, log: CertifiedLog, network: Callable[[Any], nn.Module] = _itself) -> None:
        super().__init__()
        self._log, self._network = log, network

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Certify on rank 0, once the sanity check is over."""
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        found = self._log(self._network(pl_module), trainer.current_epoch)
        named = {f"certified/{name}": value for name, value in found.items()}
        pl_module.log_dict(named, rank_zero_only=True)
