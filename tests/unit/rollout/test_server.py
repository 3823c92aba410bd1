"""The HTTP server: bodies, refusals, callers that leave, deadlines."""

import gzip
import logging
import resource
import socket
import time
import zlib

import httpx
import msgspec
import numpy as np
import pytest

from engine.errors import InvalidRequest, Paused
from engine.types import GroupOutput, SampleResume, SamplingParams
from rollout.client import generate_call
from rollout.codec import decode, encode
from rollout.protocol import BODY_TYPE, STREAM_TYPE, AbortCall, ErrorReply, GenerateCall, PauseCall, Reply
from rollout.replies import STATUS_BY_CODE, error_body, error_from_reply
from rollout.server import serve_in_thread
from rollout.server_config import ServerConfig
from rollout.wire_limits import WireLimits
from tests.unit.rollout.echo_service import EchoService, expected_ids

CONFIG = ServerConfig(port=0, grace_s=0.2, ping_s=0.1, limits=WireLimits(body_bytes=2**20), body_timeout_s=1.0)


@pytest.fixture
def service():
    return EchoService(step_s=0.002)


@pytest.fixture
def server(service):
    with serve_in_thread(service, CONFIG) as running:
        yield running


@pytest.fixture
def http(server):
    plain = dict(trust_env=False, verify=False)  # loads no certificates
    with httpx.Client(base_url=server.url, headers={"content-type": BODY_TYPE}, **plain) as client:
        yield client


def post(http, name, body, **headers):
    content = body if isinstance(body, bytes) else encode(body)
    return http.post(f"/v1/{name}", content=content, headers=headers)


def refusal(response) -> ErrorReply:
    reply = decode(response.content, ErrorReply)
    assert response.status_code == STATUS_BY_CODE[reply.code]
    return reply


def generation(max_new=4, n=2, **options) -> GenerateCall:
    return generate_call([3, 4], n=n, sampling=SamplingParams(max_new=max_new, seed=9), **options)


def until(condition, seconds=3.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.005)


def test_a_reply_carries_samples_in_order_and_its_origin(http):
    reply = decode(post(http, "generate_group", generation()).content, Reply[GroupOutput])
    assert [sample.index for sample in reply.result.samples] == [0, 1]
    assert reply.result.samples[1].ids.tolist() == expected_ids([3, 4], 1, 9, 0, 4)
    assert (reply.origin.engine_id, reply.origin.incarnation, reply.origin.policy_version) == ("echo", 7, 1)


def test_continue_takes_over_where_a_sample_was_left(http):
    resume = [SampleResume(index=1, ids=np.array(expected_ids([3, 4], 1, 9, 0, 3), "u4"))]
    body = generation(max_new=5, resume=resume)
    reply = decode(post(http, "continue", body).content, Reply[GroupOutput])
    assert [s.ids.tolist() for s in reply.result.samples] == [expected_ids([3, 4], 1, 9, 3, 5)]
    error = refusal(post(http, "continue", generation()))
    assert (error.code, error.field) == ("INVALID", "request.resume")


def test_errors_name_field_expected_actual_and_state(http, service):
    service.paused = True
    error = refusal(post(http, "generate_group", generation()))
    assert (error.code, error.retryable, error.retry_after_ms, error.state) == ("PAUSED", True, 20, "paused")
    service.paused = False
    call = generate_call([1, 900])
    error = refusal(post(http, "generate_group", call))
    assert (error.field, error.expected, error.actual) == ("request.prompt_ids", "ids < 512", "900")
    assert refusal(http.get("/v2/nothing")).code == "NOT_FOUND"


def test_every_error_travels_whole():
    error = Paused("later \ud83d", field="f\udc97", expected=float("nan"), actual="\udcff", retry_after_ms=3)
    back = error_from_reply(decode(error_body(error), ErrorReply))
    assert isinstance(back, Paused) and back.retry_after_ms == 3 and back.expected == "nan"
    assert back.message == "later \\ud83d" and back.field == "f\\udc97"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"op_id": ""}, "op_id"),
        ({"op_id": "x" * 2**18}, "op_id"),
        ({"op_id": "a\0b"}, "op_id"),
        ({"proto": 2}, "proto"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"deadline_ms": 1.5}, "deadline_ms"),
        ({"stop": [""]}, "stop"),
        ({"text": "also text"}, "text"),
        ({"messages": []}, "messages"),
        ({"surprise": 1}, "surprise"),
        ({"request": {"group_id": "g\0", "prompt_ids": [1]}}, "request.group_id"),
        ({"request": {"group_id": "g" * 2**18, "prompt_ids": [1]}}, "request.group_id"),
        ({"request": {"group_id": "g", "prompt_ids": []}}, "request.prompt_ids"),
        ({"request": {"group_id": "g", "prompt_ids": []}, "text": ""}, "text"),
        ({"request": {"group_id": "g", "prompt_ids": [-1]}}, "request.prompt_ids"),
        ({"request": {"group_id": "g", "prompt_ids": [1], "n": True}}, "request.n"),
        ({"request": {"group_id": "g", "prompt_ids": [1], "session_id": "\n"}}, "request.session_id"),
    ],
)
def test_case_h1_h4_h6_bad_fields_are_named_and_harm_nobody(http, service, change, field):
    body = {"op_id": "op", "request": {"group_id": "g", "prompt_ids": [1]}} | change
    error = refusal(post(http, "generate_group", msgspec.msgpack.encode(body)))
    assert (error.code, error.field) == ("INVALID", field) and not service.started
    assert post(http, "generate_group", generation()).status_code == 200


@pytest.mark.parametrize("mode", ["wait", "keep", "", "in place", "Drain", 1, None])
def test_case_g5_unknown_pause_words_are_refused(http, service, mode):
    error = refusal(post(http, "pause", msgspec.msgpack.encode({"op_id": "p", "mode": mode})))
    assert error.field == "mode" and not service.paused


@pytest.mark.parametrize("mode", ["drain", "abort", "retract", "in_place"])
def test_case_g5_known_pause_words_arrive(http, service, mode):
    for i in range(2):
        assert post(http, "pause", PauseCall(op_id=f"{mode}{i}", mode=mode)).status_code == 200
    assert service.calls[f"pause {mode}"] == 2


def test_case_n4_compressed_bodies_are_refused(http, server):
    zeros = bytes(2**26)
    packed = {"gzip": gzip.compress(zeros, 1), "deflate": zlib.compress(zeros, 1), "zstd": b"\x28\xb5\x2f\xfd" * 100}
    packed |= {"gzip, gzip": gzip.compress(packed["gzip"]), "br": b"x"}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for encoding, body in packed.items():
        for chunked in (False, True):
            content = iter([body]) if chunked else body
            response = http.post("/v1/update_tensors", content=content, headers={"content-encoding": encoding})
            error = refusal(response)
            assert (error.code, error.field) == ("UNSUPPORTED", "content-encoding")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_case_n4_the_size_limit_holds_while_reading(http):
    body = b"\xc0" * (2**20 + 1)
    for content in (body, iter([body[: 2**19]] * 3)):
        error = refusal(http.post("/v1/generate_group", content=content))
        assert (error.code, error.field) == ("TOO_LARGE", "body")
    assert post(http, "generate_group", generation()).status_code == 200


def test_a_wrong_content_type_is_refused(http):
    response = http.post("/v1/flush", content=encode({"op_id": "f"}), headers={"content-type": "text/plain"})
    assert refusal(response).field == "content-type"


@pytest.mark.parametrize("body", [b"", b"\xdd\xff\xff\xff\xff", b"\x93" * 100_000, b"\x81\xa5op_id\xa1x\x00"])
def test_case_n3_hostile_bodies_leave_the_server_alive(http, body):
    assert refusal(post(http, "generate_group", body)).code in ("INVALID", "TOO_LARGE")
    assert http.get("/live").status_code == 200


def test_case_n1_a_pickle_in_any_binary_field_is_never_loaded(http, tmp_path):
    import pickle

    marker = tmp_path / "ran"

    class Bomb:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    payload = pickle.dumps(Bomb())
    tensor = {"name": "w", "dtype": "U8", "shape": [len(payload)]}
    for data in (payload, msgspec.msgpack.Ext(1, payload), msgspec.msgpack.Ext(3, payload), payload.hex()):
        body = {"op_id": "b", "txn": "t", "tensors": [tensor | {"data": data}]}
        assert refusal(post(http, "update_tensors", msgspec.msgpack.encode(body))).code == "INVALID"
    assert not marker.exists()


def raw_post(server, name: str, body: bytes, accept: str = "*/*") -> socket.socket:
    connection = socket.create_connection((server.host, server.port))
    head = f"POST /v1/{name} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {BODY_TYPE}\r\naccept: {accept}\r\n"
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def test_case_g1_callers_that_leave_stop_their_work(server, service, http, caplog):
    caplog.set_level(logging.INFO)
    streaming = raw_post(server, "generate_group", encode(generation(10**6, group_id="s")), STREAM_TYPE)
    assert streaming.recv(10)
    plain = raw_post(server, "generate_group", encode(generation(10**6, group_id="p")))
    until(lambda: len(service.running) == 2)
    left = time.monotonic()
    streaming.close()
    plain.close()
    assert post(http, "generate_group", generation(group_id="third")).status_code == 200
    until(lambda: not service.running, 2.0)
    assert time.monotonic() - left < 1.5
    assert service.closed == {"s": 1, "p": 1, "third": 1}
    assert len([record for record in caplog.records if record.name.startswith("rollout")]) <= 2
    assert b"sparkroll_http_operations_running 0.0" in http.get("/metrics").content


def test_a_body_that_never_comes_is_given_up(server, service):
    connection = socket.create_connection((server.host, server.port))
    head = f"POST /v1/generate_group HTTP/1.1\r\nhost: localhost\r\ncontent-type: {BODY_TYPE}\r\n"
    connection.sendall(f"{head}content-length: 1000\r\n\r\nabc".encode())
    connection.settimeout(5)
    assert b" 504 " in connection.recv(1000)
    connection.close()


def test_a_deadline_ends_the_work(http, service):
    started = time.monotonic()
    error = refusal(post(http, "generate_group", generation(10**6, timeout_s=0.1)))
    assert error.code == "TIMEOUT" and time.monotonic() - started < 2
    assert not service.running and sum(service.closed.values()) == 1


def test_a_commit_outlives_its_caller_and_is_done_once(server, service, http):
    service.step_s = 0.3
    service.pending = "t"
    body = msgspec.msgpack.encode({"op_id": "commit", "txn": "t", "deadline_ms": 50})
    assert refusal(post(http, "update_commit", body)).code == "TIMEOUT"
    raw_post(server, "update_commit", body).close()
    until(lambda: service.calls["update_commit"] == 1)
    until(lambda: post(http, "update_commit", body).status_code == 200)
    assert service.calls["update_commit"] == 1 and service.policy_version == 2


def test_case_g4_a_repeat_with_another_body_is_refused(http, service):
    first = generation(op_id="one", group_id="g")
    replies = {post(http, "generate_group", first).content for _ in range(3)}
    assert len(replies) == 1 and service.started["g"] == 1
    changed = generation(op_id="one", group_id="g", max_new=5)
    for name, body, accept in (
        ("generate_group", changed, "*/*"),
        ("generate_group", first, STREAM_TYPE),
        ("abort", AbortCall(op_id="one", group_ids=[]), "*/*"),
    ):
        error = refusal(post(http, name, body, accept=accept))
        assert (error.code, error.field) == ("CONFLICT", "op_id")


def test_case_h6_a_live_id_is_refused_and_free_afterwards(server, service, http):
    running = raw_post(server, "generate_group", encode(generation(100, group_id="x")))
    until(lambda: "x" in service.running)
    error = refusal(post(http, "generate_group", generation(group_id="x")))
    assert (error.code, error.field) == ("CONFLICT", "request.group_id")
    assert b" 200 " in running.recv(100)
    running.close()
    assert post(http, "generate_group", generation(group_id="x")).status_code == 200


def test_ready_follows_the_service_and_live_does_not(http, service):
    assert (http.get("/live").status_code, http.get("/ready").status_code) == (200, 200)
    service.paused = True
    assert (http.get("/live").status_code, http.get("/ready").status_code) == (200, 503)


def test_a_fault_of_the_service_is_hidden_and_logged_once(http, service, caplog):
    async def broken(scope):
        raise KeyError("secret")

    service.flush = broken
    error = refusal(post(http, "flush", {"op_id": "f"}))
    assert error.code == "INTERNAL" and "secret" not in error.message
    assert sum("secret" in str(record.exc_info) for record in caplog.records) == 1


def test_stopping_ends_open_calls():
    service = EchoService(step_s=0.002)
    server = serve_in_thread(service, CONFIG)
    connection = raw_post(server, "generate_group", encode(generation(10**6)))
    until(lambda: service.running)
    started = time.monotonic()
    server.stop()
    assert b" 503 " in connection.recv(1000) and time.monotonic() - started < 3
    connection.close()
    with pytest.raises(OSError):
        socket.create_connection((server.host, server.port), 1)


def test_a_taken_port_is_named():
    with serve_in_thread(EchoService()) as server, pytest.raises(InvalidRequest) as error:
        serve_in_thread(EchoService(), ServerConfig(port=server.port))
    assert error.value.field == "port"
