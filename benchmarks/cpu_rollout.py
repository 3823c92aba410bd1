"""Rollouts on the CPU: the engine, transformers `generate`, and a plain fused loop, in one run.

    python -m benchmarks.cpu_rollout [--model smollm2-135m] [--threads 2] [--repeats 3] [--json FILE]

Owns two cases: decoding one sample, and a group rollout (4 prompts x 8 samples, 128 in, 64 out,
temperature 1, log-probabilities on in the engine). All sides use the same weights, dtype and
threads, and take turns, so that a busy machine slows all of them; the best turn of each counts.

The plain loop is the bar for batch 1: fused QKV and gate-up, static keys and values, greedy,
nothing else.

Shapes: T tokens, D hidden, N heads, K key/value heads, H head size, C positions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.report import Row, at_least, report
from engine import CacheConfig, Engine, EngineConfig, GroupRequest, SamplingParams
from rollout.model_catalog import resolve_model

DECODE_PROMPT, DECODE_NEW = 32, 64
GROUPS, SAMPLES, GROUP_PROMPT, GROUP_NEW = 4, 8, 128, 64


class PlainLoop:
    """Greedy decoding of one sequence with weights taken from a transformers Llama."""

    def __init__(self, reference: Any, capacity: int) -> None:
        config, model = reference.config, reference.model
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size, self.eps = model.layers[0].self_attn.head_dim, config.rms_norm_eps
        self.embed, self.norm, self.head = model.embed_tokens.weight, model.norm.weight, reference.lm_head.weight
        self.layers = []
        for layer in model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
            gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
            self.layers.append((norms, qkv, attention.o_proj.weight, gate_up, mlp.down_proj.weight))
        shape = (2, 1, self.kv_heads, capacity, self.size)
        self.cache = [torch.zeros(shape, dtype=self.embed.dtype) for _ in self.layers]
        positions = torch.arange(capacity)[None]
        cos, sin = model.rotary_emb(self.embed, positions)
        self.cos_CH, self.sin_CH = cos[0], sin[0]

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * weight

    def _rotate(self, x_NTH: torch.Tensor, cos_TH: torch.Tensor, sin_TH: torch.Tensor) -> torch.Tensor:
        first, second = x_NTH.chunk(2, dim=-1)
        return x_NTH * cos_TH + torch.cat((-second, first), dim=-1) * sin_TH

    def forward(self, ids_T: torch.Tensor, start: int) -> torch.Tensor:
        """Logits of the last token; keys and values of all are stored."""
        end = start + len(ids_T)
        x_TD = self.embed[ids_T]
        cos_TH, sin_TH = self.cos_CH[start:end], self.sin_CH[start:end]
        q_end, k_end = self.heads * self.size, (self.heads + self.kv_heads) * self.size
        for (norm, post_norm), qkv, o_proj, gate_up, down, cache in (
            (*layer, cache) for layer, cache in zip(self.layers, self.cache, strict=True)
        ):
            mixed = F.linear(self._rms(x_TD, norm), qkv)
            q_NTH = mixed[:, :q_end].view(len(ids_T), self.heads, self.size).transpose(0, 1)
            k_KTH = mixed[:, q_end:k_end].view(len(ids_T), self.kv_heads, self.size).transpose(0, 1)
            v_KTH = mixed[:, k_end:].view(len(ids_T), self.kv_heads, self.size).transpose(0, 1)
            cache[0, 0, :, start:end] = self._rotate(k_KTH, cos_TH, sin_TH)
            cache[1, 0, :, start:end] = v_KTH
            out = F.scaled_dot_product_attention(
                self._rotate(q_NTH, cos_TH, sin_TH)[None],
                cache[0, :, :, :end],
                cache[1, :, :, :end],
                is_causal=len(ids_T) > 1,
                enable_gqa=True,
            )
            x_TD = x_TD + F.linear(out[0].transpose(0, 1).reshape(len(ids_T), -1), o_proj)
            gate, up = F.linear(self._rms(x_TD, post_norm), gate_up).chunk(2, dim=-1)
            x_TD = x_TD + F.linear(F.silu(gate) * up, down)
        return F.linear(self._rms(x_TD[-1:], self.norm), self.head)

    def generate(self, ids: list[int], new: int) -> list[int]:
        tokens = list(ids)
        pending = torch.tensor(ids)
        for _ in range(new):
            logits = self.forward(pending, len(tokens) - len(pending))
            tokens.append(int(logits.argmax()))
            pending = torch.tensor(tokens[-1:])
        return tokens[len(ids) :]


class Sides:
    """The contenders over one checkpoint."""

    def __init__(self, folder: Path, threads: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        config = EngineConfig(device="cpu", dtype="bfloat16", cache=CacheConfig(kv_tokens=8192, prefix_cache=True))
        self.engine = Engine.from_pretrained(folder, config)
        self.reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.plain = PlainLoop(self.reference, DECODE_PROMPT + DECODE_NEW + 1)
        self._calls = 0

    def run_engine(self, prompts: list[list[int]], n: int, new: int, temperature: float) -> list[list[int]]:
        self._calls += 1
        self.engine.flush("all")
        sampling = SamplingParams(temperature=temperature, max_new=new, ignore_eos=True, seed=self._calls)
        groups = self.engine.generate(
            [
                GroupRequest(
                    group_id=f"{self._calls}-{index}",
                    prompt_ids=np.asarray(prompt, dtype=np.uint32),
                    n=n,
                    sampling=sampling,
                )
                for index, prompt in enumerate(prompts)
            ]
        )
        return [sample.ids.tolist() for group in groups for sample in group.samples]

    def run_transformers(self, prompts: list[list[int]], n: int, new: int, temperature: float) -> list[list[int]]:
        ids = torch.tensor(prompts)
        options = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        output = self.reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_return_sequences=n,
            max_new_tokens=new,
            min_new_tokens=new,
            pad_token_id=0,
            **options,
        )
        return output[:, ids.shape[1] :].tolist()


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure_decode(sides: Sides, repeats: int) -> list[Row]:
    """Tokens per second after the first, greedy, one sample."""
    prompt = np.random.default_rng(0).integers(100, 40000, DECODE_PROMPT).tolist()
    calls: dict[str, Callable[[int], list[int]]] = {
        "engine": lambda new: sides.run_engine([prompt], 1, new, 0.0)[0],
        "transformers": lambda new: sides.run_transformers([prompt], 1, new, 0.0)[0],
        "plain loop": lambda new: sides.plain.generate(prompt, new),
    }
    outputs = {name: call(DECODE_NEW) for name, call in calls.items()}
    agreement = next(
        (
            i
            for i, pair in enumerate(zip(outputs["engine"], outputs["transformers"], strict=True))
            if pair[0] != pair[1]
        ),
        DECODE_NEW,
    )
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, call in calls.items():
            first = timed(lambda call=call: call(1))
            whole = timed(lambda call=call: call(DECODE_NEW))
            best[name] = min(best[name], whole - first)
    rate = {name: (DECODE_NEW - 1) / seconds for name, seconds in best.items()}
    rows = [Row("decode, batch 1", name, value, "tok/s") for name, value in rate.items()]
    rows.append(Row("decode, batch 1", "greedy ids equal to transformers", agreement, f"of {DECODE_NEW}"))
    rows.append(at_least("decode, batch 1", "engine / transformers", rate["engine"] / rate["transformers"], "x", 1.3))
    rows.append(at_least("decode, batch 1", "engine / plain loop", rate["engine"] / rate["plain loop"], "x", 0.95))
    return rows


def measure_group(sides: Sides, repeats: int) -> list[Row]:
    """Output tokens per second, prefill included."""
    prompts = np.random.default_rng(1).integers(100, 40000, (GROUPS, GROUP_PROMPT)).tolist()
    calls: dict[str, Callable[[], list[list[int]]]] = {
        "engine": lambda: sides.run_engine(prompts, SAMPLES, GROUP_NEW, 1.0),
        "transformers": lambda: sides.run_transformers(prompts, SAMPLES, GROUP_NEW, 1.0),
    }
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, call in calls.items():
            best[name] = min(best[name], timed(call))
    tokens = GROUPS * SAMPLES * GROUP_NEW
    rate = {name: tokens / seconds for name, seconds in best.items()}
    case = f"group rollout {GROUPS} x {SAMPLES}, {GROUP_PROMPT} in, {GROUP_NEW} out"
    rows = [Row(case, name, value, "tok/s") for name, value in rate.items()]
    rows.append(at_least(case, "engine / transformers", rate["engine"] / rate["transformers"], "x", 1.8))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a preset or a Hugging Face folder")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", choices=["decode", "group", "all"], default="all")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    sides = Sides(resolve_model(args.model), args.threads)
    rows = [Row("setting", "threads", args.threads, "")]
    with torch.inference_mode():
        if args.case in ("decode", "all"):
            rows += measure_decode(sides, args.repeats)
        if args.case in ("group", "all"):
            rows += measure_group(sides, args.repeats)
    report("cpu_rollout", rows, args.json)


if __name__ == "__main__":
    main()
