"""The files that the package embeds, and the digest that each must have."""

import hashlib
from importlib import resources

from curvcert.errors import InvalidInput

SHA256 = {
    "digits.safetensors": "b9df9f0ed50574f8918a7edc0e06c9b9b447080dc48c262bf524d7a9c50e75b3",
    "demo_network.safetensors": "b28a8b83807003217bb18654ae85c1c9793a5799e3e78b46fa9821488c39ac2c",
    "mnist_network.safetensors": "c45683a220bb0e6d0787b1a157bd4064fe93a39cc186f9333a78621769dc3458",
    "mnist_test.safetensors": "e0e0dc584b41fce1c5c6c0bcbd044c27709595b71692385d792bb4a21bef6414",
}
"""One row per file; the scripts that write the files print the digests."""


def read_embedded(name: str) -> bytes:
    """Return the bytes of an embedded file, once its SHA-256 is the expected one.

    Raises:
        InvalidInput: if the file is unknown, missing, truncated or altered.
    """
    if name not in SHA256:
        raise InvalidInput(f"No embedded file is called {name!r}. There are {', '.join(SHA256)}.")
    file = resources.files("curvcert.data") / "files" / name
    if not file.is_file():
        raise InvalidInput(f"The embedded file {name} is missing. Install curvcert again.")
    return verify_digest(name, file.read_bytes())


def verify_digest(name: str, content: bytes) -> bytes:
    """Return the content of the named file, or raise if its SHA-256 is not the expected one."""
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256[name]:
        raise InvalidInput(
            f"The embedded file {name} is truncated or altered: expected SHA-256 {SHA256[name]}, "
            f"got {digest} over {len(content)} bytes. Install curvcert again."
        )
    return content
