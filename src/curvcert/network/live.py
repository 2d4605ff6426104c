"""A module under training as a Network over its own parameters: for estimates, never for certificates."""

import torch
from torch import Tensor, nn

from curvcert.errors import UnsupportedModule
from curvcert.network.building import built
from curvcert.network.network import Network
from curvcert.network.nodes import AffineNode
from curvcert.network.recording import Tape
from curvcert.network.tracing import meaning, recorded
from curvcert.network.verification import require_recordable
from curvcert.operators.base import weights


class LiveNetwork:
    """The blocks of a module over its own parameters, so that norms of them have gradients.

    Calling it gives a `Network` of the parameters as they are now, in their own dtype.  Where every map holds a
    parameter itself (dense and convolutional layers), that is the same Network at every call; where a layer computes
    its weights (SLL), they are computed anew, with their gradients.  Nothing that certifies accepts it.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> network = LiveNetwork(model, torch.zeros(1, 2))()
    >>> network.live, network.blocks[0].W.weight is model[0].weight
    (True, True)
    """

    def __init__(self, model: nn.Module, example_input: Tensor) -> None:
        """Record the forward pass of a module; `example_input` gives the input's shape, batch dimension included.

        Raises:
            UnsupportedModule: a part that curvcert does not recognise, or whose constants move in training.
            InvalidInput: an example without a batch dimension.
        """
        require_recordable(model, example_input)
        for path, module in model.named_modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                raise UnsupportedModule(
                    f"{path}: {type(module).__name__} is random in training, so the network has no constants. "
                    "Remove it."
                )
        self._model, self._example = model, example_input.detach()
        self._tape: Tape | None = None
        self._fixed: Network | None = None
        network = self()
        maps = (term.map for node in network.nodes if isinstance(node, AffineNode) for term in node.terms)
        if all(tensor.grad_fn is None for op in maps for tensor in weights(op)):
            self._fixed = network

    @property
    def fixed(self) -> bool:
        """Whether every call gives the same Network, over the same parameters."""
        return self._fixed is not None

    def __call__(self) -> Network:
        """Return the network of the parameters as they are now."""
        if self._fixed is not None:
            return self._fixed
        like = next((t for t in self._model.parameters() if t.dtype.is_floating_point), torch.empty(0))
        example = self._example.to(like.device, like.dtype)
        tape = self._tape or recorded(self._model, example)
        self._tape = None if tape.computes_weights else tape
        return built(meaning(tape, self._model, example, live=True), source_dtype=like.dtype)
