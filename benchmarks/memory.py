"""What memory goes where: arithmetic at published shapes, and what is really taken at small ones.

    python -m benchmarks.memory [--json FILE] [--device cpu|cuda]

Bytes of a token, of a token of windowed layers and of a recurrent state are checked against figures worked out by
hand from the published configurations; no weights are needed. The plan for such a model on one H200 shows what is
left to the cache. At small shapes of every kind an engine is built, and what its pools take is compared with what
its plan said; on a GPU it also serves as many rows as it may, and all that it took is compared with the plan.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.layer_split_memory import layer_split_rows
from benchmarks.replay_memory import qwen3_5_35b, replay_rows
from benchmarks.report import Row, at_most, report
from benchmarks.shapes import SHAPES, fill_random
from engine import CacheConfig, Engine, EngineConfig, GroupRequest, SamplingParams, SchedulerConfig
from engine.build import build_parts
from engine.dspark.config import DSparkConfig
from engine.memory.budget import plan_memory
from engine.memory.needs import split_token_bytes
from engine.memory.plan import MemoryPlan
from engine.models.spec import ModelSpec, spec_from_config
from lora.config import AdapterConfig

GIB, MIB = 2**30, 2**20
H200_BYTES = 139 * GIB
BF16 = torch.bfloat16


def _spec(architecture: str, **fields: Any) -> ModelSpec:
    common = {"architectures": [architecture], "dtype": "bfloat16", "eos_token_id": None}
    return spec_from_config(common | fields)


def gpt_oss_20b() -> ModelSpec:
    return _spec(
        "GptOssForCausalLM", vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=24,
        num_attention_heads=64, num_key_value_heads=8, head_dim=64, sliding_window=128, num_local_experts=32,
        num_experts_per_tok=4, max_position_embeddings=131072,
    )  # fmt: skip


def gemma3_27b() -> ModelSpec:
    return _spec(
        "Gemma3ForCausalLM", vocab_size=262208, hidden_size=5376, intermediate_size=21504, num_hidden_layers=62,
        num_attention_heads=32, num_key_value_heads=16, head_dim=128, sliding_window=1024, sliding_window_pattern=6,
        max_position_embeddings=131072, query_pre_attn_scalar=168, hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    )  # fmt: skip


def lfm2_1b() -> ModelSpec:
    attending = (2, 5, 8, 10, 12, 14)
    return _spec(
        "Lfm2ForCausalLM", vocab_size=65536, hidden_size=2048, intermediate_size=12288, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=128000, conv_L_cache=3, norm_eps=1e-5,
        layer_types=["full_attention" if i in attending else "conv" for i in range(16)], tie_word_embeddings=True,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """A published shape: its weights in GiB, and by hand the bytes of a token, of its windowed part and of a state."""

    name: str
    spec: ModelSpec
    weights: float
    token: int
    window: int = 0
    state: int = 0


def published() -> list[Shape]:
    key_value = 2 * 2  # keys and values, two bytes each
    state = 30 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)  # matrices in fp32, the convolution's inputs
    return [
        Shape("Qwen3-8B", SHAPES["qwen3-8b"], 15.3, 36 * 8 * 128 * key_value),
        Shape("gpt-oss-20b, bf16", gpt_oss_20b(), 38.9, 12 * 8 * 64 * key_value, 12 * 8 * 64 * key_value),
        Shape("Gemma-3-27B", gemma3_27b(), 50.3, 10 * 16 * 128 * key_value, 52 * 16 * 128 * key_value),
        Shape("LFM2-1.2B", lfm2_1b(), 2.2, 6 * 8 * 64 * key_value, 0, 10 * 2 * 2048 * 2),
        Shape("Qwen3.5-35B-A3B", qwen3_5_35b(), 65.2, 10 * 2 * 256 * key_value, 0, state),
    ]


def arithmetic(shape: Shape) -> list[Row]:
    full, window = split_token_bytes(shape.spec.attending, BF16)
    state = shape.spec.state_layout(BF16).slot_bytes if shape.spec.recurrent else 0
    rows = []
    for metric, found, by_hand in (
        ("a token", full, shape.token),
        ("a token, windowed layers", window, shape.window),
        ("a recurrent state", state, shape.state),
    ):
        if by_hand:
            rows.append(Row(shape.name, metric, found / 1024, "KiB", f"{by_hand / 1024:g}", found == by_hand))
    plan = h200_plan(shape)
    cached = sum(plan.units(name) > 0 for name in ("kv", "window_kv", "states"))
    rows.append(Row(shape.name, "rows of an H200's plan", plan.max_running, "rows"))
    for share in plan.shares:
        if share.name in ("kv", "window_kv", "states") and cached:
            rows.append(Row(shape.name, f"{share.name}, planned", share.units, share.unit))
    reserved = plan.planned_bytes - sum(s.bytes for s in plan.shares if s.name in ("kv", "window_kv", "states"))
    rows.append(Row(shape.name, "set aside for steps, rounds, graphs, adapters", reserved / GIB, "GiB"))
    return rows


def h200_plan(shape: Shape) -> MemoryPlan:
    """With nine tenths of what is left for the cache, one adapter in sixteen parts, and rows as they come."""
    config = EngineConfig(
        cache=CacheConfig(page_size=64, memory_fraction=0.9),
        scheduler=SchedulerConfig(max_running=512, prefill_tokens=8192),
        adapters=AdapterConfig(device_mib=1024),
    )
    free = H200_BYTES - int(shape.weights * GIB)
    return plan_memory(
        shape.spec, config, BF16, torch.device("cuda"), spare_rows=True, split_windows=True, available=free
    )


def small() -> list[tuple[str, ModelSpec]]:
    """One of each kind: attention alone, windows, short convolutions, gated delta nets."""
    size: dict[str, Any] = dict(
        vocab_size=4096, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, max_position_embeddings=2048,
    )  # fmt: skip
    delta: dict[str, Any] = dict(
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
    )  # fmt: skip
    lfm2 = {key: value for key, value in size.items() if key != "head_dim"}
    return [
        ("attention", _spec("Qwen3ForCausalLM", num_hidden_layers=4, **size)),
        ("windows", _spec(
            "Gemma3ForCausalLM", num_hidden_layers=6, sliding_window=64, hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=64, tie_word_embeddings=True, **size,
        )),
        ("convolutions", _spec(
            "Lfm2ForCausalLM", num_hidden_layers=4, conv_L_cache=3, norm_eps=1e-5,
            layer_types=["conv", "conv", "full_attention", "conv"], **lfm2,
        )),
        ("gated delta nets", _spec("Qwen3_5ForCausalLM", num_hidden_layers=4, **delta, **size)),
    ]  # fmt: skip


def measured(name: str, spec: ModelSpec, device: torch.device) -> list[Row]:
    """What an engine's pools hold, beside its plan: one page or slot of scratch comes on top."""
    rows, config = 16, EngineConfig(
        device=device.type,
        cache=CacheConfig(page_size=16, memory_fraction=0.05),
        scheduler=SchedulerConfig(max_running=16, prefill_tokens=512),
        adapters=AdapterConfig(device_mib=16),
        dspark=DSparkConfig(drafter="ngram", drafts=4, sweep_seconds=0),
    )  # fmt: skip
    before = _held(device)
    parts = build_parts(spec, config, lambda model: fill_random(model, 0))
    engine, plan, pool, states = Engine(parts), parts.plan, parts.pages.pool, parts.pages.states
    case = f"small: {name}"
    token_page = {share.name: share.unit_bytes * 16 for share in plan.shares}
    expected = sum(share.bytes for share in plan.shares if share.name in ("kv", "window_kv"))
    expected += token_page["kv"] + token_page.get("window_kv", 0)
    out = [Row(case, "pages held", pool.bytes / MIB, "MiB", f"{expected / MIB:.3f}", pool.bytes == expected)]
    if states is not None:
        rings = states.pool.rings
        held = states.pool.bytes - (0 if rings is None else rings.bytes)
        slot = next(share.unit_bytes for share in plan.shares if share.name == "states")
        wanted = (plan.units("states") + 1) * slot
        out.append(Row(case, "states held", held / MIB, "MiB", f"{wanted / MIB:.3f}", held == wanted))
        if rings is not None:
            wanted = next(share for share in plan.shares if share.name == "rings").bytes
            held = rings.bytes - rings.layout.ring_bytes
            out.append(Row(case, "rings held", held / MIB, "MiB", f"{wanted / MIB:.3f}", held == wanted))
    if device.type == "cuda":
        draws = np.random.default_rng(0)
        sampling = SamplingParams(max_new=64, ignore_eos=True)
        prompts = [draws.integers(0, spec.vocab_size, 700).astype(np.uint32) for _ in range(rows)]
        engine.generate(
            [GroupRequest(group_id=str(i), prompt_ids=ids, sampling=sampling) for i, ids in enumerate(prompts)]
        )
        torch.cuda.synchronize()
        weights = sum(parameter.nbytes for parameter in parts.model.parameters())
        taken = _held(device) - before - weights
        out.append(at_most(case, "taken after serving every row", taken / MIB, "MiB", plan.planned_bytes / MIB))
    return out


def _held(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the JSON line to this file too")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rows = [row for shape in published() for row in arithmetic(shape)]
    rows += replay_rows(device.type)
    rows += layer_split_rows(device.type)
    for name, spec in small():
        rows += measured(name, spec, device)
    report("memory", rows, arguments.json)


if __name__ == "__main__":
    main()
