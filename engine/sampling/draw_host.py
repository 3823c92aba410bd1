"""Drawing on the host.

Owns the fast path for logits in CPU memory: bands of rows that stay in cache, one exponential per
logit, and logarithms only for the few ids that can win. Ignores the columns beyond the processed
log-probability.

Since E = -log(1 - u) >= u, a weight w = exp((l - max) / T) divided by u bounds w / E from above.
Only ids whose bound reaches the value of the best-bounded id can win the race; those are compared
in float64. Shapes: R rows, B rows of a band, V vocabulary, N kept ids.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import numpy as np
import torch

from engine.sampling.draw import Drawn
from engine.sampling.noise import WORD_SCALE, HostNoise, exponential, exponentials
from engine.sampling.params import RowSampling
from engine.sampling.seeds import NoiseKey
from engine.sampling.truncate import kept_ids

_BAND_ELEMENTS = 1 << 16
_SLACK = 1.0 - 1e-5
"""Covers the rounding of the float32 bounds many times over."""


class _Columns:
    """Parameters of a set of rows as arrays, made once and kept while the set stays."""

    def __init__(self, rows: Sequence[RowSampling]) -> None:
        self.rows = list(rows)
        self.temperature_R = np.array([row.temperature for row in rows], dtype=np.float64)
        self.scale_R1 = (1.0 / self.temperature_R).astype(np.float32)[:, None]
        self.may_edit = any(row.may_edit for row in rows)
        self.may_scale = any(row.temperature != 1.0 for row in rows)

    def fits(self, rows: Sequence[RowSampling]) -> bool:
        return len(rows) == len(self.rows) and all(map(operator.is_, rows, self.rows))


class HostDraw:
    """Draws from CPU logits on the calling thread. Not shared between threads."""

    def __init__(self, vocab_size: int) -> None:
        self._band_rows = max(1, _BAND_ELEMENTS // vocab_size)
        self._weights = np.empty((self._band_rows, vocab_size), dtype=np.float32)
        self._divisors = np.ones((self._band_rows, vocab_size), dtype=np.float32)
        self._noise = HostNoise()
        self._columns = _Columns([])

    def draw(self, logits_RV: torch.Tensor, rows: Sequence[RowSampling], positions: Sequence[int]) -> Drawn:
        if not self._columns.fits(rows):
            self._columns = _Columns(rows)
        work = _Work(self._columns, positions)
        logits = logits_RV.detach().numpy()
        with np.errstate(all="ignore"):
            for start in range(0, len(rows), self._band_rows):
                self._draw_band(work, start, logits[start : start + self._band_rows])
            return work.finish()

    def _draw_band(self, work: _Work, start: int, logits_BV: np.ndarray) -> None:
        part = slice(start, start + len(logits_BV))
        if work.columns.may_edit:
            logits_BV = work.edit(start, logits_BV)
        highest_B = logits_BV.max(axis=1, out=work.highest_R[part])
        weights_BV = self._weights[: len(logits_BV)]
        np.subtract(logits_BV, highest_B[:, None], out=weights_BV)
        if work.columns.may_scale:
            np.multiply(weights_BV, work.columns.scale_R1[part], out=weights_BV)
        weights = torch.from_numpy(weights_BV)
        torch.exp(weights, out=weights)
        weights_BV.sum(axis=1, out=work.total_R[part])
        whole: list[int] = []
        for b, highest in enumerate(highest_B.tolist()):
            r, row = start + b, work.columns.rows[start + b]
            if not math.isfinite(highest) or work.bad_R[r]:
                work.bad_R[r] = True
            elif row.greedy:
                work.choose(r, int(logits_BV[b].argmax()), logits_BV[b])
            elif row.truncates:
                work.choose(r, self._draw_kept(work, r, logits_BV[b], weights_BV[b]), logits_BV[b])
            else:
                whole.append(b)
        if whole:
            self._race(work, start, whole, logits_BV, weights_BV)

    def _draw_kept(self, work: _Work, r: int, logits_V: np.ndarray, weights_V: np.ndarray) -> int:
        """The token of a row that top-k, top-p or min-p cut down."""
        row = work.columns.rows[r]
        ids_N, work.total_R[r] = kept_ids(weights_V, logits_V, 1.0 / row.temperature, row.params)
        noise_N = exponentials(self._noise.words_at(NoiseKey(row.seed, work.positions[r]), ids_N))
        score_N = logits_V[ids_N].astype(np.float64) / row.temperature - np.log(noise_N)
        if not row.bare:
            work.kept[r] = torch.from_numpy(ids_N)
        return int(ids_N[score_N.argmax()])

    def _race(self, work: _Work, start: int, whole: list[int], logits_BV: np.ndarray, weights_BV: np.ndarray) -> None:
        """Draw the rows whose whole vocabulary takes part; weights become bounds.

        Scalars are Python floats, which are float64 and, a few at a time, quicker than arrays.
        """
        vocab_size, rows = logits_BV.shape[1], work.columns.rows
        divisors_BV = self._divisors[: len(logits_BV)]
        words: dict[int, np.ndarray] = {}
        for b in whole:
            words[b] = self._noise.words(NoiseKey(rows[start + b].seed, work.positions[start + b]), vocab_size)
            np.copyto(divisors_BV[b], words[b], casting="unsafe")
        bounds_BV = np.divide(weights_BV, divisors_BV, out=weights_BV)
        leaders = bounds_BV.argmax(axis=1).tolist()
        highest = work.highest_R[start : start + len(logits_BV)].tolist()
        reached_B1 = np.full((len(logits_BV), 1), np.inf, dtype=np.float32)
        for b in whole:
            below = float(logits_BV[b, leaders[b]]) - highest[b]
            noise = exponential(int(words[b][leaders[b]])) / (WORD_SCALE * _SLACK)
            reached_B1[b, 0] = math.exp(below / rows[start + b].temperature) / noise
        best: dict[int, tuple[float, int]] = {b: (-math.inf, 0) for b in whole}
        for place in np.flatnonzero(bounds_BV >= reached_B1).tolist():
            b, token = divmod(place, vocab_size)
            if b in words:
                noise = exponential(int(words[b][token]))
                score = float(logits_BV[b, token]) / rows[start + b].temperature - math.log(noise)
                if score > best[b][0]:
                    best[b] = (score, token)
        for b, (_, token) in best.items():
            work.choose(start + b, token, logits_BV[b])


class _Work:
    """One call's rows: what is known of them so far."""

    def __init__(self, columns: _Columns, positions: Sequence[int]) -> None:
        count = len(columns.rows)
        self.columns = columns
        self.positions = positions
        self.ids_R = np.zeros(count, dtype=np.int64)
        self.highest_R = np.empty(count, dtype=np.float32)
        self.chosen_R = np.empty(count, dtype=np.float32)
        self.total_R = np.empty(count, dtype=np.float32)
        self.bad_R = np.zeros(count, dtype=bool)
        self.edited: dict[int, torch.Tensor] = {}
        self.kept: dict[int, torch.Tensor] = {}

    def edit(self, start: int, logits_BV: np.ndarray) -> np.ndarray:
        """The band with edits applied: itself if there are none, else a copy."""
        rows, positions = self.columns.rows, self.positions
        members = [b for b in range(len(logits_BV)) if rows[start + b].edits_at(positions[start + b])]
        if not members:
            return logits_BV
        for b in members:
            self.bad_R[start + b] = not math.isfinite(logits_BV[b].max())
        copy_BV = logits_BV.copy()
        for b in members:
            r, logits_V = start + b, torch.from_numpy(copy_BV[b])
            rows[r].edit(logits_V, positions[r])
            if not rows[r].bare:
                self.edited[r] = logits_V
        return copy_BV

    def choose(self, r: int, token: int, logits_V: np.ndarray) -> None:
        self.ids_R[r], self.chosen_R[r] = token, logits_V[token]

    def finish(self) -> Drawn:
        """The record, with each id's log-probability in the distribution it was drawn from."""
        above_R = (self.chosen_R.astype(np.float64) - self.highest_R) / self.columns.temperature_R
        logprobs_R = (above_R - np.log(self.total_R, dtype=np.float64)).astype(np.float32)
        logprobs_R[self.bad_R] = np.nan
        ids, logprobs, bad = map(torch.from_numpy, (self.ids_R, logprobs_R, self.bad_R))
        return Drawn(ids, logprobs, bad, self.edited, self.kept)
