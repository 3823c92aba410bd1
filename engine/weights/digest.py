"""One SHA-256 for a whole set of parameters.

Owns the digest that cold load, live update and the version report share. Ignores buffers: they
hold nothing that a checkpoint carries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from engine.weights.layout import WeightedModel


def model_digest(model: WeightedModel) -> str:
    """SHA-256 hex over name, dtype, shape and little-endian bytes of this rank's parameters, in name order."""
    return parameters_digest(dict(model.named_parameters()))


def parameters_digest(parameters: Mapping[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(parameters):
        tensor = parameters[name].detach()
        total.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        total.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
