"""Which known tensor a checkpoint or trainer means by a name.

Owns the prefixes and segments that trainers' wrappers put around a model's own names. Ignores
shapes and values. A name the model knows is always taken as it stands.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.weights.mapping import WeightMap

WRAPPER_SEGMENTS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer", "language_model"}
)
"""Segments that compilation, sharding, checkpointing, adapters and multimodal shells insert anywhere."""

WRAPPER_PREFIXES: tuple[tuple[str, ...], ...] = (("module",), ("base_model", "model"))
"""Prefixes that data-parallel and adapter wrappers put in front, in any nesting."""

_LISTED = 8


class NameResolver:
    """Maps sent names onto names of one `WeightMap`."""

    def __init__(self, weight_map: WeightMap) -> None:
        named = frozenset(weight_map.placements) | frozenset(weight_map.aliases) | frozenset(weight_map.packed)
        self._known = named
        self._ignores = weight_map.ignores

    def resolve(self, name: str) -> str | None:
        """The known name (placement, alias, packed or ignored) that `name` stands for, or None."""
        if name in self._known or self._ignores(name):
            return name
        parts = tuple(part for part in name.split(".") if part not in WRAPPER_SEGMENTS)
        while True:
            candidate = ".".join(parts)
            if candidate in self._known or self._ignores(candidate):
                return candidate
            prefix = next((p for p in WRAPPER_PREFIXES if parts[: len(p)] == p), None)
            if prefix is None:
                return None
            parts = parts[len(prefix) :]


def bounded_list(names: Iterable[str]) -> str:
    """Names for an error message: sorted, encodable, at most a handful and their count."""
    ordered = sorted(names)
    shown = ", ".join(ascii(name[:120]) for name in ordered[:_LISTED])
    rest = len(ordered) - _LISTED
    return f"[{shown}]" if rest <= 0 else f"[{shown} and {rest} more]"
