"""Text beside one engine: prompts, stop strings across a resume, final texts."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from engine.errors import InvalidRequest, Unsupported
from engine.types import GroupRequest, SampleResume, SamplingParams
from rollout.actors.engine_host import EngineHost
from rollout.actors.text_front import TextFront
from rollout.protocol import ChatMessage, GenerateCall, SampleEnd
from tests.support import make_engine
from tests.unit.text.tiny_tokenizers import byte_level, codec_of


def call(text: str | None = "abc", group_id: str = "g", resume=None, stop=(), bias=True, **fields) -> GenerateCall:
    # Bytes of lower-case letters only, so that every output is readable.
    letters = {token: -100.0 for token in range(512) if not 97 <= token <= 122}
    sampling = SamplingParams(max_new=40, seed=5, logit_bias=letters if bias else {})
    ids = np.empty(0, np.uint32)
    request = GroupRequest(group_id=group_id, prompt_ids=ids, sampling=sampling, resume=resume)
    return GenerateCall(op_id=group_id, request=request, text=text, stop=list(stop), want_text=True, **fields)


async def one_sample(host: EngineHost, one: GenerateCall):
    (sample,) = [event.sample async for event in host.generate(one) if isinstance(event, SampleEnd)]
    return sample


def test_stop_strings_end_samples_and_a_resume_matches_across_the_cut(t_full, tmp_path) -> None:
    codec = codec_of(byte_level(), tmp_path)

    async def run() -> None:
        host = EngineHost(lambda: make_engine(t_full), text=TextFront(codec), delta_interval_s=0.005)
        await host.start()
        try:
            plain = await one_sample(host, call())
            assert len(plain.text) == 40 and plain.text == bytes(plain.ids.tolist()).decode()
            needle = plain.text[10:14]
            end = plain.text.index(needle) + 4
            stopped = await one_sample(host, call(stop=[needle]))
            assert stopped.finish == "stop" and stopped.matched == needle
            assert stopped.ids.tolist() == plain.ids[:end].tolist() and stopped.text == plain.text[: end - 4]
            assert len(stopped.logprobs) == end
            kept = await one_sample(host, call(stop=[needle], keep_stop=True))
            assert kept.text == plain.text[:end]
            # The stop string is half in what was resumed from: still found, and the text is whole.
            cut = [SampleResume(index=0, ids=plain.ids[: end - 2], spans=[])]
            resumed = await one_sample(host, call(stop=[needle], resume=cut))
            assert resumed.matched == needle and resumed.ids.tolist() == plain.ids[end - 2 : end].tolist()
            assert resumed.text == stopped.text
            # A match that lies wholly in the past stops nothing, and breaks nothing.
            past = [SampleResume(index=0, ids=plain.ids[:end], spans=[])]
            after = await one_sample(host, call(stop=[needle], resume=past))
            assert after.ids.tolist()[:4] == plain.ids[end : end + 4].tolist()
            await host._thread.call(lambda engine: engine.check())
        finally:
            await host.stop()

    asyncio.run(run())


def test_what_cannot_be_served_is_named(tmp_path) -> None:
    front = TextFront(codec_of(byte_level(), tmp_path))
    assert front.available and not front.chat
    chat = [ChatMessage(role="user", content="x")]
    with pytest.raises(Unsupported, match="messages"):
        front.read(call(text=None, messages=chat))
    with pytest.raises(InvalidRequest, match="several"):
        front.read(call(messages=chat))
    with pytest.raises(InvalidRequest, match="stop"):
        front.read(call(stop=[""]))
    bare = TextFront.for_folder(tmp_path / "nothing")
    for one, field in ((call(), "text"), (call(text=None, stop=["x"]), "want_text")):
        with pytest.raises(Unsupported, match=field):
            bare.read(one)
