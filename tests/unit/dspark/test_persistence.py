"""What old confidences are worth."""

import numpy as np
import pytest

from engine.dspark.persistence import Persistence


def test_a_share_settles_on_the_slope_by_kind():
    rng, persistence = np.random.default_rng(0), Persistence()
    assert persistence.shares(["new"]).tolist() == [1.0]
    for _ in range(60):
        old_B = 0.2 * rng.standard_normal(16)
        noise_B = 0.05 * rng.standard_normal(16)
        # A bias of all that drafters say is no sign of persistence.
        fresh_B = np.where(np.arange(16) < 8, 0.9 * old_B, 0.0) + noise_B + 0.1
        persistence.observe(["same"] * 8 + ["other"] * 8, old_B, fresh_B)
    same, other = persistence.shares(["same", "other"])
    assert same == pytest.approx(0.9, abs=0.07) and other == pytest.approx(0.0, abs=0.07)
    persistence.observe(["wild"] * 40, np.linspace(-0.5, 0.5, 40), 3.0 * np.linspace(-0.5, 0.5, 40))
    persistence.observe(["against"] * 40, np.linspace(-0.5, 0.5, 40), np.linspace(0.5, -0.5, 40))
    assert persistence.shares(["wild", "against"]).tolist() == [1.0, 0.0]


def test_one_request_alone_tells_over_time_and_a_change_is_followed():
    rng, persistence = np.random.default_rng(1), Persistence()
    for slope in (1.0, 0.0):
        for _ in range(2000):
            old_1 = 0.2 * rng.standard_normal(1)
            persistence.observe(["k"], old_1, slope * old_1)
        assert persistence.shares(["k"])[0] == pytest.approx(slope, abs=0.1)


def test_kinds_that_nobody_asks_for_any_more_make_room():
    persistence = Persistence()
    for kind in range(1500):
        persistence.observe([kind], np.array([0.5]), np.array([0.5]))
    assert len(persistence._moments) == 1024 and 1499 in persistence._moments
