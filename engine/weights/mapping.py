"""How checkpoint tensors map onto a model's fused parameters.

Owns the one table per model that cold load and live update both read. Ignores file formats and
where tensors come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one checkpoint tensor goes.

    `param` is the model's parameter name. `row_start` and `num_rows` give the tensor's place
    along dimension 0 of the *unsharded* fused parameter. `shape` is the checkpoint tensor's
    full shape. `shard_dim` is the dimension split over tensor-parallel ranks (0 for
    column-parallel, 1 for row-parallel, None for replicated).
    """

    param: str
    row_start: int
    num_rows: int
    shape: tuple[int, ...]
    shard_dim: int | None = None


@dataclass(frozen=True, slots=True)
class Packed:
    """One tensor of `shape` that may come instead of several: with its two leading dimensions flattened,
    its rows are theirs, in the order of `names`."""

    shape: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Every checkpoint name a model takes.

    `aliases` maps a name that may be absent, or present with bytes identical to another's
    (a tied head), onto that other name. `ignored` are names checkpoints carry that hold no
    weights (rotary inverse frequencies), `ignored_parts` how the names begin of parts that the model has no
    use for. `packed` are other spellings, as trainers hold experts that checkpoints store one by one. All of
    them together with `placements` are all that is known: any other name is an error.
    """

    placements: dict[str, Placement]
    aliases: dict[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    packed: dict[str, Packed] = field(default_factory=dict)
    ignored_parts: tuple[str, ...] = ()

    def ignores(self, name: str) -> bool:
        return name in self.ignored or name.startswith(self.ignored_parts)

    def parts(self, name: str) -> tuple[str, ...]:
        """The placements that a known name fills."""
        packed = self.packed.get(name)
        return (self.aliases.get(name, name),) if packed is None else packed.names

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor that comes under a known name."""
        packed = self.packed.get(name)
        return self.placements[self.aliases.get(name, name)].shape if packed is None else packed.shape
