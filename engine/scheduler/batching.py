"""From the scheduler's choice to the tensors of one forward pass.

Owns the layout of a step and what is remembered between steps of the same rows. Ignores why
these rows were chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.adapters import Adapters, Lease, slot_of
from engine.batch import ForwardBatch, SharedPrefix, WindowRows
from engine.memory.request_table import RequestTable
from engine.memory.transfer import send
from engine.request import Sample
from engine.scheduler.pages import Sequence as PagedSequence
from engine.scheduler.prefill import Prefill


class _Rows:
    """A batch's rows as they are added."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.keys: list[int] = []
        self.tokens: list[Sequence[int] | np.ndarray] = []
        self.leases: list[Lease | None] = []
        self.end = 0

    def add(self, sequence: PagedSequence, start: int, tokens: Sequence[int] | np.ndarray, lease: Lease | None) -> None:
        self.leases.append(lease)
        self.slots.append(sequence.slot)
        self.starts.append(start)
        self.counts.append(len(tokens))
        self.keys.append(sequence.key)
        self.tokens.append(tokens)
        self.end += len(tokens)


class BatchBuilder:
    """Builds a `ForwardBatch` from decode rows and prefill chunks. With `verify_as_decode` every token of
    a row that verifies drafts becomes a decode row of its own, so that its bits are those of a plain
    step where the backend's do not depend on the batch."""

    def __init__(
        self,
        table: RequestTable,
        page_size: int,
        device: torch.device,
        verify_as_decode: bool = False,
        adapters: Adapters | None = None,
    ) -> None:
        self.adapters = adapters
        self._table = table
        self._page_size = page_size
        self._device = device
        self.verify_as_decode = verify_as_decode
        self._shared_key: tuple[int, ...] = ()
        self._shared: list[SharedPrefix] = []

    def build(
        self, decode: list[Sample], chunks: list[tuple[Prefill, int]], feeds: list[list[int]] | None = None
    ) -> ForwardBatch:
        """Decode rows first, then one row a chunk. Logits are wanted of every token of a decode row, and
        of the last token of every chunk that completes its prefill.

        `feeds` are the decode rows' tokens where there are more than one each: the newest and drafts
        behind it.
        """
        rows = _Rows()
        for place, sample in enumerate(decode):
            assert sample.sequence is not None
            feed = sample.ids[-1:] if feeds is None else feeds[place]
            if self.verify_as_decode:
                for ahead, token in enumerate(feed):
                    rows.add(sample.sequence, sample.sequence.computed + ahead, [token], sample.group.lease)
            else:
                rows.add(sample.sequence, sample.sequence.computed, feed, sample.group.lease)
        num_decode = 0 if feeds is not None and not self.verify_as_decode else len(rows.slots)
        provisional = 0 if feeds is None else len(rows.slots)
        logit_rows = list(range(rows.end))
        for prefill, count in chunks:
            sequence = prefill.sequence
            tokens = prefill.tokens[sequence.computed : sequence.computed + count]
            rows.add(sequence, sequence.computed, tokens, prefill.lease)
            if count == prefill.remaining and prefill.samples:
                logit_rows.append(rows.end - 1)
        tokens_T = np.concatenate([np.asarray(part, dtype=np.int64) for part in rows.tokens])
        given = (rows.slots, rows.starts, rows.counts, rows.keys, tokens_T, logit_rows, num_decode)
        batch = self._assemble(*given, max(num_decode, provisional))
        batch.provisional = provisional
        return self._adapt(batch, rows.leases, rows.counts, logit_rows)

    def build_decode(self, samples: list[Sample], tokens: list[int], computed: list[int]) -> ForwardBatch:
        """Decode rows whose next tokens and positions the device knows better than the samples."""
        slots, keys = [], []
        for sample in samples:
            assert sample.sequence is not None
            slots.append(sample.sequence.slot)
            keys.append(sample.sequence.key)
        rows = len(samples)
        tokens_T = np.asarray(tokens, dtype=np.int64)
        batch = self._assemble(slots, computed, [1] * rows, keys, tokens_T, list(range(rows)), rows, rows)
        return self._adapt(batch, [sample.group.lease for sample in samples], [1] * rows, list(range(rows)))

    def _adapt(
        self, batch: ForwardBatch, leases: list[Lease | None], counts: list[int], logit_rows: list[int]
    ) -> ForwardBatch:
        """Each token with its request's adapter."""
        if self.adapters is not None and any(lease is not None for lease in leases):
            slots_T = np.repeat([slot_of(lease) for lease in leases], counts)
            batch.adapters = self.adapters.step(slots_T)
            batch.logit_adapters = self.adapters.step(slots_T[logit_rows])
        return batch

    def _assemble(
        self,
        slots: list[int],
        starts: list[int],
        counts: list[int],
        keys: list[int],
        tokens_T: np.ndarray,
        logit_rows: list[int],
        num_decode: int,
        running: int,
    ) -> ForwardBatch:
        """`running` rows at the front are of samples that run: decode rows and those that verify drafts."""
        starts_B, counts_B = np.asarray(starts, dtype=np.int64), np.asarray(counts, dtype=np.int64)
        seq_lens_B = starts_B + counts_B
        width = int(-(-seq_lens_B.max() // self._page_size))
        page_tables_BP = self._table.pages_SP[slots, :width]
        if len(tokens_T) == len(slots):
            rows_T, positions_T = np.arange(len(slots)), starts_B
        else:
            rows_T = np.repeat(np.arange(len(slots)), counts_B)
            first_T = np.repeat(np.cumsum(counts_B) - counts_B, counts_B)
            positions_T = np.arange(len(tokens_T)) - first_T + starts_B[rows_T]
        write_slots_T = self._write_slots(page_tables_BP, rows_T, positions_T)
        return ForwardBatch(
            input_ids_T=self._tensor(tokens_T),
            positions_T=self._tensor(positions_T),
            write_slots_T=self._tensor(write_slots_T),
            query_lens=counts,
            seq_lens=seq_lens_B.tolist(),
            page_tables_BP=self._tensor(page_tables_BP),
            row_keys=keys,
            num_decode=num_decode,
            logit_rows_R=self._tensor(np.asarray(logit_rows, dtype=np.int64)),
            shared_prefixes=self._shared_prefixes(keys[:running], page_tables_BP, starts_B),
            state_slots=None if self._table.states_S is None else self._table.states_S[slots].tolist(),
            window=self._window(slots, width, rows_T, positions_T),
        )

    def _write_slots(self, page_tables_BP: np.ndarray, rows_T: np.ndarray, positions_T: np.ndarray) -> np.ndarray:
        pages_T = page_tables_BP[rows_T, positions_T // self._page_size].astype(np.int64)
        assert pages_T.all(), "a token's page was not reserved"
        return pages_T * self._page_size + positions_T % self._page_size

    def _window(self, slots: list[int], width: int, rows_T: np.ndarray, positions_T: np.ndarray) -> WindowRows | None:
        if self._table.windows is None:
            return None
        tables_BP = self._table.windows.pages_SP[slots, :width]
        write_slots_T = self._write_slots(tables_BP, rows_T, positions_T)
        return WindowRows(self._tensor(write_slots_T), self._tensor(tables_BP))

    def _shared_prefixes(self, keys: list[int], page_tables_BP: np.ndarray, starts_B: np.ndarray) -> list[SharedPrefix]:
        """Runs of neighbouring rows that begin with the same pages. Pages in a prefix are
        full and never written again, so the answer holds until the rows change."""
        key = tuple(keys)
        if key == self._shared_key:
            return self._shared
        self._shared_key, self._shared = key, []
        if len(keys) > 1:
            self._shared = shared_prefixes(page_tables_BP[: len(keys)], starts_B[: len(keys)], self._page_size)
        return self._shared

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return send(array, self._device)


def shared_prefixes(page_tables_BP: np.ndarray, computed_B: np.ndarray, page_size: int) -> list[SharedPrefix]:
    """Runs of neighbouring rows that begin with the same full pages. The page that a row is
    writing is its own and never counts."""
    if not (page_tables_BP[:-1, 0] == page_tables_BP[1:, 0]).any():
        return []
    full_B = computed_B // page_size
    equal_BP = np.logical_and.accumulate(page_tables_BP[:-1] == page_tables_BP[1:], axis=1)
    depth_B = np.minimum(equal_BP.sum(axis=1), np.minimum(full_B[:-1], full_B[1:]))
    return _runs(depth_B.tolist())


def _runs(depths: list[int]) -> list[SharedPrefix]:
    """Disjoint row ranges from the pages each row shares with the next one. A row that shares
    less with its successor than that one with the next stays alone: siblings go together."""
    runs, start = [], 0
    while start < len(depths):
        depth = depths[start]
        if depth == 0 or (start + 1 < len(depths) and depths[start + 1] > depth):
            start += 1
            continue
        end = start + 1
        while end < len(depths) and depths[end] >= depth:
            end += 1
        runs.append(SharedPrefix(start, end + 1, depth))
        start = end + 1
    return runs
