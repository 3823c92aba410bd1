"""The engines of a service, kept alive and at one policy version.

Owns their processes: start, watch, replace. A replacement has a higher incarnation; it replays
the last committed update, shows the same digest, takes the LoRA policies and the fleet's pause over, and
only then is given work. Ignores what work is (`rollout.router`).
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayError

from engine.errors import Corrupt, DeadlineExceeded, Draining, InvalidRequest, SparkrollError
from engine.types import PauseMode, UpdateBegin
from rollout.actors.launch import Launcher, ensure_ray
from rollout.actors.remote import ActorService, SharedPut
from rollout.adapter_source import read_adapter
from rollout.config import ServeConfig
from rollout.drafter_catalog import with_drafter
from rollout.model_catalog import resolve_model
from rollout.router import Router
from rollout.routing.adapter_store import AdapterStore
from rollout.routing.adapters import FleetAdapters
from rollout.routing.errors import Behind, EngineLost
from rollout.routing.recipe import PolicyRecipe
from rollout.routing.replica import Membership, Replica

logger = logging.getLogger(__name__)

_PAUSE_TIMEOUT_S = 10.0
_MISSED_HEALTH = 3
_STOP_TIMEOUT_S = 5.0
_BACKOFF_S = 0.5


@dataclass(slots=True, eq=False)
class _Place:
    """Where one engine lives, from incarnation to incarnation."""

    index: int
    incarnation: int = 0
    handle: Any = None
    service: ActorService | None = None
    out: asyncio.Future[SparkrollError] | None = None
    """Why the present incarnation left routing."""
    pid: int | None = None
    given_up: SparkrollError | None = None


class Fleet:
    """`async with Fleet(config) as fleet:` and then `fleet.router` serves."""

    def __init__(self, config: ServeConfig, say: Callable[[str], None] = logger.info) -> None:
        self.config = config
        self._say = say
        self.membership = Membership()
        self._places = [_Place(index) for index in range(config.fleet.num_engines)]
        self._put = SharedPut()
        self._tasks: list[asyncio.Task[None]] = []
        self._launcher: Launcher | None = None
        self._owns_ray = False
        spool = config.fleet.spool_dir or Path(tempfile.gettempdir())
        spool.mkdir(parents=True, exist_ok=True)
        self._spool = Path(tempfile.mkdtemp(prefix="sparkroll-spool-", dir=spool))
        self._recipe = PolicyRecipe(self._spool / "policy")
        self._adapters = FleetAdapters(self.membership, AdapterStore(self._spool / "adapters"))
        self.router = Router(
            self.membership,
            self._recipe,
            self._adapters,
            update_root=config.update_root,
            replacement_s=config.fleet.replacement_s,
        )
        self.membership.on_out = self._on_out

    async def __aenter__(self) -> Fleet:
        await self.start()
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await _to_the_end(self.stop())

    def _check_folders(self) -> None:
        """Refuse what is not there before anything is started."""
        for name, folder in self.config.adapters.items():
            if not Path(folder, "adapter_config.json").is_file():
                expected = "a folder that peft saved, with an adapter_config.json"
                raise InvalidRequest(field=f"adapters.{name}", expected=expected, actual=str(folder))

    async def start(self) -> None:
        """Return when every engine serves; raise what kept the first one from it."""
        try:
            self._say(f"finding model {self.config.model}")
            folder = await asyncio.to_thread(resolve_model, self.config.model, self.config.catalog)
            self._check_folders()
            elsewhere = self.config.fleet.ray_address is not None
            engine = await asyncio.to_thread(
                with_drafter, self.config.engine, folder, self.config.catalog, elsewhere=elsewhere
            )
            self._say("starting Ray (seconds; on a busy machine a minute or two)")
            self._owns_ray = await asyncio.to_thread(ensure_ray, self.config.fleet.ray_address)
            self._launcher = await asyncio.to_thread(Launcher, replace(self.config, engine=engine), folder)
            self._say(f"loading {folder.name} in {len(self._places)} engine(s)")
            ends = await asyncio.gather(*(self._bring_up(place) for place in self._places), return_exceptions=True)
            for end in ends:
                if isinstance(end, BaseException):
                    raise end
            for name, adapter in self.config.adapters.items():
                self._say(f"loading adapter {name}")
                await self._adapters.update(await asyncio.to_thread(read_adapter, Path(adapter), name))
        except BaseException:
            await _to_the_end(self.stop())
            raise
        loop = asyncio.get_running_loop()
        self._tasks += [loop.create_task(self._keep(place)) for place in self._places]
        self._tasks += [loop.create_task(self._watch())]

    async def stop(self) -> None:
        """End every engine; groups that still run end with `Draining`."""
        self.membership.close(Draining("the fleet is shutting down"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await asyncio.gather(*(self._let_go(place, gently=True) for place in self._places))
        if self._launcher is not None:
            await asyncio.to_thread(self._launcher.close)
            self._launcher = None
        if self._owns_ray:
            await asyncio.to_thread(ray.shutdown)
            self._owns_ray = False
        await asyncio.to_thread(shutil.rmtree, self._spool, ignore_errors=True)

    def describe(self) -> list[dict[str, Any]]:
        """Each engine's name, process and incarnation, for people and tests."""
        assert self._launcher is not None, "the fleet is not running"
        return [
            {
                "engine_id": self._launcher.engine_id(place.index),
                "incarnation": place.incarnation,
                "pid": place.pid,
                "given_up": place.given_up.message if place.given_up else None,
            }
            for place in self._places
        ]

    # --- one engine -----------------------------------------------------------------------------

    async def _keep(self, place: _Place) -> None:
        """Replace the engine whenever it is out, until it will not come up any more."""
        failures = 0
        while True:
            assert place.out is not None, "brought up before it is kept"
            reason = await place.out
            try:
                if isinstance(reason, Behind) and place.service is not None:
                    await self._rejoin(place)
                else:
                    await self._let_go(place, gently=False)
                    await asyncio.sleep(_BACKOFF_S * failures)
                    await self._bring_up(place)
                failures = 0
            except Exception as error:
                failures += 1
                logger.warning("engine %d did not come up (%d in a row): %s", place.index, failures, error)
                typed = error if isinstance(error, SparkrollError) else Corrupt(f"{type(error).__name__}: {error}")
                if failures >= self.config.fleet.max_failed_starts:
                    place.given_up = typed
                    await self._let_go(place, gently=False)
                    logger.error("engine %d is given up", place.index)
                    if all(other.given_up for other in self._places):
                        self.membership.close(typed)
                    return
                place.out = asyncio.get_running_loop().create_future()
                place.out.set_result(typed)

    async def _bring_up(self, place: _Place) -> None:
        assert self._launcher is not None
        place.incarnation += 1
        place.out = asyncio.get_running_loop().create_future()
        engine_id = self._launcher.engine_id(place.index)
        name = f"{engine_id}.{place.incarnation}"
        place.handle = await asyncio.to_thread(self._launcher.create, place.index, place.incarnation)
        place.pid = await self._load(place.handle, name)
        place.service = ActorService(name, place.handle, self._put, partial(self._lost, place, place.incarnation))
        replica = Replica(engine_id, place.incarnation, place.service, policy_version=0)
        await self._align(replica)
        self._say(f"{name} serves policy version {replica.policy_version} (process {place.pid})")

    async def _load(self, handle: Any, name: str) -> int:
        try:
            async with asyncio.timeout(self.config.fleet.start_timeout_s):
                accepted, value = await handle.start.remote()
        except TimeoutError:
            raise DeadlineExceeded(
                field="fleet.start_timeout_s", expected=f"{name} loaded in time", actual="still loading"
            ) from None
        except RayError as error:
            raise EngineLost(f"{name} did not start: {_reason(error)}") from error
        if not accepted:
            raise value
        return value

    async def _rejoin(self, place: _Place) -> None:
        """Bring an engine that is sound but behind up to date, without a restart."""
        assert self._launcher is not None and place.service is not None
        place.out = asyncio.get_running_loop().create_future()
        origin = await place.service.origin()
        held = {(report.name, report.rev) for report in await place.service.adapters() if report.state == "live"}
        replica = Replica(origin.engine_id, origin.incarnation, place.service, origin.policy_version, adapters=held)
        await self._align(replica)

    async def _align(self, replica: Replica) -> None:
        """Reach the fleet's versions and pause, then start routing. All may move meanwhile."""
        paused: PauseMode | None = None
        while True:
            wanted = self.membership.paused
            if replica.policy_version != self.membership.policy_version:
                await self._replay(replica)
            elif replica.adapters != self.membership.adapters:
                await self._adapters.align(replica)
            elif paused != wanted:
                if wanted is None:
                    await replica.service.resume(None)
                else:
                    await replica.service.pause(wanted, _PAUSE_TIMEOUT_S)
                paused = wanted
            else:
                self.membership.admit(replica)
                return

    async def _replay(self, replica: Replica) -> None:
        target, digest = self.membership.policy_version, self.membership.digest
        txn = f"replay-{replica.name}-{target}"
        with self._recipe.reading() as committed:
            manifest = await asyncio.to_thread(committed.manifest)
            begin = UpdateBegin(txn=txn, base_version=replica.policy_version, new_version=target, manifest=manifest)
            await replica.service.update_begin(begin)
            buckets = committed.buckets()
            while (bucket := await asyncio.to_thread(next, buckets, None)) is not None:
                await replica.service.update_tensors(txn, bucket)
            report = await replica.service.update_commit(txn)
        if report.digest != digest:
            raise Corrupt(field=f"{replica.name} digest", expected=digest, actual=report.digest)
        replica.policy_version = target

    async def _let_go(self, place: _Place, *, gently: bool) -> None:
        """End the present incarnation, whatever state it is in."""
        handle, service = place.handle, place.service
        place.handle = place.service = place.pid = None
        if service is not None:
            await service.close()
        if handle is None:
            return
        if gently:
            try:
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await handle.stop.remote()
            except (TimeoutError, RayError):
                logger.info("engine %d is ended by force", place.index)
        await asyncio.to_thread(ray.kill, handle, no_restart=True)

    # --- watching -------------------------------------------------------------------------------

    def _lost(self, place: _Place, incarnation: int, error: EngineLost) -> None:
        """An engine's process has ended, routable or not."""
        for replica in self.membership.routable():
            if replica.service is place.service:
                self.membership.take_out(replica, error)
        if place.incarnation == incarnation:
            self._report_out(place, error)

    def _on_out(self, replica: Replica, reason: SparkrollError) -> None:
        for place in self._places:
            if place.service is replica.service and place.incarnation == replica.incarnation:
                self._report_out(place, reason)

    def _report_out(self, place: _Place, reason: SparkrollError) -> None:
        if place.out is not None and not place.out.done():
            place.out.set_result(reason)

    async def _watch(self) -> None:
        """Take engines out that are fenced or whose loop stands still. A process that ends is
        noticed at once, by its event stream."""
        missed: dict[str, int] = {}
        while True:
            await asyncio.sleep(self.config.fleet.health_interval_s)
            await asyncio.gather(*(self._look(replica, missed) for replica in self.membership.routable()))

    async def _look(self, replica: Replica, missed: dict[str, int]) -> None:
        try:
            async with asyncio.timeout(self.config.fleet.health_timeout_s):
                health = await replica.service.health()
        except TimeoutError:
            missed[replica.name] = missed.get(replica.name, 0) + 1
            if missed[replica.name] >= _MISSED_HEALTH:
                self.membership.take_out(replica, EngineLost(f"{replica.name} does not answer"), fence=True)
            return
        except SparkrollError:
            return  # lost; the event stream has said so
        missed.pop(replica.name, None)
        if health.state == "fenced":
            self.membership.take_out(replica, Corrupt(f"{replica.name} is fenced"), fence=True)
        elif health.last_step_age_ms > self.config.fleet.stuck_s * 1e3:
            self.membership.take_out(replica, EngineLost(f"{replica.name} stands still"), fence=True)


def _reason(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause).strip() else ''}"


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Finish `work` even if the caller is cancelled meanwhile (Ctrl-C, again): half a shutdown
    leaves processes behind. The cancellation is raised afterwards."""
    task = asyncio.get_running_loop().create_task(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError
