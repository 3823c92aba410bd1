"""What old confidences are worth."""

import numpy as np
import pytest

from engine.dspark.kinds import Kinds
from engine.dspark.persistence import Foresight, Persistence


def test_a_share_settles_on_the_slope_by_kind():
    rng, persistence = np.random.default_rng(0), Persistence()
    assert persistence.shares(Kinds.of(["new"])).tolist() == [1.0]
    for _ in range(60):
        old_B = 0.2 * rng.standard_normal(16)
        noise_B = 0.05 * rng.standard_normal(16)
        # A bias of all that drafters say is no sign of persistence.
        fresh_B = np.where(np.arange(16) < 8, 0.9 * old_B, 0.0) + noise_B + 0.1
        persistence.observe(Kinds.of(["same"] * 8 + ["other"] * 8), old_B, fresh_B)
    same, other = persistence.shares(Kinds.of(["same", "other"]))
    assert same == pytest.approx(0.9, abs=0.07) and other == pytest.approx(0.0, abs=0.07)
    persistence.observe(Kinds.of(["wild"] * 40), np.linspace(-0.5, 0.5, 40), 3.0 * np.linspace(-0.5, 0.5, 40))
    persistence.observe(Kinds.of(["against"] * 40), np.linspace(-0.5, 0.5, 40), np.linspace(0.5, -0.5, 40))
    assert persistence.shares(Kinds.of(["wild", "against"])).tolist() == [1.0, 0.0]


def test_one_request_alone_tells_over_time_and_a_change_is_followed():
    rng, persistence = np.random.default_rng(1), Persistence()
    for slope in (1.0, 0.0):
        for _ in range(2000):
            old_1 = 0.2 * rng.standard_normal(1)
            persistence.observe(Kinds.of(["k"]), old_1, slope * old_1)
        assert persistence.shares(Kinds.of(["k"]))[0] == pytest.approx(slope, abs=0.1)


def test_kinds_that_nobody_asks_for_any_more_make_room():
    persistence = Persistence()
    for kind in range(1500):
        persistence.observe(Kinds.of([kind]), np.array([0.5]), np.array([0.5]))
    assert len(persistence._moments) == 1024 and 1499 in persistence._moments


def _once(foresight, step, keys, prior_BG, sure_BG):
    """A step that is planned, and what its drafter says then."""
    said_BG = foresight.survivals(step, keys, Kinds.of(["k"] * len(keys)), prior_BG)
    foresight.note(step, keys, sure_BG)
    return said_BG


def test_old_confidences_are_drawn_towards_priors_as_far_as_they_did_not_hold():
    rng, keys = np.random.default_rng(2), list(range(16))
    prior_BG = np.tile([0.5, 0.3], (16, 1))
    for holds in (True, False):
        foresight, kept_B = Foresight(), rng.uniform(0.1, 0.9, 16)
        assert (foresight.survivals(0, keys, Kinds.of(["k"] * 16), prior_BG) == prior_BG).all(), "nothing is known"
        for step in range(1, 60):
            now_B = kept_B if holds else rng.uniform(0.1, 0.9, 16)
            _once(foresight, step, keys, prior_BG, np.stack((now_B, now_B / 2), axis=1))
        foresight.note(60, keys[:8], np.tile([0.9, 0.4], (8, 1)))
        said_BG = foresight.survivals(62, [*keys[:8], "new"], Kinds.of(["k"] * 9), prior_BG[:9])
        assert (said_BG[:8, 0] > 0.85).all() if holds else (abs(said_BG[:8, 0] - 0.5) < 0.1).all()
        assert (said_BG[8] == prior_BG[8]).all() and (np.diff(said_BG, axis=1) <= 0).all()
    foresight.note(63, ["a"], np.array([[np.nan, np.nan]]))
    assert np.isfinite(foresight._persistence.shares(Kinds.of(["k"]))).all()
