"""What the target knew at every token, taken while it scores.

Owns running whole sequences through an engine's runner with captured layers, in as many pieces as its
prompt budget asks for, over pages it borrows and gives back. The states are those that serving would
commit to the drafter: same runner, same kernels, same rounding. Ignores sampling.

The engine must be idle: both use the same pages in the same thread.

Shapes: T tokens, M captured layers, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.build import Parts
from engine.config import number
from engine.errors import InvalidRequest, TooLarge
from engine.memory.allocator import PRIVATE
from engine.memory.transfer import send_together
from engine.scheduler.windows import refuse_windows
from engine.weights.digest import model_digest
from trainer_bridge.drafter.examples import DraftExample

_ROW_KEYS = -1024
"""Row keys count down from here: requests of the engine count up, padding is -1."""


@dataclass(frozen=True, slots=True, eq=False)
class FeatureExample:
    """`features_TMD` are the captured layers' outputs, `last_TD` the final normed state (None where only the
    data's tokens are learnt from). `anchor_weights_T` favours anchors; uniform where None."""

    example: DraftExample
    features_TMD: torch.Tensor
    last_TD: torch.Tensor | None
    anchor_weights_T: np.ndarray | None = None


class FeatureScorer:
    """`layers` are those a drafter captures. Results lie on the target's device in its dtype."""

    def __init__(self, parts: Parts, layers: Sequence[int]) -> None:
        refuse_windows(parts.pages, "features of an engine")
        highest = parts.model.spec.num_layers - 2
        if not layers or any(not 0 <= layer <= highest for layer in layers):
            raise InvalidRequest(field="layers", expected=f"target layers in [0, {highest}]", actual=list(layers))
        self.layers = tuple(layers)
        self._parts = parts
        self._budget = number(parts.config.scheduler.prefill_tokens)
        self._key = _ROW_KEYS

    def digest(self) -> str:
        """Of the target's weights: features hold for these alone."""
        return model_digest(self._parts.model)

    def free_bytes(self) -> int | None:
        """What is free where the states will lie; None in host memory."""
        device = self._parts.device
        if device.type != "cuda":
            return None
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused

    def score(self, examples: Sequence[DraftExample]) -> list[FeatureExample]:
        """In order. Raises `TooLarge` for a sequence that the engine could not serve."""
        results: list[FeatureExample] = []
        for group in self._groups(examples):
            results += self._score(group)
        return results

    def _groups(self, examples: Sequence[DraftExample]) -> Iterator[list[DraftExample]]:
        """As many examples as one step's budget holds, at least one."""
        chosen: list[DraftExample] = []
        for example in examples:
            limits = self._parts.limits
            longest = min(limits.context_len, limits.pool_tokens)
            if not 0 < example.num_tokens <= longest:
                raise TooLarge(field=example.key, expected=f"1 to {longest} tokens", actual=example.num_tokens)
            if chosen and sum(e.num_tokens for e in chosen) + example.num_tokens > self._budget:
                yield chosen
                chosen = []
            chosen.append(example)
        if chosen:
            yield chosen

    def _score(self, examples: list[DraftExample]) -> list[FeatureExample]:
        pages, allocator = self._parts.pages, self._parts.pages.allocator
        counts = [pages.pages_for(example.num_tokens) for example in examples]
        taken = allocator.alloc(sum(counts))
        if taken is None:
            self._parts.cache.flush("all")
            taken = allocator.alloc(sum(counts))
        if taken is None:
            raise TooLarge(field="cache.kv_tokens", expected=f"{sum(counts)} free pages", actual=allocator.num_free)
        try:
            tables_BP = np.zeros((len(examples), max(counts)), np.int32)
            for row, part in enumerate(np.split(taken, np.cumsum(counts)[:-1])):
                tables_BP[row, : len(part)] = part
            return self._run(examples, torch.from_numpy(tables_BP).to(self._parts.device))
        finally:
            allocator.free(taken, PRIVATE)

    def _run(self, examples: list[DraftExample], tables_BP: torch.Tensor) -> list[FeatureExample]:
        self._key -= len(examples)
        features, lasts = [], []
        for rows, starts, counts in _pieces([example.num_tokens for example in examples], self._budget):
            batch = self._batch(examples, tables_BP, rows, starts, counts)
            capture = {layer: torch.empty(0) for layer in self.layers}
            # Copies are made outside inference mode, so that autograd may save them.
            lasts.append(self._parts.runner.hidden(batch, capture).clone())
            features.append(torch.stack([capture[layer] for layer in self.layers], dim=1))
        features_TMD, last_TD = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (features, lasts))
        lengths = [example.num_tokens for example in examples]
        parts = zip(examples, features_TMD.split(lengths), last_TD.split(lengths), strict=True)
        return [FeatureExample(example, own_TMD, own_TD) for example, own_TMD, own_TD in parts]

    def _batch(
        self,
        examples: list[DraftExample],
        tables_BP: torch.Tensor,
        rows: list[int],
        starts: list[int],
        counts: list[int],
    ) -> ForwardBatch:
        device, page = self._parts.device, self._parts.pages.page_size
        spans = list(zip(rows, starts, counts, strict=True))
        ids = np.concatenate([examples[row].ids[start : start + count] for row, start, count in spans])
        positions = np.concatenate([np.arange(start, start + count) for _, start, count in spans])
        rows_B, rows_T, ids_T, positions_T = send_together(
            (np.array(rows), np.repeat(rows, counts), ids, positions), device
        )
        return ForwardBatch(
            input_ids_T=ids_T,
            positions_T=positions_T,
            write_slots_T=tables_BP[rows_T, positions_T // page].long() * page + positions_T % page,
            query_lens=counts,
            seq_lens=[start + count for _, start, count in spans],
            page_tables_BP=tables_BP[rows_B].contiguous(),
            row_keys=[self._key + row for row in rows],
            num_decode=0,
            logit_rows_R=torch.empty(0, dtype=torch.int64, device=device),
        )


def _pieces(lengths: list[int], budget: int) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """(rows, starts, counts) of each forward pass: tokens in order, at most `budget` of them."""
    rows: list[int] = []
    starts: list[int] = []
    counts: list[int] = []
    for row, length in enumerate(lengths):
        start = 0
        while start < length:
            count = min(length - start, budget - sum(counts))
            if count:
                rows.append(row)
                starts.append(start)
                counts.append(count)
                start += count
            if sum(counts) == budget:
                yield rows, starts, counts
                rows, starts, counts = [], [], []
    if rows:
        yield rows, starts, counts
