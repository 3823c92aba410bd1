"""The thread that owns an engine.

Owns the loop: commands between steps, steps, deltas, and handing everything that happened in a
turn to the event loop in one piece, so that whoever listens sees a step's tokens and the ends it
brought together. Ignores what commands and events mean (`rollout.actors.engine_host`).

Nothing waits for ever: when the loop ends, for whatever reason, every command that was not
answered fails with that reason, and every later one fails at once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from engine.engine import Engine
from engine.errors import Corrupt, Draining, SparkrollError

logger = logging.getLogger(__name__)
T = TypeVar("T")
IDLE_TICK_S = 0.02
_FLUSH_SHARE = 0.02
_LONGEST_INTERVAL_S = 1.0


class _Command(Generic[T]):
    """Runs once; with `poll`, stays and is asked again after every step until it has a value."""

    __slots__ = ("future", "poll", "run")

    def __init__(self, run: Callable[[Engine], T | None], poll: bool, future: asyncio.Future[T] | None) -> None:
        self.run = run
        self.poll = poll
        self.future = future


class EngineThread:
    """Make it in the event loop that will use it. `on_turn` is called on the thread after commands,
    every `delta_interval_s` of work (or more rarely, where reporting would take more than a
    fiftieth of the time) and on every idle tick; `on_end` on the event loop when the
    loop has ended, with the reason."""

    def __init__(
        self,
        load: Callable[[], Engine],
        *,
        delta_interval_s: float,
        on_turn: Callable[[Engine], None],
        on_end: Callable[[SparkrollError], None],
        name: str,
    ) -> None:
        self._load = load
        self._delta_interval_s = delta_interval_s
        self._on_turn = on_turn
        self._on_end = on_end
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._commands: deque[_Command[Any]] = deque()
        self._polled: list[_Command[Any]] = []
        self._outbox: list[tuple[Callable[..., None], tuple]] = []
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._stopping = False
        self._ended: SparkrollError | None = None
        self._next_flush = 0.0
        self.last_turn = time.monotonic()
        self._loaded: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, name=f"engine-{name}", daemon=True)

    async def start(self) -> None:
        """Load the engine on its thread; raises what loading raised."""
        self._thread.start()
        await self._loaded

    async def stop(self) -> None:
        """End the loop after the present step."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    @property
    def ended(self) -> SparkrollError | None:
        """Why the loop is over, or None."""
        return self._ended

    def call(self, run: Callable[[Engine], T]) -> asyncio.Future[T]:
        """Run between two steps. Commands run in the order of their calls."""
        return self._submit(run, poll=False)

    def poll(self, run: Callable[[Engine], T | None]) -> asyncio.Future[T]:
        """Run between every two steps until it returns something; cancelling the future stops it."""
        return self._submit(run, poll=True)

    def post(self, run: Callable[[Engine], Any]) -> None:
        """Like `call`, for those who need no answer. After the end it does nothing."""
        with self._lock:
            if self._ended is None:
                self._commands.append(_Command(run, False, None))
        self._wake.set()

    def emit(self, deliver: Callable[..., None], *args: Any) -> None:
        """On the engine's thread: call `deliver(*args)` on the event loop when this turn is over."""
        self._outbox.append((deliver, args))

    def _submit(self, run: Callable[[Engine], T | None], poll: bool) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        with self._lock:
            if self._ended is not None:
                future.set_exception(self._ended)
                return future
            self._commands.append(_Command(run, poll, future))
        self._wake.set()
        return future

    def _main(self) -> None:
        try:
            engine = self._load()
        except BaseException as error:
            self._end(Draining("the engine did not load"))
            self._to_loop([(_reject, (self._loaded, error))])
            return
        self._to_loop([(_resolve, (self._loaded, None))])
        reason: SparkrollError = Draining("the engine is shutting down")
        try:
            while not self._stopping:
                self._turn(engine)
        except BaseException as error:
            logger.exception("the loop of engine %s stopped", self._name)
            reason = Corrupt(f"the engine's loop stopped: {type(error).__name__}: {error}")
        finally:
            self._end(reason)

    def _turn(self, engine: Engine) -> None:
        self._wake.clear()
        busy = self._run_commands(engine)
        worked = engine.step()
        now = self.last_turn = time.monotonic()
        flush = not worked or now >= self._next_flush
        if flush:
            engine.flush_deltas()
            # With many samples, reporting them is itself work: it may take its share of the time.
            spent = time.monotonic() - now
            wait_s = min(max(self._delta_interval_s, spent / _FLUSH_SHARE), _LONGEST_INTERVAL_S)
            self._next_flush = now + wait_s
        self._run_polled(engine)
        if flush or busy:
            self._on_turn(engine)
        self._hand_over()
        if not worked and not busy:
            self._wake.wait(IDLE_TICK_S)

    def _run_commands(self, engine: Engine) -> bool:
        busy = False
        while self._commands:
            busy = True
            command = self._commands.popleft()
            if command.future is not None and command.future.cancelled():
                continue
            if command.poll:
                self._polled.append(command)
            else:
                self._answer(command, engine)
        return busy

    def _run_polled(self, engine: Engine) -> None:
        self._polled = [command for command in self._polled if not self._answer(command, engine)]

    def _answer(self, command: _Command[Any], engine: Engine) -> bool:
        """True when the command is over. Only typed refusals are answers; anything else is a fault
        of the engine and ends the loop."""
        future = command.future
        if future is not None and future.cancelled():
            return True
        try:
            value = command.run(engine)
        except SparkrollError as error:
            if future is not None:
                self.emit(_reject, future, error)
            return True
        except BaseException as error:
            if future is not None:
                self.emit(_reject, future, Corrupt(f"{type(error).__name__}: {error}"))
            raise
        if command.poll and value is None:
            return False
        if future is not None:
            self.emit(_resolve, future, value)
        return True

    def _hand_over(self) -> None:
        if self._outbox:
            batch, self._outbox = self._outbox, []
            self._to_loop(batch)

    def _end(self, reason: SparkrollError) -> None:
        with self._lock:
            self._ended = reason
            left = [*self._commands, *self._polled]
            self._commands.clear()
            self._polled = []
        for command in left:
            if command.future is not None:
                self.emit(_reject, command.future, reason)
        self.emit(self._on_end, reason)
        self._hand_over()

    def _to_loop(self, batch: list[tuple[Callable[..., None], tuple]]) -> None:
        try:
            self._loop.call_soon_threadsafe(_deliver, batch)
        except RuntimeError:
            assert self._loop.is_closed(), "only a closed loop refuses calls"


def _deliver(batch: list[tuple[Callable[..., None], tuple]]) -> None:
    for deliver, args in batch:
        deliver(*args)


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _reject(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
