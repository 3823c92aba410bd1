"""Drawing on the host.

Owns the fast path for logits in CPU memory: blocks of rows that stay in cache, one exponential per
logit and no logarithm except for the few ids that can win. Ignores the columns beyond the
processed log-probability.

Since E = -log(1 - u) >= u, a weight w = exp((l - max) / T) divided by u bounds w / E from above.
Only ids whose bound reaches the value of the best-bounded id can win the race; those are compared
in float64. Shapes: R rows, B rows of a block, V vocabulary, N kept ids.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import torch

from engine.sampling.draw import Drawn
from engine.sampling.noise import WORD_SCALE, HostNoise, exponentials
from engine.sampling.params import RowSampling
from engine.sampling.seeds import NoiseKey
from engine.sampling.truncate import kept_ids

_BLOCK_ELEMENTS = 1 << 16
_SLACK = 1.0 - 1e-5
"""Covers the rounding of the float32 bounds many times over."""


class _Columns:
    """Parameters of a set of rows as arrays, made once and kept while the set stays."""

    def __init__(self, rows: Sequence[RowSampling]) -> None:
        self.rows = list(rows)
        self.temperature_R = np.array([row.temperature for row in rows], dtype=np.float64)
        self.scale_R1 = (1.0 / self.temperature_R).astype(np.float32)[:, None]

    def fits(self, rows: Sequence[RowSampling]) -> bool:
        return len(rows) == len(self.rows) and all(map(operator.is_, rows, self.rows))


class HostDraw:
    """Draws from CPU logits on the calling thread. Not shared between threads."""

    def __init__(self, vocab_size: int) -> None:
        self._block_rows = max(1, _BLOCK_ELEMENTS // vocab_size)
        self._weights = np.empty((self._block_rows, vocab_size), dtype=np.float32)
        self._bounds = np.ones((self._block_rows, vocab_size), dtype=np.float32)
        self._noise = HostNoise()
        self._columns = _Columns([])

    def draw(self, logits_RV: torch.Tensor, rows: Sequence[RowSampling], positions: Sequence[int]) -> Drawn:
        if not self._columns.fits(rows):
            self._columns = _Columns(rows)
        count = len(rows)
        drawn = Drawn(
            torch.zeros(count, dtype=torch.int64),
            torch.empty(count, dtype=torch.float32),
            torch.empty(count, dtype=torch.bool),
        )
        logits = logits_RV.detach().numpy()
        with np.errstate(all="ignore"):
            for start in range(0, count, self._block_rows):
                part = slice(start, start + self._block_rows)
                block = _Block(part, logits[part], self._columns, positions[part], drawn)
                self._draw_block(block)
                block.write()
        return drawn

    def _draw_block(self, block: _Block) -> None:
        weights_BV = self._weights[: len(block.rows)]
        np.subtract(block.logits_BV, block.highest_B[:, None], out=weights_BV)
        if (block.scale_B1 != 1.0).any():
            np.multiply(weights_BV, block.scale_B1, out=weights_BV)
        weights = torch.from_numpy(weights_BV)
        torch.exp(weights, out=weights)
        block.log_total_B = np.log(weights_BV.sum(axis=1), dtype=np.float64)
        whole: list[int] = []
        for b, row in enumerate(block.rows):
            if block.bad_B[b]:
                continue
            if row.greedy:
                block.ids_B[b] = block.logits_BV[b].argmax()
            elif row.truncates:
                self._draw_kept(block, b, weights_BV[b])
            else:
                whole.append(b)
        if whole:
            self._race(block, whole, weights_BV)

    def _draw_kept(self, block: _Block, b: int, weights_V: np.ndarray) -> None:
        row, logits_V = block.rows[b], block.logits_BV[b]
        ids_N, block.log_total_B[b] = kept_ids(weights_V, logits_V, 1.0 / row.temperature, row.params)
        noise_N = exponentials(self._noise.words_at(NoiseKey(row.seed, block.positions[b]), ids_N))
        score_N = logits_V[ids_N].astype(np.float64) / row.temperature - np.log(noise_N)
        block.ids_B[b] = ids_N[score_N.argmax()]
        if not row.bare:
            block.drawn.kept[block.part.start + b] = torch.from_numpy(ids_N)

    def _race(self, block: _Block, whole: list[int], weights_BV: np.ndarray) -> None:
        """Draw rows whose whole vocabulary takes part."""
        count, vocab_size = weights_BV.shape
        bounds_BV = self._bounds[:count]
        words: dict[int, np.ndarray] = {}
        for b in whole:
            words[b] = self._noise.words(NoiseKey(block.rows[b].seed, block.positions[b]), vocab_size)
            np.copyto(bounds_BV[b], words[b], casting="unsafe")
        np.divide(weights_BV, bounds_BV, out=bounds_BV)
        best_B = bounds_BV.argmax(axis=1)
        at_best = np.array([words[b][best_B[b]] for b in whole])
        reached_B1 = np.full((count, 1), np.inf, dtype=np.float32)
        reached_B1[whole, 0] = weights_BV[whole, best_B[whole]] / exponentials(at_best) * (WORD_SCALE * _SLACK)
        flat = np.flatnonzero(bounds_BV >= reached_B1)
        rivals, ids = flat // vocab_size, flat % vocab_size
        noise = exponentials(np.array([words[b][i] for b, i in zip(rivals, ids, strict=True)]))
        scores = block.logits_BV[rivals, ids].astype(np.float64) / block.temperature_B[rivals] - np.log(noise)
        best = [-np.inf] * count
        for b, i, score in zip(rivals.tolist(), ids.tolist(), scores.tolist(), strict=True):
            if score > best[b]:
                best[b], block.ids_B[b] = score, i


class _Block:
    """Rows in work: their edited logits and what is known of them so far."""

    def __init__(
        self, part: slice, logits_BV: np.ndarray, columns: _Columns, positions: Sequence[int], drawn: Drawn
    ) -> None:
        self.part = part
        self.rows = columns.rows[part]
        self.positions = positions
        self.drawn = drawn
        self.scale_B1 = columns.scale_R1[part]
        self.temperature_B = columns.temperature_R[part]
        self.ids_B = np.zeros(len(self.rows), dtype=np.int64)
        self.log_total_B = np.zeros(len(self.rows))
        self.bad_B = np.zeros(len(self.rows), dtype=bool)
        edited = [b for b, row in enumerate(self.rows) if row.edits_at(positions[b])]
        self.logits_BV = self._edit(logits_BV, edited) if edited else logits_BV
        self.highest_B = self.logits_BV.max(axis=1)
        self.bad_B |= ~np.isfinite(self.highest_B)

    def _edit(self, logits_BV: np.ndarray, edited: list[int]) -> np.ndarray:
        self.bad_B[edited] = ~np.isfinite(logits_BV[edited].max(axis=1))
        copy_BV = logits_BV.copy()
        for b in edited:
            logits_V = torch.from_numpy(copy_BV[b])
            self.rows[b].edit(logits_V, self.positions[b])
            if not self.rows[b].bare:
                self.drawn.edited[self.part.start + b] = logits_V
        return copy_BV

    def write(self) -> None:
        """Write ids, badness, and each id's log-probability in the distribution it was drawn from."""
        chosen_B = self.logits_BV[np.arange(len(self.rows)), self.ids_B].astype(np.float64)
        logprobs_B = (chosen_B - self.highest_B) / self.temperature_B - self.log_total_B
        logprobs_B[self.bad_B] = np.nan
        self.drawn.ids_R.numpy()[self.part] = self.ids_B
        self.drawn.logprobs_R.numpy()[self.part] = logprobs_B
        self.drawn.bad_R.numpy()[self.part] = self.bad_B
