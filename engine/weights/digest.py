"""One digest for a whole set of parameters.

Owns the digest that cold load, live update and the version report share. Ignores buffers: they
hold nothing that a checkpoint carries.

Each parameter is reduced where it lies, on a GPU at the speed of its memory: with its bytes as
little-endian 64-bit words w_i, to the sums of w_i * a_i and w_i * b_i modulo 2^64, where a_i =
(2i + 1) * A and b_i = (2i + 1)^2 * B are odd. A change of one word changes both. This finds torn and
mixed-up weights; it is no defence against an adversary, for whom tensors on their way carry
SHA-256 (`TensorSpec.digest`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from engine.weights.layout import WeightedModel

A = 0x9E3779B97F4A7C15 - (1 << 64)
B = 0xC2B2AE3D27D4EB4F - (1 << 64)
CHUNK = 1 << 22
"""Words reduced at a time: what bounds the memory that this takes."""


def model_digest(model: WeightedModel) -> str:
    """The digest of this rank's parameters."""
    return combined_digest({name: fingerprint(value) for name, value in model.named_parameters()}, model)


def combined_digest(fingerprints: Mapping[str, torch.Tensor], model: WeightedModel) -> str:
    """SHA-256 hex over name, dtype, shape and fingerprint of the model's parameters, in name order."""
    total = hashlib.sha256()
    values = torch.stack([fingerprints[name].cpu() for name in sorted(fingerprints)]).tolist()
    parameters = dict(model.named_parameters())
    for name, sums in zip(sorted(fingerprints), values, strict=True):
        parameter = parameters[name]
        total.update(f"{name}\0{parameter.dtype}\0{list(parameter.shape)}\0{sums}\0".encode())
    return total.hexdigest()


@torch.no_grad()
def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """The two sums, int64 [2], on the tensor's device; nothing waits for them."""
    flat_U = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat_U.storage_offset() % 8:
        flat_U = flat_U.clone()
    whole = flat_U.numel() // 8 * 8
    words_W = flat_U[:whole].view(torch.int64)
    if whole < flat_U.numel():
        rest = F.pad(flat_U[whole:], (0, 8 - flat_U.numel() + whole)).view(torch.int64)
        words_W = torch.cat((words_W, rest))
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, words_W.numel(), CHUNK):
        chunk_W = words_W[start : start + CHUNK]
        odd_W = torch.arange(start, start + chunk_W.numel(), device=tensor.device).mul_(2).add_(1)
        sums[1] += (odd_W * odd_W).mul_(B).mul_(chunk_W).sum()
        sums[0] += odd_W.mul_(A).mul_(chunk_W).sum()
    return sums
