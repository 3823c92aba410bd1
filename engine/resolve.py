"""What a configuration means on this device, before anything is built.

Owns every "auto" that needs no weights, and the refusal of values that nothing can be built with. Ignores sizes of
pools and of adapters, which wait for the weights (`engine.memory.budget`).
"""

from __future__ import annotations

import dataclasses

import torch

from engine.attention.choice import Setting
from engine.attention.registry import resolve_attention
from engine.config import EngineConfig, SchedulerConfig, number
from engine.dspark.config import check_config
from engine.errors import InvalidRequest
from engine.models.spec import DTYPES, ModelSpec
from lora.config import LIMITS, MOST_STACKED, AdapterConfig


def resolve(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """A configuration with everything concrete but the sizes of the pool and of adapters, which wait for the
    weights."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.device(device)
    except RuntimeError as error:
        raise InvalidRequest(field="device", expected="a torch device", actual=device) from error
    dtype = config.dtype
    if dtype == "auto":
        dtype = next(name for name, value in DTYPES.items() if value == spec.dtype)
        if device == "cpu" and dtype == "float16":
            dtype = "bfloat16"
    if dtype not in DTYPES:
        raise InvalidRequest(field="dtype", expected=f"auto or one of {sorted(DTYPES)}", actual=dtype)
    _positive("cache.page_size", config.cache.page_size)
    if config.cache.canary < 0:
        raise InvalidRequest(field="cache.canary", expected="0 or more", actual=config.cache.canary)
    if config.cache.host_mib < 0 or (config.cache.host_mib and not config.cache.prefix_cache):
        expected = "0 or more" if config.cache.prefix_cache else "0 without cache.prefix_cache"
        raise InvalidRequest(field="cache.host_mib", expected=expected, actual=config.cache.host_mib)
    check_config(config.dspark)
    _check_adapters(config.adapters)
    # A deterministic engine's verify rows keep their bits in the serial loop alone.
    serial = torch.device(device).type == "cpu" or (config.dspark.enabled and config.deterministic)
    loop = ("serial" if serial else "overlapped") if config.loop == "auto" else config.loop
    if loop not in ("serial", "overlapped"):
        raise InvalidRequest(field="loop", expected="'auto', 'serial' or 'overlapped'", actual=config.loop)
    scheduler = _resolve_scheduler(config, device)
    if not 0 < config.cache.memory_fraction < 1:
        raise InvalidRequest(
            field="cache.memory_fraction", expected="between 0 and 1", actual=config.cache.memory_fraction
        )
    setting = Setting(
        spec.attending,
        DTYPES[dtype],
        torch.device(device),
        config.cache.page_size,
        number(scheduler.prefill_tokens),
        config.deterministic,
    )
    attention = resolve_attention(config.attention, spec.attending, device, setting)
    return dataclasses.replace(config, device=device, dtype=dtype, attention=attention, loop=loop, scheduler=scheduler)


def _resolve_scheduler(config: EngineConfig, device: str) -> SchedulerConfig:
    scheduler, kv_tokens = config.scheduler, config.cache.kv_tokens
    rows, tokens = (64, 512) if torch.device(device).type == "cpu" else (512, 8192)
    if isinstance(kv_tokens, int):
        # A prompt that fills the pool leaves no room to generate.
        tokens = max(1, min(tokens, kv_tokens // 2))
    resolved = dataclasses.replace(
        scheduler,
        max_running=rows if scheduler.max_running == "auto" else scheduler.max_running,
        prefill_tokens=tokens if scheduler.prefill_tokens == "auto" else scheduler.prefill_tokens,
    )
    for name in ("max_running", "max_waiting", "prefill_tokens", "burst", "prefill_burst"):
        _positive(f"scheduler.{name}", getattr(resolved, name))
    if scheduler.lookahead < 0:
        raise InvalidRequest(field="scheduler.lookahead", expected="0 or more", actual=scheduler.lookahead)
    return resolved


def _check_adapters(config: AdapterConfig) -> None:
    for name, most in LIMITS.items():
        value = getattr(config, name)
        if value != "auto" and not 1 <= value <= most:
            raise InvalidRequest(field=f"adapters.{name}", expected=f"1 to {most}", actual=value)
    ranks = config.stacked_ranks
    if not 0 <= ranks <= MOST_STACKED or ranks % 16:
        expected = f"a multiple of 16 up to {MOST_STACKED}"
        raise InvalidRequest(field="adapters.stacked_ranks", expected=expected, actual=ranks)


def _positive(field: str, value: int) -> None:
    if value < 1:
        raise InvalidRequest(field=field, expected="1 or more", actual=value)
