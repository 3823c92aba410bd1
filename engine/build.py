"""From a model folder and a configuration to the parts of an engine.

Owns the resolution of every "auto" and the sizes that follow from the device. Ignores how the
parts work together (`engine.engine`).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.adapters import Adapters
from engine.attention.base import AttentionBackend
from engine.attention.choice import Setting
from engine.attention.registry import make_attention, resolve_attention
from engine.cache.component import Component
from engine.cache.full import FullAttention
from engine.cache.prefix_cache import PrefixCache
from engine.cache.recurrent import RecurrentState
from engine.cache.swa import SlidingWindow
from engine.config import EngineConfig, SchedulerConfig, number
from engine.context_parallel import ALONE, ContextParallel
from engine.dspark.build import LoadedDrafter, load_drafter
from engine.dspark.config import NGRAM_DRAFTS, check_config
from engine.dspark.drafter import Drafter
from engine.dspark.speculation import Speculation
from engine.dspark.sweep import prepare_cost
from engine.errors import InvalidRequest
from engine.host_build import add_host_tier
from engine.memory.allocator import PageAllocator
from engine.memory.budget import adapter_mib, plan_memory, planned
from engine.memory.canary import Canary, WatchedAllocator, make_canary
from engine.memory.kv_pool import KVPool
from engine.memory.latent_pool import make_pool
from engine.memory.layer_split import SplitLatents
from engine.memory.needs import DraftShape
from engine.memory.plan import MemoryPlan
from engine.memory.replay_ring import ReplayLayout, ReplayRings
from engine.memory.request_table import RequestTable
from engine.memory.residency import MemoryTags
from engine.memory.state_pool import StatePool
from engine.memory.window_table import WindowTable
from engine.metrics import EngineCounters
from engine.models.decoder import DenseDecoderLM
from engine.models.registry import build_model
from engine.models.spec import DTYPES, ModelSpec, read_spec
from engine.models.stacked import room_rows, stack_room, stacked_ranks
from engine.runner.layer_split import SplitRunner
from engine.runner.model_runner import FusedRunner, ModelRunner
from engine.sampling.sampler import Sampler
from engine.sampling.seeds import fresh_seed
from engine.scheduler.pages import PageManager
from engine.scheduler.states import RecurrentSlots
from engine.scheduler.windows import WindowPages, check_window_tokens, paged_window
from engine.split_build import agreed, seed_source, split_config
from engine.validation import EngineLimits
from engine.weights.arena import WeightArena
from engine.weights.layout import WeightedModel
from engine.weights.loader import load_weights


@dataclass(slots=True)
class Parts:
    """What an engine is made of. `config` has no "auto" left."""

    config: EngineConfig
    device: torch.device
    model: DenseDecoderLM
    limits: EngineLimits
    pages: PageManager
    cache: PrefixCache
    runner: ModelRunner
    sampler: Sampler
    memory: MemoryTags
    counters: EngineCounters
    adapters: Adapters
    plan: MemoryPlan
    layout: str
    """Cache key of the stored states' arrangement."""
    canary: Canary | None = None
    drafter_model: WeightedModel | None = None
    """What updates of a drafter change."""
    speculation: Speculation | None = None
    fresh_seed: Callable[[], int] = fresh_seed


def load_parts(folder: Path, config: EngineConfig, ranks: ContextParallel = ALONE) -> Parts:
    """The parts of an engine for a model folder."""
    return build_parts(read_spec(folder), config, lambda model: load_weights(model, folder), ranks)


def build_parts(
    spec: ModelSpec, config: EngineConfig, fill: Callable[[DenseDecoderLM], object], ranks: ContextParallel = ALONE
) -> Parts:
    """Build the model, let `fill` give its parameters their values, and size the pools: the parts'
    configuration has no "auto" left."""
    config = split_config(config, spec, ranks)
    spare_rows, config = config.scheduler.max_running == "auto", resolve(config, spec)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device, dtype = torch.device(config.device), DTYPES[config.dtype]
    behind = stacked_ranks(config, spec)
    arena = WeightArena(lambda device: build_model(spec, dtype, device), device, room=room_rows(behind))
    model = arena.model
    fill(model)
    drafter = load_drafter(config.dspark, model, device)
    draft = None if drafter is None else drafter.kv
    mib = adapter_mib(config.adapters, model.adapter_sites, dtype, device)
    config = dataclasses.replace(config, adapters=dataclasses.replace(config.adapters, device_mib=mib))
    drafting = _draft_shape(config, drafter)
    window = paged_window(spec.attending, config.cache.window_tokens)
    ring_bytes = 0 if drafting is None else ReplayLayout.of(spec, dtype, 1, drafting.drafts).ring_bytes
    plan = plan_memory(
        spec,
        config,
        dtype,
        device,
        spare_rows=spare_rows,
        split_windows=window > 0,
        draft_kv=draft,
        draft=drafting,
        ring_bytes=ring_bytes,
        ranks=ranks.size,
    )
    if config.cache.kv_tokens == "auto":
        print("\n".join(plan.lines()), file=sys.stderr)
    config = agreed(planned(config, plan), ranks, device)
    page_size, max_running = config.cache.page_size, number(config.scheduler.max_running)
    state_pool = _state_pool(spec, config, dtype, device)
    num_pages = number(config.cache.kv_tokens) // page_size
    window_pages = number(config.cache.window_tokens) // page_size
    pool_size = spec.attending, num_pages + 1, page_size, dtype, device
    if ranks.size > 1:
        pool: KVPool = SplitLatents(*pool_size, ranks)
    else:
        pool = make_pool(*pool_size, window_pages=window_pages + 1 if window else None)
    draft_pool = None if draft is None else KVPool(draft, num_pages + 1, page_size, dtype, device)
    backend = make_attention(config.attention, spec.attending, device, config.deterministic, dtype)
    allocate = WatchedAllocator if config.cache.canary else PageAllocator
    allocator = allocate(num_pages)
    slots = allocate(0 if state_pool is None else state_pool.num_slots - 1)
    components: list[Component] = [FullAttention(allocator, page_size)]
    sliding = None
    if window:
        check_window_tokens(window, page_size, window_pages * page_size)
        sliding = SlidingWindow(allocate(window_pages), page_size, window)
        components.append(sliding)
    if state_pool is not None:
        components.append(RecurrentState(slots))
    cache = PrefixCache(allocator, page_size, tuple(components))
    # Beside the running rows, as many sequences again may be prefilling or wait to be forked.
    table = RequestTable(2 * max_running, -(-spec.context_len // page_size))
    runner, sampler = _runner(model, pool, backend, config.deterministic), Sampler(spec.vocab_size, device)
    runner.states = state_pool
    if state_pool is not None and drafting is not None:
        state_pool.rings = ReplayRings(ReplayLayout.of(spec, dtype, max_running, drafting.drafts), device)
    states = None if state_pool is None else RecurrentSlots(state_pool, slots, cache, runner.replay)
    windows = None if sliding is None else WindowPages(sliding, cache, pool, WindowTable(*table.pages_SP.shape))
    pages = PageManager(cache, allocator, table, pool, page_size, draft_pool, states, windows)
    counters = EngineCounters()
    add_host_tier(config.cache, pages, counters)
    speculation = None
    if drafter is not None:
        speculation = make_speculation(config, drafter.make(draft_pool), pages, runner, sampler)
    fused = isinstance(runner, FusedRunner)
    stores = [each for each in (pool, draft_pool, state_pool) if each is not None]
    room = stack_room(arena, behind)
    adapters = Adapters(config.adapters, model, dtype, device, cache, config.deterministic, fused, room)
    return Parts(
        config=config,
        device=device,
        model=model,
        limits=EngineLimits(
            spec.vocab_size,
            spec.context_len,
            num_pages * page_size,
            config.scheduler.max_waiting,
            0 if speculation is None else speculation.max_drafts,
        ),
        pages=pages,
        cache=cache,
        runner=runner,
        sampler=sampler,
        memory=MemoryTags(arena, stores, cache, adapters, None if drafter is None else drafter.arena),
        counters=counters,
        adapters=adapters,
        plan=plan,
        layout=f"{config.dtype}/{page_size}",
        canary=make_canary(cache, config.cache.canary, pool, draft_pool, state_pool),
        drafter_model=None if drafter is None else drafter.model,
        speculation=speculation,
        fresh_seed=seed_source(ranks, device),
    )


def make_speculation(
    config: EngineConfig, drafter: Drafter, pages: PageManager, runner: ModelRunner, sampler: Sampler
) -> Speculation:
    """A drafter at work, with step times read from a file or measured now."""
    dspark, spec = config.dspark, runner.model.spec
    cost = prepare_cost(config, drafter, pages, runner, sampler)
    return Speculation(dspark, drafter, pages, sampler, spec.context_len, cost, torch.device(config.device))


def _state_pool(spec: ModelSpec, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> StatePool | None:
    if not spec.recurrent:
        return None
    slots = number(config.cache.state_slots)
    return StatePool(spec.state_layout(dtype), slots + 1, config.cache.page_size, device)


def _runner(model: DenseDecoderLM, pool: KVPool, backend: AttentionBackend, deterministic: bool) -> ModelRunner:
    if isinstance(pool, SplitLatents):
        return SplitRunner(model, pool, backend, deterministic)
    if backend.name in ("triton", "flashinfer") and model.spec.uniform:
        from engine.attention.triton import TritonAttention

        assert isinstance(backend, TritonAttention)
        return FusedRunner(model, pool, backend, deterministic)
    return ModelRunner(model, pool, backend, deterministic)


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


def _draft_shape(config: EngineConfig, drafter: LoadedDrafter | None) -> DraftShape | None:
    """What rounds of speculation are sized by."""
    if drafter is None:
        return None
    rejection, drafts, model = config.dspark.rule == "rejection", config.dspark.drafts, drafter.model
    if model is None:
        return DraftShape(drafts or NGRAM_DRAFTS, rejection=rejection)
    most = model.spec.num_drafts
    return DraftShape(min(drafts or most, most), model.spec.block, model.spec.backbone, rejection)


def _positive(field: str, value: int) -> None:
    if value < 1:
        raise InvalidRequest(field=field, expected="1 or more", actual=value)
