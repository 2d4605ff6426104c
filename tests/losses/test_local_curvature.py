"""The local curvature that a loss pays for, against Jacobians and Hessians by automatic differentiation."""

import pytest
import torch
from torch import Tensor, nn

from curvcert.errors import UnsupportedActivation, UnsupportedModule
from curvcert.losses import Constants, LocallyCertifiedMargin
from curvcert.losses.local_curvature import direction, logits_norm_and_local_curvature
from curvcert.nn import Normalise, PadChannels, ScaledAveragePool2d, SLLDense, UnitRowLinear

F64 = torch.float64
MODELS = {
    "dense": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 3)), (4,)),
    "convolutions": (
        lambda: nn.Sequential(
            Normalise([0.1, 0.2], [0.5, 2.0]),
            PadChannels(3),
            nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
            nn.SiLU(),
            ScaledAveragePool2d(2),
            nn.Flatten(),
            nn.Linear(16, 5),
            nn.GELU(),
            UnitRowLinear(5, 3),
        ),
        (2, 4, 4),
    ),
}


def terms(model: nn.Sequential, x: Tensor, y: int, v: Tensor, reach: float) -> tuple[Tensor, Tensor]:
    """Return the gradient's norm and the bend along v of one sample's runner-up, by automatic differentiation."""
    logits = model(x[None])[0]
    runner_up = int(logits.index_fill(0, torch.tensor(y), -torch.inf).argmax())

    def behind(k: int, z: Tensor) -> Tensor:
        out = model[k:](z[None])[0]
        return out[runner_up] - out[y]

    bend = torch.zeros((), dtype=F64)
    for k, layer in enumerate(model):
        if not isinstance(layer, nn.Tanh | nn.Sigmoid | nn.SiLU | nn.GELU):
            continue
        z, t = torch.func.jvp(lambda x, k=k: model[:k](x[None])[0], (x,), (v,))
        u = torch.func.grad(lambda a, k=k: behind(k + 1, a))(layer(z))
        ends = torch.stack([z + reach * t, z - reach * t])
        second = torch.func.grad(lambda z, layer=layer: torch.func.grad(lambda z: layer(z).sum())(z).sum())(ends)
        bend = bend + (u.abs() * second.abs().amax(dim=0) * t.square()).sum()
    return torch.func.grad(lambda x: behind(0, x))(x).norm(), bend


@pytest.mark.parametrize(("make", "shape"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("reach", [0.0, 0.3])
def test_it_is_what_automatic_differentiation_finds(make, shape, reach: float) -> None:
    torch.manual_seed(0)
    model, x, y = make().to(F64), torch.rand(5, *shape, dtype=F64), torch.tensor([0, 1, 2, 0, 1])
    logits, norms, bends = logits_norm_and_local_curvature(model, x, y, reach)
    v = direction(x)
    expected = [terms(model, x[i], int(y[i]), v[i], reach) for i in range(5)]
    torch.testing.assert_close(logits, model(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norms[:, 0], torch.stack([norm for norm, _ in expected]), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(bends[:, 0], torch.stack([bend for _, bend in expected]), rtol=1e-10, atol=1e-12)


def test_directions_look_random() -> None:
    x = (torch.rand(64, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 255).round() / 255
    v = direction(x).flatten(1)
    assert torch.equal(v, direction(x).flatten(1))
    assert abs(float(v.mean())) < 0.02 and abs(float(v.square().mean()) - 1) < 0.02
    # Images, and an image and itself moved by a pixel, share no more than chance has them share.
    shared = (v @ v.T / v.shape[1]).fill_diagonal_(0.0)
    moved = (v * direction(x.roll(1, dims=3)).flatten(1)).mean(dim=1)
    assert float(shared.abs().max()) < 6 / v.shape[1] ** 0.5 and float(moved.abs().max()) < 6 / v.shape[1] ** 0.5


def test_a_flat_image_has_a_direction_of_all_frequencies() -> None:
    v = direction(torch.full((1, 1, 32, 32), 0.5))[0, 0]
    spectrum = torch.fft.fft2(v).abs().square()
    assert float(spectrum.max()) < 16 * float(spectrum.mean())


def test_directions_of_many_images_cover_all_coordinates_alike() -> None:
    x = (torch.rand(20_000, 12, generator=torch.Generator().manual_seed(0)) * 255).round() / 255
    v = direction(x)
    torch.testing.assert_close(v.T @ v / len(v), torch.eye(12), rtol=0, atol=0.05)


def test_what_it_has_no_rule_for_is_refused() -> None:
    x, y = torch.rand(2, 4), torch.tensor([0, 1])
    for model in (nn.Sequential(SLLDense(4, 6)), nn.Sequential(nn.Linear(4, 3), nn.Sequential(SLLDense(3, 6)))):
        objective = LocallyCertifiedMargin(Constants(model, x[:1]), 0.1)
        with pytest.raises(UnsupportedModule, match='Use certificate "line"'):
            objective(model, x, y)
    kinked = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    with pytest.raises(UnsupportedActivation):
        logits_norm_and_local_curvature(kinked, x, y, 0.1)


def test_without_its_share_the_local_curvature_is_not_computed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    x, y = torch.rand(5, 3), torch.tensor([0, 1, 2, 3, 0])
    constants = Constants(model, x[:1])
    alone = LocallyCertifiedMargin(constants, 0.1, global_scale=0.5, local_scale=0.0)
    assert len(alone.of_batch(model, x, y)) == 2
    tiny = LocallyCertifiedMargin(constants, 0.1, global_scale=0.5, local_scale=1e-12)
    fixed = tuple(value.detach() for value in alone.of_weights())
    losses = [each.rate(each.of_batch(model, x, y), fixed, y, 1.0, 1.0) for each in (alone, tiny)]
    assert torch.allclose(*losses)
