"""Stream frames: cutting, sequence numbers, and the bounded log that streams resume from."""

import asyncio
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import Conflict, InvalidRequest, TooLarge
from rollout.frames import FrameLog, FrameReader, FrameType, pack_frame


@settings(max_examples=80, deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(1, 40))
def test_frames_come_back_however_the_bytes_are_cut(bodies, step):
    data = b"".join(pack_frame(FrameType.DELTA, i, body) for i, body in enumerate(bodies))
    reader = FrameReader()
    frames = [frame for at in range(0, len(data), step) for frame in reader.feed(data[at : at + step])]
    assert [(frame.sequence, frame.body) for frame in frames] == list(enumerate(bodies))
    assert reader.next_sequence == len(bodies)


def test_layout_is_as_documented():
    assert pack_frame(FrameType.SAMPLE_END, 258, b"abc") == struct.pack("<IBI", 3, 2, 258) + b"abc"


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (pack_frame(FrameType.DELTA, 1, b""), InvalidRequest),  # the first one is missing
        (struct.pack("<IBI", 0, 99, 0), InvalidRequest),
        (struct.pack("<IBI", 2**32 - 1, 1, 0), TooLarge),
    ],
)
def test_broken_streams_are_refused(data, error):
    with pytest.raises(error):
        list(FrameReader().feed(data))


def test_ping_repeats_the_last_sequence_and_counts_for_nothing():
    reader = FrameReader()
    data = (
        pack_frame(FrameType.HEADER, 0, b"") + pack_frame(FrameType.PING, 0, b"") + pack_frame(FrameType.DELTA, 1, b"")
    )
    assert [frame.type for frame in reader.feed(data)] == [FrameType.HEADER, FrameType.PING, FrameType.DELTA]
    assert reader.next_sequence == 2


async def collect(log: FrameLog, sequence: int) -> list[int]:
    reader = FrameReader(sequence)
    return [frame.sequence for chunk in [c async for c in log.read(sequence, 5.0)] for frame in reader.feed(chunk)]


def test_a_late_reader_gets_everything_and_a_returning_one_the_rest():
    async def run():
        log = FrameLog(10_000)
        early = asyncio.create_task(collect(log, 0))
        for _ in range(5):
            await log.append(FrameType.DELTA, b"x" * 10)
            await asyncio.sleep(0)
        await log.append(FrameType.GROUP_END, b"")
        assert await early == await collect(log, 0) == list(range(6))
        assert await collect(log, 4) == [4, 5]
        assert await collect(log, 6) == []
        with pytest.raises(Conflict):
            await collect(log, 7)

    asyncio.run(run())


def test_the_log_is_bounded_by_its_slowest_reader():
    async def run():
        log = FrameLog(1000)
        chunks = log.read(0, 5.0)

        async def produce():
            for _ in range(100):
                await log.append(FrameType.DELTA, b"x" * 91)  # 100 bytes with its head
            await log.append(FrameType.GROUP_END, b"")

        producer = asyncio.create_task(produce())
        seen, reader = [], FrameReader()
        async for chunk in chunks:
            seen += [frame.sequence for frame in reader.feed(chunk)]
            await asyncio.sleep(0.002)
            assert log.held_bytes <= 1200
        await producer
        assert seen == list(range(101))
        with pytest.raises(Conflict):  # long gone
            await collect(log, 3)
        assert await collect(log, 95) == list(range(95, 101))  # still held

    asyncio.run(run())


def test_without_a_reader_the_producer_waits():
    async def run():
        log = FrameLog(1000)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                for _ in range(100):
                    await log.append(FrameType.DELTA, b"x" * 91)
        assert log.held_bytes <= 1100
        log.fail(b"late")
        assert (await collect(log, 0))[-1] == log.next_sequence - 1

    asyncio.run(run())
