"""Small whole numbers on their way to a device.

Owns sending many arrays as one copy that the host does not wait for: by themselves each would stop it until the
device has done all that was asked before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

ALIGNED = 64
"""Values: 512 bytes."""


def send(arrays: Sequence[np.ndarray], device: torch.device | str) -> list[torch.Tensor]:
    """int64 tensors of the arrays' shapes, views of one. Each begins as aligned as a tensor of its own would, so that
    kernels are not compiled once more for those that do not."""
    firsts = np.cumsum([0, *(-(-array.size // ALIGNED) * ALIGNED for array in arrays)])
    flat = torch.empty(int(firsts[-1]), dtype=torch.int64, pin_memory=torch.device(device).type == "cuda")
    host = flat.numpy()
    for first, array in zip(firsts, arrays, strict=False):
        host[first : first + array.size] = array.reshape(-1)
    sent = flat.to(device, non_blocking=True)
    return [sent[first : first + array.size].view(array.shape) for first, array in zip(firsts, arrays, strict=False)]
