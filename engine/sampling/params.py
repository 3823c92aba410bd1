"""What one running sample asks of the sampler.

Owns the per-sample state of drawing: its seed, which logits are edited and how, the counts that
penalties need. Ignores batches and the drawing itself (`engine.sampling.sampler`), and whether the
values are sensible (`engine.sampling.check`).

Edits run in this order: bias, repetition, frequency, presence, then the mask of stop ids.
Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

import numpy as np
import torch

from engine.types import SamplingParams, Want

GREEDY_BELOW = 1e-5
"""Temperatures below this are argmax, exactly as 0 is."""


class _SeenTokens:
    """Distinct ids of a sample and how often each was produced; appended to, never rebuilt."""

    __slots__ = ("_counts", "_ids", "_place")

    def __init__(self) -> None:
        self._place: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)

    def add(self, token: int, count: int) -> None:
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = len(self._place)
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token
        self._counts[place] += count

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """ids int64 [N] and their float32 counts [N] in the output (0: only in the prompt)."""
        size = len(self._place)
        return self._ids[:size], self._counts[:size]

    def copy(self) -> _SeenTokens:
        twin = _SeenTokens()
        twin._place, twin._ids, twin._counts = self._place.copy(), self._ids.copy(), self._counts.copy()
        return twin


class RowSampling:
    """One sample's drawing state, living as long as the sample does.

    `seed` is the sample's final seed. `eos_ids` are the model's own end ids. `output_ids` are new
    tokens that exist already (a resumed sample). After each committed token call `observe`; it
    matters to penalties alone, everything else depends on the position.
    """

    __slots__ = (
        "_bias",
        "_seen",
        "_stops",
        "bare",
        "greedy",
        "may_edit",
        "params",
        "prompt_len",
        "seed",
        "stop_ids",
        "temperature",
        "truncates",
        "want",
    )

    def __init__(
        self,
        params: SamplingParams,
        want: Want,
        seed: int,
        prompt_ids: np.ndarray,
        eos_ids: Iterable[int] = (),
        output_ids: Iterable[int] = (),
    ) -> None:
        self.params = params
        self.want = want
        self.seed = seed
        self.prompt_len = len(prompt_ids)
        self.greedy = params.temperature < GREEDY_BELOW
        self.temperature = 1.0 if self.greedy else params.temperature
        self.truncates = not self.greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
        self._bias = _pairs(params.logit_bias)
        stops = set(params.stop_ids) | (set() if params.ignore_eos else set(eos_ids))
        self.stop_ids = frozenset(stops)
        self._stops = torch.tensor(sorted(stops), dtype=torch.int64)
        self._seen = self._seen_tokens(prompt_ids, output_ids)
        self.may_edit = self._bias is not None or self._seen is not None or (params.min_new > 0 and bool(stops))
        self.bare = self._needs_one_logprob()

    def _seen_tokens(self, prompt_ids: np.ndarray, output_ids: Iterable[int]) -> _SeenTokens | None:
        params = self.params
        if params.repetition_penalty == 1.0 and params.presence_penalty == params.frequency_penalty == 0.0:
            return None
        seen = _SeenTokens()
        if params.repetition_penalty != 1.0:
            for token in np.unique(prompt_ids).tolist():
                seen.add(token, 0)
        for token in output_ids:
            seen.add(int(token), 1)
        return seen

    def _needs_one_logprob(self) -> bool:
        """Whether the log-probability that drawing yields anyway is all that the caller wants."""
        want = self.want
        if want.extra_logprobs or want.top_logprobs or want.entropy:
            return False
        if self.greedy:
            return not self.may_edit
        if want.logprobs == "processed":
            return True
        untouched = not self.may_edit and not self.truncates
        return untouched and (want.logprobs == "temperature" or self.temperature == 1.0)

    @property
    def penalises(self) -> bool:
        """Whether tokens seen so far change what is drawn next."""
        return self._seen is not None

    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        """Distinct ids int64 [N] that penalties apply to, and how often each was produced."""
        assert self._seen is not None, "nothing counts this row's tokens"
        return self._seen.arrays()

    def observe(self, token: int) -> None:
        """Count a committed token."""
        if self._seen is not None:
            self._seen.add(token, 1)

    def ahead(self, tokens: Iterable[int]) -> RowSampling:
        """The row as it will be once these tokens are committed."""
        if self._seen is None:
            return self
        later = copy(self)
        later._seen = self._seen.copy()
        for token in tokens:
            later.observe(token)
        return later

    def edits_at(self, position: int) -> bool:
        """Whether the logits of the token at this sequence position are edited."""
        return self.may_edit and (
            self._bias is not None or self._seen is not None or position - self.prompt_len < self.params.min_new
        )

    def edit(self, logits_V: torch.Tensor, position: int) -> None:
        """Apply bias, penalties and the stop mask in place to the logits for `position`."""
        device = logits_V.device
        if self._bias is not None:
            ids_N, bias_N = self._bias
            ids_N = ids_N.to(device)
            logits_V[ids_N] = logits_V[ids_N] + bias_N.to(device)
        if self._seen is not None:
            ids_N, counts_N = (torch.from_numpy(part).to(device) for part in self._seen.arrays())
            logits_V[ids_N] = self._penalised(logits_V[ids_N], counts_N)
        if position - self.prompt_len < self.params.min_new:
            logits_V[self._stops.to(device)] = float("-inf")

    def _penalised(self, logits_N: torch.Tensor, counts_N: torch.Tensor) -> torch.Tensor:
        params = self.params
        if params.repetition_penalty != 1.0:
            penalty = params.repetition_penalty
            logits_N = torch.where(logits_N > 0, logits_N / penalty, logits_N * penalty)
        if params.frequency_penalty != 0.0:
            logits_N = logits_N - params.frequency_penalty * counts_N
        if params.presence_penalty != 0.0:
            logits_N = logits_N - params.presence_penalty * (counts_N > 0)
        return logits_N


def _pairs(bias: dict[int, float]) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not bias:
        return None
    return torch.tensor(list(bias), dtype=torch.int64), torch.tensor(list(bias.values()), dtype=torch.float32)
