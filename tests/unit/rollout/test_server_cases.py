"""Cases of the case book over HTTP, against a real engine: T-FULL behind client and server."""

import contextlib
import functools
import math
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import numpy as np
import pytest

from engine.errors import Conflict, InvalidRequest, SparkrollError
from engine.types import SamplingParams, Want
from rollout.actors.engine_host import EngineHost
from rollout.client import Client
from rollout.codec import decode
from rollout.protocol import BODY_TYPE, Delta, ErrorReply
from rollout.server import serve_in_thread
from rollout.server_config import ServerConfig
from tests.support import VOCAB, assert_whole, begin_of, make_engine, prompt, reference_greedy, state_tensors
from tests.unit.rollout.fault_proxy import FaultProxy

CONFIG = ServerConfig(port=0, grace_s=0.2)
PLAIN = httpx.Client(trust_env=False, verify=False)


def hosted(folder, **options):
    """For `serve_in_thread`: the host is made, and ended, in the server's own loop."""

    @contextlib.asynccontextmanager
    async def opened():
        host = EngineHost(lambda: make_engine(folder, **options), delta_interval_s=0.005)
        await host.start()
        try:
            yield host
        finally:
            await host.stop()

    return opened


@pytest.fixture(scope="module")
def server(t_full):
    with serve_in_thread(hosted(t_full, max_running=2), CONFIG) as running:
        yield running


@pytest.fixture
def client(server):
    with Client(server.url, timeout_s=30) as opened:
        yield opened


def greedy(max_new: int = 4, **options) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_new": max_new, "ignore_eos": True} | options))


@functools.lru_cache
def long_reference(folder) -> list[int]:
    """What P(8) goes on with, greedily, for 120 ids."""
    return reference_greedy(folder, prompt(8), 120)


def still_right(client, folder) -> None:
    assert client.generate(prompt(4), sampling=greedy()).samples[0].ids.tolist() == reference_greedy(
        folder, prompt(4), 4
    )


def raw(server, request: dict) -> ErrorReply:
    body = msgspec.msgpack.encode({"op_id": f"op-{time.monotonic()}", "request": {"group_id": "raw"} | request})
    url = f"{server.url}/v1/generate_group"
    reply = decode(PLAIN.post(url, content=body, headers={"content-type": BODY_TYPE}).content, ErrorReply)
    assert reply.code in ("INVALID", "TOO_LARGE", "UNSUPPORTED")
    return reply


def test_replies_equal_the_reference(client, t_full):
    group = client.generate(prompt(12), n=3, sampling=greedy(20))
    for sample in group.samples:
        assert_whole(sample)
        assert sample.ids.tolist() == reference_greedy(t_full, prompt(12), 20)
    streamed = list(client.stream(prompt(12), n=2, sampling=greedy(20)))
    for index in range(2):
        parts = [d.ids for e in streamed if isinstance(e, Delta) for d in e.samples if d.index == index]
        ends = [e.sample for e in streamed if hasattr(e, "sample") and e.sample.index == index]
        assert len(ends) == 1 and ends[0].ids.tolist() == group.samples[0].ids.tolist()
        assert np.concatenate(parts).tolist() == ends[0].ids.tolist()[: sum(map(len, parts))]


@pytest.mark.parametrize("bad", [-1, 512, 2**31, 2**63, 1.5, "7", True, None])
def test_case_h1_ids_outside_the_vocabulary(server, client, t_full, bad):
    reply = raw(server, {"prompt_ids": [3, bad]})
    assert "prompt_ids" in str(reply.field) and str(bad) in str(reply.actual)
    for field, sampling in (("stop_ids", {"stop_ids": [bad]}), ("logit_bias", {"logit_bias": {bad: 1.0}})):
        reply = raw(server, {"prompt_ids": [3], "sampling": sampling})
        assert field in str(reply.field)
    with pytest.raises(InvalidRequest):
        client.score([[3, bad]])
    still_right(client, t_full)


@pytest.mark.parametrize("stop", [9_999_999, -5, 512])
@pytest.mark.parametrize("min_new", [0, 5])
def test_case_h2_stop_ids_outside_the_vocabulary(server, client, t_full, stop, min_new):
    sampling = {"stop_ids": [stop], "min_new": min_new, "max_new": 8}
    assert "stop_ids" in str(raw(server, {"prompt_ids": [3], "sampling": sampling}).field)
    still_right(client, t_full)


@pytest.mark.parametrize("top", [VOCAB + 1, 10**9, -1, True])
def test_case_h3_more_alternatives_than_there_are(server, client, t_full, top):
    assert "top_logprobs" in str(raw(server, {"prompt_ids": [3], "want": {"top_logprobs": top}}).field)
    assert client.generate([3], sampling=greedy(), want=Want(top_logprobs=0)).samples[0].top_ids is None
    still_right(client, t_full)


def test_case_h4_empty_prompts(server, client, t_full):
    for call in (lambda: client.generate([]), lambda: client.generate(text=""), lambda: client.score([[1, 2], []])):
        with pytest.raises(SparkrollError) as error:
            call()
        assert error.value.field is not None
        still_right(client, t_full)
    assert len(client.generate([0], sampling=greedy()).samples[0].ids) == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", v) for v in (math.nan, math.inf, -math.inf, -1.0)]
    + [("top_p", v) for v in (math.nan, 0.0, 1.5)]
    + [("min_p", math.nan), ("top_k", -2)]
    + [(f"{kind}_penalty", math.nan) for kind in ("repetition", "presence", "frequency")],
)
def test_case_h5_numbers_that_pass_one_sided_checks(server, client, t_full, name, value):
    numbers = [msgspec.msgpack.encode(value)]
    if isinstance(value, float):
        numbers.append(b"\xca" + struct.pack(">f", value))
    for number in numbers:
        sampling = msgspec.Raw(b"\x81" + msgspec.msgpack.encode(name) + number)
        reply = raw(server, {"prompt_ids": [3], "sampling": sampling})
        assert name in str(reply.field)
    still_right(client, t_full)


@pytest.mark.parametrize("temperature", [1e-40, 1e-6, 1e30])
def test_case_h5_extreme_temperatures_are_served_or_refused(client, t_full, temperature):
    try:
        sample = client.generate(prompt(4), sampling=greedy(temperature=temperature, seed=1)).samples[0]
    except InvalidRequest as error:
        assert "temperature" in str(error.field)
    else:
        assert np.isfinite(sample.logprobs).all()
        if temperature < 1:
            assert sample.ids.tolist() == reference_greedy(t_full, prompt(4), 4)


def test_case_h6_two_live_requests_with_one_id(client, t_full):
    results = []
    first = threading.Thread(
        target=lambda: results.append(client.generate(prompt(8), sampling=greedy(100), group_id="x"))
    )
    first.start()
    while client.health().running == 0:
        time.sleep(0.002)
    with pytest.raises(Conflict) as error:
        client.generate(prompt(8, 100), sampling=greedy(8), group_id="x")
    assert "group_id" in str(error.value.field)
    first.join()
    assert results[0].samples[0].ids.tolist() == long_reference(t_full)[:100]
    again = client.generate(prompt(8, 100), sampling=greedy(8), group_id="x")
    assert again.samples[0].ids.tolist() == reference_greedy(t_full, prompt(8, 100), 8)


@pytest.mark.parametrize(
    ("length", "max_new", "fits"),
    [
        (254, 1, True),
        (254, 2, True),
        (254, 10, False),
        (255, 1, True),
        (255, 2, False),
        (256, 1, False),
        (300, 1, False),
    ],
)
def test_case_h7_a_prompt_is_never_cut(client, length, max_new, fits):
    ids = np.arange(length) % VOCAB
    if fits:
        group = client.generate(ids, sampling=greedy(max_new))
        assert group.prompt_tokens == length and len(group.samples[0].ids) == max_new
    else:
        with pytest.raises(SparkrollError) as error:
            client.generate(ids, sampling=greedy(max_new))
        assert str(length) in str(error.value) + str(error.value.actual) and "256" in str(error.value)


def test_case_c6_minus_infinity_reaches_the_caller(client):
    """Filters leave alternatives of log-probability −∞ beside a finite chosen one."""
    sampling = SamplingParams(temperature=0.01, top_p=0.3, max_new=6, seed=1, ignore_eos=True)
    sample = client.generate(prompt(8), sampling=sampling, want=Want(top_logprobs=5)).samples[0]
    assert np.isfinite(sample.logprobs).all() and sample.top_logprobs is not None
    assert sample.top_logprobs.shape == (6, 5) and not np.isnan(sample.top_logprobs).any()
    assert np.isneginf(sample.top_logprobs).any()
    bias = SamplingParams(temperature=1.0, logit_bias={7: -math.inf}, max_new=6, seed=1, ignore_eos=True)
    whole = client.generate(prompt(8), sampling=bias, want=Want(top_logprobs=VOCAB)).samples[0]
    assert np.isneginf(whole.top_logprobs[whole.top_ids == 7]).all() and 7 not in whole.ids


def counters(client) -> dict[str, float]:
    """The engine's own figures, by name."""
    lines = [line for line in client.metrics().splitlines() if line.startswith("sparkroll_engine_")]
    return {line.partition("{")[0].removeprefix("sparkroll_engine_"): float(line.split()[-1]) for line in lines}


def test_case_g4_a_lost_connection_is_generated_and_counted_once(t_full):
    lenient = ServerConfig(port=0, grace_s=10.0)
    with serve_in_thread(hosted(t_full), lenient) as server, Client(server.url, timeout_s=30) as direct:
        with FaultProxy(server.port, lambda number: 0 if number < 8 else None) as proxy:
            with Client(proxy.url, timeout_s=30, max_connections=8) as client, ThreadPoolExecutor(8) as pool:
                calls = [pool.submit(client.generate, prompt(8, 10 * i), sampling=greedy(12)) for i in range(8)]
                groups = [call.result() for call in calls]
            assert proxy.connections > 8  # all eight faults came; one connection may serve several retries
        for i, group in enumerate(groups):
            assert group.samples[0].ids.tolist() == reference_greedy(t_full, prompt(8, 10 * i), 12)
        found = counters(direct)
        assert found["groups_started_total"] == found["groups_finished_total"] == 8
        assert found["generated_tokens_total"] == 8 * 12 and found["running"] == found["waiting"] == 0


def test_case_g1_leavers_free_their_slots(server, client, t_full):
    """Two slots, both taken by callers that leave: the third starts and the pool is balanced."""
    for stream in (True, False):
        leavers = [Client(server.url, timeout_s=30) for _ in range(2)]
        for i, leaver in enumerate(leavers):
            if stream:
                next(events := leaver.stream(prompt(8), sampling=greedy(200), group_id=f"leave-{i}"))
                events.close()
            else:
                with pytest.raises(SparkrollError):
                    leaver.generate(prompt(8), sampling=greedy(240), group_id=f"leave-{i}", timeout_s=0.01)
        started = time.monotonic()
        still_right(client, t_full)
        assert time.monotonic() - started < 5
        end = time.monotonic() + 3
        while client.health().running + client.health().waiting > 0:
            assert time.monotonic() < end, "work went on without a caller"
            time.sleep(0.01)
        found = counters(client)
        assert found["pages_free"] + found["pages_tree"] + found["pages_private"] == found["pages_total"]
        assert found["pages_private"] == 0
        for leaver in leavers:
            leaver.close()


def seen_running(client, ask) -> threading.Thread:
    """Asks in a thread, once more where a busy machine was too late to see it run."""
    while True:
        call = threading.Thread(target=ask)
        call.start()
        while call.is_alive():
            if client.health().running:
                return call


@pytest.mark.parametrize("mode", ["drain", "abort", "retract", "in_place"])
def test_case_g5_each_pause_word_does_what_it_says(client, t_full, mode):
    results = []
    call = seen_running(client, lambda: results.append(client.generate(prompt(8), sampling=greedy(120))))
    client.pause(mode)
    if mode in ("drain", "abort"):
        call.join(5)
        for _ in range(500):
            if client.health().running == 0:
                break
            time.sleep(0.01)
        assert results and client.health().running == 0
        assert results[-1].samples[0].finish == ("length" if mode == "drain" else "abort")
    else:
        before = len(results)
        time.sleep(0.1)
        assert call.is_alive() and len(results) == before and client.health().state == "paused"
    client.pause(mode)  # a second pause is harmless
    client.resume()
    client.resume()
    call.join(20)
    sample = results[-1].samples[0]
    assert_whole(sample)
    assert sample.ids.tolist() == long_reference(t_full)[: len(sample.ids)]
    assert mode == "abort" or len(sample.ids) == 120


def test_an_update_over_the_wire_changes_what_is_served(t_full, t_full_w1):
    with serve_in_thread(hosted(t_full), CONFIG) as server, Client(server.url, timeout_s=30) as client:
        before = client.generate(prompt(16), sampling=greedy(8))
        tensors = state_tensors(t_full_w1)
        client.update_begin(begin_of(tensors, "t1", 0, 1))
        for tensor in tensors:
            client.update_tensors("t1", [tensor])
        report = client.update_commit("t1")
        assert report.policy_version == client.version().policy_version == 1
        after = client.generate(prompt(16), sampling=greedy(8))
        assert after.samples[0].cached_tokens == 0 and after.samples[0].spans[0].policy_version == 1
        assert after.samples[0].ids.tolist() == reference_greedy(t_full_w1, prompt(16), 8)
        assert before.samples[0].ids.tolist() == reference_greedy(t_full, prompt(16), 8)
