import json

import torch

from curvcert.data import load_demo_network, load_digits
from curvcert.data.embedded import read_embedded


def _metadata(content: bytes) -> dict[str, str]:
    # A safetensors file opens with the length of its JSON header, 8 bytes, little-endian.
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length])["__metadata__"]


@torch.no_grad()
def test_accuracy_is_the_recorded_one() -> None:
    digits = load_digits("test")
    logits = load_demo_network()(digits.as_float64().float())
    accuracy = float((logits.argmax(dim=1) == digits.labels).double().mean())
    recorded = float(_metadata(read_embedded("demo_network.safetensors"))["test_accuracy"])
    assert accuracy >= 0.95
    assert abs(accuracy - recorded) <= 1 / len(digits)  # one sample may sit on the boundary


def test_is_float32_in_eval_mode_and_trainable() -> None:
    model = load_demo_network()
    assert not model.training
    assert all(weight.dtype == torch.float32 and weight.requires_grad for weight in model.parameters())


def test_loading_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    load_demo_network()
    assert torch.equal(torch.get_rng_state(), before)


def test_two_loads_share_nothing() -> None:
    first, second = load_demo_network(), load_demo_network()
    with torch.no_grad():
        first[0].weight.zero_()
    assert float(second[0].weight.detach().abs().max()) > 0
