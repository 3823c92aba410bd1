"""Calibration: fits against known distortions, sums against slow definitions."""

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from engine.dspark.reliability import Reliability, expected_calibration_error
from engine.dspark.scaling import (
    GRID,
    OnlineScaling,
    StoredScaling,
    SurvivalScaling,
    fit_scaling,
    survival_labels,
)
from engine.errors import InvalidRequest

TRUE = np.array([2.0, 0.5, 4.0])


def rounds(count, seed=0, distortion=TRUE):
    """Logits that are `distortion` times too sharp, and the outcomes of whole windows."""
    rng = np.random.default_rng(seed)
    honest = rng.normal(1.0, 1.5, (count, 3))
    chances = 1 / (1 + np.exp(-honest))
    outcomes = np.cumprod(rng.random((count, 3)) < chances, axis=1)
    return honest * distortion, outcomes.astype(float), chances


def test_temperatures_undo_a_known_distortion():
    logits, labels, _ = rounds(20_000)
    fit = fit_scaling(logits, labels)
    assert fit.temperatures == pytest.approx(TRUE.tolist(), rel=0.3)
    held_logits, held_labels, _ = rounds(20_000, seed=1)
    scaling = SurvivalScaling(3)
    raw = scaling.survival(torch.tensor(held_logits)).double().numpy()
    scaling.assign(fit.temperatures)
    scaled = scaling.survival(torch.tensor(held_logits)).double().numpy()
    for g in range(3):
        assert expected_calibration_error(scaled[:, g], held_labels[:, g]) < 0.02
        assert expected_calibration_error(raw[:, g], held_labels[:, g]) > 0.04
    order = np.argsort(held_logits[:, 0])
    assert (np.diff(scaled[order, 0]) >= 0).all()
    assert fit.num_samples == 20_000 and np.mean(fit.after) < np.mean(fit.before)


def test_each_position_is_fitted_with_those_before_it_held():
    """The definition, searched exhaustively for three positions in turn."""
    logits, labels, _ = rounds(500, distortion=np.array([3.0, 3.0, 1.0]))
    fit = fit_scaling(logits, labels)
    survival = np.ones(len(logits))
    for g in range(3):

        def surviving(t, shift, survival=survival, g=g):
            return survival / (1 + np.exp(-(logits[:, g] / t + shift)))

        shifts = [
            np.clip(
                brentq(lambda shift, t=t, g=g: surviving(t, shift).sum() - labels[:, g].sum() + 2 * shift, -90, 90),
                -4,
                4,
            )
            for t in GRID
        ]
        losses = [
            ((surviving(t, shift) - labels[:, g]) ** 2).sum() + 0.5 * np.log(t) ** 2
            for t, shift in zip(GRID, shifts, strict=True)
        ]
        assert fit.temperatures[g] == GRID[int(np.argmin(losses))]
        best = GRID.tolist().index(fit.temperatures[g])
        assert fit.shifts[g] == pytest.approx(shifts[best], abs=1e-3)
        survival = surviving(GRID[best], fit.shifts[g])


def test_a_rule_that_keeps_less_than_was_promised_is_shifted_and_a_few_labels_shift_nothing():
    """Chances of coupled draws lie below those that a head has learnt, most where they are near a half."""
    rng = np.random.default_rng(5)

    def coupled(count):
        honest = rng.normal(0.5, 1.5, (count, 3))
        chances = 1 / (1 + np.exp(-(0.8 * honest - 0.6)))
        return honest, np.cumprod(rng.random((count, 3)) < chances, axis=1).astype(float)

    fit, (logits, labels) = fit_scaling(*coupled(6000)), coupled(6000)
    assert fit.shifts == pytest.approx([-0.6] * 3, abs=0.15)
    scaling = SurvivalScaling(3)
    scaling.assign(fit.temperatures, fit.shifts)
    errors = []
    for shifts in (fit.shifts, ()):
        scaling.assign(fit.temperatures, shifts)
        survival = scaling.survival(torch.tensor(logits)).double().numpy()
        np.testing.assert_allclose(scaling.known_survival(logits), survival, atol=1e-6)
        errors.append([expected_calibration_error(survival[:, g], labels[:, g]) for g in range(3)])
    assert max(errors[0]) < 0.025 and min(errors[1][:2]) > 0.05
    few = fit_scaling(logits[:3], np.ones((3, 3)))
    assert max(abs(shift) for shift in few.shifts) < 1.0
    assert fit_scaling(logits[:3], np.full((3, 3), np.nan)).temperatures == [1.0] * 3


def test_soft_labels_of_verified_drafts_fit_despite_trimmed_windows():
    logits, _, chances = rounds(20_000, seed=3)
    # Windows follow the confidence of the draft before: history of the round, never the draft itself.
    verified = np.where(logits[:, 0] > 0, np.where(logits[:, 1] > 0, 3, 2), 1)
    labels = survival_labels([row[:n].tolist() for row, n in zip(chances, verified, strict=True)], verified.tolist(), 3)
    assert np.isnan(labels).sum() == (3 - verified).sum()
    assert fit_scaling(logits, labels).temperatures == pytest.approx(TRUE.tolist(), rel=0.3)


def test_outcomes_that_end_early_are_zeros_up_to_the_last_verified_draft():
    labels = survival_labels([[1.0, 0.0], [0.5, 0.5], [], [1.0, 1.0, 1.0]], [3, 2, 0, 3], 3)
    nan = np.nan
    expected = [[1, 0, 0], [0.5, 0.25, nan], [nan] * 3, [1, 1, 1]]
    np.testing.assert_array_equal(labels, np.array(expected))


def test_temperatures_change_in_place_and_nonsense_is_refused():
    scaling = SurvivalScaling(3)
    address = scaling.temperatures_G.data_ptr()
    scaling.assign([1.0, 2.0, 3.0])
    assert scaling.temperatures_G.data_ptr() == address and scaling.temperatures_G.tolist() == [1.0, 2.0, 3.0]
    for wrong in ([1.0], [1.0, 0.0, 1.0], [1.0, float("nan"), 1.0]):
        with pytest.raises(InvalidRequest, match="temperatures"):
            scaling.assign(wrong)
    for wrong in ([1.0], [0.0, float("inf"), 0.0]):
        with pytest.raises(InvalidRequest, match="shifts"):
            scaling.assign([1.0] * 3, wrong)
    assert scaling.temperatures_G.tolist() == [1.0, 2.0, 3.0]


def test_a_fit_is_stored_with_where_it_comes_from(tmp_path):
    path = tmp_path / "sts.json"
    stored = StoredScaling(temperatures=[1.0, 2.0, 0.5], dataset="math", num_samples=9, ece_before=0.05, ece_after=0.01)
    SurvivalScaling(3).save(path, stored)
    scaling = SurvivalScaling(3)
    assert scaling.load(path, "rejection") == stored
    assert scaling.temperatures_G.tolist() == [1.0, 2.0, 0.5]
    with pytest.raises(InvalidRequest, match="coupled"):
        scaling.load(path, "coupled")
    with pytest.raises(InvalidRequest, match="4 positive"):
        SurvivalScaling(4).load(path, "rejection")


def test_online_refits_follow_a_new_policy():
    scaling = SurvivalScaling(3)
    online = OnlineScaling(scaling, capacity=6000, least=1000)

    def feed(count, seed, distortion):
        logits, _, chances = rounds(count, seed, distortion)
        online.observe(logits, survival_labels(chances.tolist(), [3] * count, 3))

    feed(500, 0, TRUE)
    assert online.refit() is None and scaling.temperatures_G.tolist() == [1.0] * 3
    feed(5000, 1, TRUE)
    address = scaling.temperatures_G.data_ptr()
    assert online.refit() is not None
    assert scaling.temperatures_G.tolist() == pytest.approx(TRUE.tolist(), rel=0.35)
    online.new_policy()
    feed(3000, 2, np.ones(3))
    online.refit()
    assert scaling.temperatures_G.tolist() == pytest.approx([1.0] * 3, rel=0.35)
    assert scaling.temperatures_G.data_ptr() == address


def test_a_refit_a_little_at_a_time_is_the_same_and_ends_with_its_policy():
    logits, _, chances = rounds(2000, 0, TRUE)
    whole, parts = (OnlineScaling(SurvivalScaling(3), least=1000) for _ in range(2))
    for online in (whole, parts):
        online.observe(logits, survival_labels(chances.tolist(), [3] * 2000, 3))
    whole.refit()
    parts.begin()
    parts.advance()
    parts.observe(-logits, np.ones((2000, 3)))
    parts.begin()
    assert parts.fit is None, "under way, with what was there when it began"
    for _ in range(40):
        parts.advance()
    assert whole.fit is not None and parts.fit == whole.fit
    parts.fit = None
    parts.begin()
    parts.new_policy()
    for _ in range(40):
        parts.advance()
    assert parts.fit is None


class TestReliability:
    def data(self):
        rng = np.random.default_rng(0)
        predicted = rng.random((400, 2))
        labels = (rng.random((400, 2)) < predicted**2).astype(float)
        labels[::5, 1] = np.nan
        return predicted, labels

    def test_errors_equal_their_definitions(self):
        predicted, labels = self.data()
        sums = Reliability(2)
        sums.observe(predicted[:100], labels[:100])
        other = Reliability(2)
        other.observe(predicted[100:], labels[100:])
        sums.add(other)
        for g in range(2):
            seen = ~np.isnan(labels[:, g])
            p, y = predicted[seen, g], labels[seen, g]
            bins = [(p >= k / 15) & (p < (k + 1) / 15) for k in range(15)]
            ece = sum(abs(p[b].mean() - y[b].mean()) * b.mean() for b in bins if b.any())
            assert sums.calibration_error()[g] == pytest.approx(ece)
            assert expected_calibration_error(p, y) == pytest.approx(ece)
            assert sums.brier()[g] == pytest.approx(((p - y) ** 2).mean())
            pairs = p[y == 1][:, None] - p[y == 0][None, :]
            assert sums.auc()[g] == pytest.approx((pairs > 0).mean() + (pairs == 0).mean() / 2, abs=2e-3)

    def test_nothing_observed_is_nan(self):
        sums = Reliability(1)
        sums.observe(np.array([[0.5]]), np.array([[np.nan]]))
        assert np.isnan([sums.calibration_error()[0], sums.brier()[0], sums.auc()[0]]).all()
        sums.observe(np.array([[1.0]]), np.array([[1.0]]))
        assert sums.calibration_error()[0] == 0.0 and np.isnan(sums.auc()[0])
