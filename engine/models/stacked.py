"""Which products have room behind their weights for adapters' first factors.

Owns who gets how much room. Ignores what is put there and when (`lora.stack`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

from engine.attention.registry import KERNEL_BACKENDS
from engine.config import EngineConfig
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.models.spec import ModelSpec
from engine.weights.arena import WeightArena

if TYPE_CHECKING:
    from lora.stack import StackRoom


def stacked_ranks(config: EngineConfig, spec: ModelSpec) -> int:
    """Ranks for each part of a product: none where steps are not made of the kernels that read them there, or add
    up in an order of their own. `config` is resolved but for sizes."""
    fused = config.attention in KERNEL_BACKENDS and spec.uniform and not config.deterministic
    plain = not (spec.attention_bias or spec.mlp_bias)
    # On a CPU adapters are of 32 bits, whatever weights are of; float16 has other steps.
    same = config.dtype == "float32" or (config.dtype == "bfloat16" and config.device != "cpu")
    return config.adapters.stacked_ranks if fused and plain and same else 0


def room_rows(ranks: int) -> Callable[[nn.Module], int]:
    """What an arena asks of each module."""

    def rows(module: nn.Module) -> int:
        return ranks * module.num_parts if isinstance(module, (ColumnParallelLinear, RowParallelLinear)) else 0

    return rows


def stack_room(arena: WeightArena, ranks: int) -> StackRoom | None:
    """The weights with room by their sites; None where there is none."""
    if not ranks:
        return None
    from lora.stack import StackRoom  # needs Triton

    products = [m for m in arena.model.modules() if isinstance(m, (ColumnParallelLinear, RowParallelLinear))]
    wide = {module.site: arena.wide[module.weight] for module in products}
    return StackRoom(wide, ranks, lambda: arena.releases)
