"""Every route of the application against every key (case N2), generated from the route table."""

import httpx
import pytest

from engine.errors import InvalidRequest
from engine.types import GroupRequest, NamedTensor, ScoreRequest, UpdateBegin
from rollout import protocol
from rollout.codec import as_ids, encode
from rollout.protocol import BODY_TYPE
from rollout.routes import ROUTES
from rollout.server import build_app, serve_in_thread
from rollout.server_config import ServerConfig
from tests.unit.rollout.echo_service import EchoService

USER, ADMIN = "user-key-1", "admin-key-2"
GENERATE = protocol.GenerateCall(
    op_id="op-generate", request=GroupRequest(group_id="g", prompt_ids=as_ids("prompt_ids", [1]))
)
UPDATE = UpdateBegin(txn="t", base_version=1, new_version=2, manifest=[])
BODIES = {
    "generate_group": GENERATE,
    "continue": GENERATE,
    "score": protocol.ScoreCall(op_id="s", request=ScoreRequest(sequences=[as_ids("s", [1, 2])])),
    "abort": protocol.AbortCall(op_id="a", group_ids=["nobody"]),
    "pause": protocol.PauseCall(op_id="p", mode="in_place"),
    "resume": protocol.ResumeCall(op_id="r"),
    "update_begin": protocol.UpdateBeginCall(op_id="ub", update=UPDATE),
    "update_disk": protocol.UpdateDiskCall(op_id="ud", txn="t", uri="nowhere"),
    "update_tensors": protocol.UpdateTensorsCall(
        op_id="ut", txn="t", tensors=[NamedTensor(name="w", dtype="U8", shape=[1], data=as_ids("d", [1]).view("u1"))]
    ),
    "update_commit": protocol.UpdateEndCall(op_id="uc", txn="t"),
    "update_rollback": protocol.UpdateEndCall(op_id="ur", txn="t"),
    "adapter_tensors": protocol.AdapterTensorsCall(op_id="at", upload="u", tensors=[]),
    "update_adapter": protocol.UpdateAdapterCall(op_id="ua", adapter=protocol.AdapterSource(name="a", config={"r": 4})),
    "unload_adapter": protocol.UnloadAdapterCall(op_id="la", adapter="a"),
    "flush": protocol.FlushCall(op_id="f"),
    "release_memory": protocol.MemoryCall(op_id="m1"),
    "resume_memory": protocol.MemoryCall(op_id="m2"),
    "session_open": protocol.SessionOpenCall(op_id="so", session_id="s"),
    "session_close": protocol.SessionCloseCall(op_id="sc", session_id="s"),
}
HTTP = httpx.Client(trust_env=False)
OPEN = {"health", "live", "ready"}
READING = {"generate_group", "continue", "score", "version", "adapters", "capabilities", "metrics"}


@pytest.fixture(scope="module")
def service():
    return EchoService()


@pytest.fixture(scope="module")
def server(service):
    with serve_in_thread(service, ServerConfig(port=0, user_key=USER, admin_key=ADMIN)) as running:
        yield running


def send(server, route, key):
    headers = {"authorization": key} if key else {}
    if route.request is not None:
        headers["content-type"] = BODY_TYPE
    content = encode(BODIES[route.name]) if route.request is not None else None
    return HTTP.request(route.method, server.url + route.path, headers=headers, content=content)


def test_the_application_is_the_table():
    app = build_app(EchoService(), ServerConfig())
    served = {(route.path, frozenset(route.methods) - {"HEAD"}) for route in app.routes}  # type: ignore[attr-defined]
    assert served == {(route.path, frozenset([route.method])) for route in ROUTES}
    assert len({route.name for route in ROUTES}) == len({route.path for route in ROUTES}) == len(ROUTES)
    assert {route.name for route in ROUTES if route.request is not None} == set(BODIES)


def test_case_n2_whatever_changes_state_is_for_admins():
    levels = {route.name: route.access for route in ROUTES}
    assert {name for name, access in levels.items() if access == "open"} == OPEN
    assert {name for name, access in levels.items() if access == "user"} == READING
    assert all(route.access == "admin" for route in ROUTES if route.name not in OPEN | READING)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_case_n2_every_route_with_every_key(server, service, route):
    wrong = [None, "Bearer wrong", f"Bearer {USER}x", f"Basic {ADMIN}", ADMIN, "Bearer", "Bearer \u00fc"]
    wrong += [f"Bearer {ADMIN[:-1]}"] + ([f"Bearer {USER}"] if route.access == "admin" else [])
    before = (dict(service.calls), service.paused, service.pending, dict(service.started))
    for key in wrong:
        response = send(server, route, key.encode("latin-1") if key else None)
        assert (response.status_code == 401) is (route.access != "open"), key
    assert before == (dict(service.calls), service.paused, service.pending, dict(service.started))
    right = [f"Bearer {ADMIN}"] + ([f"Bearer {USER}"] if route.access == "user" else [])
    for key in right:
        assert send(server, route, key).status_code != 401, key


@pytest.mark.parametrize("route", [r for r in ROUTES if r.method == "POST"], ids=lambda route: route.name)
def test_case_n2_a_get_is_no_way_around(server, route):
    assert HTTP.get(server.url + route.path).status_code == 405


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"host": "0.0.0.0"}, "host"),
        ({"host": "::"}, "host"),
        ({"host": "192.0.2.1"}, "host"),
        ({"host": "example.org"}, "host"),
        ({"user_key": "u"}, "admin_key"),
        ({"user_key": "same", "admin_key": "same"}, "admin_key"),
        ({"admin_key": ""}, "admin_key"),
        ({"port": 70_000}, "port"),
    ],
)
def test_case_n2_unsafe_settings_are_refused(settings, field):
    with pytest.raises(InvalidRequest) as refusal:
        ServerConfig(**settings)
    assert refusal.value.field == field


def test_keys_do_not_show():
    config = ServerConfig(host="0.0.0.0", user_key=USER, admin_key=ADMIN)
    assert USER not in repr(config) and ADMIN not in repr(config)
    assert ADMIN not in f"{config.admin_key!r}" and config.admin_key == ADMIN


def test_without_keys_only_loopback_names_are_answered():
    with serve_in_thread(EchoService()) as server:
        for host, status in (
            ("127.0.0.1:1", 200),
            ("localhost", 200),
            ("[::1]:80", 200),
            ("evil.example:80", 401),
            ("[::2]", 401),
        ):
            response = HTTP.get(server.url + "/v1/version", headers={"host": host})
            assert response.status_code == status, host


def test_with_only_an_admin_key_nothing_is_left_to_users():
    with serve_in_thread(EchoService(), ServerConfig(port=0, admin_key=ADMIN)) as server:
        assert HTTP.get(server.url + "/v1/version").status_code == 401
        headers = {"authorization": f"Bearer {ADMIN}"}
        assert HTTP.get(server.url + "/v1/version", headers=headers).status_code == 200
