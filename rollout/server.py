"""The HTTP server of a `RolloutService`: Starlette on uvicorn.

Owns the application built from the route table, and running it (in the caller's loop, or in a thread). Ignores what
happens to one request (`rollout.endpoint`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from engine.errors import InvalidRequest, NotFound, SparkrollError
from rollout.endpoint import Endpoint, ServerState
from rollout.replies import error_response
from rollout.routes import ROUTES
from rollout.server_config import ServerConfig
from rollout.service import RolloutService


def build_app(service: RolloutService, config: ServerConfig) -> Starlette:
    """The application: one endpoint per row of the route table, and nothing else."""
    state = ServerState(service, config)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await state.close()

    routes = [StarletteRoute(route.path, Endpoint(route, state), methods=[route.method]) for route in ROUTES]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _no_such_route})
    app.state.server = state
    return app


async def serve(
    service: RolloutService, config: ServerConfig, started: Callable[[RunningServer], None] | None = None
) -> None:
    """Serve until cancelled or `RunningServer.stop`; `started` is called once requests are accepted."""
    listener = _listen(config)
    server = _Server(_uvicorn_config(service, config))
    running = RunningServer(config, listener, server, threading.current_thread())
    if started is not None:
        server.on_start = lambda: started(running)
    try:
        await server.serve(sockets=[listener])
    finally:
        listener.close()


def serve_in_thread(
    service: RolloutService | Callable[[], AbstractAsyncContextManager[RolloutService]],
    config: ServerConfig | None = None,
) -> RunningServer:
    """Start a server in a thread of its own and return once it accepts requests.

    The service lives in that thread's event loop. One that must be made there comes as a function
    giving an asynchronous context manager, which is left when the server stops.
    """
    config = config or ServerConfig(port=0)
    started: Future[RunningServer] = Future()

    async def main() -> None:
        if callable(service):
            async with service() as opened:
                await serve(opened, config, started.set_result)
        else:
            await serve(service, config, started.set_result)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    threading.Thread(target=run, name="rollout-server", daemon=True).start()
    return started.result()


class RunningServer:
    """A server that accepts requests. Leaving it as a context manager stops it."""

    def __init__(
        self, config: ServerConfig, listener: socket.socket, server: uvicorn.Server, thread: threading.Thread
    ) -> None:
        self.host = config.host
        self.port: int = listener.getsockname()[1]
        self._server = server
        self._thread = thread
        self._shutdown_s = config.shutdown_s

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def stop(self) -> None:
        """End running operations, then the server. Waits for its thread unless called from it."""
        self._server.should_exit = True
        if self._thread is not threading.current_thread():
            self._thread.join(self._shutdown_s + 5)

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Server(uvicorn.Server):
    """uvicorn that says when it has started and ends operations before waiting for connections."""

    on_start: Callable[[], None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.on_start is not None and self.started:
            self.on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        app = self.config.app
        assert isinstance(app, Starlette), f"built for Starlette, not {type(app)}"
        await app.state.server.close()
        await super().shutdown(sockets)


def _uvicorn_config(service: RolloutService, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(service, config),
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(config.shutdown_s)),
    )


def _listen(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Headers and body are sent apart; without this the second waits for the first one's ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise InvalidRequest(
            field="port", expected=f"a free port on {config.host}", actual=f"{config.port} ({error.strerror})"
        ) from error
    return listener


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refusal: SparkrollError
    if error.status_code == 404:
        refusal = NotFound(field="path", expected="a route of this service", actual=request.url.path)
    else:
        refusal = InvalidRequest(field="method", expected="the route's method", actual=request.method)
    return error_response(refusal, status=error.status_code)
