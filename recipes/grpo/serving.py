"""The rollout service of a run: a fleet on Ray behind an HTTP server, in a thread of its own.

Owns starting and stopping it around the run. Ignores what it is asked.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import DeadlineExceeded
from recipes.grpo.config import RolloutConfig
from rollout.client import Client
from rollout.config import FleetConfig, ServeConfig
from rollout.fleet import Fleet
from rollout.server import RunningServer, ServerConfig, serve

STOP_TIMEOUT_S = 30.0


@contextmanager
def serving(folder: Path, config: RolloutConfig) -> Iterator[Client]:
    """A client of engines that serve the policy in `folder`, which must stay as it is: an engine
    that is replaced starts from it."""
    settings = ServeConfig(
        model=str(folder.resolve()),
        engine=config.engine,
        fleet=FleetConfig(num_engines=config.engines),
        server=ServerConfig(port=0),
    )
    service = _Service(settings)
    service.start(config.start_timeout_s)
    try:
        with Client(service.url, timeout_s=config.timeout_s) as client:
            yield client
    finally:
        service.stop()


class _Service:
    """Fleet and server share one event loop, which this thread runs."""

    def __init__(self, settings: ServeConfig) -> None:
        self._settings = settings
        self._ready = threading.Event()
        self._server: RunningServer | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rollout-service", daemon=True)

    @property
    def url(self) -> str:
        assert self._server is not None, "started first"
        return self._server.url

    def start(self, timeout_s: float) -> None:
        self._thread.start()
        if not self._ready.wait(timeout_s):
            raise DeadlineExceeded(field="service", expected=f"ready within {timeout_s} s", actual="still starting")
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # handed to the starting thread
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        async with Fleet(self._settings) as fleet:
            await serve(fleet.router, self._settings.server, self._accepting)

    def _accepting(self, server: RunningServer) -> None:
        self._server = server
        self._ready.set()
