"""From a recipe to what it minimises."""

from torch import Tensor, nn

from curvcert.losses import (
    AbstractObjective,
    CertifiedMargin,
    CertifiedRadiusMaximisation,
    Constants,
    CurvatureRegularised,
    LipschitzMargin,
    LocallyCertifiedMargin,
    RadiusReward,
    Standard,
)
from curvcert.training.multiplier import Multiplier
from curvcert.training.recipe import Recipe


def make_objective(recipe: Recipe, model: nn.Module, example_input: Tensor) -> AbstractObjective:
    """Return the objective that a recipe names, for a model.

    >>> import torch
    >>> recipe = Recipe(data="digits", architecture="digits", loss="standard")
    >>> make_objective(recipe, nn.Linear(2, 2), torch.zeros(1, 2))
    Standard()
    """
    if recipe.loss == "standard":
        return Standard(recipe.tau)
    constants = Constants(model, example_input, recipe.block_bound, recipe.norm_steps)
    match recipe.loss:
        case "curvature":
            return CurvatureRegularised(constants, recipe.tau, recipe.nu)
        case "lipschitz-margin":
            return LipschitzMargin(constants, recipe.tau, recipe.nu)
        case "radius-reward":
            return RadiusReward(constants, recipe.tau, gradients=recipe.gradients)
        case "crm":
            return CertifiedRadiusMaximisation(constants, recipe.target_radius, recipe.tau, recipe.sharpness)
        case "certified-margin":
            if recipe.certificate == "quadratic":
                scales = recipe.global_scale, recipe.local_scale
                return LocallyCertifiedMargin(constants, recipe.epsilon, recipe.tau, recipe.ramp_share, *scales)
            return CertifiedMargin(
                constants, recipe.epsilon, recipe.tau, recipe.ramp_share, recipe.gradients, recipe.certificate
            )


def make_multiplier(recipe: Recipe) -> Multiplier:
    """Return the weight of a recipe's regulariser; it stays as it is where `weight_step` is 0.

    >>> float(make_multiplier(Recipe(data="digits", architecture="digits", weight=0.5)).value)
    0.5
    """
    least = recipe.weight_min if recipe.weight_step else 0.0
    return Multiplier(recipe.weight, least, recipe.weight_step, recipe.target_accuracy, recipe.accuracy_average)
