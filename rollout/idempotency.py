"""Operations by `op_id`: each is run once, however often it is asked for.

Owns the life of an operation apart from the connections that wait for it: attaching repeats,
keeping replies for a bounded time and size, ending an operation that nobody waits for any more.
Ignores HTTP and what operations do. One event loop owns a registry.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from engine.errors import Conflict, DeadlineExceeded, Draining, InternalError, SparkrollError
from rollout.frames import FrameLog

log = logging.getLogger(__name__)
_ENTRY_BYTES = 1024


class Operation:
    """One accepted call. `outcome` is set when it has ended: the stored reply or the error.

    `frames` is present for streams; their reply is the log itself and `outcome` stays empty.
    """

    def __init__(self, op_id: str, fingerprint: bytes, abortable: bool, frames: FrameLog | None) -> None:
        self.op_id = op_id
        self.fingerprint = fingerprint
        self.abortable = abortable
        self.frames = frames
        self.attached = 0
        self.status = 200
        self.outcome: bytes | SparkrollError | None = None
        self.ended = asyncio.Event()
        self.ended_at = 0.0
        self.task: asyncio.Task[None] | None = None

    @property
    def held_bytes(self) -> int:
        body = len(self.outcome) if isinstance(self.outcome, bytes) else 0
        return _ENTRY_BYTES + body + (self.frames.held_bytes if self.frames else 0)


Runner = Callable[[Operation], Awaitable[bytes]]


class OperationRegistry:
    """All operations that run or have lately ended.

    A reply is kept for `ttl_s` and while all of them fit in `max_bytes` (the oldest go first);
    after that a repeat runs anew. Retryable errors are not kept: the repeat is the retry. An
    abortable operation that has had no caller for `grace_s` is cancelled.
    """

    def __init__(
        self, ttl_s: float, max_bytes: int, grace_s: float, encode_error: Callable[[SparkrollError], bytes]
    ) -> None:
        self._encode_error = encode_error
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._grace_s = grace_s
        self._operations: dict[str, Operation] = {}
        self._kept: OrderedDict[str, Operation] = OrderedDict()
        self._kept_bytes = 0
        self._closed = False
        self.repeats = 0

    @property
    def running(self) -> int:
        return len(self._operations) - len(self._kept)

    def attach(
        self,
        op_id: str,
        fingerprint: bytes,
        run: Runner,
        *,
        abortable: bool = False,
        frames: Callable[[], FrameLog] | None = None,
        deadline_ms: int | None = None,
    ) -> Operation:
        """The operation of this id, started now unless it is known. Pair with `detach`.

        Raises `Conflict` where the id was used with another body or another route, `Draining`
        once the registry is closed.
        """
        if self._closed:
            raise Draining("the server is stopping")
        self._expire()
        operation = self._operations.get(op_id)
        if operation is None:
            operation = Operation(op_id, fingerprint, abortable, frames() if frames else None)
            self._operations[op_id] = operation
            operation.task = asyncio.create_task(self._run(operation, run, deadline_ms), name=f"operation {op_id}")
        elif operation.fingerprint != fingerprint:
            raise Conflict(field="op_id", expected="the body it was first sent with", actual=op_id)
        else:
            self.repeats += 1
        operation.attached += 1
        return operation

    def known(self, op_id: str) -> bool:
        self._expire()
        return op_id in self._operations

    def detach(self, operation: Operation) -> None:
        operation.attached -= 1
        if operation.attached == 0 and operation.abortable and not operation.ended.is_set():
            asyncio.get_running_loop().call_later(self._grace_s, self._abandon, operation)

    async def close(self) -> None:
        """Cancel what runs and take nothing more; its callers get `Draining`."""
        self._closed = True
        tasks = [operation.task for operation in self._operations.values() if operation.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _abandon(self, operation: Operation) -> None:
        if operation.attached == 0 and not operation.ended.is_set() and operation.task:
            log.info("operation %s has no caller left; cancelled", operation.op_id)
            operation.task.cancel()

    async def _run(self, operation: Operation, run: Runner, deadline_ms: int | None) -> None:
        # Only abortable work is ended by its deadline; the others' callers stop waiting instead.
        seconds = deadline_ms / 1000 if deadline_ms and operation.abortable else None
        bound = asyncio.timeout(seconds)
        try:
            async with bound:
                operation.outcome = await run(operation)
        except SparkrollError as error:
            operation.outcome = error
        except asyncio.CancelledError:
            operation.outcome = Draining(f"operation {operation.op_id} was cancelled")
        except Exception as error:
            if isinstance(error, TimeoutError) and bound.expired():
                operation.outcome = DeadlineExceeded(field="deadline_ms", expected=f"{deadline_ms} ms", actual="more")
                return
            log.exception("operation %s failed", operation.op_id)
            operation.outcome = InternalError(f"internal error ({type(error).__name__})")
        finally:
            self._end(operation)

    def _end(self, operation: Operation) -> None:
        operation.ended_at = time.monotonic()
        operation.ended.set()
        error = operation.outcome if isinstance(operation.outcome, SparkrollError) else None
        if error and operation.frames and not operation.frames.closed:
            operation.frames.fail(self._encode_error(error))
        if error and error.retryable:
            del self._operations[operation.op_id]
            return
        self._kept[operation.op_id] = operation
        self._kept_bytes += operation.held_bytes
        self._expire()

    def _expire(self) -> None:
        oldest_allowed = time.monotonic() - self._ttl_s
        while self._kept:
            operation = next(iter(self._kept.values()))
            if operation.ended_at >= oldest_allowed and self._kept_bytes <= self._max_bytes:
                return
            del self._kept[operation.op_id]
            del self._operations[operation.op_id]
            self._kept_bytes -= operation.held_bytes
