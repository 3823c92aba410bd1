"""Latents and index keys whose layers are divided over ranks.

Owns who stores what, and how a step comes to read what others store. Every rank has the same page ids, so that
tree and allocator are those of one rank; of each page it holds the layers it owns. Latents and index keys of a
layer are owned apart, which lets the bytes come out even.

A step reads one layer after another from rows of its own (`StepLatents`): there the pages that its batch refers to
have ids from 1 on, those with tokens of former steps first. These are sent by their owner while the layer before is
computed; rows of the step's own tokens are gathered from all ranks, and the owner stores them. Ignores whose tokens
are computed where (`engine.runner.layer_split`).

Shapes: T tokens of the step and M of this rank (T = size * M), P pages sent, C numbers of a token's row, E of its
index key.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from engine.context_parallel import ContextParallel
from engine.errors import Unsupported
from engine.memory.kv_pool import KVPool
from engine.memory.latent_pool import LatentPool
from engine.models.shape import LayerSpec, ModelSpec


def balanced(sizes: Sequence[int], ranks: int) -> list[int]:
    """The owner of each: the largest first, each to the rank that has least, of equal ones to the lowest."""
    load, owners = [(0, rank) for rank in range(ranks)], [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        held, rank = load[0]
        heapq.heapreplace(load, (held + sizes[place], rank))
        owners[place] = rank
    return owners


def stored_numbers(spec: ModelSpec) -> list[int]:
    """What a token is in each layer, then its index key in each layer that chooses tokens itself."""
    assert spec.latent is not None, "the spec has latents"
    index = 0 if spec.latent.index is None else spec.latent.index.head_dim
    return [spec.latent.row] * spec.num_layers + [index for layer in spec.layers if layer.index == "own"]


@dataclass(frozen=True, slots=True)
class SplitBytes:
    """Of a token: what each rank stores, and what a step's rows take on every rank."""

    stored: tuple[int, ...]
    step: int

    @staticmethod
    def of(spec: ModelSpec, ranks: int, itemsize: int) -> SplitBytes:
        numbers, held = stored_numbers(spec), [0] * ranks
        for count, owner in zip(numbers, balanced(numbers, ranks), strict=True):
            held[owner] += count * itemsize
        step = 2 * numbers[0] + (numbers[-1] if len(numbers) > spec.num_layers else 0)
        return SplitBytes(tuple(held), step * itemsize)

    @property
    def most(self) -> int:
        """What a token takes on the rank that holds most: ranks have equally many pages."""
        return max(self.stored) + self.step


@dataclass(slots=True)
class Sent:
    """Bytes: pages of former steps and rows of the steps' own tokens, which every rank gets; and what went to owners
    and back in steps whose queries travelled."""

    pages: int = 0
    rows: int = 0
    queries: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class StepPages:
    """The pages of a step: `sent_P` those that hold tokens of former steps, in the order of the ids they have in the
    step, from 1 on. `slots_T` says where each token is stored and `step_slots_T` where the step reads it; tokens that
    fill up the ranks' shares have slot 0."""

    sent_P: torch.Tensor
    slots_T: torch.Tensor
    step_slots_T: torch.Tensor


class StepLatents(LatentPool):
    """The rows that a step reads: two layers' latents, one layer's index keys. Layers come in order. As many pages as
    the pool has, since a step may refer to all of them."""

    def __init__(self, spec: ModelSpec, stored: SplitLatents) -> None:
        index = "none" if spec.latent is None or spec.latent.index is None else "own"
        layers = LayerSpec(index=index), LayerSpec()
        super().__init__(
            replace(spec, layers=layers, num_layers=2), stored.num_pages, stored.page_size, stored.dtype, stored.device
        )
        self.sent = Sent()
        self._stored, self._ranks = stored, stored.ranks
        self._choosing = {layer for layer, each in enumerate(spec.layers) if each.index == "own"}
        self._count = spec.num_layers
        self._pages: StepPages | None = None
        self._coming: dict[str, dist.Work] = {}

    def tokens(self, layer: int) -> torch.Tensor:
        return super().tokens(layer % 2)

    def index_keys(self, layer: int) -> torch.Tensor:
        return KVPool.tokens(self, 2)

    def begin(self, pages: StepPages) -> None:
        """The next layer is the first one, of a step with these pages."""
        self._pages = pages
        for work in self._coming.values():  # of a step that was not finished
            work.wait()
        self._coming.clear()
        self._fetch(0)

    def write(self, layer: int, slots_T: torch.Tensor, kv_T2KH: torch.Tensor) -> None:
        """Take this rank's rows and make the layer whole; then the next one's pages are on their way."""
        self._wait("latents")
        self._gather(self.tokens(layer), kv_T2KH, self._stored.stored(layer))
        self._fetch(layer + 1)

    def write_index(self, layer: int, slots_T: torch.Tensor, key_TE: torch.Tensor) -> None:
        self._wait("index")
        self._gather(self.index_keys(layer), key_TE, self._stored.stored_index(layer))

    def fill(self, value: float) -> None:
        for rows in self._layers:
            rows.fill_(value)
        self.generation += 1

    def _gather(self, rows: torch.Tensor, mine_MX: torch.Tensor, stored: torch.Tensor | None) -> None:
        assert self._pages is not None, "begin comes before layers"
        rows_TX = self._ranks.gather(mine_MX)
        self.sent.rows += rows_TX.nbytes
        rows.index_copy_(0, self._pages.step_slots_T, rows_TX)
        if stored is not None:
            stored.index_copy_(0, self._pages.slots_T, rows_TX)

    def _fetch(self, layer: int) -> None:
        """The keys of the layer before have been used, and the latents of the one before that."""
        if layer == self._count:
            return
        stored = self._stored
        self._send("latents", self.tokens(layer), stored.stored(layer), stored.owner(layer))
        if layer in self._choosing:
            self._send("index", self.index_keys(layer), stored.stored_index(layer), stored.index_owner(layer))

    def _send(self, what: str, rows: torch.Tensor, stored: torch.Tensor | None, owner: int) -> None:
        assert self._pages is not None, "begin comes before layers"
        sent_P, size = self._pages.sent_P, self.page_size
        if not len(sent_P):
            return
        target = rows[size : (len(sent_P) + 1) * size]
        if stored is not None:
            paged = target.view(-1, size, *target.shape[1:])
            torch.index_select(stored.view(-1, *paged.shape[1:]), 0, sent_P, out=paged)
        self.sent.pages += target.nbytes
        work = self._ranks.send(target, owner)
        if work is not None:
            self._coming[what] = work

    def _wait(self, what: str) -> None:
        work = self._coming.pop(what, None)
        if work is not None:
            work.wait()


class SplitLatents(LatentPool):
    """One rank's part: rows of other ranks' layers have no numbers. `step` is what attention reads."""

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        ranks: ContextParallel,
    ) -> None:
        self.ranks = ranks
        numbers = stored_numbers(spec)
        if len(numbers) < ranks.size:
            raise Unsupported(field="ranks", expected=f"at most {len(numbers)}, one for a layer", actual=ranks.size)
        self._owners = balanced(numbers, ranks.size)
        super().__init__(spec, num_pages, page_size, dtype, device)
        self.copied: list[int] = []
        """Sources and targets of pages copied since this was last cleared."""
        self.step = StepLatents(spec, self)

    def _rows(self, spec: ModelSpec) -> list[tuple[int, ...]]:
        rows = super()._rows(spec)
        return [row if owner == self.ranks.rank else (0,) for row, owner in zip(rows, self._owners, strict=True)]

    def owner(self, layer: int) -> int:
        return self._owners[layer]

    def index_owner(self, layer: int) -> int:
        return self._owners[self._index_of[layer]]

    def stored(self, layer: int) -> torch.Tensor | None:
        """Rows by write slot, None where another rank has them."""
        return self.tokens(layer) if self._owners[layer] == self.ranks.rank else None

    def stored_index(self, layer: int) -> torch.Tensor | None:
        return self.stored(self._index_of[layer])

    def pages(self, windowed: bool = False) -> list[torch.Tensor]:
        """Of what this rank stores."""
        mine = [place for place, owner in enumerate(self._owners) if owner == self.ranks.rank]
        return [] if windowed else [self._paged(place) for place in mine]

    def copy_pages(self, sources: list[int], targets: list[int], windowed: bool = False) -> None:
        super().copy_pages(sources, targets, windowed)
        self.copied += [*sources, *targets]

    @property
    def bytes(self) -> int:
        return super().bytes + self.step.bytes

    def fill(self, value: float) -> None:
        super().fill(value)
        self.step.fill(value)

    def release(self) -> None:
        super().release()
        self.step.release()

    def restore(self) -> None:
        super().restore()
        self.step.restore()
