"""Which graphs planners choose among, and which are worth making."""

import pytest

from engine.dspark.planner import Planner
from tests.unit.dspark.test_planner import TableCost, outlook


class HeldGraphs:
    """Graphs that there are, and what one more costs."""

    def __init__(self, capture_seconds, held, windows=()):
        self.capture_seconds, self.held, self.windows = capture_seconds, held, windows

    @property
    def changes(self):
        return len(self.held)

    def row_tier(self, rows):
        return rows

    def ready(self, rows):
        return [(rows, *pair, 0) for pair in self.held] + [(rows, rows * (1 + w), 0, w) for w in self.windows]


def test_a_graph_is_made_once_doing_without_it_has_cost_as_much():
    cost, view = TableCost({2: 1.0, 4: 1.1, 6: 1.2, 8: 2.0}), outlook([[0.9, 0.8, 0.7], [0.9, 0.8, 0.7]])
    best = Planner(cost, [2, 4, 6, 8]).choose(view)
    assert best.tier == 6 and best.capture
    graphs = HeldGraphs(1.0, [(4, 0), (8, 0)])
    planner = Planner(cost, [2, 4, 6, 8], graphs=graphs)
    first = planner.choose(view)
    assert (first.tier, first.budget, first.capture) == (4, 2, False)
    lost = first.seconds * (1.0 - first.rate / best.rate)
    taken = [first, *(planner.choose(view) for _ in range(int(1.0 / lost)))]
    assert [choice.tier for choice in taken] == [4] * (len(taken) - 1) + [6] and taken[-1].capture
    launched = Planner(cost, [2, 4, 6, 8], graphs=graphs)
    assert launched.choose(view).tier == 4
    launched.passed(int(1.0 / lost))
    assert launched.choose(view).tier == 6, "steps of a launch lose as much each"
    # One that makes more of what another makes is not asked what it takes.
    optimist = TableCost({2: 1.0, 4: 1.1, 6: 1.2, 8: 0.1})
    ready = HeldGraphs(9.0, [(6, 4), (8, 4), (4, 2)])
    chosen = Planner(optimist, [2, 4, 6], ragged=True, draft_tiers=[2, 4, 6], graphs=ready).choose(view)
    assert (chosen.tier, chosen.budget) == (6, 4)
    # It is there now. What is hardly better than what is there is never made, and a probe makes none.
    graphs.held.append((6, 0))
    assert [planner.choose(view).tier for _ in range(50)] == [6] * 50
    dear = Planner(TableCost({2: 1.0, 4: 5.0, 6: 5.0}), [2, 4, 6], graphs=HeldGraphs(0.1, [(4, 0)]), probe_every=3)
    assert [(c.drafting, c.tier) for c in (dear.choose(view) for _ in range(4))] == [(False, 2)] * 3 + [(True, 4)]


def test_without_any_graph_the_best_is_made_at_once():
    view = outlook([[0.9, 0.8, 0.7]])
    choice = Planner(TableCost({1: 1.0, 2: 1.0, 4: 1.0}), [1, 2, 4], graphs=HeldGraphs(9.0, [])).choose(view)
    assert (choice.tier, choice.capture) == (4, True)
    # A graph with room for fewer drafts than its verify rows is filled as far as they go.
    made = Planner(TableCost({4: 1.0}), [4], ragged=True, draft_tiers=[2, 3], graphs=HeldGraphs(9.0, [(4, 2)]))
    assert (made.choose(view).budget, made.choose(view).slots) == (2, 2)


def test_even_windows_are_taken_where_they_are_cheaper_than_what_drafts_differ_by():
    """One request is sure, the other is not: four drafts spent where they count, or two of each."""
    view = outlook([[0.9, 0.8, 0.7], [0.4, 0.1, 0.05]])
    seconds = {2: 1.0, 4: 1.2, 5: 1.25, 6: 1.3, 8: 1.5}

    def chosen(even, **fields):
        cost = TableCost(seconds, even=even)
        graphs = HeldGraphs(9.0, [(4, 4), (5, 5), (6, 6), (8, 6)], windows=(1, 2, 3))
        planner = Planner(cost, [2, 4, 5, 6, 8], ragged=True, draft_tiers=[4, 5, 6], graphs=graphs)
        return planner.choose(outlook(**fields) if fields else view), cost

    spent, _ = chosen({4: 1.2, 6: 1.3, 8: 1.5})
    assert (spent.window, spent.budget) == (0, 4) and spent.tokens == pytest.approx(2 + 0.9 + 0.8 + 0.7 + 0.4)
    even, cost = chosen({4: 1.2, 6: 0.9, 8: 1.5})
    assert (even.window, even.budget, even.tier, even.slots) == (2, 4, 6, 4)
    assert even.tokens == pytest.approx(2 + 0.9 + 0.8 + 0.4 + 0.1) and even.plan(1, [0, 1]).window == 2
    assert 2 * 100 + 4 * 100 in cost.queries.tolist(), "each of four drafts attends to its context"
    # Whose window is shorter drafts less of it; whoever asks for more drafts than it has rules it out.
    survival = view.survival_BG
    less, _ = chosen({4: 1.2, 6: 0.9, 8: 1.5}, survival=survival, most=[3, 1])
    assert (less.window, less.budget) == (2, 3) and less.tokens == pytest.approx(2 + 0.9 + 0.8 + 0.4)
    more, _ = chosen({4: 1.2, 6: 0.9, 8: 1.5}, survival=survival, least=[3, 0])
    assert more.window == 0 and more.budget >= 3


def test_an_even_window_that_is_not_there_is_made_as_any_other_graph():
    cost = TableCost({2: 1.0, 4: 1.2}, even={4: 0.5})

    class Wanted(HeldGraphs):
        def ready(self, rows):
            return [(rows, 4, 2, 0)]

    planner = Planner(cost, [2, 4], ragged=True, draft_tiers=[2], graphs=Wanted(1.0, [], windows=(1,)))
    taken = [planner.choose(outlook([[0.9], [0.8]])) for _ in range(8)]
    assert [choice.window for choice in taken[:2]] == [0, 0]
    assert any(choice.window == 1 and choice.capture for choice in taken)


def test_plain_steps_are_tried_again_where_they_are_nearly_as_good():
    view, sure = outlook([[0.5], [0.5]]), outlook([[0.9], [0.9]])
    near = Planner(TableCost({2: 1.0, 4: 1.45}), [2, 4], probe_every=4)
    kept = Planner(TableCost({2: 1.0, 4: 1.45}), [2, 4], probe_every=4)
    assert [near.choose(view).drafting for _ in range(10)] == [True] * 4 + [False] + [True] * 4 + [False]
    assert all(kept.choose(sure).drafting for _ in range(10)), "nobody asks where it is clear"
    launched = Planner(TableCost({2: 1.0, 4: 1.45}), [2, 4], probe_every=4)
    assert launched.choose(view).drafting
    launched.passed(3)
    assert not launched.choose(view).drafting, "steps of a launch count"


def test_what_windows_promise_is_reckoned_with_as_far_as_it_came():
    """Two thirds of what one window promised was kept: it is taken for nine tenths, and others at their word."""
    cost = TableCost({2: 1.0, 4: 1.4, 5: 1.4}, even={4: 1.38})
    planner = Planner(cost, [2, 4, 5], ragged=True, draft_tiers=[2, 4], graphs=HeldGraphs(9.0, [(4, 2)], windows=(1,)))
    view = outlook([[0.5], [0.5]])
    first = planner.choose(view)
    assert (first.window, first.tokens, first.promised) == (1, pytest.approx(3.0), pytest.approx(1.0))
    for _ in range(100):
        planner.came(first.window, 600.0, 400.0)
    second = planner.choose(view)
    assert (second.window, second.tokens) == (0, pytest.approx(3.0)), "what each row is given promised no more"
    planner.came(0, 60000.0, 20000.0)
    third = planner.choose(view)
    assert third.tokens == pytest.approx(2.9) and third.promised == pytest.approx(1.0), "no plan is told of twice"
    planner.passed(20000)
    assert planner.choose(view).tokens == pytest.approx(3.0, abs=0.01), "in time it is forgotten"
    planner.came(1, 600.0, 900.0)
    assert planner.choose(view).tokens == pytest.approx(3.0, abs=0.01), "nothing is made of more than was promised"
    planner.came(1, 60000.0, 400.0)
    planner.renew()
    assert planner.choose(view).tokens == pytest.approx(3.0, abs=0.01)


def test_a_window_of_all_is_none_where_a_request_must_have_more():
    view = outlook([[0.9, 0.8, 0.7]] * 4, least=[3, 0, 0, 0])
    seconds = {tier: 1.0 + 0.02 * tier for tier in range(4, 17)}

    class OnlyEven(HeldGraphs):
        def ready(self, rows):
            return [(rows, rows * (1 + window), 0, window) for window in self.windows]

    for held, allowed in (((1,), {0}), ((1, 3), {0, 3})):
        graphs = OnlyEven(9.0, [], windows=held)
        tiers = dict(ragged=True, draft_tiers=list(range(1, 13)), graphs=graphs, probe_every=2)
        planner = Planner(TableCost(seconds, even=seconds), list(range(4, 17)), **tiers)
        chosen = [planner.choose(view, allowed=turn < 4) for turn in range(8)]
        assert {choice.window for choice in chosen} <= allowed
