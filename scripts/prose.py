"""House style in prose: what codespell's dictionary does not know, in pages, docstrings, help and errors.

    python scripts/prose.py FILE-OR-FOLDER ...

Prints each line that breaks a rule, with the rule, and ends with status 1 if there is one.
"""

import re
import sys
from pathlib import Path

_COUNTED = "entry|file|label|line|number|one|point|radius|row|value"
_THINGS = "batch|class|evaluation|image|layer|line|neuron|pair|row|sample|step|subcommand|unit"

RULES = {
    rf"\b(?:{_COUNTED}) an? (?:{_THINGS})\b": "write 'per', as in one per sample",
    r"\bat most [A-Z] an? unit\b": "write 'per unit'",
    r'"""Tell whether\b': "begin with 'Whether'",
    r"\b[Bb]ehavior|\b[Nn]eighbor(?!hood_)|\b[Rr]ecogniz|\b[Ss]ummariz|\b[Ii]nitializ(?!er|e_)": "British spelling",
    r"\bsimply\b|\bobviously\b|\bof course\b|\bleverag": "leave it out, or say why",
}
"""A pattern for each rule, and what to do."""

_KINDS = (".html", ".ipynb", ".md", ".py")
_EXCEPT = re.compile(r"whatever number a row|each a row of|behavior:")
_CODE = re.compile(r"`[^`]*`")


def broken(text: str) -> list[tuple[int, str, str]]:
    """Return the lines of a text that break a rule: their number, the words, and what to do.

    >>> broken("A radius for all,\\none a sample.")
    [(2, 'one a sample', "write 'per', as in one per sample")]
    """
    return [
        (number, found[0], remedy)
        for number, line in enumerate(text.splitlines(), 1)
        if not _EXCEPT.search(line)
        for pattern, remedy in RULES.items()
        for found in re.finditer(pattern, _CODE.sub("", line))
    ]


def main(paths: list[str]) -> int:
    """Print what breaks a rule in files and folders, and return the exit status."""
    folders = {path: sorted(Path(path).rglob("*")) for path in paths if Path(path).is_dir()}
    files = [file for path in paths for file in folders.get(path, [Path(path)])]
    texts = [file for file in files if file.suffix in _KINDS and file.name != Path(__file__).name]
    found = [(file, *each) for file in texts for each in broken(file.read_text(encoding="utf-8"))]
    for path, number, words, remedy in found:
        print(f"{path}:{number}: {words!r}: {remedy}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
