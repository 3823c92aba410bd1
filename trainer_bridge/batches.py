"""Samples as tensors a trainer's model can run.

Owns padding, packing, micro-batches and the denominators of a whole train step. Ignores losses.

Legend: B rows, T positions of a row. Column t of `targets_BT`, `mask_BT`, `rollout_logprobs_BT`
belongs to the prediction made *at* position t, of the token at t + 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.errors import InvalidRequest
from trainer_bridge.samples import TrainingSample


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts over one whole train step, on all ranks and micro-batches together.

    They are fixed before the step is split, so that no loss depends on the split. `tokens`
    counts every token of the loss mask, those a loss later zeroes included.
    """

    tokens: int
    samples: int
    max_new: int

    @classmethod
    def of(cls, samples: Sequence[TrainingSample], max_new: int) -> Denominators:
        return cls(sum(sample.num_trained for sample in samples), len(samples), max_new)

    def __add__(self, other: Denominators) -> Denominators:
        """Joins the counts of two ranks' shares."""
        if self.max_new != other.max_new:
            raise InvalidRequest(field="max_new", expected=self.max_new, actual=other.max_new)
        return Denominators(self.tokens + other.tokens, self.samples + other.samples, self.max_new)


@dataclass(frozen=True, slots=True)
class Batch:
    """`positions_BT` count from 0 in every sample. `attention_mask` is None for padded rows
    (padding is on the right, where causal attention never looks) and bool [B, 1, T, T], true
    where attention is allowed, for packed rows. `sample_tokens_BT` is the number of trained
    tokens of the sample a position belongs to, for losses that average per sample. `start` is the
    first position of any row that predicts an output token: no logits are needed before it."""

    ids_BT: Tensor
    positions_BT: Tensor
    targets_BT: Tensor
    mask_BT: Tensor
    rollout_logprobs_BT: Tensor
    advantages_BT: Tensor
    temperature_BT: Tensor
    sample_tokens_BT: Tensor
    attention_mask: Tensor | None
    start: int

    def to(self, device: torch.device | str) -> Batch:
        return Batch(
            ids_BT=self.ids_BT.to(device),
            positions_BT=self.positions_BT.to(device),
            targets_BT=self.targets_BT.to(device),
            mask_BT=self.mask_BT.to(device),
            rollout_logprobs_BT=self.rollout_logprobs_BT.to(device),
            advantages_BT=self.advantages_BT.to(device),
            temperature_BT=self.temperature_BT.to(device),
            sample_tokens_BT=self.sample_tokens_BT.to(device),
            attention_mask=None if self.attention_mask is None else self.attention_mask.to(device),
            start=self.start,
        )


def pad(samples: Sequence[TrainingSample], pad_id: int) -> Batch:
    """One sample to a row, padded on the right to the longest."""
    return _lay_out([[sample] for sample in samples], pad_id, packed=False)


def pack(samples: Sequence[TrainingSample], row_tokens: int, pad_id: int) -> Batch:
    """Several samples to a row of at most `row_tokens` (first fit, longest first), kept apart by
    the attention mask and by positions that start again."""
    rows: list[list[TrainingSample]] = []
    room: list[int] = []
    for sample in sorted(samples, key=lambda item: item.num_tokens, reverse=True):
        if sample.num_tokens > row_tokens:
            raise InvalidRequest(field="row_tokens", expected=f"at least {sample.num_tokens}", actual=row_tokens)
        place = next((i for i, left in enumerate(room) if left >= sample.num_tokens), None)
        if place is None:
            place = len(rows)
            rows.append([])
            room.append(row_tokens)
        rows[place].append(sample)
        room[place] -= sample.num_tokens
    return _lay_out(rows, pad_id, packed=True)


def micro_batches(samples: Sequence[TrainingSample], max_tokens: int) -> Iterator[list[TrainingSample]]:
    """Samples of like length together, each batch at most `max_tokens` once padded."""
    chosen: list[TrainingSample] = []
    for sample in sorted(samples, key=lambda item: item.num_tokens, reverse=True):
        longest = chosen[0].num_tokens if chosen else sample.num_tokens
        if chosen and longest * (len(chosen) + 1) > max_tokens:
            yield chosen
            chosen = []
        chosen.append(sample)
    if chosen:
        yield chosen


def _lay_out(rows: list[list[TrainingSample]], pad_id: int, *, packed: bool) -> Batch:
    if not rows:
        raise InvalidRequest(field="samples", expected="at least one", actual=0)
    width = max(sum(sample.num_tokens for sample in row) for row in rows)
    shape = (len(rows), width)
    ids = np.full(shape, pad_id, np.int64)
    positions = np.zeros(shape, np.int64)
    segment = np.full(shape, -1, np.int64)
    targets = np.full(shape, pad_id, np.int64)
    mask = np.zeros(shape, bool)
    floats = {name: np.zeros(shape, np.float32) for name in ("logprobs", "advantage", "count")}
    temperature = np.ones(shape, np.float32)
    for b, row in enumerate(rows):
        start = 0
        for number, sample in enumerate(row):
            end = start + sample.num_tokens
            first = start + len(sample.prompt_ids) - 1
            ids[b, start:end] = np.concatenate([sample.prompt_ids, sample.output_ids])
            positions[b, start:end] = np.arange(end - start)
            segment[b, start:end] = number
            targets[b, start : end - 1] = ids[b, start + 1 : end]
            mask[b, first : end - 1] = sample.loss_mask
            floats["logprobs"][b, first : end - 1] = sample.rollout_logprobs
            floats["advantage"][b, start:end] = sample.advantage
            floats["count"][b, start:end] = sample.num_trained
            temperature[b, start:end] = sample.temperature if sample.temperature > 0 else 1.0
            start = end
    return Batch(
        ids_BT=torch.from_numpy(ids),
        positions_BT=torch.from_numpy(positions),
        targets_BT=torch.from_numpy(targets),
        mask_BT=torch.from_numpy(mask),
        rollout_logprobs_BT=torch.from_numpy(floats["logprobs"]),
        advantages_BT=torch.from_numpy(floats["advantage"]),
        temperature_BT=torch.from_numpy(temperature),
        sample_tokens_BT=torch.from_numpy(floats["count"]),
        attention_mask=_block_causal(torch.from_numpy(segment)) if packed else None,
        start=min(len(row[0].prompt_ids) - 1 for row in rows),
    )


def _block_causal(segment_BT: Tensor) -> Tensor:
    """Causal within a sample; padding sees itself, so that no row of scores is empty."""
    width = segment_BT.shape[1]
    same_BTT = segment_BT[:, :, None] == segment_BT[:, None, :]
    causal_TT = torch.ones(width, width, dtype=torch.bool).tril()
    return (same_BTT & causal_TT)[:, None]
