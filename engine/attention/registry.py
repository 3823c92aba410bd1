"""Which attention backend runs.

Owns the names and the choice that "auto" makes. Ignores how any of them computes.
"""

from __future__ import annotations

import torch

from engine.attention.base import AttentionBackend
from engine.attention.torch_fast import TorchAttention
from engine.attention.torch_ref import TorchReference
from engine.errors import InvalidRequest
from engine.models.spec import ModelSpec

BACKENDS = ("torch", "torch_ref")


def resolve_attention(name: str, spec: ModelSpec, device: torch.device | str) -> str:
    """The concrete name for `name`, which may be "auto"."""
    del device  # every backend so far runs on all of them
    if name == "auto":
        return "torch" if all(layer.plain for layer in spec.layers) else "torch_ref"
    if name not in BACKENDS:
        raise InvalidRequest(field="attention", expected=f"auto or one of {list(BACKENDS)}", actual=name)
    return name


def make_attention(
    name: str, spec: ModelSpec, device: torch.device | str, deterministic: bool = False
) -> AttentionBackend:
    """Build a backend; one that cannot compute a layer of the spec refuses it by name."""
    if resolve_attention(name, spec, device) == "torch":
        return TorchAttention(spec, deterministic=deterministic)
    return TorchReference(spec)
