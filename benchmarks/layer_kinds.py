"""Decoding and prefill of models with other layers than full attention.

Owns the shapes (windows and experts of gpt-oss, gated delta nets and experts of Qwen3-Next, Mamba2 of Falcon-H1,
windows of Gemma 3; of Qwen3-Next 12 of its 48 layers), their floors and the table. Ignores how steps are timed
(`benchmarks.decode`).

The floor of a step is what it must move at copy speed: weights without the embedding's table, of experts the share
that so many rows choose if they choose evenly, keys and values within each layer's window, states read and
written. A prompt's floor is two flops a token and active weight at the pace of the device's products.

    python -m benchmarks.layer_kinds --shape gpt-oss-20b --batch 1,32,128 --prompt 1024 [--json FILE]
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
import typer

from benchmarks.decode import OUTPUT, steady_ms, timed
from benchmarks.gpu_timing import BANDWIDTH
from benchmarks.report import Row, report
from benchmarks.shapes import fill_random
from engine import CacheConfig, Engine, EngineConfig, SchedulerConfig
from engine.build import build_parts
from engine.models.spec import ModelSpec, spec_from_config

FLOPS = 790e12
"""Products in 16 bits a second, H200."""

EXPERTS = ("gate_up_XDI", "down_XID", "gate_up_RD", "down_RI")
"""How names of experts' weights end."""

FALCON = dict(
    vocab_size=65537, hidden_size=2048, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=8,
    num_key_value_heads=2, head_dim=128, mamba_d_ssm=3072, mamba_n_heads=48, mamba_d_head=64, mamba_d_state=256,
    mamba_n_groups=1, max_position_embeddings=16384,
)  # fmt: skip
GEMMA = dict(
    vocab_size=262144, hidden_size=1152, intermediate_size=6912, num_hidden_layers=26, num_attention_heads=4,
    num_key_value_heads=1, head_dim=256, sliding_window=512, max_position_embeddings=32768,
)  # fmt: skip
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt-oss-20b": ("gpt_oss", "GptOssForCausalLM", dict(num_hidden_layers=24, num_local_experts=32)),
    "qwen3-next": ("qwen3_next", "Qwen3NextForCausalLM", dict(num_hidden_layers=12, max_position_embeddings=8192)),
    "falcon-h1-1.5b": ("falcon_h1", "FalconH1ForCausalLM", FALCON),
    "gemma-3-1b": ("gemma3_text", "Gemma3ForCausalLM", GEMMA),
}


def spec_of(shape: str) -> ModelSpec:
    from transformers import AutoConfig

    kind, architecture, fields = SHAPES[shape]
    published = AutoConfig.for_model(kind, **fields).to_dict()
    return spec_from_config({**published, "architectures": [architecture], "dtype": "bfloat16", "eos_token_id": None})


def fill(model: torch.nn.Module) -> None:
    """Random weights, with embeddings so far apart that rows choose different experts."""
    fill_random(model, 0)
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight").mul_(50.0)


class Floor:
    def __init__(self, model: torch.nn.Module, spec: ModelSpec) -> None:
        named = dict(model.named_parameters())
        experts = [param for name, param in named.items() if name.endswith(EXPERTS)] if spec.experts else []
        table = 0 if spec.tied else named["model.embed_tokens.weight"].numel()
        self._spec = spec
        self._experts = sum(param.numel() for param in experts)
        self._others = sum(param.numel() for param in named.values()) - self._experts - table
        self._state = spec.state_layout(torch.bfloat16).slot_bytes

    def step_ms(self, batch: int, context: int) -> float:
        spec, share = self._spec, 0.0
        if spec.experts is not None:
            share = 1 - (1 - spec.experts.per_token / spec.experts.count) ** batch
        held = sum(min(context, layer.window or context) for layer in spec.layers if layer.attends)
        kept = held * 2 * spec.num_kv_heads * spec.head_dim * 2
        moved = 2 * (self._others + self._experts * share) + batch * (kept + 2 * self._state)
        return moved / BANDWIDTH * 1e3

    def prompt_tokens(self) -> float:
        """Tokens a second, attention and states left out."""
        spec, active = self._spec, float(self._others)
        if spec.experts is not None:
            active += self._experts * spec.experts.per_token / spec.experts.count
        return FLOPS / (2 * active)


def main(
    shape: str = "gpt-oss-20b", batch: str = "1,32,128", prompt: int = 1024, repeats: int = 3, json: str | None = None
) -> None:
    """Measure and report."""
    spec, batches = spec_of(shape), [int(item) for item in batch.split(",")]
    most = max(batches)
    config = EngineConfig(
        dtype="bfloat16",
        cache=CacheConfig(kv_tokens=most * (prompt + OUTPUT + 64) + 16384),
        scheduler=SchedulerConfig(max_running=most, prefill_tokens=8192),
    )
    parts = build_parts(spec, config, fill)
    engine, floor, rows = Engine(parts), Floor(parts.model, spec), []
    for size in batches:
        for max_new in (OUTPUT + 1, 1):
            timed(engine, size, max_new, 0, prompt)
        step = statistics.median(steady_ms(engine, size, repeat + 1, prompt) for repeat in range(repeats))
        whole = statistics.median(timed(engine, size, 1, repeat + 1, prompt) for repeat in range(repeats))
        case, least = f"{shape} batch {size}", floor.step_ms(size, prompt + OUTPUT // 2)
        print(f"{case}: {step:.2f} ms a step, {size * prompt / whole:,.0f} prompt tokens a second", flush=True)
        rows += [
            Row(case, "decode step", step, "ms"),
            Row(case, "share of floor", least / step, ""),
            Row(case, "output", size / step * 1e3, "tok/s"),
            Row(case, "prefill", size * prompt / whole, "tok/s"),
            Row(case, "share of products' pace", size * prompt / whole / floor.prompt_tokens(), ""),
        ]
    rows.append(Row(shape, "steps not captured", engine.counters.graph_eager_steps, ""))
    report("layer_kinds", rows, json)


if __name__ == "__main__":
    typer.run(main)
