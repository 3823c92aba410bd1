"""Rings of raw inputs: how a state that cannot be rewound takes drafts.

Owns what rows that verify drafts feed their recurrences, token by token, until it is known how many tokens
are kept, and which ring is whose. The state stays as it was before all of them, so that a rejected draft needs
nothing undone, and kept ones are replayed into it. A ring is lent to a running request from the verification
of its drafts to the end of that step. Ignores what inputs mean (`engine.layers.replay`) and which states the
cache wants (`engine.scheduler.states`). Ring 0 is scratch, as slot 0 is.

Shapes: R rings, C tokens of a ring, I inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.memory.slab import SlabTensors
from engine.models.shape import ModelSpec


@dataclass(frozen=True, slots=True)
class ReplayLayout:
    """`rings` rings of `tokens` tokens and one of scratch. `widths` says how many numbers each recurrent layer
    reads of a token beside its state, by the layer's index: the outputs of its `in_proj`."""

    widths: Mapping[int, int]
    dtype: torch.dtype
    rings: int
    tokens: int

    @staticmethod
    def of(spec: ModelSpec, dtype: torch.dtype, rings: int, drafts: int) -> ReplayLayout:
        """For rows that verify up to `drafts` drafts behind their newest token."""
        mixers = {i: layer.mixer for i, layer in enumerate(spec.layers) if layer.mixer is not None}
        widths = {i: sum(mixer.inputs(spec.hidden).values()) for i, mixer in mixers.items()}
        return ReplayLayout(widths, dtype, rings, 1 + drafts)

    @property
    def ring_bytes(self) -> int:
        return self.tokens * sum(self.widths.values()) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return (self.rings + 1) * self.ring_bytes


class Run(NamedTuple):
    """Tokens [first, last) of a ring, of the request whose state is in `slot`."""

    slot: int
    ring: int
    first: int
    last: int


@dataclass(slots=True)
class _Span:
    """Tokens `start` to `start + count` of a request are in `ring`, and the first `folded` of them in its state
    too."""

    ring: int
    start: int
    count: int
    folded: int = 0


class ReplayRings:
    """`layer(i)` are the inputs [R, C, I] of model layer i."""

    def __init__(self, layout: ReplayLayout, device: torch.device | str) -> None:
        self.layout = layout
        kinds = [((layout.rings + 1, layout.tokens, width), layout.dtype) for width in layout.widths.values()]
        self._memory = SlabTensors(kinds, device, "rings")
        self._layers = dict(zip(layout.widths, self._memory.tensors, strict=True))
        self._free = list(range(layout.rings, 0, -1))
        self._spans: dict[int, _Span] = {}

    @property
    def bytes(self) -> int:
        """Bytes held now; 0 while released."""
        return self._memory.bytes

    @property
    def released(self) -> bool:
        return self._memory.released

    def release(self) -> None:
        """Give the memory back, when no state waits for tokens. Idempotent."""
        assert not self._spans, f"states in slots {list(self._spans)} wait for tokens"
        self._memory.release()

    def restore(self) -> None:
        """Take memory again, zeros, at the same addresses. Idempotent."""
        self._memory.restore()

    def fill(self, value: float) -> None:
        for inputs_RCI in self._memory.tensors:
            inputs_RCI.fill_(value)

    def layer(self, index: int) -> torch.Tensor:
        return self._layers[index]

    def open(self, slot: int, start: int, count: int) -> int:
        """A ring for tokens `start` to `start + count` of the request whose state, that after `start` tokens, is
        in `slot`."""
        assert count <= self.layout.tokens, f"{count} tokens for rings of {self.layout.tokens}"
        if slot == 0:
            return 0
        assert slot not in self._spans, f"the state in slot {slot} waits for tokens"
        assert self._free, f"more than {self.layout.rings} rows verify drafts"
        self._spans[slot] = _Span(self._free.pop(), start, count)
        return self._spans[slot].ring

    def waiting(self) -> list[int]:
        """Slots whose states wait for tokens."""
        return list(self._spans)

    def reached(self, slot: int) -> int | None:
        """After how many tokens the state in a slot that waits is; None for one that does not."""
        span = self._spans.get(slot)
        return None if span is None else span.start + span.folded

    def runs(self, lengths: Mapping[int, int]) -> list[Run]:
        """What to replay so that the states in these slots become those after so many tokens."""
        runs = []
        for slot, length in lengths.items():
            span = self._spans[slot]
            last = length - span.start
            assert span.folded <= last <= span.count, f"no token {length} in the ring of slot {slot}: {span}"
            if last > span.folded:
                runs.append(Run(slot, span.ring, span.folded, last))
        return runs

    def advance(self, lengths: Mapping[int, int]) -> list[Run]:
        """As `runs`; from now on the states are those."""
        runs = self.runs(lengths)
        for run in runs:
            self._spans[run.slot].folded = run.last
        return runs

    def close(self, slot: int) -> None:
        """What the slot's ring still holds has been rejected, or is of no use to anybody."""
        span = self._spans.pop(slot, None)
        if span is not None:
            self._free.append(span.ring)

    def check(self) -> None:
        assert not self._spans, f"states in slots {list(self._spans)} wait for tokens between steps"
        assert sorted(self._free) == list(range(1, self.layout.rings + 1)), "a ring is lost or free twice"
