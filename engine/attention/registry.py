"""Which attention backend runs.

Owns the names and the choice that "auto" makes. Ignores how any of them computes.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from engine.attention.base import AttentionBackend
from engine.attention.torch_fast import TorchAttention
from engine.attention.torch_ref import TorchReference
from engine.errors import InvalidRequest
from engine.models.spec import ModelSpec

BACKENDS = ("triton", "torch", "torch_ref")


def resolve_attention(name: str, spec: ModelSpec, device: torch.device | str) -> str:
    """The concrete name for `name`, which may be "auto"."""
    if name == "auto":
        biased = any(layer.bias is not None for layer in spec.layers)
        if torch.device(device).type == "cuda" and find_spec("triton") is not None and not biased:
            return "triton"
        return "torch" if all(layer.plain for layer in spec.layers) else "torch_ref"
    if name not in BACKENDS:
        raise InvalidRequest(field="attention", expected=f"auto or one of {list(BACKENDS)}", actual=name)
    return name


def make_attention(
    name: str, spec: ModelSpec, device: torch.device | str, deterministic: bool = False
) -> AttentionBackend:
    """Build a backend; one that cannot compute a layer of the spec refuses it by name."""
    name = resolve_attention(name, spec, device)
    if name == "triton":
        from engine.attention.triton import TritonAttention  # needs triton, which CPU installations lack

        return TritonAttention(spec, deterministic=deterministic)
    if name == "torch":
        return TorchAttention(spec, deterministic=deterministic)
    return TorchReference(spec)
