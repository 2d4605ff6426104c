"""Nothing gets worse: a fixed part of the baseline is measured anew; `python -m benchmarks.baseline` measures it all.

Values are compared within 1e-6.  One place has 1e-4, because the first guess of its norms is by iteration: where each
of many matrices over 256 has a bound (`largest_eigenvalues_upper_bound`).  In the baseline that is the network of the
digits, which has a layer of 512 neurons.  No other network that is measured here may come to that guess.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import baseline, harness
from benchmarks.baseline import (
    BOUND_METHODS,
    GIVEN_UP,
    ITERATIVE,
    NAME,
    SPEED_NAME,
    GivenUp,
    better_than,
    measured,
    methods_without_values,
    not_given_up,
    recorded,
    slower_than,
    tolerance,
    worse_than,
)
from benchmarks.baseline_networks import SMOOTH, SUBJECTS, Subject
from curvcert.bounds.lipschitz import LIPSCHITZ_METHODS, Product
from curvcert.bounds.types import Global
from curvcert.network.network_file import network_digest
from curvcert.operators import verified

ROOT = Path(__file__).parents[1]
VALUES: Mapping[str, float] = recorded().figures["values"]

FIXED = (
    replace(SUBJECTS["dense-2-centred_softplus"], norms=(1.0,)),
    replace(SUBJECTS["dense-2-tanh"], norms=(2.0,)),
    replace(SUBJECTS["residual-gelu"], norms=(math.inf,)),
    replace(SUBJECTS["sll-tanh"], norms=(2.0,), methods=("product", "compositional(contraction)", "unrolled")),
    replace(SUBJECTS["conv-silu"], norms=(2.0,), methods=("liplt", "compositional", "unrolled", "anchored", "local")),
    replace(SUBJECTS["dense-4-sin"], norms=(2.0,), methods=("lipsdp-recursion", "crc", "unrolled", "local")),
    replace(SUBJECTS["dense-4-relu"], norms=(2.0,)),
    replace(SUBJECTS["conv-max-pool-relu"], norms=(1.0, math.inf)),
    replace(SUBJECTS["linear"], norms=(2.0, math.inf)),
)

pytestmark = pytest.mark.slow
"""What `make test` measures: every method in every norm and scope, see below."""


def of_fixed(subject: Subject) -> dict[str, float]:
    """Return the record's values of a part of a network."""
    norms = {f"p={p:g}" for p in subject.norms}
    split = {key: key.split("/") for key in VALUES}
    return {
        key: VALUES[key]
        for key, (name, _, method, norm, *_) in split.items()
        if name == subject.name and norm in norms and subject.asks(method)
    }


def cell(key: str) -> str:
    """Return the key without its network, its output and its point."""
    parts = key.split("/")
    return "/".join(parts[1:5] if parts[4] in ("global", "anchor", "ball") else parts[1:4])


@pytest.mark.parametrize("subject", FIXED, ids=[subject.name for subject in FIXED])
def test_nothing_got_worse(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified, "largest_eigenvalue_guesses", lambda *_: pytest.fail("an iteration, see ITERATIVE"))
    before = of_fixed(subject)
    assert before
    assert worse_than(before, measured(subject)) == []


def test_the_fixed_part_has_every_method_in_every_norm_and_scope() -> None:
    assert {cell(key) for subject in FIXED for key in of_fixed(subject)} == {cell(key) for key in VALUES}


def test_every_method_of_the_package_has_values() -> None:
    assert methods_without_values(VALUES) == []


def test_the_record_has_every_network_and_every_sort_of_them() -> None:
    assert {key.split("/")[0] for key in VALUES} == set(SUBJECTS)
    assert len(SUBJECTS) >= 30 and len(VALUES) >= 500 and len(SMOOTH) == 6
    for activation in SMOOTH:
        assert {f"{kind}-{activation}" for kind in ("dense-2", "dense-4", "residual", "conv")} <= set(SUBJECTS)


def test_a_new_method_without_values_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIPSCHITZ_METHODS, "better", Product("better"))
    assert methods_without_values(VALUES) == ["lipschitz/better"]


KEYS = (
    "dense-4-tanh/lipschitz/liplt/p=2/global/vector",
    "dense-4-tanh/curvature/anchored/p=inf/anchor/logit(0)/x1",
    "dense-4-tanh/radius/line/p=2/x0",
    "dense-4-tanh/local_radius/auto/p=1/x1",
)


@pytest.mark.parametrize("key", KEYS)
def test_a_value_that_is_worse_by_1e_5_is_reported_and_one_that_is_better_is_not(key: str) -> None:
    radius = "radius" in key
    harder = {**VALUES, key: VALUES[key] * (1 + 1e-5 if radius else 1 - 1e-5)}
    easier = {**VALUES, key: VALUES[key] * (1 - 1e-5 if radius else 1 + 1e-5)}
    assert [worse.key for worse in worse_than(harder, VALUES)] == [key]
    assert worse_than(easier, VALUES) == []
    assert better_than(easier, VALUES) == [key]


def test_a_witness_that_is_farther_is_worse() -> None:
    key = next(key for key in VALUES if "/attack_radius/" in key)
    assert worse_than(VALUES, {**VALUES, key: 1.01 * VALUES[key]}) != []
    assert worse_than(VALUES, {**VALUES, key: 0.99 * VALUES[key]}) == []


def test_a_method_that_gives_no_value_any_more_is_reported() -> None:
    found = {key: value for key, value in VALUES.items() if "/lipsdp-recursion/" not in key}
    worse = worse_than(VALUES, found)
    assert len(worse) == len(VALUES) - len(found) > 0
    assert all(each.after is None for each in worse)


def test_the_places_with_a_first_guess_by_iteration() -> None:
    assert list(ITERATIVE.values()) == [("digits-embedded/*",), ("*/lipschitz/lipsdp/*", "*/lipschitz/auto/p=2/*")]
    rough = {key for key in VALUES if tolerance(key) == 1e-4}
    assert {key.split("/")[0] for key in rough if "/lipschitz/" not in key} == {"digits-embedded"}
    assert {key.split("/")[2] for key in VALUES if tolerance(key) > 1e-4} == {"linear", "quadratic", "norms"}


def test_the_network_of_the_digits_needs_a_guess_by_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    guesses: list[int] = []
    guess = verified.congruent_eigenvalue_guesses

    def counted(B: torch.Tensor, s: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        guesses.append(len(B))
        return guess(B, s, steps)

    monkeypatch.setattr(verified, "congruent_eigenvalue_guesses", counted)
    subject = SUBJECTS["digits-embedded"]
    baseline.asked(subject.network(), "curvature", 2.0, "global", "pair(0,1)", "unrolled", subject.points())
    assert guesses and min(guesses) > verified._CONGRUENT_DIRECT_SIZE


@pytest.mark.parametrize("quantity", BOUND_METHODS)
def test_what_is_not_asked_in_a_narrower_scope_is_global_there(quantity: str) -> None:
    subject = SUBJECTS["dense-2-tanh"]
    network, x = subject.network(), subject.points()
    for method in {"product", "liplt", "lipsdp-recursion", "compositional", "unrolled", "crc"} & set(
        BOUND_METHODS[quantity]
    ):
        for scope in ("anchor", "ball"):
            bound = baseline.asked(network, quantity, 2.0, scope, "pair(0,1)", method, x)
            assert isinstance(bound.scope, Global)


def test_the_weights_do_not_depend_on_the_global_random_state() -> None:
    digests = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        digests |= {network_digest(SUBJECTS["conv-batch-norm-average-pool-tanh"].network())}
    assert len(digests) == 1


ENTRY = GivenUp("A heading", ("dense-4-tanh/lipschitz/liplt/*",), "it is wrong", "product")


def test_what_is_given_up_is_excused_once() -> None:
    found = {**VALUES, KEYS[0]: 2 * VALUES[KEYS[0]], KEYS[2]: 0.5 * VALUES[KEYS[2]]}
    worse = worse_than(VALUES, found)
    assert [each.key for each in not_given_up(worse, [], [ENTRY])] == [KEYS[2]]
    assert not_given_up(worse, ["A heading"], [ENTRY]) == worse


def test_what_is_given_up_stands_in_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert [entry.heading for entry in GIVEN_UP if entry.heading not in changelog] == []
    headings = [entry.heading for entry in GIVEN_UP]
    assert set(recorded().config["given_up"]) <= set(headings) and len(set(headings)) == len(headings)
    assert all(entry.keys and entry.reason and entry.replacement for entry in GIVEN_UP)


def run(*arguments: str) -> object:
    """Run the command on one small network and return its exit status."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as exit_:
        patch.setattr(sys, "argv", ["baseline", "--workers", "1", "--networks", "linear", *arguments])
        baseline.main()
    return exit_.value.code


def test_the_command_fails_where_something_is_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "linear/lipschitz/product/p=2/global/vector"
    subject = replace(SUBJECTS["linear"], norms=(2.0,), methods=("product",))
    monkeypatch.setattr(baseline, "SUBJECTS", {"linear": subject})
    monkeypatch.setattr(baseline, "methods_without_values", lambda _: [])
    values = of_fixed(subject)
    record = replace(recorded(), figures={"values": dict(values)})
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    path = record.write(tmp_path / f"{NAME}.json")
    assert run() == 0

    record.figures["values"][key] *= 1 - 1e-5
    before = record.write(path).read_text()
    assert run() == 1
    assert f"Worse({key}" in capsys.readouterr().out
    assert run("--write") == 1, "what is not given up is not recorded"
    assert path.read_text() == before

    monkeypatch.setattr(baseline, "GIVEN_UP", (GivenUp("A heading", (key,), "a reason", "nothing"),))
    assert run("--write") == 0
    assert recorded().config["given_up"] == ["A heading"]
    assert recorded().figures["values"] == values


def test_slower_ratios_are_reported() -> None:
    ratios = recorded(SPEED_NAME).figures["ratios"]
    assert slower_than(ratios, {key: 1.2 * ratio for key, ratio in ratios.items()}) == []
    assert len(slower_than(ratios, {key: 1.3 * ratio for key, ratio in ratios.items()})) == len(ratios)
    assert len(slower_than(ratios, {})) == len(ratios) > 0
