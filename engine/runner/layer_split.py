"""Runs a model over batches whose tokens are divided over ranks.

Owns which tokens are this rank's (every `size`th, so that each rank has as much to attend to as the others), what
the step's pages are called in it, whether pages travel to queries or queries to pages (whichever is less), and that
all ranks take the same step. Every rank schedules by itself from the same
requests; what a step is made of goes into a digest that all compare before anything is computed. Ignores how pages
and rows travel (`engine.memory.layer_split`).

Shapes: T tokens of the batch, M of this rank, B rows, P page-table columns, D hidden.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import torch

from engine.attention.base import AttentionBackend
from engine.attention.mla_owners import OwnersAttention
from engine.batch import ForwardBatch
from engine.context_parallel import ContextParallel
from engine.errors import Corrupt
from engine.memory.layer_split import SplitLatents, StepPages
from engine.memory.transfer import send
from engine.models.decoder import CausalLM
from engine.runner.model_runner import PADDING_KEY, ROW_MULTIPLE, ModelRunner, padded


class SplitRunner(ModelRunner):
    """Hidden states are those of all tokens, the same bits on every rank: logits and draws follow by themselves."""

    def __init__(
        self, model: CausalLM, kv_pool: SplitLatents, backend: AttentionBackend, deterministic: bool = False
    ) -> None:
        super().__init__(model, kv_pool, backend, deterministic)
        self.pool = kv_pool
        self._owners = OwnersAttention(model.spec, backend, kv_pool)
        self.steps = 0
        self._digest = b""

    @torch.inference_mode()
    def hidden(self, batch: ForwardBatch, capture: dict[int, torch.Tensor] | None = None) -> torch.Tensor:
        host = _Host(batch)
        self._agree(host, batch.row_keys)
        ranks, tokens = self.pool.ranks, batch.num_tokens
        pages, tables_BP = self._pages(host)
        mine = share_of(batch, ranks, self._share(tokens), pages, tables_BP)
        if self.sends_queries(len(pages.slots_T), len(pages.sent_P)):
            self._owners.whole = _filled(batch, len(pages.slots_T) - tokens)
            hidden_MD = self.model.forward(mine, self._owners, self.pool, capture)
        else:
            self.pool.step.begin(pages)
            hidden_MD = self.model.forward(mine, self.backend, self.pool.step, capture)
        for layer in capture or {}:
            assert capture is not None
            capture[layer] = ranks.gather(capture[layer])[:tokens]
        return ranks.gather(hidden_MD)[:tokens]

    def sends_queries(self, tokens: int, pages: int) -> bool:
        """Whether queries of so many tokens, and what comes back, are fewer numbers than so many pages."""
        spec, latent = self.model.spec, self.model.spec.latent
        assert latent is not None, "the spec has latents"
        queries = spec.num_layers * spec.num_heads * (latent.row + latent.rank)
        if latent.index is not None:
            index = latent.index
            choosing = sum(layer.index == "own" for layer in spec.layers)
            queries += choosing * (index.heads * (index.head_dim + 1) + index.top_k)
        return tokens * queries < pages * self.pool.page_size * spec.token_numbers

    def _share(self, tokens: int) -> int:
        """Tokens of each rank, those that fill up included."""
        share = -(-tokens // self.pool.ranks.size)
        return share + (-share % ROW_MULTIPLE if self.deterministic else 0)

    def _agree(self, host: _Host, row_keys: list[int]) -> None:
        """Raises `Corrupt` on every rank where one has decided otherwise than rank 0, now or in an earlier step."""
        self.steps += 1
        whole = hashlib.blake2b(self._digest, digest_size=16)
        for part in (host.ids_T, host.positions_T, host.slots_T, host.tables_BP, host.seq_lens_B):
            whole.update(np.int64(part.size).tobytes() + np.ascontiguousarray(part, dtype=np.int64).tobytes())
        whole.update(np.asarray([len(self.pool.copied), *self.pool.copied, *row_keys], dtype=np.int64).tobytes())
        self.pool.copied.clear()
        self._digest = whole.digest()
        number = int.from_bytes(self._digest[:7], "little")
        found = self.pool.ranks.gather_numbers(number, self.pool.device)
        for rank, other in enumerate(found):
            if other != found[0]:
                raise Corrupt(
                    field=f"ranks[{rank}]",
                    expected=f"step {self.steps} as rank 0 decided it, digest {found[0]:014x}",
                    actual=f"{other:014x}",
                )

    def _pages(self, host: _Host) -> tuple[StepPages, torch.Tensor]:
        """The step's pages, and page tables of the ids they have in it."""
        size, pool = self.pool.page_size, self.pool
        column_P = np.arange(host.tables_BP.shape[1])
        held_B, cached_B = -(-host.seq_lens_B // size), -(-(host.seq_lens_B - host.counts_B) // size)
        cached_BP, held_BP = column_P < cached_B[:, None], column_P < held_B[:, None]
        sent = np.unique(host.tables_BP[cached_BP])
        new = np.setdiff1d(host.tables_BP[held_BP & ~cached_BP], sent)
        names = np.zeros(pool.num_pages, dtype=np.int32)
        names[sent] = np.arange(1, len(sent) + 1)
        names[new] = np.arange(len(sent) + 1, len(sent) + len(new) + 1)
        tables_BP = np.where(held_BP, names[host.tables_BP], 0)
        whole = self._share(len(host.slots_T)) * pool.ranks.size
        slots_T = np.zeros(whole, dtype=np.int64)
        slots_T[: len(host.slots_T)] = host.slots_T
        step_slots_T = names[slots_T // size].astype(np.int64) * size + slots_T % size
        sent_P, slots, step_slots = (send(each, pool.device) for each in (sent.astype(np.int64), slots_T, step_slots_T))
        return StepPages(sent_P, slots, step_slots), send(tables_BP, pool.device)


def _filled(batch: ForwardBatch, extra: int) -> ForwardBatch:
    """The whole batch with what fills up the ranks' shares: each such token sees one token of scratch."""
    return replace(padded(batch, extra), seq_lens=[*batch.seq_lens, 1]) if extra else batch


class _Host:
    """A batch's decisions where they can be looked at."""

    def __init__(self, batch: ForwardBatch) -> None:
        parts = batch.input_ids_T, batch.positions_T, batch.write_slots_T, batch.page_tables_BP
        self.ids_T, self.positions_T, self.slots_T, self.tables_BP = (part.cpu().numpy() for part in parts)
        self.counts_B, self.seq_lens_B = np.asarray(batch.query_lens), np.asarray(batch.seq_lens)


def share_of(
    batch: ForwardBatch, ranks: ContextParallel, share: int, pages: StepPages, tables_BP: torch.Tensor
) -> ForwardBatch:
    """This rank's `share` of the batch's tokens; what is missing to it is a row of padding at its end."""
    counts_B = np.asarray(batch.query_lens)
    mine = np.arange(ranks.rank, batch.num_tokens, ranks.size)
    row_of_T = np.repeat(np.arange(len(counts_B)), counts_B)
    kept_B = np.bincount(row_of_T[mine], minlength=len(counts_B))
    rows, extra = np.flatnonzero(kept_B), share - len(mine)
    place_M = send(mine, tables_BP.device)
    padding = batch.input_ids_T.new_zeros(extra)
    tables = tables_BP.index_select(0, send(rows, tables_BP.device))
    if extra:
        tables = torch.cat((tables, tables.new_zeros(1, tables.shape[1])))
    fill = [extra] if extra else []
    return replace(
        batch,
        input_ids_T=torch.cat((batch.input_ids_T[place_M], padding)),
        positions_T=torch.cat((batch.positions_T[place_M], padding)),
        write_slots_T=pages.step_slots_T[ranks.rank :: ranks.size].contiguous(),
        query_lens=[*kept_B[rows].tolist(), *fill],
        seq_lens=[*(batch.seq_lens[row] for row in rows), *([1] * len(fill))],
        page_tables_BP=tables,
        row_keys=[*(batch.row_keys[row] for row in rows), *([PADDING_KEY] * len(fill))],
        num_decode=0,
        shared_prefixes=[],
        adapters=None if batch.adapters is None else batch.adapters.rows(mine),
    )
