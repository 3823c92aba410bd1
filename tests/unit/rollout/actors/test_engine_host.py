"""One engine behind the service interface: nothing hangs, nothing is lost, order holds."""

from __future__ import annotations

import asyncio
import contextlib
import time

import numpy as np
import pytest

from engine.errors import Conflict, Corrupt, DeadlineExceeded, Draining, InvalidRequest, NotFound, Unsupported
from engine.types import GroupRequest, SampleResume, SamplingParams, ScoreRequest, Want
from rollout.actors.engine_host import EngineHost
from rollout.protocol import Delta, GenerateCall, GroupEnd, SampleEnd
from tests.support import ask, begin_of, make_engine, prompt, reference_logprobs, state_tensors


def call(group_id: str, max_new: int = 8, n: int = 1, ids=None, **fields) -> GenerateCall:
    sampling = SamplingParams(max_new=max_new, seed=5, ignore_eos=True)
    ids = prompt(8) if ids is None else ids
    group = GroupRequest(group_id=group_id, prompt_ids=ids, n=n, sampling=sampling)
    return GenerateCall(op_id=group_id, request=group, **fields)


@contextlib.asynccontextmanager
async def running(folder, **options):
    engine_options = options.pop("engine", {})
    host = EngineHost(lambda: make_engine(folder, **engine_options), delta_interval_s=0.005, **options)
    await host.start()
    try:
        yield host
    finally:
        await host.stop()


async def collect(stream):
    events = [event async for event in stream]
    assert isinstance(events[-1], GroupEnd) and events[-1].group.samples == []
    return events, {event.sample.index: event.sample for event in events if isinstance(event, SampleEnd)}


def test_deltas_and_ends_carry_every_token_once(t_full) -> None:
    async def run() -> None:
        async with running(t_full) as host:
            events, samples = await collect(host.generate(call("g", max_new=100, n=3)))
            assert sum(isinstance(event, Delta) for event in events) >= 2
            for index, sample in samples.items():
                streamed = [delta for event in events if isinstance(event, Delta) for delta in event.samples]
                ids = np.concatenate([delta.ids for delta in streamed if delta.index == index])
                assert np.array_equal(ids, sample.ids[: len(ids)]) and len(sample.ids) == 100
            assert events[-1].origin.engine_id == "engine" and events[-1].group.prompt_tokens == 8
            whole = reference_logprobs(t_full, [*prompt(8), *samples[0].ids])
            assert np.allclose(samples[0].logprobs, whole[8:], atol=1e-4)
            _, again = await collect(host.generate(call("g", max_new=100, n=3)))
            assert all(np.array_equal(again[i].ids, samples[i].ids) for i in samples)

    asyncio.run(run())


def test_case_g1_a_dropped_stream_frees_its_slot(t_full) -> None:
    async def run() -> None:
        async with running(t_full, engine={"max_running": 2}) as host:
            streams = [host.generate(call(f"g{i}", max_new=200)) for i in range(2)]
            for stream in streams:
                await anext(stream)
            third = asyncio.create_task(collect(host.generate(call("third"))))
            for stream in streams:
                await stream.aclose()
            await asyncio.wait_for(third, 1)
            await host._thread.call(lambda engine: engine.check())
            health = await host.health()
            assert (health.running, health.waiting, host._streams) == (0, 0, {})

    asyncio.run(run())


def test_case_i3_control_calls_answer_while_generation_runs(t_full) -> None:
    async def run() -> None:
        async with running(t_full, engine={"max_running": 64, "kv_tokens": 16384}) as host:
            tasks = [asyncio.create_task(collect(host.generate(call(f"g{i}", max_new=200)))) for i in range(64)]
            while (await host.health()).running < 32:
                await asyncio.sleep(0.01)
            for control in (host.health, host.metrics, host.version, lambda: host.abort(["g1"])):
                began = time.monotonic()
                await control()
                assert time.monotonic() - began < 1
            began = time.monotonic()
            report = await host.pause("abort", 1.0)
            assert time.monotonic() - began < 1 and report.aborted >= 32
            await asyncio.wait_for(asyncio.gather(*tasks), 1)
            assert (await host.health()).state == "paused" and (await host.health()).last_step_age_ms < 1000
            await host.resume(0)
            assert (await host.health()).state == "ready"

    asyncio.run(run())


def test_case_g6_aborted_calls_end_at_once_with_what_they_have(t_full) -> None:
    async def run() -> None:
        async with running(t_full, engine={"max_running": 4}) as host:
            tasks = [asyncio.create_task(collect(host.generate(call(f"g{i}", max_new=200)))) for i in range(8)]
            await asyncio.sleep(0.05)
            outcomes = await host.abort([f"g{i}" for i in range(8)] + ["ghost"])
            assert [item.outcome for item in outcomes] == ["aborted"] * 8 + ["unknown"]
            for task in tasks:
                _, samples = await asyncio.wait_for(task, 1)
                assert samples[0].finish == "abort" and len(samples[0].logprobs) == len(samples[0].ids)

    asyncio.run(run())


def test_case_g5_pause_modes_mean_what_they_say(t_full) -> None:
    async def run() -> None:
        async with running(t_full) as host:
            task = asyncio.create_task(collect(host.generate(call("d", max_new=120))))
            await asyncio.sleep(0.03)
            await host.pause("drain", 10)
            await asyncio.wait_for(task, 0.5)
            late = asyncio.create_task(collect(host.generate(call("late", max_new=120))))
            await asyncio.sleep(0.05)
            assert not late.done()
            await host.resume(None)
            await asyncio.sleep(0.02)
            for mode in ("in_place", "retract", "retract"):
                await host.pause(mode, 1)
                tokens = await host._thread.call(lambda engine: engine.counters.generated_tokens)
                await asyncio.sleep(0.05)
                assert tokens == await host._thread.call(lambda engine: engine.counters.generated_tokens)
                await host.resume(None)
            _, samples = await asyncio.wait_for(late, 5)
            assert samples[0].finish == "length" and len(samples[0].ids) == 120
            for mode in ("keep", ""):
                with pytest.raises(InvalidRequest, match="mode"):
                    await host.pause(mode, 1)
            await host.resume(None)

    asyncio.run(run())


def test_a_pause_that_is_not_quiescent_in_time_is_taken_back(t_full) -> None:
    async def run() -> None:
        async with running(t_full, engine={"kv_tokens": 4096}) as host:
            task = asyncio.create_task(collect(host.generate(call("d", max_new=200, n=8))))
            while not (await host.health()).running:
                await asyncio.sleep(0.005)
            with pytest.raises(DeadlineExceeded):
                await host.pause("drain", 0.02)
            assert (await host.health()).state == "ready"
            _, samples = await asyncio.wait_for(task, 20)
            assert len(samples) == 8

    asyncio.run(run())


def test_deadlines_end_a_group_and_give_its_pages_back(t_full) -> None:
    async def run() -> None:
        async with running(t_full) as host:
            with pytest.raises(DeadlineExceeded, match="deadline_ms"):
                await collect(host.generate(call("slow", max_new=200, n=8, deadline_ms=60)))
            assert len((await collect(host.generate(call("slow"))))[1]) == 1
            await host._thread.call(lambda engine: engine.check())

    asyncio.run(run())


def test_a_crash_of_the_loop_fences_and_ends_everything(t_full, caplog) -> None:
    async def run() -> None:
        async with running(t_full) as host:
            tasks = [asyncio.create_task(collect(host.generate(call(f"g{i}", max_new=200)))) for i in range(3)]
            await asyncio.sleep(0.03)

            def sabotage(engine) -> None:
                del engine._loop

            with contextlib.suppress(Corrupt):
                await host._thread.call(sabotage)
            results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 2)
            assert all(isinstance(result, Corrupt) for result in results)
            for later in (host.abort(None), host.pause("drain", 5), host.version(), collect(host.generate(call("x")))):
                with pytest.raises(Corrupt):
                    await asyncio.wait_for(later, 1)
            assert (await host.health()).state == "fenced"

    asyncio.run(run())
    assert sum("stopped" in record.message for record in caplog.records) == 1


def test_stopping_ends_open_streams_and_loading_failures_reach_the_starter(t_full) -> None:
    async def run() -> None:
        host = EngineHost(lambda: make_engine(t_full))
        await host.start()
        task = asyncio.create_task(collect(host.generate(call("g", max_new=200, n=8))))
        await asyncio.sleep(0.02)
        await host.stop()
        with pytest.raises(Draining):
            await asyncio.wait_for(task, 1)
        with pytest.raises(Draining):
            await host.abort(None)
        broken = EngineHost(lambda: make_engine(t_full / "nowhere"))
        with pytest.raises((InvalidRequest, NotFound, OSError)):
            await asyncio.wait_for(broken.start(), 5)

    asyncio.run(run())


def test_refusals_touch_nobody_else(t_full) -> None:
    async def run() -> None:
        async with running(t_full) as host:
            task = asyncio.create_task(collect(host.generate(call("g", max_new=100))))
            await asyncio.sleep(0.02)
            bad = [
                (call("g"), Conflict),
                (call("empty", ids=np.empty(0, np.uint32)), InvalidRequest),
                (call("vocabulary", ids=np.array([512], np.uint32)), InvalidRequest),
                (call("t", ids=np.empty(0, np.uint32), text="hello"), Unsupported),
                (call("s", stop=["x"]), Unsupported),
                (call("w", want_text=True), Unsupported),
            ]
            for one, kind in bad:
                with pytest.raises(kind):
                    await collect(host.generate(one))
            _, samples = await task
            assert len(samples[0].ids) == 100

    asyncio.run(run())


def test_a_resumed_sample_equals_the_undisturbed_one(t_full) -> None:
    async def run() -> None:
        async with running(t_full) as host:
            whole = (await collect(host.generate(call("w", max_new=30))))[1][0]
            one = call("r", max_new=30)
            resume = [SampleResume(index=0, ids=whole.ids[:11], spans=whole.spans)]
            group = GroupRequest(group_id="r", prompt_ids=prompt(8), sampling=one.request.sampling, resume=resume)
            events, samples = await collect(host.generate(GenerateCall(op_id="r", request=group)))
            assert samples[0].ids.tolist() == whole.ids[11:].tolist()
            first = next(event for event in events if isinstance(event, Delta)).samples[0]
            assert first.start == 11 and first.spans[0].start == 11

    asyncio.run(run())


def test_updates_score_and_versions_through_the_host(t_full, t_full_w1) -> None:
    async def run() -> None:
        async with running(t_full, update_root=t_full_w1.parent) as host:
            ids = prompt(20)
            scored = await host.score(ScoreRequest(sequences=[ids], start=1))
            assert np.allclose(scored.sequences[0].logprobs, reference_logprobs(t_full, ids)[1:], atol=1e-4)
            before = await host.version()
            tensors = state_tensors(t_full_w1)
            await host.update_begin(begin_of(tensors, "t", 0, 1))
            assert (await host.health()).pending_update == "t"
            for uri in ("/etc", t_full_w1.name, f"{t_full_w1}/.."):
                with pytest.raises(InvalidRequest, match="allowed root"):
                    await host.update_disk("t", uri)
            await host.update_disk("t", str(t_full_w1))
            report = await host.update_commit("t")
            after = await host.version()
            assert after.policy_version == 1 and after.digest == report.digest != before.digest
            scored = await host.score(ScoreRequest(sequences=[ids], start=1))
            assert np.allclose(scored.sequences[0].logprobs, reference_logprobs(t_full_w1, ids)[1:], atol=1e-4)
            metrics = await host.metrics()
            assert 'sparkroll_engine_updates_total{engine="engine",incarnation="1"} 1.0' in metrics
            assert 'sparkroll_engine_graph_captures_total{engine="engine",incarnation="1"} 0.0' in metrics
            assert 'attention="torch",device="cpu",dtype="float32"' in metrics and "sparkroll_engine_info{" in metrics

    asyncio.run(run())


def test_case_m4_partial_memory_refuses_and_repeats_are_harmless(t_full) -> None:
    async def run() -> None:
        async with running(t_full) as host:
            (_, first) = await collect(host.generate(GenerateCall(op_id="a", request=ask("a", prompt(4)))))
            for tags in (["kv"], ["kv"], ["weights", "kv"]):
                await host.release_memory(tags)
            assert (await host.health()).state == "released"
            await host.resume_memory(["weights"])
            with pytest.raises(Exception) as caught:
                await collect(host.generate(call("x")))
            assert caught.value.retryable
            for tags in (["kv"], ["kv"], ["weights", "kv"]):
                await host.resume_memory(tags)
            with pytest.raises(InvalidRequest):
                await host.release_memory(["nonsense"])
            (_, again) = await collect(host.generate(GenerateCall(op_id="a", request=ask("a", prompt(4)))))
            assert np.array_equal(first[0].ids, again[0].ids)

    asyncio.run(run())


def test_want_columns_survive_the_bridge(t_full) -> None:
    async def run() -> None:
        async with running(t_full) as host:
            want = Want(top_logprobs=3, entropy=True, extra_logprobs=["raw"], prompt_logprobs_from=0)
            events, samples = await collect(
                host.generate(GenerateCall(op_id="g", request=ask("g", prompt(5), want=want, temperature=1.0)))
            )
            assert samples[0].top_ids.shape == (8, 3) and samples[0].entropy.shape == (8,)
            assert np.isnan(events[-1].group.prompt_logprobs[0]) and len(events[-1].group.prompt_logprobs) == 5

    asyncio.run(run())
