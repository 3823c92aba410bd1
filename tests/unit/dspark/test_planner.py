"""Budgets and windows against exhaustive search, and the rules that keep verification exact."""

import itertools
from functools import lru_cache

import numpy as np
import pytest
import torch

from engine.dspark.cost_model import StepShape
from engine.dspark.planner import Outlook, Planner, StepPlan, drafted, spend, windows
from engine.dspark.survival import LaggedSurvivals
from tests.unit.dspark.test_acceptance import LEAST_P, p_value, p_value_or_zero
from tests.unit.dspark.toy import Play, Tables, enumerate_exact, row_of


class TableCost:
    """Seconds by verify rows, plus `draft` seconds for drafting; those of even windows are `even`."""

    def __init__(self, seconds, draft=0.0, even=None):
        self.seconds, self.draft, self.even = seconds, draft, even

    least_extra = 0.0

    def predict(self, shapes):
        return np.array([self.seconds[shape.tier] + self.draft * shape.drafting * shape.share for shape in shapes])

    def weights(self, rows, tiers, shares, even=False):
        return np.stack(np.broadcast_arrays(tiers, shares, even), axis=1)

    def times(self, weights, tokens_read, context_queries):
        self.queries = context_queries
        tables = [self.even if even else self.seconds for *_, even in weights]
        return np.array(
            [table[int(tier)] + self.draft * share for table, (tier, share, _) in zip(tables, weights, strict=True)]
        )


def outlook(survival, least=0, most=None, context=100):
    survival = np.atleast_2d(np.asarray(survival, dtype=float))
    rows, drafts = survival.shape
    return Outlook(
        survival,
        np.full(rows, least) if np.isscalar(least) else np.array(least),
        np.full(rows, drafts) if most is None else np.array(most),
        np.full(rows, context),
        float(rows * context),
    )


def random_survivals(rng, rows, drafts):
    return np.cumprod(rng.uniform(0.2, 1.0, (rows, drafts)), axis=1)


def best_rate(view, tiers, cost):
    """Over all windows of all requests, with and without drafting."""
    rows = len(view.survival_BG)

    def seconds(tier, drafting):
        return float(cost.predict([StepShape(rows, tier, drafting)])[0])

    best = rows / seconds(min(t for t in tiers if t >= rows), False)
    ranges = [range(int(lo), int(hi) + 1) for lo, hi in zip(view.least_B, view.most_B, strict=True)]
    for lens in itertools.product(*ranges):
        total = rows + sum(lens)
        if total == rows or total > max(tiers):
            continue
        tokens = rows + sum(view.survival_BG[r, :n].sum() for r, n in enumerate(lens))
        best = max(best, tokens / seconds(min(t for t in tiers if t >= total), True))
    return best


def test_budgets_reach_the_best_rate_there_is():
    rng = np.random.default_rng(0)
    drafting = 0
    for trial in range(60):
        rows, drafts = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        tiers = sorted(set(rng.integers(rows, rows * (1 + drafts) + 2, 4).tolist()) | {rows})
        cost = TableCost(dict(zip(tiers, np.sort(rng.uniform(0.5, 2.0, len(tiers))), strict=True)), rng.uniform(0, 0.3))
        most = rng.integers(0, drafts + 1, rows)
        view = outlook(random_survivals(rng, rows, drafts), np.minimum(trial % 2, most), most)
        choice = Planner(cost, tiers, hysteresis=0.0).choose(view)
        assert choice.tokens / choice.seconds == pytest.approx(best_rate(view, tiers, cost))
        assert choice.budget <= choice.tier - rows
        drafting += choice.drafting
    assert 10 < drafting < 60


def test_a_dip_past_a_step_does_not_hide_what_comes_after():
    """Stopping at the first decrease would verify nothing; the best is further on."""
    cost = TableCost({1: 1.0, 2: 2.0, 4: 2.05, 8: 2.1})
    choice = Planner(cost, [1, 2, 4, 8]).choose(outlook([0.99, 0.98, 0.97, 0.96, 0.95, 0.94, 0.93]))
    assert (choice.drafting, choice.tier, choice.budget) == (True, 8, 7)


def test_padding_is_filled_with_drafts():
    cost = TableCost({2: 1.0, 6: 1.1})
    choice = Planner(cost, [2, 6]).choose(outlook([[0.9, 0.8, 0.1], [0.2, 0.1, 0.05]]))
    assert (choice.tier, choice.budget) == (6, 4)


def test_a_saturated_step_is_not_drafted_for_and_probes_bring_drafting_back():
    cost = TableCost({rows: 0.1 * rows for rows in range(1, 30)}, draft=0.5)
    planner = Planner(cost, None, probe_every=5)
    view = outlook(np.full((4, 3), 0.4))
    taken = [planner.choose(view) for _ in range(17)]
    assert [c.probe for c in taken] == [False] * 5 + [True] + [False] * 10 + [True], "ever more rarely"
    assert [c.drafting for c in taken] == [c.probe for c in taken]
    steps, cost.draft, cost.seconds = cost.seconds, 0.0, {rows: 1.0 for rows in range(1, 30)}
    assert planner.choose(view).drafting
    cost.draft, cost.seconds = 0.5, steps
    assert not planner.choose(view).drafting
    planner.passed(4)
    assert planner.choose(view).probe, "it has paid since, and steps count that nobody asked about"


def test_a_new_drafter_is_tried_at_once():
    cost = TableCost({rows: 0.1 * rows for rows in range(1, 30)}, draft=0.5)
    planner, view = Planner(cost, None, probe_every=5), outlook(np.full((4, 3), 0.4))
    assert not planner.choose(view).drafting
    planner.renew()
    assert planner.choose(view).probe and not planner.choose(view).drafting


def test_no_round_is_thought_quicker_than_a_plain_step_and_what_drafting_costs_one_row():
    """A fit that is absurd of what nobody measured promises a round in no time."""
    cost = TableCost({2: 1.0, 4: 0.01, 8: 0.01})
    cost.least_extra = 0.5
    choice = Planner(cost, [2, 4, 8]).choose(outlook([[0.9, 0.8, 0.1], [0.2, 0.1, 0.05]]))
    assert choice.drafting and choice.seconds == 1.5
    assert choice.price == pytest.approx(2 * 0.5 / choice.budget), "half a step more, of two rows"


def test_an_off_switch_leaves_plain_steps_and_probes():
    planner = Planner(TableCost({rows: 1.0 for rows in range(1, 30)}), None, probe_every=3)
    taken = [planner.choose(outlook(np.full((2, 3), 0.9)), allowed=False) for _ in range(4)]
    assert [c.drafting for c in taken] == [False, False, False, True] and taken[-1].probe


def test_choices_are_kept_within_the_hysteresis():
    cost = TableCost({1: 1.0, 2: 1.0, 3: 1.0})
    planner = Planner(cost, [1, 2, 3], hysteresis=0.1)
    assert planner.choose(outlook([0.5, 0.01])).tier == 3
    cost.seconds = {1: 1.0, 2: 1.0, 3: 1.05}
    assert planner.choose(outlook([0.5, 0.01])).tier == 3
    cost.seconds = {1: 1.0, 2: 1.0, 3: 1.5}
    assert planner.choose(outlook([0.5, 0.01])).tier == 2


def slow_spend(survival, least, most, budget):
    """One at a time, the highest first; ties by position, then request."""
    rows = len(survival)
    running = np.minimum.accumulate(np.nan_to_num(survival), axis=1)
    lens = [0] * rows
    for _ in range(budget):
        open_rows = [r for r in range(rows) if lens[r] < most[r]]
        if not open_rows:
            break
        ranks = [(-(2.0 if lens[r] < least[r] else running[r, lens[r]]), lens[r], r) for r in open_rows]
        lens[min(ranks)[2]] += 1
    return lens


def test_spending_equals_admission_one_by_one():
    rng = np.random.default_rng(1)
    for trial in range(200):
        rows, drafts = int(rng.integers(1, 6)), int(rng.integers(1, 6))
        survival = rng.choice([0.2, 0.5, 0.5, 0.9, 1.0], (rows, drafts)).astype(np.float32)
        survival = np.cumprod(survival, axis=1) if trial % 3 else survival
        if trial % 7 == 0:
            survival[0, 0] = np.nan
        most = rng.integers(0, drafts + 1, rows)
        least = np.minimum(rng.integers(0, 2, rows), most)
        budget = int(rng.integers(0, rows * drafts + 2))
        lens = spend(torch.tensor(survival), torch.tensor(least), torch.tensor(most), budget)
        assert lens.tolist() == slow_spend(survival, least, most, budget)
        on_device = spend(torch.tensor(survival), torch.tensor(least), torch.tensor(most), torch.tensor(budget))
        assert torch.equal(lens, on_device)


def test_admission_of_a_draft_ignores_everything_after_it():
    rng = np.random.default_rng(2)
    for _ in range(100):
        survival = random_survivals(rng, 3, 4).astype(np.float32)
        budget, row, place = int(rng.integers(0, 12)), int(rng.integers(3)), int(rng.integers(4))
        least, most = torch.zeros(3, dtype=torch.int64), torch.full((3,), 4)
        before = int(spend(torch.tensor(survival), least, most, budget)[row]) > place
        changed = survival.copy()
        changed[row, place + 1 :] = rng.uniform(0, 1, 3 - place)
        after = int(spend(torch.tensor(changed), least, most, budget)[row]) > place
        assert before == after


def test_windows_end_where_lengths_and_contexts_do():
    remaining, anchors = np.array([100, 3, 1, 100, 100]), np.array([10, 10, 10, 252, 120])
    assert windows(7, remaining, anchors, 256, 128, 7).tolist() == [7, 2, 0, 0, 7]
    assert windows(7, np.full(3, 100), np.array([252, 253, 254]), 256, 512, 7).tolist() == [2, 1, 0]


def test_a_plan_travels_whole():
    plan = StepPlan(step=9, slots=[4, 1, 7], drafting=True, budget=5, tier=8, lens=[])
    spent = StepPlan.decode(plan.encode()).spent([3, 0, 2])
    assert StepPlan.decode(spent.encode()) == spent and spent.lens == [3, 0, 2]
    with pytest.raises(AssertionError, match="over 5"):
        plan.spent([3, 3, 0])


class TestCausality:
    """The paper's example: steps per second 1, .5, .45; p = (.7, .3), q = (.5, .5); the second confidence
    reads the first draft."""

    COUNT = 1200

    def play(self, lens):
        tables = Tables(vocab=3)
        tables.target[:] = torch.tensor([0.7, 0.3, 0.0]).log()
        tables.drafter[:] = torch.tensor([0.5, 0.5, 0.0]).log()
        play = Play(tables, lens=lens, block=2, count=self.COUNT)
        return play.run(3), enumerate_exact(tables, row_of().params, 3)

    @staticmethod
    @lru_cache
    def budget(survival):
        planner = Planner(TableCost({1: 1.0, 2: 1 / 0.5, 3: 1 / 0.45}), [1, 2, 3], hysteresis=0.0)
        choice = planner.choose(outlook(survival))
        return choice.budget if choice.drafting else 0

    @staticmethod
    @lru_cache
    def spent(survival, budget):
        none, most = torch.zeros(1, dtype=torch.int64), torch.full((1,), 2)
        return int(spend(torch.tensor([survival]), none, most, budget)[0])

    @staticmethod
    def survivals(drafts):
        return [(0.8, 0.8 if ids[0] == 0 else 0.0) for ids in drafts]

    def test_budgets_from_this_steps_confidences_leak(self):
        sequences, expected = self.play(
            lambda number, drafts, lengths: [self.budget(s) for s in self.survivals(drafts)]
        )
        assert abs((sequences[:, 0] == 0).mean() - 0.85) < 0.03
        assert p_value_or_zero(sequences, expected) < 1e-6

    def test_budgets_from_two_steps_ago_do_not(self):
        past = [LaggedSurvivals() for _ in range(self.COUNT)]
        windows_seen = set()

        def lens(number, drafts, lengths):
            fresh, out = self.survivals(drafts), []
            for copy, survival in enumerate(fresh):
                known = np.array([[0.8, 0.6]])
                past[copy].known(number, ["r"], known)
                budget = self.budget(tuple(known[0]))
                past[copy].note(number, ["r"], np.array([survival]))
                out.append(self.spent(survival, budget))
            windows_seen.update(out)
            return out

        sequences, expected = self.play(lens)
        assert p_value(sequences, expected) > LEAST_P
        assert windows_seen == {0, 2}


def test_blocks_by_request_are_made_where_drafts_are_verified():
    """Two requests of which one is hardly worth a draft: it gets none, and the draft costs half."""
    cost = TableCost({rows: 1.0 + 0.1 * rows for rows in range(1, 12)}, draft=1.0)
    view = outlook([[0.9, 0.8, 0.7, 0.6], [0.05, 0.01, 0.0, 0.0]], most=[4, 4])
    whole = Planner(cost, None).choose(view)
    ragged = Planner(cost, None, ragged=True).choose(view)
    assert (whole.budget, whole.slots) == (4, 8) and (ragged.budget, ragged.slots) == (4, 5)
    assert ragged.seconds < whole.seconds and ragged.tokens == whole.tokens
    # What the graph has room for is made.
    assert Planner(cost, None, ragged=True, draft_tiers=[2, 6, 8]).choose(view).slots == 6
    assert drafted(view, 4).tolist() == [4, 0] and drafted(view, 8).tolist() == [4, 4]
    assert drafted(outlook([[0.9, 0.8], [0.5, 0.4]], least=[0, 1], most=[1, 2]), 2).tolist() == [1, 1]
