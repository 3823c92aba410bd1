"""Where fitted step times are kept between runs.

Owns the file's place, when it is written and what happens where it does not fit. Ignores what is in it
(`engine.dspark.cost_model`).

The file is written after the start-up sweep and again as measured steps refine the model: after 512 of
them, then at twice as many each time, at least every 8,192. A later engine of the same model, drafter,
device and graphs starts from there and measures nothing.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import msgspec

from engine.dspark.cost_model import CostKey, CostModel
from engine.errors import InvalidRequest
from engine.user_cache import cache_folder

logger = logging.getLogger(__name__)
_FIRST, _MOST = 512, 8192


class CostFile:
    """`named` is what the settings name, and must fit. Without one a GPU's times are kept under the user's
    cache folder, by key, and a CPU's nowhere: those change with what else the machine does."""

    def __init__(self, named: Path | None, key: CostKey, on_gpu: bool) -> None:
        self._named = named is not None
        self._key = key
        self.path = named or (_cached(key) if on_gpu else None)
        self._next, self._stride = 0, _FIRST

    def load(self) -> CostModel | None:
        """The kept model, None where there is none. A named file that does not fit raises `InvalidRequest`."""
        if self.path is None or not self.path.exists():
            return None
        try:
            cost = CostModel.load(self.path, self._key)
        except InvalidRequest:
            if self._named:
                raise
            return None
        self._schedule(cost)
        return cost

    def keep(self, cost: CostModel) -> None:
        """Write the model where enough was learnt since the last time. A disk that fails is reported once."""
        if self.path is None or cost.observed < self._next:
            return
        self._schedule(cost)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            cost.save(self.path, self._key)
        except OSError as error:
            logger.warning("step times are not kept: %s", error)
            self.path = None

    def _schedule(self, cost: CostModel) -> None:
        self._next = cost.observed + self._stride
        self._stride = min(2 * self._stride, _MOST)


def _cached(key: CostKey) -> Path:
    name = hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:20]
    return cache_folder() / "dspark" / f"{name}.json"
