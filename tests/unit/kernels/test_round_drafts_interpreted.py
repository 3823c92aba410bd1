"""What becomes of drafts within a round, in Triton's interpreter: what the token before adds, how sure the drafter
is, and what that comes to."""

from __future__ import annotations

import pytest
import torch

from engine.dspark.planner import spend
from engine.dspark.scaling import SurvivalScaling
from engine.kernels.draft_notes import ConfidenceWeights, DraftNotes, note_drafts, note_drafts_reference
from engine.kernels.markov_bias import markov_bias, markov_bias_reference
from engine.kernels.round_spend import Calibration, spend_rows
from tests.unit.dspark.drafters import random_drafter
from tests.unit.kernels.test_fused_ops_interpreted import close, noise, poison


@pytest.mark.parametrize(("rows", "rank"), [(3, 8), pytest.param(70, 20, marks=pytest.mark.slow)])
def test_the_token_before_adds_to_logits(rows, rank):
    """Of one draft among others: rows of logits lie apart. A row that stands at no token is harmless."""
    logits, vocab = noise(rows, 2, 1100), 1100
    w1, w2 = noise(vocab, rank, seed=1), noise(vocab, rank, seed=2)
    previous = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(1))
    previous[1] = -1
    logits[:, :, 7] = float("-inf")
    other, expected = logits[:, 0].clone(), markov_bias_reference(logits[:, 1], previous, w1, w2)
    assert markov_bias(logits[:, 1], previous, w1, w2).data_ptr() == logits[:, 1].data_ptr()
    torch.testing.assert_close(logits[:, 1], expected, atol=2e-5, rtol=2e-5)
    assert torch.equal(logits[:, 0], other)


@pytest.mark.parametrize("reads", [False, True])
def test_how_sure_the_drafter_is(reads):
    """As the reference says, and as the model itself does."""
    model = random_drafter(3, markov_rank=20, confidence_head_with_markov=reads)
    assert model.confidence_head is not None and model.markov_head is not None
    hidden, ids = noise(2, 5, model.spec.backbone.hidden)[:, 1:], torch.tensor([[4, 2], [3, 9], [500, 1], [0, 7]])
    anchors, log_q = torch.tensor([8, -1]), noise(4, 2, seed=1)
    w1 = model.markov_head.w1
    head = ConfidenceWeights(model.confidence_head.weight, model.confidence_head.bias, w1 if reads else None)
    out = DraftNotes(torch.full((2, 4), -1), poison(2, 4), poison(2, 4))
    note_drafts(hidden, anchors, ids, log_q, head, out)
    expected = note_drafts_reference(hidden, anchors, ids, log_q, head)
    embedded = model.markov_head.embed(torch.cat((anchors.clamp(min=0)[:, None], ids.t()[:, :-1]), dim=1))
    assert out.confidence_BG is not None and expected.confidence_BG is not None
    assert torch.equal(out.ids_BG, ids.t()) and out.log_q_BG is not None and torch.equal(out.log_q_BG, log_q.t())
    close(out.confidence_BG, expected.confidence_BG)
    close(out.confidence_BG, model.confidence_head(hidden, embedded if reads else None))
    bare = DraftNotes(torch.full((2, 4), -1), None, None)
    note_drafts(hidden, anchors, ids, log_q, None, bare)
    assert torch.equal(bare.ids_BG, ids.t())


def test_survivals_from_confidences_are_spent_on():
    scaling = SurvivalScaling(4)
    scaling.assign([0.5, 1.0, 2.0, 1.5], [0.3, -0.4, 0.0, 1.0])
    confidence, window = noise(5, 3) * 3, torch.tensor([3, -1, 0, 2, 3], dtype=torch.int32)
    expected, calibration = scaling.survival(confidence), Calibration(confidence, scaling.scales_2G)
    least, most = torch.zeros(5, dtype=torch.int32), window.clamp(min=0)
    for budget in (None, 4):
        survival, out = poison(5, 3), None if budget is None else torch.empty(5, dtype=torch.int32)
        spend_rows(survival, window, least, torch.tensor([budget or 0], dtype=torch.int32), out, calibration)
        close(survival, expected)
        if out is not None and budget is not None:
            assert out.tolist() == spend(expected, torch.minimum(least, most), most, budget).tolist()
