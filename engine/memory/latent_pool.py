"""Storage for latents and index keys, in pages.

Owns what a token is stored as in models of latent attention: a row of numbers in each layer and, in layers
that choose tokens by an index of their own, an index key. Both lie under the same page ids, so that a page
that is shared, copied or freed takes its index keys along, and neither tree nor allocator knows of them.

Shapes: N pages, S tokens a page, C numbers of a token's row, E of its index key.
"""

from __future__ import annotations

import torch

from engine.memory.kv_pool import KVPool
from engine.models.shape import ModelSpec
from engine.parallel import SINGLE, TensorParallel


class LatentPool(KVPool):
    """`tokens(layer)` are rows [N * S, C]: the latent, then the rotated key."""

    def _rows(self, spec: ModelSpec) -> list[tuple[int, ...]]:
        latent = spec.latent
        assert latent is not None, "the spec has latents"
        owners = [layer for layer, each in enumerate(spec.layers) if each.index == "own"]
        self._index_of = {layer: spec.num_layers + place for place, layer in enumerate(owners)}
        rows: list[tuple[int, ...]] = [(latent.row,)] * spec.num_layers
        return rows + [(latent.index.head_dim,) for _ in owners if latent.index is not None]

    def index_keys(self, layer: int) -> torch.Tensor:
        """View [N * S, E] of a layer that chooses tokens itself."""
        return self.tokens(self._index_of[layer])

    def write_index(self, layer: int, slots_T: torch.Tensor, key_TE: torch.Tensor) -> None:
        self.index_keys(layer).index_copy_(0, slots_T, key_TE)


def make_pool(
    spec: ModelSpec,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    parallel: TensorParallel = SINGLE,
    window_pages: int | None = None,
) -> KVPool:
    """The pool of a model's attending layers, scratch page included."""
    kind = KVPool if spec.latent is None else LatentPool
    return kind(spec, num_pages, page_size, dtype, device, parallel, window_pages)
