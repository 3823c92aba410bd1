"""When bursts stop for a planned step."""

from engine.dspark.alternation import Alternation


def steps_until_asked(alternation, burst=8):
    steps = 0
    while not alternation.asks:
        alternation.passed(burst)
        steps += burst
    return steps


def test_the_first_step_is_planned_and_a_round_that_paid_is_followed_by_another():
    alternation = Alternation(64)
    assert alternation.asks
    alternation.answered(drafting=True, probe=False, found=True)
    assert alternation.asks


def test_where_asking_is_free_every_burst_is_asked_about():
    alternation = Alternation(64, free=True)
    alternation.answered(drafting=False, probe=False, found=True)
    assert alternation.asks


def test_while_the_answer_is_no_it_is_asked_ever_more_rarely():
    alternation, waits = Alternation(64), []
    for _ in range(7):
        alternation.answered(drafting=False, probe=False, found=True)
        waits.append(steps_until_asked(alternation))
    assert waits == [64, 128, 256, 512, 1024, 1024, 1024]
    alternation.answered(drafting=True, probe=True, found=True)
    assert alternation.asks, "what a probe taught decides at once"
    alternation.answered(drafting=False, probe=False, found=True)
    assert steps_until_asked(alternation) == 1024, "a probe alone is no sign that it pays"
    alternation.answered(drafting=True, probe=False, found=True)
    alternation.answered(drafting=False, probe=False, found=True)
    assert steps_until_asked(alternation) == 64


def test_a_hint_ends_waiting_only_where_there_was_nothing_to_draft():
    alternation = Alternation(64)
    alternation.answered(drafting=False, probe=False, found=True)
    alternation.hint()
    assert not alternation.asks and not alternation.wants_hints
    steps_until_asked(alternation)
    alternation.answered(drafting=False, probe=False, found=False)
    assert alternation.wants_hints and not alternation.asks
    alternation.hint()
    assert alternation.asks


def test_rows_at_their_ends_do_not_end_drafting():
    alternation = Alternation(probe_every=64)
    alternation.had_no_room()
    assert not alternation.asks
    alternation.passed(8)
    assert alternation.asks and not alternation.wants_hints
