"""What confidences are worth by kind of request."""

import numpy as np
import pytest

from engine.dspark.kinds import Kinds
from engine.dspark.promises import Promises


def test_each_kind_keeps_its_own_share_of_what_was_promised():
    rng, promises = np.random.default_rng(0), Promises(3)
    kept = {"hot": np.array([0.5, 0.2, 0.05]), "cold": np.array([0.9, 0.8, 0.7])}
    promised = np.array([0.7, 0.5, 0.35])
    for _ in range(60):
        kinds = rng.choice(["hot", "cold"], 16).tolist()
        labels = np.array([rng.random() < kept[kind] for kind in kinds], dtype=float)
        promises.observe(Kinds.of(kinds), np.tile(promised, (16, 1)), labels)
    hot, cold, new = promises.kept(Kinds.of(["hot", "cold", "new"]))
    assert promised * hot == pytest.approx(kept["hot"], abs=0.06)
    assert promised * cold == pytest.approx(kept["cold"], abs=0.06)
    assert new == pytest.approx(1.0)


def test_drafts_that_were_never_verified_lean_on_those_before():
    promises, nothing = Promises(4), np.full((50, 2), np.nan)
    labels = np.concatenate((np.tile([1.0, 0.0], (50, 1)), nothing), axis=1)
    promises.observe(Kinds.of(["kind"] * 50), np.full((50, 4), 0.5), labels)
    (ratios,) = promises.kept(Kinds.of(["kind"]))
    assert ratios[0] == pytest.approx(2.0, rel=0.15) and ratios[1] < 0.3
    assert np.all(ratios[2:] == ratios[1])


def test_what_was_learnt_of_another_drafter_is_soon_outweighed():
    promises = Promises(1)
    promises.observe(Kinds.of(["kind"] * 400), np.full((400, 1), 0.8), np.zeros((400, 1)))
    promises.renew(0.1)
    assert promises.kept(Kinds.of(["kind"]))[0, 0] < 0.2, "until more is known"
    promises.observe(Kinds.of(["kind"] * 400), np.full((400, 1), 0.8), np.full((400, 1), 0.8))
    assert promises.kept(Kinds.of(["kind"]))[0, 0] == pytest.approx(1.0, abs=0.1)
    assert promises.kept(Kinds.of([])).shape == (0, 1)


def test_kinds_that_nobody_ends_are_bounded():
    promises = Promises(1)
    for number in range(3000):
        promises.observe(Kinds.of([number]), np.ones((1, 1)), np.zeros((1, 1)))
    assert len(promises._sums) == 1024 and promises.kept(Kinds.of([0, 2999]))[0, 0] == 1.0
