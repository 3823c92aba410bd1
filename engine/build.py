"""From a model folder and a configuration to the parts of an engine.

Owns the order in which parts are built and the sizes that follow from what weights leave of the device. Ignores what
"auto" means elsewhere (`engine.resolve`) and how the parts work together (`engine.engine`).
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
from engine.attention.registry import KERNEL_BACKENDS, make_attention
from engine.cache.component import Component
from engine.cache.full import FullAttention
from engine.cache.prefix_cache import PrefixCache
from engine.cache.recurrent import RecurrentState
from engine.cache.swa import SlidingWindow
from engine.config import EngineConfig, number
from engine.context_parallel import ALONE, ContextParallel
from engine.dspark.build import LoadedDrafter, load_drafter
from engine.dspark.config import NGRAM_DRAFTS
from engine.dspark.drafter import Drafter
from engine.dspark.speculation import Speculation
from engine.dspark.sweep import prepare_cost
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
from engine.resolve import resolve
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


@dataclass(frozen=True, slots=True)
class Stores:
    """What steps leave behind: keys and values of the target and of a drafter, states of recurrent layers."""

    kv: KVPool
    draft: KVPool | None
    states: StatePool | None

    @property
    def present(self) -> list[KVPool | StatePool]:
        return [each for each in (self.kv, self.draft, self.states) if each is not None]


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
    drafting = _draft_shape(config, drafter)
    window = paged_window(spec.attending, config.cache.window_tokens)
    config, plan = _sized(config, model, drafter, drafting, window > 0, spare_rows, ranks)
    stores = _stores(spec, config, None if drafter is None else drafter.kv, window > 0, ranks)
    backend = make_attention(config.attention, spec.attending, device, config.deterministic, dtype)
    runner, sampler = _runner(model, stores.kv, backend, config.deterministic), Sampler(spec.vocab_size, device)
    if stores.states is not None and drafting is not None:
        rows = number(config.scheduler.max_running)
        stores.states.rings = ReplayRings(ReplayLayout.of(spec, dtype, rows, drafting.drafts), device)
    pages = _pages(spec, config, stores, window, runner)
    counters = EngineCounters()
    add_host_tier(config.cache, pages, counters)
    speculation = None
    if drafter is not None:
        speculation = make_speculation(config, drafter.make(stores.draft), pages, runner, sampler)
    fused = isinstance(runner, FusedRunner)
    room = stack_room(arena, behind)
    adapters = Adapters(config.adapters, model, dtype, device, pages.cache, config.deterministic, fused, room)
    return Parts(
        config=config,
        device=device,
        model=model,
        limits=EngineLimits(
            spec.vocab_size,
            spec.context_len,
            pages.allocator.num_pages * pages.page_size,
            config.scheduler.max_waiting,
            0 if speculation is None else speculation.max_drafts,
        ),
        pages=pages,
        cache=pages.cache,
        runner=runner,
        sampler=sampler,
        memory=MemoryTags(arena, stores.present, pages.cache, adapters, None if drafter is None else drafter.arena),
        counters=counters,
        adapters=adapters,
        plan=plan,
        layout=f"{config.dtype}/{pages.page_size}",
        canary=make_canary(pages.cache, config.cache.canary, stores.kv, stores.draft, stores.states),
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


def _sized(
    config: EngineConfig,
    model: DenseDecoderLM,
    drafter: LoadedDrafter | None,
    drafting: DraftShape | None,
    split_windows: bool,
    spare_rows: bool,
    ranks: ContextParallel,
) -> tuple[EngineConfig, MemoryPlan]:
    """The configuration with every size in it, and the plan they come from. Call it with the weights in place."""
    spec, dtype, device = model.spec, DTYPES[config.dtype], torch.device(config.device)
    mib = adapter_mib(config.adapters, model.adapter_sites, dtype, device)
    config = dataclasses.replace(config, adapters=dataclasses.replace(config.adapters, device_mib=mib))
    plan = plan_memory(
        spec,
        config,
        dtype,
        device,
        spare_rows=spare_rows,
        split_windows=split_windows,
        draft_kv=None if drafter is None else drafter.kv,
        draft=drafting,
        ring_bytes=0 if drafting is None else ReplayLayout.of(spec, dtype, 1, drafting.drafts).ring_bytes,
        ranks=ranks.size,
    )
    if config.cache.kv_tokens == "auto":
        print("\n".join(plan.lines()), file=sys.stderr)
    return agreed(planned(config, plan), ranks, device), plan


def _stores(
    spec: ModelSpec, config: EngineConfig, draft: ModelSpec | None, split_windows: bool, ranks: ContextParallel
) -> Stores:
    cache, dtype, device = config.cache, DTYPES[config.dtype], torch.device(config.device)
    num_pages, page_size = number(cache.kv_tokens) // cache.page_size, cache.page_size
    size = num_pages + 1, page_size, dtype, device
    if ranks.size > 1:
        kv: KVPool = SplitLatents(spec.attending, *size, ranks)
    else:
        window_pages = number(cache.window_tokens) // page_size
        kv = make_pool(spec.attending, *size, window_pages=window_pages + 1 if split_windows else None)
    states = None
    if spec.recurrent:
        states = StatePool(spec.state_layout(dtype), number(cache.state_slots) + 1, page_size, device)
    return Stores(kv, None if draft is None else KVPool(draft, *size), states)


def _pages(spec: ModelSpec, config: EngineConfig, stores: Stores, window: int, runner: ModelRunner) -> PageManager:
    """The tree over the stores, and who has what of them."""
    page_size, states = config.cache.page_size, stores.states
    allocate = WatchedAllocator if config.cache.canary else PageAllocator
    allocator = allocate(number(config.cache.kv_tokens) // page_size)
    slots = allocate(0 if states is None else states.num_slots - 1)
    components: list[Component] = [FullAttention(allocator, page_size)]
    sliding = None
    if window:
        window_pages = number(config.cache.window_tokens) // page_size
        check_window_tokens(window, page_size, window_pages * page_size)
        sliding = SlidingWindow(allocate(window_pages), page_size, window)
        components.append(sliding)
    if states is not None:
        components.append(RecurrentState(slots))
    cache = PrefixCache(allocator, page_size, tuple(components))
    # Beside the running rows, as many sequences again may be prefilling or wait to be forked.
    table = RequestTable(2 * number(config.scheduler.max_running), -(-spec.context_len // page_size))
    runner.states = states
    recurrent = None if states is None else RecurrentSlots(states, slots, cache, runner.replay)
    windows = None if sliding is None else WindowPages(sliding, cache, stores.kv, WindowTable(*table.pages_SP.shape))
    return PageManager(cache, allocator, table, stores.kv, page_size, stores.draft, recurrent, windows)


def _runner(model: DenseDecoderLM, pool: KVPool, backend: AttentionBackend, deterministic: bool) -> ModelRunner:
    if isinstance(pool, SplitLatents):
        return SplitRunner(model, pool, backend, deterministic)
    if backend.name in KERNEL_BACKENDS and model.spec.uniform:
        from engine.attention.triton import TritonAttention

        assert isinstance(backend, TritonAttention)
        return FusedRunner(model, pool, backend, deterministic)
    return ModelRunner(model, pool, backend, deterministic)


def _draft_shape(config: EngineConfig, drafter: LoadedDrafter | None) -> DraftShape | None:
    """What rounds of speculation are sized by."""
    if drafter is None:
        return None
    rejection, drafts, model = config.dspark.rule == "rejection", config.dspark.drafts, drafter.model
    if model is None:
        return DraftShape(drafts or NGRAM_DRAFTS, rejection=rejection)
    most = model.spec.num_drafts
    captured = len(model.spec.target_layers) + config.dspark.keep_states
    return DraftShape(min(drafts or most, most), model.spec.block, model.spec.backbone, rejection, captured)
