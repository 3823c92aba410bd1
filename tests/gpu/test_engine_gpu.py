"""The engine on a GPU: captured graphs and overlapped bursts give the serial loop's tokens."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch

from engine.errors import Paused
from tests.gpu.fuzz_worker import fuzz_on_gpu
from tests.support import ask, assert_sample_is_reference, make_engine, prompt, update
from tests.unit.engine.test_device_rows import work as mixed_work

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FUZZ_SECONDS = 30


def work():
    stops = list(range(0, 512, 17))
    yield ask("greedy", prompt(9), max_new=20)
    yield ask("group", prompt(50), n=9, max_new=30, temperature=1.0, seed=3)
    yield ask("stop", prompt(3, 40), n=4, max_new=60, temperature=0.7, top_k=5, seed=4, stop_ids=stops)
    yield ask("nucleus", prompt(30, 90), n=3, max_new=25, temperature=1.3, top_p=0.8, min_p=0.02, seed=5)
    for row in range(20):
        yield ask(f"row-{row}", prompt(5 + 7 * row, 10 + row), max_new=10 + row, temperature=1.0, seed=row)


def assert_equal(groups, others):
    for group, other in zip(groups, others, strict=True):
        for a, b in zip(group.samples, other.samples, strict=True):
            assert a.ids.tolist() == b.ids.tolist(), group.group_id
            assert a.finish == b.finish and a.spans == b.spans
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-4)


@pytest.mark.parametrize("model", ["t_full", "t_tied", "t_qwen3"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_graphs_equal_the_serial_loop(model, page_size, request):
    folder = request.getfixturevalue(model)
    fields = dict(page_size=page_size, kv_tokens=16384, max_running=32, prefill_tokens=128)
    fast = make_engine(folder, device="cuda", loop="overlapped", attention="triton", burst=8, **fields)
    serial = make_engine(folder, device="cuda", loop="serial", attention="torch", **fields)
    plain = make_engine(folder, device="cpu", **fields)
    groups = fast.generate(list(work()))
    assert_equal(groups, serial.generate(list(work())))
    assert_equal(groups, plain.generate(list(work())))
    assert_sample_is_reference(folder, prompt(9), groups[0].samples[0], 20)
    assert_equal(fast.generate(list(work())), groups)
    fast.check()


def test_shared_prefixes_equal_plain(t_full, monkeypatch):
    """Reading a prefix once gives what reading it per sample gives."""
    import engine.attention.decode_metadata as metadata

    ids = np.arange(200, dtype=np.uint32) % 500
    work = [ask("g", ids, n=24, max_new=40, temperature=1.0, seed=1)]
    fields = dict(device="cuda", loop="overlapped", attention="triton", page_size=8, kv_tokens=16384, max_running=32)
    plain = make_engine(t_full, **fields).generate(work)
    monkeypatch.setattr(metadata, "MIN_SAVED_BYTES", 0)
    monkeypatch.setattr(metadata, "MIN_SAVED_SEGMENT_BYTES", 0)
    engine = make_engine(t_full, **fields)
    shared = engine.generate(work)
    assert any(is_shared for _, is_shared, *_ in engine._loop._stepper._captured)
    for a, b in zip(shared[0].samples, plain[0].samples, strict=True):
        assert a.ids.tolist() == b.ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-4)


@pytest.mark.parametrize("model", ["t_full", "t_qwen3"])
def test_deterministic_samples_keep_their_bits(model, request, monkeypatch):
    """Alone, beside others, and with prefixes read together: pieces are short here, so that the group shares
    one and other rows grow past their first, and sharing pays always or never."""
    from engine.attention import decode_metadata
    from engine.kernels import decode_pieces

    for module in (decode_pieces, decode_metadata):
        monkeypatch.setattr(module, "SHORT", 128)
    fields = dict(page_size=16, kv_tokens=16384, max_running=48, loop="overlapped", attention="triton", burst=8)

    def group(count: int):
        return ask("group", prompt(150), n=count, max_new=60, temperature=1.0, seed=3)

    runs = []
    for least in (1, 1 << 40):
        monkeypatch.setattr(decode_metadata, "MIN_SAVED_BYTES", least)
        monkeypatch.setattr(decode_metadata, "MIN_SAVED_SEGMENT_BYTES", least)
        engine = make_engine(request.getfixturevalue(model), device="cuda", deterministic=True, **fields)
        others = [request for request in work() if request.group_id != "group"]
        for requests in ([group(9)], [group(9), *others], [group(2)]):
            runs.append(engine.generate(list(requests))[0].samples)
        engine.check()
    for samples in runs[1:]:
        for a, b in zip(samples, runs[0], strict=False):
            assert a.ids.tolist() == b.ids.tolist()
            assert list(a.logprobs) == list(b.logprobs)


def test_updates_reach_captured_graphs(t_full, t_full_w1):
    engine = make_engine(t_full, device="cuda", loop="overlapped", attention="triton")
    (before,) = engine.generate([ask("g", prompt(16), max_new=24)])
    assert_sample_is_reference(t_full, prompt(16), before.samples[0], 24)
    update(engine, t_full_w1, 1)
    (after,) = engine.generate([ask("g", prompt(16), max_new=24)])
    assert_sample_is_reference(t_full_w1, prompt(16), after.samples[0], 24)


def storage(engine) -> list[int]:
    parts = engine._parts
    tensors = [*parts.runner.kv_pool._layers, *parts.model.parameters()]
    return [tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize("kv_tokens", [8192, 160])
def test_rows_that_ask_for_more_equal_the_hosts(t_full, kv_tokens):
    """Edits, columns and many stops in captured steps, also with retractions; buffers grow on the way."""
    fields = dict(max_running=32, lookahead=3)
    engine = make_engine(
        t_full, device="cuda", loop="overlapped", attention="triton", burst=4, kv_tokens=kv_tokens, **fields
    )
    expected = make_engine(t_full, device="cpu", loop="serial", kv_tokens=8192, **fields).generate(list(mixed_work()))
    for _ in range(2):
        for group, other in zip(engine.generate(list(mixed_work())), expected, strict=True):
            for a, b in zip(group.samples, other.samples, strict=True):
                assert a.ids.tolist() == b.ids.tolist(), group.group_id
                assert (a.finish, a.matched) == (b.finish, b.matched)
                for name in ("logprobs", "entropy", "top_logprobs"):
                    if getattr(b, name) is not None:
                        np.testing.assert_allclose(getattr(a, name), getattr(b, name), atol=5e-4)
                for name, column in b.extra_logprobs.items():
                    np.testing.assert_allclose(a.extra_logprobs[name], column, atol=5e-4)
    engine.check()


def poison_free_memory() -> None:
    """Whoever still reads where something used to be reads NaN."""
    rooms = [torch.full((count,), float("nan"), device="cuda") for count in (1 << 25, 1 << 20, 1 << 16)]
    torch.cuda.synchronize()
    del rooms


@pytest.mark.parametrize("level", ["offload", "discard"])
@pytest.mark.parametrize("tags", [["weights", "kv"], ["weights"], ["kv"], ["graphs", "weights", "kv"]], ids="-".join)
@pytest.mark.parametrize("model", ["t_full", "t_qwen3"])
def test_case_m1_m4_graphs_after_memory_was_released(model, tags, level, request):
    """Two cycles of release and return, with graphs of several tiers captured before each: the driver
    gets the memory, it comes back where it was, and graphs that were kept go on as they are."""
    folder = request.getfixturevalue(model)
    engine = make_engine(
        folder, device="cuda", loop="overlapped", attention="triton", burst=8, kv_tokens=16384, max_running=32
    )
    places = storage(engine)
    before = engine.generate(list(work()))
    for _ in range(2):
        # Chunks of prompts are captured on their tier's second use; which tiers depends on what is cached.
        engine.flush("all")
        engine.generate(list(work()))
        engine.generate(list(work()))
    for _ in range(2):
        captures = engine.counters.graph_captures
        assert captures > 1
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        held, released = engine.release_memory(tags, level)
        assert all(held[tag] > 0 and released[tag] == 0 for tag in tags)
        slabs = sum(held[tag] for tag in tags if tag != "graphs")
        assert torch.cuda.mem_get_info()[0] >= free + slabs
        poison_free_memory()
        for tag in tags:
            with pytest.raises(Paused, match=tag):
                engine.generate([ask("early", prompt(4))])
            engine.resume_memory([tag])
            engine.resume_memory([tag])
        if "kv" in tags:
            engine._parts.runner.kv_pool.fill(float("nan"))
        if level == "discard" and "weights" in tags:
            with pytest.raises(Paused, match="weights"):
                engine.generate([ask("early", prompt(4))])
            update(engine, folder, engine.policy.version + 1)
        after = engine.generate(list(work()))
        for group, other in zip(after, before, strict=True):
            for a, b in zip(group.samples, other.samples, strict=True):
                assert a.ids.tolist() == b.ids.tolist() and a.finish == b.finish, group.group_id
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-4)
        assert storage(engine) == places
        assert (engine.counters.graph_captures == captures) == ("graphs" not in tags)
        assert engine.counters.graph_eager_steps == 0
        engine.check()
    assert_sample_is_reference(folder, prompt(9), after[0].samples[0], 20)


def test_random_schedules(t_full, t_full_w1):
    """As many as the time allows: no page lost, no token other than the serial loop's on the CPU."""
    workers = max(1, min(8, (os.cpu_count() or 1) // 2))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        seeds = [range(first, 10**9, workers) for first in range(workers)]
        runs = [pool.submit(fuzz_on_gpu, [t_full, t_full_w1], part, FUZZ_SECONDS) for part in seeds]
        tallies = [run.result() for run in runs]
    schedules, samples = (sum(getattr(tally, name) for tally in tallies) for name in ("schedules", "samples"))
    print(f"{schedules} schedules, {samples} samples, {sum(tally.near_ties for tally in tallies)} near ties")
    assert schedules >= 5 * workers and samples > 5 * schedules
    assert sum(tally.near_ties for tally in tallies) <= 1 + samples // 1000, "ties are rare"
