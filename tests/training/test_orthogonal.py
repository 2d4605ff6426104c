"""Training orthogonal layers: they stay orthogonal, and looking at a run does not change it."""

from dataclasses import replace

import pytest
import torch

import curvcert.nn as cnn
from curvcert.data import LabelledImages
from curvcert.training import Recipe, Trainer
from curvcert.training.evaluation import evaluate

RECIPE = Recipe(
    data="cifar10",
    architecture="OrthoFold",
    loss="lipschitz-margin",
    nu=0.4,
    tau=0.25,
    optimiser="muon",
    learning_rate=0.01,
    batch_size=16,
    epochs=1,
)


def images() -> LabelledImages:
    """Return noise with a bright row, a different one for each class."""
    generator, labels = torch.Generator().manual_seed(0), torch.arange(64) % 10
    pixels = torch.randint(0, 128, (64, 3, 32, 32), generator=generator, dtype=torch.uint8)
    pixels[torch.arange(64), :, 3 * labels] = 255
    return LabelledImages(pixels, labels, max_value=255)


@pytest.mark.slow
def test_the_weights_stay_orthogonal_and_looking_changes_nothing() -> None:
    data = images()
    runs = [Trainer(RECIPE, data) for _ in range(2)]
    for run in runs:
        run.advance()
    found = evaluate(runs[0].trained, data, [0.001, 10.0], 20)
    assert runs[0].model.training
    assert found["certified_estimate_0.001"] <= found["accuracy"]
    assert found["certified_estimate_10"] == 0.0
    for run in runs:
        run.advance()
    first, second = (run.checkpoint().tensors for run in runs)
    assert all(torch.equal(first[name], second[name]) for name in first)
    for layer in runs[0].model:
        if isinstance(layer, cnn.OrthogonalStack):
            gram = (layer.weight @ layer.weight.mT).detach()
            assert float((gram - torch.eye(layer.channels)).abs().max()) < 0.05  # One step away from orthogonal.


@pytest.mark.slow
def test_the_loss_falls() -> None:
    run = Trainer(replace(RECIPE, epochs=5), images())
    run.advance()
    before = run.read_tally()["loss"]
    for _ in range(15):
        run.advance()
    run.read_tally()
    for _ in range(4):
        run.advance()
    assert run.read_tally()["loss"] < 0.8 * before
