"""The block drafter's network, the same object in the engine and in training.

Owns the arithmetic of DSpark's drafter (arXiv 2607.05147): target features fused into context keys
and values, a block of anchor and mask tokens attending to them and to itself, and the heads. Ignores
where context lives: attention is a function of the caller's. Embedding and head are the target's and
come in as functions too, so that they are never trained nor stored twice.

Parameters are uninitialised and do not require gradients; a trainer switches that on. No operation
here is in place on anything a gradient needs.

Shapes: T tokens, B rows, G block slots, D hidden, M captured layers, L drafter layers, N query heads,
K key/value heads, H head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from engine.dspark.block_spec import BlockDrafterSpec
from engine.dspark.block_weights import block_weight_map
from engine.dspark.heads import ConfidenceHead, make_markov_head, parameter
from engine.layers.norm import RMSNorm
from engine.layers.rotary import Rotary
from engine.models.decoder import DenseDecoderLM
from engine.models.spec import ModelSpec

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(q_TNH, k_TKH, v_TKH of the block's tokens, drafter layer) -> out_TNH. Every query sees the context
before its anchor and its whole own block."""


@dataclass(frozen=True, slots=True)
class SharedEnds:
    """The target's embedding (ids [T] -> [T, D]) and head (hidden [R, D] -> logits [R, V])."""

    embed: Callable[[torch.Tensor], torch.Tensor]
    head: Callable[[torch.Tensor], torch.Tensor]


def shared_ends(model: DenseDecoderLM) -> SharedEnds:
    return SharedEnds(model.model.embed_tokens, model.logits)


class DraftLayer(nn.Module):
    def __init__(self, shape: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        q_rows, wide = shape.num_heads * shape.head_dim, shape.intermediate
        self.input_layernorm = RMSNorm(shape.hidden, shape.rms_eps, dtype, device)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.rms_eps, dtype, device)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_eps, dtype, device) if shape.qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_eps, dtype, device) if shape.qk_norm else None
        self.o_proj = parameter(shape.hidden, q_rows, dtype=dtype, device=device)
        self.gate_up_proj = parameter(2 * wide, shape.hidden, dtype=dtype, device=device)
        self.down_proj = parameter(shape.hidden, wide, dtype=dtype, device=device)

    def mlp(self, x_TD: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x_TD, self.gate_up_proj).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down_proj)


class BlockDrafterModel(nn.Module):
    """`qkv_proj` holds all layers' projections, so that context keys and values of every layer come from
    one batched product. `weight_map` serves cold load and live update."""

    def __init__(self, spec: BlockDrafterSpec, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__()
        shape, device = spec.backbone, torch.device(device)
        self.spec = spec
        self.weight_map = block_weight_map(spec)
        self.rotary = Rotary(shape.rope, shape.head_dim, shape.context_len, dtype, device)
        self.heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        rows = sum(self.heads) * shape.head_dim
        self.fc = parameter(shape.hidden, shape.hidden * len(spec.target_layers), dtype=dtype, device=device)
        self.hidden_norm = RMSNorm(shape.hidden, shape.rms_eps, dtype, device)
        self.qkv_proj = parameter(shape.num_layers * rows, shape.hidden, dtype=dtype, device=device)
        self.layers = nn.ModuleList(DraftLayer(shape, dtype, device) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden, shape.rms_eps, dtype, device)
        self.markov_head = make_markov_head(spec, dtype, device)
        self.confidence_head = ConfidenceHead(spec, dtype, device) if spec.confidence else None
        self.cut = _cut_ids(spec, device)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.dtype

    def context_features(self, features_TMD: torch.Tensor) -> torch.Tensor:
        """Fused target features [T, D]: hidden_norm(fc · concatenation of the captured layers)."""
        return self.hidden_norm(F.linear(features_TMD.flatten(1).to(self.dtype), self.fc))

    def context_projections(self, context_TD: torch.Tensor) -> torch.Tensor:
        """Keys, then values, of all layers before norms and rotation: [L, T, 2K * H], one product."""
        shape = self.spec.backbone
        q_rows = shape.num_heads * shape.head_dim
        weight_LED = self.qkv_proj.view(shape.num_layers, -1, shape.hidden)[:, q_rows:]
        return torch.matmul(context_TD, weight_LED.transpose(1, 2))

    def context_kv(self, context_TD: torch.Tensor, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [L, T, K, H] of all layers, from fused features at their positions."""
        shape = self.spec.backbone
        kv_LTE = self.context_projections(context_TD)
        k_LTKH, v_LTKH = (part.unflatten(-1, (shape.num_kv_heads, shape.head_dim)) for part in kv_LTE.chunk(2, dim=-1))
        cos_T1H, sin_T1H = self.rotary.at(positions_T)
        keys = []
        for layer, k_TKH in zip(self.layers, k_LTKH, strict=True):
            norm = cast(DraftLayer, layer).k_norm
            keys.append(self._rotate(k_TKH if norm is None else norm(k_TKH), cos_T1H, sin_T1H))
        return torch.stack(keys), v_LTKH

    def block_ids(self, anchor_ids_B: torch.Tensor) -> torch.Tensor:
        """ids [B, G]: the anchor, then masks."""
        ids_BG = anchor_ids_B.new_full((len(anchor_ids_B), self.spec.block), self.spec.mask_id)
        ids_BG[:, 0] = anchor_ids_B
        return ids_BG

    def block_positions(self, positions_B: torch.Tensor) -> torch.Tensor:
        """Positions [B, G]: the anchor's own, and those after it."""
        return positions_B[:, None] + torch.arange(self.spec.block, device=positions_B.device)

    def hidden(
        self, anchor_ids_B: torch.Tensor, positions_B: torch.Tensor, ends: SharedEnds, attend: Attend
    ) -> torch.Tensor:
        """Normed states [B, G', D] of the slots that yield drafts."""
        rows, block = len(anchor_ids_B), self.spec.block
        x_TD = ends.embed(self.block_ids(anchor_ids_B).flatten()).to(self.dtype)
        cos_T1H, sin_T1H = self.rotary.at(self.block_positions(positions_B).flatten())
        shape = self.spec.backbone
        weights_LED = self.qkv_proj.view(shape.num_layers, -1, shape.hidden)
        for index, module in enumerate(self.layers):
            layer = cast(DraftLayer, module)
            qkv_TE = F.linear(layer.input_layernorm(x_TD), weights_LED[index])
            q_TNH, k_TKH, v_TKH = qkv_TE.unflatten(-1, (-1, shape.head_dim)).split(self.heads, dim=1)
            if layer.q_norm is not None and layer.k_norm is not None:
                q_TNH, k_TKH = layer.q_norm(q_TNH), layer.k_norm(k_TKH)
            q_TNH, k_TKH = self._rotate(q_TNH, cos_T1H, sin_T1H), self._rotate(k_TKH, cos_T1H, sin_T1H)
            out_TNH = attend(q_TNH, k_TKH, v_TKH, index)
            x_TD = x_TD + F.linear(out_TNH.flatten(1), layer.o_proj)
            x_TD = x_TD + layer.mlp(layer.post_attention_layernorm(x_TD))
        x_BGD = x_TD.view(rows, block, -1)
        return self.norm(x_BGD[:, self.spec.first_slot :])

    def base_logits(self, hidden_BGD: torch.Tensor, ends: SharedEnds) -> torch.Tensor:
        """Logits [B, G', V] before the Markov head, in the head's dtype; -inf outside a reduced vocabulary."""
        return self._base_rows(hidden_BGD, ends).unflatten(0, hidden_BGD.shape[:2])

    def teacher_forced(
        self, hidden_BGD: torch.Tensor, previous_BG: torch.Tensor, ends: SharedEnds, detach_confidence: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [B, G', V] and confidence logits [B, G'] where the tokens before every draft are given.

        `previous_BG` starts with the anchor. With `detach_confidence` no gradient of the confidence
        reaches backbone or Markov head.
        """
        logits_RV = self._base_rows(hidden_BGD, ends)
        embedded_BGR = None
        if self.markov_head is not None:
            embedded_BGR = self.markov_head.embed(previous_BG)
            codes_BGR = self.markov_head.codes(embedded_BGR, hidden_BGD)
            logits_RV = self.markov_head.biased(logits_RV, codes_BGR.flatten(0, 1))
        confidence_BG = self._confidence(hidden_BGD, embedded_BGR, detach_confidence)
        return logits_RV.unflatten(0, hidden_BGD.shape[:2]), confidence_BG

    @torch.no_grad()
    def draw(
        self,
        hidden_BGD: torch.Tensor,
        anchor_ids_B: torch.Tensor,
        ends: SharedEnds,
        pick: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Drafts [B, G'] chosen one after another by `pick`, the logits it drew from, confidence logits."""
        logits_BGV, ids, confidences = self.base_logits(hidden_BGD, ends), [], []
        head, previous_B, state = self.markov_head, anchor_ids_B, None
        for slot in range(hidden_BGD.shape[1]):
            hidden_BD, embedded_BR = hidden_BGD[:, slot], None
            if head is not None:
                embedded_BR = head.embed(previous_B)
                code_BR, state = head.step(embedded_BR, hidden_BD, head.start(embedded_BR) if state is None else state)
                logits_BGV[:, slot] += head.bias(code_BR)
            confidences.append(self._confidence(hidden_BD, embedded_BR, False))
            previous_B = pick(slot, logits_BGV[:, slot])
            ids.append(previous_B)
        confidence_BG = None if self.confidence_head is None else torch.stack(confidences, dim=1)
        return torch.stack(ids, dim=1), logits_BGV, confidence_BG

    def _base_rows(self, hidden_BGD: torch.Tensor, ends: SharedEnds) -> torch.Tensor:
        logits_RV = ends.head(hidden_BGD.flatten(0, 1))
        return logits_RV if self.cut is None else logits_RV.index_fill(-1, self.cut, float("-inf"))

    def _confidence(self, hidden: torch.Tensor, embedded: torch.Tensor | None, detach: bool) -> torch.Tensor | None:
        if self.confidence_head is None:
            return None
        embedded = embedded if self.spec.confidence_reads_markov else None
        if detach:
            hidden, embedded = hidden.detach(), None if embedded is None else embedded.detach()
        return self.confidence_head(hidden, embedded)

    def _rotate(self, x_THE: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor) -> torch.Tensor:
        return x_THE * cos_T1E + torch.roll(x_THE, self.rotary.half, -1) * sin_T1E


def _cut_ids(spec: BlockDrafterSpec, device: torch.device) -> torch.Tensor | None:
    """Ids that a reduced vocabulary leaves out. Derived, on no checkpoint, beside the parameters."""
    if spec.draft_ids is None:
        return None
    kept_V = torch.zeros(spec.backbone.vocab_size, dtype=torch.bool)
    kept_V[list(spec.draft_ids)] = True
    return (~kept_V).nonzero()[:, 0].to(device)
