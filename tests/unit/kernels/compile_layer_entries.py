"""Entries of adapters, of layers with states, of experts and of what moves states: see
`tests.unit.kernels.compile_entries`, which says what an entry is.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.kernels.adapted_gate import adapted_gate
from engine.kernels.adapted_rope import Rotation, adapted_rope
from engine.kernels.adapted_sum import Adapted, adapted_sum
from engine.kernels.biased_experts import biased_experts
from engine.kernels.causal_conv import causal_conv, causal_conv_step
from engine.kernels.expert_gate import expert_gate
from engine.kernels.expert_rows import ExpertRows, expert_down, expert_gate_up
from engine.kernels.gdn_decode import gdn_decode
from engine.kernels.gdn_gate import gdn_gate
from engine.kernels.gdn_prefill import gdn_prefill
from engine.kernels.mamba2_decode import mamba2_decode
from engine.kernels.mamba2_gate import mamba2_gate
from engine.kernels.mamba2_prefill import mamba2_prefill
from engine.kernels.rope_kv_write import QKNorm, QKVShape
from engine.kernels.state_copy import StateAddresses, copy_on_grid
from engine.kernels.unit_copy import UnitAddresses, unit_copy
from engine.layers.gated_delta_reference import GatedDeltaHeads, GatedDeltaShape, HeadColumns
from engine.layers.mamba2_reference import GroupNorm, Mamba2Heads, Mamba2Shape
from lora.device_pool import DevicePool
from lora.geometry import Geometry, Kind, Part, Site
from lora.kernel_step import KernelStep, Variant
from lora.kernels.expand import lora_expand
from lora.kernels.shrink import lora_shrink, workspace_shape
from lora.kernels.stack import Rooms, stack_factors
from lora.segments import Tiles
from lora.stack import Stack, StackRoom

BF16 = torch.bfloat16


def adapters(capability: int) -> None:
    """Projections of one, two and three parts and an embedding; few ranks and many, few rows a tile and many."""
    parts = tuple(Part(name, width) for name, width in zip("qkv", (4096, 1024, 1024), strict=True))
    sites = (
        Site(12288, (Part("down", 4096),)),
        Site(4096, parts[: 2 if capability == 80 else 3]),
        Site(512, (Part("e", 4096),), Kind.EMBEDDING),
    )
    pool = DevicePool(Geometry(sites), BF16, torch.device("cpu"), 1 << 20, 2)
    variants = {80: [(16, 32, (0, 1, 2))], 90: [(16, 16, (0, 2)), (64, 64, (1,))], 100: [(16, 16, (1, 2))]}
    for block, rank, chosen in variants[capability]:
        tiles = Tiles(80, 5, block, torch.device("cpu"))
        for site in chosen:
            widths, inputs = pool.geometry.widths(site), pool.geometry.inputs(site)
            h = torch.zeros(workspace_shape(inputs, len(widths), 80, rank))
            mixed = rank != 16
            x = torch.zeros(80, dtype=torch.int64) if site == 2 else torch.zeros(80, inputs, dtype=BF16)
            lora_shrink(pool, site, x, tiles, h, mixed)
            if site != 2:
                lora_expand(pool, site, h, tiles, torch.zeros(80, sum(widths), dtype=BF16), mixed, biased=mixed)


def adapted_layers(capability: int) -> None:
    """What lies between the products of a layer: the widest ranks and biases for the oldest, small tiles for the
    newest, first products behind the model's for the one between."""
    sites = (
        Site(512, (Part("q", 512), Part("k", 128), Part("v", 128))),
        Site(512, (Part("o", 512),)),
        Site(512, (Part("g", 2048), Part("u", 2048))),
        Site(2048, (Part("d", 512),)),
    )
    pool = DevicePool(Geometry(sites), BF16, torch.device("cpu"), 1 << 20, 2)
    most, newest, stacked = (capability == each for each in (80, 100, 90))
    wide = {i: torch.zeros(sum(pool.geometry.widths(i)) + 96, site.inputs, dtype=BF16) for i, site in enumerate(sites)}
    stack, rank = Stack(pool, StackRoom(wide, 32, lambda: 0)), 64 if most else 16
    stack_factors(pool, Rooms(pool, wide), torch.zeros(2, 2, dtype=torch.int32), rank)
    variant = Variant(rank, most, most, False, False, 4 if newest else 16, 64, 2 if stacked else 0)
    step = KernelStep(pool, np.zeros(80, dtype=np.int64), variant=variant, stack=stack)
    x, shape = torch.zeros(80, 512, dtype=BF16), QKVShape(4, 1, 128)
    before = None if most else Adapted(1, None if stacked else step.work(1, 2, 1))
    y = torch.zeros(80, 544, dtype=BF16) if stacked else x
    pieces = {"block": 256, "steps": 2 if newest else 1}
    stream = adapted_sum(step, None if most else y, before, x.clone(), x[0], None if stacked else 0, **pieces)
    table, token = torch.zeros(8, 128, dtype=BF16), torch.zeros(80, dtype=torch.int64)
    rotation = Rotation(table, table, token, token, torch.zeros(16, 2, 128, dtype=BF16))
    norm, qkv = QKNorm(table[0], table[1], 1e-6), torch.zeros(80, 864 if stacked else 768, dtype=BF16)
    rest, queries = (stream.squares_TP, 512, 1e-6), stream.adapted or Adapted(0)
    adapted_rope(step, queries, qkv, qkv[0] if most else None, *rest, shape, None if most else norm, rotation)
    gates, gate_up = Adapted(2, None if stacked else step.work(0, 2, 2)), torch.zeros(80, 4096, dtype=BF16)
    gate_up = torch.zeros(80, 4160, dtype=BF16) if stacked else gate_up
    following = None if stacked else 3
    adapted_gate(step, gates, gate_up, *(() if newest else rest), next_site=following, **pieces)


def mamba2(capability: int) -> None:
    """Steps of one token, of several with a wide state; the published forms of the gate."""
    shape = {80: Mamba2Shape(24, 64, 1, 64), 90: Mamba2Shape(128, 64, 8, 128), 100: Mamba2Shape(32, 128, 2, 256)}
    kind, token = shape[capability], torch.zeros(3, dtype=torch.int32)
    wide = torch.zeros(2, 2 * kind.inner + kind.convolved, dtype=BF16)
    own, raw = torch.zeros(kind.heads), wide[:, -kind.heads :]
    heads = Mamba2Heads(own, own, own)
    rows, state = wide[:, : kind.convolved], torch.zeros(2, kind.heads, kind.head_dim, kind.state)
    out = mamba2_decode(rows, raw, heads, kind, state, token[:2], token if capability == 100 else None)
    mamba2_prefill(rows, raw, heads, kind, state, token[:2], token, token, 64)
    norm = None if capability == 80 else GroupNorm(wide[0], kind.groups, 1e-5, capability == 90)
    mamba2_gate(out, wide[:, : kind.inner], norm, out=out)


def gated_delta(capability: int) -> None:
    """Raw numbers by key head or one kind after the other; steps of one token and of several."""
    shape = {
        80: GatedDeltaShape(2, 4, 64, 48),
        90: GatedDeltaShape(4, 8, 64, 64),
        100: GatedDeltaShape(4, 4, 32, 32),
    }
    kind, grouped, token = shape[capability], capability != 90, torch.zeros(2, dtype=torch.int32)
    shared = kind.shared if grouped else 0
    raw, strength, gate = HeadColumns(0, 2 * shared), HeadColumns(shared, 2 * shared), HeadColumns(64, 512)
    own, inputs = torch.zeros(kind.value_heads), torch.zeros(2, 2 * kind.convolved, dtype=BF16)
    heads, weight = GatedDeltaHeads(own, own, raw, strength), torch.zeros(kind.convolved, 4, dtype=BF16)
    kept = torch.zeros(2, 3, kind.convolved, dtype=BF16)
    columns = torch.zeros(kind.convolved, dtype=torch.int32) if grouped else None
    rows, bias = inputs if grouped else inputs[:, : kind.convolved], weight[:, 0].clone() if grouped else None
    causal_conv_step(rows, columns, weight, bias, kept, token)
    qkv = causal_conv(rows, columns, weight, bias, kept, token[:1], token, token)
    state = torch.zeros(2, kind.value_heads, kind.value_dim, kind.key_dim)
    out = gdn_decode(qkv, inputs, heads, kind, state, token, token if capability == 100 else None)
    gdn_prefill(qkv, inputs, heads, kind, state, token[:1], token, token, 1, 16)
    gdn_gate(out, inputs, gate, weight[: kind.value_dim, 0].contiguous(), 1e-6, kind)


def experts(capability: int) -> None:
    """Who is chosen, and products of rows sorted by expert."""
    inputs = torch.zeros(2, 64, dtype=BF16)
    chosen = ExpertRows(torch.zeros(capability, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), 2)
    expert_gate(torch.zeros(2, 64), 8, True, 1.0)
    inner = expert_gate_up(inputs, torch.zeros(128, 64, dtype=BF16), chosen)
    expert_down(inner, torch.zeros(128, 32, dtype=BF16), chosen)
    biased_experts(inner, torch.zeros(2, 32, 64, dtype=BF16), torch.zeros(2, 64, dtype=BF16), chosen, gather=False)


def units(capability: int) -> None:
    """Copies of whole states and pages: between slots, and to and from rows."""
    state, token = torch.zeros(2, 4, 32, 32), torch.zeros(2, dtype=torch.int32)
    copy_on_grid(StateAddresses([state]), token, token, token, 64)
    rows = torch.zeros(2, state[0].nbytes, dtype=torch.uint8)
    unit_copy(UnitAddresses([state], [0]), token.long(), rows, scatter=capability == 90)
