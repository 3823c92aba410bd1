"""Clients of the rollout service.

Owns one method per operation, on `AsyncClient` and, blocking, on `Client`. Ignores transport
(`rollout.client_http`). Errors come back as the `SparkrollError` the service raised.

    with Client("http://127.0.0.1:8000") as client:
        group = client.generate(text="2 + 3 =", n=4)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from engine.errors import DeadlineExceeded
from engine.types import (
    AbortOutcome,
    AdapterRef,
    AdapterReport,
    AdapterUpdateReport,
    GroupOutput,
    NamedTensor,
    PauseMode,
    PauseReport,
    ScoreOutput,
    ScoreRequest,
    UpdateBegin,
    UpdateProgress,
    UpdateReport,
)
from rollout.client_calls import Ids, body_parts, envelope, generate_call, new_id
from rollout.client_http import HttpCaller, RetryPolicy, ServerLost
from rollout.codec import as_ids
from rollout.protocol import AdapterSource, Event, GenerateCall, Health, MemoryReport, Reply, VersionReport
from rollout.routes import ROUTES_BY_NAME, Route

__all__ = ["AsyncClient", "Client", "RetryPolicy", "ServerLost", "generate_call"]

T = TypeVar("T")
_ANSWER_S = 5.0
_BODY_BYTES = 32 * 2**20
"""Tensors of one body; a server takes twice as much."""


class AsyncClient:
    """A pool of connections to one service; use it from one event loop.

    `timeout_s` bounds every call, retries included, and travels along as its deadline.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 5.0,
        silence_s: float = 60.0,
        max_connections: int = 256,
        retry: RetryPolicy | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self._caller = HttpCaller(
            url,
            key,
            retry=retry or RetryPolicy(),
            max_connections=max_connections,
            connect_timeout_s=connect_timeout_s,
            silence_s=silence_s,
        )

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._caller.close()

    async def call(self, name: str, *, timeout_s: float | None = None, size: int = 0, **fields: Any) -> Reply[Any]:
        """Call the route `name` with the fields of its body; the reply says who answered.

        `size` is about how many bytes the body will have.
        """
        route, seconds = ROUTES_BY_NAME[name], self.timeout_s if timeout_s is None else timeout_s
        assert route.request is not None, f"{name} takes no body"
        return await self._send(route, route.request(**envelope(None, seconds), **fields), seconds, size)

    async def _send(self, route: Route, body: Any, seconds: float, size: int = 0) -> Reply[Any]:
        # The service ends late work itself and says so; leave its answer the time to arrive.
        try:
            async with asyncio.timeout(seconds + _ANSWER_S):
                return await self._caller.send(route, body, seconds + _ANSWER_S, size)
        except TimeoutError:
            raise DeadlineExceeded(field=route.name, expected=f"an answer within {seconds} s", actual="none") from None

    async def generate(self, prompt_ids: Ids | None = None, **options: Any) -> GroupOutput:
        """One group; `options` are those of `generate_call`. With `resume`, its continuation."""
        route, call, seconds = self._generation(prompt_ids, options)
        return (await self._send(route, call, seconds)).result

    async def stream(self, prompt_ids: Ids | None = None, **options: Any) -> AsyncGenerator[Event]:
        """The group's events as they happen. Closing the iterator early aborts the group."""
        route, call, seconds = self._generation(prompt_ids, options)
        async with aclosing(self._caller.stream(route, call, seconds + _ANSWER_S)) as events:
            async for event in events:
                yield event

    def _generation(self, prompt_ids: Ids | None, options: dict[str, Any]) -> tuple[Route, GenerateCall, float]:
        seconds = options.pop("timeout_s", None) or self.timeout_s
        call = generate_call(prompt_ids, timeout_s=seconds, **options)
        return ROUTES_BY_NAME["generate_group" if call.request.resume is None else "continue"], call, seconds

    async def score(
        self,
        sequences: Sequence[Ids],
        *,
        start: int = 0,
        temperature: float = 1.0,
        top_logprobs: int = 0,
        adapter: AdapterRef | None = None,
    ) -> ScoreOutput:
        """Teacher-forced log-probabilities of `sequences`, in nats."""
        request = ScoreRequest(
            sequences=[as_ids(f"sequences[{i}]", sequence) for i, sequence in enumerate(sequences)],
            start=start,
            temperature=temperature,
            top_logprobs=top_logprobs,
            adapter=adapter,
        )
        return (await self.call("score", request=request)).result

    async def abort(self, group_ids: list[str] | None) -> list[AbortOutcome]:
        """Exact ids; None means every group."""
        return (await self.call("abort", group_ids=group_ids)).result.groups

    async def pause(self, mode: PauseMode = "drain", timeout_s: float = 60.0) -> PauseReport:
        """Returns once the service is quiescent; a pause that takes longer than `timeout_s` is refused."""
        fields = {"mode": mode, "timeout_ms": round(timeout_s * 1000)}
        return (await self.call("pause", timeout_s=timeout_s + _ANSWER_S, **fields)).result

    async def resume(self, expected_policy_version: int | None = None) -> None:
        await self.call("resume", expected_policy_version=expected_policy_version)

    async def update_begin(self, begin: UpdateBegin) -> UpdateProgress:
        return (await self.call("update_begin", update=begin)).result

    async def update_disk(self, txn: str, uri: str) -> UpdateProgress:
        return (await self.call("update_disk", txn=txn, uri=uri)).result

    async def update_tensors(self, txn: str, tensors: list[NamedTensor]) -> UpdateProgress:
        size = sum(item.data.nbytes for item in tensors)
        return (await self.call("update_tensors", txn=txn, tensors=tensors, size=size)).result

    async def update_commit(self, txn: str) -> UpdateReport:
        return (await self.call("update_commit", txn=txn)).result

    async def update_rollback(self, txn: str) -> None:
        await self.call("update_rollback", txn=txn)

    async def update_adapter(
        self,
        name: str,
        *,
        config: dict[str, Any] | None = None,
        tensors: Sequence[NamedTensor] = (),
        uri: str | None = None,
        rev: int | None = None,
        txn: str | None = None,
    ) -> AdapterUpdateReport:
        """Load the LoRA policy `name`, or its next revision: from peft's `config` and `tensors`, or from a
        folder `uri` that the service may read. With `txn` it is published by that open update's commit."""
        parts = list(body_parts(tensors, _BODY_BYTES))
        upload = new_id() if len(parts) > 1 else None
        for part in parts[:-1]:
            size = sum(item.data.nbytes for item in part)
            await self.call("adapter_tensors", upload=upload, tensors=part, size=size)
        source = AdapterSource(
            name=name, config=config, tensors=parts[-1] if parts else [], uri=uri, upload=upload, rev=rev, txn=txn
        )
        return (await self.call("update_adapter", adapter=source, size=_BODY_BYTES if tensors else 0)).result

    async def unload_adapter(self, name: str) -> None:
        """No further request finds the policy; those under way end with what they have."""
        await self.call("unload_adapter", adapter=name)

    async def adapters(self) -> list[AdapterReport]:
        """Revisions of LoRA policies, those of ended names that are still in use among them."""
        return (await self._read("adapters")).result.adapters

    async def flush(self, scope: str = "all") -> int:
        """Tokens freed; `scope` is "all" or "stale"."""
        return (await self.call("flush", scope=scope)).result.tokens

    async def release_memory(self, tags: list[str] | None = None) -> MemoryReport:
        return (await self.call("release_memory", tags=tags or [])).result

    async def resume_memory(self, tags: list[str] | None = None) -> MemoryReport:
        return (await self.call("resume_memory", tags=tags or [])).result

    async def session_open(self, session_id: str, ttl_s: float = 3600.0) -> None:
        await self.call("session_open", session_id=session_id, ttl_s=ttl_s)

    async def session_close(self, session_id: str) -> None:
        await self.call("session_close", session_id=session_id)

    async def version(self) -> VersionReport:
        return (await self._read("version")).result

    async def health(self) -> Health:
        return (await self._read("health")).result

    async def capabilities(self) -> dict[str, object]:
        return (await self._read("capabilities")).result

    async def metrics(self) -> str:
        """Prometheus text of the engines and of the server."""
        response = await self._caller.get(ROUTES_BY_NAME["metrics"], self._quick_s)
        if response.status_code != 200:
            raise self._caller.refusal(response)
        return response.text

    async def live(self) -> bool:
        return (await self._caller.get(ROUTES_BY_NAME["live"], self._quick_s)).status_code == 200

    async def ready(self) -> bool:
        return (await self._caller.get(ROUTES_BY_NAME["ready"], self._quick_s)).status_code == 200

    async def _read(self, name: str) -> Reply[Any]:
        return await self._caller.read(ROUTES_BY_NAME[name], self._quick_s)

    @property
    def _quick_s(self) -> float:
        return min(self.timeout_s, 30.0)


class Client:
    """`AsyncClient` for code that blocks. Any thread may use it; calls of several threads overlap.

    Takes the arguments of `AsyncClient`, and its methods those of its namesakes there.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-client", daemon=True)
        self._thread.start()
        self._client = self._run(_opened(url, options))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if not self._loop.is_closed():
            self._run(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def generate(self, prompt_ids: Ids | None = None, **options: Any) -> GroupOutput:
        return self._run(self._client.generate(prompt_ids, **options))

    def stream(self, prompt_ids: Ids | None = None, **options: Any) -> Iterator[Event]:
        events = self._client.stream(prompt_ids, **options)
        try:
            while (event := self._run(_next(events))) is not None:
                yield event
        finally:
            self._run(_close(events))

    def score(self, sequences: Sequence[Ids], **options: Any) -> ScoreOutput:
        return self._run(self._client.score(sequences, **options))

    def abort(self, group_ids: list[str] | None) -> list[AbortOutcome]:
        return self._run(self._client.abort(group_ids))

    def pause(self, mode: PauseMode = "drain", timeout_s: float = 60.0) -> PauseReport:
        return self._run(self._client.pause(mode, timeout_s))

    def resume(self, expected_policy_version: int | None = None) -> None:
        self._run(self._client.resume(expected_policy_version))

    def update_begin(self, begin: UpdateBegin) -> UpdateProgress:
        return self._run(self._client.update_begin(begin))

    def update_disk(self, txn: str, uri: str) -> UpdateProgress:
        return self._run(self._client.update_disk(txn, uri))

    def update_tensors(self, txn: str, tensors: list[NamedTensor]) -> UpdateProgress:
        return self._run(self._client.update_tensors(txn, tensors))

    def update_commit(self, txn: str) -> UpdateReport:
        return self._run(self._client.update_commit(txn))

    def update_rollback(self, txn: str) -> None:
        self._run(self._client.update_rollback(txn))

    def update_adapter(self, name: str, **options: Any) -> AdapterUpdateReport:
        return self._run(self._client.update_adapter(name, **options))

    def unload_adapter(self, name: str) -> None:
        self._run(self._client.unload_adapter(name))

    def adapters(self) -> list[AdapterReport]:
        return self._run(self._client.adapters())

    def flush(self, scope: str = "all") -> int:
        return self._run(self._client.flush(scope))

    def release_memory(self, tags: list[str] | None = None) -> MemoryReport:
        return self._run(self._client.release_memory(tags))

    def resume_memory(self, tags: list[str] | None = None) -> MemoryReport:
        return self._run(self._client.resume_memory(tags))

    def session_open(self, session_id: str, ttl_s: float = 3600.0) -> None:
        self._run(self._client.session_open(session_id, ttl_s))

    def session_close(self, session_id: str) -> None:
        self._run(self._client.session_close(session_id))

    def version(self) -> VersionReport:
        return self._run(self._client.version())

    def health(self) -> Health:
        return self._run(self._client.health())

    def capabilities(self) -> dict[str, object]:
        return self._run(self._client.capabilities())

    def metrics(self) -> str:
        return self._run(self._client.metrics())

    def live(self) -> bool:
        return self._run(self._client.live())

    def ready(self) -> bool:
        return self._run(self._client.ready())


async def _opened(url: str, options: dict[str, Any]) -> AsyncClient:
    return AsyncClient(url, **options)


async def _next(events: AsyncIterator[Event]) -> Event | None:
    return await anext(events, None)


async def _close(events: Any) -> None:
    await events.aclose()
