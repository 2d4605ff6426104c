"""Networks side by side: the sum of their logits, and bounds and certificates of that sum."""

import pytest
import torch
from torch import Tensor, nn

import curvcert
import curvcert.nn as cnn
from curvcert.data import load_digits
from curvcert.errors import InvalidInput, UnsupportedModule

F64 = torch.float64


def members(name: str, count: int, **options: object) -> list[nn.Sequential]:
    found = []
    for seed in range(count):
        torch.manual_seed(seed)
        found.append(cnn.architecture(name, **options).double().eval())  # type: ignore[arg-type]
    return found


class Scaled(nn.Linear):
    """Not the Linear that it is a kind of."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def total(models: list[nn.Sequential], x: Tensor) -> Tensor:
    return torch.stack([model(x) for model in models]).sum(dim=0)


@pytest.mark.parametrize("name", ["digits", "MNIST-3F", "6C2F"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_logits_are_sums(name: str, count: int) -> None:
    models = members(name, count, activation="centred_softplus", mean_shift=[0.3] * cnn.INPUT_SHAPES[name][0])
    together = cnn.side_by_side(models)
    x = torch.rand(4, *cnn.INPUT_SHAPES[name], dtype=F64)
    assert torch.allclose(together(x), total(models, x), rtol=1e-12, atol=1e-12)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (together, models[0])]
    assert sizes[0] == count * sizes[1] - 10 * (count - 1)
    assert not together.training


def test_grouped_strided_and_pooled_layers() -> None:
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        convolutions = (
            nn.Conv2d(3, 4, 3, 2, (1, 0), padding_mode="circular"),
            nn.Conv2d(4, 6, 2, groups=2, bias=False),
        )
        models.append(
            nn.Sequential(
                convolutions[0], nn.Tanh(), convolutions[1], nn.AvgPool2d(2), nn.Softplus(2.0), nn.Flatten(),
                nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3)
            ).double().eval()
        )  # fmt: skip
    x = torch.rand(5, 3, 6, 7, dtype=F64)
    together = cnn.side_by_side(models)
    assert torch.allclose(together(x), total(models, x), rtol=1e-12, atol=1e-12)
    network = curvcert.trace(together, x[:1])
    assert torch.allclose(network(x), total(models, x), rtol=1e-12, atol=1e-12)


def test_members_are_left_alone_and_copied() -> None:
    models = members("digits", 2)
    before = [p.clone() for model in models for p in model.parameters()]
    state = torch.get_rng_state()
    together = cnn.side_by_side(models)
    assert torch.equal(state, torch.get_rng_state())
    with torch.no_grad():
        for p in together.parameters():
            p.zero_()
    assert all(torch.equal(p, q) for p, q in zip((p for m in models for p in m.parameters()), before, strict=True))
    assert all(p.requires_grad for p in together.parameters())
    assert not {id(layer) for layer in together} & {id(layer) for model in models for layer in model}


@pytest.mark.slow
def test_bounds_hold_and_are_not_far_above_those_of_the_members() -> None:
    models = members("digits", 2)
    x = load_digits("test").as_float64()[:3]
    networks = [curvcert.trace(model, x[:1]) for model in (*models, cnn.side_by_side(models))]
    for bound in (curvcert.lipschitz, curvcert.curvature):
        first, second, K = (bound(net, pair=(0, 1)).value for net in networks)
        assert float(K) <= 1.1 * float(first + second)
    other = x + 0.3 * torch.randn(x.shape, dtype=F64, generator=torch.Generator().manual_seed(0))
    gradients = [networks[-1].jacobian(z)[:, 0] - networks[-1].jacobian(z)[:, 1] for z in (x, other)]
    change = (gradients[0] - gradients[1]).flatten(1).norm(dim=1)
    assert bool((change <= K * (x - other).flatten(1).norm(dim=1)).all())


def test_a_network_beside_itself_has_its_own_radii() -> None:
    """2 f has the constants of f twice, and its radii."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 4))
    model, x = nn.Sequential(*layers).double().eval(), torch.rand(5, 1, 4, 4, dtype=F64)
    alone, twice = (
        curvcert.certify(curvcert.trace(m, x[:1]), x, method="checkable")
        for m in (model, cnn.side_by_side([model, model]))
    )
    assert torch.equal(alone.label, twice.label)
    assert torch.allclose(twice.radius, alone.radius, rtol=1e-6)


def test_what_is_not_alike_is_refused() -> None:
    one, other = members("digits", 1)[0], members("digits", 1, activation="sin")[0]
    for models, words in (
        ([], "at least one"),
        ([one, other], "one architecture"),
        ([one, one[:-1]], "as many layers"),
        ([nn.Sequential(nn.Flatten(), nn.Linear(4, 2))], "two layers"),
        ([nn.Sequential(nn.Conv2d(1, 2, 1), nn.Tanh(), nn.Conv2d(2, 2, 1))], "a Linear"),
        ([nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Tanh())], "a Linear as the last"),
        (members("MNIST-3F", 1, mean_shift=[0.1]) + members("MNIST-3F", 1, mean_shift=[0.2]), "one architecture"),
    ):
        with pytest.raises(InvalidInput, match=words):
            cnn.side_by_side(models)
    grouped = nn.Sequential(nn.Conv2d(2, 2, 1, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(2, 2))
    refused = {"no groups": grouped}
    for layer in (nn.LayerNorm(2), nn.PReLU(), nn.Flatten(2), cnn.Normalise([0.0, 0.0], [1.0, 1.0]), Scaled(2, 2)):
        refused[type(layer).__name__] = nn.Sequential(nn.Linear(2, 2), layer, nn.Linear(2, 2))
    for words, model in refused.items():
        with pytest.raises(UnsupportedModule, match=words):
            cnn.side_by_side([model])


def test_activations_are_told_apart_by_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Softplus, "extra_repr", lambda self: "")
    models = [nn.Sequential(nn.Linear(2, 2), nn.Softplus(beta), nn.Linear(2, 2)) for beta in (1.0, 2.0)]
    with pytest.raises(InvalidInput, match="one architecture"):
        cnn.side_by_side(models)


@pytest.mark.parametrize("name", ["digits", "MNIST-3F", "6C2F"])
def test_a_mirror_image_sees_mirrored_images(name: str) -> None:
    shape = cnn.INPUT_SHAPES[name]
    model = members(name, 1, mean_shift=[0.1, 0.2, 0.3][: shape[0]])[0]
    before, x = [p.clone() for p in model.parameters()], torch.rand(3, *shape, dtype=F64)
    mirrored, both = cnn.mirror_image(model, shape), cnn.with_mirror_image(model, shape)
    assert torch.allclose(mirrored(x), model(x.flip(-1)), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(mirrored(x), model(x), rtol=1e-3)
    assert torch.allclose(both(x), model(x) + model(x.flip(-1)), rtol=1e-12, atol=1e-12)
    assert torch.allclose(both(x), both(x.flip(-1)), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert not mirrored.training and not both.training


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate", "circular"])
def test_a_mirror_image_of_every_kind_of_window(padding_mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, (3, 5), (1, 2), (1, 2), padding_mode=padding_mode), nn.Tanh(),
        nn.Conv2d(4, 4, 3, groups=2, dilation=(1, 2), bias=False), nn.AvgPool2d((2, 3), (1, 1), (1, 1)), nn.Identity(),
        nn.Flatten(), nn.Linear(4 * 6 * 3, 5), nn.Softplus(2.0), nn.Linear(5, 3),
    ).double().eval()  # fmt: skip
    x = torch.rand(4, 2, 7, 13, dtype=F64)
    assert torch.allclose(cnn.mirror_image(model, (2, 7, 13))(x), model(x.flip(-1)), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_an_image_and_its_mirror_image_have_one_radius() -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 4))
    both = cnn.with_mirror_image(nn.Sequential(*layers).double().eval(), (1, 4, 4))
    x = torch.rand(5, 1, 4, 4, dtype=F64)
    found, mirrored = (curvcert.certify(curvcert.trace(both, x[:1]), z) for z in (x, x.flip(-1)))
    assert torch.equal(found.label, mirrored.label)
    assert torch.allclose(found.radius, mirrored.radius, rtol=1e-6)


def test_what_has_no_mirror_image_is_refused() -> None:
    behind = (nn.Tanh(), nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    for first, error, words in (
        (nn.Conv2d(1, 1, 2, 2), InvalidInput, "leaves out 1 columns of 5 on the right"),
        (nn.AvgPool2d(2), InvalidInput, "leaves out 1 columns"),
        (nn.Conv2d(1, 1, 2, padding="same"), UnsupportedModule, "padding in numbers"),
        (nn.AvgPool2d(2, ceil_mode=True), UnsupportedModule, "no ceil_mode"),
        (nn.MaxPool2d(5), UnsupportedModule, "MaxPool2d"),
    ):
        with pytest.raises(error, match=words):
            cnn.mirror_image(nn.Sequential(first, *behind), (1, 5, 5))
    with pytest.raises(UnsupportedModule, match="needs a Flatten before it"):
        cnn.mirror_image(nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(15, 2)), (1, 5, 5))
    with pytest.raises(InvalidInput, match=r"Layer 0: Conv2d.* does not take \(3, 8, 8\)"):
        cnn.mirror_image(members("digits", 1)[0], (3, 8, 8))
    for shape in ((8, 8), (1, 0, 8), (1, 8, 8, 8)):
        with pytest.raises(InvalidInput, match=r"\(channels, height, width\)"):
            cnn.mirror_image(members("digits", 1)[0], shape)
