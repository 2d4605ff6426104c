"""The teeth: with c or any one norm 5% too small, the search finds a violation where the bound is tight."""

import math
from dataclasses import dataclass
from importlib import import_module

import pytest
import torch

from curvcert import curvature
from curvcert.activations import TANH, Activation
from curvcert.bounds.curvature import Compositional
from curvcert.bounds.lipschitz.growth import Growth
from curvcert.network import Block, Network
from curvcert.operators import Dense, Identity, NormBounds, Zero
from tests.bounds.cases import one_dimensional
from tests.bounds.curvature.search import ROUNDING, CurvatureSearch

INF = math.inf
F64 = torch.float64
FACTOR = 0.95


def tight(outputs: int = 1) -> Network:
    """tanh(1.7 x) with its steepest bend at the origin, on one axis or on two of which the second hardly counts."""
    bend = math.atanh(1 / 3**0.5)
    if outputs == 1:
        return one_dimensional(1.7, TANH, bend)
    W, b = Dense(torch.diag(torch.tensor([1.7, 1e-3], dtype=F64))), torch.full((2,), bend, dtype=F64)
    return Network.of_blocks((Block(Zero((2,), (2,)), Identity((2,)), W, b, torch.zeros(2, dtype=F64), TANH, "only"),))


def steep() -> Network:
    """A linear map, then tanh where it bends most: the prefix constant 1.3 enters squared and nothing else is loose."""
    identity = Identity((1,))
    first = Block(identity, Dense(torch.zeros(1, 1, dtype=F64)), Dense(torch.zeros(1, 1, dtype=F64)),
                  torch.zeros(1, dtype=F64), torch.zeros(1, dtype=F64), TANH, "first")  # fmt: skip
    return Network.of_blocks((first.read_out(Dense(torch.full((1, 1), 1.3, dtype=F64))), *tight().blocks))


METHODS: dict[str, tuple] = {
    "product": (Compositional(["product"]), 2, ("norm",)),
    "vectorised": (Compositional(["vectorised"]), 2, ("norm", "vectorised")),
    "sdp": (Compositional(["sdp"]), 2, ("norm", "row_norms")),
    "hadamard": (Compositional(["hadamard"]), 2, ("hadamard",)),
    "read-out": ("compositional", 1, ("bilinear",)),
    "unrolled": ("unrolled", 1, ("bilinear", "hadamard")),
    "crc": ("crc", 1, ("result",)),
    "anchored": ("anchored", 1, ("bilinear",)),
    "local": ("local", 1, ("bilinear",)),
}


def found_and_bound(name: str, p: float = 2.0) -> tuple[float, float]:
    method, outputs, _ = METHODS[name]
    network = tight(outputs)
    x = torch.zeros(1, *network.in_shape, dtype=F64)
    scope = {"anchored": {"at": x}, "local": {"at": x, "radius": 0.5}}.get(name, {})
    search = CurvatureSearch(network, p, p, scalars=outputs == 1, steps=20)
    found = search.from_anchors(x) if name == "anchored" else search.in_balls(x, torch.full((1,), 0.5, dtype=F64))
    return float(found.max()), float(curvature(network, p, method=method, **scope).value.max())


@pytest.mark.parametrize("name", METHODS)
def test_the_bounds_are_tight_here(name) -> None:
    found, bound = found_and_bound(name)
    assert FACTOR * bound < found <= bound * (1 + ROUNDING)


@pytest.mark.parametrize("name", METHODS)
def test_a_curvature_constant_that_is_too_small_is_found(monkeypatch: pytest.MonkeyPatch, name) -> None:
    scaled = {
        "anchored": ("bounds.curvature.anchored", "anchored_constants"),
        "local": ("propagation.hessians", "curvatures_within"),
        "crc": ("bounds.curvature.singla2020", "crc_eigenvalue_bounds"),
    }
    if name in scaled:
        place, function = scaled[name]
        module = import_module(f"curvcert.{place}")
        honest = getattr(module, function)
        monkeypatch.setattr(module, function, lambda *arguments: smaller(honest(*arguments)))
    else:
        low, high = TANH.curvature
        monkeypatch.setattr(Activation, "curvature_c", property(lambda self: FACTOR * max(-low, high)))
    found, bound = found_and_bound(name)
    assert found > bound * (1 + ROUNDING)


def smaller(result):
    """Scale the tensors of a result, and leave what else it holds."""
    if isinstance(result, tuple):
        return tuple(smaller(part) if isinstance(part, torch.Tensor) else part for part in result)
    return FACTOR * result


@pytest.mark.parametrize(("name", "norm"), [(name, norm) for name, (_, _, norms) in METHODS.items() for norm in norms])
def test_a_norm_that_is_too_small_is_found(monkeypatch: pytest.MonkeyPatch, name, norm) -> None:
    honest = getattr(NormBounds, norm)

    def mutated(self, value, *rest):
        if norm == "result":
            return honest(self, FACTOR * value, *rest)
        return FACTOR * honest(self, value, *rest)

    monkeypatch.setattr(NormBounds, norm, mutated)
    found, bound = found_and_bound(name)
    assert found > bound * (1 + ROUNDING)


@dataclass(frozen=True)
class TooSmall:
    """Constants of values, 5% too small."""

    honest: Growth

    def of(self, value: int) -> torch.Tensor:
        return FACTOR * self.honest.of(value)

    def before(self, number: int) -> torch.Tensor:
        return FACTOR * self.honest.before(number)


@pytest.mark.parametrize("p", [1.0, 2.0, INF])
def test_a_prefix_constant_that_is_too_small_is_found(monkeypatch: pytest.MonkeyPatch, p) -> None:
    network = steep()
    search = CurvatureSearch(network, p, p, scalars=True, steps=20)
    found = float(search.everywhere())
    assert found <= float(curvature(network, p))
    for method in ("compositional", "unrolled"):
        module = import_module(f"curvcert.bounds.curvature.{method}")
        honest = module.growth
        with monkeypatch.context() as patch:
            patch.setattr(module, "growth", lambda *a, honest=honest: TooSmall(honest(*a)))
            assert found > float(curvature(network, p, method=method)) * (1 + ROUNDING), method


def test_an_anchored_bound_used_for_a_ball_is_found() -> None:
    network, x = one_dimensional(1.0, TANH), torch.zeros(1, 1, dtype=F64)
    anchored = float(curvature(network, method="anchored", at=x).value)
    found = float(CurvatureSearch(network, 2.0, 2.0, scalars=True).in_balls(x, torch.ones(1, dtype=F64)))
    assert found > 1.2 * anchored
    assert found <= float(curvature(network, at=x, radius=1.0).value)
