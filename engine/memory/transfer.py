"""Small arrays on their way from the host to a device.

Owns the one way that does not wait for the device: through pinned memory, which torch keeps until the
copy is done. Ignores what the arrays mean.
"""

from __future__ import annotations

import numpy as np
import torch


def staged(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host tensor that can be copied to `device` without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory() if device.type == "cuda" else tensor


def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return staged(array, device).to(device, non_blocking=True)
