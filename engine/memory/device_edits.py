"""What the device must know to edit logits of the rows that ask for it, indexed by slot.

Owns penalties, counts of tokens seen, biases and the mask of stop ids on the device, and the
allocation of each when a row first needs it. Ignores how logits are edited
(`engine.kernels.sample_scan`). A step adds the tokens it draws to the counts by itself.

Buffers over the vocabulary have rows only for slots that use them; slots with the same bias, or
the same stop ids to mask, share a row. `generation` counts the times a buffer moved: whoever
remembers addresses starts again when it changes.

Shapes: S slots, C count rows, M bias rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.kernels.sample_columns import EditColumns
from engine.memory.lent_rows import LentRows, grown
from engine.memory.transfer import send
from engine.sampling.params import RowSampling

_SHORT_COUNTS_BELOW = 1 << 14


class DeviceEdits:
    """`context_len` bounds how often an id can be counted, and with it the width of a count."""

    def __init__(self, num_slots: int, vocab_size: int, context_len: int, device: torch.device) -> None:
        self.generation = 0
        self._used = False
        self._device = device
        self._vocab_size = vocab_size
        self._count_rows, self._bias_rows = LentRows(), LentRows()
        dtype = torch.int16 if context_len < _SHORT_COUNTS_BELOW else torch.int32

        def column(fill: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((num_slots,), fill, dtype=dtype, device=device)

        self.columns = EditColumns(
            repetition_S=column(1),
            frequency_S=column(0),
            presence_S=column(0),
            count_row_S=column(-1, torch.int32),
            counts_CV=torch.zeros(0, vocab_size, dtype=dtype, device=device),
            bias_row_S=column(-1, torch.int32),
            mask_row_S=column(-1, torch.int32),
            bias_MV=torch.zeros(0, vocab_size, dtype=torch.float32, device=device),
            min_until_S=column(0, torch.int64),
        )

    def admit(self, slots: list[int], rows: list[RowSampling]) -> None:
        """Take slots' state from the host, or forget what they held where a row edits nothing."""
        self.release(slots)
        self._used = self._used or any(row.may_edit for row in rows)
        if not self._used or not slots:
            return
        slots_N = send(np.array(slots, dtype=np.int64), self._device)
        values = zip(*(self._admit(slot, row) for slot, row in zip(slots, rows, strict=True)), strict=True)
        columns = self.columns
        for column, numbers in zip(
            (
                columns.repetition_S,
                columns.frequency_S,
                columns.presence_S,
                columns.count_row_S,
                columns.bias_row_S,
                columns.mask_row_S,
                columns.min_until_S,
            ),
            values,
            strict=True,
        ):
            column.index_copy_(0, slots_N, send(np.array(numbers), self._device).to(column.dtype))

    def release(self, slots: list[int]) -> None:
        """Slots that nobody steps any more. What runs already still sees them as they were."""
        for slot in slots:
            self._count_rows.give_back(slot)
            self._bias_rows.give_back(slot)

    def _admit(self, slot: int, row: RowSampling) -> tuple[float, float, float, int, int, int, int]:
        """The slot's value in each column, with its rows filled."""
        params = row.params
        count_row = self._count_row(slot, row) if row.penalises else -1
        bias_row = mask_row = -1
        if params.logit_bias:
            bias = tuple(sorted(params.logit_bias.items()))
            bias_row = self._bias_row(slot, bias, [token for token, _ in bias], [value for _, value in bias])
        if params.min_new and row.stop_ids:
            stops = sorted(row.stop_ids)
            mask_row = self._bias_row(slot, tuple(stops), stops, [float("-inf")] * len(stops))
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        return *penalties, count_row, bias_row, mask_row, row.prompt_len + params.min_new

    def _count_row(self, slot: int, row: RowSampling) -> int:
        number, _ = self._count_rows.take(slot, slot)
        if self._count_rows.capacity > self.columns.counts_CV.shape[0]:
            self.columns.counts_CV = grown(self.columns.counts_CV, self._count_rows.capacity)
            self.generation += 1
        ids_N, counts_N = row.seen()
        counts_V = self.columns.counts_CV[number]
        counts_V.zero_()
        seen_N = send(2 * counts_N.astype(np.int32) + 1, self._device)
        counts_V[send(ids_N, self._device)] = seen_N.to(counts_V.dtype)
        return number

    def _bias_row(self, slot: int, key: tuple, ids: list[int], values: list[float]) -> int:
        number, fresh = self._bias_rows.take(slot, key)
        if self._bias_rows.capacity > self.columns.bias_MV.shape[0]:
            self.columns.bias_MV = grown(self.columns.bias_MV, self._bias_rows.capacity)
            self.generation += 1
        if fresh:
            bias_V = self.columns.bias_MV[number]
            bias_V.zero_()
            ids_N = send(np.array(ids, dtype=np.int64), self._device)
            bias_V[ids_N] = send(np.array(values, dtype=np.float32), self._device)
        return number
