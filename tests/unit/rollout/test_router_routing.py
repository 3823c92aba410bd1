"""Where groups go, and what control calls mean for a fleet."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from engine.errors import Conflict, DeadlineExceeded, Draining, InvalidRequest, NotFound
from engine.sampling.seeds import derive_seed
from engine.types import AdapterRef, GroupRequest, SampleResume, SamplingParams, ScoreRequest
from rollout.metrics import merge_exposition
from rollout.protocol import GenerateCall, MemoryReport, SampleEnd
from rollout.routing.affinity import MARGIN, SLACK, Affinity, affinity_key
from rollout.routing.replica import Replica
from tests.unit.rollout.counting_service import CountingService
from tests.unit.rollout.router_fixture import make_fleet


def call(group_id: str = "g", prompt: range = range(10, 18), sampling: SamplingParams | None = None, **fields):
    request = GroupRequest(
        group_id=group_id, prompt_ids=np.array(prompt, np.uint32), sampling=sampling or SamplingParams(seed=1), **fields
    )
    return GenerateCall(op_id=group_id, request=request)


async def drain(router, one) -> list:
    return [event.sample async for event in router.generate(one) if isinstance(event, SampleEnd)]


def replicas(*loads: int) -> list[Replica]:
    return [
        Replica(engine_id=f"e{i}", incarnation=1, service=CountingService(f"e{i}"), policy_version=0, load=load)
        for i, load in enumerate(loads)
    ]


def test_a_key_stays_home_until_the_stated_imbalance_and_then_moves_for_good() -> None:
    affinity, fleet = Affinity(), replicas(0, 0)
    home = affinity.choose(b"k", 4, fleet)
    fleet[0].load, fleet[1].load = int(SLACK * 20 + MARGIN), 20
    assert affinity.choose(b"k", 4, fleet) is home is fleet[0]
    fleet[0].load += 1
    assert affinity.choose(b"k", 4, fleet) is fleet[1]
    fleet[0].load = 20
    assert affinity.choose(b"k", 4, fleet) is fleet[1], "it lives there now"
    assert affinity.choose(b"other", 4, replicas(3, 1, 2)).engine_id == "e1"


def test_homes_are_bounded_and_survive_a_missing_replica() -> None:
    affinity, fleet = Affinity(remembered=2), replicas(0, 0)
    for i in range(10):
        affinity.choose(bytes([i]), 1, fleet)
    assert len(affinity._homes) == 2
    affinity.choose(b"k", 1, fleet)
    assert affinity.choose(b"k", 1, fleet[1:]) is fleet[1]


def test_case_a5_salt_adapter_and_version_are_separate_key_fields() -> None:
    variants = [
        call(),
        call(cache_salt="LA"),
        call(adapter=AdapterRef(name="LA")),
        call(adapter=AdapterRef(name="LA", rev=1)),
        call(adapter=AdapterRef(name="L"), cache_salt="A"),
        call(prompt=range(10, 19)),
    ]
    keys = {affinity_key(one, 0) for one in variants} | {affinity_key(call(), 1)}
    assert len(keys) == len(variants) + 1
    assert affinity_key(call(session_id="s"), 0) == affinity_key(call(session_id="s", prompt=range(3)), 5)


def test_equal_prompts_share_an_engine_and_different_ones_spread() -> None:
    async def run() -> None:
        services, router, _ = make_fleet(3)
        await asyncio.gather(*(drain(router, call(f"same{i}", n=2)) for i in range(4)))
        assert sorted(len(service.calls) for service in services) == [0, 0, 4]
        await asyncio.gather(*(drain(router, call(f"p{i}", prompt=range(i, i + 9), n=4)) for i in range(9)))
        assert min(len(service.calls) for service in services) >= 2

    asyncio.run(run())


def test_case_k2_seeds_are_fixed_up_front_and_differ_within_a_group() -> None:
    async def run() -> None:
        _, router, _ = make_fleet(2)
        first = await drain(router, call(n=8))
        assert [sample.seed for sample in sorted(first, key=lambda s: s.index)] == [derive_seed(1, i) for i in range(8)]
        one, two = [await drain(router, call(n=2, sampling=SamplingParams())) for _ in range(2)]
        assert len({sample.seed for sample in one + two}) == 4, "without a seed every sample has its own"
        explicit = await drain(router, call(n=2, sampling=SamplingParams(seeds=[7, 7])))
        assert [sample.seed for sample in explicit] == [7, 7]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 2, "sampling": SamplingParams(seeds=[1])}, "sampling.seeds"),
        ({"sampling": SamplingParams(seed=1, seeds=[1])}, "sampling.seeds"),
        ({"sampling": SamplingParams(seed=-1)}, "sampling.seed"),
        ({"sampling": SamplingParams(seed=2**64)}, "sampling.seed"),
    ],
)
def test_what_no_engine_could_run_is_refused_by_name(fields, field) -> None:
    async def run() -> None:
        services, router, _ = make_fleet(1)
        with pytest.raises(InvalidRequest) as caught:
            await drain(router, call(**fields))
        assert caught.value.field == field and services[0].calls == []

    asyncio.run(run())


def test_a_callers_continuation_replies_only_what_is_new_even_when_moved() -> None:
    async def run() -> None:
        services, router, _ = make_fleet(2)
        whole = (await drain(router, call("w", sampling=SamplingParams(seeds=[9], max_new=20))))[0]
        resume = [SampleResume(index=0, ids=whole.ids[:6], spans=whole.spans[:2])]
        stream = router.generate(call("c", resume=resume, sampling=SamplingParams(seeds=[9], max_new=20)))
        await anext(stream)
        next(service for service in services if service.groups).kill()
        sample = next(event.sample for event in [event async for event in stream] if isinstance(event, SampleEnd))
        assert sample.ids.tolist() == whole.ids[6:].tolist() and len(sample.logprobs) == len(sample.ids)
        assert (sample.spans[0].start, sample.spans[-1].end) == (6, 20)

    asyncio.run(run())


def test_unmet_minimum_version_is_a_conflict_and_unknown_sessions_are_not_found() -> None:
    async def run() -> None:
        _, router, _ = make_fleet(1, version=3)
        with pytest.raises(Conflict, match="min_policy_version"):
            await drain(router, call(min_policy_version=4))
        assert len(await drain(router, call(min_policy_version=3))) == 1
        with pytest.raises(NotFound, match="session_id"):
            await drain(router, call(session_id="s"))
        await router.session_open("s", 60.0)
        assert len(await drain(router, call(session_id="s"))) == 1
        with pytest.raises(Conflict):
            await router.session_open("s", 60.0)
        await router.session_close("s")
        with pytest.raises(NotFound):
            await router.session_close("s")
        with pytest.raises(InvalidRequest):
            await router.session_open("s", float("nan"))

    asyncio.run(run())


def test_case_g2_what_arrives_during_a_pause_runs_after_it() -> None:
    async def run() -> None:
        services, router, _ = make_fleet(2)
        endings = []

        async def client(i: int) -> None:
            samples = await drain(router, call(f"g{i}", n=2, sampling=SamplingParams(seed=i, max_new=40)))
            endings.append((i, [sample.finish for sample in samples]))

        tasks = []
        for i in range(60):
            tasks.append(asyncio.create_task(client(i)))
            if i % 6 == 5:
                await router.pause("abort", 1.0)
                before = [service.decoded for service in services]
                for _ in range(5):
                    await asyncio.sleep(0)
                assert [service.decoded for service in services] == before, "no token between pause and resume"
                await router.resume(None)
            await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert sorted(i for i, _ in endings) == list(range(60))
        assert all(len(finishes) == 2 for _, finishes in endings)
        assert {finish for _, finishes in endings for finish in finishes} <= {"length", "abort"}

    asyncio.run(run())


def test_control_calls_reach_everyone_and_add_up() -> None:
    async def run() -> None:
        services, router, _ = make_fleet(3)
        assert await router.flush("all") == 30
        assert (await router.release_memory(["kv"])).before == {"kv": 15}
        assert (await router.version()).engines == {"e0": 0, "e1": 0, "e2": 0}
        assert (await router.capabilities())["engines"] == 3
        assert (await router.score(ScoreRequest(sequences=[np.arange(3, dtype=np.uint32)]))).policy_version == 0
        await router.pause("retract", 1.0)
        assert (await router.health()).state == "paused" and all(service.paused for service in services)
        with pytest.raises(Conflict, match="expected_policy_version"):
            await router.resume(4)
        await router.resume(0)
        assert (await router.health()).state == "ready" and not any(service.paused for service in services)
        services[1].kill()
        assert await router.flush("all") == 20, "a lost engine is left out"

    asyncio.run(run())


@pytest.mark.parametrize("before", [None, "retract"])
def test_a_pause_that_one_engine_refuses_leaves_all_as_they_were(before) -> None:
    async def run() -> None:
        services, router, membership = make_fleet(3)
        if before is not None:
            await router.pause(before, 1.0)
        services[1].refuse_pause = DeadlineExceeded("samples still running")
        with pytest.raises(DeadlineExceeded):
            await router.pause("drain", 1.0)
        assert [membership.paused, *(service.paused for service in services)] == [before] * 4

    asyncio.run(run())


def test_memory_is_released_by_all_or_by_none() -> None:
    async def run() -> None:
        services, router, _ = make_fleet(3)
        resumed = []

        async def refuse(tags):
            raise Conflict("samples are running")

        for service in services:
            service.resume_memory = lambda tags, name=service.name: _note(resumed, name)
        services[1].release_memory = refuse
        with pytest.raises(Conflict, match="running"):
            await router.release_memory(["kv"])
        assert sorted(resumed) == ["e0", "e2"]

    async def _note(resumed, name):
        resumed.append(name)
        return MemoryReport(before={}, after={})

    asyncio.run(run())


def test_a_closed_fleet_ends_parked_groups_at_once() -> None:
    async def run() -> None:
        services, router, membership = make_fleet(1)
        services[0].kill()
        task = asyncio.create_task(drain(router, call()))
        await asyncio.sleep(0.02)
        membership.close(Draining("the fleet is shutting down"))
        with pytest.raises(Draining):
            await asyncio.wait_for(task, 1)

    asyncio.run(run())


def test_expositions_merge_into_one_with_single_headers() -> None:
    async def run() -> None:
        _, router, _ = make_fleet(2)
        text = await router.metrics()
        assert text.count("# TYPE decoded counter") == 1
        assert 'decoded_total{engine="e0"} 0' in text and 'decoded_total{engine="e1"} 0' in text
        assert "sparkroll_router_groups_moved_total 0.0" in text

    asyncio.run(run())
    merged = merge_exposition(
        ["# HELP a x\n# TYPE a counter\na 1\n", "# HELP b y\nb 2\n# HELP a x\n# TYPE a counter\na 3\n"]
    )
    assert merged == "# HELP a x\n# TYPE a counter\na 1\na 3\n# HELP b y\nb 2\n"
