"""One HTTP connection pool to a rollout service, with retries that repeat nothing.

Owns sending calls, resuming broken streams, backing off, and turning error bodies back into
exceptions. Ignores what the calls mean (`rollout.client`). Every call carries its own op_id, so
sending it again attaches to the first one instead of starting another.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from engine.errors import DeadlineExceeded, InternalError, SparkrollError
from rollout.bodies import off_loop
from rollout.codec import decode, encode
from rollout.frames import Frame, FrameReader, FrameType
from rollout.protocol import (
    BODY_TYPE,
    RESUME_HEADER,
    STREAM_TYPE,
    Delta,
    ErrorReply,
    Event,
    GenerateCall,
    GroupEnd,
    Reply,
    SampleEnd,
)
from rollout.replies import error_from_reply
from rollout.routes import Route
from rollout.wire_limits import DEFAULT_LIMITS, WireLimits

_EVENTS = {FrameType.DELTA: Delta, FrameType.SAMPLE_END: SampleEnd, FrameType.GROUP_END: GroupEnd}


class ServerLost(SparkrollError):
    """The service could not be reached, or the connection was lost and every retry with it."""

    code = "UNREACHABLE"
    retryable = True


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Up to `attempts` tries in a row without progress; waits grow from `first_s` to `longest_s`,
    each drawn from the upper half of its range so that clients do not come back in step."""

    attempts: int = 6
    first_s: float = 0.05
    longest_s: float = 2.0


class _Attempts:
    """The tries of one call: how often, until when, and how long to wait in between."""

    def __init__(self, policy: RetryPolicy, timeout_s: float) -> None:
        self._policy = policy
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        self._failed = 0

    @property
    def left_s(self) -> float:
        return max(self._end - time.monotonic(), 0.001)

    def progress(self) -> None:
        self._failed = 0

    async def after(self, error: SparkrollError) -> None:
        """Wait before the next try, or raise `error` where there is none."""
        self._failed += 1
        wait = min(self._policy.first_s * 2 ** (self._failed - 1), self._policy.longest_s)
        wait = max(wait * random.uniform(0.5, 1.0), (error.retry_after_ms or 0) / 1000)
        # After a deadline the work is gone and the time with it.
        final = not error.retryable or isinstance(error, DeadlineExceeded)
        if final or self._failed >= self._policy.attempts or wait >= self.left_s:
            raise error
        await asyncio.sleep(wait)


class HttpCaller:
    """Sends calls of the route table to one service."""

    def __init__(
        self,
        url: str,
        key: str | None,
        *,
        retry: RetryPolicy,
        max_connections: int,
        connect_timeout_s: float,
        silence_s: float,
        limits: WireLimits = DEFAULT_LIMITS,
    ) -> None:
        self._retry = retry
        self._connect_timeout_s = connect_timeout_s
        self._silence_s = silence_s
        self._limits = limits
        headers = {"authorization": f"Bearer {key}"} if key else {}
        pool = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        # Proxy settings of the environment are for the outside world, not for this service.
        # Loading certificates takes a tenth of a second that a plain connection has no use for.
        verify = not url.startswith("http://")
        self._http = httpx.AsyncClient(base_url=url, headers=headers, limits=pool, trust_env=False, verify=verify)

    async def close(self) -> None:
        await self._http.aclose()

    async def get(self, route: Route, timeout_s: float) -> httpx.Response:
        """The raw response of a GET, whatever its status."""
        attempts = _Attempts(self._retry, timeout_s)
        while True:
            try:
                return await self._http.get(route.path, timeout=self._timeouts(attempts.left_s))
            except httpx.TransportError as error:
                await attempts.after(self._lost(error, route, attempts))

    async def read(self, route: Route, timeout_s: float) -> Reply[Any]:
        """The reply of a GET route."""
        attempts = _Attempts(self._retry, timeout_s)
        while True:
            response = await self.get(route, attempts.left_s)
            if response.status_code == 200:
                return self._decode_reply(route, response.content)
            await attempts.after(self.refusal(response))

    async def send(self, route: Route, call: Any, timeout_s: float, size: int = 0) -> Reply[Any]:
        """The reply of a POST route. `size` is about how many bytes the body will have."""
        body = await off_loop(size, lambda: encode(call))
        attempts = _Attempts(self._retry, timeout_s)
        while True:
            try:
                response = await self._http.post(
                    route.path,
                    content=body,
                    headers={"content-type": BODY_TYPE},
                    timeout=self._timeouts(attempts.left_s),
                )
            except httpx.TransportError as error:
                await attempts.after(self._lost(error, route, attempts))
                continue
            if response.status_code == 200:
                return await off_loop(len(response.content), partial(self._decode_reply, route, response.content))
            await attempts.after(self.refusal(response))

    async def stream(self, route: Route, call: GenerateCall, timeout_s: float) -> AsyncGenerator[Event]:
        """The events of a generation; a lost connection is resumed where it broke off."""
        body = encode(call)
        attempts = _Attempts(self._retry, timeout_s)
        next_sequence, started = 0, False
        while True:
            reader = FrameReader(next_sequence, self._limits.body_bytes)
            try:
                async with aclosing(self._frames(route, body, reader, attempts)) as frames:
                    async for frame in frames:
                        next_sequence = reader.next_sequence
                        attempts.progress()
                        if frame.type in _EVENTS:
                            started = True
                            yield decode(frame.body, _EVENTS[frame.type], self._limits)
                        if frame.type == FrameType.GROUP_END:
                            return
                lost: SparkrollError = ServerLost(f"{route.name}: the stream ended early")
            except httpx.TransportError as error:
                lost = self._lost(error, route, attempts)
            except SparkrollError as error:
                # What refused to start may be asked again; what broke after tokens were given
                # may not: the repeat could give others.
                if started:
                    raise
                lost, next_sequence = error, 0
            await attempts.after(lost)

    async def _frames(
        self, route: Route, body: bytes, reader: FrameReader, attempts: _Attempts
    ) -> AsyncGenerator[Frame]:
        headers = {"content-type": BODY_TYPE, "accept": STREAM_TYPE, RESUME_HEADER: str(reader.next_sequence)}
        timeouts = self._timeouts(min(self._silence_s, attempts.left_s))
        async with self._http.stream("POST", route.path, content=body, headers=headers, timeout=timeouts) as response:
            if response.status_code != 200:
                await response.aread()
                raise self.refusal(response)
            async for chunk in response.aiter_raw():
                if attempts.left_s <= 0.001:
                    raise DeadlineExceeded(field=route.name, expected=f"an end within {attempts.timeout_s} s")
                for frame in reader.feed(chunk):
                    if frame.type == FrameType.ERROR:
                        raise error_from_reply(decode(frame.body, ErrorReply, self._limits))
                    yield frame

    def _decode_reply(self, route: Route, content: bytes) -> Reply[Any]:
        return decode(content, Reply[route.reply], self._limits)

    def _timeouts(self, read_s: float) -> httpx.Timeout:
        return httpx.Timeout(read_s, connect=min(self._connect_timeout_s, read_s))

    def _lost(self, error: httpx.TransportError, route: Route, attempts: _Attempts) -> SparkrollError:
        if isinstance(error, httpx.TimeoutException) and attempts.left_s < 0.01:
            return DeadlineExceeded(
                field=route.name, expected=f"an answer within {attempts.timeout_s} s", actual="none"
            )
        what = f"{type(error).__name__} {error}".rstrip()
        return ServerLost(f"{route.name}: no rollout service answers at {self._http.base_url} ({what})")

    def refusal(self, response: httpx.Response) -> SparkrollError:
        if response.headers.get("content-type", "").startswith(BODY_TYPE):
            return error_from_reply(decode(response.content, ErrorReply, self._limits))
        return InternalError(f"HTTP status {response.status_code} from something that is not a rollout service")
