"""Real models from their packages equal transformers in float32: SmolLM2-135M-Instruct and Gemma-3-270M."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import Engine, EngineConfig, GroupRequest, SamplingParams
from engine.config import CacheConfig, SchedulerConfig
from tests.support import TOLERANCE, reference_logits

pytest.importorskip("gguf")

PROMPTS = ["What is the capital of France?", "Write one line about rain.", "17 + 25 ="]
NEW = 6
WIDE = 5 * TOLERANCE
"""For Gemma's 262,144 ids: against fp64, torch's fp32 softmax is off by 1e-4 and transformers' fp32 logits by
up to 3e-4 at some lengths; the engine is within 1e-5."""


@pytest.fixture(scope="session", params=["smollm2-135m", pytest.param("gemma3-270m", marks=pytest.mark.slow)])
def folder(request, tmp_path_factory):
    """Converted once per version of the conversion, beside pytest's own cache."""
    import rollout.gguf_convert as conversion
    import rollout.gguf_tokenizer as tokenizers
    from engine.errors import NotFound
    from rollout.model_catalog import CatalogConfig, resolve_model

    sources = [Path(module.__file__ or "").read_bytes() for module in (conversion, tokenizers)]
    version = hashlib.sha256(b"".join(sources)).hexdigest()[:16]
    kept = request.config.pluginmanager.hasplugin("cacheprovider")
    cache = request.config.cache.mkdir(f"catalog-{version}") if kept else tmp_path_factory.mktemp("catalog")
    try:
        return resolve_model(request.param, CatalogConfig(cache_dir=cache))
    except NotFound as error:
        pytest.skip(str(error))


def test_greedy_tokens_and_logprobs_equal_transformers(folder):
    """Prompts arrive together, twice: cold in one mixed batch, then as cache hits."""
    from rollout.text.codec import TextCodec

    codec = TextCodec(folder)
    chats = "smollm2" in str(folder)
    prompts = [codec.apply_chat([{"role": "user", "content": t}]) if chats else codec.encode(t) for t in PROMPTS]
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        cache=CacheConfig(kv_tokens=2048),
        scheduler=SchedulerConfig(max_running=4, prefill_tokens=48),
    )
    engine = Engine.from_pretrained(folder, config)
    sampling = SamplingParams(temperature=0.0, max_new=NEW, ignore_eos=True)
    expected: list = []
    for round_ in range(2):
        groups = engine.generate(
            [GroupRequest(group_id=str(i), prompt_ids=ids, sampling=sampling) for i, ids in enumerate(prompts)]
        )
        expected = expected or [reference(folder, *both) for both in zip(prompts, groups, strict=True)]
        for ids, (new, logprobs), group in zip(prompts, expected, groups, strict=True):
            (sample,) = group.samples
            exact = len(new)
            assert sample.ids[:exact].tolist() == new
            np.testing.assert_allclose(sample.logprobs[:exact], logprobs, atol=TOLERANCE if chats else WIDE)
            if round_ == 1:
                assert group.hit.usable == (len(ids) - 1) // 16 * 16
    engine.check()


def reference(folder, ids, group) -> tuple[list[int], np.ndarray]:
    """Greedy ids up to the first that is nearly a tie, and their log-probabilities: one pass over the prompt and
    the group's own ids, since each of those that is right is what comes before the next."""
    logits = reference_logits(folder, [*ids, *group.samples[0].ids[: NEW - 1]])[len(ids) - 1 :]
    new = logits.argmax(-1)
    top = logits.topk(2, -1).values
    near = (top[:, 0] - top[:, 1] <= 10 * TOLERANCE).tolist()
    exact = near.index(True) if True in near else NEW
    assert exact > 0 and len(logits) == NEW
    logprobs = torch.log_softmax(logits, -1)[torch.arange(NEW), new]
    return new[:exact].tolist(), logprobs[:exact].numpy()
