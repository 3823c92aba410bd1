"""LoRA policies the whole way: HTTP, MessagePack, router, Ray, engines, the command line."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal

import numpy as np
import pytest

from engine.errors import InvalidRequest, NotFound
from engine.types import AdapterRef, SamplingParams
from rollout.adapter_source import read_adapter
from rollout.client import AsyncClient
from tests.e2e.conftest import ServedFleet, serve_config
from tests.e2e.test_cli import run as command
from tests.e2e.test_fleet_service import current_reference
from tests.support import prompt
from tests.unit.engine.lora_cases import greedy_of, save_adapter

GREEDY = SamplingParams(max_new=10, temperature=0.0)


@pytest.fixture(scope="module")
def folders(t_full, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(t_full, root / name, seed) for seed, name in enumerate(("LA", "LB"), start=1)}


def test_a_policy_is_loaded_renewed_listed_and_unloaded_over_http(fleet3, t_full, t_full_w1, folders, monkeypatch):
    async def go() -> None:
        async with AsyncClient(fleet3.url) as client:
            base, _ = await current_reference(client, t_full, t_full_w1)
            # Small bodies, so that the adapter travels in several.
            monkeypatch.setattr("rollout.client._BODY_BYTES", 4096)
            update = read_adapter(folders["LA"], "pol")
            report = await client.update_adapter("pol", config=update.config, tensors=update.tensors)
            assert set(report.engines.values()) == {report.adapter.rev} and len(report.engines) == 3
            ref, first = AdapterRef(name="pol"), report.adapter.rev
            group = await client.generate(prompt(9), n=2, sampling=GREEDY, adapter=ref)
            for sample in group.samples:
                assert sample.ids.tolist() == greedy_of(base, folders["LA"], prompt(9), 10)
                assert [span.adapter_rev for span in sample.spans] == [first]
            report = await client.update_adapter("pol", uri=str(folders["LB"]))
            assert report.adapter.rev == first + 1 == (await client.version()).adapters["pol"]
            (sample,) = (await client.generate(prompt(9), sampling=GREEDY, adapter=ref)).samples
            assert sample.ids.tolist() == greedy_of(base, folders["LB"], prompt(9), 10) and sample.cached_tokens == 0
            scored = await client.score([np.concatenate([prompt(9), sample.ids])], start=9, adapter=ref)
            np.testing.assert_allclose(scored.sequences[0].logprobs, sample.logprobs, atol=1e-4)
            with pytest.raises(InvalidRequest, match="allowed root"):
                await client.update_adapter("pol", uri="/etc")
            with pytest.raises(NotFound, match="adapter"):
                await client.generate(prompt(9), adapter=AdapterRef(name="pol", rev=first))
            # Case G6: a call whose group is aborted returns, and its policy can go.
            names = [f"lora-{number}" for number in range(4)]
            endless = SamplingParams(max_new=200, seed=1)
            calls = [
                asyncio.create_task(client.generate(prompt(8), group_id=name, sampling=endless, adapter=ref))
                for name in names
            ]
            await asyncio.sleep(0.1)
            outcomes = {item.group_id: item.outcome for item in await client.abort([*names, "nobody"])}
            assert outcomes["nobody"] == "unknown"
            async with asyncio.timeout(5):
                ended = await asyncio.gather(*calls)
            assert {sample.finish for group in ended for sample in group.samples} <= {"abort", "length"}
            assert [(item.name, item.references) for item in await client.adapters()] == [("pol", 0)]
            await client.unload_adapter("pol")
            with pytest.raises(NotFound):
                await client.generate(prompt(9), sampling=GREEDY, adapter=ref)
            assert await client.adapters() == []

    fleet3.run(go())


def test_the_command_loads_lists_and_unloads(fleet3, folders):
    loaded = command("adapters", "--url", fleet3.url, "--load", f"helper={folders['LA']}")
    (listed,) = json.loads(loaded.stdout)
    assert loaded.exit_code == 0 and (listed["name"], listed["state"]) == ("helper", "live")
    refused = command("adapters", "--url", fleet3.url, "--load", "helper")
    assert refused.exit_code == 1 and "NAME=FOLDER" in refused.stderr
    assert json.loads(command("adapters", "--url", fleet3.url, "--unload", "helper").stdout) == []
    assert command("adapters", "--url", fleet3.url, "--unload", "helper").exit_code == 1
    assert "NAME=FOLDER" in command("serve", "--adapter", "helper").stderr


@pytest.mark.slow
def test_an_engine_that_is_replaced_has_the_policies_again(fleet3, t_full, t_full_w1, folders):
    async def go() -> None:
        async with AsyncClient(fleet3.url) as client:
            base, _ = await current_reference(client, t_full, t_full_w1)
            await client.update_adapter("pol", uri=str(folders["LA"]))
            ref = AdapterRef(name="pol")
            slow = SamplingParams(max_new=200, temperature=0.0)
            calls = [asyncio.create_task(client.generate(prompt(8 + n), sampling=slow, adapter=ref)) for n in range(6)]
            await asyncio.sleep(0.2)
            await client.update_adapter("pol", uri=str(folders["LB"]))
            os.kill(fleet3.fleet.describe()[0]["pid"], signal.SIGKILL)
            for group in await asyncio.gather(*calls):
                assert len({span.adapter_rev for span in group.samples[0].spans}) == 1
            await fleet3.whole()
            for number in range(12):
                (sample,) = (await client.generate(prompt(4 + number), sampling=GREEDY, adapter=ref)).samples
                assert sample.ids.tolist() == greedy_of(base, folders["LB"], prompt(4 + number), 10)
            await client.unload_adapter("pol")

    fleet3.run(go())


@pytest.mark.slow
def test_policies_of_the_settings_are_there_from_the_start(ray_session, loop_thread, t_full, folders):
    config = dataclasses.replace(serve_config(t_full, 1), adapters={name: str(path) for name, path in folders.items()})

    async def go(served: ServedFleet) -> None:
        async with AsyncClient(served.url) as client:
            assert (await client.version()).adapters == {"LA": 1, "LB": 1}
            for name, folder in folders.items():
                (sample,) = (await client.generate(prompt(9), sampling=GREEDY, adapter=AdapterRef(name=name))).samples
                assert sample.ids.tolist() == greedy_of(t_full, folder, prompt(9), 10)

    served = loop_thread.run(ServedFleet(loop_thread, config).start())
    try:
        served.run(go(served))
    finally:
        loop_thread.run(served.stop())
