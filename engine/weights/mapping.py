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
class WeightMap:
    """Every checkpoint name a model takes.

    `aliases` maps a name that may be absent, or present with bytes identical to another's
    (a tied head), onto that other name. `ignored` are names checkpoints carry that hold no
    weights (rotary inverse frequencies). Both together with `placements` are all that is known:
    any other name is an error.
    """

    placements: dict[str, Placement]
    aliases: dict[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
