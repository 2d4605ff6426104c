"""Small files in the formats of MNIST and CIFAR-10, and tables of files that take them for the published ones."""

import hashlib

import torch

from curvcert.data.official import OfficialFile


def published(name: str, content: bytes) -> OfficialFile:
    return OfficialFile(name, len(content), hashlib.sha256(content).hexdigest())


def idx(array: torch.Tensor) -> bytes:
    shape = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + shape + array.numpy().tobytes()


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def records(images: torch.Tensor, labels: torch.Tensor) -> bytes:
    return torch.cat([labels.to(torch.uint8)[:, None], images.flatten(1)], dim=1).numpy().tobytes()
