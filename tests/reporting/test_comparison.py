"""Two certificates side by side: counts that are theirs, on the safe side, and nothing where they do not compare."""

from dataclasses import replace

import pytest

from curvcert.certificates import certify
from curvcert.errors import InvalidInput
from curvcert.reporting import compare
from tests.reporting.cases import Case, made_up


def test_it_counts_what_each_proves(case: Case) -> None:
    weaker = certify(case.network, case.x, case.y, method="product", box=(0, 1))
    eps = float(case.certificate.radius.median())
    found = compare(case.certificate, weaker, ("best", "product"), [eps])
    assert found.same_samples
    larger = int((case.certificate.radius > weaker.radius).sum())
    equal = int((case.certificate.radius == weaker.radius).sum())
    within, each = found.conclusions()
    assert case.certificate.certified_accuracy(eps) > weaker.certified_accuracy(eps) and "best proves more" in within
    assert f"best has the larger radius on {larger}, product on 0; they are equal on {equal}" in each
    rows = dict(found.rows())
    low, high = rows[f"proven at {eps:.4g}, at least"], rows[f"known at {eps:.4g}, at most"]
    for certificate, least, most in zip(found.both, low, high, strict=True):
        assert 0 <= certificate.certified_accuracy(eps) - float(least[:-1]) / 100 < 0.001
        assert 0 <= float(most[:-1]) / 100 - certificate.searched_accuracy(eps) < 0.001


def test_other_samples_are_not_matched() -> None:
    found = compare(made_up(4), made_up(5), epsilons=[0.1])
    assert not found.same_samples and "different samples" in found.conclusions()[-1]
    assert "different samples" in found.page()


def test_other_norms_are_refused() -> None:
    with pytest.raises(InvalidInput, match="got l2 and l1"):
        compare(made_up(4), replace(made_up(4), p=1.0))
