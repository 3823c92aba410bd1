"""What speculation adds to recurrent states: rings of raw inputs, against a state for each draft.

Owns the arithmetic at the shape of Qwen3.5-35B-A3B, without its weights, and what is really allocated at a shape of
an eighth. `python -m benchmarks.memory` prints it beside everything else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Row, at_most
from engine.memory.replay_ring import ReplayLayout, ReplayRings
from engine.memory.state_pool import StatePool
from engine.models.spec import ModelSpec, spec_from_config

GIB, MIB = 2**30, 2**20
MAPPED = 2 * MIB
"""A GPU's memory is mapped by as much."""
ROWS = 48
"""Running requests; with the one of scratch that makes 49 slots."""
DRAFTS = 4
TARGET_GIB, SNAPSHOTS_GIB, PUBLISHED_GIB = 0.7, 11.48, 1.8


def qwen3_5_35b(scale: int = 1) -> ModelSpec:
    """The published shape, with heads and widths divided by `scale`."""
    config: dict[str, Any] = dict(
        architectures=["Qwen3_5MoeForCausalLM"],
        vocab_size=248320,
        hidden_size=2048 // scale,
        num_hidden_layers=40,
        full_attention_interval=4,
        num_attention_heads=16 // scale,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16 // scale,
        linear_num_value_heads=32 // scale,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        max_position_embeddings=262144,
        dtype="bfloat16",
        eos_token_id=None,
    )
    return spec_from_config(config)


def snapshot_bytes(spec: ModelSpec) -> int:
    """A whole state of the recurrence for each draft of each slot, as specs/radix.md counts them: without the
    convolution's inputs."""
    states = spec.state_layout(torch.bfloat16).named("state")
    return (ROWS + 1) * DRAFTS * sum(tensor.nbytes for tensor in states.values())


def published_bytes(spec: ModelSpec, tokens: int = 16, slots: int = 161) -> int:
    """Rings of ReplaySSM as published, one for each slot of the pool: corrected differences and normed keys for
    outputs, raw values and keys, gates and strengths for folding."""
    states = spec.state_layout(torch.bfloat16).named("state")
    heads, value, key = next(iter(states.values())).shape
    per_token = 2 * heads * value * 2 + 2 * (heads // 2) * key * 2 + 2 * heads * 4
    return slots * tokens * per_token * len(states)


def planned() -> list[Row]:
    spec = qwen3_5_35b()
    case = f"Qwen3.5-35B-A3B, {ROWS + 1} slots"
    snapshots, states = snapshot_bytes(spec) / GIB, spec.state_layout(torch.bfloat16)
    rows = [
        Row(case, "a state", states.slot_bytes / MIB, "MiB"),
        Row(
            case,
            f"a state a draft, {DRAFTS} drafts",
            snapshots,
            "GiB",
            f"{SNAPSHOTS_GIB}",
            abs(snapshots - SNAPSHOTS_GIB) < 0.01,
        ),
        Row(case, "ReplaySSM, 161 slots of 16 tokens", published_bytes(spec) / GIB, "GiB", f"{PUBLISHED_GIB}"),
    ]
    for drafts in (DRAFTS, 7, 15):
        layout = ReplayLayout.of(spec, torch.bfloat16, ROWS, drafts)
        rows.append(at_most(case, f"rings, {drafts} drafts", layout.num_bytes / GIB, "GiB", TARGET_GIB))
    rows.append(
        Row(case, f"a ring, {DRAFTS} drafts", ReplayLayout.of(spec, torch.bfloat16, 1, 4).ring_bytes / MIB, "MiB")
    )
    return rows


def allocated(device: torch.device) -> list[Row]:
    """What states and rings take of the device, against the layouts' sums: mapped by `MAPPED`."""
    spec = qwen3_5_35b(scale=8)
    state, rings = spec.state_layout(torch.bfloat16), ReplayLayout.of(spec, torch.bfloat16, 128, 7)
    case, slots = f"an eighth of its width, {rings.rings} rows", 64
    parts: tuple[tuple[str, int, Callable[[], StatePool | ReplayRings]], ...] = (
        (f"states in {slots} slots", slots * state.slot_bytes, lambda: StatePool(state, slots, 64, device)),
        ("rings", rings.num_bytes, lambda: ReplayRings(rings, device)),
    )
    rows = []
    for name, expected, make in parts:
        make().fill(0.0)  # kernels take memory once
        before = _used(device)
        made = make()
        made.fill(1.0)  # the host's memory comes as it is touched
        measured = _used(device) - before
        del made
        near = abs(measured - expected) <= 0.01 * expected + MAPPED
        rows.append(Row(case, f"{name}, allocated", measured / MIB, "MiB", f"{expected / MIB:.1f} ± 1 %", near))
    return rows


def replay_rows(device: str = "cpu") -> list[Row]:
    return planned() + allocated(torch.device(device))


def _used(device: torch.device) -> int:
    """Bytes of the device that are not free; of the host, those that this process has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
