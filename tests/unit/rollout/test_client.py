"""The clients: every operation, errors, and retries that never generate twice."""

import asyncio
import socket
import threading
import time
from contextlib import aclosing

import numpy as np
import pytest

from engine.errors import Conflict, DeadlineExceeded, InvalidRequest, NotFound, Overloaded, Paused, Unauthorized
from engine.types import NamedTensor, SampleResume, SamplingParams, UpdateBegin
from rollout.client import AsyncClient, Client, RetryPolicy, ServerLost
from rollout.protocol import Delta, GroupEnd, SampleEnd
from rollout.server import serve_in_thread
from rollout.server_config import ServerConfig
from tests.unit.rollout.echo_service import EchoService, expected_ids
from tests.unit.rollout.fault_proxy import FaultProxy

CONFIG = ServerConfig(port=0, grace_s=0.2, ping_s=0.1)
LENIENT = ServerConfig(port=0, grace_s=10.0, ping_s=0.1)
"""For retries on a busy machine: work that lost its caller waits long for the next one."""
PATIENT = RetryPolicy(attempts=8, first_s=0.01, longest_s=0.1)


@pytest.fixture
def service():
    return EchoService(step_s=0.002)


@pytest.fixture
def server(service):
    with serve_in_thread(service, CONFIG) as running:
        yield running


@pytest.fixture
def lenient(service):
    with serve_in_thread(service, LENIENT) as running:
        yield running


@pytest.fixture
def client(server):
    with Client(server.url, retry=PATIENT, timeout_s=20) as opened:
        yield opened


def params(max_new=6) -> SamplingParams:
    return SamplingParams(max_new=max_new, seed=4)


def test_generate_from_ids_text_and_messages(client):
    for ids in ([1, 2], np.array([1, 2]), np.array([1, 2], "i4")):
        group = client.generate(ids, n=2, sampling=params())
        assert [s.ids.tolist() for s in group.samples] == [expected_ids([1, 2], i, 4, 0, 6) for i in range(2)]
    assert client.generate(text="ab", sampling=params()).prompt_tokens == 2
    with pytest.raises(InvalidRequest, match="one non-empty prompt"):
        client.generate([1], text="x")


@pytest.mark.parametrize("bad", [[-1], [1.5], ["7"], [True], [None], np.array([0.5]), [2**32], "12"])
def test_case_h1_the_client_names_the_bad_id(client, service, bad):
    with pytest.raises(InvalidRequest) as error:
        client.generate(bad)
    assert error.value.field == "prompt_ids" and not service.started


def test_case_h8_lone_surrogates_are_refused(client, service):
    with pytest.raises(InvalidRequest, match="surrogate"):
        client.generate(text="a\udc97b")
    with pytest.raises(InvalidRequest, match="surrogate"):
        client.generate([1], stop=["\ud83d"])
    assert client.generate(text="\U0001f378", sampling=params()).prompt_tokens == 4
    assert service.started.total() == 1


def test_resume_continues(client):
    resume = [SampleResume(index=1, ids=np.array(expected_ids([5], 1, 4, 0, 2), "u4"))]
    group = client.generate([5], n=2, sampling=params(), resume=resume)
    assert [(s.index, s.ids.tolist()) for s in group.samples] == [(1, expected_ids([5], 1, 4, 2, 6))]


def test_stream_gives_every_token_once_and_in_order(client):
    events = list(client.stream([5], n=3, sampling=params(10)))
    assert isinstance(events[-1], GroupEnd) and events[-1].origin.engine_id == "echo"
    ends = [event.sample for event in events if isinstance(event, SampleEnd)]
    for sample in ends:
        parts = [d for event in events if isinstance(event, Delta) for d in event.samples if d.index == sample.index]
        assert [d.start for d in parts] == list(range(10))
        assert np.concatenate([d.ids for d in parts]).tolist() == sample.ids.tolist()
    assert sorted(sample.index for sample in ends) == [0, 1, 2]


def test_case_g1_leaving_a_stream_aborts_its_group(client, service):
    for event in client.stream([5], sampling=params(10**6), group_id="left"):
        assert isinstance(event, Delta)
        break
    end = time.monotonic() + 3
    while service.running:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert service.closed["left"] == 1


def test_every_operation(client, service):
    assert client.score([[1, 3], np.array([4])]).sequences[0].logprobs.tolist() == [-0.5, -0.25]
    assert client.pause("drain").in_flight == 0 and client.health().state == "paused" and not client.ready()
    with pytest.raises(Conflict) as error:
        client.resume(expected_policy_version=9)
    assert error.value.field == "expected_policy_version"
    client.resume()
    assert client.ready() and client.live()
    tensor = NamedTensor(name="w", dtype="U8", shape=[300_000], data=np.arange(300_000).astype("u1"))
    assert client.update_begin(UpdateBegin(txn="t", base_version=1, new_version=2, manifest=[])).txn == "t"
    assert client.update_tensors("t", [tensor]).staged_bytes == 300_000
    assert service.staged["w"] == tensor.data.tobytes()
    with pytest.raises(NotFound):
        client.update_disk("t", "../elsewhere")
    assert client.update_commit("t").policy_version == client.version().policy_version == 2
    client.update_rollback("t")
    assert client.abort(["nobody"])[0].outcome == "unknown" and client.abort(None) == []
    assert client.flush("stale") == 42
    with pytest.raises(InvalidRequest):
        client.flush("everything")
    assert client.release_memory(["kv"]).after == client.resume_memory().before == {"kv": 0}
    client.session_open("s", ttl_s=5.0)
    client.session_close("s")
    assert (service.calls["open s"], service.calls["close s"]) == (1, 1)
    assert client.capabilities()["vocabulary"] == 512
    assert "echo_groups 3" in client.metrics() and "sparkroll_http_requests_total" in client.metrics()


def test_keys_are_sent_and_refusals_raised(service):
    with serve_in_thread(service, ServerConfig(port=0, user_key="u", admin_key="a")) as server:
        with Client(server.url, key="u") as user:
            assert user.version().policy_version == 1
            for call in (user.resume, lambda: user.abort(None)):
                with pytest.raises(Unauthorized):
                    call()
        with Client(server.url) as nobody, pytest.raises(Unauthorized):
            nobody.metrics()
        with Client(server.url, key="a") as admin:
            admin.resume()


def test_paused_generation_is_retried_until_it_is_taken(client, service):
    service.paused = True
    threading.Timer(0.15, lambda: setattr(service, "paused", False)).start()
    assert len(client.generate([1], sampling=params()).samples) == 1
    service.paused = True
    threading.Timer(0.15, lambda: setattr(service, "paused", False)).start()
    assert isinstance(list(client.stream([1], sampling=params()))[-1], GroupEnd)
    service.paused = True
    with pytest.raises(Paused) as error:
        client.generate([1], timeout_s=0.5)
    assert error.value.retry_after_ms == 20


def test_a_deadline_is_final(client, service):
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        client.generate([1], sampling=params(10**6), timeout_s=0.2)
    with pytest.raises(DeadlineExceeded):
        list(client.stream([1], sampling=params(10**6), timeout_s=0.2))
    assert time.monotonic() - started < 4 and service.started.total() == 2 and not service.running


def test_a_server_that_is_not_there():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with Client(url, retry=RetryPolicy(attempts=3, first_s=0.01)) as client, pytest.raises(ServerLost):
            client.generate([1])


def test_case_g4_a_lost_connection_never_generates_twice(lenient, service):
    """Each connection is dropped after the request was delivered, twice for every call."""

    async def run():
        with FaultProxy(lenient.port, lambda number: 0 if number < 16 else None) as proxy:
            async with AsyncClient(proxy.url, retry=PATIENT, timeout_s=20) as client:
                calls = [client.generate([i], sampling=params(40), group_id=f"g{i}") for i in range(8)]
                return await asyncio.gather(*calls), proxy.connections

    groups, connections = asyncio.run(run())
    assert connections >= 24
    for i, group in enumerate(groups):
        assert group.group_id == f"g{i}" and group.samples[0].ids.tolist() == expected_ids([i], 0, 4, 0, 40)
    assert service.started == {f"g{i}": 1 for i in range(8)} and set(service.steps.values()) == {40}
    assert not service.running


def test_case_g4_a_lost_reply_is_given_again(lenient, service):
    """The reply is cut in its middle: the work is over, its stored reply is what the retry gets."""
    cut = FaultProxy(lenient.port, lambda number: 200 if number < 3 else None)
    with cut as proxy, Client(proxy.url, retry=PATIENT, timeout_s=20) as client:
        group = client.generate([3], n=4, sampling=params(50), group_id="g")
        assert client.update_tensors("t", []).staged == 0
    assert [s.ids.tolist() for s in group.samples] == [expected_ids([3], i, 4, 0, 50) for i in range(4)]
    assert service.started == {"g": 1} and service.calls["update_tensors"] == 1


@pytest.mark.parametrize("seed", range(3))
def test_case_g4_a_broken_stream_goes_on_where_it_broke(lenient, service, seed):
    cuts = np.random.default_rng(seed).integers(0, 3000, 12)
    with FaultProxy(lenient.port, lambda number: int(cuts[number]) if number < len(cuts) else None) as proxy:
        with Client(proxy.url, retry=PATIENT, timeout_s=20) as client:
            events = list(client.stream([3], n=2, sampling=params(60), group_id="g"))
        assert proxy.connections > 4
    for index in range(2):
        parts = [d for event in events if isinstance(event, Delta) for d in event.samples if d.index == index]
        assert [d.start for d in parts] == list(range(60))
        assert np.concatenate([d.ids for d in parts]).tolist() == expected_ids([3], index, 4, 0, 60)
    assert [type(event) for event in events].count(GroupEnd) == 1
    assert service.started == {"g": 1} and service.steps["g"] == 60


def test_many_calls_share_the_pool(server, service):
    async def run():
        async with AsyncClient(server.url, max_connections=4, timeout_s=20) as client:
            return await asyncio.gather(*(client.generate([i % 50], sampling=params(3)) for i in range(100)))

    groups = asyncio.run(run())
    assert [g.samples[0].ids.tolist() for g in groups] == [expected_ids([i % 50], 0, 4, 0, 3) for i in range(100)]


def test_a_cancelled_call_aborts_its_group(server, service):
    async def run():
        async with AsyncClient(server.url) as client:
            call = asyncio.create_task(client.generate([1], sampling=params(10**6), group_id="g"))
            while not service.running:
                await asyncio.sleep(0.005)
            call.cancel()
            async with aclosing(client.stream([1], sampling=params(10**6), group_id="h")) as events:
                await anext(events)
            async with asyncio.timeout(3):
                while service.running:
                    await asyncio.sleep(0.005)

    asyncio.run(run())
    assert service.closed == {"g": 1, "h": 1}


def test_overload_carries_its_wait(server, service):
    async def full(scope):
        service.calls["flush"] += 1
        if service.calls["flush"] < 3:
            raise Overloaded("full", retry_after_ms=100)
        return 1

    service.flush = full
    started = time.monotonic()
    with Client(server.url, retry=PATIENT) as client:
        assert client.flush() == 1
    assert time.monotonic() - started > 0.2 and service.calls["flush"] == 3
