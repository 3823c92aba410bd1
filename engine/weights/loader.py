"""Cold load: a folder's weights into a fresh model.

Owns the load report. Everything else is the update transaction's: both run the same code.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.types import UpdateBegin
from engine.weights.folder import WeightFolder
from engine.weights.layout import WeightedModel
from engine.weights.transaction import UpdateTransaction


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Tensors `loaded` of those `expected`, by module; `num_bytes` in the parameters' dtypes."""

    loaded: dict[str, int]
    expected: dict[str, int]
    num_bytes: int
    seconds: float
    digest: str

    def __str__(self) -> str:
        parts = [f"{module}: loaded {count} of {self.expected[module]}" for module, count in self.loaded.items()]
        return f"{', '.join(parts)} tensors ({self.num_bytes / 2**20:.1f} MiB in {self.seconds:.2f} s)"


def load_weights(model: WeightedModel, folder: Path, module: Literal["policy", "drafter"] = "policy") -> LoadReport:
    """Fill `model` from the safetensors of `folder`.

    Everything is read and checked in host memory before a parameter changes. Raises
    `InvalidRequest` naming the file or tensor at fault, `Conflict` where the folder changes while
    it is read.
    """
    started = time.perf_counter()
    folder = Path(folder)
    with WeightFolder(folder) as weights:
        manifest = weights.specs
    begin = UpdateBegin(txn="load", base_version=0, new_version=1, manifest=manifest, module=module)
    transaction = UpdateTransaction(model, begin, staging_device="cpu")
    transaction.stage_folder(folder)
    prepared = transaction.prepare()
    transaction.apply()
    expected = {module: len(model.weight_map.placements)}
    return LoadReport(prepared.loaded, expected, prepared.staged_bytes, time.perf_counter() - started, prepared.digest)
