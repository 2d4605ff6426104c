"""From a VNN-LIB file to a `Property`: exactly, or a refusal that names what stands in the way.

VNN-LIB 1.0 is a part of SMT-LIB: declarations of real variables X_0, X_1, ... (inputs, flattened) and Y_0, Y_1, ...
(outputs), and assertions whose conjunction is what *violates* the property.  Read here are `and` and `or` of
inequalities; one of inputs bounds a single X, one of outputs is linear.  Numbers are exact: 0.1 is a tenth.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from curvcert.errors import InvalidFile, InvalidInput
from curvcert.properties.property import Case, Property, Row

Expression = str | list["Expression"]

_TOKEN = re.compile(r"\s+|;[^\n]*|\(|\)|\|[^|]*\||\"[^\"]*\"|[^\s();|\"]+")
_NUMBER = re.compile(r"-?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")
_NAME = re.compile(r"([XY])_(\d{1,7})")
_IGNORED = ("set-logic", "set-info", "set-option", "check-sat", "get-model", "exit")
_LONGEST_NUMBER = 60
_DEEPEST = 64
MOST_CASES = 2**12
"""Cases that a property may fall into."""

MOST_BYTES = 2**26
"""The size of a file that is read."""


def load_vnnlib(path: str | Path) -> Property:
    """Read a property.

    >>> import tempfile
    >>> text = '''
    ... (declare-const X_0 Real) (declare-const Y_0 Real) (declare-const Y_1 Real)
    ... (assert (<= X_0 0.1)) (assert (>= X_0 (- 0.1)))
    ... (assert (<= Y_0 Y_1)) ; violated where Y_1 is as large as Y_0
    ... '''
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(f"{folder}/spec.vnnlib").write_text(text)
    ...     found = load_vnnlib(f"{folder}/spec.vnnlib")
    >>> found.inputs, found.outputs, len(found.cases), found.cases[0].upper
    (1, 2, 1, (Fraction(1, 10),))

    Raises:
        InvalidFile: if it is no VNN-LIB file, or no property of the kind that is covered.
        InvalidInput: if there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise InvalidInput(f"{path}: no such file. Give a property in VNN-LIB, such as spec.vnnlib.")
    if path.stat().st_size > MOST_BYTES:
        raise InvalidFile(f"{path} has {path.stat().st_size} bytes, more than the {MOST_BYTES} that are read.")
    try:
        return parsed(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidFile(f"{path} is no text in UTF-8: {error}. Is it compressed? Unpack it first.") from error
    except InvalidFile as error:
        raise InvalidFile(f"{path}: {error}") from error


def parsed(text: str) -> Property:
    """Return the property that a text states; see `load_vnnlib`."""
    declared: set[str] = set()
    common: list[_Atom] = []
    cases: list[tuple[_Atom, ...]] = [()]
    for command in _expressions(text):
        match command:
            case ["declare-const", str(name), "Real"] | ["declare-fun", str(name), [], "Real"]:
                if _NAME.fullmatch(name) is None or name in declared:
                    raise InvalidFile(f"Expected a new variable X_0, Y_0, ... declared, got {_shown(command)}.")
                declared.add(name)
            case ["assert", formula]:
                found = _alternatives(formula, declared)
                if len(found) == 1:
                    common += found[0]
                else:
                    cases = _both(cases, found)
            case [str(word), *_] if word in _IGNORED:
                pass
            case _:
                raise InvalidFile(
                    f"Expected (declare-const NAME Real) or (assert ...), got {_shown(command)}. VNN-LIB 1.0 is read."
                )
    inputs, outputs = (_count(declared, kind) for kind in "XY")
    return Property(inputs, outputs, tuple(_case((*common, *atoms), inputs) for atoms in cases))


@dataclass(frozen=True)
class _Linear:
    """A linear expression of variables, by their names."""

    coefficients: Mapping[str, Fraction]
    constant: Fraction

    def times(self, factor: Fraction) -> "_Linear":
        return _Linear({name: factor * c for name, c in self.coefficients.items()}, factor * self.constant)

    def plus(self, other: "_Linear") -> "_Linear":
        total = dict(self.coefficients)
        for name, c in other.coefficients.items():
            total[name] = total.get(name, Fraction(0)) + c
        return _Linear(total, self.constant + other.constant)


@dataclass(frozen=True)
class _Atom:
    """That a linear expression is at most 0, or below 0."""

    expression: _Linear
    strict: bool
    text: str


def _expressions(text: str) -> Iterator[Expression]:
    """Yield what stands between outermost brackets."""
    open_: list[list[Expression]] = []
    at = 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise InvalidFile(f"A quotation that does not end, from {_shown(text[at : at + 40])} on.")
        at, word = token.end(), token[0]
        if word.isspace() or word.startswith(";"):
            continue
        if word == "(":
            open_.append([])
            if len(open_) > _DEEPEST:
                raise InvalidFile(f"Brackets are nested more than {_DEEPEST} deep.")
        elif word == ")" and open_:
            closed = open_.pop()
            if open_:
                open_[-1].append(closed)
            else:
                yield closed
        elif word == ")" or not open_:
            raise InvalidFile(f"Expected (, got {_shown(word)}.")
        else:
            open_[-1].append(word)
    if open_:
        raise InvalidFile(f"{len(open_)} brackets are not closed. Is the file cut short?")


def _alternatives(formula: Expression, declared: set[str]) -> list[tuple[_Atom, ...]]:
    """Return the cases of a formula: it holds where all atoms of one of them do."""
    match formula:
        case ["and", *parts] if parts:
            found: list[tuple[_Atom, ...]] = [()]
            for part in parts:
                found = _both(found, _alternatives(part, declared))
            return found
        case ["or", *parts] if parts:
            either = [case for part in parts for case in _alternatives(part, declared)]
            return _few(either)
        case ["<=" | ">=" | "<" | ">" as sign, left, right]:
            low, high = (_linear(side, declared) for side in ((left, right) if "<" in sign else (right, left)))
            return [(_Atom(low.plus(high.times(Fraction(-1))), "=" not in sign, _shown(formula)),)]
    raise InvalidFile(f"Expected and, or, or an inequality of two sides by <=, >=, < or >, got {_shown(formula)}.")


def _both(one: list[tuple["_Atom", ...]], other: list[tuple["_Atom", ...]]) -> list[tuple["_Atom", ...]]:
    if len(one) * len(other) > MOST_CASES:
        raise InvalidFile(f"The assertions fall into more than {MOST_CASES} cases. Split the property.")
    return [(*first, *second) for first in one for second in other]


def _few(cases: list[tuple["_Atom", ...]]) -> list[tuple["_Atom", ...]]:
    if len(cases) > MOST_CASES:
        raise InvalidFile(f"The assertions fall into more than {MOST_CASES} cases. Split the property.")
    return cases


def _linear(expression: Expression, declared: set[str]) -> _Linear:
    match expression:
        case str(word) if _NUMBER.fullmatch(word) and len(word) <= _LONGEST_NUMBER:
            return _Linear({}, Fraction(word))
        case str(name) if name in declared:
            return _Linear({name: Fraction(1)}, Fraction(0))
        case ["-", only]:
            return _linear(only, declared).times(Fraction(-1))
        case ["+" | "-" as sign, first, *rest] if rest:
            total = _linear(first, declared)
            for part in rest:
                total = total.plus(_linear(part, declared).times(Fraction(1 if sign == "+" else -1)))
            return total
        case ["*", first, second]:
            one, other = _linear(first, declared), _linear(second, declared)
            if not one.coefficients:
                return other.times(one.constant)
            if not other.coefficients:
                return one.times(other.constant)
    raise InvalidFile(
        "Expected a number, a declared variable, or a sum (+, -) of their multiples (*) by numbers, got "
        f"{_shown(expression)}."
    )


def _count(declared: set[str], kind: str) -> int:
    """Return how many variables there are of a kind: those from 0 on, without a gap."""
    numbers = sorted(int(name[2:]) for name in declared if name[0] == kind)
    if not numbers or numbers != list(range(len(numbers))):
        missing = next(k for k in range(len(numbers) + 1) if k not in set(numbers))
        raise InvalidFile(f"{kind}_{missing} is not declared. Expected {kind}_0, {kind}_1, ... without a gap.")
    return len(numbers)


def _case(atoms: tuple[_Atom, ...], inputs: int) -> Case:
    lower: list[Fraction | None] = [None] * inputs
    upper: list[Fraction | None] = [None] * inputs
    rows = []
    for atom in atoms:
        terms = {name: c for name, c in atom.expression.coefficients.items() if c}
        kinds = {name[0] for name in terms}
        if kinds == {"X"} and len(terms) == 1 and not atom.strict:
            ((name, c),) = terms.items()
            k, side = int(name[2:]), -atom.expression.constant / c
            if c > 0:
                upper[k] = min(side, side if upper[k] is None else upper[k])  # type: ignore[type-var]
            else:
                lower[k] = max(side, side if lower[k] is None else lower[k])  # type: ignore[type-var]
        elif kinds <= {"Y"}:
            by_number = {int(name[2:]): c for name, c in terms.items()}
            rows.append(Row(by_number, -atom.expression.constant, atom.strict))
        else:
            raise InvalidFile(
                f"Expected bounds of single inputs, by <= or >=, and inequalities of outputs alone, got {atom.text}. "
                "Only boxes of inputs are covered."
            )
    return Case(_bounded(lower, "lower"), _bounded(upper, "upper"), tuple(rows))


def _bounded(sides: list[Fraction | None], which: str) -> tuple[Fraction, ...]:
    for k, side in enumerate(sides):
        if side is None:
            raise InvalidFile(f"X_{k} has no {which} bound in one of the cases. Expected a box of inputs.")
    return tuple(side for side in sides if side is not None)


def _shown(expression: Expression) -> str:
    def words(part: Expression) -> str:
        return part if isinstance(part, str) else f"({' '.join(map(words, part))})"

    text = words(expression)
    return text if len(text) <= 80 else f"{text[:77]}..."
