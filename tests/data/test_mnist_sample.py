import torch

from curvcert.data import load_mnist_network, load_mnist_sample
from curvcert.data.embedded import read_embedded


@torch.no_grad()
def test_the_network_classifies_the_images() -> None:
    sample = load_mnist_sample()
    logits = load_mnist_network()(sample.as_float64().float())
    accuracy = float((logits.argmax(dim=1) == sample.labels).double().mean())
    assert accuracy >= 0.96
    assert sorted(sample.labels.unique().tolist()) == list(range(10))


def test_the_weights_are_those_of_the_file_exactly() -> None:
    assert all(torch.equal(weight, weight.half().float()) for weight in load_mnist_network().parameters())
    assert len(read_embedded("mnist_network.safetensors")) < 300_000


def test_loading_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    load_mnist_network()
    assert torch.equal(torch.get_rng_state(), before)
