"""The noise of rejection rounds.

Owns how a round's choices are keyed: (sample seed, sample id, anchor position, slot, use), so that a
position drafted again, or a twin with the same seed, never meets the same noise. Ignores the choices.
Acceptance reads the first word of such a stream. Choices over the vocabulary take that word, 64 bits of it,
as the seed of plain noise at their position, so that whatever draws tokens draws these.
A round that never took effect and is run again from the same anchor repeats its noise, as it must.

Shapes: B rows, M chosen rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from engine.request import Sample
from engine.sampling.noise import WORD_SCALE, HostNoise, device_words
from engine.sampling.seeds import USE_ACCEPT, NoiseKey

_SEATING = 256
"""Vocabularies above this are drawn by the host's generator; below, seating it costs more than arithmetic."""


class RoundNoise:
    """Keys of a round's rows. `anchors` are the positions of their last committed tokens."""

    def __init__(
        self, seeds: Sequence[int], sample_ids: Sequence[int], anchors: Sequence[int], device: torch.device | str
    ) -> None:
        self._seeds, self._sample_ids, self._anchors = list(seeds), list(sample_ids), list(anchors)
        self._device = torch.device(device)
        self._host = HostNoise() if self._device.type == "cpu" else None

    def exponential(self, rows: Sequence[int], slots: Sequence[int], use: int, vocab_size: int) -> torch.Tensor:
        """float64 [M, V]: exponential values of row `rows[m]` in slot `slots[m]`. The argmax of weight over
        exponential draws an id by its weight, as the argmax of logarithm plus Gumbel noise does."""
        seeds_M = self._seeds_of(rows, slots, use)
        positions = [self._anchors[row] + 1 + slot for row, slot in zip(rows, slots, strict=True)]
        if self._host is not None and vocab_size > _SEATING:
            keys = map(NoiseKey, seeds_M.numpy().view(np.uint64).tolist(), positions)
            words = [self._host.words(key, vocab_size).astype(np.float64) for key in keys]
            words_MV = torch.from_numpy(np.stack(words))
        else:
            words_MV = device_words(seeds_M, torch.tensor(positions, device=self._device), vocab_size).double()
        return words_MV.add_(0.5).mul_(-WORD_SCALE).log1p_().neg_()

    def uniform(self, rows: Sequence[int], slots: Sequence[int]) -> torch.Tensor:
        """float64 [M] in (0, 1): the numbers that acceptance tests compare with."""
        return (self._words(rows, slots, USE_ACCEPT, 1)[:, 0].double() + 0.5) * WORD_SCALE

    def _seeds_of(self, rows: Sequence[int], slots: Sequence[int], use: int) -> torch.Tensor:
        """int64 [M]: bits of the uint64 seeds of these choices."""
        low_M, high_M = self._words(rows, slots, use, 2).unbind(1)
        return low_M | (high_M << 32)

    def _words(self, rows: Sequence[int], slots: Sequence[int], use: int, count: int) -> torch.Tensor:
        def column(values: list[int]) -> torch.Tensor:
            return torch.from_numpy(np.array(values, dtype=np.uint64).view(np.int64)).to(self._device)

        return device_words(
            column([self._seeds[row] for row in rows]),
            column([self._anchors[row] for row in rows]),
            count,
            column([slot | use << 32 for slot in slots]),
            column([self._sample_ids[row] for row in rows]),
        )


def noise_of(samples: Sequence[Sample], anchors: Sequence[int], device: torch.device) -> RoundNoise:
    """That of a round of these."""
    ids = [noise_id(sample.group.request.group_id, sample.index) for sample in samples]
    return RoundNoise([sample.row.seed for sample in samples], ids, anchors, device)


def noise_id(group_id: str, index: int) -> int:
    """What tells apart the rejection noise of samples that share a seed: uint64 of their full name."""
    name = hashlib.blake2b(f"{group_id}/{index}".encode(), digest_size=8)
    return int.from_bytes(name.digest(), "little")
