"""Which adapters are on the device.

Owns the choice of who leaves so that another can come. Ignores names and requests: callers say which
versions computation may touch now (`busy`) and how soon others will be wanted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from lora.device_pool import DevicePool
from lora.versions import AdapterVersion

Order = Mapping[AdapterVersion, int]
"""Place in the queue of the next request for a version; those not in it are wanted last."""


class Residency:
    def __init__(self, pool: DevicePool) -> None:
        self.pool = pool
        self._resident: list[AdapterVersion] = []
        self._clock = 0

    def ensure(self, version: AdapterVersion, busy: Collection[AdapterVersion], order: Order) -> bool:
        """Make the version resident, at the cost of idle ones: the one wanted last goes first. False
        where only busy ones stand in the way; nothing is evicted in vain."""
        self._clock += 1
        version.last_used = self._clock
        if version.slot is not None or self._load(version):
            return True
        idle = [other for other in self._resident if other not in busy and other is not version]
        idle.sort(key=lambda other: (-order.get(other, math.inf), other.last_used))
        if not self._would_fit(version, idle):
            return False
        for other in idle:
            self.drop(other)
            if self._load(version):
                return True
        return False

    def prefetch(self, version: AdapterVersion) -> bool:
        """Make the version resident if that costs nobody a place."""
        return version.slot is not None or self._load(version)

    def drop(self, version: AdapterVersion) -> None:
        """Give the version's memory back, if it has any. Launched readers finish first."""
        if version.slot is not None:
            self.pool.free(version.slot)
            version.slot = None
            self._resident.remove(version)

    @property
    def resident(self) -> list[AdapterVersion]:
        return list(self._resident)

    def check(self) -> None:
        self.pool.check()
        slots = [version.slot for version in self._resident]
        assert None not in slots and len(set(slots)) == len(slots) == self.pool.num_held, f"slots {slots}"

    def _load(self, version: AdapterVersion) -> bool:
        assert version.packed is not None, f"{version!r} was freed"
        version.slot = self.pool.load(version.packed)
        if version.slot is not None:
            self._resident.append(version)
        return version.slot is not None

    def _would_fit(self, version: AdapterVersion, idle: list[AdapterVersion]) -> bool:
        assert version.packed is not None
        starts = [other.slot for other in idle if other.slot is not None]
        return self.pool.could_load(version.packed, starts)
