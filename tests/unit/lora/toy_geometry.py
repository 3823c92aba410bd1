"""A small geometry with every kind of site, and random adapters for it."""

from __future__ import annotations

import torch

from lora.device_pool import DevicePool
from lora.factors import AdapterWeights, check_weights
from lora.geometry import Geometry, Kind, Part, Site, Split
from lora.packing import pack

VOCAB, HIDDEN, HEADS, KV, INNER = 96, 64, 48, 16, 80


def geometry(
    layers: int = 1,
    rank: int = 0,
    size: int = 1,
    hidden: int = HIDDEN,
    heads: int = HEADS,
    kv: int = KV,
    inner: int = INNER,
) -> Geometry:
    sites = [Site(VOCAB, (Part("model.embed_tokens", hidden),), Kind.EMBEDDING)]
    for index in range(layers):
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        qkv = Part(f"{attention}.q_proj", heads), Part(f"{attention}.k_proj", kv), Part(f"{attention}.v_proj", kv)
        gates = Part(f"{mlp}.gate_proj", inner), Part(f"{mlp}.up_proj", inner)
        sites += [
            Site(hidden, qkv, split=Split.OUTPUTS),
            Site(heads, (Part(f"{attention}.o_proj", hidden),), split=Split.INPUTS),
            Site(hidden, gates, split=Split.OUTPUTS),
            Site(inner, (Part(f"{mlp}.down_proj", hidden),), split=Split.INPUTS),
        ]
    sites.append(Site(hidden, (Part("lm_head", VOCAB),), Kind.HEAD))
    return Geometry(tuple(sites), rank, size)


def tensors(modules: dict[str, int], where: Geometry, seed: int = 0, bias: bool = False) -> dict[str, torch.Tensor]:
    """Random factors of some modules, by rank, under peft's names."""
    source, found = torch.Generator().manual_seed(seed), {}
    for module, rank in modules.items():
        inputs, outputs = where.module_shape(module)
        prefix = f"base_model.model.{module}"
        a, b = torch.randn(rank, inputs, generator=source), torch.randn(outputs, rank, generator=source)
        if where.kind(module) is Kind.EMBEDDING:
            found |= {f"{prefix}.lora_embedding_A": a, f"{prefix}.lora_embedding_B": b}
            continue
        found |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
        if bias:
            found[f"{prefix}.lora_B.bias"] = torch.randn(outputs, generator=source)
    return found


def weights(modules: dict[str, int], where: Geometry, seed: int = 0, bias: bool = False) -> AdapterWeights:
    config = {"r": 1, "lora_alpha": 3, "rank_pattern": modules, "lora_bias": bias}
    return check_weights(config, tensors(modules, where, seed, bias), where, 256, lambda module, tensor: False)


def all_linear(where: Geometry, rank: int) -> dict[str, int]:
    return {module: rank for module in where.places if where.kind(module) is Kind.LINEAR}


def make_pool(where: Geometry, *adapters: AdapterWeights, dtype: torch.dtype = torch.float32) -> DevicePool:
    """A pool with these adapters in slots 1, 2, ..."""
    packed = [pack(adapter, where, dtype) for adapter in adapters]
    pool = DevicePool(where, dtype, torch.device("cpu"), sum(p.num_bytes + 512 for p in packed) + 512, len(packed) + 1)
    assert [pool.load(p) for p in packed] == list(range(1, len(packed) + 1))
    return pool
