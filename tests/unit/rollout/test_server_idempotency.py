"""The registry of operations: one run per op_id, bounded memory, abandoned work ended."""

import asyncio
import time

import pytest

from engine.errors import Conflict, DeadlineExceeded, Draining, InternalError, InvalidRequest, Overloaded
from rollout.idempotency import Operation, OperationRegistry
from rollout.replies import error_body


def registry(ttl_s=60.0, max_bytes=10**6, grace_s=0.05) -> OperationRegistry:
    return OperationRegistry(ttl_s, max_bytes, grace_s, error_body)


class Work:
    """Counts its runs; answers with their number after `seconds`."""

    def __init__(self, seconds=0.01, error=None):
        self.runs, self.cancelled, self.seconds, self.error = 0, 0, seconds, error

    async def __call__(self, _: Operation) -> bytes:
        self.runs += 1
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error:
            raise self.error
        return b"%d" % self.runs


async def outcome(operations, work, op_id="a", fingerprint=b"f", **options):
    operation = operations.attach(op_id, fingerprint, work, **options)
    await operation.ended.wait()
    operations.detach(operation)
    return operation.outcome


def test_repeats_share_one_run():
    async def run():
        operations, work = registry(), Work()
        results = await asyncio.gather(*(outcome(operations, work) for _ in range(5)))
        assert results == [b"1"] * 5 and await outcome(operations, work) == b"1"
        assert work.runs == 1 and operations.repeats == 5
        with pytest.raises(Conflict):
            operations.attach("a", b"other body", work)
        assert await outcome(operations, work, op_id="b") == b"2"

    asyncio.run(run())


def test_only_final_errors_are_kept():
    async def run():
        operations = registry()
        final, passing = Work(error=InvalidRequest(field="x")), Work(error=Overloaded("full"))
        for work, op_id, runs in ((final, "final", 1), (passing, "passing", 2)):
            for _ in range(2):
                assert await outcome(operations, work, op_id=op_id) is work.error
            assert work.runs == runs
        broken = await outcome(operations, Work(error=KeyError("secret")), op_id="broken")
        assert isinstance(broken, InternalError) and "secret" not in str(broken)

    asyncio.run(run())


def test_replies_are_bounded_in_time_and_bytes():
    async def run():
        work = Work(0.0)
        operations = registry(ttl_s=0.05)
        await outcome(operations, work)
        await asyncio.sleep(0.06)
        assert await outcome(operations, work) == b"2"
        operations = registry(max_bytes=5 * 1100)
        for i in range(50):
            await outcome(operations, work, op_id=str(i))
        assert sum(operations.known(str(i)) for i in range(50)) == 5 and operations.known("49")

    asyncio.run(run())


def test_abandoned_work_ends_after_the_grace_unless_someone_returns():
    async def run():
        operations = registry(grace_s=0.1)
        lost, kept, firm = Work(30.0), Work(0.2), Work(0.2)
        for op_id, work, abortable in (("lost", lost, True), ("kept", kept, True), ("firm", firm, False)):
            operations.detach(operations.attach(op_id, b"f", work, abortable=abortable))
        await asyncio.sleep(0.05)
        assert await outcome(operations, kept, op_id="kept", abortable=True) == b"1"
        await asyncio.sleep(0.1)
        assert (lost.cancelled, kept.runs, kept.cancelled, firm.cancelled) == (1, 1, 0, 0)
        assert not operations.known("lost") and operations.known("firm")

    asyncio.run(run())


def test_deadline_ends_abortable_work():
    async def run():
        operations, work = registry(), Work(30.0)
        started = time.monotonic()
        error = await outcome(operations, work, abortable=True, deadline_ms=50)
        assert isinstance(error, DeadlineExceeded) and work.cancelled == 1 and time.monotonic() - started < 5
        inner = await outcome(operations, Work(error=TimeoutError()), op_id="b", deadline_ms=5000)
        assert isinstance(inner, InternalError)  # not our deadline

    asyncio.run(run())


def test_close_answers_everyone():
    async def run():
        operations, work = registry(), Work(30.0)
        waiting = asyncio.create_task(outcome(operations, work))
        await asyncio.sleep(0.01)
        await operations.close()
        assert isinstance(await waiting, Draining) and operations.running == 0
        with pytest.raises(Draining):
            operations.attach("late", b"f", work)

    asyncio.run(run())
