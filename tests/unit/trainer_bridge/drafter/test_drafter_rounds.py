"""Full-window rounds against the trainer's figures, and what is reported and calibrated from them."""

import json

import numpy as np
import pytest
import torch

from engine.attention.torch_ref import TorchReference
from engine.batch import ForwardBatch
from engine.dspark.acceptance import Round, verify_rejection
from engine.dspark.block_drafter import BlockDrafter
from engine.dspark.drafter import Committed, DraftRows
from engine.dspark.round_noise import RoundNoise
from engine.dspark.scaling import StoredScaling
from engine.dspark.stats import DraftStats
from engine.memory.kv_pool import KVPool
from engine.models.spec import read_spec
from engine.runner.model_runner import ModelRunner
from engine.sampling.params import RowSampling
from engine.types import SamplingParams, Want
from tests.support import ask, make_engine, prompt, reference_greedy
from tests.unit.dspark.served import dspark
from tests.unit.trainer_bridge.drafter.test_objective import NARROW, shaken
from tests.unit.trainer_bridge.drafter.worlds import MASK, SHAPE, example
from trainer_bridge.drafter.blocks import make_blocks
from trainer_bridge.drafter.calibration import calibrate, draw_reliability
from trainer_bridge.drafter.config import DraftLossConfig
from trainer_bridge.drafter.evaluation import (
    repetition_rate,
    report_of_rounds,
    report_of_statistics,
)
from trainer_bridge.drafter.examples import DraftExample
from trainer_bridge.drafter.export import DrafterCard, export_drafter
from trainer_bridge.drafter.initial import drafter_config
from trainer_bridge.drafter.objective import DraftSums, draft_loss
from trainer_bridge.drafter.rounds import FullWindowRounds, RoundLog

PAGE = 4


class Forced:
    """A pick that drafts given tokens whatever the logits, which stay what they were."""

    def __init__(self, ids):
        self.ids = ids

    def __call__(self, slot, logits_BV):
        return torch.tensor([self.ids[slot]])


def engine_round(world, model, ids, anchor):
    """(logits drafted from, logits that verify) of the round at `anchor` whose drafts are the data's."""
    target, spec = world.parts.model, world.parts.model.spec
    pages = torch.arange(1, 17)[None].int()
    pool = KVPool(spec, 18, PAGE, torch.float32, "cpu")
    drafts = KVPool(model.spec.backbone, 18, PAGE, torch.float32, "cpu")
    for one in (pool, drafts):
        one.fill(float("nan"))
    drafter = BlockDrafter(model, world.ends, drafts, TorchReference(model.spec.backbone))
    runner = ModelRunner(target, pool, TorchReference(spec))

    def forward(piece, start):
        positions = torch.arange(start, start + len(piece))
        slots = pages[0, positions // PAGE].long() * PAGE + positions % PAGE
        batch = ForwardBatch(
            torch.tensor(piece), positions, slots, [len(piece)], [start + len(piece)], pages, [1], 0, torch.empty(0)
        )
        features = {layer: torch.empty(0) for layer in drafter.traits.captured_layers}
        hidden = runner.hidden(batch, features)
        return runner.logits(hidden), Committed([0], [len(piece)], torch.tensor(piece), positions, slots, features)

    if anchor:
        drafter.commit(forward(ids[:anchor], 0)[1])
    count = model.spec.num_drafts
    wanted = ids[anchor + 1 : anchor + 1 + count]
    rows = DraftRows([0], torch.tensor(ids[anchor : anchor + 1]), torch.tensor([anchor]), pages, Forced(wanted))
    proposal = drafter.propose(rows)
    return proposal, forward(ids[anchor : anchor + 1 + count], anchor)[0]


@pytest.mark.parametrize("shape", [SHAPE, NARROW], ids=["whole", "case_j7_reduced_vocabulary"])
def test_golden_acceptance_in_training_is_acceptance_in_the_engine(world, shape):
    """On identical tokens: the same q, the same p, so the same chance of acceptance in every slot."""
    model = shaken(world.drafter(shape=shape))
    (item,) = world.scorer.score([example("golden", 5, 20)])
    ids = item.example.ids.astype(int).tolist()
    kept = torch.tensor(shape.draft_ids or range(512))
    for anchor in (4, 5, 11, 20):
        one = make_blocks(model.spec, [(item, np.array([anchor]))])
        sums = DraftSums(4)
        with torch.no_grad():
            draft_loss(model, world.ends, one, DraftLossConfig(), 1.0, sums)
            trained, confidence = model.teacher_forced(one.hidden(model, world.ends), one.previous_AG, world.ends)
        proposal, verifying = engine_round(world, model, ids, anchor)
        torch.testing.assert_close(proposal.logits_BGV, trained, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(proposal.confidence_BG, confidence, atol=2e-5, rtol=1e-5)
        p, q = torch.softmax(verifying[:4], -1), torch.softmax(proposal.logits_BGV[0], -1)
        torch.testing.assert_close(torch.minimum(p, q).sum(-1).double(), sums.mean("accepted"), atol=1e-5, rtol=1e-4)
        # The engine judges the tokens themselves: min(1, p(x) / q(x)) of each.
        row = RowSampling(SamplingParams(), Want(), 3, np.array(ids[: anchor + 1], np.uint32))
        played = Round([row], [anchor], proposal.ids_BG, [4], proposal.logits_BGV)
        verdict = verify_rejection(verifying, played, RoundNoise([3], [0], [anchor], "cpu"))
        for k, chance in enumerate(verdict.chances[0]):
            token = ids[anchor + 1 + k]
            expected = min(1.0, float(p[k, token] / q[k, token])) if token in kept else 1.0
            assert chance == pytest.approx(expected, rel=1e-3)


ASKED = [("d", prompt(12)), ("d", prompt(3, 40)), ("e", prompt(9, 200))]


@pytest.fixture(scope="module")
def trained(world):
    """A drafter that has seen the target's own words, greedy ones after `ASKED` among them."""
    engine = make_engine(world.folder)
    requests = [ask(f"g{i}", ids, max_new=20) for i, (_, ids) in enumerate(ASKED)]
    requests += [ask(f"s{i}", ids, max_new=30, temperature=1.0) for i, (_, ids) in enumerate(prompts(6, seed=2))]
    examples = []
    for request, group in zip(requests, engine.generate(requests), strict=True):
        ids = np.concatenate((request.prompt_ids, group.samples[0].ids))
        mask = np.arange(len(ids)) >= len(request.prompt_ids)
        examples.append(DraftExample(request.group_id, "d", ids, mask))
    trainer = world.trainer(steps=60, learning_rate=3e-3, anchors=12)
    items = world.scorer.score(examples)
    for _ in range(60):
        trainer.step(items)
    return trainer.model.requires_grad_(False)


def prompts(count, seed=0):
    rng = np.random.default_rng(seed)
    return [("ab"[i % 2], rng.integers(0, 500, 3 + i % 5).astype(np.uint32)) for i in range(count)]


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_greedy_rounds_say_what_the_target_says_alone(world, trained, rule):
    rounds = FullWindowRounds(world.parts, trained, rule)
    free = world.parts.pages.allocator.num_free
    log = rounds.play(ASKED, SamplingParams(temperature=0.0, max_new=10), batch=2)
    said = log.texts["d"] + log.texts["e"]
    assert [text.tolist() for text in said] == [reference_greedy(world.folder, ids, 10) for _, ids in ASKED]
    assert world.parts.pages.allocator.num_free == free
    assert sum(stats.emitted for stats in log.stats.values()) == 3 * 9, "the first token is the prompt's"


def test_rounds_keep_what_teacher_forcing_promises(world, trained):
    """Over many rounds at T = 1 the share of drafts kept in slot 0 is the mean chance of acceptance there."""
    rounds = FullWindowRounds(world.parts, trained)
    log = rounds.play(prompts(24), SamplingParams(temperature=1.0, max_new=24, ignore_eos=True))
    labels = log.labels()
    kept = sum(stats.accepted_at[0] for stats in log.stats.values()) / len(labels)
    spread = np.sqrt(0.25 / len(labels))
    assert kept == pytest.approx(labels[:, 0].mean(), abs=4 * spread)
    report = report_of_rounds(log, rule="rejection", temperature=1.0)
    assert report.overall.accepted == pytest.approx(labels.sum(1).mean(), abs=0.2)
    assert set(report.domains) == {"a", "b"} and report.overall.steps == len(labels)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_an_engine_serves_the_export_and_counts_what_rounds_count(world, trained, tmp_path, rule):
    config = drafter_config(SHAPE, world.folder, read_spec(world.folder), MASK)
    scaling = StoredScaling(
        temperatures=[1.0] * 4, dataset="d", num_samples=1, ece_before=0.0, ece_after=0.0, rule=rule
    )
    card = DrafterCard("toy", "toy", world.scorer.digest(), [], [])
    folder = export_drafter(tmp_path / "drafter", trained, config, card, torch.float32, [scaling])
    asked = [("d", ids) for _, ids in ASKED]
    log = FullWindowRounds(world.parts, trained, rule).play(asked, SamplingParams(temperature=0.0, max_new=12))
    served = dspark(folder, rule=rule)
    engine = make_engine(world.folder, dspark=served)
    groups = engine.generate([ask(str(i), ids, max_new=12) for i, (_, ids) in enumerate(asked)])
    assert [g.samples[0].ids.tolist() for g in groups] == [text.tolist() for text in log.texts["d"]]
    ours, theirs = log.stats["d"], engine.draft_report()
    emitted, plain, steps, accepted = (theirs.total(n) for n in ("emitted", "plain_steps", "steps", "accepted"))
    assert accepted > 0 and emitted + plain == ours.emitted == 3 * 11
    # The engine makes no drafts for a sample's last token: a round's, kept or not, count here alone.
    assert steps + plain == ours.steps
    assert 0 <= ours.accepted - accepted <= 3
    assert theirs.figures()["accept_length"] == emitted / steps and theirs.drafts == 4


def test_calibration_helps_on_rounds_it_has_not_seen_and_is_drawn(world, trained, tmp_path):
    params = SamplingParams(temperature=1.0, max_new=16, ignore_eos=True)
    with torch.no_grad():
        trained.confidence_head.weight.mul_(5.0)
        trained.confidence_head.bias.add_(3.0)
    rounds = FullWindowRounds(world.parts, trained)
    result = calibrate(rounds.play(prompts(20), params), rounds.play(prompts(20, seed=1), params, seed=1))
    before, after = result.raw.calibration_error(), result.scaled.calibration_error()
    assert np.nanmean(after) < np.nanmean(before)
    stored = result.stored("toy", "rejection", 1.0)
    assert stored.ece_after == pytest.approx(np.nanmean(after)) and len(stored.temperatures) == 4
    draw_reliability(result.raw, result.scaled, tmp_path / "reliability.png")
    assert (tmp_path / "reliability.png").read_bytes()[:4] == b"\x89PNG"


def test_case_l3_counters_become_the_published_figures():
    stats = DraftStats(4)
    stats.observe([4] * 4, [4] * 4, [4, 2, 0, 1], [5, 3, 1, 2])
    report = report_of_statistics({"d": stats}, rule="rejection", temperature=1.0).overall
    assert report.accept_length == 11 / 4 and report.accepted == 7 / 4 and report.tokens == 11
    assert report.survival == [3 / 4, 2 / 4, 1 / 4, 1 / 4] and report.conditional == [3 / 4, 2 / 3, 1 / 2, 1.0]
    assert report.verify_rate == 11 / 20
    assert json.loads(json.dumps(report_of_statistics({"d": stats}, rule="r", temperature=1.0).metrics()))


def test_repetition_counts_what_was_said_before():
    assert repetition_rate([np.array([1, 2, 1, 2, 1, 2])], n=2) == 3 / 5
    assert repetition_rate([np.arange(9)]) == 0.0 and repetition_rate([np.arange(3)]) is None


def test_drafts_after_a_drafted_end_have_no_label():
    log = RoundLog(4, chances=[[1.0, 0.5, 0.9, 0.9], [1.0, 0.0]], verified=[2, 4])
    np.testing.assert_array_equal(log.labels(), [[1.0, 0.5, np.nan, np.nan], [1.0, 0.0, 0.0, 0.0]])


def test_samples_end_with_what_stops_them(world, trained):
    ids = prompt(12)
    (third,) = reference_greedy(world.folder, ids, 3)[2:]
    params = SamplingParams(temperature=0.0, max_new=10, stop_ids=[third])
    log = FullWindowRounds(world.parts, trained).play([("d", ids)], params)
    said = log.texts["d"][0].tolist()
    assert said == reference_greedy(world.folder, ids, 10)[: said.index(third) + 1]


def test_logs_add_up():
    one, two = RoundLog(2), RoundLog(2)
    for log, domain in ((one, "a"), (two, "a")):
        log.stats[domain] = DraftStats(2)
        log.stats[domain].observe([2], [2], [1], [2])
        log.chances.append([0.5, 0.25])
        log.verified.append(2)
    one.add(two)
    assert one.stats["a"].steps == 2 and one.labels().tolist() == [[0.5, 0.125]] * 2
