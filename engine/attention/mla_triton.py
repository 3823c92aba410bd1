"""Attention over latent rows on a GPU: one plan a step, kernels a layer.

Owns how a step's tokens are told to the kernels, workspaces and how work is cut. Every token is a row of its own
with its own context, decode rows and tokens of prompts alike: all heads of a token share the rows they read,
which is what makes a tile. Ignores how queries and rows came about (`engine.layers.mla`).

With `deterministic` pieces of contexts are as long whatever the batch is.

Shapes: T tokens, N query heads, C numbers of a token's row, L of its latent, K tokens chosen, I index heads, E
index head size, S the longest context.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from engine.attention.decode_metadata import processors
from engine.batch import ForwardBatch, SharedPrefix
from engine.kernels.attention_tile import ceil_div
from engine.kernels.decode_attention import States
from engine.kernels.dsa_attention import dsa_attention
from engine.kernels.dsa_index_scores import dsa_index_scores
from engine.kernels.dsa_select import counts_shape, dsa_select, select_pieces
from engine.kernels.mla_decode import mla_decode
from engine.kernels.mla_tile import LatentShape, latent_config, pieces_of
from engine.memory.kv_pool import KVPool
from engine.memory.latent_pool import LatentPool
from engine.models.shape import ModelSpec

SCORE_BYTES = 256 << 20
"""What index scores of the tokens that are computed at once may take, and states of pieces too."""
FIXED_PIECE, FIXED_CHOICE = 8192, 512
"""How long pieces of whole contexts and of choices are with `deterministic`."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """Where a step's tokens are: their rows of the page tables, how much of these they see (`most` at most), and
    where they are written."""

    page_tables_BP: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int32))
    write_slots_T: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    row_of_T: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    visible_T: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    most: int = 0


@dataclass(frozen=True, slots=True)
class LatentSize:
    """Of what comes out of attention."""

    num_heads: int
    head_dim: int


@dataclass(slots=True)
class LatentStep:
    """Buffers of a captured step, as `DecodeMetadata`'s; `cut` comes once before the layers. Idle rows have a
    length of 0 and a slot of -1: they see nothing and write to scratch."""

    size: LatentSize
    page_tables_BP: torch.Tensor
    seq_lens_B: torch.Tensor
    write_slots_B: torch.Tensor
    row_of_B: torch.Tensor
    most: int
    begin: Callable[[StepRows], None]
    prefix: None = None
    window: None = None

    def cut(self) -> None:
        slots_B = self.write_slots_B.clamp(min=0)
        self.begin(StepRows(self.page_tables_BP, slots_B, self.row_of_B, self.seq_lens_B, self.most))

    def set_prefixes(self, prefixes: list[SharedPrefix]) -> int:
        """None is read once for several rows."""
        return 0


class TritonLatent:
    name = "triton"

    def __init__(self, spec: ModelSpec, deterministic: bool = False) -> None:
        assert spec.latent is not None and spec.query_scale is not None, "the spec has latents"
        self._spec, self._latent, self._scale = spec, spec.latent, spec.query_scale
        self._deterministic = deterministic
        self._pool: LatentPool | None = None
        self._rows = StepRows()
        self.chosen_TK: torch.Tensor | None = None
        """What layers that share a choice go by."""

    def plan(self, batch: ForwardBatch, kv_pool: KVPool) -> None:
        device = kv_pool.device
        counts = torch.tensor(batch.query_lens, device=device)
        rows = torch.arange(batch.num_rows, dtype=torch.int32, device=device)
        row_of_T = rows.repeat_interleave(counts, output_size=batch.num_tokens)
        visible_T, most = (batch.positions_T + 1).int(), max(batch.seq_lens)
        self._begin(StepRows(batch.page_tables_BP, batch.write_slots_T, row_of_T, visible_T, most), kv_pool)

    def plan_decode_buffers(self, max_rows: int, max_pages: int, kv_pool: KVPool, shared: bool = False) -> LatentStep:
        """Fixed buffers of rows of one token, for steps that are captured. Nothing is read once for several rows."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=kv_pool.device)

        rows = torch.arange(max_rows, dtype=torch.int32, device=kv_pool.device)
        tables, slots = zeros(max_rows, max_pages), zeros(max_rows, dtype=torch.int64)
        size = LatentSize(self._spec.num_heads, self._latent.rank)
        begin = functools.partial(self._begin, kv_pool=kv_pool)
        return LatentStep(size, tables, zeros(max_rows), slots, rows, max_pages * kv_pool.page_size, begin)

    def _begin(self, rows: StepRows, kv_pool: KVPool) -> None:
        """What layers read from here on."""
        assert isinstance(kv_pool, LatentPool), "latents lie in a pool of their own kind"
        device = kv_pool.device
        self._rows, self.chosen_TK = rows, None
        if self._pool is not kv_pool:
            capability = torch.cuda.get_device_capability(device)[0] * 10 if device.type == "cuda" else 90
            latent, heads = self._latent, self._spec.num_heads
            self._shape = LatentShape(heads, latent.rank, latent.rope_dim, kv_pool.page_size, self._scale)
            self._config = latent_config(heads, latent.rank, kv_pool.dtype.itemsize, capability)
            self._processors = processors(device)
        self._pool = kv_pool

    def choose(self, q_TIE: torch.Tensor, weights_TI: torch.Tensor, key_TE: torch.Tensor, layer: int) -> None:
        rows, pool, index = self._rows, self._pool, self._latent.index
        assert pool is not None and index is not None, "plan comes before choose"
        keys, most = pool.index_keys(layer), rows.most
        pool.write_index(layer, rows.write_slots_T, key_TE)
        self.chosen_TK = None
        if most <= index.top_k:
            return
        tokens = len(key_TE)
        chosen_TK = torch.empty(tokens, index.top_k, dtype=torch.int32, device=pool.device)
        step = min(tokens, max(1, SCORE_BYTES // (4 * most)))
        scores_TS = torch.empty(step, ceil_div(most, 16) * 16, dtype=torch.float32, device=pool.device)
        pieces = select_pieces(step, most, self._processors)
        counts = torch.empty(counts_shape(step, pieces), dtype=torch.int32, device=pool.device)
        for start in range(0, tokens, step):
            part = slice(start, min(tokens, start + step))
            count = part.stop - start
            row_of_T, visible_T = rows.row_of_T[part], rows.visible_T[part]
            dsa_index_scores(
                q_TIE[part],
                weights_TI[part],
                keys,
                rows.page_tables_BP,
                row_of_T,
                visible_T,
                scores_TS[:count],
                pool.page_size,
                most,
            )
            dsa_select(scores_TS[:count], visible_T, chosen_TK[part], counts[:count])
        self.chosen_TK = chosen_TK

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
        rows, pool = self._rows, self._pool
        assert pool is not None, "plan comes before run"
        assert sink_N is None and bias_TNE is None, "latent layers have neither"
        pool.write(layer, rows.write_slots_T, k_TKH[:, 0])
        tokens, heads = q_TNH.shape[:2]
        out_TNL = q_TNH.new_empty(tokens, heads, self._latent.rank)
        chosen_TK = self.chosen_TK if self._spec.layers[layer].index != "none" else None
        most = rows.most if chosen_TK is None else chosen_TK.shape[1]
        fixed = 0 if not self._deterministic else FIXED_PIECE if chosen_TK is None else FIXED_CHOICE
        tiles = ceil_div(heads, self._config.block_m)
        pieces = pieces_of(most, tokens, tiles, self._processors, self._config.block_n)
        if fixed:
            pieces = ceil_div(most, fixed)
        step = tokens
        if pieces > 1:
            step = min(tokens, max(1, SCORE_BYTES // (4 * pieces * heads * (self._latent.rank + 1))))
        for start in range(0, tokens, step):
            part = slice(start, min(tokens, start + step))
            partial = None
            if pieces > 1:
                partial = States.empty((pieces, part.stop - start), heads, self._latent.rank, pool.device)
            where = rows.page_tables_BP, rows.row_of_T[part], rows.visible_T[part]
            q, stored, out = q_TNH[part], pool.tokens(layer), out_TNL[part]
            if chosen_TK is None:
                mla_decode(q, stored, *where, out, self._shape, pieces, partial, self._config, fixed)
            else:
                dsa_attention(
                    q, stored, *where, chosen_TK[part], out, self._shape, pieces, partial, self._config, fixed
                )
        return out_TNL
