"""One Ray session and one fleet for all end-to-end tests.

A fleet replaces the engines that tests kill, so it can be shared; `fleet3` waits until it is whole.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from rollout.actors.launch import ensure_ray
from rollout.config import FleetConfig, ServeConfig
from rollout.fleet import Fleet
from rollout.server import RunningServer, serve
from rollout.server_config import ServerConfig


class LoopThread:
    """An event loop that outlives single tests."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float = 120.0) -> Any:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, timeout_s), self.loop).result()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class ServedFleet:
    """A fleet with an HTTP server in front."""

    def __init__(self, loop: LoopThread, config: ServeConfig) -> None:
        self._loop = loop
        self.config = config
        self.fleet: Fleet = None  # type: ignore[assignment]
        self._server: RunningServer = None  # type: ignore[assignment]

    async def start(self) -> ServedFleet:
        self.fleet = Fleet(self.config)
        await self.fleet.start()
        ready: asyncio.Future[RunningServer] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(serve(self.fleet.router, self.config.server, ready.set_result))
        self._server = await ready
        return self

    async def stop(self) -> None:
        self._server.stop()
        await self._task
        await self.fleet.stop()

    @property
    def url(self) -> str:
        return self._server.url

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float = 120.0) -> Any:
        return self._loop.run(work, timeout_s)

    async def whole(self, timeout_s: float = 90.0) -> None:
        """Wait until every engine is routable."""
        deadline = time.monotonic() + timeout_s
        while len(self.fleet.membership.routable()) < self.config.fleet.num_engines:
            assert time.monotonic() < deadline, self.fleet.describe()
            await asyncio.sleep(0.05)


def serve_config(folder: Path, engines: int, update_root: Path | None = None, **fleet: Any) -> ServeConfig:
    return ServeConfig(
        model=str(folder),
        update_root=update_root,
        engine=EngineConfig(
            device="cpu",
            dtype="float32",
            num_threads=1,
            cache=CacheConfig(page_size=4, kv_tokens=16384),
            scheduler=SchedulerConfig(max_running=64, prefill_tokens=128),
        ),
        fleet=FleetConfig(num_engines=engines, health_interval_s=0.2, delta_interval_ms=10, **fleet),
        server=ServerConfig(port=0),
    )


@pytest.fixture(scope="session")
def loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.stop()


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    started = ensure_ray(None)
    yield
    if started:
        ray.shutdown()


@pytest.fixture(scope="session")
def shared_fleet(ray_session, loop_thread, t_full, tmp_path_factory) -> Iterator[ServedFleet]:
    root = tmp_path_factory.getbasetemp()
    served = loop_thread.run(ServedFleet(loop_thread, serve_config(t_full, 3, update_root=root)).start())
    yield served
    loop_thread.run(served.stop())


@pytest.fixture
def fleet3(shared_fleet) -> ServedFleet:
    shared_fleet.run(shared_fleet.whole())
    return shared_fleet
