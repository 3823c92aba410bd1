"""Where in the prefix cache a request's pages live.

Owns the parts of a cache key that are not tokens: the policy's epoch, the adapter, the caller's salt.
Ignores the tree. With the prefix cache off, groups still share their own prompt, and nothing else.
"""

from __future__ import annotations

from engine.adapters import Lease
from engine.cache.key import Namespace
from engine.cache.prefix_cache import PrefixCache
from engine.request import Group


class Namespaces:
    def __init__(self, cache: PrefixCache, layout: str, shared: bool) -> None:
        self._cache = cache
        self._layout = layout
        self._shared = shared
        self._scored = 0

    def of_group(self, group: Group) -> Namespace:
        """Under the present policy."""
        layout = self._layout if self._shared else f"{self._layout} group {group.arrival}"
        return self._of(group.lease, layout, group.request.cache_salt)

    def of_scoring(self, lease: Lease | None) -> Namespace:
        self._scored += 1
        return self._of(lease, self._layout if self._shared else f"{self._layout} score {self._scored}")

    def _of(self, lease: Lease | None, layout: str, salt: str = "") -> Namespace:
        # No adapter has an empty name.
        adapter, adapter_rev = ("", 0) if lease is None else lease.version.key
        epoch = self._cache.current_epoch
        return Namespace(epoch=epoch, adapter=adapter, adapter_rev=adapter_rev, salt=salt, layout=layout)
