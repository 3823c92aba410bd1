"""Request bodies and headers as they come off the connection.

Owns reading a body within its limits, chunk by chunk, and the headers that say what it is.
Ignores its content.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive

from engine.errors import DeadlineExceeded, InvalidRequest, Overloaded, TooLarge, Unsupported
from rollout.protocol import BODY_TYPE, RESUME_HEADER

T = TypeVar("T")
_IN_THREAD_BYTES = 256 * 1024


class CallerGone(Exception):
    """The connection ended before its reply; nobody is left to answer."""


@dataclass(slots=True)
class BodyBudget:
    """Bytes of all bodies now being read or decoded by one server."""

    limit: int
    used: int = 0

    def take(self, size: int) -> None:
        if self.used + size > self.limit:
            raise Overloaded(
                field="body", expected=f"at most {self.limit} bytes in flight", actual=self.used, retry_after_ms=500
            )
        self.used += size


def check_headers(headers: Headers, limit: int) -> None:
    """Refuse what need not be read: another type, a compressed body, an announced excess.

    Bodies are raw columns, which hardly compress; refusing every content encoding leaves no
    small body that expands to a large one.
    """
    media = headers.get("content-type", "").split(";")[0].strip().lower()
    if media not in (BODY_TYPE, "application/msgpack"):
        raise InvalidRequest(field="content-type", expected=BODY_TYPE, actual=media)
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise Unsupported(field="content-encoding", expected="identity", actual=encoding)
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise TooLarge(field="body", expected=f"at most {limit} bytes", actual=int(announced))


async def read_body(receive: Receive, limit: int, silence_s: float, budget: BodyBudget) -> bytes:
    """The whole body, `budget` charged with its size (the caller gives that back).

    Raises `TooLarge` as soon as the limit is passed, `CallerGone` where the connection ends.
    """
    chunks: list[bytes] = []
    size = 0
    try:
        while True:
            try:
                async with asyncio.timeout(silence_s):
                    message = await receive()
            except TimeoutError:
                raise DeadlineExceeded(field="body", expected=f"a chunk within {silence_s} s", actual="none") from None
            if message["type"] == "http.disconnect":
                raise CallerGone
            chunk = message.get("body", b"")
            if size + len(chunk) > limit:
                raise TooLarge(field="body", expected=f"at most {limit} bytes", actual=f"at least {size + len(chunk)}")
            budget.take(len(chunk))
            size += len(chunk)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)
    except BaseException:
        budget.used -= size
        raise


async def disconnected(receive: Receive) -> None:
    """Returns once the caller is gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def resume_from(headers: Headers) -> int:
    """The sequence number a repeated stream call goes on from; 0 for the start."""
    text = headers.get(RESUME_HEADER, "0")
    if not text.isdecimal() or len(text) > 10:
        raise InvalidRequest(field=RESUME_HEADER, expected="a sequence number", actual=text)
    return int(text)


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run `work` on `size` bytes: in a thread where it would hold up the event loop."""
    return await asyncio.to_thread(work) if size > _IN_THREAD_BYTES else work()
