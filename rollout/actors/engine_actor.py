"""The Ray actor around one engine.

Owns the actor's methods and their replies. An actor serves one owner: all its generation streams
travel over a single Ray stream (`events`), some tens of items a second whatever the number of
groups. A turn's events stay together, so that what arrives is either the whole turn or nothing.
Ignores the owner's side (`rollout.actors.remote`) and placement (`rollout.actors.launch`).

Refusals are values here: a typed error is returned, not raised, so that Ray neither wraps nor
logs it. Whatever crosses this border comes from our own processes; bodies from the network have
been decoded, and checked, before.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InternalError, SparkrollError
from rollout.actors.engine_host import EngineHost
from rollout.actors.text_front import TextFront
from rollout.protocol import Event, GenerateCall

logger = logging.getLogger(__name__)

METHODS = frozenset(
    {
        "origin", "score", "abort", "pause", "resume", "update_begin", "update_disk", "update_tensors",
        "update_commit", "update_rollback", "adapter_tensors", "update_adapter", "unload_adapter", "adapters",
        "stage_adapter", "publish_adapter", "discard_adapter", "retire_adapter", "version", "flush",
        "release_memory", "resume_memory", "session_open", "session_close", "health", "metrics", "capabilities",
    }
)  # fmt: skip

ORDERED = frozenset({"abort", "pause", "resume"})
"""Methods that take effect in the order in which the owner called them and opened groups: Ray
starts an asynchronous actor's calls in any order."""
TURN_TIMEOUT_S = 10.0

StreamItem = tuple[int, Event | SparkrollError]
"""An event and the number its owner gave the stream."""


@dataclass(frozen=True, slots=True)
class EngineActorConfig:
    """`folder` is a Hugging Face folder on the actor's machine."""

    engine_id: str
    incarnation: int
    folder: Path
    engine: EngineConfig
    delta_interval_s: float
    update_root: Path | None


class EngineActor:
    """Created by `rollout.actors.launch`. Every method is asynchronous; none waits for a step
    except those that must take effect between two."""

    def __init__(self, config: EngineActorConfig) -> None:
        self._config = config
        self._host: EngineHost | None = None
        self._outgoing: list[StreamItem] = []
        self._filled = asyncio.Event()
        self._turn = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def start(self) -> tuple[bool, Any]:
        """Load the model. Returns the process id, once the engine can serve."""
        try:
            config = self._config
            self._host = EngineHost(
                lambda: Engine.from_pretrained(config.folder, config.engine),
                text=TextFront.for_folder(config.folder),
                engine_id=config.engine_id,
                incarnation=config.incarnation,
                delta_interval_s=config.delta_interval_s,
                update_root=config.update_root,
            )
            await self._host.start()
        except SparkrollError as error:
            return False, error
        # The model's hundred thousand objects stay; a collector that walks them stops decoding for a tenth of a second.
        gc.collect()
        gc.freeze()
        return True, os.getpid()

    async def invoke(self, turn: int | None, method: str, *args: Any) -> tuple[bool, Any]:
        """Call a method of the service: (True, value) or (False, typed error)."""
        assert method in METHODS, method
        try:
            await self._take_turn(turn)
            return True, await getattr(self._require(), method)(*args)
        except SparkrollError as error:
            return False, error
        except Exception as error:
            logger.exception("%s failed in engine %s", method, self._config.engine_id)
            return False, InternalError(f"{method} failed: {type(error).__name__}: {error}")

    async def open(self, turn: int, number: int, call: GenerateCall) -> tuple[bool, Any]:
        """Admit a group; its events follow in `events` under `number`."""

        def push(item: Event | SparkrollError) -> None:
            self._outgoing.append((number, item))
            self._filled.set()

        try:
            await self._take_turn(turn)
            await self._require().open(call, push)
        except SparkrollError as error:
            return False, error
        except Exception as error:
            logger.exception("generate failed in engine %s", self._config.engine_id)
            return False, InternalError(f"generate failed: {type(error).__name__}: {error}")
        return True, None

    async def cancel(self, turn: int, group_id: str) -> None:
        await self._take_turn(turn)
        self._require().cancel(group_id)

    async def events(self) -> AsyncIterator[list[StreamItem]]:
        """The one stream of all groups' events."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            items, self._outgoing = self._outgoing, []
            yield items

    async def stop(self) -> None:
        if self._host is not None:
            await self._host.stop()

    async def _take_turn(self, turn: int | None) -> None:
        """Let earlier calls begin first. The next call begins when this one next awaits, which a
        host does only after its engine's thread has been told."""
        if turn is None:
            return
        if turn > self._turn:
            future = self._waiting[turn] = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(TURN_TIMEOUT_S):
                    await future
            except TimeoutError:
                logger.error("a call to engine %s before number %d never came", self._config.engine_id, turn)
            finally:
                del self._waiting[turn]
        self._turn = max(self._turn, turn + 1)
        following = self._waiting.get(self._turn)
        if following is not None and not following.done():
            following.set_result(None)

    def _require(self) -> EngineHost:
        assert self._host is not None, "start() comes first"
        return self._host
