"""Attention of padded examples against dense attention example by example, gradients too."""

import pytest
import torch

from engine.dspark.dense_attention import dense_attention
from engine.models.shape import LayerSpec, ModelSpec
from trainer_bridge.drafter.packed_attention import packed_attention

BLOCK, HEADS, KV_HEADS, SIZE = 3, 4, 2, 8


def shape(window: int | None) -> ModelSpec:
    layers = LayerSpec(), LayerSpec(window=window)
    return ModelSpec(
        "drafter", 50, 512, 32, 64, 2, HEADS, KV_HEADS, SIZE, layers, tied=True, eos_ids=(), dtype=torch.float32
    )


@pytest.mark.parametrize("window", [None, 5])
def test_padded_examples_equal_single_ones(window):
    torch.manual_seed(0)
    sizes = [(2, 9), (3, 11), (1, 40), (7, 12), (2, 8), (1, 1)]
    anchors = torch.cat([torch.randint(1, context + 1, (blocks,)).sort()[0] for blocks, context in sizes])
    positions = torch.cat([torch.arange(context) for _, context in sizes])
    blocks, contexts = [size for size, _ in sizes], [size for _, size in sizes]
    slots = [count * BLOCK for count in blocks]
    given = [torch.randn(2, sum(contexts), KV_HEADS, SIZE) for _ in range(2)]
    given += [torch.randn(sum(slots), heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    spec, weights, found = shape(window), torch.randn(2, sum(slots), HEADS, SIZE), []
    for packed in (True, False):
        k_context, v_context, q, k, v = (tensor.clone().requires_grad_() for tensor in given)
        if packed:
            attend = packed_attention(spec, BLOCK, k_context, v_context, anchors, positions, sizes)
            out = torch.stack([attend(q, k, v, layer) for layer in range(2)])
        else:
            parts = zip(
                k_context.split(contexts, 1), v_context.split(contexts, 1), anchors.split(blocks),
                positions.split(contexts), q.split(slots), k.split(slots), v.split(slots), strict=True,
            )  # fmt: skip
            rows = []
            for own_k, own_v, at, where, *own in parts:
                attend = dense_attention(spec, BLOCK, own_k, own_v, at, where)
                rows.append(torch.stack([attend(*own, layer) for layer in range(2)]))
            out = torch.cat(rows, dim=1)
        (out * weights).sum().backward()
        found.append([out, *(tensor.grad for tensor in (k_context, v_context, q, k, v))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)
        assert one.isfinite().all()
