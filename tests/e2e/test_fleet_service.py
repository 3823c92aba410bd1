"""The whole way: HTTP, MessagePack, router, Ray, engines."""

from __future__ import annotations

import asyncio
import os
import random
import time

import numpy as np
import pytest

from engine.errors import Conflict, NotFound, SparkrollError
from engine.types import SamplingParams
from rollout.client import AsyncClient, Client
from rollout.protocol import Delta, GroupEnd, SampleEnd
from tests.e2e.conftest import LoopThread, serve_config
from tests.support import begin_of, prompt, reference_greedy, reference_logprobs, state_tensors


def sampling(**fields) -> SamplingParams:
    return SamplingParams(**({"max_new": 8, "seed": 3} | fields))


async def current_reference(client: AsyncClient, t_full, t_full_w1):
    """The folder whose weights the shared fleet serves now; other tests publish either."""
    version = await client.version()
    greedy = (await client.generate(prompt(8), sampling=sampling(temperature=0.0, max_new=4))).samples[0]
    for folder in (t_full, t_full_w1):
        if reference_greedy(folder, prompt(8), 4) == greedy.ids.tolist():
            return folder, version.policy_version
    raise AssertionError("the fleet serves neither W0 nor W1")


def test_generation_scores_and_updates_over_http_equal_the_reference(fleet3, t_full, t_full_w1) -> None:
    async def run() -> None:
        async with AsyncClient(fleet3.url) as client:
            assert (await client.health()).state == "ready" and await client.live() and await client.ready()
            served, version = await current_reference(client, t_full, t_full_w1)
            other = t_full_w1 if served == t_full else t_full
            group = await client.generate(prompt(16), n=4, sampling=sampling(max_new=20))
            assert [sample.index for sample in group.samples] == [0, 1, 2, 3]
            assert len({tuple(sample.ids.tolist()) for sample in group.samples}) == 4
            for sample in group.samples:
                whole = reference_logprobs(served, [*prompt(16), *sample.ids])
                np.testing.assert_allclose(sample.logprobs, whole[16:], atol=1e-4)
            again = await client.generate(prompt(16), n=4, sampling=sampling(max_new=20))
            assert all(np.array_equal(a.ids, b.ids) for a, b in zip(group.samples, again.samples, strict=True))
            events = [event async for event in client.stream(prompt(16), sampling=sampling(max_new=60))]
            assert isinstance(events[-1], GroupEnd) and any(isinstance(event, Delta) for event in events)
            tensors = state_tensors(other)
            await client.update_begin(begin_of(tensors, "http", version, version + 1))
            await client.update_disk("http", str(other))
            report = await client.update_commit("http")
            assert set(report.engines) == {"engine-0", "engine-1", "engine-2"} and report.fenced == []
            fresh = await client.generate(
                prompt(16), sampling=sampling(temperature=0.0), min_policy_version=version + 1
            )
            assert fresh.samples[0].ids.tolist() == reference_greedy(other, prompt(16), 8)
            assert fresh.samples[0].cached_tokens == 0, "case A1: nothing of the old policy is a hit"
            scored = await client.score([prompt(20)], start=1)
            np.testing.assert_allclose(
                scored.sequences[0].logprobs, reference_logprobs(other, prompt(20))[1:], atol=1e-4
            )
            with pytest.raises(Conflict):
                await client.generate(prompt(4), min_policy_version=version + 2)
            with pytest.raises(NotFound):
                await client.generate(prompt(4), session_id="never opened")
            assert "sparkroll_router_routable_engines 3.0" in await client.metrics()

    fleet3.run(run())


def test_the_blocking_client_and_sessions_work_against_a_fleet(fleet3) -> None:
    with Client(fleet3.url) as client:
        client.session_open("s")
        groups = [client.generate(prompt(8), session_id="s", sampling=sampling(seed=i)) for i in range(3)]
        assert [group.samples[0].finish for group in groups] == ["length"] * 3
        client.session_close("s")
        assert client.capabilities()["engines"] == 3


def test_case_i3_control_calls_answer_within_a_second_under_load(fleet3) -> None:
    async def run() -> None:
        async with AsyncClient(fleet3.url) as client:
            tasks = [
                asyncio.create_task(client.generate(prompt(8, 10 + i), sampling=sampling(max_new=200)))
                for i in range(64)
            ]
            while (await client.health()).running < 24:
                await asyncio.sleep(0.01)
            for control in (client.health, client.metrics, client.version, client.capabilities):
                began = time.monotonic()
                await control()
                assert time.monotonic() - began < 1
            began = time.monotonic()
            await client.pause("in_place", 5)
            await client.resume()
            await client.abort(None)
            assert time.monotonic() - began < 3
            groups = await asyncio.wait_for(asyncio.gather(*tasks), 10)
            assert {group.samples[0].finish for group in groups} <= {"abort", "length"}
            health = await client.health()
            assert (health.running, health.waiting) == (0, 0)

    fleet3.run(run())


async def many_short_calls(fleet3, batches: int) -> None:
    pids = [place["pid"] for place in fleet3.fleet.describe()]

    def open_files() -> list[int]:
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), *pids)]

    async with AsyncClient(fleet3.url, max_connections=20) as client:

        async def batch() -> None:
            await asyncio.gather(*(client.generate(prompt(4), sampling=sampling(max_new=1)) for _ in range(20)))

        await batch()
        before = open_files()
        for _ in range(batches):
            await batch()
        assert all(now <= then + 10 for now, then in zip(open_files(), before, strict=True)), (before, open_files())
    assert fleet3.fleet.router._groups == {}


def test_case_i3_short_calls_leave_no_files_open(fleet3) -> None:
    fleet3.run(many_short_calls(fleet3, 8))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_case_i3_two_thousand_calls_leave_no_files_open(fleet3) -> None:
    fleet3.run(many_short_calls(fleet3, 100), 300)


async def pause_update_resume(fleet3, folders, rounds: int, fired: float) -> None:
    router, client = fleet3.fleet.router, AsyncClient(fleet3.url)
    version = (await client.version()).policy_version
    endings: list[tuple[int, str]] = []
    stop = asyncio.Event()

    async def one(i: int) -> None:
        group = await client.generate(prompt(8), n=2, sampling=sampling(seed=i, max_new=30))
        for sample in group.samples:
            endings.append((i, sample.finish))
            assert sample.finish in ("length", "abort")
            assert len(sample.ids) == 30 or sample.finish == "abort"
            assert sum(span.end - span.start for span in sample.spans) == len(sample.ids)

    async def fire() -> list[asyncio.Task]:
        tasks = []
        while not stop.is_set():
            tasks.append(asyncio.create_task(one(len(tasks))))
            await asyncio.sleep(fired)
        return tasks

    async def tokens() -> str:
        text = await router.metrics()
        return "".join(line for line in text.splitlines() if "generated_tokens_total{" in line)

    firing = asyncio.create_task(fire())
    tensors = [state_tensors(folder) for folder in folders]
    try:
        for number in range(rounds):
            await asyncio.sleep(random.Random(number).uniform(0.02, 0.1))
            began = time.monotonic()
            await client.pause("abort", 5)
            assert time.monotonic() - began < 5
            quiet = await tokens()
            await client.update_begin(begin_of(tensors[number % 2], f"g2-{number}", version, version + 1))
            await client.update_tensors(f"g2-{number}", tensors[number % 2])
            await client.update_commit(f"g2-{number}")
            version += 1
            assert await tokens() == quiet, "no token between pause and resume"
            await client.resume(version)
    finally:
        stop.set()
    tasks = await firing
    await asyncio.wait_for(asyncio.gather(*tasks), 30)
    assert sorted(i for i, _ in endings) == sorted([*range(len(tasks))] * 2), "every sample ends exactly once"
    await client.close()
    assert set((await router.version()).engines.values()) == {version}


def test_case_g2_pause_update_resume_under_fire(fleet3, t_full, t_full_w1) -> None:
    fleet3.run(pause_update_resume(fleet3, (t_full, t_full_w1), 4, 0.02))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_case_g2_twenty_rounds_under_fire(fleet3, t_full, t_full_w1) -> None:
    fleet3.run(pause_update_resume(fleet3, (t_full, t_full_w1), 20, 0.02), 500)


def test_case_b7_an_update_without_a_pause_never_crashes(fleet3, t_full, t_full_w1) -> None:
    async def run() -> None:
        async with AsyncClient(fleet3.url) as client:
            for number in range(4):
                served, version = await current_reference(client, t_full, t_full_w1)
                other = t_full_w1 if served == t_full else t_full
                running = [
                    asyncio.create_task(client.generate(prompt(8, 20 + i), sampling=sampling(max_new=50)))
                    for i in range(8)
                ]
                await asyncio.sleep(0.05)
                if number % 2:
                    await client.abort(None)
                tensors = state_tensors(other)
                await client.update_begin(begin_of(tensors, f"b7-{number}", version, version + 1))
                await client.update_tensors(f"b7-{number}", tensors)
                await client.update_commit(f"b7-{number}")
                after = await client.generate(prompt(8), sampling=sampling(temperature=0.0))
                assert after.samples[0].ids.tolist() == reference_greedy(other, prompt(8), 8)
                for group in await asyncio.gather(*running):
                    sample = group.samples[0]
                    assert {span.policy_version for span in sample.spans} <= {version, version + 1}
                    assert sum(span.end - span.start for span in sample.spans) == len(sample.ids)

    fleet3.run(run())


def test_case_m3_release_never_crashes_a_running_fleet(fleet3) -> None:
    async def run() -> None:
        async with AsyncClient(fleet3.url) as client:
            expected = (await client.generate(prompt(8), sampling=sampling())).samples[0].ids.tolist()
            rng = random.Random(5)
            for _ in range(8):
                task = asyncio.create_task(client.generate(prompt(8), sampling=sampling()))
                await asyncio.sleep(rng.uniform(0, 0.02))
                try:
                    await client.release_memory(["kv"])
                except SparkrollError as error:
                    assert isinstance(error, Conflict)
                finally:
                    await client.resume_memory(["kv"])
                try:
                    assert (await task).samples[0].ids.tolist() == expected
                except SparkrollError as error:
                    assert error.retryable
                again = await client.generate(prompt(8), sampling=sampling())
                assert again.samples[0].ids.tolist() == expected

    fleet3.run(run())


def test_a_model_that_does_not_load_is_an_error_and_leaves_nothing(ray_session, tmp_path) -> None:
    import ray

    from rollout.fleet import Fleet

    thread = LoopThread()
    before = len(ray.util.list_named_actors(all_namespaces=True))
    with pytest.raises(SparkrollError, match="model"):
        thread.run(Fleet(serve_config(tmp_path / "nowhere", 1)).start())
    thread.stop()
    assert len(ray.util.list_named_actors(all_namespaces=True)) == before


def test_events_of_one_sample_keep_their_order(fleet3) -> None:
    async def run() -> None:
        async with AsyncClient(fleet3.url) as client:
            seen: dict[int, list[int]] = {}
            async for event in client.stream(prompt(12), n=6, sampling=sampling(max_new=100)):
                if isinstance(event, Delta):
                    for delta in event.samples:
                        assert delta.start == len(seen.setdefault(delta.index, []))
                        seen[delta.index] += delta.ids.tolist()
                if isinstance(event, SampleEnd):
                    ids = event.sample.ids.tolist()
                    assert ids[: len(seen.get(event.sample.index, []))] == seen.get(event.sample.index, [])

    fleet3.run(run())
