"""When a start reaches its steady throughput."""

from __future__ import annotations

import pytest

from benchmarks.startup_child import WINDOW_S, steady_from


def marks(rates: list[tuple[float, float]], step: float = 0.1) -> list[tuple[float, int]]:
    """Marks every `step` seconds of a run that commits at each rate for so many seconds."""
    now, tokens, made = 0.0, 0.0, []
    for seconds, rate in rates:
        for _ in range(round(seconds / step)):
            now, tokens = now + step, tokens + rate * step
            made.append((now, round(tokens)))
    return made


def test_a_slow_beginning_is_not_yet_steady() -> None:
    steady, reached = steady_from(marks([(3.0, 0), (2.0, 500), (6.0, 1000)]), batch=10)
    assert steady == pytest.approx(1000, rel=0.02)
    assert 5.0 + 0.8 * WINDOW_S - 0.11 <= reached <= 5.0 + WINDOW_S + 0.11


def test_pauses_late_in_a_run_do_not_move_the_steady_rate() -> None:
    steady, reached = steady_from(marks([(1.0, 1000), (0.3, 0), (4.0, 1000), (0.3, 0), (4.0, 1000)]), batch=10)
    assert steady == pytest.approx(1000, rel=0.02) and reached <= 1.0


def test_a_run_of_one_step() -> None:
    assert steady_from([(1.0, 5)], batch=5) == (0.0, 1.0)
