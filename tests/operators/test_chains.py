"""Norms of the intervals of a chain: above the truth and near it, in whatever order they are asked for."""

import itertools

import pytest
import torch
from torch import Tensor

from curvcert.operators import AbstractLinearMap, Conv2d, Dense, NormBounds
from curvcert.operators.base import Composition
from curvcert.operators.chains import ChainMatrix, empty_chain
from curvcert.operators.structured import Diagonal


def dense_chain(count: int, seed: int = 0, scale: float = 1.0) -> list[AbstractLinearMap]:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 9, (count + 1,), generator=generator).tolist()
    return [
        Dense(scale * torch.randn(m, n, dtype=torch.float64, generator=generator)) for n, m in itertools.pairwise(sizes)
    ]


def mixed_chain() -> list[AbstractLinearMap]:
    generator = torch.Generator().manual_seed(1)
    kernel = torch.randn(2, 3, 3, 3, dtype=torch.float64, generator=generator)
    scales = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator)
    conv = Conv2d(kernel, (3, 6, 7), (2, 2), ((1, 0), (1, 1)))
    assert conv.out_shape == (2, 3, 4)
    back = Conv2d(torch.randn(4, 2, 2, 2, dtype=torch.float64, generator=generator), (2, 3, 4))
    return [conv, Diagonal(scales, (2, 3, 4)), back]


def truth(factors: list[AbstractLinearMap]) -> Tensor:
    product = factors[-1].as_matrix()
    for op in reversed(factors[:-1]):
        product = product @ op.as_matrix()
    return torch.linalg.svdvals(product)[0]


def intervals(count: int) -> list[tuple[int, int]]:
    return [(j, k) for k in range(count) for j in range(k, -1, -1)]


@pytest.mark.parametrize("chain", [dense_chain(5), dense_chain(6, 3, 1e-40), dense_chain(4, 2, 1e60), mixed_chain()])
@pytest.mark.parametrize("order", ["as LipLT asks", "backwards", "at random"])
def test_every_interval_is_bounded_tightly(chain: list[AbstractLinearMap], order: str) -> None:
    norms, asked = NormBounds(), intervals(len(chain))
    if order == "backwards":
        asked.reverse()
    elif order == "at random":
        asked = [asked[i] for i in torch.randperm(len(asked)).tolist()]
    for j, k in asked:
        factors = chain[j : k + 1]
        op = factors[0] if j == k else Composition(tuple(reversed(factors)))
        exact, bound = float(truth(factors)), float(norms.spectral(op))
        assert exact * (1 - 1e-13) <= bound <= exact * (1 + 1e-8) + 1e-300


def test_a_longer_product_takes_one_stage_more(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, stages = dense_chain(6), []
    times = ChainMatrix.times

    def counted(self: ChainMatrix, factor: AbstractLinearMap, *norms: object) -> ChainMatrix:
        stages.append(factor)
        return times(self, factor, *norms)  # type: ignore[arg-type]

    monkeypatch.setattr(ChainMatrix, "times", counted)
    norms = NormBounds()
    for start in (4, 3, 2, 1, 0):
        norms.spectral(Composition(tuple(reversed(chain[start:]))))
    assert len(stages) == 6


def test_a_product_that_is_too_large_is_bounded_in_another_way() -> None:
    chain = [Dense(torch.randn(40, 600, dtype=torch.float64)), Dense(torch.randn(600, 40, dtype=torch.float64))]
    op = Composition(tuple(reversed(chain)))
    small = NormBounds(memory_budget=2**20)
    assert small.chain(op) is None
    assert small.bound(op).method != "matrix of the chain"
    assert NormBounds().bound(op).method == "matrix of the chain"
    assert float(truth(chain)) * (1 - 1e-13) <= float(small.spectral(op))


def test_the_error_covers_the_rounding() -> None:
    # Factors that cancel: the product is far smaller than the product of the norms.
    generator = torch.Generator().manual_seed(0)
    U, _ = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64, generator=generator))
    left = Dense(U @ torch.diag(torch.tensor([1e8, *[1.0] * 7], dtype=torch.float64)))
    right = Dense(torch.diag(torch.tensor([1e-8, *[1.0] * 7], dtype=torch.float64)) @ U.mT)
    norms = NormBounds()
    found = empty_chain(left).times(left, norms.quick_spectral, norms.quick_spectral)
    found = found.times(right, norms.quick_spectral, norms.quick_spectral)
    exact = left.weight.to(torch.float64).numpy().astype("longdouble") @ right.weight.numpy().astype("longdouble")
    off = float(((found.matrix.numpy() - exact) ** 2).sum() ** 0.5)
    assert off <= float(found.error)
    assert float(norms.spectral(Composition((left, right)))) >= 1 - 1e-12


def test_overflow_and_nan_are_refused_as_before() -> None:
    broken = Dense(torch.tensor([[float("nan")]], dtype=torch.float64))
    with pytest.raises(Exception, match="NaN or infinite"):
        NormBounds().spectral(Composition((broken, Dense(torch.ones(1, 1, dtype=torch.float64)))))
    huge = Dense(torch.full((1, 1), 1e300, dtype=torch.float64))
    with pytest.raises(Exception, match=r"overflows|finite numbers"):
        NormBounds().spectral(Composition((huge, huge)))
