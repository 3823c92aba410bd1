"""Which tokens a query attends to (DeepSeek-V3.2: the indexer of sparse attention).

Owns the products of the indexer: its queries, a key for every token and the weights of its heads. A token's
score is the weighed sum over heads of relu(query . key). Ignores how scores become a choice: the backend
keeps keys in pages and chooses (`engine.attention.mla`). Weights are computed in fp32, as their parameter is.

Shapes: T tokens, D hidden, Q the queries' inputs, I index heads, E index head size, R its rotated part.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from engine.attention.base import AttentionBackend
from engine.layers.linear import ColumnParallelLinear
from engine.layers.rotary import Rotary, by_halves
from engine.models.shape import ModelSpec
from engine.parallel import TensorParallel
from lora.step import AdapterStep

NORM_EPS = 1e-6


class ChoosingBackend(AttentionBackend, Protocol):
    def choose(self, q_TIE: torch.Tensor, weights_TI: torch.Tensor, key_TE: torch.Tensor, layer: int) -> None:
        """Write the step's index keys and choose each token's context for this layer and those which share
        its choice: the best scores, of equal ones the lowest positions."""
        ...


class Indexer(nn.Module):
    def __init__(
        self, spec: ModelSpec, layer: int, dtype: torch.dtype, device: torch.device, parallel: TensorParallel
    ) -> None:
        super().__init__()
        latent = spec.latent
        assert latent is not None and latent.index is not None and latent.query_rank is not None
        self.layer, self.index, self.rope_dim = layer, latent.index, latent.rope_dim
        heads, size = latent.index.heads, latent.index.head_dim
        self.q_proj = ColumnParallelLinear(latent.query_rank, (heads * size,), False, dtype, device, parallel)
        self.k_proj = ColumnParallelLinear(spec.hidden, (size,), False, dtype, device, parallel)

        def empty(*shape: int, dtype: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)

        self.norm_E, self.norm_bias_E = empty(size), empty(size)
        self.weigh_proj = ColumnParallelLinear(spec.hidden, (heads,), False, torch.float32, device, parallel)
        self.scale = heads**-0.5 * size**-0.5

    def forward(
        self,
        x_TD: torch.Tensor,
        query_TQ: torch.Tensor,
        rotary: Rotary,
        cos_T1R: torch.Tensor,
        sin_T1R: torch.Tensor,
        backend: AttentionBackend,
        adapters: AdapterStep | None = None,
    ) -> None:
        heads, size, rope = self.index.heads, self.index.head_dim, self.rope_dim
        key_TE = F.layer_norm(self.k_proj(x_TD, adapters), (size,), self.norm_E, self.norm_bias_E, NORM_EPS)
        both_TIE = torch.cat((self.q_proj(query_TQ, adapters).view(-1, heads, size), key_TE.unsqueeze(1)), dim=1)
        turned_TIR = both_TIE[..., :rope]
        if self.index.interleaved:
            turned_TIR = by_halves(turned_TIR)
        rotary.rotate_(turned_TIR, cos_T1R, sin_T1R)
        both_TIE[..., :rope] = turned_TIR
        weights_TI = self.weigh_proj(x_TD.float(), adapters) * self.scale
        assert hasattr(backend, "choose"), f"{backend.name} attention chooses no tokens"
        chooser: ChoosingBackend = backend  # type: ignore[assignment]
        chooser.choose(both_TIE[:, :heads], weights_TI, both_TIE[:, heads], self.layer)

    __call__ = forward

    def products(self) -> list[ColumnParallelLinear]:
        """In the order of their sites."""
        return [self.q_proj, self.k_proj, self.weigh_proj]
