"""What a training step minimises: objectives that compute their own logits, gradients and constants.

An objective has three pieces: what the weights alone say (constants), what the model makes of a batch (logits, norms of
gradients), and the loss of the two.  The first two share nothing but the weights, so that on a GPU they run side by
side, forward and backward, and each is differentiated by itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor, nn

from curvcert.errors import InvalidInput
from curvcert.losses.certified_margin import MarginCertificate, certified_margin_logits, certified_margin_loss, ramp
from curvcert.losses.constants import Constants, StepConstants
from curvcert.losses.cross_entropy import lipschitz_margin, margin_cross_entropy
from curvcert.losses.gradient_norms import logits_and_pair_norms, logits_and_runner_up_norm
from curvcert.losses.local_curvature import logits_norm_and_local_curvature
from curvcert.losses.radius_reward import (
    Decreasing,
    curvature_radii,
    exponential,
    hinge,
    reward,
    soft_lipschitz_radii,
)
from curvcert.losses.side_stream import aside, rejoin

Gradients = Literal["all", "runner-up"]
Tensors = tuple[Tensor, ...]


@final
@dataclass(frozen=True, eq=False)
class Objective:
    """The value of an objective at one batch, with what it was made of.

    Attributes:
        loss: what is minimised.
        seen: what the model made of the batch, the logits first.
        constants: what the weights alone say.
        weights: the parameters that the constants depend on.
        curvature: the curvature among the constants, or None.
    """

    loss: Tensor
    seen: Tensors
    constants: Tensors
    weights: Tensors
    curvature: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """The logits of the batch."""
        return self.seen[0]

    def backward(self) -> None:
        """Add the gradient of the loss to the parameters', as `loss.backward()` does, and sooner.

        The constants are differentiated beside the batch and added in one go; in a joint pass torch would add
        the two of every weight into fresh memory.
        """
        known = [t for t in self.constants if t.requires_grad]
        if not known:
            self.loss.backward()
            return
        device, weights = self.loss.device, [w for w in self.weights if w.requires_grad]
        slopes = torch.autograd.grad(self.loss, [*self.seen, *known])
        with aside(device):
            added = torch.autograd.grad(known, weights, slopes[len(self.seen) :], allow_unused=True)
        torch.autograd.backward(self.seen, slopes[: len(self.seen)])
        rejoin(device)
        pairs = [(w, more) for w, more in zip(weights, added, strict=True) if more is not None]
        torch._foreach_add_([_gradient(w) for w, _ in pairs], [more for _, more in pairs])


def _gradient(weight: Tensor) -> Tensor:
    """Return a parameter's gradient, zeros if it has none yet."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def _apart(values: Tensors) -> Tensors:
    """Return the values as nodes of their own: of two of which one is made from the other, slopes are partial then."""
    return tuple(value.view_as(value) for value in values)


class AbstractObjective(nn.Module, ABC):
    """A function of the model and a batch; its buffers belong in a checkpoint, the model's do not live in it."""

    compiled: "Compiled | None" = None

    @abstractmethod
    def of_weights(self) -> Tensors:
        """Return the constants that the loss needs, of the weights as they are now."""

    @abstractmethod
    def of_batch(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensors:
        """Return what the loss needs of the batch: the logits first."""

    @abstractmethod
    def rate(
        self, seen: Tensors, constants: Tensors, y: Tensor, progress: float | Tensor, weight: float | Tensor
    ) -> Tensor:
        """Return the loss."""

    def curvature(self, constants: Tensors) -> Tensor | None:
        """Return the curvature among the constants, for a person to see."""
        return None

    def forward(
        self, model: nn.Module, x: Tensor, y: Tensor, progress: float | Tensor = 1.0, weight: float | Tensor = 1.0
    ) -> Objective:
        """Return the objective.

        Args:
            model: the module that is trained.
            x: a batch of inputs.
            y: their labels.
            progress: how much of the training is done, from 0 to 1, for what ramps up.
            weight: the regulariser's lambda, where the objective has one.
        """
        run = self.compiled or Compiled(self.of_weights, self.of_batch, self.rate)
        with aside(x.device):
            constants = _apart(run.of_weights())
        seen = _apart(run.of_batch(model, x, y))
        rejoin(x.device)
        loss = run.rate(seen, constants, y, progress, weight)
        shown = self.curvature(constants)
        parameters = tuple(model.parameters())
        return Objective(loss, seen, constants, parameters, None if shown is None else shown.detach())

    def compile_pieces(self, backend: str = "inductor") -> None:
        """Let torch compile each of the three pieces: fewer and larger kernels, the same numbers but for rounding.

        Raises, at the first call: whatever torch.compile does where it cannot.
        """
        self.compiled = Compiled(
            torch.compile(self.of_weights, backend=backend, fullgraph=True),
            torch.compile(self.of_batch, backend=backend, fullgraph=True),
            torch.compile(self.rate, backend=backend, fullgraph=True),
        )


@final
@dataclass(frozen=True, eq=False)
class Compiled:
    """The three pieces of an objective as they are run."""

    of_weights: Callable[[], Tensors]
    of_batch: Callable[[nn.Module, Tensor, Tensor], Tensors]
    rate: Callable[[Tensors, Tensors, Tensor, float | Tensor, float | Tensor], Tensor]


@final
class Standard(AbstractObjective):
    """The cross-entropy, with a temperature.

    >>> import torch
    >>> model = nn.Linear(2, 2)
    >>> objective = Standard()(model, torch.zeros(3, 2), torch.tensor([0, 1, 0]))
    >>> objective.logits.shape
    torch.Size([3, 2])
    """

    def __init__(self, tau: float = 1.0) -> None:
        super().__init__()
        self.tau = tau

    def of_weights(self) -> Tensors:
        """Return nothing."""
        return ()

    def of_batch(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensors:
        """Return the logits."""
        return (model(x),)

    def rate(
        self, seen: Tensors, constants: Tensors, y: Tensor, progress: float | Tensor, weight: float | Tensor
    ) -> Tensor:
        """Return the cross-entropy of the batch."""
        return margin_cross_entropy(seen[0], y, self.tau)


@final
class CurvatureRegularised(AbstractObjective):
    r"""The paper's loss: :math:`\tau\,\mathrm{CE}((f - \nu\sqrt 2 L u_y)/\tau, y) + \lambda K`.

    Reference: Entesari et al. (ICML 2024), equation `eqn:regularizationOfLipschitz`.
    """

    def __init__(self, constants: Constants, tau: float = 0.25, nu: float = 0.0) -> None:
        super().__init__()
        self.constants, self.tau, self.nu = constants, tau, nu

    def of_weights(self) -> Tensors:
        """Return the curvature and, where there is a margin, the Lipschitz constant."""
        now = self.constants()
        return (now.curvature.to(now.dtype), *((now.lipschitz.to(now.dtype),) if self.nu else ()))

    def of_batch(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensors:
        """Return the logits."""
        return (model(x),)

    def rate(
        self, seen: Tensors, constants: Tensors, y: Tensor, progress: float | Tensor, weight: float | Tensor
    ) -> Tensor:
        """Return the regularised cross-entropy of the batch."""
        margin = lipschitz_margin(self.nu, constants[1]) if self.nu else 0.0
        return margin_cross_entropy(seen[0], y, self.tau, margin) + weight * constants[0]

    def curvature(self, constants: Tensors) -> Tensor:
        """Return the curvature."""
        return constants[0]


@final
class LipschitzMargin(AbstractObjective):
    r"""The paper's loss without the curvature: :math:`\tau\,\mathrm{CE}((f - \nu\sqrt 2 L u_y)/\tau, y)`.

    How 1-Lipschitz (SLL) networks are trained on their own.
    """

    def __init__(self, constants: Constants, tau: float = 0.25, nu: float = 1.0) -> None:
        super().__init__()
        self.constants, self.tau, self.nu = constants, tau, nu

    def of_weights(self) -> Tensors:
        """Return the Lipschitz constant."""
        now = self.constants()
        return (now.lipschitz.to(now.dtype),)

    def of_batch(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensors:
        """Return the logits."""
        return (model(x),)

    def rate(
        self, seen: Tensors, constants: Tensors, y: Tensor, progress: float | Tensor, weight: float | Tensor
    ) -> Tensor:
        """Return the margin cross-entropy of the batch."""
        return margin_cross_entropy(seen[0], y, self.tau, lipschitz_margin(self.nu, constants[0]))


class AbstractPairObjective(AbstractObjective):
    """An objective of the curvature of every pair of classes and of the norms of the pairs' gradients."""

    def __init__(self, constants: Constants, gradients: Gradients) -> None:
        super().__init__()
        self.constants, self.gradients = constants, gradients

    def of_weights(self) -> Tensors:
        """Return the curvature of every pair."""
        return (self.constants().pair_curvature,)

    def of_batch(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensors:
        """Return the logits and the norms of the pairs' gradients."""
        return _with_gradients(model, x, y, self.gradients)

    def curvature(self, constants: Tensors) -> Tensor:
        """Return the largest curvature of a pair."""
        return constants[0].detach().amax()


@final
class RadiusReward(AbstractPairObjective):
    r"""Cross-entropy, and a reward for radii: :math:`\mathrm{CE} + \lambda 1\{C(x) = y\} g(\varepsilon(x))`."""

    def __init__(
        self, constants: Constants, tau: float = 1.0, g: Decreasing = exponential, gradients: Gradients = "all"
    ) -> None:
        super().__init__(constants, gradients)
        self.tau, self.g = tau, g

    def rate(
        self, seen: Tensors, constants: Tensors, y: Tensor, progress: float | Tensor, weight: float | Tensor
    ) -> Tensor:
        """Return the rewarded cross-entropy of the batch."""
        (logits, norms), (K,) = seen, constants
        radii = curvature_radii(logits, y, norms, K)
        return margin_cross_entropy(logits, y, self.tau) + weight * reward(logits, y, radii, self.g)


@final
class CertifiedRadiusMaximisation(AbstractObjective):
    """CRM: cross-entropy with a reward for Lipschitz radii, softened over the classes, up to a target radius."""

    def __init__(self, constants: Constants, target: float = 0.5, tau: float = 1.0, sharpness: float = 5.0) -> None:
        super().__init__()
        self.constants, self.tau, self.sharpness, self.g = constants, tau, sharpness, hinge(target)

    def of_weights(self) -> Tensors:
        """Return the Lipschitz constant of every pair."""
        return (self.constants().pair_lipschitz,)

    def of_batch(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensors:
        """Return the logits."""
        return (model(x),)

    def rate(
        self, seen: Tensors, constants: Tensors, y: Tensor, progress: float | Tensor, weight: float | Tensor
    ) -> Tensor:
        """Return the rewarded cross-entropy of the batch."""
        logits = seen[0]
        radii = soft_lipschitz_radii(logits, y, constants[0], self.sharpness)
        return margin_cross_entropy(logits, y, self.tau) + weight * reward(logits, y, radii, self.g)


@final
class CertifiedMargin(AbstractPairObjective):
    """The certified-margin loss; epsilon ramps up over the first part of the training.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    >>> objective = CertifiedMargin(Constants(model, torch.zeros(1, 2)), epsilon=0.1)
    >>> x, y = torch.rand(4, 2), torch.tensor([0, 1, 2, 0])
    >>> bool(objective(model, x, y).loss > objective(model, x, y, progress=0.0).loss)
    True
    """

    def __init__(
        self,
        constants: Constants,
        epsilon: float,
        tau: float = 1.0,
        ramp_share: float = 0.4,
        gradients: Gradients = "all",
        certificate: MarginCertificate = "curvature",
    ) -> None:
        """Choose the radius that is trained for, whose gradients count (every class's, or the runner-up's), and how."""
        super().__init__(constants, gradients)
        if not epsilon > 0:
            raise InvalidInput(f"The certified-margin loss needs a positive epsilon, got {epsilon}.")
        self.epsilon, self.tau, self.ramp_share, self.certificate = epsilon, tau, ramp_share, certificate

    def rate(
        self, seen: Tensors, constants: Tensors, y: Tensor, progress: float | Tensor, weight: float | Tensor
    ) -> Tensor:
        """Return the certified-margin loss of the batch."""
        (logits, norms), (K,) = seen, constants
        epsilon = (self.epsilon * ramp(progress, self.ramp_share)).to(logits)
        return certified_margin_loss(logits, y, norms, K, epsilon, self.tau, self.certificate)


@final
class LocallyCertifiedMargin(AbstractPairObjective):
    r"""The certified-margin loss for the quadratic certificate: the curvature at each sample beside the global one.

    The runner-up is lifted by what the line certificate loses with :math:`s_g K`, and by
    :math:`\tfrac{\varepsilon^2}{2} s_l \hat T`, with :math:`\hat T` the estimate of `losses.local_curvature`.  The
    global K is a product of norms, far too pessimistic near a sample; some of it still pays, for it holds down what
    the remainders of early layers grow to in later ones.  With :math:`s_l = 0` a step is as fast as for the line.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    >>> objective = LocallyCertifiedMargin(Constants(model, torch.zeros(1, 2)), epsilon=0.1)
    >>> x, y = torch.rand(4, 2), torch.tensor([0, 1, 2, 0])
    >>> bool(objective(model, x, y).loss > objective(model, x, y, progress=0.0).loss)
    True
    """

    def __init__(
        self,
        constants: Constants,
        epsilon: float,
        tau: float = 1.0,
        ramp_share: float = 0.4,
        global_scale: float = 0.1,
        local_scale: float = 0.1,
    ) -> None:
        """Choose the radius that is trained for, and how much of both curvatures counts."""
        super().__init__(constants, "runner-up")
        if not epsilon > 0:
            raise InvalidInput(f"The certified-margin loss needs a positive epsilon, got {epsilon}.")
        self.epsilon, self.tau, self.ramp_share = epsilon, tau, ramp_share
        self.global_scale, self.local_scale = global_scale, local_scale

    def of_batch(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensors:
        """Return the logits, and the gradient's norm and the local curvature of the runner-up's pair, if it counts."""
        if not self.local_scale:
            return logits_and_runner_up_norm(model, x, y)
        return logits_norm_and_local_curvature(model, x, y, self.epsilon)

    def rate(
        self, seen: Tensors, constants: Tensors, y: Tensor, progress: float | Tensor, weight: float | Tensor
    ) -> Tensor:
        """Return the loss of the batch."""
        (logits, norms, *bends), (K,) = seen, constants
        epsilon = (self.epsilon * ramp(progress, self.ramp_share)).to(logits)
        z = certified_margin_logits(logits, y, norms, self.global_scale * K, epsilon, "line")
        for bend in bends:
            lift = 0.5 * epsilon * epsilon * self.local_scale * bend
            z = z + lift.expand_as(z).scatter(1, y[:, None], 0.0)
        return margin_cross_entropy(z, y, self.tau)


def _with_gradients(model: nn.Module, x: Tensor, y: Tensor, gradients: Gradients) -> tuple[Tensor, Tensor]:
    """Return the logits and the norms of the pairs' gradients, both differentiable in the weights."""
    if gradients == "runner-up":
        return logits_and_runner_up_norm(model, x, y)
    return logits_and_pair_norms(model, x, y)


class CurvatureRegulariser(nn.Module):
    r"""The curvature of a model as a differentiable number, to add to the loss of any training loop.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    >>> regulariser = CurvatureRegulariser(model, torch.zeros(1, 2))
    >>> x, y = torch.rand(4, 2), torch.tensor([0, 1, 2, 0])
    >>> loss = nn.functional.cross_entropy(model(x), y) + 0.01 * regulariser()
    >>> loss.backward()
    """

    def __init__(self, model: nn.Module, example_input: Tensor, steps: int = 1) -> None:
        """Read the structure of a model; `example_input` gives the input's shape, batch dimension included."""
        super().__init__()
        self.constants = Constants(model, example_input, steps=steps)

    def forward(self) -> Tensor:
        """Return an estimate of the curvature of the model as it is now, in the model's dtype."""
        now: StepConstants = self.constants()
        return now.curvature.to(now.dtype)
