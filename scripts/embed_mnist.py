"""Write the embedded MNIST network and test images: python scripts/embed_mnist.py MODEL DATA.

MODEL is what `curvcert train --recipe mnist-6f` wrote; its weights are rounded to float16, and those are the network.
DATA is the folder with MNIST.  The images are the first of the test set.  Prints the digests that
`curvcert.data.embedded.SHA256` must hold.
"""

import hashlib
import sys
from pathlib import Path

import torch
from safetensors.torch import save

from curvcert.data import load
from curvcert.training import load_model
from curvcert.whole_files import write_whole

FILES = Path(__file__).parents[1] / "src/curvcert/data/files"
IMAGES = 500


def main(model_path: Path, data: Path) -> None:
    """Convert, write, and print the digests."""
    model, recipe = load_model(model_path)
    if recipe.architecture != "MNIST-6F":
        raise SystemExit(f"Expected a MNIST-6F, got a {recipe.architecture}.")
    weights = {name: tensor.half() for name, tensor in model.state_dict().items()}
    if not all(bool(torch.isfinite(tensor).all()) for tensor in weights.values()):
        raise SystemExit("A weight does not fit into float16.")
    test = load("mnist", "test", data)
    contents = {
        "mnist_network.safetensors": save(weights, metadata={"recipe": recipe.loss, "seed": str(recipe.seed)}),
        "mnist_test.safetensors": save(
            {"images": test.images[:IMAGES].contiguous(), "labels": test.labels[:IMAGES].to(torch.uint8)}
        ),
    }
    for name, content in contents.items():
        write_whole(FILES / name, content)
        print(f'    "{name}": "{hashlib.sha256(content).hexdigest()}",')


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
