"""An adapter as one run of numbers, laid out as kernels read it.

Owns the layout: for every adapted site the first factors of its parts stacked, then the second ones,
ranks padded with zeros at the tail to a bucket. Ignores where the run is kept. Only a rank's own part
of split sites is packed.

Shapes: G parts, R padded rank, K inputs, N outputs of all parts, on this rank; V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from lora.config import BUCKETS
from lora.errors import InvalidAdapter
from lora.factors import AdapterWeights, Factors
from lora.geometry import MAX_PARTS, Geometry, Kind, Split

ALIGNMENT = 64
"""Elements between the starts of factors: whole cache lines."""


@dataclass(frozen=True, slots=True)
class SiteLayout:
    """Where a site's factors lie within the run.

    a is [G, R, K], for an embedding [V, R]; b is [N, R], the parts' rows in order. `rank` is R, or 0 where
    nothing is adapted. A part's bias is a column of b whose input is always one: `ones` has its index,
    or -1.
    """

    rank: int = 0
    a: int = 0
    b: int = 0
    scales: tuple[float, ...] = (0.0,) * MAX_PARTS
    ones: tuple[int, ...] = (-1,) * MAX_PARTS


@dataclass(frozen=True, slots=True)
class Packed:
    """`values_U` in the pool's dtype on the host; `sites` by site index."""

    values_U: torch.Tensor
    sites: tuple[SiteLayout, ...]

    @property
    def num_bytes(self) -> int:
        return self.values_U.nbytes

    @property
    def biased(self) -> bool:
        return any(one >= 0 for site in self.sites for one in site.ones)


def bucket(rank: int) -> int:
    """The padded rank. A bias takes one of the ranks."""
    if rank > BUCKETS[-1]:
        raise InvalidAdapter("r", f"at most {BUCKETS[-1]}, a bias included", rank)
    return next(size for size in BUCKETS if size >= rank)


def pack(weights: AdapterWeights, geometry: Geometry, dtype: torch.dtype, pinned: bool = False) -> Packed:
    """One fresh host tensor with this rank's part of the adapter."""
    layouts, end = [], 0
    chosen = _by_site(weights, geometry)
    for index, site in enumerate(geometry.sites):
        parts = chosen.get(index, {})
        if not parts:
            layouts.append(SiteLayout())
            continue
        rank = bucket(max(f.rank + (f.bias_N is not None) for f in parts.values()))
        copies = 1 if site.kind is Kind.EMBEDDING else len(site.parts)
        a, b = end, _aligned(end + copies * rank * geometry.inputs(index))
        end = _aligned(b + sum(geometry.widths(index)) * rank)
        scales, ones = [0.0] * MAX_PARTS, [-1] * MAX_PARTS
        for place, factors in parts.items():
            scales[place] = factors.scale
            ones[place] = -1 if factors.bias_N is None else factors.rank
        layouts.append(SiteLayout(rank, a, b, tuple(scales), tuple(ones)))
    values_U = torch.zeros(end, dtype=dtype, pin_memory=pinned)
    packed = Packed(values_U, tuple(layouts))
    for index, parts in chosen.items():
        for place, factors in parts.items():
            _fill(packed, geometry, index, place, factors)
    if not bool(torch.isfinite(values_U).all()):
        raise InvalidAdapter("tensors", f"values within the range of {dtype}", "one that overflows")
    return packed


def room_for(geometry: Geometry, rank: int, dtype: torch.dtype) -> int:
    """Bytes that an adapter of this rank on all linear modules takes."""
    elements = 0
    for index, site in enumerate(geometry.sites):
        if site.kind is Kind.LINEAR:
            widths = geometry.widths(index)
            elements += _aligned(len(widths) * bucket(rank) * geometry.inputs(index))
            elements += _aligned(sum(widths) * bucket(rank))
    return elements * dtype.itemsize


def views(
    values_U: torch.Tensor, layout: SiteLayout, geometry: Geometry, index: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The parts' factors a_RK (an embedding's as [R, V], transposed) and b_NR, as views of a run."""
    rank, inputs, widths = layout.rank, geometry.inputs(index), geometry.widths(index)
    b_NR = values_U[layout.b : layout.b + sum(widths) * rank].view(-1, rank)
    if geometry.sites[index].kind is Kind.EMBEDDING:
        firsts = [values_U[layout.a : layout.a + inputs * rank].view(inputs, rank).t()]
    else:
        a_GRK = values_U[layout.a : layout.a + len(widths) * rank * inputs].view(len(widths), rank, inputs)
        firsts = list(a_GRK.unbind(0))
    return firsts, list(b_NR.split(list(widths)))


def _fill(packed: Packed, geometry: Geometry, index: int, place: int, factors: Factors) -> None:
    firsts, seconds = views(packed.values_U, packed.sites[index], geometry, index)
    split, rank = geometry.sites[index].split, factors.rank
    firsts[place][:rank] = _share(factors.a_RK, 1, geometry) if split is Split.INPUTS else factors.a_RK
    outputs = split is Split.OUTPUTS
    seconds[place][:, :rank] = _share(factors.b_NR, 0, geometry) if outputs else factors.b_NR
    if factors.bias_N is not None and not (split is Split.INPUTS and geometry.rank > 0):
        # Partial sums are reduced over ranks: one of them brings the bias.
        seconds[place][:, rank] = _share(factors.bias_N, 0, geometry) if outputs else factors.bias_N


def _share(tensor: torch.Tensor, dim: int, geometry: Geometry) -> torch.Tensor:
    width = tensor.shape[dim] // geometry.size
    return tensor.narrow(dim, geometry.rank * width, width)


def _by_site(weights: AdapterWeights, geometry: Geometry) -> dict[int, dict[int, Factors]]:
    chosen: dict[int, dict[int, Factors]] = {}
    for module, factors in weights.modules.items():
        index, place = geometry.places[module]
        chosen.setdefault(index, {})[place] = factors
    return chosen


def _aligned(elements: int) -> int:
    return int(-(-elements // ALIGNMENT) * ALIGNMENT)


def table_rows(packed: Packed, start: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What kernels look up for a run that begins at `start`: int64 [sites, 2] of a and b, int32 [sites, 4] of
    the rank and ones, float32 [sites, 3] of scales."""
    offsets = np.array([(start + site.a, start + site.b) for site in packed.sites], dtype=np.int64)
    ranks = np.array([(site.rank, *site.ones) for site in packed.sites], dtype=np.int32)
    scales = np.array([site.scales for site in packed.sites], dtype=np.float32)
    return offsets, ranks, scales
