"""Small arrays on their way from the host to a device.

Owns the one way that does not wait for the device: through pinned memory, which torch keeps until the
copy is done. Ignores what the arrays mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

ALIGNED = 64
"""Numbers of 64 bits: what torch's own allocator aligns tensors to."""


def staged(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host tensor that can be copied to `device` without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory() if device.type == "cuda" else tensor


def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return staged(array, device).to(device, non_blocking=True)


def send_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """int64 tensors of the arrays' shapes, views of one that is sent in one copy. Each begins as aligned as a tensor
    of its own would, so that kernels are not compiled once more for those that do not."""
    firsts = np.cumsum([0, *(-(-array.size // ALIGNED) * ALIGNED for array in arrays)])
    flat = np.zeros(int(firsts[-1]), dtype=np.int64)
    for first, array in zip(firsts, arrays, strict=False):
        flat[first : first + array.size] = array.reshape(-1)
    sent = send(flat, device)
    return [sent[first : first + array.size].view(array.shape) for first, array in zip(firsts, arrays, strict=False)]
