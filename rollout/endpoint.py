"""One request from its first byte to its reply.

Owns the order of things (key, headers, body, decoding, operation, reply) and what happens when
the caller goes away. Ignores which operations there are (`rollout.routes`) and what they do
(`rollout.runners`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from typing import Any, cast

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.errors import Conflict, DeadlineExceeded, InternalError, SparkrollError, Unauthorized
from rollout.auth import KeyRing
from rollout.bodies import BodyBudget, CallerGone, check_headers, disconnected, off_loop, read_body, resume_from
from rollout.codec import decode, encode
from rollout.frames import FrameLog
from rollout.idempotency import Operation, OperationRegistry
from rollout.protocol import BODY_TYPE, STREAM_TYPE, Call, GenerateCall, Reply
from rollout.replies import error_body, error_response
from rollout.routes import Route, check_call
from rollout.runners import call_runner, group_runner, stream_runner
from rollout.server_config import ServerConfig
from rollout.server_metrics import ServerMetrics
from rollout.service import RolloutService

log = logging.getLogger(__name__)
_STATE_WAIT_S = 0.25
_DEADLINE_SLACK_S = 5.0


class ServerState:
    """What the endpoints of one server share."""

    def __init__(self, service: RolloutService, config: ServerConfig) -> None:
        self.service = service
        self.config = config
        self.keys = KeyRing(config.user_key, config.admin_key)
        self.operations = OperationRegistry(config.reply_ttl_s, config.reply_bytes, config.grace_s, error_body)
        self.metrics = ServerMetrics(self.operations)
        self.bodies = BodyBudget(config.inflight_bytes)

    async def close(self) -> None:
        await self.operations.close()


class Endpoint:
    """The ASGI application of one route."""

    def __init__(self, route: Route, state: ServerState) -> None:
        self.route = route
        self._state = state
        self._service = state.service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        status = 499
        try:
            self._state.keys.check(self.route.access, headers.get("authorization"), headers.get("host"))
            if self.route.request is None:
                response = await self._get()
            else:
                response = await self._post(headers, receive, send)
        except CallerGone:
            response = None
        except SparkrollError as error:
            response = error_response(error, await self._service_state(error))
        except Exception as error:
            log.exception("%s failed", self.route.name)
            response = error_response(InternalError(f"internal error ({type(error).__name__})"))
        if response is not None:
            status = response.status_code
            if not isinstance(response, _Streamed):
                await response(scope, receive, send)
        self._state.metrics.count(self.route.name, status)

    async def _get(self) -> Response:
        result = await cast(Any, self.route.run(self._service, None))
        if self.route.reply is str:
            return Response(result + self._state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
        body = encode(Reply(result=result, origin=await self._service.origin()))
        return Response(body, self.route.status(result), media_type=BODY_TYPE)

    async def _post(self, headers: Headers, receive: Receive, send: Send) -> Response:
        streaming = self.route.stream and headers.get("accept", "").split(";")[0].strip() == STREAM_TYPE
        sequence = resume_from(headers)
        call, fingerprint = await self._read(headers, receive, streaming)
        check_call(call)
        self.route.check(call)
        if sequence > 0 and not self._state.operations.known(call.op_id):
            raise Conflict(field="resume_from", expected="a stream that is still held", actual=call.op_id)
        operation = self._attach(call, fingerprint, streaming)
        try:
            if operation.frames is not None:
                await self._stream(operation.frames, sequence, receive, send)
                return _Streamed()
            return Response(await self._outcome(operation, call.deadline_ms, receive), media_type=BODY_TYPE)
        finally:
            self._state.operations.detach(operation)

    async def _read(self, headers: Headers, receive: Receive, streaming: bool) -> tuple[Any, bytes]:
        """The decoded body and the digest that tells a repeat from another call."""
        config, budget = self._state.config, self._state.bodies
        check_headers(headers, config.limits.body_bytes)
        body = await read_body(receive, config.limits.body_bytes, config.body_timeout_s, budget)
        size = len(body)

        def understand() -> tuple[Any, bytes]:
            digest = hashlib.sha256(f"{self.route.name} {streaming} ".encode())
            digest.update(body)
            return decode(body, cast(type, self.route.request), config.limits), digest.digest()

        try:
            return await off_loop(size, understand)
        finally:
            budget.used -= size

    def _attach(self, call: Call | GenerateCall, fingerprint: bytes, streaming: bool) -> Operation:
        config = self._state.config
        if not isinstance(call, GenerateCall):
            run = call_runner(self.route, self._service, call)
        elif streaming:
            run = stream_runner(self.route, self._service, call, config.ping_s)
        else:
            run = group_runner(self.route, self._service, call)
        return self._state.operations.attach(
            call.op_id,
            fingerprint,
            run,
            abortable=self.route.abortable,
            frames=(lambda: FrameLog(config.replay_bytes)) if streaming else None,
            deadline_ms=call.deadline_ms,
        )

    async def _outcome(self, operation: Operation, deadline_ms: int | None, receive: Receive) -> bytes:
        """Wait for the operation, the deadline or the caller's leaving, whichever is first."""
        seconds = None
        if deadline_ms is not None:
            # Abortable work is ended by its deadline itself; leave it the time to free what it held.
            seconds = deadline_ms / 1000 + (_DEADLINE_SLACK_S if operation.abortable else 0.0)
        ended = asyncio.ensure_future(operation.ended.wait())
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({ended, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            gone.cancel()
        if operation.ended.is_set():
            if isinstance(operation.outcome, SparkrollError):
                raise operation.outcome
            assert operation.outcome is not None, "an operation that ended has an outcome"
            return operation.outcome
        if gone.done():
            raise CallerGone
        raise DeadlineExceeded(field="deadline_ms", expected=f"{deadline_ms} ms", actual="more")

    async def _stream(self, frames: FrameLog, sequence: int, receive: Receive, send: Send) -> None:
        """Copy frames to the connection until the last one or until the caller leaves."""
        chunks = frames.read(sequence, self._state.config.ping_s)
        first = await anext(chunks, b"")
        headers = [(b"content-type", STREAM_TYPE.encode()), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        gone = asyncio.ensure_future(disconnected(receive))
        copying = asyncio.ensure_future(self._copy(first, chunks, send))
        try:
            await asyncio.wait({copying, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not copying.done():
                raise CallerGone
            await copying
        finally:
            copying.cancel()
            gone.cancel()
            await asyncio.gather(copying, gone, return_exceptions=True)

    async def _copy(self, first: bytes, chunks: AsyncIterator[bytes], send: Send) -> None:
        async def write(body: bytes, more: bool) -> None:
            message = {"type": "http.response.body", "body": body, "more_body": more}
            async with asyncio.timeout(self._state.config.send_timeout_s):
                await send(message)

        try:
            if first:
                await write(first, True)
            async for chunk in chunks:
                await write(chunk, True)
            await write(b"", False)
        except TimeoutError:
            raise CallerGone from None
        finally:
            await cast(Any, chunks).aclose()

    async def _service_state(self, error: SparkrollError) -> str:
        if isinstance(error, Unauthorized):
            return ""
        try:
            async with asyncio.timeout(_STATE_WAIT_S):
                return (await self._service.health()).state
        except Exception:
            log.warning("no health state for an error reply", exc_info=True)
            return ""


class _Streamed(Response):
    """Stands for a reply that has already been sent."""
