"""Frames of a generation stream, `application/x-msgpack-stream`.

Owns the frame layout, its reader, and the bounded log a broken stream resumes from. Ignores
HTTP. A frame is little-endian: body length u32, type u8, sequence u32, body (MessagePack).
Sequence numbers count up from 0 (the header); a PING repeats the last one and is never resent.
"""

from __future__ import annotations

import asyncio
import enum
import struct
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from engine.errors import Conflict, InvalidRequest, TooLarge

_HEAD = struct.Struct("<IBI")
_CHUNK_BYTES = 256 * 1024


class FrameType(enum.IntEnum):
    HEADER = 0
    DELTA = 1
    SAMPLE_END = 2
    GROUP_END = 3
    ERROR = 4
    PING = 5


LAST_FRAMES = (FrameType.GROUP_END, FrameType.ERROR)


@dataclass(frozen=True, slots=True)
class Frame:
    type: FrameType
    sequence: int
    body: bytes


def pack_frame(kind: FrameType, sequence: int, body: bytes) -> bytes:
    return _HEAD.pack(len(body), kind, sequence) + body


class FrameReader:
    """Cuts a byte stream into frames and checks that no sequence number is missing.

    `next_sequence` is what to ask for when the stream has to be resumed.
    """

    def __init__(self, next_sequence: int = 0, body_bytes: int = 64 * 2**20) -> None:
        self.next_sequence = next_sequence
        self._body_bytes = body_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _HEAD.size:
            length, kind, sequence = _HEAD.unpack_from(self._buffer, start)
            if length > self._body_bytes:
                raise TooLarge(field="frame", expected=f"at most {self._body_bytes} bytes", actual=length)
            end = start + _HEAD.size + length
            if len(self._buffer) < end:
                break
            body = bytes(memoryview(self._buffer)[start + _HEAD.size : end])
            start = end
            yield self._checked(kind, sequence, body)
        del self._buffer[:start]

    def _checked(self, kind: int, sequence: int, body: bytes) -> Frame:
        if kind not in FrameType.__members__.values():
            raise InvalidRequest(field="frame.type", expected="a known frame type", actual=kind)
        expected = self.next_sequence - 1 if kind == FrameType.PING else self.next_sequence
        if sequence != expected:
            raise InvalidRequest(field="frame.sequence", expected=expected, actual=sequence)
        self.next_sequence = expected + 1
        return Frame(FrameType(kind), sequence, body)


class FrameLog:
    """The frames of one stream, kept for readers that come late or come back.

    At most about `limit` bytes are held. What every reader has passed is dropped first; when a
    slow reader (or an absent one, which may return) still needs the rest, `append` waits.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._frames: deque[bytes] = deque()
        self._first = 0
        self._bytes = 0
        self._cursors: dict[object, int] = {}
        self._changed = asyncio.Event()
        self.closed = False

    @property
    def next_sequence(self) -> int:
        return self._first + len(self._frames)

    @property
    def held_bytes(self) -> int:
        return self._bytes

    async def append(self, kind: FrameType, body: bytes) -> None:
        while self._bytes > self._limit and not self._trim():
            await self._changed.wait()
        self._put(kind, body)

    def fail(self, body: bytes) -> None:
        """End the stream with an ERROR, at once."""
        self._put(FrameType.ERROR, body)

    async def read(self, sequence: int, ping_s: float) -> AsyncIterator[bytes]:
        """Chunks of whole frames from `sequence` on, with a PING after each `ping_s` of silence.

        Raises `Conflict` where those frames are no longer (or not yet) held.
        """
        if not self._first <= sequence <= self.next_sequence:
            held = f"a sequence in [{self._first}, {self.next_sequence}]"
            raise Conflict(field="resume_from", expected=held, actual=sequence)
        reader = object()
        self._cursors[reader] = sequence
        try:
            while True:
                chunk = self._chunk(self._cursors[reader])
                if chunk:
                    yield b"".join(chunk)
                    self._cursors[reader] += len(chunk)
                    self._notify()
                elif self.closed:
                    return
                else:
                    try:
                        async with asyncio.timeout(ping_s):
                            await self._changed.wait()
                    except TimeoutError:
                        yield pack_frame(FrameType.PING, max(self.next_sequence - 1, 0), b"\x80")
        finally:
            del self._cursors[reader]
            self._notify()

    def _put(self, kind: FrameType, body: bytes) -> None:
        frame = pack_frame(kind, self.next_sequence, body)
        self._frames.append(frame)
        self._bytes += len(frame)
        self.closed = kind in LAST_FRAMES
        self._notify()

    def _chunk(self, cursor: int) -> list[bytes]:
        chunk: list[bytes] = []
        size = 0
        for position in range(cursor - self._first, len(self._frames)):
            chunk.append(self._frames[position])
            size += len(chunk[-1])
            if size >= _CHUNK_BYTES:
                break
        return chunk

    def _trim(self) -> bool:
        """Drop what every reader has passed until within the limit; False when nothing could go."""
        passed = min(self._cursors.values(), default=self._first)
        before = self._first
        while self._bytes > self._limit and self._first < passed:
            self._bytes -= len(self._frames.popleft())
            self._first += 1
        return self._first > before

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
