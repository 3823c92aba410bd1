"""Where each checkpoint tensor lands in this rank's parameters.

Owns the geometry of fused and sharded parameters. Ignores values and where tensors come from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.weights.mapping import Placement, WeightMap


class WeightedModel(Protocol):
    """What loading needs of a model. `parallel` (with `rank` and `size`) is optional."""

    weight_map: WeightMap

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...


@dataclass(frozen=True, slots=True)
class Target:
    """Rows [start, start + rows) of this rank's `param`, filled from a tensor of full `shape`."""

    param: str
    start: int
    rows: int
    shape: tuple[int, ...]
    shard_dim: int | None


class Layout:
    """Targets by checkpoint name, checked to tile every parameter of the model exactly once."""

    def __init__(self, model: WeightedModel | Any) -> None:
        parallel = getattr(model, "parallel", None)
        self.rank: int = getattr(parallel, "rank", 0)
        self.size: int = getattr(parallel, "size", 1)
        self.weight_map: WeightMap = model.weight_map
        self.params: dict[str, torch.nn.Parameter] = dict(model.named_parameters())
        self.targets: dict[str, Target] = {}
        by_param: dict[str, list[tuple[str, Placement]]] = defaultdict(list)
        for name, placement in self.weight_map.placements.items():
            by_param[placement.param].append((name, placement))
        uncovered = set(self.params) ^ set(by_param)
        assert not uncovered, f"parameters and weight map disagree on {sorted(uncovered)[:4]}"
        for param, placements in by_param.items():
            self._place(param, sorted(placements, key=lambda item: item[1].row_start))
        self.parts = {param: {name for name, _ in placements} for param, placements in by_param.items()}
        """The checkpoint tensors that a parameter is made of."""

    def shard(self, target: Target, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a full tensor, as a view."""
        if target.shard_dim is None or self.size == 1:
            return tensor
        width = tensor.shape[target.shard_dim] // self.size
        return tensor.narrow(target.shard_dim, self.rank * width, width)

    def _place(self, param: str, placements: list[tuple[str, Placement]]) -> None:
        full_row = local_row = 0
        for name, placement in placements:
            assert placement.row_start == full_row and placement.shape[0] == placement.num_rows, (
                f"{name}: rows of {param} must be tiled in order, expected start {full_row}, got {placement}"
            )
            rows = placement.num_rows
            if placement.shard_dim is not None:
                assert placement.shape[placement.shard_dim] % self.size == 0, (
                    f"{name}: {placement.shape} does not split over {self.size} ranks"
                )
                rows = rows // self.size if placement.shard_dim == 0 else rows
            self.targets[name] = Target(param, local_row, rows, placement.shape, placement.shard_dim)
            full_row += placement.num_rows
            local_row += rows
        assert local_row == self.params[param].shape[0], (
            f"{param} has {self.params[param].shape[0]} rows, its tensors fill {local_row}"
        )
