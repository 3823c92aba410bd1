"""From settings to a drafter beside its target.

Owns the order of things: a checkpoint is read, checked against the target and loaded before the pools
are sized, and given its pool afterwards. Ignores how a drafter is used (`engine.dspark.speculation`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.attention.registry import make_attention
from engine.dspark.block_drafter import BlockDrafter
from engine.dspark.block_model import BlockDrafterModel, shared_ends
from engine.dspark.block_spec import check_fits, drafter_spec_from_config, read_config
from engine.dspark.config import NGRAM, NGRAM_DRAFTS, DSparkConfig, check_drafter
from engine.dspark.drafter import Drafter
from engine.dspark.ngram import NgramDrafter
from engine.dspark.states import StateStore, with_states
from engine.errors import Unsupported
from engine.memory.kv_pool import KVPool
from engine.models.decoder import DenseDecoderLM
from engine.models.spec import ModelSpec
from engine.weights.arena import WeightArena
from engine.weights.digest import model_digest
from engine.weights.loader import load_weights

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LoadedDrafter:
    """`arena` holds the weights of a drafter that has any; `kv` is the shape of the states it keeps."""

    make: Callable[[KVPool | None], Drafter]
    arena: WeightArena[BlockDrafterModel] | None = None
    kv: ModelSpec | None = None

    @property
    def model(self) -> BlockDrafterModel | None:
        return None if self.arena is None else self.arena.model


def load_drafter(config: DSparkConfig, target: DenseDecoderLM, device: torch.device) -> LoadedDrafter | None:
    """The configured drafter with its weights; None where there is none. Raises `Unsupported` or
    `InvalidRequest`, naming the field, where it does not fit the target."""
    if not config.enabled:
        return None
    if config.drafter == NGRAM and config.keep_states:
        raise Unsupported(field="dspark.keep_states", expected="false: n-grams read no states", actual=True)
    if config.drafter == NGRAM:
        drafts = NGRAM_DRAFTS if config.drafts is None else config.drafts
        return LoadedDrafter(lambda pool: NgramDrafter(drafts))
    folder = Path(config.drafter)
    check_drafter(config.drafter)
    stored = read_config(folder)
    spec = drafter_spec_from_config(stored)
    check_fits(spec, target.spec)
    _compare_digests(stored, target)
    arena = WeightArena(lambda device: BlockDrafterModel(spec, target.dtype, device), device, "drafter")
    load_weights(arena.model, folder, module="drafter")
    # The last layer's output, normed, is what the target's head reads.
    kept = (*spec.target_layers, target.spec.num_layers - 1) if config.keep_states else ()

    def make(pool: KVPool | None) -> Drafter:
        assert pool is not None, "a block drafter keeps its context in a pool"
        backend = make_attention("auto", spec.backbone, device, dtype=target.dtype)
        states = StateStore(pool, kept) if kept else None
        return BlockDrafter(arena.model, shared_ends(target), pool, backend, states)

    return LoadedDrafter(make, arena, with_states(spec.backbone, target.spec.hidden, len(kept)))


def _compare_digests(stored: dict[str, Any], target: DenseDecoderLM) -> None:
    """Say where a drafter was made for other weights: an RL run means to, and what is sampled stays right. Digests
    of one dtype alone can be compared."""
    made_for = stored.get("target_digest")
    dtype = stored.get("target_dtype", stored.get("torch_dtype"))
    if not made_for or dtype != str(target.dtype).removeprefix("torch."):
        return
    digest = model_digest(target)
    if digest != made_for:
        logger.warning(
            "drafter target_digest: made for weights %.12s, these are %.12s: fewer drafts may be kept", made_for, digest
        )
