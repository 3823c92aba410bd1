"""Which drafters can draft within a round on the device, and with what.

Owns that choice. Ignores rounds (`engine.runner.round_launches`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.attention.triton import TritonAttention
from engine.dspark.block_drafter import BlockDrafter
from engine.dspark.speculation import Speculation
from engine.kernels.round_rows import RoundLimits
from engine.runner.model_runner import FusedRunner
from engine.runner.round_launches import RoundParts

if TYPE_CHECKING:
    from engine.build import Parts


def round_parts(parts: Parts, speculation: Speculation, runner: FusedRunner) -> RoundParts | None:
    """None for a drafter that is neither a block drafter nor known before its round."""
    drafter, spec, pool = speculation.drafter, parts.model.spec, parts.pages.pool
    traits = drafter.traits
    attention = None
    mask_id = 0
    if isinstance(drafter, BlockDrafter):
        drafter.use_kernels()
        attention = TritonAttention(drafter.model.spec.backbone)
        mask_id = drafter.model.spec.mask_id
    elif not traits.foreseen:
        return None
    draft_context = min(traits.context_len, speculation.config.max_context or traits.context_len)
    limits = RoundLimits(
        context_len=spec.context_len,
        draft_context=min(draft_context, 2**31 - 1 - traits.block),
        page_size=pool.page_size,
        block=traits.block,
        mask_id=mask_id,
        lead=traits.lead,
        by_request=attention is not None and speculation.config.mode == "compact",
    )
    shared = (spec, runner.fused, runner.attention, pool, speculation, limits)
    return RoundParts(*shared, attention, parts.adapters)
