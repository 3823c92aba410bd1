"""Attention over latent rows on a GPU: one plan a step, kernels a layer.

Owns how a step's tokens are told to the kernels, workspaces and how work is cut. Every token is a row of its own
with its own context, decode rows and tokens of prompts alike: all heads of a token share the rows they read,
which is what makes a tile. Ignores how queries and rows came about (`engine.layers.mla`).

With `deterministic` pieces of contexts are as long whatever the batch is.

Shapes: T tokens, N query heads, C numbers of a token's row, L of its latent, K tokens chosen, I index heads, E
index head size, S the longest context.
"""

from __future__ import annotations

import torch

from engine.attention.decode_metadata import processors
from engine.batch import ForwardBatch
from engine.kernels.attention_tile import ceil_div
from engine.kernels.decode_attention import States
from engine.kernels.dsa_attention import dsa_attention
from engine.kernels.dsa_index_scores import dsa_index_scores
from engine.kernels.dsa_select import counts_shape, dsa_select, select_pieces
from engine.kernels.mla_decode import mla_decode
from engine.kernels.mla_tile import LatentShape, latent_config, piece_of
from engine.memory.kv_pool import KVPool
from engine.memory.latent_pool import LatentPool
from engine.models.shape import ModelSpec

SCORE_BYTES = 256 << 20
"""What index scores of the tokens that are computed at once may take, and states of pieces too."""
FIXED_PIECE, FIXED_CHOICE = 8192, 512
"""How long pieces of whole contexts and of choices are with `deterministic`."""


class TritonLatent:
    name = "triton"

    def __init__(self, spec: ModelSpec, deterministic: bool = False) -> None:
        assert spec.latent is not None and spec.query_scale is not None, "the spec has latents"
        self._spec, self._latent, self._scale = spec, spec.latent, spec.query_scale
        self._deterministic = deterministic
        self._pool: LatentPool | None = None
        self._batch: ForwardBatch | None = None
        self._most = 0
        self._chosen_TK: torch.Tensor | None = None

    def plan(self, batch: ForwardBatch, kv_pool: KVPool) -> None:
        assert isinstance(kv_pool, LatentPool), "latents lie in a pool of their own kind"
        device = kv_pool.device
        if self._pool is not kv_pool:
            capability = torch.cuda.get_device_capability(device)[0] * 10 if device.type == "cuda" else 90
            latent, heads = self._latent, self._spec.num_heads
            self._shape = LatentShape(heads, latent.rank, latent.rope_dim, kv_pool.page_size, self._scale)
            self._config = latent_config(heads, latent.rank, kv_pool.dtype.itemsize, capability)
            self._processors = processors(device)
        self._pool, self._batch, self._chosen_TK = kv_pool, batch, None
        counts = torch.tensor(batch.query_lens, device=device)
        rows = torch.arange(batch.num_rows, dtype=torch.int32, device=device)
        self._row_of_T = rows.repeat_interleave(counts, output_size=batch.num_tokens)
        self._visible_T = (batch.positions_T + 1).int()
        self._most = max(batch.seq_lens)

    def choose(self, q_TIE: torch.Tensor, weights_TI: torch.Tensor, key_TE: torch.Tensor, layer: int) -> None:
        batch, pool, index = self._batch, self._pool, self._latent.index
        assert batch is not None and pool is not None and index is not None, "plan comes before choose"
        keys = pool.index_keys(layer)
        keys.index_copy_(0, batch.write_slots_T, key_TE)
        self._chosen_TK = None
        if self._most <= index.top_k:
            return
        tokens, most = batch.num_tokens, self._most
        chosen_TK = torch.empty(tokens, index.top_k, dtype=torch.int32, device=pool.device)
        step = min(tokens, max(1, SCORE_BYTES // (4 * most)))
        scores_TS = torch.empty(step, ceil_div(most, 16) * 16, dtype=torch.float32, device=pool.device)
        pieces = select_pieces(step, most, self._processors)
        counts = torch.empty(counts_shape(step, pieces), dtype=torch.int32, device=pool.device)
        for start in range(0, tokens, step):
            part = slice(start, min(tokens, start + step))
            count = part.stop - start
            row_of_T, visible_T = self._row_of_T[part], self._visible_T[part]
            dsa_index_scores(
                q_TIE[part],
                weights_TI[part],
                keys,
                batch.page_tables_BP,
                row_of_T,
                visible_T,
                scores_TS[:count],
                pool.page_size,
                most,
            )
            dsa_select(scores_TS[:count], visible_T, chosen_TK[part], counts[:count], most)
        self._chosen_TK = chosen_TK

    def run(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        layer: int,
        sink_N: torch.Tensor | None = None,
        bias_TNE: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """out_TNL. The one key head is the token's row, and the values are its first numbers."""
        batch, pool = self._batch, self._pool
        assert batch is not None and pool is not None, "plan comes before run"
        assert sink_N is None and bias_TNE is None, "latent layers have neither"
        pool.write(layer, batch.write_slots_T, k_TKH[:, 0])
        tokens, heads = q_TNH.shape[:2]
        out_TNL = q_TNH.new_empty(tokens, heads, self._latent.rank)
        chosen_TK = self._chosen_TK if self._spec.layers[layer].index != "none" else None
        most = self._most if chosen_TK is None else chosen_TK.shape[1]
        fixed = 0 if not self._deterministic else FIXED_PIECE if chosen_TK is None else FIXED_CHOICE
        tiles = ceil_div(heads, self._config.block_m)
        piece = piece_of(most, tokens, tiles, self._processors, self._config.block_n, fixed)
        pieces = ceil_div(most, piece)
        step = tokens
        if pieces > 1:
            step = min(tokens, max(1, SCORE_BYTES // (4 * pieces * heads * (self._latent.rank + 1))))
        for start in range(0, tokens, step):
            part = slice(start, min(tokens, start + step))
            partial = None
            if pieces > 1:
                partial = States.empty((pieces, part.stop - start), heads, self._latent.rank, pool.device)
            where = batch.page_tables_BP, self._row_of_T[part], self._visible_T[part]
            q, rows, out = q_TNH[part], pool.tokens(layer), out_TNL[part]
            if chosen_TK is None:
                mla_decode(q, rows, *where, out, self._shape, most, piece, partial, self._config)
            else:
                dsa_attention(q, rows, *where, chosen_TK[part], out, self._shape, piece, partial, self._config)
        return out_TNL
