"""What a caller can do to a served engine: text through HTTP, senders that die, half-made pauses."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from engine.errors import DeadlineExceeded, InvalidRequest
from engine.types import SampleResume, SamplingParams, Want
from rollout.actors.engine_host import EngineHost
from rollout.actors.text_front import TextFront
from rollout.client import AsyncClient
from rollout.codec import encode
from rollout.protocol import BODY_TYPE, Delta, SampleEnd, UpdateBeginCall, UpdateTensorsCall
from rollout.server import serve
from rollout.server_config import ServerConfig
from tests.support import begin_of, chain, make_engine, prompt, reference_greedy, save_chain, state_tensors
from tests.unit.text.tiny_tokenizers import byte_level

SMILE = "\N{SLIGHTLY SMILING FACE}"
KILLED_SENDER = """
import os, signal, sys, httpx
url, *paths = sys.argv[1:]
for path in paths:
    name, body = os.path.basename(path), open(path, "rb").read()
    httpx.post(f"{url}/v1/{name}", content=body, headers={"content-type": "%s"}, trust_env=False).raise_for_status()
os.kill(os.getpid(), signal.SIGKILL)
"""


@contextlib.asynccontextmanager
async def served(folder, loop="serial"):
    host = EngineHost(lambda: make_engine(folder, loop=loop), text=TextFront.for_folder(folder), delta_interval_s=0.002)
    await host.start()
    ready = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(host, ServerConfig(port=0), ready.set_result))
    server = await ready
    try:
        async with AsyncClient(server.url) as client:
            yield client, server.url
    finally:
        server.stop()
        await task
        await host.stop()


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_new": 10} | fields))


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """After 5: abSTOPyz; after 6: abSTO and a token "Px"; after 7: an emoji's bytes, then A."""
    links = chain(5, *b"abSTOPyz") | chain(7, *SMILE.encode(), 65)
    links |= {6: 300, 300: 301, 301: 302}
    folder = save_chain(tmp_path_factory.mktemp("bytes"), links)
    # Tokens 256.. are longer pieces; 300 to 302 spell the text whose match ends inside one.
    extra = [f"pad{i}" for i in range(256, 300)] + ["abS", "TO", "Px"]
    PreTrainedTokenizerFast(tokenizer_object=byte_level(tuple(extra))).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("loop", ["serial", "overlapped"])
def test_case_d1_d7_d8_text_through_the_service(scripted, loop):
    async def stream(client, ids, **options):
        deltas, ends = {}, {}
        async for event in client.stream(ids, want_text=True, **options):
            if isinstance(event, Delta):
                for delta in event.samples:
                    deltas.setdefault(delta.index, []).extend(delta.ids.tolist())
            elif isinstance(event, SampleEnd):
                ends[event.sample.index] = event.sample
        assert {index: sample.ids.tolist() for index, sample in ends.items()} == deltas
        return [ends[index] for index in sorted(ends)]

    def shown(sample):
        assert len(sample.ids) == len(sample.logprobs)
        return sample.text, sample.finish, sample.matched

    async def run() -> None:
        async with served(scripted, loop) as (client, _):
            for keep, text in ((False, "ab"), (True, "abSTOP")):
                for sample in await stream(client, [5], n=3, stop=["STOP"], keep_stop=keep, sampling=greedy()):
                    assert shown(sample) == (text, "stop", "STOP") and bytes(sample.ids.tolist()) == b"abSTOP"
                (sample,) = await stream(client, [6], stop=["STOP"], keep_stop=keep, sampling=greedy())
                assert shown(sample) == (text, "stop", "STOP") and sample.ids.tolist() == [300, 301, 302]
            (late,) = await stream(client, [5], stop=["STOP"], sampling=greedy(min_new=7, max_new=8))
            assert shown(late) == ("abSTOPyz", "length", None)
            resume = [SampleResume(index=1, ids=np.frombuffer(b"abST", np.uint8).astype(np.uint32))]
            (rest,) = await stream(client, [5], n=2, stop=["STOP"], sampling=greedy(seed=1), resume=resume)
            assert shown(rest) == ("ab", "stop", "STOP") and bytes(rest.ids.tolist()) == b"OP"
            # A stop id among the text reads the same whether stop strings are watched for or not.
            for stop in ([], ["never"]):
                (sample,) = await stream(client, [5], stop=stop, sampling=greedy(stop_ids=[ord("O")]))
                assert shown(sample) == ("abSTO", "stop", ord("O"))
            (emoji,) = await stream(client, [7], sampling=greedy(max_new=5))
            assert shown(emoji) == (f"{SMILE}A", "length", None)
            (cut,) = await stream(client, [7], sampling=greedy(max_new=2))
            assert shown(cut) == ("", "length", None) and bytes(cut.ids.tolist()) == SMILE.encode()[:2]
            (stopped,) = await stream(client, [7], stop=[SMILE], sampling=greedy())
            assert shown(stopped) == ("", "stop", SMILE)
            # Case D8: turn two is exactly the ids of turn one, never their text spelt anew.
            turn = (await client.generate([*b"aba", 5], sampling=greedy(max_new=6))).samples[0]
            again = await client.generate([*b"aba", 5, *turn.ids, 9], sampling=greedy(max_new=2))
            assert again.prompt_tokens == 4 + 6 + 1 and again.samples[0].cached_tokens >= 8

    asyncio.run(run())


def test_case_b2_a_killed_sender_gives_way(t_full, t_full_w1, tmp_path):
    tensors = state_tensors(t_full_w1)
    begin = UpdateBeginCall(op_id="b", update=begin_of(tensors, "dies", 0, 1, timeout_s=1.0))
    (tmp_path / "update_begin").write_bytes(encode(begin))
    staged = UpdateTensorsCall(op_id="t", txn="dies", tensors=tensors[:2])
    (tmp_path / "update_tensors").write_bytes(encode(staged))

    async def run() -> None:
        async with served(t_full) as (client, url):
            paths = [str(tmp_path / name) for name in ("update_begin", "update_tensors")]
            command = [sys.executable, "-c", KILLED_SENDER % BODY_TYPE, url, *paths]
            sender = await asyncio.to_thread(subprocess.run, command, timeout=60)
            assert sender.returncode == -signal.SIGKILL
            assert (await client.health()).pending_update == "dies"
            deadline = time.monotonic() + 10
            while (await client.health()).pending_update is not None:
                assert time.monotonic() < deadline, "the silent update never ended"
                await asyncio.sleep(0.05)
            group = await client.generate(prompt(8), sampling=greedy(max_new=4))
            assert group.samples[0].ids.tolist() == reference_greedy(t_full, prompt(8), 4) and group.policy_version == 0
            await client.update_begin(begin_of(tensors, "lives", 0, 1))
            await client.update_tensors("lives", tensors)
            assert (await client.update_commit("lives")).policy_version == 1

    asyncio.run(run())


@pytest.mark.parametrize("loop", ["serial", "overlapped"])
def test_case_c6_a_head_row_of_minus_infinity(t_full, loop):
    """No weights may hold such a row, so a bias of -inf stands in; the reply holds -inf, and no NaN."""

    async def run() -> None:
        async with served(t_full, loop) as (client, _):
            params = SamplingParams(temperature=0.01, top_p=0.3, logit_bias={3: float("-inf")}, max_new=8, seed=1)
            group = await client.generate(prompt(8), n=2, sampling=params, want=Want(top_logprobs=512, entropy=True))
        for sample in group.samples:
            assert sample.top_ids is not None and sample.top_logprobs is not None and sample.entropy is not None
            assert np.isfinite(sample.logprobs).all() and 3 not in sample.ids.tolist()
            assert (
                not np.isnan(sample.top_logprobs).any() and np.isneginf(sample.top_logprobs[sample.top_ids == 3]).all()
            )
            assert np.isfinite(sample.entropy).all()

    asyncio.run(run())


def test_a_pause_in_an_open_update_is_taken_back_whole(t_full):
    async def run() -> None:
        async with served(t_full) as (client, _):
            await client.update_begin(begin_of(state_tensors(t_full), "open", 0, 1))
            long = asyncio.create_task(client.generate(prompt(8), sampling=greedy(max_new=240)))
            while (await client.health()).running == 0:
                await asyncio.sleep(0.005)
            with pytest.raises(DeadlineExceeded):
                await client.pause("drain", 0.001)
            short = await client.generate(prompt(4), sampling=greedy(max_new=2), timeout_s=30)
            assert short.samples[0].finish == "length" and len((await long).samples[0].ids) == 240

    asyncio.run(run())


def test_case_m4_no_tags_are_all_tags(t_full):
    async def run() -> None:
        async with served(t_full) as (client, _):
            report = await client.release_memory()
            assert set(report.after.values()) == {0}
            await client.resume_memory()
            group = await client.generate(prompt(8), sampling=greedy(max_new=4))
            assert group.samples[0].ids.tolist() == reference_greedy(t_full, prompt(8), 4)
            with pytest.raises(InvalidRequest, match="tags"):
                await client.release_memory(["graphs of another kind"])

    asyncio.run(run())


def test_a_fleets_half_made_pause_leaves_no_engine_shut(fleet3, t_full):
    """One engine pauses at once, another is too late: the first must not keep what it is sent."""

    async def run() -> None:
        async with AsyncClient(fleet3.url) as client:
            version = (await client.version()).policy_version
            await client.update_begin(begin_of(state_tensors(t_full), "half", version, version + 1))
            running = client.generate(prompt(8), n=8, sampling=greedy(max_new=240, seed=1))
            long = asyncio.create_task(running)
            while (await client.health()).running == 0:
                await asyncio.sleep(0.005)
            with pytest.raises(DeadlineExceeded):
                await client.pause("drain", 0.03)
            shorts = [client.generate(prompt(4 + i), sampling=greedy(max_new=2), timeout_s=30) for i in range(12)]
            assert {len(group.samples[0].ids) for group in await asyncio.gather(*shorts)} == {2}
            assert len((await long).samples) == 8 and (await client.health()).pending_update is None

    asyncio.run(run())
