"""Check an installed curvcert from outside its source tree: python -I check_installed.py SOURCE_TREE."""

import sys
from pathlib import Path

import torch

import curvcert
from curvcert.data import load_demo_network, load_digits


def main(source_tree: Path) -> None:
    """Import the installed package, load what it embeds, and say what was found."""
    package = Path(curvcert.__file__).resolve()
    if package.is_relative_to(source_tree.resolve() / "src"):
        raise SystemExit(f"Imported {package} from the source tree, not the installed package.")
    digits = load_digits("test")
    logits = load_demo_network().double()(digits.as_float64())
    accuracy = (logits.argmax(dim=1) == digits.labels).double().mean().item()
    print(f"curvcert {curvcert.__version__}: {len(digits)} test digits, demo network {accuracy:.1%} accurate")
    there = [entry for entry in curvcert.zoo.entries() if entry.available]
    for entry in there:
        with torch.no_grad():
            curvcert.zoo.load(entry.name, entry.seed)
    print(f"zoo: {', '.join(f'{entry.name} (seed {entry.seed})' for entry in there)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
