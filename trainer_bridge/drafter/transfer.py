"""Small whole numbers on their way to a device.

Owns sending many arrays as one copy that the host does not wait for: by themselves each would stop it until the
device has done all that was asked before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def send(arrays: Sequence[np.ndarray], device: torch.device | str) -> list[torch.Tensor]:
    """int64 tensors of the arrays' shapes, views of one."""
    flat = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]).astype(np.int64, copy=False))
    if torch.device(device).type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    parts = flat.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
