"""The reference attention's special layers, each against a formula written out per position."""

from __future__ import annotations

import math

import pytest
import torch

from engine.attention.torch_ref import TorchReference
from engine.batch import ForwardBatch
from engine.memory.kv_pool import KVPool
from engine.models.spec import LayerSpec, ModelSpec

HEADS, KV_HEADS, SIZE, TOKENS, CACHED = 4, 2, 8, 13, 5


def make_spec(layer: LayerSpec) -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        context_len=64,
        hidden=32,
        intermediate=8,
        num_layers=1,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=SIZE,
        layers=(layer,),
        tied=True,
        eos_ids=(),
        dtype=torch.float32,
    )


def run(layer: LayerSpec, q, k, v, sink, bias) -> torch.Tensor:
    """The last TOKENS - CACHED queries, after the first CACHED tokens went through the pool."""
    spec = make_spec(layer)
    pool = KVPool(spec, 8, 4, torch.float32, "cpu")
    pool.fill(float("nan"))
    backend = TorchReference(spec)
    pages = [6, 2, 5, 3]
    slots = torch.tensor([pages[p // 4] * 4 + p % 4 for p in range(TOKENS)])
    for start, end in ((0, CACHED), (CACHED, TOKENS)):
        span = slice(start, end)
        batch = ForwardBatch(
            input_ids_T=torch.arange(start, end),
            positions_T=torch.arange(start, end),
            write_slots_T=slots[span],
            query_lens=[end - start],
            seq_lens=[end],
            page_tables_BP=torch.tensor([pages], dtype=torch.int32),
            row_keys=[1],
            num_decode=0,
            logit_rows_R=torch.zeros(0, dtype=torch.long),
        )
        backend.plan(batch, pool)
        out = backend.run(q[span], k[span], v[span], 0, sink, None if bias is None else bias[span])
    return out


def by_hand(layer: LayerSpec, q, k, v, sink, bias, head: int, query: int) -> torch.Tensor:
    kv_head = head // (HEADS // KV_HEADS)
    weights, values = [], []
    for key in range(query + 1):
        distance = query - key
        if layer.window is not None and distance >= layer.window:
            continue
        score = float(q[query, head] @ k[key, kv_head]) / math.sqrt(SIZE)
        if layer.softcap is not None:
            score = layer.softcap * math.tanh(score / layer.softcap)
        if layer.bias is not None and distance < layer.bias:
            score += float(bias[query, head, distance])
        weights.append(math.exp(score))
        values.append(v[key, kv_head])
    total = sum(weights) + (math.exp(float(sink[head])) if layer.sink else 0.0)
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) / total


@pytest.mark.parametrize(
    "layer",
    [
        LayerSpec(),
        LayerSpec(window=1),
        LayerSpec(window=4),
        LayerSpec(sink=True),
        LayerSpec(softcap=0.7),
        LayerSpec(bias=3),
        LayerSpec(window=6, sink=True, softcap=2.0, bias=20),
    ],
)
def test_special_layers(layer: LayerSpec) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(TOKENS, HEADS, SIZE), torch.randn(TOKENS, KV_HEADS, SIZE), torch.randn(TOKENS, KV_HEADS, SIZE)
    sink = torch.randn(HEADS) if layer.sink else None
    bias = torch.randn(TOKENS, HEADS, layer.bias) if layer.bias else None
    out = run(layer, q, k, v, sink, bias)
    for query in range(CACHED, TOKENS):
        for head in range(HEADS):
            expected = by_hand(layer, q, k, v, sink, bias, head, query)
            torch.testing.assert_close(out[query - CACHED, head], expected, atol=1e-5, rtol=0)
