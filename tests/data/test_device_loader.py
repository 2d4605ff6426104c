"""The batches of an epoch: which samples, drawn from which distribution, and the same again from (seed, epoch)."""

import dataclasses

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from curvcert.data import Augmentation, ColourJitter, DeviceLoader, EpochPlan, LabelledImages, load
from curvcert.data.augmentation import cropped, jittered
from curvcert.errors import InvalidInput
from tests.data.official_sets import random_bytes

FULL = Augmentation(crop=2, flip=True, jitter=ColourJitter(0.25, 0.25, 0.25, 0.05))


def _data(n: int = 50, shape: tuple[int, int, int] = (3, 6, 6)) -> LabelledImages:
    return LabelledImages(random_bytes(n, *shape), torch.arange(n), max_value=255)


def _columns(plan: EpochPlan) -> list[Tensor]:
    return [getattr(plan, column.name) for column in dataclasses.fields(plan)]


def _equal(first: EpochPlan, second: EpochPlan) -> list[bool]:
    return [torch.equal(*pair) for pair in zip(_columns(first), _columns(second), strict=True)]


def test_an_epoch_is_a_permutation_cut_to_whole_batches() -> None:
    loader = DeviceLoader(_data(50), batch_size=8, seed=3)
    left_out = []
    for epoch in range(6):
        plan = loader.plan(epoch)
        seen = torch.cat([loader.batch(plan, step)[1] for step in range(loader.steps_per_epoch)])
        assert loader.steps_per_epoch == 6 and len(plan) == len(seen) == 48
        assert len(seen.unique()) == 48
        left_out.append(set(range(50)) - set(seen.tolist()))
    assert len(set(map(frozenset, left_out))) > 1


def test_whole_batches_leave_nothing_out() -> None:
    plan = DeviceLoader(_data(48), batch_size=8).plan(0)
    assert plan.order.sort().values.tolist() == list(range(48))


def test_a_plan_is_a_function_of_seed_and_epoch_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    plan = DeviceLoader(_data(), 10, seed=5, augmentation=FULL).plan(7)
    assert torch.equal(torch.get_rng_state(), before)
    again = DeviceLoader(_data(), 10, seed=5, augmentation=FULL)
    again.plan(0)
    assert all(_equal(plan, again.plan(7)))


@pytest.mark.parametrize(("seed", "epoch"), [(5, 8), (6, 7), (7, 5), (5 + 2**32, 7), (5 + 2**64, 7)])
def test_another_seed_or_epoch_is_another_plan(seed: int, epoch: int) -> None:
    plan = DeviceLoader(_data(), 10, seed=5, augmentation=FULL).plan(7)
    assert not any(_equal(plan, DeviceLoader(_data(), 10, seed=seed, augmentation=FULL).plan(epoch)))


def test_turning_one_augmentation_on_changes_no_other() -> None:
    plain, full = (DeviceLoader(_data(), 10, augmentation=a).plan(0) for a in (Augmentation(), FULL))
    flipped = DeviceLoader(_data(), 10, augmentation=dataclasses.replace(FULL, crop=0)).plan(0)
    assert _equal(plain, full) == [True, False, False, False]
    assert _equal(flipped, full) == [True, False, True, True]


def test_what_is_off_is_drawn_as_nothing() -> None:
    plan = DeviceLoader(_data(), 10).plan(0)
    assert not bool(plan.offsets.any()) and not bool(plan.flips.any())
    assert plan.jitters.unique(dim=0).tolist() == [[1.0, 1.0, 1.0, 0.0]]


# The seeds are fixed, so that a p-value, once above 0.001, stays there.
@pytest.fixture(scope="module")
def large_plan() -> EpochPlan:
    return DeviceLoader(_data(40_000, (3, 3, 3)), 100, seed=11, augmentation=FULL).plan(0)


def test_offsets_are_uniform_and_independent(large_plan: EpochPlan) -> None:
    cells = large_plan.offsets[:, 0] * 5 + large_plan.offsets[:, 1]
    counts = cells.bincount(minlength=25).numpy()
    assert len(counts) == 25
    assert stats.chisquare(counts).pvalue > 0.001


def test_flips_are_fair_and_independent_of_the_crop(large_plan: EpochPlan) -> None:
    table = torch.stack([(large_plan.offsets[:, 1] + 5 * large_plan.flips).bincount(minlength=10)]).reshape(2, 5)
    assert stats.chisquare(table.sum(dim=1).numpy()).pvalue > 0.001
    assert stats.chi2_contingency(table.numpy()).pvalue > 0.001


def test_jitters_are_uniform_over_their_ranges(large_plan: EpochPlan) -> None:
    for column, (low, high) in zip(large_plan.jitters.T.double(), FULL.jitter.ranges, strict=True):
        assert low <= float(column.min()) and float(column.max()) <= high
        assert stats.kstest(column.numpy(), stats.uniform(low, high - low).cdf).pvalue > 0.001
    correlations = large_plan.jitters.T.double().corrcoef() - torch.eye(4)
    assert float(correlations.abs().max()) < 4 / len(large_plan) ** 0.5


def test_orders_are_uniform() -> None:
    loader = DeviceLoader(_data(4), 4, seed=1)
    orders = torch.stack([loader.plan(epoch).order for epoch in range(1200)])
    _, counts = orders.unique(dim=0, return_counts=True)
    assert len(counts) == 24
    assert stats.chisquare(counts.numpy()).pvalue > 0.001


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_is_its_samples_augmented_and_scaled(dtype: torch.dtype) -> None:
    data = _data()
    loader = DeviceLoader(data, 10, augmentation=FULL, dtype=dtype)
    plan = loader.plan(2)
    x, y = loader.batch(plan, 3)
    rows = slice(30, 40)
    pixels = cropped(data.images, plan.order[rows], plan.offsets[rows], plan.flips[rows], FULL)
    assert x.dtype == dtype and y.dtype == torch.int64
    assert torch.equal(x, jittered(pixels.to(dtype) / 255, plan.jitters[rows], FULL.jitter))
    assert torch.equal(y, plan.order[rows])


@pytest.mark.parametrize(("max_value", "dtype"), [(16, torch.float32), (255, torch.float32), (255, torch.float64)])
def test_every_value_is_scaled_as_in_float64_rounded(max_value: int, dtype: torch.dtype) -> None:
    values = torch.arange(max_value + 1, dtype=torch.uint8)[:, None, None, None]
    data = LabelledImages(values, torch.arange(len(values)), max_value)
    loader = DeviceLoader(data, len(values), dtype=dtype)
    x, y = loader.batch(loader.plan(0), 0)
    assert torch.equal(x, data.as_float64()[y].to(dtype))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_step_in_a_tensor_is_the_step(dtype: torch.dtype) -> None:
    loader = DeviceLoader(_data(), 10, augmentation=FULL)
    plan = loader.plan(0)
    for step in range(5):
        for given, counted in zip(
            loader.batch(plan, step), loader.batch(plan, torch.tensor(step, dtype=dtype)), strict=True
        ):
            assert torch.equal(given, counted)


def test_the_ranks_share_the_batch() -> None:
    loader = DeviceLoader(_data(), 12, augmentation=FULL)
    plan = loader.plan(0)
    x, y = loader.batch(plan, 1)
    for world, sizes in ((3, [4, 4, 4]), (5, [2, 2, 3, 2, 3])):
        shares = [loader.batch(plan, 1, rank, world) for rank in range(world)]
        assert [len(share[1]) for share in shares] == sizes
        assert torch.equal(torch.cat([share[0] for share in shares]), x)
        assert torch.equal(torch.cat([share[1] for share in shares]), y)


def test_a_plan_is_overwritten_in_place() -> None:
    loader = DeviceLoader(_data(), 10, augmentation=FULL)
    plan, other = loader.plan(0), loader.plan(1)
    addresses = [column.data_ptr() for column in _columns(plan)]
    assert plan.copy_(other) is plan
    assert all(_equal(plan, other))
    assert [column.data_ptr() for column in _columns(plan)] == addresses
    with pytest.raises(InvalidInput, match="50"):
        plan.copy_(DeviceLoader(_data(), 8).plan(0))


def test_the_digits_load() -> None:
    data = load("digits", "train")
    loader = DeviceLoader(data, 64, augmentation=Augmentation(crop=1, crop_mode="zeros"))
    x, y = loader.batch(loader.plan(0), 0)
    assert x.shape == (64, 1, 8, 8) and float(x.max()) == 1.0
    assert y.unique().tolist() == list(range(10))


def test_the_batch_is_one_static_graph() -> None:
    """Recorded without values, a batch serves every step: nothing reads a tensor on the host or shapes by it."""
    loader = DeviceLoader(_data(), 10, augmentation=FULL)
    plan, other = loader.plan(0), loader.plan(1)
    record = make_fx(lambda step: loader.batch(plan, step), tracing_mode="fake", _allow_non_fake_inputs=True)
    graph = record(torch.tensor(0))
    plan.copy_(other)
    for recorded, made in zip(graph(torch.tensor(4)), loader.batch(other, 4), strict=True):
        assert torch.equal(recorded, made)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"batch_size": 0}, "batch size"),
        ({"batch_size": 51}, "50"),
        ({"seed": -1}, "seed"),
        ({"dtype": torch.uint8}, "floating"),
        ({"augmentation": Augmentation(crop=6)}, "crop"),
    ],
)
def test_settings_out_of_range_are_refused(settings, word: str) -> None:
    with pytest.raises(InvalidInput, match=word):
        DeviceLoader(_data(), **{"batch_size": 10, **settings})


@pytest.mark.parametrize(
    ("step", "rank", "world"),
    [(5, 0, 1), (-1, 0, 1), (0, 1, 1), (0, -1, 2), (0, 0, 11), (0, 0, 0), (torch.tensor(0.0), 0, 1)],
)
def test_a_step_or_a_rank_out_of_range_is_refused(step, rank: int, world: int) -> None:
    loader = DeviceLoader(_data(), 10)
    with pytest.raises((InvalidInput, TypeError)):
        loader.batch(loader.plan(0), step, rank, world)


def test_another_loaders_plan_and_a_negative_epoch_are_refused() -> None:
    loader = DeviceLoader(_data(), 10)
    with pytest.raises(InvalidInput, match="this loader"):
        loader.batch(DeviceLoader(_data(), 8).plan(0), 0)
    with pytest.raises(InvalidInput, match="-1"):
        loader.plan(-1)


@pytest.mark.gpu
@pytest.mark.parametrize(("jitter", "tolerance"), [(ColourJitter(), 0.0), (FULL.jitter, 1e-5)])
def test_an_accelerator_sees_the_same_epoch(jitter: ColourJitter, tolerance: float) -> None:
    augmentation = dataclasses.replace(FULL, jitter=jitter)
    here, there = (DeviceLoader(_data(), 10, augmentation=augmentation, device=device) for device in ("cpu", "cuda"))
    plans = here.plan(3), there.plan(3)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(*map(_columns, plans), strict=True))
    (x, y), (x_there, y_there) = here.batch(plans[0], 2), there.batch(plans[1], 2)
    assert torch.equal(y, y_there.cpu())
    torch.testing.assert_close(x, x_there.cpu(), rtol=0, atol=tolerance)


@pytest.mark.gpu
def test_one_captured_graph_serves_every_step_and_epoch() -> None:
    loader = DeviceLoader(_data(), 10, augmentation=FULL, device="cuda")
    plan, step = loader.plan(0), torch.zeros((), dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        loader.batch(plan, step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x, y = loader.batch(plan, step)
        step += 1
    for epoch in range(3):
        plan.copy_(loader.plan(epoch))
        step.zero_()
        for k in range(loader.steps_per_epoch):
            graph.replay()
            expected_x, expected_y = loader.batch(loader.plan(epoch), k)
            assert torch.equal(x, expected_x) and torch.equal(y, expected_y)
