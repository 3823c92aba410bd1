"""Many engines behind the interface of one.

Owns where groups run, and going on elsewhere when an engine is lost. Ignores processes
(`rollout.fleet`); control calls are fanned out by `rollout.routing.control`. A router consumes
every group as a stream, also for callers that want one reply, because the deltas it has received
are what a continuation starts from.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engine.errors import Conflict, Corrupt, DeadlineExceeded, Draining, InvalidRequest, Paused, SparkrollError
from engine.sampling.seeds import U64_MAX, derive_seed, fresh_seed
from engine.types import (
    AbortOutcome,
    FinishReason,
    GroupRequest,
    ScoreOutput,
    ScoreRequest,
)
from engine.validation import MAX_SAMPLES
from rollout.metrics import merge_exposition
from rollout.protocol import (
    Event,
    GenerateCall,
    GroupEnd,
    Health,
    HealthState,
    Origin,
    SampleEnd,
)
from rollout.routing.adapters import FleetAdapters, Hold
from rollout.routing.affinity import Affinity, affinity_key
from rollout.routing.control import FleetControl
from rollout.routing.errors import EngineLost
from rollout.routing.fanout import everyone, outcomes
from rollout.routing.progress import GroupProgress
from rollout.routing.recipe import PolicyRecipe
from rollout.routing.replica import Membership, Replica
from rollout.routing.sessions import SessionTable

_RANK = {"aborted": 2, "finished": 1, "unknown": 0}
_PARKED_POLL_S = 1.0


@dataclass(slots=True, eq=False)
class _Live:
    """A group the router answers for. `aborted` ends it also where no engine holds it."""

    progress: GroupProgress
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    engine: Replica | None = None
    adapter: Hold | None = None


class Router(FleetControl):
    """Implements `RolloutService`. `replacement_s` bounds how long a group waits for an engine
    when none is routable; `max_moves` how many engines one group may outlive."""

    def __init__(
        self,
        membership: Membership,
        recipe: PolicyRecipe,
        adapters: FleetAdapters,
        *,
        update_root: Path | None = None,
        replacement_s: float = 120.0,
        max_moves: int = 5,
    ) -> None:
        super().__init__(membership, recipe, adapters, update_root)
        self._affinity = Affinity()
        self._sessions = SessionTable()
        self._groups: dict[str, _Live] = {}
        self._replacement_s = replacement_s
        self._max_moves = max_moves

    async def origin(self) -> Origin:
        replicas = self._membership.routable()
        incarnation = max((replica.incarnation for replica in replicas), default=0)
        return Origin(engine_id="fleet", incarnation=incarnation, policy_version=self._membership.policy_version)

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Event, None]:
        request, hold = self._admit(call)
        live = _Live(GroupProgress(request), adapter=hold)
        self._groups[request.group_id] = live
        call = msgspec.structs.replace(call, request=request)
        key = affinity_key(call, self._membership.policy_version)
        deadline = None if call.deadline_ms is None else asyncio.get_running_loop().time() + call.deadline_ms / 1000
        try:
            while True:
                replica = await self._place(live, key, deadline)
                if replica is None:
                    for event in await self._closing(live, "abort"):
                        yield event
                    return
                try:
                    async with aclosing(self._run_on(replica, call, live, deadline)) as events:
                        async for event in events:
                            yield event
                    return
                except (EngineLost, Corrupt, Draining) as error:
                    self._lost(replica, live, error)
                except Paused:
                    if self._membership.paused is None:
                        raise
                if not live.progress.unfinished:
                    # Only the end of the group itself was lost.
                    for event in await self._closing(live, "stop"):
                        yield event
                    return
                call = msgspec.structs.replace(call, request=live.progress.continuation())
        finally:
            del self._groups[request.group_id]
            self._adapters.release(live.adapter)

    def _admit(self, call: GenerateCall) -> tuple[GroupRequest, Hold | None]:
        """Refuse what no engine could do, and fix everything random and every name that may come to mean
        something else, so that it can be repeated."""
        request = call.request
        if request.group_id in self._groups:
            raise Conflict(field="group_id", expected="an id that is not live", actual=request.group_id)
        if not 1 <= request.n <= MAX_SAMPLES:
            raise InvalidRequest(field="n", expected=f"1 to {MAX_SAMPLES}", actual=request.n)
        self._sessions.use(request.session_id)
        current = self._membership.policy_version
        if request.min_policy_version is not None and request.min_policy_version > current:
            raise Conflict(field="min_policy_version", expected=f"at most {current}", actual=request.min_policy_version)
        sampling = _with_seeds(request)
        adapter, hold = self._adapters.acquire(request.adapter)
        return msgspec.structs.replace(request, sampling=sampling, adapter=adapter), hold

    async def _place(self, live: _Live, key: bytes, deadline: float | None) -> Replica | None:
        """Wait out a pause, and for an engine. None when the group was aborted meanwhile."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._replacement_s
        while not live.aborted.is_set():
            now = loop.time()
            if deadline is not None and now >= deadline:
                raise DeadlineExceeded("the deadline passed before an engine was free to run the group")
            if self._membership.closed is not None:
                raise self._membership.closed
            if self._membership.paused is None:
                candidates = self._membership.routable()
                if candidates:
                    n = max(1, len(live.progress.unfinished))
                    return self._affinity.choose(key, n, candidates)
                if now >= give_up:
                    raise EngineLost("no engine is ready", retry_after_ms=1000)
            else:
                give_up = now + self._replacement_s
            wait_s = _PARKED_POLL_S if deadline is None else min(_PARKED_POLL_S, deadline - now)
            await self._membership.changed(wait_s)
        return None

    async def _run_on(
        self, replica: Replica, call: GenerateCall, live: _Live, deadline: float | None
    ) -> AsyncGenerator[Event, None]:
        remaining_ms = None
        if deadline is not None:
            remaining_ms = max(1, int((deadline - asyncio.get_running_loop().time()) * 1000))
        request = msgspec.structs.replace(call.request, session_id=None)
        counted = len(live.progress.unfinished)
        replica.load += counted
        live.engine = replica
        stream = replica.service.generate(msgspec.structs.replace(call, request=request, deadline_ms=remaining_ms))
        ended = False
        try:
            async for event in stream:
                _raise_if_fenced(replica, event)
                out = live.progress.absorb(event)
                left = len(live.progress.unfinished)
                replica.load -= counted - left
                counted = left
                ended = isinstance(out, GroupEnd)
                yield out
        finally:
            live.engine = None
            replica.load -= counted
            await stream.aclose()  # type: ignore[attr-defined]
        if not ended:
            raise EngineLost(f"{replica.name} ended a stream early")

    def _lost(self, replica: Replica, live: _Live, error: SparkrollError) -> None:
        """Account for a group whose engine is gone; raises when it has outlived too many."""
        self._membership.take_out(replica, error, fence=isinstance(error, Corrupt))
        self.counters.groups_moved += 1
        self.counters.tokens_carried += live.progress.acknowledged_tokens
        if live.progress.moved >= self._max_moves:
            raise error

    async def _closing(self, live: _Live, finish: FinishReason) -> list[Event]:
        """End a group without an engine; samples that are left end with `finish`."""
        request = live.progress.request
        definition = "raw" if request.sampling.temperature == 0 else request.want.logprobs
        return live.progress.close(finish, await self.origin(), definition)

    async def score(self, request: ScoreRequest) -> ScoreOutput:
        adapter, hold = self._adapters.acquire(request.adapter)
        try:
            return await self._score(msgspec.structs.replace(request, adapter=adapter))
        finally:
            self._adapters.release(hold)

    async def _score(self, request: ScoreRequest) -> ScoreOutput:
        for _ in range(self._max_moves + 1):
            candidates = self._membership.routable()
            if not candidates:
                break
            replica = min(candidates, key=lambda candidate: candidate.load)
            replica.load += len(request.sequences)
            try:
                return await replica.service.score(request)
            except EngineLost as error:
                self._membership.take_out(replica, error)
            finally:
                replica.load -= len(request.sequences)
        raise EngineLost("no engine is ready", retry_after_ms=1000)

    async def abort(self, group_ids: list[str] | None) -> list[AbortOutcome]:
        wanted = list(self._groups) if group_ids is None else list(dict.fromkeys(group_ids))
        # Groups between two engines, or parked, have no engine to tell; they end themselves.
        parked = []
        for group_id in wanted:
            live = self._groups.get(group_id)
            if live is not None:
                live.aborted.set()
                if live.engine is None:
                    parked.append(group_id)
        self._membership.notify()
        best = dict.fromkeys(wanted, "unknown") | dict.fromkeys(parked, "aborted")
        replicas = self._membership.routable()
        if replicas and wanted:
            answers = await everyone(self._membership, replicas, lambda service: service.abort(group_ids))
            for found in answers.values():
                for item in found:
                    if _RANK[item.outcome] > _RANK.get(best.get(item.group_id, "unknown"), 0):
                        best[item.group_id] = item.outcome
        return [AbortOutcome(group_id=group_id, outcome=outcome) for group_id, outcome in best.items()]  # type: ignore[arg-type]

    async def session_open(self, session_id: str, ttl_s: float) -> None:
        self._sessions.open(session_id, ttl_s)

    async def session_close(self, session_id: str) -> None:
        self._sessions.close(session_id)
        self._affinity.forget_session(session_id)

    async def health(self) -> Health:
        """Ready while any engine is; ages and loads are those of the worst and of all."""
        version, pending = self._membership.policy_version, self._updates.pending
        replicas = self._membership.routable()
        try:
            answers = await outcomes(self._membership, replicas, lambda service: service.health())
        except EngineLost:
            return Health(state="starting", last_step_age_ms=0.0, policy_version=version, pending_update=pending)
        healthy = [answer for answer in answers.values() if isinstance(answer, Health)]
        states: set[HealthState] = {answer.state for answer in healthy}
        state: HealthState = "ready" if "ready" in states else min(states) if states else "fenced"
        return Health(
            state=state if self._membership.paused is None else "paused",
            last_step_age_ms=max((answer.last_step_age_ms for answer in healthy), default=0.0),
            policy_version=version,
            pending_update=pending,
            running=sum(answer.running for answer in healthy),
            waiting=sum(answer.waiting for answer in healthy) + self._parked(),
        )

    def _parked(self) -> int:
        return sum(len(live.progress.unfinished) for live in self._groups.values() if live.engine is None)

    async def metrics(self) -> str:
        replicas = self._membership.routable()
        texts = [self.counters.exposition(routable=len(replicas), parked=self._parked())]
        if replicas:
            texts += (await everyone(self._membership, replicas, lambda service: service.metrics())).values()
        return merge_exposition(texts)

    async def capabilities(self) -> dict[str, object]:
        replicas = self._membership.routable()
        if not replicas:
            raise EngineLost("no engine is ready", retry_after_ms=1000)
        one = await replicas[0].service.capabilities()
        return {**one, "engines": len(replicas)}


def _raise_if_fenced(replica: Replica, event: Event) -> None:
    """A sample whose engine was fenced goes on elsewhere; other errors are its own."""
    error = event.sample.error if isinstance(event, SampleEnd) else None
    if error is not None and error.code == Corrupt.code:
        raise Corrupt(f"{replica.name}: {error.message}")


def _with_seeds(request: GroupRequest):
    sampling = request.sampling
    if sampling.seeds is not None:
        if sampling.seed is not None:
            raise InvalidRequest(field="sampling.seeds", expected="either seed or seeds", actual="both")
        if len(sampling.seeds) != request.n:
            raise InvalidRequest(field="sampling.seeds", expected=f"{request.n} seeds", actual=len(sampling.seeds))
        return sampling
    seed = fresh_seed() if sampling.seed is None else sampling.seed
    if not 0 <= seed <= U64_MAX:
        raise InvalidRequest(field="sampling.seed", expected="a uint64", actual=seed)
    return msgspec.structs.replace(sampling, seed=None, seeds=[derive_seed(seed, i) for i in range(request.n)])
