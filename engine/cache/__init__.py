"""The prefix cache: one radix tree over every kind of attention state."""

from engine.cache.handles import CacheStats, Extension, Match, Receipt, ReceiptError
from engine.cache.key import Namespace
from engine.cache.prefix_cache import PrefixCache

__all__ = ["CacheStats", "Extension", "Match", "Namespace", "PrefixCache", "Receipt", "ReceiptError"]
