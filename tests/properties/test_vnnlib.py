"""VNN-LIB files: what they say, exactly; and what is no property of the kind that is covered, by name."""

from fractions import Fraction

import pytest

from curvcert.errors import InvalidFile, InvalidInput
from curvcert.properties import load_vnnlib
from curvcert.properties.vnnlib import parsed

DECLARED = "(declare-const X_0 Real)(declare-const Y_0 Real)(declare-fun Y_1 () Real)"
BOXED = f"{DECLARED}(assert (<= X_0 1))(assert (>= X_0 -1e-1))"


def test_a_property_is_read_exactly() -> None:
    found = parsed(f"""
        ; a comment (with brackets
        (set-logic QF_LRA) (set-info :source |text (in bars)|)
        {BOXED}
        (assert (<= (+ (* 2.5 Y_0) (- Y_1) (- 1 3)) (* Y_0 0.5)))
        (check-sat)""")
    assert (found.inputs, found.outputs) == (1, 2)
    (case,) = found.cases
    assert (case.lower, case.upper) == ((Fraction(-1, 10),), (Fraction(1),))
    (row,) = case.rows
    assert dict(row.coefficients) == {0: Fraction(2), 1: Fraction(-1)}
    assert (row.most, row.strict) == (Fraction(2), False)


def test_alternatives_of_inputs_and_outputs_become_cases() -> None:
    found = parsed(f"""{DECLARED}
        (assert (or (and (>= X_0 0) (<= X_0 1)) (and (<= X_0 3) (>= (* -1 X_0) (- 2)) (>= X_0 1))))
        (assert (or (< Y_0 Y_1) (and (>= Y_0 1) (> Y_1 0))))""")
    assert len(found.cases) == 4
    assert [case.upper for case in found.cases] == [(1,), (1,), (2,), (2,)]
    assert [len(case.rows) for case in found.cases] == [1, 2, 1, 2]
    assert [row.strict for row in found.cases[1].rows] == [False, True]
    assert found.cases[0].rows[0].strict
    # An upper bound alone.
    with pytest.raises(InvalidFile, match="X_0 has no lower bound"):
        parsed(f"{DECLARED}(assert (>= (* -1 X_0) (- 2)))")


def test_an_empty_box_is_a_case_without_points() -> None:
    assert parsed(f"{BOXED}(assert (>= X_0 2))(assert (<= Y_0 0))").cases[0].empty


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{BOXED}(assert (<= (* X_0 Y_0) 1))", "sum"),
        (f"{BOXED}(assert (<= (+ X_0 Y_0) 1))", "Only boxes of inputs"),
        (f"{BOXED}(assert (< X_0 0.5))", "Only boxes of inputs"),
        (f"{BOXED}(assert (= Y_0 1))", "inequality"),
        (f"{BOXED}(assert (not (<= Y_0 1)))", "inequality"),
        (f"{BOXED}(assert (<= Y_7 1))", "declared variable"),
        (f"{BOXED}(assert (<= Y_0 1e999999))", "Expected a number"),
        (f"{BOXED}(assert (<= Y_0 {'1' * 99}))", "Expected a number"),
        (f"{BOXED}(declare-const X_0 Real)", "new variable"),
        (f"{BOXED}(declare-const Z_0 Real)", "new variable"),
        (f"{BOXED}(declare-const X_2 Real)", "X_1 is not declared"),
        (f"{BOXED}(define-fun f () Real 1)", "VNN-LIB 1.0"),
        (f"{BOXED}(assert (<= Y_0 1)", "not closed"),
        (f"{BOXED})", r"Expected \("),
        (f"{BOXED} hello", r"Expected \("),
        (f'{BOXED}(set-info "no end)', "quotation"),
        (f"{BOXED}(assert {'(and ' * 70}(<= Y_0 1){')' * 70})", "nested"),
        (f"{BOXED}{'(assert (or (<= Y_0 1) (<= Y_1 1)))' * 13}", "more than 4096 cases"),
        (f"{BOXED}(assert (or {'(<= Y_0 1)' * 5000}))", "more than 4096 cases"),
        ("(declare-const X_0 Real)(assert (<= X_0 1))(assert (>= X_0 0))", "Y_0 is not declared"),
        ("", "X_0 is not declared"),
        (f"{DECLARED}(assert (<= Y_0 1))", "X_0 has no lower bound"),
        (f"{BOXED}(assert (and))", "Expected and, or"),
    ],
    ids=lambda value: value[-40:] if len(value) > 40 else value,
)
def test_what_is_no_such_property_is_refused_by_name(text: str, told: str) -> None:
    with pytest.raises(InvalidFile, match=told):
        parsed(text)


def test_files_that_cannot_be_read(tmp_path) -> None:
    with pytest.raises(InvalidInput, match="no such file"):
        load_vnnlib(tmp_path / "none.vnnlib")
    (tmp_path / "packed.vnnlib").write_bytes(b"\x1f\x8b\x08\xff\xfe")
    with pytest.raises(InvalidFile, match="compressed"):
        load_vnnlib(tmp_path / "packed.vnnlib")
    (tmp_path / "cut.vnnlib").write_text(BOXED[:-1])
    with pytest.raises(InvalidFile, match=r"cut\.vnnlib: 1 brackets"):
        load_vnnlib(tmp_path / "cut.vnnlib")
