"""Tensors as raw bytes and back, with digests.

Owns the one encoding that every transport and its receiver share: little-endian C-order bytes, a
safetensors dtype name, a shape, SHA-256. Ignores names and transport.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import torch
from torch import Tensor

from engine.errors import InvalidRequest
from engine.types import NamedTensor, TensorSpec

assert sys.byteorder == "little", "tensor bytes are little-endian and are not swapped"

DTYPE_NAMES: dict[torch.dtype, str] = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def encode(name: str, tensor: Tensor) -> NamedTensor:
    """The tensor's bytes; a view of its memory where it is contiguous and in host memory."""
    dtype = _dtype_name(name, tensor)
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8)
    return NamedTensor(name=name, dtype=dtype, shape=list(tensor.shape), data=data)


def decode(named: NamedTensor) -> Tensor:
    """The tensor of these bytes, in memory of its own.

    Raises `InvalidRequest` naming the tensor for an unknown dtype or a wrong number of bytes.
    """
    if named.dtype not in DTYPES:
        raise InvalidRequest(field=named.name, expected=f"a dtype of {sorted(DTYPES)}", actual=named.dtype)
    dtype = DTYPES[named.dtype]
    expected = int(np.prod(named.shape, dtype=np.int64)) * dtype.itemsize
    if named.data.nbytes != expected:
        raise InvalidRequest(field=named.name, expected=f"{expected} bytes", actual=named.data.nbytes)
    tensor = torch.empty(named.shape, dtype=dtype)
    if expected:
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = named.data.reshape(-1)
    return tensor


def specify(named: NamedTensor) -> TensorSpec:
    """Announces these bytes in a manifest."""
    digest = hashlib.sha256(np.ascontiguousarray(named.data).data).hexdigest()
    return TensorSpec(name=named.name, dtype=named.dtype, shape=list(named.shape), digest=digest)


def announce(name: str, tensor: Tensor, digest: bool) -> TensorSpec:
    """What a manifest says of a tensor; its SHA-256 means reading all of it."""
    if digest:
        return specify(encode(name, tensor))
    return TensorSpec(name=name, dtype=_dtype_name(name, tensor), shape=list(tensor.shape))


def num_bytes(name: str, tensor: Tensor) -> int:
    _dtype_name(name, tensor)
    return tensor.numel() * tensor.element_size()


def _dtype_name(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in DTYPE_NAMES:
        raise InvalidRequest(field=name, expected=f"a dtype of {sorted(DTYPES)}", actual=tensor.dtype)
    return DTYPE_NAMES[tensor.dtype]
