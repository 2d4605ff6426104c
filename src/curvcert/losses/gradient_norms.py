r"""Norms of the gradients of pairs, :math:`\|\nabla (f_i - f_y)(x)\|_2`, differentiable in the weights."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from curvcert.losses.pull_back import layers_with_rules, pull_back


def logits_and_pair_norms(
    model: nn.Module, x: Float[Tensor, "batch ..."], y: Int64[Tensor, " batch"]
) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch classes"]]:
    r"""Return the logits and :math:`\|\nabla f_i - \nabla f_y\|` for every class i, zero at i = y.

    The differences themselves are pulled back, one row per class.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    >>> logits_and_pair_norms(model, torch.ones(1, 2), torch.tensor([0]))[1].detach()
    tensor([[0., 5.]])
    """
    logits, back = _with_pull_back(model, x)
    eye = torch.eye(logits.shape[1], dtype=logits.dtype, device=logits.device)
    rows = back(eye[:, None, :] - eye[y][None])
    return logits, torch.linalg.vector_norm(rows.flatten(2), dim=2).T


def logits_and_runner_up_norm(
    model: nn.Module, x: Float[Tensor, "batch ..."], y: Int64[Tensor, " batch"]
) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch 1"]]:
    r"""Return the logits and :math:`\|\nabla f_r - \nabla f_y\|` for r the best of the other classes.

    One backward pass, with one row per sample.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    >>> logits_and_runner_up_norm(model, torch.ones(1, 2), torch.tensor([0]))[1].detach()
    tensor([[5.]])
    """
    logits, back = _with_pull_back(model, x)
    with torch.no_grad():
        runner_up = logits.scatter(1, y[:, None], -torch.inf).argmax(dim=1, keepdim=True)
        gap = torch.zeros_like(logits).scatter(1, runner_up, 1.0).scatter(1, y[:, None], -1.0)
    (gradient,) = back(gap[None])
    return logits, torch.linalg.vector_norm(gradient.flatten(1), dim=1, keepdim=True)


def _with_pull_back(model: nn.Module, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the logits and g -> Df(x)' g on rows of covectors: written out where every layer has a rule."""
    layers = layers_with_rules(model)
    if layers is None:
        logits, back, *_ = torch.func.vjp(model, x.detach())
        return logits, lambda g: torch.func.vmap(back)(g)[0]
    states = [x.detach()]
    for layer in layers:
        states.append(layer(states[-1]))

    def written_out(g: Tensor) -> Tensor:
        for layer, before, after in zip(reversed(layers), reversed(states[:-1]), reversed(states[1:]), strict=True):
            g = pull_back(layer, before, after, g)
        return g

    return states[-1], written_out


def safe_sqrt(x: Tensor) -> Tensor:
    """Return the root of x >= 0, with gradient 0 at 0 instead of infinity.

    >>> x = torch.zeros(1, requires_grad=True)
    >>> safe_sqrt(x).sum().backward()
    >>> x.grad
    tensor([0.])
    """
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), 0.0)
