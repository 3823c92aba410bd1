"""Real processes, real SIGKILL: what a fleet promises when engines die or fail an update."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time

import numpy as np
import pytest
import ray

from engine.errors import Conflict, SparkrollError
from engine.types import GroupRequest, SamplingParams
from rollout.client import Client
from rollout.protocol import Delta, GenerateCall, GroupEnd, SampleEnd
from rollout.serving import start_service
from tests.e2e.conftest import ServedFleet, serve_config
from tests.support import begin_of, prompt, reference_greedy, state_tensors


def call(group_id: str, n: int = 1, start: int = 10, length: int = 8, **sampling) -> GenerateCall:
    params = SamplingParams(**({"max_new": 8, "seed": start} | sampling))
    request = GroupRequest(group_id=group_id, prompt_ids=prompt(length, start), n=n, sampling=params)
    return GenerateCall(op_id=group_id, request=request)


async def run_group(router, one: GenerateCall, received: list[int] | None = None, ended: list | None = None) -> dict:
    """Samples by index. `received` counts tokens as they come, `ended` notes who ended the group.
    A sample that comes twice fails."""
    samples: dict = {}
    async for event in router.generate(one):
        if isinstance(event, Delta) and received is not None:
            received[0] += sum(len(delta.ids) for delta in event.samples)
        if isinstance(event, SampleEnd):
            assert event.sample.index not in samples, "a sample came twice"
            samples[event.sample.index] = event.sample
        if isinstance(event, GroupEnd) and ended is not None:
            ended.append((event.origin.engine_id, event.origin.incarnation))
    return samples


async def counter(router, name: str) -> dict[str, float]:
    """One engine counter, by engine and incarnation."""
    pattern = rf'sparkroll_engine_{name}_total{{engine="(.+?)",incarnation="(\d+)"}} (\S+)'
    found = re.findall(pattern, await router.metrics())
    return {f"{engine}.{incarnation}": float(value) for engine, incarnation, value in found}


async def publish(router, folder, **fields):
    current = (await router.origin()).policy_version
    tensors = state_tensors(folder)
    txn = f"to-{current + 1}"
    await router.update_begin(begin_of(tensors, txn, current, current + 1, **fields))
    await router.update_tensors(txn, tensors[:5])
    await router.update_tensors(txn, tensors[5:])
    return await router.update_commit(txn)


def same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for index in one:
        a, b = one[index], other[index]
        assert a.ids.tolist() == b.ids.tolist() and a.finish == b.finish == "length"
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
        assert (a.spans[0].start, a.spans[-1].end) == (0, len(a.ids)) and len(a.logprobs) == len(a.ids)


def acknowledged(router) -> dict:
    """Tokens received of running samples, by the engine they run on."""
    sent: dict = {}
    for live in router._groups.values():
        if live.engine is not None and live.progress.acknowledged_tokens:
            sent[live.engine] = sent.get(live.engine, 0) + live.progress.acknowledged_tokens
    return sent


async def kill_mid_rollout(served: ServedFleet, rounds: int) -> dict:
    """The proof: SIGKILL in mid-rollout changes nothing but the time it takes. Returns the last victim's place."""
    router = served.fleet.router
    groups, n, max_new = 6, 8, 120
    calls = [call(f"g{i}", n=n, start=20 + i, max_new=max_new) for i in range(groups)]
    undisturbed = await asyncio.gather(*(run_group(router, one) for one in calls))
    place: dict = {}
    for number in range(rounds):
        await served.whole()
        before, carried = await counter(router, "generated_tokens"), router.counters.tokens_carried
        received, ended = [0], []
        tasks = [asyncio.create_task(run_group(router, one, received, ended)) for one in calls]
        while received[0] < groups * n * (10 + 20 * number % 80) or not acknowledged(router):
            assert not all(task.done() for task in tasks), "nothing is left to disturb"
            await asyncio.sleep(0.002)
        sent = acknowledged(router)
        busiest = max(sent, key=lambda replica: sent[replica])
        place = next(item for item in served.fleet.describe() if item["engine_id"] == busiest.engine_id)
        os.kill(place["pid"], signal.SIGKILL)
        results = await asyncio.gather(*tasks)
        after, moved = await counter(router, "generated_tokens"), router.counters.tokens_carried - carried
        for samples, expected in zip(results, undisturbed, strict=True):
            same(samples, expected)
        survivors = [name for name in before if name != busiest.name]
        decoded = sum(after[name] - before[name] for name in survivors)
        decoded += sum(value for name, value in after.items() if name not in before)
        # Nothing the dead engine had sent is decoded again: neither whole groups nor parts of them.
        whole = sum(n * max_new for ends in ended if ends == (busiest.engine_id, busiest.incarnation))
        assert decoded == groups * n * max_new - moved - whole
        assert moved > 0
    return place


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_killed_engines_change_nothing_but_the_time(fleet3) -> None:
    fleet3.run(kill_mid_rollout(fleet3, 5), 600)


def test_case_i1_a_service_beside_another_has_names_of_its_own_and_ends_alone(fleet3, t_full) -> None:
    """The second one is that of a program which is not asynchronous."""
    with start_service(serve_config(t_full, 1)) as other, Client(other.url) as client:
        url = other.url
        places = fleet3.fleet.describe() + other.fleet.describe()
        assert len({place["pid"] for place in places}) == 4 and fleet3.url != url
        alive = ray.util.list_named_actors(all_namespaces=True)
        assert len({(entry["namespace"], entry["name"]) for entry in alive}) == len(alive) == 4
        asked = call("x", n=2, max_new=4)
        first = fleet3.run(run_group(fleet3.fleet.router, asked))
        second = client.generate(asked.request.prompt_ids, n=2, sampling=asked.request.sampling)
        same(first, {sample.index: sample for sample in second.samples})
    names = ray.util.list_named_actors(all_namespaces=True)
    assert all(entry["namespace"] == fleet3.fleet._launcher.namespace for entry in names), names
    with pytest.raises(SparkrollError):
        Client(url, timeout_s=1.0).generate(prompt(8))


def test_a_killed_engine_costs_time_alone_and_case_i2_its_replacement_is_current(fleet3, t_full_w1) -> None:
    async def run() -> None:
        served, router = fleet3, fleet3.fleet.router
        version = (await publish(router, t_full_w1)).policy_version
        expected = reference_greedy(t_full_w1, prompt(8), 4)
        replay, slowed = served.fleet._replay, []

        async def slow(replica) -> None:
            slowed.append(replica)
            assert replica not in served.fleet.membership.routable()
            await asyncio.sleep(1.0)
            await replay(replica)

        served.fleet._replay = slow
        victim = await kill_mid_rollout(served, 1)
        served_by, number = set(), 0
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            number += 1
            events = [e async for e in router.generate(call(f"i2-{number}", max_new=4, temperature=0.0))]
            sample = next(event.sample for event in events if isinstance(event, SampleEnd))
            assert sample.ids.tolist() == expected
            assert {span.policy_version for span in sample.spans} == {version}
            served_by.add((events[-1].origin.engine_id, events[-1].origin.incarnation))
            if slowed and len(served.fleet.membership.routable()) == 3:
                break
            await asyncio.sleep(0.02)
        served.fleet._replay = replay
        assert slowed and slowed[0].policy_version == version, "it came back through the replay"
        again = next(place for place in served.fleet.describe() if place["engine_id"] == victim["engine_id"])
        assert again["incarnation"] == victim["incarnation"] + 1 and again["pid"] != victim["pid"]
        report = await router.version()
        assert set(report.engines.values()) == {version} and len(report.engines) == 3
        replies = [await replica.service.version() for replica in served.fleet.membership.routable()]
        assert len({reply.digest for reply in replies}) == 1

    fleet3.run(run())


def test_case_i5_an_engine_that_fails_the_update_is_out_and_then_replaced(fleet3, t_full) -> None:
    async def run() -> None:
        served, router = fleet3, fleet3.fleet.router
        before = (await router.origin()).policy_version
        victim = served.fleet.membership.replicas["engine-2"]
        tensors = state_tensors(t_full)
        begin = begin_of(tensors, "i5", before, before + 1)
        await router.update_begin(begin)
        await router.update_tensors("i5", tensors)
        await victim.service.update_rollback("i5")  # so that it refuses the commit
        report = await router.update_commit("i5")
        assert report.fenced == ["engine-2"] and report.engines == {"engine-0": before + 1, "engine-1": before + 1}
        assert victim not in served.fleet.membership.routable()
        expected = reference_greedy(t_full, prompt(8), 4)
        for i in range(30):
            events = [e async for e in router.generate(call(f"i5-{i}", max_new=4, temperature=0.0))]
            sample = next(event.sample for event in events if isinstance(event, SampleEnd))
            assert sample.ids.tolist() == expected
            assert {span.policy_version for span in sample.spans} == {before + 1}
            assert events[-1].origin.policy_version == before + 1
        await served.whole()
        assert set((await router.version()).engines.values()) == {before + 1}

    fleet3.run(run())


def test_case_i4_a_lower_version_is_refused_by_the_whole_fleet(fleet3, t_full) -> None:
    async def run() -> None:
        router = fleet3.fleet.router
        current = (await router.origin()).policy_version
        tensors = state_tensors(t_full)
        for base, new in ((current, current), (max(0, current - 1), current), (current + 1, current + 2)):
            with pytest.raises(Conflict):
                await router.update_begin(begin_of(tensors, "back", base, new))
        assert (await router.health()).pending_update is None

    fleet3.run(run())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_case_i1_two_and_four_engines_at_the_same_time(ray_session, loop_thread, t_full) -> None:
    async def run() -> None:
        two, four = await asyncio.gather(
            *(ServedFleet(loop_thread, serve_config(t_full, count)).start() for count in (2, 4))
        )
        try:
            places = two.fleet.describe() + four.fleet.describe()
            assert len({place["pid"] for place in places}) == 6
            os.kill(four.fleet.describe()[3]["pid"], signal.SIGKILL)
            await asyncio.sleep(0.5)
            await four.whole()
            same(*[await run_group(one.fleet.router, call("x", max_new=4)) for one in (two, four)])
        finally:
            await asyncio.gather(two.stop(), four.stop())

    loop_thread.run(run(), 300)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_engine_that_stands_still_is_replaced_and_its_groups_go_on(ray_session, loop_thread, t_full) -> None:
    async def run() -> None:
        served = await ServedFleet(loop_thread, serve_config(t_full, 2, health_timeout_s=0.5)).start()
        try:
            router = served.fleet.router
            calls = [call(f"g{i}", n=4, start=20 + i, max_new=100) for i in range(4)]
            undisturbed = await asyncio.gather(*(run_group(router, one) for one in calls))
            received = [0]
            tasks = [asyncio.create_task(run_group(router, one, received)) for one in calls]
            while received[0] < 200:
                await asyncio.sleep(0.002)
            busiest = max(served.fleet.membership.routable(), key=lambda replica: replica.load)
            place = next(item for item in served.fleet.describe() if item["engine_id"] == busiest.engine_id)
            os.kill(place["pid"], signal.SIGSTOP)
            for samples, expected in zip(await asyncio.gather(*tasks), undisturbed, strict=True):
                same(samples, expected)
            await served.whole()
        finally:
            await served.stop()

    loop_thread.run(run(), 300)
