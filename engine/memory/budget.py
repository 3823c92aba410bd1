"""From an engine's settings to its memory plan.

Owns reading what is free, and the settings' meaning for the division. Ignores the rule of division
(`engine.memory.plan`) and what shapes take (`engine.memory.needs`).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from engine.config import EngineConfig, number
from engine.errors import InvalidRequest
from engine.memory.host_lanes import staging_bytes
from engine.memory.layer_split import SplitBytes
from engine.memory.needs import (
    GRAPH_BYTES,
    DraftShape,
    context_share,
    round_share,
    split_token_bytes,
    step_shares,
    token_bytes,
    window_of,
)
from engine.memory.plan import MemoryPlan, Needs, Share, Wanted, divide
from engine.models.spec import ModelSpec
from lora.config import AdapterConfig
from lora.geometry import Geometry
from lora.packing import room_for

ADAPTER_SHARE = 16
"""The part of the memory left after the weights that adapters may have by default is one over this."""


def plan_memory(
    spec: ModelSpec,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    spare_rows: bool = False,
    split_windows: bool = False,
    draft_kv: ModelSpec | None = None,
    draft: DraftShape | None = None,
    ring_bytes: int = 0,
    available: int | None = None,
    ranks: int = 1,
) -> MemoryPlan:
    """Call it with the weights in place, and `config` resolved but for the sizes of pools.

    With `spare_rows` fewer rows than configured will do; with `split_windows` windowed layers have pages of
    their own. A token has states of a drafter's `draft_kv` too; `ring_bytes` are a running row's replay rings. On
    the CPU, memory serves everybody else too, so pools never grow past `max_running` whole contexts. `available`
    are the bytes to divide (None: what is free now). Several `ranks` divide the layers of a model of latents.
    """
    gpu, attending = device.type == "cuda", spec.attending
    full, windowed = split_token_bytes(attending, dtype) if split_windows else (token_bytes(attending, dtype), 0)
    if ranks > 1:
        full = SplitBytes.of(attending, ranks, dtype.itemsize).most

    needs = Needs(
        token_bytes=full,
        reserve=lambda rows: _reserve(rows, spec, config, dtype, gpu, draft, ring_bytes),
        draft_token_bytes=0 if draft_kv is None else token_bytes(draft_kv, dtype),
        window_token_bytes=windowed,
        window=window_of(attending) if windowed else 0,
        state_bytes=spec.state_layout(dtype).slot_bytes if spec.recurrent else 0,
    )
    rows = number(config.scheduler.max_running)
    wanted = Wanted(
        page_size=config.cache.page_size,
        fraction=config.cache.memory_fraction,
        max_running=rows,
        spare_rows=spare_rows,
        lookahead=config.scheduler.lookahead,
        prefill_tokens=number(config.scheduler.prefill_tokens),
        kv_tokens=_given(config.cache.kv_tokens),
        window_tokens=_given(config.cache.window_tokens),
        state_slots=_given(config.cache.state_slots),
        useful_tokens=None if gpu else rows * spec.context_len,
    )
    plan = divide(needs, wanted, free_bytes(device) if available is None else available)
    return replace(plan, host_bytes=_host_bytes(config.cache.host_mib))


def _reserve(
    rows: int,
    spec: ModelSpec,
    config: EngineConfig,
    dtype: torch.dtype,
    gpu: bool,
    draft: DraftShape | None,
    ring_bytes: int,
) -> tuple[Share, ...]:
    """What is set aside for steps of `rows` rows, beside what is cached."""
    tokens = number(config.scheduler.prefill_tokens)
    shares = step_shares(spec, dtype, tokens, rows, spec.context_len, config.deterministic)
    if draft is not None:
        shares += (round_share(spec, dtype, rows, draft),)
        if draft.captured:
            shares += (context_share(spec, dtype, rows, config.scheduler.burst, draft),)
    if ring_bytes:
        shares += (Share("rings", rows, "rows", ring_bytes, "replay of drafts of recurrent layers"),)
    if gpu:
        mib = number(config.adapters.device_mib)
        shares += (Share("adapters", mib, "MiB", 1 << 20, "adapters.device_mib"),)
        if config.cache.host_mib:
            state = spec.state_layout(dtype).slot_bytes if spec.recurrent else 0
            shares += (Share("host_staging", 1, "reserve", staging_bytes(state), "cache.host_mib"),)
        shares += (Share("graphs", 1, "reserve", GRAPH_BYTES, "captured graphs, tables, libraries"),)
    return shares


def planned(config: EngineConfig, plan: MemoryPlan) -> EngineConfig:
    """The configuration with the plan's sizes in the place of "auto"."""
    cache = replace(
        config.cache,
        kv_tokens=plan.units("kv"),
        window_tokens=plan.units("window_kv"),
        state_slots=plan.units("states"),
    )
    scheduler = replace(config.scheduler, max_running=plan.max_running)
    return replace(config, cache=cache, scheduler=scheduler)


def adapter_mib(config: AdapterConfig, sites: Geometry, dtype: torch.dtype, device: torch.device) -> int:
    """Mebibytes of device memory that adapters may hold. Call it with the weights in place."""
    if config.device_mib != "auto":
        return config.device_mib
    if device.type != "cuda":
        return 1024
    widest = room_for(sites, config.max_rank, dtype)
    return max(1, min(free_bytes(device) // ADAPTER_SHARE, config.max_resident * widest) >> 20)


def free_bytes(device: torch.device) -> int:
    """Bytes that may still be taken: of a GPU, or of the host as far as this process may use it."""
    if device.type == "cuda":
        # What torch holds unused is as good as free.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            host = int(line.split()[1]) << 10
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    return min(host, max(0, int(limit) - int(used))) if limit.isdigit() and used.isdigit() else host


def _host_bytes(mib: int) -> int:
    free = free_bytes(torch.device("cpu")) >> 20 if mib else 0
    if mib > free:
        raise InvalidRequest(field="cache.host_mib", expected=f"at most {free}, which the host has free", actual=mib)
    return mib << 20


def _given(value: int | str) -> int | None:
    return value if isinstance(value, int) else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
