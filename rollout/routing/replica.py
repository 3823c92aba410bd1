"""Who is in the fleet, and who may be given work.

Owns the router's view of the engines. Ignores how they are started and watched
(`rollout.fleet`) and how one is chosen (`rollout.routing.affinity`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.errors import SparkrollError
from engine.types import PauseMode
from rollout.service import EngineService

logger = logging.getLogger(__name__)

AdapterKey = tuple[str, int]
"""Name and revision of a LoRA policy."""


@dataclass(slots=True, eq=False)
class Replica:
    """One incarnation of one engine. `load` counts the samples it was given and has not ended.

    `policy_version` is what the engine itself last confirmed. A replica is routable only
    between having confirmed the fleet's versions and being lost or fenced.
    """

    engine_id: str
    incarnation: int
    service: EngineService
    policy_version: int
    routable: bool = False
    fenced: SparkrollError | None = None
    load: int = 0
    adapters: set[AdapterKey] = field(default_factory=set)
    """Revisions of LoRA policies that requests may ask it for."""

    @property
    def name(self) -> str:
        return f"{self.engine_id}.{self.incarnation}"


@dataclass(slots=True, eq=False)
class Membership:
    """The live replicas by engine id, the fleet's policy version, and whether it is paused.

    `on_out` hears of every replica that leaves routing for good, so that a supervisor can
    replace it. All methods belong to one event loop.
    """

    policy_version: int = 0
    digest: str = ""
    adapters: set[AdapterKey] = field(default_factory=set)
    """Revisions of LoRA policies that every routable engine has."""
    paused: PauseMode | None = None
    closed: SparkrollError | None = None
    """Why no engine will ever be routable again."""
    replicas: dict[str, Replica] = field(default_factory=dict)
    on_out: Callable[[Replica, SparkrollError], None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def routable(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.routable]

    def admit(self, replica: Replica) -> None:
        """Make `replica` routable; it must be at the fleet's versions."""
        assert replica.policy_version == self.policy_version, (replica.name, replica.policy_version)
        assert replica.adapters == self.adapters, (replica.name, replica.adapters ^ self.adapters)
        known = self.replicas.get(replica.engine_id)
        assert known is None or known is replica or known.incarnation < replica.incarnation, replica.name
        self.replicas[replica.engine_id] = replica
        replica.routable = True
        self.notify()

    def take_out(self, replica: Replica, reason: SparkrollError, *, fence: bool = False) -> None:
        """Stop routing to `replica`. Idempotent; replies of a replaced incarnation change nothing."""
        if self.replicas.get(replica.engine_id) is replica:
            del self.replicas[replica.engine_id]
        if not replica.routable and replica.fenced is not None:
            return
        was_routable, replica.routable = replica.routable, False
        if fence:
            replica.fenced = reason
        if was_routable:
            logger.warning("%s left routing: %s", replica.name, reason.message)
            if self.on_out is not None:
                self.on_out(replica, reason)
        self.notify()

    def close(self, reason: SparkrollError) -> None:
        """Nobody needs to wait for an engine any more."""
        self.closed = reason
        self.notify()

    def notify(self) -> None:
        """Wake everyone who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, timeout_s: float) -> bool:
        """Wait for the next change; False when none came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True
