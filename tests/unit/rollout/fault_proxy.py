"""A TCP proxy that breaks connections on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

Fault = Callable[[int], int | None]
"""From a connection's number to how many reply bytes pass before it is cut; None passes all."""


class FaultProxy:
    """Listens on `url` and forwards to `port`. A connection is cut on both sides, and never before
    the whole request has been delivered: the cut is armed by the first reply byte, or, for a fault
    of 0 bytes, by the request's last byte."""

    def __init__(self, port: int, fault: Fault) -> None:
        self._port = port
        self._fault = fault
        self.connections = 0
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(self._handle, "127.0.0.1", 0))
        ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.set_exception_handler(lambda *_: None)  # connections that end with the proxy
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self.connections
        self.connections += 1
        allowed = self._fault(number)
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        delivered = asyncio.Event()
        tasks = [
            asyncio.create_task(_forward_request(reader, up_writer, delivered)),
            asyncio.create_task(_forward_reply(up_reader, writer, delivered, allowed)),
        ]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for side in (writer, up_writer):
            with contextlib.suppress(OSError):
                side.close()


async def _forward_request(reader: asyncio.StreamReader, out: asyncio.StreamWriter, delivered: asyncio.Event) -> None:
    pending = b""
    while data := await reader.read(65536):
        out.write(data)
        await out.drain()
        pending += data
        head, end, body = pending.partition(b"\r\n\r\n")
        fields = head.lower().split(b"content-length:")
        length = int(fields[1].split(b"\r\n")[0]) if len(fields) > 1 else 0
        if end and len(body) >= length:
            pending = b""
            delivered.set()


async def _forward_reply(
    reader: asyncio.StreamReader, out: asyncio.StreamWriter, delivered: asyncio.Event, allowed: int | None
) -> None:
    await delivered.wait()
    passed = 0
    while allowed is None or passed < allowed:
        data = await reader.read(65536 if allowed is None else allowed - passed)
        if not data:
            return
        passed += len(data)
        out.write(data)
        await out.drain()
    if allowed == 0:
        await asyncio.sleep(0.02)  # let the server read what was sent before the connection goes
