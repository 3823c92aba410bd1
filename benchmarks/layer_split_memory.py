"""What dividing the layers of a model of latents over ranks saves, and what it sends instead.

Owns the arithmetic at the shape of GLM-5.2, without its weights; what pools of an eighth of it really hold; and the
bytes that four ranks exchange over gloo while they serve a small model of the same kind, against broadcasting whole
layers. `python -m benchmarks.memory` prints it beside everything else.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.report import Row, at_least, at_most
from benchmarks.shapes import fill_random
from engine import CacheConfig, Engine, EngineConfig, GroupRequest, SamplingParams, SchedulerConfig
from engine.build import build_parts
from engine.context_parallel import ContextParallel
from engine.memory.latent_pool import LatentPool
from engine.memory.layer_split import SplitBytes, SplitLatents
from engine.models.spec import ModelSpec, spec_from_config

GIB, MIB = 2**30, 2**20
RANKS, PAGE, TOKENS = 4, 64, 8192
HELD = TOKENS + PAGE
"""Tokens that memory is taken for: there is a page of scratch."""
PUBLISHED_TOKEN = 78 * (1152 + 132)
"""Bytes of a token as published: index keys of a byte a number and a scale, in every layer."""
TARGET_GIB, PUBLISHED_GIB, TARGET_GAIN = 0.21, 0.77, 3.7


def glm(scale: int = 1, layers: int = 78) -> ModelSpec:
    """GLM-5.2's published shape, with heads and widths divided by `scale`: 21 of its 78 layers choose tokens."""
    config: dict[str, Any] = dict(
        architectures=["GlmMoeDsaForCausalLM"],
        model_type="glm_moe_dsa",
        vocab_size=154880 // scale,
        hidden_size=6144 // scale,
        intermediate_size=12288 // scale,
        num_hidden_layers=layers,
        num_attention_heads=max(1, 64 // scale),
        q_lora_rank=2048 // scale,
        kv_lora_rank=512 // scale,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64 // scale,
        v_head_dim=256,
        index_n_heads=max(1, 32 // scale),
        index_head_dim=128 // scale,
        index_topk=2048 // scale,
        index_topk_freq=4,
        index_skip_topk_offset=3,
        n_routed_experts=256 // scale,
        n_shared_experts=1,
        num_experts_per_tok=max(1, 8 // scale),
        moe_intermediate_size=2048 // scale,
        first_k_dense_replace=3,
        max_position_embeddings=202752,
        dtype="bfloat16",
        eos_token_id=None,
    )
    return spec_from_config(config)


def planned() -> list[Row]:
    spec = glm()
    case = f"GLM-5.2, {TOKENS} tokens, {RANKS} ranks"
    alone, split = (SplitBytes.of(spec, ranks, 2) for ranks in (1, RANKS))
    published, whole = PUBLISHED_TOKEN * HELD / GIB, alone.stored[0] * HELD / GIB
    return [
        Row(case, "published, all on every rank", published, "GiB", f"{PUBLISHED_GIB}", abs(published - 0.77) < 0.005),
        Row(case, "one rank, bf16 keys in 21 layers", whole, "GiB"),
        Row(case, "a rank stores at most", max(split.stored) * HELD / GIB, "GiB"),
        Row(case, "a rank stores at least", min(split.stored) * HELD / GIB, "GiB"),
        Row(case, "rows that a step reads", split.step * HELD / GIB, "GiB"),
        at_most(case, "a rank holds", split.most * HELD / GIB, "GiB", TARGET_GIB),
        at_least(case, "capacity against the published layout", PUBLISHED_TOKEN / split.most, "x", TARGET_GAIN),
        Row(case, "capacity against one rank", alone.stored[0] / split.most, "x"),
    ]  # fmt: skip


def alone(rank: int) -> ContextParallel:
    """One of the ranks, whose groups are never used."""
    return ContextParallel(rank, RANKS, object(), object())  # type: ignore[arg-type]


def allocated(device: torch.device) -> list[Row]:
    """Pools of an eighth of the shape, each filled and then looked at from outside."""
    spec, size = glm(scale=8), (HELD // 16 + 1, 16, torch.bfloat16, device)
    pools = [lambda rank=rank: SplitLatents(spec, *size, alone(rank)) for rank in range(RANKS)]
    _taken(pools[0], device)  # whatever the first one loads stays
    held = [_taken(make, device) for make in pools]
    whole = _taken(lambda: LatentPool(spec, *size), device)
    case, expected = "an eighth of its widths", SplitBytes.of(spec, RANKS, 2)
    wanted = expected.most * size[0] * 16
    # A slab's parts begin at multiples of 512 bytes, a device's memory comes in pieces of 2 MiB.
    near = abs(max(held) - wanted) <= 0.02 * wanted + 2 * MIB
    return [
        Row(case, "one rank, taken", whole / MIB, "MiB"),
        Row(case, "the fullest of four ranks, taken", max(held) / MIB, "MiB", f"{wanted / MIB:.1f} ± 2 %", near),
        Row(case, "capacity, taken", whole / max(held), "x"),
    ]


def exchanged() -> list[Row]:
    """Four ranks serve prompts of which half is cached, in a pool of 4,096 tokens."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_serve, args=(folder,), nprocs=RANKS)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    case, found = "four gloo ranks, small", ranks[0]
    same = all(each == found for each in ranks)
    rows = [
        Row(case, "tokens and exchanged bytes, equal on all ranks", float(same), "", "1", same),
        Row(case, "prompt tokens found in the cache", found["cached"], "tokens"),
    ]
    for part in ("prefill", "decode"):
        steps, pages, mine, queries, whole = found[part]
        rows += [
            Row(case, f"{part}: pages sent in a step", pages / steps / 1024, "KiB"),
            Row(case, f"{part}: rows of its own tokens", mine / steps / 1024, "KiB"),
            Row(case, f"{part}: queries, and what comes back", queries / steps / 1024, "KiB"),
            at_most(case, f"{part}: all, of whole layers", 100 * (pages + mine + queries) / (steps * whole), "%", 25),
        ]
    return rows


def _serve(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        cache=CacheConfig(page_size=16, kv_tokens=4096),
        scheduler=SchedulerConfig(max_running=16, prefill_tokens=256),
    )
    parts = build_parts(
        glm(scale=32, layers=12), config, lambda model: fill_random(model, 0), ContextParallel.of_world()
    )
    engine, pool = Engine(parts), parts.pages.pool
    assert isinstance(pool, SplitLatents)
    draws, sent = np.random.default_rng(0), pool.step.sent
    shared = draws.integers(0, 2000, 128).astype(np.uint32)
    requests = [_request("shared", shared, 1)]
    engine.generate(requests)
    whole = SplitBytes.of(parts.model.spec, 1, 4).stored[0] * (pool.num_pages - 1) * pool.page_size
    found: dict[str, Any] = {}
    for part, new in (("prefill", 1), ("decode", 16)):
        before = engine.counters.steps, sent.pages, sent.rows, sent.queries
        prompts = [np.concatenate((shared, draws.integers(0, 2000, 128).astype(np.uint32))) for _ in range(2)]
        outputs = engine.generate([_request(f"{part}{i}", ids, new) for i, ids in enumerate(prompts)])
        after = engine.counters.steps, sent.pages, sent.rows, sent.queries
        found[part] = [*(end - start for start, end in zip(before, after, strict=True)), whole]
        found[f"{part} ids"] = [sample.ids.tolist() for group in outputs for sample in group.samples]
    found["cached"] = engine.counters.cached_tokens
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _request(name: str, ids: np.ndarray, new: int) -> GroupRequest:
    sampling = SamplingParams(temperature=0.0, max_new=new, ignore_eos=True)
    return GroupRequest(group_id=name, prompt_ids=ids, sampling=sampling)


def layer_split_rows(device: str = "cpu") -> list[Row]:
    return planned() + allocated(torch.device(device)) + exchanged()


def _taken(make: Any, device: torch.device) -> int:
    """Bytes that the system gives for a pool once all of it has been written."""
    before = _given(device)
    pool: LatentPool = make()
    pool.fill(0.5)
    taken = _given(device) - before
    pool.release()
    return taken


def _given(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    resident = Path("/proc/self/statm").read_text().split()[1]
    return int(resident) * 4096


if __name__ == "__main__":
    from benchmarks.report import report

    report("layer_split", layer_split_rows())
