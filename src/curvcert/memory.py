"""How many numbers a batch may take."""

import torch

_BYTES = 8


def spare_elements(device: torch.device, least: int) -> int:
    """Return how many float64 numbers half of an accelerator's free memory holds; `least` at least, and elsewhere.

    What PyTorch keeps for itself but does not use counts as free.

    >>> spare_elements(torch.device("cpu"), 2**24) == 2**24
    True
    """
    if device.type != "cuda":
        return least
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(least, (torch.cuda.mem_get_info(device)[0] + unused) // (2 * _BYTES))
