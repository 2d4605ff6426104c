"""Write the embedded digits from scikit-learn's copy: python scripts/embed_digits.py.

Needs scikit-learn, which curvcert itself does not.  Prints the digest that
`curvcert.data.embedded.SHA256` must hold.
"""

import hashlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save
from sklearn.datasets import load_digits

from curvcert.whole_files import write_whole

TARGET = Path(__file__).parents[1] / "src/curvcert/data/files/digits.safetensors"


def main() -> None:
    """Convert, write, and print the digest."""
    source = load_digits()
    images = source.images.astype(np.uint8)[:, None]
    if images.shape != (1797, 1, 8, 8) or not np.array_equal(images[:, 0], source.images):
        raise SystemExit(f"Expected 1,797 images of integers, got {source.images.shape}.")
    content = save({"images": images, "labels": source.target.astype(np.uint8)})
    write_whole(TARGET, content)
    print(f"{TARGET.name}: {len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}")


if __name__ == "__main__":
    main()
