"""How many tokens the key/value pool holds.

Owns the sum: what is free once the weights are in, less what steps and captured graphs will need,
times a fraction. Ignores where the pool then lies.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from engine.errors import InvalidRequest
from engine.models.spec import ModelSpec
from lora.config import AdapterConfig
from lora.geometry import Geometry
from lora.packing import room_for

GRAPH_BYTES = 512 << 20
"""For what no shape tells: graphs' nodes and page tables by tier, library workspaces, rounding."""

LOGIT_COPIES = 4
"""fp32 copies of a row's logits that the serial sampler holds at once."""

ADAPTER_SHARE = 16
"""The part of the memory left after the weights that adapters may have by default is one over this."""


@dataclass(frozen=True, slots=True)
class PoolBudget:
    """`num_tokens` of `token_bytes` each, out of `free_bytes` less `reserved_bytes`; bounded by
    `useful_tokens` where more would never be used (None: no bound)."""

    free_bytes: int
    reserved_bytes: int
    fraction: float
    token_bytes: int
    useful_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        fits = int(max(0, self.free_bytes - self.reserved_bytes) * self.fraction) // self.token_bytes
        return fits if self.useful_tokens is None else min(fits, self.useful_tokens)

    def describe(self) -> str:
        pool, free, reserved = (
            f"{count / 2**30:.2f}"
            for count in (self.num_tokens * self.token_bytes, self.free_bytes, self.reserved_bytes)
        )
        bound = "" if self.num_tokens != self.useful_tokens else ", all that can be of use"
        return (
            f"kv: {self.num_tokens} tokens in {pool} GiB ({self.fraction:g} of {free} GiB free after the weights,"
            f" less {reserved} for steps, graphs and adapters{bound})"
        )


def pool_budget(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    fraction: float,
    prefill_tokens: int,
    max_running: int,
    draft: ModelSpec | None = None,
    adapter_bytes: int = 0,
) -> PoolBudget:
    """Call it with the weights in place. A token has states in a drafter of shape `draft` too, where there
    is one. `adapter_bytes` are left to adapters. On the CPU, memory serves everybody else too, so the pool never
    grows past `max_running` whole contexts."""
    return PoolBudget(
        free_bytes=_free_bytes(device),
        reserved_bytes=_step_bytes(spec, dtype, prefill_tokens, max_running) + adapter_bytes,
        fraction=fraction,
        token_bytes=_token_bytes(spec, dtype) + (0 if draft is None else _token_bytes(draft, dtype)),
        useful_tokens=None if device.type == "cuda" else max_running * spec.context_len,
    )


def adapter_mib(config: AdapterConfig, sites: Geometry, dtype: torch.dtype, device: torch.device) -> int:
    """Mebibytes of device memory that adapters may hold. Call it with the weights in place."""
    if config.device_mib != "auto":
        return config.device_mib
    if device.type != "cuda":
        return 1024
    widest = room_for(sites, config.max_rank, dtype)
    return max(1, min(_free_bytes(device) // ADAPTER_SHARE, config.max_resident * widest) >> 20)


def whole_pages(num_tokens: int, page_size: int) -> int:
    """`num_tokens` rounded down to pages; raises `InvalidRequest` where not one fits."""
    if num_tokens < page_size:
        raise InvalidRequest(field="cache.kv_tokens", expected=f"at least one page of {page_size}", actual=num_tokens)
    return num_tokens // page_size * page_size


def _token_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize


def _step_bytes(spec: ModelSpec, dtype: torch.dtype, prefill_tokens: int, max_running: int) -> int:
    """A bound on what a prefill step, a captured decode step and their logits hold at once."""
    attention = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    token = (3 * spec.hidden + attention + 3 * spec.intermediate) * dtype.itemsize
    row = spec.vocab_size * (dtype.itemsize + 4 * LOGIT_COPIES)
    return prefill_tokens * token + max_running * (token + row) + GRAPH_BYTES


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        # What torch holds unused is as good as free.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
