"""A group that outlives its engine is told from an undisturbed one by nothing but the time it took."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from engine.errors import Conflict, Corrupt
from engine.types import GroupRequest, SampleOutput, SamplingParams, Want
from rollout.protocol import Delta, GenerateCall, GroupEnd, SampleEnd
from rollout.router import Router
from rollout.routing.errors import EngineLost
from tests.unit.rollout.counting_service import CountingService, expected_id
from tests.unit.rollout.router_fixture import make_fleet


def call(group_id: str = "g", n: int = 4, max_new: int = 20, **fields) -> GenerateCall:
    request = GroupRequest(
        group_id=group_id,
        prompt_ids=np.arange(10, 18, dtype=np.uint32),
        n=n,
        sampling=SamplingParams(seed=5, max_new=max_new),
        **fields,
    )
    return GenerateCall(op_id=group_id, request=request)


async def collect(router: Router, one: GenerateCall, disturb=None) -> list[SampleOutput]:
    """All samples of a group; checks that every token came once and in order."""
    samples, streamed, ended = {}, {}, False
    async for event in router.generate(one):
        assert not ended, "nothing follows the end of a group"
        if isinstance(event, Delta):
            for delta in event.samples:
                seen = streamed.setdefault(delta.index, [])
                assert delta.start == len(seen)
                seen.extend(delta.ids.tolist())
        elif isinstance(event, SampleEnd):
            assert event.sample.index not in samples
            samples[event.sample.index] = event.sample
        else:
            ended = isinstance(event, GroupEnd)
        if disturb is not None:
            disturb(event, sum(map(len, streamed.values())))
    assert ended
    for index, ids in streamed.items():
        assert samples[index].ids[: len(ids)].tolist() == ids
    return [samples[index] for index in sorted(samples)]


def check(sample: SampleOutput, max_new: int = 20) -> None:
    length = max_new - sample.index % 3
    prompt = np.arange(10, 18, dtype=np.uint32)
    assert sample.ids.tolist() == [expected_id(prompt, sample.seed, t) for t in range(length)]
    assert np.array_equal(sample.logprobs, -sample.ids.astype(np.float32) / 100)
    assert (sample.spans[0].start, sample.spans[-1].end) == (0, length)
    assert all(left.end == right.start for left, right in zip(sample.spans, sample.spans[1:], strict=False))


@pytest.mark.parametrize("after", range(0, 12))
def test_every_sample_arrives_once_wherever_the_engine_dies(after: int) -> None:
    async def run() -> None:
        services, router, _ = make_fleet(3)
        undisturbed = await collect(router, call("a"))
        plain = sum(service.decoded for service in services)
        victim: list[CountingService] = []
        events = 0

        def disturb(_event, _seen) -> None:
            nonlocal events
            if events == after:
                victim.extend(service for service in services if service.groups and not service.dead)
                victim[0].kill() if victim else None
            events += 1

        before = sum(service.decoded for service in services)
        samples = await collect(router, call("b"), disturb)
        for sample, other in zip(samples, undisturbed, strict=True):
            check(sample)
            assert sample.ids.tolist() == other.ids.tolist() and sample.seed == other.seed
        # One engine had at most `chunk` tokens of each sample that nobody had received.
        extra = sum(service.decoded for service in services) - before - plain
        assert 0 <= extra <= 4 * 3

    asyncio.run(run())


def test_tokens_already_received_are_not_decoded_again() -> None:
    async def run() -> None:
        services, router, _ = make_fleet(2)
        acknowledged = 0

        def disturb(_event, seen) -> None:
            nonlocal acknowledged
            holder = [service for service in services if service.groups]
            if not acknowledged and seen >= 24 and holder:
                acknowledged = seen
                holder[0].kill()

        samples = await collect(router, call(n=4, max_new=30), disturb)
        total = sum(len(sample.ids) for sample in samples)
        survivor = next(service for service in services if not service.dead)
        assert acknowledged and survivor.decoded == total - acknowledged
        assert router.counters.groups_moved == 1 and router.counters.tokens_carried == acknowledged

    asyncio.run(run())


def test_a_group_outlives_several_engines_and_keeps_its_columns() -> None:
    async def run() -> None:
        rng = random.Random(3)
        services, router, _ = make_fleet(5)

        def disturb(_event, _seen) -> None:
            alive = [service for service in services if service.groups and not service.dead]
            if alive and rng.random() < 0.3 and sum(not s.dead for s in services) > 1:
                alive[0].kill()

        for sample in await collect(router, call(n=6, max_new=60), disturb):
            check(sample, 60)
        assert router.counters.groups_moved >= 2

    asyncio.run(run())


def test_a_fenced_engine_is_left_and_reported() -> None:
    async def run() -> None:
        services, router, membership = make_fleet(2)
        out = []
        membership.on_out = lambda replica, reason: out.append((replica.engine_id, type(reason)))
        services[0].fenced = True
        for sample in await collect(router, call()):
            check(sample)
        assert out == [("e0", Corrupt)] and [r.engine_id for r in membership.routable()] == ["e1"]

    asyncio.run(run())


def test_the_last_engine_gone_is_an_error_within_the_bound() -> None:
    async def run() -> None:
        services, router, _ = make_fleet(1, replacement_s=0.05)
        services[0].kill()
        with pytest.raises(EngineLost):
            await asyncio.wait_for(collect(router, call()), 5)
        assert router._groups == {}

    asyncio.run(run())


def test_a_parked_group_ends_when_aborted_and_keeps_its_tokens() -> None:
    async def run() -> None:
        services, router, _ = make_fleet(1, replacement_s=30)
        seen_tokens = 0

        def disturb(_event, seen) -> None:
            nonlocal seen_tokens
            if seen >= 12 and not services[0].dead:
                seen_tokens = seen
                services[0].kill()

        task = asyncio.create_task(collect(router, call(want=Want(entropy=False)), disturb))
        while not services[0].dead:
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        assert not task.done(), "it waits for a replacement"
        outcomes = await router.abort(["g", "other"])
        assert [(item.group_id, item.outcome) for item in outcomes] == [("g", "aborted"), ("other", "unknown")]
        samples = await asyncio.wait_for(task, 1)
        assert {sample.finish for sample in samples} == {"abort"} and len(samples) == 4
        assert sum(len(sample.ids) for sample in samples) == seen_tokens

    asyncio.run(run())


def test_a_live_group_id_is_refused_and_usable_again_after_the_end() -> None:
    async def run() -> None:
        _, router, _ = make_fleet(1)
        stream = router.generate(call())
        await anext(stream)
        with pytest.raises(Conflict, match="group_id"):
            await anext(router.generate(call()))
        await stream.aclose()
        assert len(await collect(router, call())) == 4

    asyncio.run(run())
