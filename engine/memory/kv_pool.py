"""Storage for keys and values, in pages.

Owns the tensors. Ignores who holds which page: page 0 is scratch that padding may write and
nobody owns, every other page belongs to whom the scheduler says. Windowed layers may have fewer pages,
under ids of their own.

Shapes: N pages, S tokens a page, K key/value heads, H head size.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.errors import Paused
from engine.memory.slab import SlabTensors
from engine.memory.transfer import send_together
from engine.models.spec import ModelSpec
from engine.parallel import SINGLE, TensorParallel


class KVPool:
    """Keys and values of one token lie next to each other, so that one copy writes both. All layers
    are parts of one slab, and keep their addresses when released memory comes back.

    `generation` rises whenever contents change other than by writing tokens; whoever keeps
    copies of rows must drop them then. With `window_pages`, scratch included, the layers that have a window
    hold that many pages and no more.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        parallel: TensorParallel = SINGLE,
        window_pages: int | None = None,
    ) -> None:
        assert num_pages > 1 and page_size > 0, f"a pool of {num_pages} pages of {page_size} holds nothing"
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_layers = spec.num_layers
        self.num_kv_heads = parallel.share(spec.num_kv_heads, "num_key_value_heads")
        self.head_dim = spec.head_dim
        self.dtype = dtype
        self.device = torch.device(device)
        self.generation = 0
        self.window_pages = window_pages
        self._windowed = [window_pages is not None and layer.window is not None for layer in spec.layers]
        rows = self._rows(spec)
        self._windowed += [False] * (len(rows) - len(self._windowed))
        pages = [window_pages if windowed else num_pages for windowed in self._windowed]
        shapes = [((count or 0) * page_size, *row) for count, row in zip(pages, rows, strict=True)]
        # Masked keys still meet a product with zero: what nobody wrote must not be NaN.
        self._memory = SlabTensors([(shape, dtype) for shape in shapes], self.device, "kv")
        self._layers = self._memory.tensors
        self.token_bytes = sum(torch.Size(row).numel() for row in rows) * dtype.itemsize
        """Bytes of one token over all layers."""

    def _rows(self, spec: ModelSpec) -> list[tuple[int, ...]]:
        """What a token is stored as: a row in each layer, and what else lives under its page ids."""
        rows: list[tuple[int, ...]] = [(2 * self.num_kv_heads, self.head_dim)] * spec.num_layers
        return [*rows, (spec.beside,)] if spec.beside else rows

    @property
    def bytes(self) -> int:
        """Bytes held now; 0 while released."""
        return self._memory.bytes

    def windowed(self, layer: int) -> bool:
        """Whether a layer's pages are those of windows."""
        return self._windowed[layer]

    @property
    def released(self) -> bool:
        return self._memory.released

    def tokens(self, layer: int) -> torch.Tensor:
        """View [N * S, 2K, H] of a layer by write slot: K key heads, then K value heads."""
        if self._memory.released:
            raise Paused("the key/value pool is released; resume memory first")
        return self._layers[layer]

    @property
    def beside(self) -> torch.Tensor:
        """View [N * S, ...] of what lies beside keys and values, by write slot."""
        return self.tokens(self.num_layers)

    def k(self, layer: int) -> torch.Tensor:
        """View [N, S, K, H]."""
        return self._paged(layer)[:, :, : self.num_kv_heads]

    def v(self, layer: int) -> torch.Tensor:
        """View [N, S, K, H]."""
        return self._paged(layer)[:, :, self.num_kv_heads :]

    def pages(self, windowed: bool = False) -> list[torch.Tensor]:
        """Views [N, S, ...] of all that lies under one kind of page ids: those of windows, or the others."""
        return [self._paged(layer) for layer, own in enumerate(self._windowed) if own == windowed]

    def _paged(self, layer: int) -> torch.Tensor:
        tokens = self.tokens(layer)
        return tokens.view(-1, self.page_size, *tokens.shape[1:])

    def write(self, layer: int, slots_T: torch.Tensor, kv_T2KH: torch.Tensor) -> None:
        """Store tokens' keys and values, packed as `pack` returns them."""
        self.tokens(layer).index_copy_(0, slots_T, kv_T2KH)

    def copy_pages(self, sources: list[int], targets: list[int], windowed: bool = False) -> None:
        """Copy whole pages, in every layer that has these ids: those of windows, or the others. `targets` are
        distinct and disjoint from `sources`."""
        assert len(sources) == len(targets), f"{len(sources)} sources for {len(targets)} targets"
        if not sources:
            return
        source, target = send_together([np.array(sources), np.array(targets)], self.device)
        for paged in self.pages(windowed):
            paged.index_copy_(0, target, paged.index_select(0, source))

    def fill(self, value: float) -> None:
        """Set every element, scratch included: tests poison what nobody has written."""
        for layer in range(len(self._layers)):
            self.tokens(layer).fill_(value)
        self.generation += 1

    def release(self) -> None:
        """Give the memory back. Idempotent; reading or writing raises `Paused` until `restore`."""
        self._memory.release()
        self.generation += 1

    def restore(self) -> None:
        """Take memory again, empty, at the same addresses. Idempotent."""
        if self.released:
            self._memory.restore()
            self.generation += 1


def pack(k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
    """Keys and values as one kv_T2KH: a view where the values follow the keys in memory, as they
    do in the output of a fused projection, and a copy elsewhere."""
    strides = k_TKH.stride()
    tokens, heads, size = k_TKH.shape
    follows = v_TKH.data_ptr() == k_TKH.data_ptr() + heads * size * k_TKH.itemsize
    if follows and v_TKH.stride() == strides and strides[0] >= 2 * heads * size and strides[1:] == (size, 1):
        return k_TKH.as_strided((tokens, 2 * heads, size), strides)
    return torch.cat((k_TKH, v_TKH), dim=1)
