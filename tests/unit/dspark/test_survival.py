"""Delays, priors and switches."""

import numpy as np
import pytest

from engine.dspark.kinds import Kinds
from engine.dspark.survival import AcceptanceEstimate, DraftSwitch, DriftAlarm, LaggedSurvivals, carried_on


def test_confidences_are_seen_two_steps_later_and_by_their_own_request():
    past = LaggedSurvivals(lag=2)
    for step in range(4):
        past.note(step, ["a"] if step != 1 else ["a", "b"], np.full((1 if step != 1 else 2, 2), step + 0.5))
    for step, expected in ((1, [9, 9, 9]), (2, [9, 0.5, 9]), (3, [1.5, 1.5, 9]), (5, [1.5, 3.5, 9])):
        found = np.full((3, 2), 9.0)
        missing = past.known(step, ["b", "a", "c"], found)
        assert found.tolist() == [[value, value] for value in expected]
        assert missing == [row for row, value in enumerate(expected) if value == 9]


def test_old_confidences_are_forgotten():
    past = LaggedSurvivals(lag=2)
    past.note(0, ["a"], np.ones((1, 1)))
    into = np.zeros((1, 1))
    assert past.known(25, ["a"], into) == [] and past.known(28, ["a"], into) == [0]
    past.note(100, ["b"], np.ones((1, 1)))
    assert past.known(102, ["a"], into) == [0]


def test_short_blocks_speak_for_longer_ones():
    carried = carried_on(np.array([[0.9, 0.5, 0.1], [0.9, 0.64, 0.3], [0.0, 0.7, 0.7]]), np.array([3, 2, 1]))
    np.testing.assert_allclose(carried, [[0.9, 0.5, 0.1], [0.9, 0.64, 0.512], [0.0, 0.0, 0.0]], atol=1e-12)


def tell(estimate, group, request, chances, policy=None, kind=None):
    """What one row of one step was found to keep."""
    estimate.observe_kinds(Kinds.of([(policy, kind)]), np.array([chances]))
    estimate.observe(group, request, chances)


def asked(estimate, group, request, policy=None, kind=None):
    return estimate.survivals([group], [request], Kinds.of([(policy, kind)]))[0]


def test_estimates_settle_on_what_is_seen():
    estimate = AcceptanceEstimate(2, start=0.7, fade=1.0, leaning=2.0)
    assert asked(estimate, "g", 1) == pytest.approx([0.7, 0.49])
    for _ in range(400):
        tell(estimate, "g", 1, [0.9, 0.5])
    assert asked(estimate, "g", 1) == pytest.approx([0.9, 0.45], abs=0.01)


def test_what_is_found_of_some_drafts_is_expected_of_later_ones():
    """Of all requests the third draft is kept half as often as the first. A kind that is found better at two is asked
    for the third, until that is found worse. A single request that is lucky is not."""
    estimate = AcceptanceEstimate(3, fade=1.0, fade_wide=1.0)
    odds = np.array([3.0, 2.0, 1.0])
    estimate.observe_kinds(Kinds.of([("", "all")]), (odds / (1 + odds))[None], weight=1e6)
    better = np.append(3 * odds[:2] / (1 + 3 * odds[:2]), np.nan)
    estimate.observe_kinds(Kinds.of([("", "kind")]), better[None], weight=400)
    estimate.observe("g", 1, better[:2].tolist())
    for group in ("new", "g"):
        chances = asked(estimate, group, 1 if group == "g" else "new", "", "kind")
        assert chances[2] / chances[1] == pytest.approx(3 / 4, abs=0.01), "three times the odds here too"
    estimate.observe_kinds(Kinds.of([("", "kind")]), np.array([[0.9, 0.86, 0.2]]), weight=4000)
    chances = asked(estimate, "new", "new", "", "kind")
    assert chances[2] / chances[1] == pytest.approx(0.2, abs=0.01)


def test_what_is_left_of_the_first_outcomes_is_left_once_of_each_mean():
    """All, their policy and their kind begin with the same sums."""
    estimate = AcceptanceEstimate(1, start=0.5, leaning=8.0)
    estimate.observe_kinds(Kinds.of([("", "kind")]), np.array([[1.0]]), weight=80.0)
    estimate.renew(0.1)
    mean = 0.5
    for _ in range(3):
        mean = (8.0 + 8.0 * mean) / 16.0
    assert asked(estimate, "new", "new", "", "kind")[0] == pytest.approx(mean)


def test_what_the_only_request_of_a_group_showed_counts_once():
    alone, twice = AcceptanceEstimate(1), AcceptanceEstimate(1)
    for _ in range(4):
        alone.observe(None, 1, [1.0])
        twice.observe("g", 1, [1.0])
    assert 0.7 < asked(alone, "g", 1)[0] < asked(twice, "g", 1)[0]
    assert asked(alone, "g", 2)[0] == pytest.approx(0.7)


def test_what_a_request_showed_is_forgotten_while_its_text_goes_on_without_drafts():
    estimate = AcceptanceEstimate(1)
    estimate.observe_kinds(Kinds.of([("", "kind")]), np.array([[0.9]]), weight=1e6)
    for _ in range(200):
        estimate.observe("g", 1, [0.0])
    assert (before := asked(estimate, "g", 1, "", "kind")[0]) < 0.3
    estimate.passed(60)
    assert before < (later := asked(estimate, "g", 1, "", "kind")[0]) < 0.7
    estimate.passed(400)
    assert asked(estimate, "g", 1, "", "kind")[0] == pytest.approx(0.9, abs=0.01)
    estimate.observe("g", 1, [0.0])
    assert later < asked(estimate, "g", 1, "", "kind")[0] < 0.85


def test_kinds_speak_of_all_rows_of_their_steps():
    """Many rows that keep everything, then a few stragglers that keep nothing: what begins next is none of those."""
    estimate = AcceptanceEstimate(1, leaning=8.0, fade_wide=0.99)
    estimate.observe_kinds(Kinds.of([(None, None)] * 100), np.ones((100, 1)), weight=2.0)
    for _ in range(10):
        estimate.observe_kinds(Kinds.of([(None, None)] * 3), np.array([[0.0], [0.0], [np.nan]]))
    assert float(asked(estimate, "new", "new")[0]) == pytest.approx(200 * 0.99**10 / (200 * 0.99**10 + 19.2), abs=0.01)


def test_new_requests_start_from_their_group_and_new_groups_from_all():
    estimate = AcceptanceEstimate(1, fade=1.0, leaning=2.0)
    for request in range(20):
        tell(estimate, "easy", f"e{request}", [1.0])
        tell(estimate, "hard", f"h{request}", [0.0])
    easy, hard, new = (float(asked(estimate, g, "new")[0]) for g in ("easy", "hard", "other"))
    assert easy > 0.9 and hard < 0.1 and 0.4 < new < 0.6
    estimate.forget_group("easy")
    assert float(asked(estimate, "easy", "new")[0]) == new
    before = float(asked(estimate, "hard", "h1")[0])
    estimate.forget_request("h1")
    assert float(asked(estimate, "hard", "h1")[0]) > before


def test_a_new_group_starts_from_its_kind_within_its_policy():
    estimate = AcceptanceEstimate(1, fade=1.0, leaning=2.0)
    for number in range(40):
        tell(estimate, f"e{number}", f"e{number}", [1.0], "near", kind="code")
        tell(estimate, f"h{number}", f"h{number}", [0.0], "near", kind="prose")
    code, prose, unnamed, foreign = (
        float(asked(estimate, "new", "new", policy, kind)[0])
        for policy, kind in (("near", "code"), ("near", "prose"), ("near", None), ("far", "code"))
    )
    assert code > 0.9 and prose < 0.1 and 0.4 < unnamed < 0.6 and 0.4 < foreign < 0.6
    for number in range(2_000):
        tell(estimate, "g", "g", [1.0], "near", kind=number)
    assert float(asked(estimate, "new", "new", "near", "prose")[0]) > 0.4, "of so many only the last are kept"
    assert len(estimate._wide) < 1_200


def test_fading_follows_a_change():
    estimate = AcceptanceEstimate(1, fade=0.9, leaning=8.0, fade_wide=0.95)
    for outcome in [1.0] * 100 + [0.0] * 60:
        tell(estimate, "g", 1, [outcome])
    assert float(asked(estimate, "g", 1)[0]) < 0.1


def test_a_new_drafter_starts_from_the_old_one_and_outweighs_it_soon():
    estimate = AcceptanceEstimate(1, leaning=8.0)
    for _ in range(200):
        tell(estimate, "g", 1, [0.0])
    estimate.renew(0.1)
    assert float(asked(estimate, "g", 1)[0]) < 0.2
    for _ in range(40):
        tell(estimate, "g", 1, [1.0])
    assert float(asked(estimate, "g", 1)[0]) > 0.7


def test_the_alarm_sounds_on_lost_drafts_and_not_on_noise():
    rng = np.random.default_rng(0)
    honest = DriftAlarm()
    assert not any(honest.observe(40 * 0.7, int(rng.binomial(40, 0.7)), 40, 1.0) for _ in range(2000))
    drifted = DriftAlarm()
    sounded = [drifted.observe(40 * 0.7, int(rng.binomial(40, 0.5)), 40, 1.0) for _ in range(40)]
    assert any(sounded) and sounded.index(True) > 3


def test_promises_that_are_too_high_of_drafts_that_pay_switch_nothing_off():
    """Twenty tokens of ten rows a step, as predictions had it of thirty: plain steps would have brought fifteen. When
    they would bring more than twenty, the alarm sounds, whatever was gained before."""
    paying = DriftAlarm()
    assert not any(paying.observe(30.0, 20, 40, 15.0 - 20.0) for _ in range(200))
    assert any(paying.observe(30.0, 20, 40, 25.0 - 20.0) for _ in range(20))
    quiet = DriftAlarm()
    assert not any(quiet.observe(20.0, 20, 40, 25.0 - 20.0) for _ in range(200)), "what was predicted came"


def test_the_switch_follows_load_and_drift():
    switch = DraftSwitch(max_rows=8, cooldown=10, alarm=DriftAlarm(threshold=5.0, slack=0.0))
    assert switch.allows(0, 8) and not switch.allows(0, 9)
    switch.observe(3, predicted=6.0, accepted=0, verified=10, lost=1.0)
    assert [switch.allows(step, 1) for step in (4, 12, 13)] == [False, False, True]
    switch.observe(20, predicted=6.0, accepted=0, verified=10, lost=1.0)
    assert not switch.allows(39, 1) and switch.allows(40, 1)
    switch.observe(50, predicted=6.0, accepted=0, verified=10, lost=1.0)
    switch.renew()
    assert switch.allows(51, 1)
