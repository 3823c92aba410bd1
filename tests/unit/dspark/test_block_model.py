"""The block drafter's network against a description of it written out slowly, and who sees whom."""

import pytest
import torch

from engine.dspark.dense_attention import dense_attention
from tests.unit.dspark.drafters import HIDDEN, argmax_pick, checkpoint, drafter_config, random_drafter, random_ends
from tests.unit.dspark.slow_block import SlowDrafter

KINDS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "dflash": {"markov_rank": 0, "confidence_head_with_markov": False},
    "confidence_without_markov": {"confidence_head_with_markov": False},
}


def features(count, seed=1):
    return torch.randn(count, 2, HIDDEN, generator=torch.Generator().manual_seed(seed))


def hidden_of(model, ends, context, anchors, ids):
    """Normed states [A, G, D] of blocks at `anchors` of one sequence with these features."""
    positions_C = torch.arange(len(context))
    k, v = model.context_kv(model.context_features(context), positions_C)
    anchors = torch.tensor(anchors)
    attend = dense_attention(model.spec.backbone, model.spec.block, k, v, anchors, positions_C)
    return model.hidden(torch.tensor(ids), anchors, ends, attend)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_logits_and_confidence_equal_the_description(kind):
    model, ends = random_drafter(**KINDS[kind]), random_ends()
    slow = SlowDrafter(drafter_config(**KINDS[kind]), checkpoint(model), ends)
    context = features(9)
    ids, positions = [17, 300, 4], [9, 5, 0]
    hidden = hidden_of(model, ends, context, positions, ids)
    drafts, logits, confidence = model.draw(hidden, torch.tensor(ids), ends, argmax_pick)
    for row, (anchor, position) in enumerate(zip(ids, positions, strict=True)):
        expected_ids, expected_logits, expected_confidence = slow.draw(context, anchor, position)
        assert drafts[row].tolist() == expected_ids
        torch.testing.assert_close(logits[row].double(), expected_logits, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(confidence[row].double(), expected_confidence, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_teacher_forcing_gives_what_drawing_gave(kind):
    model, ends = random_drafter(**KINDS[kind]), random_ends()
    anchors = torch.tensor([17, 300])
    hidden = hidden_of(model, ends, features(9), [9, 6], anchors.tolist())
    drafts, drawn, confidence = model.draw(hidden, anchors, ends, argmax_pick)
    previous = torch.cat((anchors[:, None], drafts[:, :-1]), dim=1)
    forced, forced_confidence = model.teacher_forced(hidden, previous, ends)
    torch.testing.assert_close(forced, drawn, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(forced_confidence, confidence, atol=1e-5, rtol=1e-5)


def test_case_f4_the_first_slot_stands_at_the_anchor():
    model = random_drafter()
    for position in (16, 64, 250):
        positions = model.block_positions(torch.tensor([position]))
        assert positions.tolist() == [[position, position + 1, position + 2, position + 3]]
    assert model.block_ids(torch.tensor([42])).tolist() == [[42, 511, 511, 511]]


def test_case_j2_a_block_sees_nothing_from_its_anchor_on():
    model, ends = random_drafter(), random_ends()
    anchors, ids = [5, 6, 7, 9], [1, 2, 3, 4]
    before = features(32)
    after = before.clone()
    after[8] += 1.0
    was, now = hidden_of(model, ends, before, anchors, ids), hidden_of(model, ends, after, anchors, ids)
    assert torch.equal(was[:3], now[:3])
    assert not torch.equal(was[3], now[3])

    context = before.clone().requires_grad_(True)
    for row, anchor in enumerate(anchors):
        (gradient,) = torch.autograd.grad(hidden_of(model, ends, context, anchors, ids)[row].sum(), context)
        reached = gradient.flatten(1).abs().sum(1) > 0
        assert reached.tolist() == [place < anchor for place in range(32)]


def test_a_window_hides_what_is_older_and_keeps_the_whole_block():
    layers = {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention"] * 2}
    model, ends = random_drafter(**layers), random_ends()
    context = features(12)
    base = hidden_of(model, ends, context, [12], [7])
    for place in range(12):
        moved = context.clone()
        moved[place] += 1.0
        # The block ends at 15; six tokens back from there reach position 10.
        assert torch.equal(hidden_of(model, ends, moved, [12], [7]), base) == (place < 10)


def test_gradients_reach_every_parameter_in_training():
    model, ends = random_drafter(markov_head_type="rnn"), random_ends()
    model.requires_grad_(True)
    hidden = hidden_of(model, ends, features(9), [9, 6], [1, 2])
    logits, confidence = model.teacher_forced(hidden, torch.tensor([[1, 5, 6, 7], [2, 8, 9, 10]]), ends)
    (torch.logsumexp(logits, -1).sum() - logits[..., 3].sum() + confidence.sum()).backward()
    for name, value in model.named_parameters():
        assert value.grad is not None and bool(value.grad.abs().sum() > 0), name


def test_case_j3_detached_confidence_leaves_backbone_and_markov_head_alone():
    grads = {}
    for detach in (True, False):
        model, ends = random_drafter(), random_ends()
        model.requires_grad_(True)
        hidden = hidden_of(model, ends, features(9), [9], [1])
        _, confidence = model.teacher_forced(hidden, torch.tensor([[1, 5, 6, 7]]), ends, detach_confidence=detach)
        confidence.sum().backward()
        grads[detach] = {name: value.grad is not None for name, value in model.named_parameters()}
    reached = {name for name, there in grads[True].items() if there}
    assert reached == {"confidence_head.weight", "confidence_head.bias"}
    assert grads[False]["fc"] and grads[False]["markov_head.w1"]


def test_a_reduced_vocabulary_proposes_its_ids_only():
    kept = list(range(0, 512, 8))
    model, ends = random_drafter(draft_vocab_size=64, draft_vocab_ids=kept), random_ends()
    hidden = hidden_of(model, ends, features(5), [5], [1])
    drafts, logits, _ = model.draw(hidden, torch.tensor([1]), ends, argmax_pick)
    assert set(drafts.flatten().tolist()) <= set(kept)
    assert torch.isfinite(logits).sum().item() == 64 * 4
