"""One group's results on their way from the engine's thread to a caller.

Owns the sink, the reader's end of a stream, and filling in text. Ignores admission and threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.errors import SparkrollError
from engine.types import GroupOutput, SampleDelta, SampleOutput
from rollout.actors.text_front import CallText
from rollout.protocol import Delta, Event, GroupEnd, Origin, SampleEnd

Push = Callable[[Event | SparkrollError], None]
"""Takes a stream's events in order, on the event loop; an error or a `GroupEnd` is the last."""


class GroupStream:
    """The engine's sink for one group.

    Its `on_...` methods run on the engine's thread and only hand over; the rest runs on the event
    loop. `finish_text` turns a finished sample's ids (resumed ones included) into its text.
    """

    wants_deltas = True

    def __init__(
        self,
        text: CallText,
        push: Push,
        emit: Callable[..., None],
        origin: Callable[[int], Origin],
        on_close: Callable[[GroupStream], None],
    ) -> None:
        self.group_id = text.request.group_id
        self._text = text
        self._resumed = {resume.index: resume.ids for resume in text.request.resume or []}
        self._push = push
        self._emit = emit
        self._origin = origin
        self._on_close = on_close
        self.closed = False

    def on_delta(self, deltas: list[SampleDelta]) -> None:
        self._emit(self.push, Delta(samples=deltas))

    def on_sample(self, sample: SampleOutput) -> None:
        self._emit(self.push, SampleEnd(sample=sample))

    def on_group(self, group: GroupOutput) -> None:
        group.samples = []
        self._emit(self.push, GroupEnd(group=group, origin=self._origin(group.policy_version)))

    def on_error(self, error: SparkrollError) -> None:
        self._emit(self.push, error)

    def push(self, event: Event | SparkrollError) -> None:
        """Pass on an event; after the last one, or `close`, nothing more."""
        if self.closed:
            return
        if isinstance(event, SampleEnd):
            sample = event.sample
            sample.text = self._text.finish(self._resumed.get(sample.index), sample)
        if isinstance(event, (SparkrollError, GroupEnd)):
            self.close()
        self._push(event)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._on_close(self)


class EventQueue:
    """Events between a pusher and one reader. Deltas the reader has not taken grow together, so
    that a slow reader costs no more than the tokens themselves."""

    def __init__(self) -> None:
        self._items: list[Event | SparkrollError] = []
        self._filled = asyncio.Event()

    def push(self, item: Event | SparkrollError) -> None:
        last = self._items[-1] if self._items else None
        if isinstance(item, Delta) and isinstance(last, Delta):
            last.samples.extend(item.samples)
        else:
            self._items.append(item)
        self._filled.set()

    async def take(self) -> list[Event | SparkrollError]:
        """Everything there is, at least one item."""
        await self._filled.wait()
        self._filled.clear()
        items, self._items = self._items, []
        return items
