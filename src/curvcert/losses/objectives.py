"""What a training step minimises: objectives that compute their own logits, gradients and constants."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, final

from torch import Tensor, nn

from curvcert.errors import InvalidInput
from curvcert.losses.certified_margin import certified_margin_loss, ramp
from curvcert.losses.constants import Constants, StepConstants
from curvcert.losses.cross_entropy import lipschitz_margin, margin_cross_entropy
from curvcert.losses.gradient_norms import logits_and_pair_norms, logits_and_runner_up_norm
from curvcert.losses.radius_reward import (
    Decreasing,
    curvature_radii,
    exponential,
    hinge,
    reward,
    soft_lipschitz_radii,
)
from curvcert.losses.streams import aside, rejoin

Gradients = Literal["all", "runner-up"]


@final
@dataclass(frozen=True, eq=False)
class Objective:
    """The value of an objective at one batch, with what a person wants to see beside it.

    `parts`, if there are any, sum to the loss and share nothing but the weights.
    """

    loss: Tensor
    logits: Tensor
    curvature: Tensor | None = None
    parts: tuple[Tensor, ...] = ()

    def backward(self) -> None:
        """Add the gradient of the loss to the parameters', as `loss.backward()` does, and part by part.

        Each part's gradient is then added in place; in one pass torch would add the parts' into fresh memory.
        """
        for part in self.parts or (self.loss,):
            part.backward()


class AbstractObjective(nn.Module, ABC):
    """A function of the model and a batch; its buffers belong in a checkpoint, the model's do not live in it."""

    @abstractmethod
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

    def forward(
        self, model: nn.Module, x: Tensor, y: Tensor, progress: float | Tensor = 1.0, weight: float | Tensor = 1.0
    ) -> Objective:
        """Return the cross-entropy of the batch."""
        logits = model(x)
        return Objective(margin_cross_entropy(logits, y, self.tau), logits)


@final
class CurvatureRegularised(AbstractObjective):
    r"""The paper's loss: :math:`\tau\,\mathrm{CE}((f - \nu\sqrt 2 L u_y)/\tau, y) + \lambda K`.

    Reference: Entesari et al. (ICML 2024), equation `eqn:regularizationOfLipschitz`.
    """

    def __init__(self, constants: Constants, tau: float = 0.25, nu: float = 0.0) -> None:
        super().__init__()
        self.constants, self.tau, self.nu = constants, tau, nu

    def forward(
        self, model: nn.Module, x: Tensor, y: Tensor, progress: float | Tensor = 1.0, weight: float | Tensor = 1.0
    ) -> Objective:
        """Return the regularised cross-entropy of the batch."""
        with aside(x.device):
            now = self.constants()
            K = now.curvature.to(x.dtype)
            margin = lipschitz_margin(self.nu, now.lipschitz.to(x.dtype)) if self.nu else 0.0
        logits = model(x)
        rejoin(x.device)
        parts = (weight * K, margin_cross_entropy(logits, y, self.tau, margin))
        # The margin hangs on the same norms as K: then the two are differentiated together.
        return Objective(parts[0] + parts[1], logits, K.detach(), () if self.nu else parts)


@final
class LipschitzMargin(AbstractObjective):
    r"""The paper's loss without the curvature: :math:`\tau\,\mathrm{CE}((f - \nu\sqrt 2 L u_y)/\tau, y)`.

    How 1-Lipschitz (SLL) networks are trained on their own.
    """

    def __init__(self, constants: Constants, tau: float = 0.25, nu: float = 1.0) -> None:
        super().__init__()
        self.constants, self.tau, self.nu = constants, tau, nu

    def forward(
        self, model: nn.Module, x: Tensor, y: Tensor, progress: float | Tensor = 1.0, weight: float | Tensor = 1.0
    ) -> Objective:
        """Return the margin cross-entropy of the batch."""
        logits = model(x)
        margin = lipschitz_margin(self.nu, self.constants().lipschitz.to(logits.dtype))
        return Objective(margin_cross_entropy(logits, y, self.tau, margin), logits)


@final
class RadiusReward(AbstractObjective):
    r"""Cross-entropy, and a reward for radii: :math:`\mathrm{CE} + \lambda 1\{C(x) = y\} g(\varepsilon(x))`."""

    def __init__(
        self, constants: Constants, tau: float = 1.0, g: Decreasing = exponential, gradients: Gradients = "all"
    ) -> None:
        super().__init__()
        self.constants, self.tau, self.g, self.gradients = constants, tau, g, gradients

    def forward(
        self, model: nn.Module, x: Tensor, y: Tensor, progress: float | Tensor = 1.0, weight: float | Tensor = 1.0
    ) -> Objective:
        """Return the rewarded cross-entropy of the batch."""
        with aside(x.device):
            K = self.constants().pair_curvature
        logits, norms = _with_gradients(model, x, y, self.gradients)
        rejoin(x.device)
        radii = curvature_radii(logits, y, norms, K)
        loss = margin_cross_entropy(logits, y, self.tau) + weight * reward(logits, y, radii, self.g)
        return Objective(loss, logits, K.detach().amax())


@final
class CertifiedRadiusMaximisation(AbstractObjective):
    """CRM: cross-entropy with a reward for Lipschitz radii, softened over the classes, up to a target radius."""

    def __init__(self, constants: Constants, target: float = 0.5, tau: float = 1.0, sharpness: float = 5.0) -> None:
        super().__init__()
        self.constants, self.tau, self.sharpness, self.g = constants, tau, sharpness, hinge(target)

    def forward(
        self, model: nn.Module, x: Tensor, y: Tensor, progress: float | Tensor = 1.0, weight: float | Tensor = 1.0
    ) -> Objective:
        """Return the rewarded cross-entropy of the batch."""
        logits = model(x)
        radii = soft_lipschitz_radii(logits, y, self.constants().pair_lipschitz, self.sharpness)
        return Objective(margin_cross_entropy(logits, y, self.tau) + weight * reward(logits, y, radii, self.g), logits)


@final
class CertifiedMargin(AbstractObjective):
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
    ) -> None:
        """Choose the radius that is trained for, and whose gradients count: every class's, or the runner-up's."""
        super().__init__()
        if not epsilon > 0:
            raise InvalidInput(f"The certified-margin loss needs a positive epsilon, got {epsilon}.")
        self.constants, self.epsilon, self.tau = constants, epsilon, tau
        self.ramp_share, self.gradients = ramp_share, gradients

    def forward(
        self, model: nn.Module, x: Tensor, y: Tensor, progress: float | Tensor = 1.0, weight: float | Tensor = 1.0
    ) -> Objective:
        """Return the certified-margin loss of the batch."""
        with aside(x.device):
            K = self.constants().pair_curvature
        logits, norms = _with_gradients(model, x, y, self.gradients)
        rejoin(x.device)
        epsilon = (self.epsilon * ramp(progress, self.ramp_share)).to(logits)
        return Objective(certified_margin_loss(logits, y, norms, K, epsilon, self.tau), logits, K.detach().amax())


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
