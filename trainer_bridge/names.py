"""From a trainer's parameter names to checkpoint names.

Owns the prefixes that wrappers put into names. Ignores which names a model takes: the engine
refuses every name it does not know, so nothing here may drop or guess one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from engine.errors import InvalidRequest

TRAINER_SEGMENTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"})
"""Path segments that compilation, sharding, activation checkpointing and adapters insert anywhere.
Segments that checkpoints themselves carry (`language_model`) are left to the engine."""

TRAINER_PREFIXES = ("module.", "base_model.model.")
"""Prefixes that data parallelism and adapters put in front, in any nesting."""


def checkpoint_name(name: str) -> str:
    """The name without wrappers: `_orig_mod.model.layers.0...` becomes `model.layers.0...`."""
    name = ".".join(part for part in name.split(".") if part not in TRAINER_SEGMENTS)
    while True:
        prefix = next((item for item in TRAINER_PREFIXES if name.startswith(item)), None)
        if prefix is None:
            return name
        name = name.removeprefix(prefix)


Weights = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


def checkpoint_tensors(weights: Weights) -> dict[str, Tensor]:
    """Detached tensors by checkpoint name; nothing is copied.

    A tensor that is present twice (tied embeddings) is kept under its first name: an engine knows
    its model's aliases, and refuses the update where it does not. Raises `InvalidRequest` where
    two different tensors end up with one name.
    """
    if isinstance(weights, nn.Module):
        weights = weights.state_dict()
    items = cast("Iterable[tuple[str, Tensor]]", weights.items() if isinstance(weights, Mapping) else weights)
    tensors: dict[str, Tensor] = {}
    seen: set[tuple[object, ...]] = set()
    for raw_name, value in items:
        tensor = value.detach()
        identity = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and identity in seen:
            continue
        seen.add(identity)
        name = checkpoint_name(raw_name)
        if name in tensors and not torch.equal(tensors[name], tensor):
            raise InvalidRequest(field=raw_name, expected="one tensor per name", actual=f"two different {name}")
        tensors[name] = tensor
    if not tensors:
        raise InvalidRequest(field="weights", expected="at least one tensor", actual="none")
    return tensors
