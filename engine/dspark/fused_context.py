"""A block drafter's context from fused kernels.

Owns the order of launches: one product fuses captured features, one projects keys and values of all layers,
one kernel brings them into the pool. Computes what `engine.dspark.block_model` computes (`context_features`,
`context_kv`), from the same parameters. Ignores which tokens are committed.

Shapes: T tokens, D hidden, M captured layers, L drafter layers, E = 2 * key/value heads * head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F

from engine.dspark.block_model import BlockDrafterModel, DraftLayer
from engine.kernels.draft_context import ContextLayers, write_context
from engine.kernels.rms_norm import rms_norm
from engine.memory.kv_pool import KVPool


class FusedContext:
    """Parameters and pool keep their addresses, so that captured launches see every update of weights."""

    def __init__(self, model: BlockDrafterModel, pool: KVPool) -> None:
        shape, rotary = model.spec.backbone, model.rotary
        norms = [cast(DraftLayer, layer).k_norm for layer in model.layers]
        self._model = model
        self._layers = ContextLayers.of(
            [pool.tokens(layer) for layer in range(shape.num_layers)],
            [norm.weight for norm in norms if norm is not None],
            shape.rms_eps,
            rotary.cos_CE,
            rotary.sin_CE,
        )

    def write(self, features: Sequence[torch.Tensor], positions_T: torch.Tensor, slots_T: torch.Tensor) -> None:
        """From features [T, D] of every captured layer, in order. Tokens whose slot is -1 are skipped."""
        model = self._model
        features_TE = torch.cat(list(features), dim=1).to(model.dtype)
        context_TD = F.linear(features_TE, model.fc)
        rms_norm(context_TD, model.hidden_norm.weight, model.spec.backbone.rms_eps, out=context_TD)
        write_context(self._layers, model.context_projections(context_TD), positions_T, slots_T)
