"""What an operation does once it has been accepted: call the service and encode its answer.

Owns plain calls, groups collected from their events, and groups streamed as frames. Ignores
connections: an operation may outlive the one that started it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec

from engine.errors import InternalError
from engine.types import SampleOutput
from rollout.bodies import off_loop
from rollout.codec import encode
from rollout.frames import FrameType
from rollout.idempotency import Operation, Runner
from rollout.protocol import Delta, Event, GenerateCall, GroupEnd, Reply, SampleEnd, StreamHeader
from rollout.routes import Route
from rollout.service import RolloutService

_FRAME_TYPES: dict[type, FrameType] = {
    Delta: FrameType.DELTA,
    SampleEnd: FrameType.SAMPLE_END,
    GroupEnd: FrameType.GROUP_END,
}


def call_runner(route: Route, service: RolloutService, call: Any) -> Runner:
    async def run(_: Operation) -> bytes:
        result = await cast(Any, route.run(service, call))
        return encode(Reply(result=result, origin=await service.origin()))

    return run


def group_runner(route: Route, service: RolloutService, call: GenerateCall) -> Runner:
    async def run(_: Operation) -> bytes:
        samples: list[SampleOutput] = []
        async with _events(route, service, call) as events:
            async for event in events:
                if isinstance(event, SampleEnd):
                    samples.append(event.sample)
                elif isinstance(event, GroupEnd):
                    samples.sort(key=lambda sample: sample.index)
                    return await _encode_group(event, samples)
        raise _unfinished(call)

    return run


def stream_runner(route: Route, service: RolloutService, call: GenerateCall, ping_s: float) -> Runner:
    async def run(operation: Operation) -> bytes:
        frames = operation.frames
        assert frames is not None, "a stream needs a frame log"
        origin = await service.origin()
        header = StreamHeader(op_id=call.op_id, group_id=call.request.group_id, origin=origin, ping_s=ping_s)
        await frames.append(FrameType.HEADER, encode(header))
        async with _events(route, service, call) as events:
            async for event in events:
                await frames.append(_FRAME_TYPES[type(event)], encode(event))
        if not frames.closed:
            raise _unfinished(call)
        return b""

    return run


async def _encode_group(end: GroupEnd, samples: list[SampleOutput]) -> bytes:
    samples.sort(key=lambda sample: sample.index)
    reply = Reply(result=msgspec.structs.replace(end.group, samples=samples), origin=end.origin)
    return await off_loop(sum(2 * sample.ids.nbytes for sample in samples), lambda: encode(reply))


@contextlib.asynccontextmanager
async def _events(route: Route, service: RolloutService, call: GenerateCall) -> AsyncIterator[AsyncIterator[Event]]:
    """The service's events; leaving early closes them, which aborts the group."""
    events = cast(AsyncIterator[Event], route.run(service, call))
    try:
        yield events
    finally:
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()


def _unfinished(call: GenerateCall) -> InternalError:
    return InternalError(f"the events of group {call.request.group_id} ended without the group")
