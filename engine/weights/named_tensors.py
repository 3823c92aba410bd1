"""Raw bytes of named tensors as tensors.

Owns the checks that make bytes a tensor. Ignores what tensors are for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine.errors import InvalidRequest
from engine.types import NamedTensor
from engine.weights.safetensors_file import WEIGHT_DTYPES


def tensors_of(named: Sequence[NamedTensor]) -> dict[str, torch.Tensor]:
    """Tensors on the host, in memory of their own.

    Raises `InvalidRequest` naming the tensor that comes twice, has an unknown dtype or another number of bytes
    than its shape says.
    """
    tensors: dict[str, torch.Tensor] = {}
    for item in named:
        label = f"tensor {item.name[:120]!a}"
        if item.name in tensors:
            raise InvalidRequest(field=label, expected="each tensor once", actual="a second one")
        if item.dtype not in WEIGHT_DTYPES:
            raise InvalidRequest(field=label, expected=f"a dtype of {list(WEIGHT_DTYPES)}", actual=item.dtype)
        dtype = WEIGHT_DTYPES[item.dtype]
        if any(size < 0 for size in item.shape):
            raise InvalidRequest(field=label, expected="a shape", actual=item.shape)
        expected = math.prod(item.shape) * dtype.itemsize
        if item.data.nbytes != expected:
            raise InvalidRequest(
                field=label, expected=f"{expected} bytes for {item.dtype} {item.shape}", actual=item.data.nbytes
            )
        # A wire buffer may lie at any offset, and is not ours to keep.
        owned = torch.empty(item.data.nbytes, dtype=torch.uint8)
        owned.numpy()[:] = item.data.reshape(-1).view("u1")
        tensors[item.name] = owned.view(dtype).reshape(item.shape)
    return tensors
