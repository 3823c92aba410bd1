"""A whole service in one call: fleet and HTTP server, started and stopped together.

Owns the order of both. `run_service` serves in the caller's event loop until cancelled;
`start_service` does so in a thread, for programs that are not asynchronous, such as trainers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from engine.errors import DeadlineExceeded
from rollout.config import ServeConfig
from rollout.fleet import Fleet
from rollout.server import RunningServer, serve

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 30.0


async def run_service(
    config: ServeConfig,
    ready: Callable[[Fleet, RunningServer], None],
    say: Callable[[str], None] = logger.info,
) -> None:
    """Serve until cancelled or stopped; `ready` is called once requests are accepted."""
    async with Fleet(config, say) as fleet:
        await serve(fleet.router, config.server, lambda server: ready(fleet, server))


class RunningService:
    """A service in a thread of its own. Leaving it as a context manager stops it."""

    def __init__(self, config: ServeConfig, say: Callable[[str], None], start_timeout_s: float) -> None:
        self._ready: Future[tuple[Fleet, RunningServer]] = Future()
        self._thread = threading.Thread(target=self._main, args=(config, say), name="rollout-service", daemon=True)
        self._thread.start()
        try:
            self.fleet, self._server = self._ready.result(start_timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(
                field="service", expected=f"ready within {start_timeout_s} s", actual="still starting"
            ) from None

    @property
    def url(self) -> str:
        return self._server.url

    def stop(self) -> None:
        """Stop serving; engines that do not go within `STOP_TIMEOUT_S` are left to Ray."""
        self._server.stop()
        self._thread.join(STOP_TIMEOUT_S)

    def __enter__(self) -> RunningService:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _main(self, config: ServeConfig, say: Callable[[str], None]) -> None:
        try:
            asyncio.run(run_service(config, lambda fleet, server: self._ready.set_result((fleet, server)), say))
        except BaseException as error:
            if self._ready.done():
                logger.exception("the service stopped")
            else:
                self._ready.set_exception(error)


def start_service(
    config: ServeConfig, say: Callable[[str], None] = logger.info, start_timeout_s: float = 600.0
) -> RunningService:
    """Start a service and return once it accepts requests; raises what kept it from starting."""
    return RunningService(config, say, start_timeout_s)
