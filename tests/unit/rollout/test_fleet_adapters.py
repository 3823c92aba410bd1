"""LoRA policies of a fleet of real engines: one meaning of a name everywhere, whatever fails meanwhile."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
import torch
from safetensors.torch import load_file

from engine.engine import Engine
from engine.errors import Conflict, InvalidRequest, NotFound, SparkrollError, TooLarge, Unsupported
from engine.types import AdapterRef, ScoreRequest
from lora.config import AdapterConfig
from rollout.actors.engine_host import EngineHost
from rollout.adapter_source import AdapterSources, read_adapter
from rollout.protocol import AdapterSource, GenerateCall, SampleEnd
from rollout.router import Router
from rollout.routing.adapter_store import AdapterStore
from rollout.routing.adapters import FleetAdapters
from rollout.routing.recipe import PolicyRecipe
from rollout.routing.replica import Membership, Replica
from tests.support import begin_of, make_config, prompt, reference_greedy, save_tiny, state_tensors, to_named
from tests.unit.engine.lora_cases import ask_with, greedy_of, logprobs_of, save_adapter


@pytest.fixture(scope="module")
def folders(t_full, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(t_full, root / name, seed) for seed, name in enumerate(("LA", "LB"), start=1)}


@pytest.fixture(scope="module")
def w1(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("w1") / "model", seed=1)


class Served:
    """Engines on threads of their own, behind a router."""

    def __init__(self, folder, spool, root=None, **config) -> None:
        self.folder = folder
        self.config = make_config(**config)
        self.membership = Membership()
        self.adapters = FleetAdapters(self.membership, AdapterStore(spool / "adapters"))
        self.router = Router(self.membership, PolicyRecipe(spool / "policy"), self.adapters, update_root=root)
        self.hosts: list[EngineHost] = []

    async def add(self) -> EngineHost:
        host = EngineHost(
            lambda: Engine.from_pretrained(self.folder, self.config),
            engine_id=f"e{len(self.hosts)}",
            delta_interval_s=0.001,
        )
        await host.start()
        self.hosts.append(host)
        replica = Replica(host.engine_id, 1, host, policy_version=self.membership.policy_version)
        while replica.adapters != self.membership.adapters:
            await self.adapters.align(replica)
        self.membership.admit(replica)
        return host

    async def ask(self, name, group_id, **options):
        request = ask_with(name, group_id, **options)
        events = [event async for event in self.router.generate(GenerateCall(op_id=group_id, request=request))]
        return [event.sample for event in events if isinstance(event, SampleEnd)]

    async def held(self) -> list[list[tuple[str, int, int]]]:
        """Of each engine: name, revision, requests."""
        return [[(found.name, found.rev, found.references) for found in await host.adapters()] for host in self.hosts]


@asynccontextmanager
async def fleet(folder, spool, engines=2, root=None, **config):
    served = Served(folder, spool, root, **config)
    try:
        for _ in range(engines):
            await served.add()
        yield served
    finally:
        for host in served.hosts:
            await host.stop()


def source(name, folder, **fields) -> AdapterSource:
    update = read_adapter(folder, name)
    return AdapterSource(name=name, config=update.config, tensors=update.tensors, **fields)


async def until(condition) -> None:
    for _ in range(400):
        if await condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")


def test_a_publish_reaches_all_engines_and_a_group_keeps_its_revision_even_elsewhere(t_full, folders, tmp_path):
    async def run() -> None:
        async with fleet(t_full, tmp_path, root=folders["LA"].parent) as served:
            report = await served.router.update_adapter(AdapterSource(name="pol", uri=str(folders["LA"])))
            assert report.engines == {"e0": 1, "e1": 1} and report.adapter.state == "live" and report.pause_ms > 0
            assert (await served.router.version()).adapters == {"pol": 1}
            slow = asyncio.create_task(served.ask("pol", "slow", max_new=200))
            follower = asyncio.create_task(served.ask("pol", "follower", max_new=200, on_publish="reprefill"))

            async def running() -> bool:
                return sum(entry[2] for held in await served.held() for entry in held) == 2

            await until(running)
            assert (await served.router.update_adapter(source("pol", folders["LB"]))).adapter.rev == 2
            (new,) = await served.ask("pol", "new")
            assert new.ids.tolist() == greedy_of(t_full, folders["LB"], prompt(24), 12)
            assert [span.adapter_rev for span in new.spans] == [2]
            # The engine with the slow group ends: another one goes on under revision 1, which it still has.
            (busy,) = [live.engine for name, live in served.router._groups.items() if name == "slow"]
            assert not slow.done()
            await next(host for host in served.hosts if host.engine_id == busy.engine_id).stop()
            (sample,) = await slow
            assert {span.adapter_rev for span in sample.spans} == {1} and len(sample.ids) == 200
            whole = logprobs_of(t_full, folders["LA"], [*prompt(24), *sample.ids])
            assert sample.ids.tolist() == whole[23:-1].argmax(-1).tolist()
            (moved,) = await follower
            assert [span.adapter_rev for span in moved.spans][-1] == 2
            left = next(host for host in served.hosts if host.engine_id != busy.engine_id)

            async def freed() -> bool:
                return [(found.rev, found.references) for found in await left.adapters()] == [(2, 0)]

            await until(freed)
            # An engine that joins later gets what the fleet has.
            joined = await served.add()
            assert [found.rev for found in await joined.adapters()] == [2]
            ids = prompt(12)
            scored = await served.router.score(ScoreRequest(sequences=[ids], adapter=AdapterRef(name="pol")))
            assert scored.sequences[0].adapter_rev == 2
            assert len(list((tmp_path / "adapters").iterdir())) == 1

    asyncio.run(run())


def test_what_an_engine_refuses_leaves_every_engine_as_it_was(t_full, folders, tmp_path):
    good = read_adapter(folders["LA"], "pol")
    weights = load_file(folders["LA"] / "adapter_model.safetensors")
    first = next(iter(weights))
    nan = [to_named(name, tensor * (float("nan") if name == first else 1)) for name, tensor in weights.items()]
    cut = [*good.tensors[1:], to_named(first, weights[first][:, :-1].clone())]

    def bad(**fields) -> AdapterSource:
        return AdapterSource(**({"name": "pol", "config": good.config, "tensors": good.tensors} | fields))

    refused: list[tuple[AdapterSource, type[SparkrollError], str]] = [
        (bad(tensors=nan), InvalidRequest, "finite"),
        (bad(tensors=cut), InvalidRequest, "shape"),
        (bad(tensors=[*good.tensors, good.tensors[0]]), InvalidRequest, "once"),
        (bad(tensors=[]), InvalidRequest, "tensors"),
        (bad(config=good.config | {"use_dora": True}), Unsupported, "use_dora"),
        (bad(config=good.config | {"r": 65}), InvalidRequest, "rank"),
        (bad(name="\ud83d"), InvalidRequest, "name"),
        (bad(name=""), InvalidRequest, "name"),
        (bad(rev=1), Conflict, "rev"),
        (bad(config=None), InvalidRequest, "either uri"),
        (bad(uri="/etc"), InvalidRequest, "either uri"),
        (bad(upload="nothing"), NotFound, "upload"),
        (bad(txn="nothing"), NotFound, "txn"),
        *((bad(config=None, tensors=[], uri=uri), InvalidRequest, "allowed root") for uri in _NO_FOLDERS),
    ]

    async def run() -> None:
        async with fleet(t_full, tmp_path, root=folders["LA"].parent) as served:
            await served.router.update_adapter(source("pol", folders["LA"]))
            for wrong, kind, match in refused:
                with pytest.raises(kind, match=match):
                    await served.router.update_adapter(wrong)
            with pytest.raises(NotFound, match=r"adapter.*pol"):
                await served.ask("default", "g")
            with pytest.raises(NotFound):
                await served.ask("pol", "g", rev=7)
            with pytest.raises(NotFound):
                await served.router.unload_adapter("default")
            with pytest.raises(NotFound):
                await served.router.score(ScoreRequest(sequences=[prompt(3)], adapter=AdapterRef(name="none")))
            assert await served.held() == [[("pol", 1, 0)], [("pol", 1, 0)]]
            (sample,) = await served.ask("pol", "g")
            assert sample.ids.tolist() == greedy_of(t_full, folders["LA"], prompt(24), 12)
            await served.router.unload_adapter("pol")
            with pytest.raises(NotFound, match="none is"):
                await served.ask("pol", "g")
            assert await served.held() == [[], []] and not list((tmp_path / "adapters").iterdir())
            # A number is never given twice, so that nothing of the old policy can be taken for the new one's.
            assert (await served.router.update_adapter(source("pol", folders["LB"]))).adapter.rev > 1

    asyncio.run(run())


_NO_FOLDERS = ["someone/some-repo", "http://127.0.0.1:9/x", "file:///etc", "/etc", "/srv/../etc", "/a\0b"]


def test_engines_that_fail_a_publish_are_fenced_unless_all_do(t_full, folders, tmp_path):
    async def run() -> None:
        async with fleet(t_full, tmp_path) as served:
            router, out = served.router, []
            served.membership.on_out = lambda replica, reason: out.append(replica.engine_id)
            await router.update_adapter(source("pol", folders["LA"]))

            async def refuse(name, rev):
                raise Conflict(field="rev", expected="another", actual=rev)

            works = served.hosts[1].publish_adapter
            served.hosts[0].publish_adapter = served.hosts[1].publish_adapter = refuse
            with pytest.raises(Conflict):
                await router.update_adapter(source("pol", folders["LB"]))
            assert await served.held() == [[("pol", 1, 0)], [("pol", 1, 0)]] and out == []
            served.hosts[1].publish_adapter = works
            report = await router.update_adapter(source("pol", folders["LB"]))
            assert report.engines == {"e1": 3} and report.fenced == ["e0"] == out
            (sample,) = await served.ask("pol", "g")
            assert sample.ids.tolist() == greedy_of(t_full, folders["LB"], prompt(24), 12)

    asyncio.run(run())


def test_base_and_adapter_change_in_one_transaction(t_full, w1, folders, tmp_path):
    """All of both or nothing of either; the pair that answers is never a new base with an old adapter."""

    async def run() -> None:
        async with fleet(t_full, tmp_path) as served:
            router, tensors = served.router, state_tensors(w1)
            await router.update_adapter(source("pol", folders["LA"]))
            for txn, end in (("dropped", router.update_rollback), ("t1", router.update_commit)):
                await router.update_begin(begin_of(tensors, txn, 0, 1))
                staged = await router.update_adapter(source("pol", folders["LB"], txn=txn))
                assert staged.adapter.state == "staged"
                with pytest.raises(Unsupported, match="use_dora"):
                    await router.update_adapter(
                        AdapterSource(name="pol", config={"use_dora": True}, tensors=tensors[:1], txn=txn)
                    )
                await router.update_tensors(txn, tensors)
                (before,) = await served.ask("pol", "g")
                assert before.ids.tolist() == greedy_of(t_full, folders["LA"], prompt(24), 12)
                ended = await end(txn)
            assert ended.loaded["adapters"] == 1 and ended.policy_version == 1
            (after,) = await served.ask("pol", "g")
            assert after.ids.tolist() == greedy_of(w1, folders["LB"], prompt(24), 12)
            assert {(span.policy_version, span.adapter_rev) for span in after.spans} == {(1, staged.adapter.rev)}
            (base,) = await served.ask(None, "g")
            assert base.ids.tolist() == reference_greedy(w1, prompt(24), 12)
            assert await served.held() == [[("pol", staged.adapter.rev, 0)]] * 2

    asyncio.run(run())


@pytest.mark.parametrize("versions", [8, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_publishing_without_end_under_load_mislabels_no_token_and_leaves_nothing(t_full, folders, tmp_path, versions):
    """Every token is the one its span's revision says after what came before; a sample that finishes on what it
    began with equals a run of that revision alone."""
    sources, given = [source("pol", folders[name]) for name in ("LA", "LB")], ["LA", "LB"]
    choices, prompts = ("finish", "reprefill", "keep_kv"), [prompt(8), prompt(15, 90)]
    whole = {(name, i): greedy_of(t_full, folders[name], ids, 16) for name in given for i, ids in enumerate(prompts)}
    done: list = []

    async def ask(served, number: int) -> None:
        place = number % len(prompts)
        on_publish = choices[number % 3]
        (sample,) = await served.ask("pol", f"g{number}", ids=prompts[place], max_new=16, on_publish=on_publish)
        done.append((place, on_publish, sample))

    async def run() -> None:
        async with fleet(t_full, tmp_path, adapters=AdapterConfig(max_resident=3, device_mib=8, host_mib=16)) as served:
            await served.router.update_adapter(sources[0])
            load: set[asyncio.Task] = set()
            for number in range(1, versions):
                load |= {asyncio.create_task(ask(served, 2 * number + extra)) for extra in range(2)}
                report = await served.router.update_adapter(sources[number % 2])
                assert report.adapter.rev == number + 1 and report.fenced == []
                load = {task for task in load if not task.done() or task.result() is not None}
                if len(load) > 40:
                    await asyncio.wait(load)
            await asyncio.gather(*load)

            async def clean() -> bool:
                return await served.held() == [[("pol", versions, 0)]] * 2

            await until(clean)
            for host in served.hosts:
                resident, stats = await host._thread.call(_left)
                assert resident <= 1 and stats.roots < 300
            assert not served.adapters._holds and len(list((tmp_path / "adapters").iterdir())) == 1
            assert served.membership.adapters == {("pol", versions)}

    asyncio.run(run())
    assert len(done) == 2 * (versions - 1)
    moved = 0
    for place, on_publish, sample in done:
        name = given[(sample.spans[0].adapter_rev - 1) % 2]
        if on_publish == "finish":
            assert len({span.adapter_rev for span in sample.spans}) == 1
            assert sample.ids.tolist() == whole[name, place]
            continue
        moved += len(sample.spans) > 1
        end = sample.spans[0].end
        assert sample.ids[:end].tolist() == whole[name, place][:end]
        start = len(prompts[place])
        for span in sample.spans[1:]:
            assert on_publish == "keep_kv" or not span.mixed_kv
            if not span.mixed_kv:
                folder = folders[given[(span.adapter_rev - 1) % 2]]
                wanted = logprobs_of(t_full, folder, [*prompts[place], *sample.ids[: span.end]]).argmax(-1)
                assert sample.ids[span.start : span.end].tolist() == wanted[start + span.start - 1 : -1].tolist()
    assert moved > 0, "nobody was under way when a revision came"


def _left(engine: Engine):
    engine.check()
    return len(engine.adapters.residency.resident), engine._parts.cache.stats()


def test_a_transaction_that_falls_silent_takes_its_adapter_along(t_full, w1, folders, tmp_path):
    async def run() -> None:
        async with fleet(t_full, tmp_path, engines=1) as served:
            await served.router.update_begin(begin_of(state_tensors(w1), "t", 0, 1, timeout_s=0.2))
            await served.router.update_adapter(source("pol", folders["LA"], txn="t"))

            async def gone() -> bool:
                return await served.held() == [[]]

            await until(gone)

    asyncio.run(run())


def test_uploads_in_parts_are_bounded_and_used_once(folders, monkeypatch):
    update = read_adapter(folders["LA"], "pol")
    sources = AdapterSources(None, silence_s=60.0)
    sources.add("u", update.tensors[:3])
    assert sources.add("u", update.tensors[3:5]).staged == 5
    wanted = AdapterSource(name="pol", config=update.config, tensors=update.tensors[5:], upload="u")
    whole = asyncio.run(sources.read(wanted))
    assert [tensor.name for tensor in whole.tensors] == [tensor.name for tensor in update.tensors]
    with pytest.raises(NotFound):
        asyncio.run(sources.read(wanted))
    monkeypatch.setattr("rollout.adapter_source.UPLOAD_BYTES", 10)
    with pytest.raises(TooLarge):
        sources.add("v", update.tensors)
    silent = AdapterSources(None, silence_s=-1.0)
    monkeypatch.undo()
    silent.add("u", update.tensors)
    with pytest.raises(NotFound):
        asyncio.run(silent.read(wanted))


def test_case_n1_nothing_of_a_folder_is_unpickled(folders, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4}))
    torch.save({"a": torch.ones(1)}, folder / "adapter_model.bin")
    with pytest.raises(Unsupported, match="never read"):
        read_adapter(folder, "pol")
    (folder / "adapter_model.safetensors").write_bytes((folder / "adapter_model.bin").read_bytes())
    with pytest.raises(InvalidRequest, match="adapter_model"):
        read_adapter(folder, "pol")
    (folder / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(InvalidRequest, match="adapter_config"):
        read_adapter(folder, "pol")
