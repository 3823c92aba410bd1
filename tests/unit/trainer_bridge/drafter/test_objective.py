"""The loss against its formula written out, one draft at a time."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.errors import InvalidRequest
from tests.unit.trainer_bridge.drafter.worlds import SHAPE, example
from trainer_bridge.drafter.anchors import eligible
from trainer_bridge.drafter.blocks import check_features, make_blocks, micro_batches
from trainer_bridge.drafter.config import DrafterShape, DraftLossConfig
from trainer_bridge.drafter.ends import training_ends
from trainer_bridge.drafter.features import FeatureExample
from trainer_bridge.drafter.objective import DraftSums, check_terms, draft_loss

NARROW = DrafterShape(**{**{n: getattr(SHAPE, n) for n in SHAPE.__slots__}, "draft_ids": tuple(range(0, 512, 8))})


def shaken(model, seed=3):
    """Heads that start at nothing, moved, so that every term has something to say."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param += 0.05 * torch.randn(param.shape, generator=generator)
    return model


def chosen_of(world, model, count=3):
    return [(item, eligible(item.example.mask, 4, 256)) for item in world.items(count)]


def written_out(model, ends, item, anchors, config):
    """(sum of w_k l_k, W, acceptance by (anchor, k)) from the definition, in float64 after the network."""
    total, weight, accepted = 0.0, 0.0, {}
    ids, mask = item.example.ids.astype(int), item.example.mask
    for anchor in anchors:
        one = make_blocks(model.spec, [(item, np.array([anchor]))])
        with torch.no_grad():
            hidden = one.hidden(model, ends)
            logits, confidence = model.teacher_forced(hidden, one.previous_AG, ends)
            target = ends.head(item.last_TD)
        for k in range(model.spec.num_drafts):
            place = anchor + 1 + k
            if place >= len(ids) or not mask[place]:
                break
            log_q = torch.log_softmax(logits[0, k].double() / config.temperature, -1)
            p = torch.softmax(target[place - 1].double() / config.temperature, -1)
            distance = float((log_q.exp() - p).abs().sum())
            chance = 1 - distance / 2
            sigmoid = 1 / (1 + math.exp(-float(confidence[0, k])))
            bce = -(chance * math.log(sigmoid) + (1 - chance) * math.log(1 - sigmoid))
            ce = 0.0 if log_q[ids[place]] == -math.inf else -float(log_q[ids[place]])
            w = 1.0 if config.decay is None else math.exp(-k / config.decay)
            total += w * (config.ce * ce + config.l1 * distance + config.confidence * bce)
            weight += w
            accepted[int(anchor), k] = float(torch.minimum(log_q.exp(), p).sum())
    return total, weight, accepted


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (DraftLossConfig(), SHAPE),
        (DraftLossConfig(ce=0.3, l1=0.5, confidence=2.0, decay=None, temperature=0.7), SHAPE),
        (DraftLossConfig(), NARROW),
    ],
)
def test_loss_and_acceptance_equal_the_formula(world, config, shape):
    model = shaken(world.drafter(shape=shape))
    chosen = chosen_of(world, model)
    expected = [written_out(model, world.ends, item, anchors, config) for item, anchors in chosen]
    divisor = sum(weight for _, weight, _ in expected)
    sums = DraftSums(4)
    for chunk in (2, 100):
        value = draft_loss(model, world.ends, make_blocks(model.spec, chosen), config, divisor, sums, chunk)
        assert float(value) == pytest.approx(sum(total for total, _, _ in expected) / divisor, rel=1e-5)
    for k in range(4):
        own = [value for _, _, accepted in expected for (_, place), value in accepted.items() if place == k]
        assert float(sums.values_FG[0, k]) == 2 * len(own)
        assert float(sums.mean("accepted")[k]) == pytest.approx(np.mean(own), rel=1e-5)


def test_micro_batches_and_chunks_change_no_gradient(world):
    gradients = []
    for max_slots, chunk in ((10_000, 128), (60, 3)):
        model = shaken(world.drafter())
        model.requires_grad_(True)
        for part in micro_batches(model.spec, chosen_of(world, model), max_slots):
            draft_loss(model, world.ends, make_blocks(model.spec, part), DraftLossConfig(), 50.0, DraftSums(4), chunk)
        gradients.append([param.grad for param in model.parameters()])
    assert len(list(micro_batches(model.spec, chosen_of(world, model), 60))) == 3
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_every_part_of_the_drafter_gets_a_gradient_and_the_target_none(world):
    model = shaken(world.drafter())
    model.requires_grad_(True)
    blocks = make_blocks(model.spec, chosen_of(world, model))
    draft_loss(model, world.ends, blocks, DraftLossConfig(), 1.0, DraftSums(4))
    for name, param in model.named_parameters():
        assert param.grad is not None and bool(param.grad.abs().sum() > 0), name
    assert all(param.grad is None for param in world.parts.model.parameters())


def backbone_gradients(world, config):
    model = shaken(world.drafter())
    model.requires_grad_(True)
    blocks = make_blocks(model.spec, chosen_of(world, model))
    draft_loss(model, world.ends, blocks, config, 1.0, DraftSums(4))
    return {n: p.grad for n, p in model.named_parameters() if not n.startswith("confidence_head")}


def test_case_j3_a_detached_confidence_changes_nothing_else_to_the_bit(world):
    off = backbone_gradients(world, DraftLossConfig(confidence=0.0))
    stopped = backbone_gradients(world, DraftLossConfig(detach_confidence=True))
    through = backbone_gradients(world, DraftLossConfig())
    assert all(torch.equal(off[name], stopped[name]) for name in off)
    assert not torch.equal(off["fc"], through["fc"]) and not torch.equal(
        off["markov_head.w1"], through["markov_head.w1"]
    )


def test_case_j2_a_block_depends_on_the_context_before_its_anchor_alone(world):
    model = shaken(world.drafter())
    item = world.scorer.score([example("j2", 4, 28)])[0]
    anchors = np.array([5, 6, 7, 9])
    moved = FeatureExample(item.example, item.features_TMD.clone(), item.last_TD)
    moved.features_TMD[8] += 1.0
    was = make_blocks(model.spec, [(item, anchors)]).hidden(model, world.ends)
    now = make_blocks(model.spec, [(moved, anchors)]).hidden(model, world.ends)
    assert torch.equal(was[:3], now[:3]) and not torch.equal(was[3], now[3])
    # Nor on who else is trained beside it, up to the rounding of sums over masked keys.
    other = world.items(2)
    crowd = [(other[0], np.array([4, 5])), (item, anchors), (other[1], np.array([5]))]
    beside = make_blocks(model.spec, crowd).hidden(model, world.ends)[2:6]
    torch.testing.assert_close(was, beside, atol=1e-5, rtol=1e-5)


def test_a_block_that_ends_early_is_that_of_a_drafter_with_shorter_blocks(world):
    item, anchors = world.items(1)[0], np.array([4, 5, 6])
    whole, short = (shaken(world.drafter(shape=replace(SHAPE, block=block))) for block in (4, 2))
    ended = make_blocks(whole.spec, [(item, anchors)], lengths_A=np.array([2, 4, 2]))
    expected = make_blocks(short.spec, [(item, anchors)]).hidden(short, world.ends)
    actual = ended.hidden(whole, world.ends)
    torch.testing.assert_close(actual[[0, 2], :2], expected[[0, 2]], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(actual[1, :2], expected[1], atol=1e-3)
    assert ended.counted_AG.sum(1).tolist() == [2, 4, 2] and actual.isfinite().all()


def test_case_j5_without_states_only_cross_entropy_trains(world):
    model = shaken(world.drafter())
    model.requires_grad_(True)
    bare = [
        (FeatureExample(item.example, item.features_TMD, None), anchors) for item, anchors in chosen_of(world, model)
    ]
    config = DraftLossConfig(ce=1.0, l1=0.0, confidence=0.0)
    check_terms(config, has_states=False, has_confidence=True)
    loss = draft_loss(model, world.ends, make_blocks(model.spec, bare), config, 1.0, DraftSums(4))
    assert math.isfinite(loss.item()) and bool(model.fc.grad.abs().sum() > 0)
    for wrong in (DraftLossConfig(ce=1.0, l1=0.0), DraftLossConfig()):
        with pytest.raises(InvalidRequest, match="final states"):
            check_terms(wrong, has_states=False, has_confidence=True)


def test_features_of_another_width_are_refused_by_name(world):
    model = world.drafter()
    item = world.items(1)[0]
    wide = FeatureExample(item.example, torch.zeros(item.example.num_tokens, 2, 64), item.last_TD)
    with pytest.raises(InvalidRequest, match=r"e0\.features"):
        check_features(model.spec, [wide])
    with pytest.raises(InvalidRequest, match=r"e0\.last"):
        check_features(model.spec, [FeatureExample(item.example, item.features_TMD, torch.zeros(3, 64))])


def test_a_target_whose_logits_are_capped_gives_gradients_through_the_cap(world):
    target = copy.copy(world.parts.model)
    target.spec = replace(target.spec, logit_softcap=2.0, scales=replace(target.spec.scales, logits=3.0))
    hidden = torch.randn(3, target.spec.hidden, generator=torch.Generator().manual_seed(0))
    given = hidden.clone().requires_grad_()
    logits = training_ends(target).head(given)
    torch.testing.assert_close(logits, target.logits(hidden))
    logits[0, 5].backward()
    step = torch.zeros_like(hidden).index_fill(1, torch.tensor(1), 1e-2)
    slope = (target.logits(hidden + step) - target.logits(hidden - step))[0, 5] / 2e-2
    assert given.grad[0, 1] == pytest.approx(float(slope), rel=1e-2) and not given.grad[1:].any()
