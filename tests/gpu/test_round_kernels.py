"""Kernels of a round of speculation on a GPU, in its own number format, against their references."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.draft_context import ContextLayers, write_context, write_context_reference
from engine.kernels.draft_notes import ConfidenceWeights, DraftNotes, note_drafts, note_drafts_reference
from engine.kernels.embedding_norm import embedding_norm, embedding_norm_reference
from engine.kernels.markov_bias import markov_bias, markov_bias_reference
from engine.layers.rotary import Rotary
from engine.models.spec import RopeSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16 = torch.bfloat16


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


@pytest.mark.parametrize("rows", [1, 300])
def test_context_of_all_layers(rows):
    rotary = Rotary(RopeSpec(theta=1e4), 128, 4096, BF16, torch.device("cuda"))
    pools = [[torch.zeros(1024, 16, 128, device="cuda", dtype=BF16) for _ in range(5)] for _ in range(2)]
    norms = [noise(128) for _ in range(5)]
    expected, actual = (ContextLayers.of(pool, norms, 1e-6, rotary.cos_CE, rotary.sin_CE) for pool in pools)
    positions = torch.randint(0, 5000, (rows,), device="cuda")
    slots = torch.randperm(1024, device="cuda")[:rows]
    slots[-1] = -1 if rows > 1 else 5
    for turn in range(2):  # new weights lie where the old ones lay
        kv = noise(5, rows, 2048)
        write_context_reference(expected, kv, positions, slots)
        write_context(actual, kv, positions, slots)
        for one, other in zip(*pools, strict=True):
            torch.testing.assert_close(other, one, atol=4e-2, rtol=2e-2)
            assert (other == one).float().mean() > 0.99
        for norm in norms:
            norm.mul_(1.5 + turn)


@pytest.mark.parametrize("rows", [1, 40, 200])
def test_the_token_before_adds_to_logits(rows):
    logits, w1, w2 = noise(rows, 7, 50_000), noise(50_000, 256), noise(50_000, 256)
    previous = torch.randint(-1, 50_000, (rows,), device="cuda")
    for slot in (0, 6):
        expected = markov_bias_reference(logits[:, slot], previous, w1, w2)
        kept = logits[:, 1].clone()
        markov_bias(logits[:, slot], previous, w1, w2)
        torch.testing.assert_close(logits[:, slot], expected, atol=1e-2, rtol=1e-2)
        assert torch.equal(logits[:, 1], kept)


@pytest.mark.parametrize("rows", [1, 130])
def test_how_sure_the_drafter_is(rows):
    hidden, w1, weight = noise(rows, 8, 4096)[:, 1:], noise(900, 256), noise(1, 4352)
    ids, anchors = torch.randint(0, 900, (7, rows), device="cuda"), torch.randint(-1, 900, (rows,), device="cuda")
    log_q = torch.randn(7, rows, device="cuda")
    out = DraftNotes(*(torch.zeros(rows, 7, device="cuda", dtype=kind) for kind in (torch.int64, *[torch.float32] * 2)))
    head = ConfidenceWeights(weight, weight[0, :1], w1)
    note_drafts(hidden, anchors, ids, log_q, head, out)
    expected = note_drafts_reference(hidden, anchors, ids, log_q, head)
    assert torch.equal(out.ids_BG, ids.t()) and out.log_q_BG is not None and torch.equal(out.log_q_BG, log_q.t())
    torch.testing.assert_close(out.confidence_BG, expected.confidence_BG, atol=2e-2, rtol=1e-3)


@pytest.mark.parametrize("width", [576, 4096])
def test_embedding_and_norm(width):
    ids, weight, norm = torch.tensor([3, -1, 70], device="cuda"), noise(100, width), noise(width)
    rows, normed = embedding_norm(ids, weight, norm, 1e-6)
    expected = embedding_norm_reference(ids, weight, norm, 1e-6)
    assert torch.equal(rows, expected[0])
    torch.testing.assert_close(normed, expected[1], atol=3e-2, rtol=1e-2)
