"""The host tier of an engine that has one.

Owns which memory lies under which component's ids. Ignores how much of it is worth keeping.
"""

from __future__ import annotations

from engine.cache.spill import Spiller
from engine.config import CacheConfig
from engine.memory.host_tier import HostTier, Kinds
from engine.metrics import EngineCounters
from engine.scheduler.pages import PageManager
from engine.scheduler.restores import Restores


def add_host_tier(config: CacheConfig, pages: PageManager, counters: EngineCounters) -> None:
    """From now on `pages` restores what its cache evicts. Without `host_mib` nothing changes."""
    if not config.host_mib:
        return
    cache, table = pages.cache, pages.table
    tier = HostTier(_kinds(pages), config.host_mib << 20, counters)
    page_bytes = cache.tree.page_bytes
    cache.tree.spiller = Spiller(tier, cache.components, page_bytes, lambda: cache.current_epoch)
    pages.restores = Restores(tier, cache, lambda: table.num_slots - table.num_free)


def _kinds(pages: PageManager) -> Kinds:
    """A drafter's states lie under the same ids as the target's pages, and go with them."""
    kinds = {"full": pages.pool.pages()}
    if pages.draft_pool is not None:
        kinds["full"] = kinds["full"] + pages.draft_pool.pages()
    if pages.windows is not None:
        kinds["swa"] = pages.pool.pages(windowed=True)
    if pages.states is not None:
        kinds["recurrent"] = list(pages.states.pool.tensors)
    return kinds
