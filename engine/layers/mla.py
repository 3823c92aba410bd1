"""Attention over latents (arxiv.org/abs/2412.19437, section 2.1.1).

Owns the layer's products and what is absorbed into what: a head's queries are brought into the latent space,
so that every head attends to the same stored row, whose first numbers are its values too; what comes out is
brought to the head's values afterwards. Ignores rows in pages (`engine.attention.mla`) and which tokens are
chosen (`engine.layers.mla_index`).

Shapes: T tokens, D hidden, N heads, R rotated and P plain numbers of a head's query, L latent, C = L + R a
token's row, V a head's values, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.attention.base import AttentionBackend
from engine.errors import Unsupported
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.mla_index import Indexer
from engine.layers.norm import RMSNorm
from engine.layers.rotary import Rotary, by_halves
from engine.models.shape import ModelSpec
from engine.parallel import TensorParallel
from lora.step import AdapterStep, LoopStep

NORM_EPS = 1e-6
"""Of the norms inside, whatever the model's others have."""


class LatentAttention(nn.Module):
    """`site` is that of the product which expands latents: it is computed from both sides, never as a product."""

    site = -1

    def __init__(
        self, spec: ModelSpec, layer: int, dtype: torch.dtype, device: torch.device, parallel: TensorParallel
    ) -> None:
        super().__init__()
        latent = spec.latent
        assert latent is not None, "the spec has latents"
        if parallel.size > 1:
            raise Unsupported(field=f"layers[{layer}]", expected="one rank", actual=f"{parallel.size} ranks")
        self.layer = sum(other.attends for other in spec.layers[:layer])
        """Counted among the layers that attend."""
        self.latent, self.heads = latent, spec.num_heads
        queries = spec.num_heads * (latent.nope_dim + latent.rope_dim)
        bias, expanded = spec.attention_bias, spec.num_heads * (latent.nope_dim + latent.value_dim)
        first = latent.query_rank or queries
        self.split = (first, latent.rank, latent.rope_dim)
        self.in_proj = ColumnParallelLinear(spec.hidden, (first, latent.row), bias, dtype, device, parallel)
        self.q_norm = self.q_proj = None
        if latent.query_rank is not None:
            self.q_norm = RMSNorm(latent.query_rank, NORM_EPS, dtype, device)
            self.q_proj = ColumnParallelLinear(latent.query_rank, (queries,), False, dtype, device, parallel)
        self.kv_norm = RMSNorm(latent.rank, NORM_EPS, dtype, device)
        expand_OL = torch.empty(expanded, latent.rank, dtype=dtype, device=device)
        self.expand_OL = nn.Parameter(expand_OL, requires_grad=False)
        """Each head's plain keys, then its values, out of latents."""
        self.o_proj = RowParallelLinear(spec.num_heads * latent.value_dim, spec.hidden, bias, dtype, device, parallel)
        own = spec.layers[layer].index == "own"
        self.indexer = Indexer(spec, self.layer, dtype, device, parallel) if own else None

    def forward(
        self,
        x_TD: torch.Tensor,
        rotary: Rotary,
        cos_T1R: torch.Tensor,
        sin_T1R: torch.Tensor,
        backend: AttentionBackend,
        adapters: AdapterStep | None = None,
    ) -> torch.Tensor:
        tokens, latent = x_TD.shape[0], self.latent
        query_TO, latent_TL, key_TR = self.in_proj(x_TD, adapters).split(self.split, dim=1)
        if self.q_norm is not None and self.q_proj is not None:
            query_TO = self.q_norm(query_TO)
            q_TO = self.q_proj(query_TO, adapters)
        else:
            q_TO = query_TO
        plain_TNP, rotated_TNR = q_TO.view(tokens, self.heads, -1).split((latent.nope_dim, latent.rope_dim), dim=2)
        turned_TNR = torch.cat((rotated_TNR, key_TR.unsqueeze(1)), dim=1)
        if latent.interleaved:
            turned_TNR = by_halves(turned_TNR)
        rotary.rotate_(turned_TNR, cos_T1R, sin_T1R)
        row_T1C = torch.cat((self.kv_norm(latent_TL), turned_TNR[:, -1]), dim=1).unsqueeze(1)
        keys_NPL, values_NVL = self.expand_OL.view(self.heads, -1, latent.rank).split(
            (latent.nope_dim, latent.value_dim), dim=1
        )
        q_TNC = torch.empty(tokens, self.heads, latent.row, dtype=x_TD.dtype, device=x_TD.device)
        q_TNC[:, :, : latent.rank] = torch.bmm(plain_TNP.transpose(0, 1), keys_NPL).transpose(0, 1)
        q_TNC[:, :, latent.rank :] = turned_TNR[:, :-1]
        if self.indexer is not None:
            self.indexer(x_TD, query_TO, rotary, cos_T1R, sin_T1R, backend, adapters)
        loop = None if adapters is None else _loop(adapters)
        if loop is not None:
            loop.add_absorbed_(self.site, plain_TNP, q_TNC[:, :, : latent.rank], slice(0, latent.nope_dim))
        out_TNL = backend.run(q_TNC, row_T1C, row_T1C[..., : latent.rank], self.layer)
        out_TNV = torch.bmm(out_TNL.transpose(0, 1), values_NVL.transpose(1, 2)).transpose(0, 1).contiguous()
        if loop is not None:
            loop.add_groups_(self.site, out_TNL, out_TNV, slice(latent.nope_dim, None))
        return self.o_proj(out_TNV.view(tokens, -1), adapters)

    __call__ = forward  # no hooks, as elsewhere in a layer

    def products(self) -> list[Any]:
        """In the order of their sites."""
        found: list[Any] = [self.in_proj, *([] if self.q_proj is None else [self.q_proj]), self, self.o_proj]
        return found if self.indexer is None else found + self.indexer.products()


def _loop(adapters: AdapterStep) -> LoopStep:
    assert isinstance(adapters, LoopStep), "latent models run layer by layer, and their adapters too"
    return adapters
