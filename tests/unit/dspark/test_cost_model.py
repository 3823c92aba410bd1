"""The cost model against a step-time law it does not know."""

import numpy as np
import pytest

from engine.dspark.cost_file import CostFile
from engine.dspark.cost_model import CostKey, CostModel, StepShape, sweep_shapes
from engine.errors import InvalidRequest

ROWS, TIERS = [1, 4, 16, 64], [1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 512]
KEY = CostKey(model="m", device="d", graphs="1,2,4")


def law(shape):
    """A staircase over tiers, a draft that grows with rows, context read at a fixed speed."""
    stairs = 4.0 + 0.9 * np.ceil(shape.tier / 128) + 0.004 * shape.tier
    draft = (0.8 + 0.01 * shape.rows) * shape.drafting
    return 1e-3 * (stairs + 0.005 * shape.rows + draft + shape.tokens_read / 40_000 + shape.context_queries / 400_000)


def shapes(count, seed):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        rows = int(rng.integers(1, 65))
        drafting = bool(rng.integers(2))
        tier = min(t for t in TIERS if t >= rows * (1 + drafting * int(rng.integers(1, 8))))
        context = int(rng.integers(64, 8192))
        yield StepShape(rows, tier, drafting, float(rows * context), float(tier * context))


def seeded():
    model = CostModel(ROWS, TIERS)
    model.seed([(shape, law(shape)) for shape in sweep_shapes(ROWS, TIERS, 7, [128, 4096])])
    return model


def relative_errors(model, count=200):
    tested = list(shapes(count, 9))
    true = np.array([law(shape) for shape in tested])
    return np.abs(model.predict(tested) - true) / true


def test_a_sweep_of_few_steps_predicts_others():
    assert len(sweep_shapes(ROWS, TIERS, 7, [128, 4096])) < 40
    assert np.mean(relative_errors(seeded())) < 0.05


def test_a_hiccup_of_few_tokens_says_little_of_many():
    """Groups of sixteen share their prompts, as nothing did at the start: one slow step of 22 rows, and 128 are still
    expected to take about what they do."""
    model = CostModel([1, 2, 4, 8, 16, 32, 64, 128, 256], [1, 2, 4, 8, 16, 32, 64, 128, 256])

    def plain(rows, read, attended):
        return StepShape(rows, rows, False, float(read), float(attended))

    def seconds(shape):
        return 6e-4 + 5e-6 * shape.rows + 4e-9 * shape.context_queries

    start = [
        plain(rows, rows * context, rows * context) for rows in (256, 128, 64, 32, 16, 8, 1) for context in (64, 768)
    ]
    model.seed([(shape, seconds(shape)) for shape in start])
    shared = plain(128, 8 * 60 + 128 * 100, 128 * 160)
    before = float(model.predict([shared])[0])
    assert before == pytest.approx(seconds(shared), rel=0.1)
    few = plain(22, 2 * 60 + 22 * 140, 22 * 200)
    model.observe(few, 4 * seconds(few), steps=8)
    assert float(model.predict([shared])[0]) == pytest.approx(before, rel=0.2)


def test_measured_steps_refine_it_and_a_machine_that_changes_is_followed():
    model, rng = seeded(), np.random.default_rng(0)
    for shape in shapes(600, 1):
        model.observe(shape, law(shape) * rng.normal(1.0, 0.02))
    assert np.mean(relative_errors(model)) < 0.01
    for shape in shapes(1500, 2):
        model.observe(shape, 1.5 * law(shape))
    tested = list(shapes(200, 3))
    assert np.mean(model.predict(tested) / [law(s) for s in tested]) == pytest.approx(1.5, abs=0.05)


def test_a_hiccup_moves_it_little():
    model = seeded()
    for shape in shapes(300, 1):
        model.observe(shape, law(shape))
    before, outliers = np.mean(relative_errors(model)), model.errors.outliers
    model.observe(next(shapes(1, 5)), 3.0)
    assert model.errors.outliers == outliers + 1
    assert np.mean(relative_errors(model)) < before + 0.05


def test_what_was_learnt_of_another_size_is_soon_forgotten():
    """Measured at one size, wrong by far at another: a few steps there, or a hiccup behind them, say so."""
    model = CostModel(ROWS, TIERS)
    model.seed([(shape, law(shape)) for shape in sweep_shapes(ROWS, TIERS, 7, [128]) if shape.rows == 64] * 2)
    shape = StepShape(1, 4, True, 500.0, 2000.0)
    assert abs(model.predict([shape])[0] / law(shape) - 1.0) > 0.3
    for _ in range(2):
        model.observe(shape, law(shape))
    assert model.predict([shape])[0] == pytest.approx(law(shape), rel=0.1)
    other = StepShape(4, 16, True, 2000.0, 8000.0)
    model.observe(other, 1.0)
    for _ in range(5):
        model.observe(other, law(other))
    assert model.predict([other])[0] == pytest.approx(law(other), rel=0.1)


def test_it_stays_finite_where_only_one_shape_is_ever_seen():
    model = seeded()
    shape = StepShape(16, 64, True, 1e5, 1e5)
    for _ in range(1500):
        model.observe(shape, law(shape))
    assert model.predict([shape])[0] == pytest.approx(law(shape), rel=1e-3)
    predictions = model.predict(list(shapes(100, 4)))
    assert np.isfinite(predictions).all() and (predictions > 0).all()
    assert np.median(relative_errors(model)) < 0.25
    model.observe(shape, float("nan"))
    model.observe(shape, -1.0)
    assert np.isfinite(model.predict([shape])).all()


def test_hours_at_one_size_make_nothing_absurd_of_others():
    """A device whose small batches read contexts one row after another and whose large ones read them side by side:
    no sum of terms is right of both. What was measured thousands of times at one row stays right there, and other
    sizes stay within a quarter of what the sweep saw of them."""

    def device(shape):
        side_by_side = shape.rows / (1.0 + shape.rows / 8.0)
        return law(shape) * (1.0 + 0.4 * shape.tokens_read / shape.rows / 4096 / side_by_side)

    model, rng = CostModel(ROWS, TIERS), np.random.default_rng(0)
    model.seed([(shape, device(shape)) for shape in sweep_shapes(ROWS, TIERS, 7, [128, 4096])])
    for step in range(3000):
        context = 64.0 + step % 2000
        shape = StepShape(1, 8, True, context, 8.0 * context)
        model.observe(shape, device(shape) * rng.normal(1.0, 0.02), 4)
    shape = StepShape(1, 8, True, 1000.0, 8000.0)
    assert model.predict([shape])[0] == pytest.approx(device(shape), rel=0.05)
    for rows, tier in ((4, 32), (8, 64), (16, 128), (32, 256), (64, 128), (64, 512)):
        shape = StepShape(rows, tier, True, 1000.0 * rows, 1000.0 * tier)
        assert model.predict([shape])[0] == pytest.approx(device(shape), rel=0.25), (rows, tier)


def test_a_kind_that_no_sum_explains_is_right_all_the_same():
    """One graph is slow for a reason of its own: it is known, and its neighbours are not slandered."""
    model, slow = seeded(), StepShape(16, 64, True, 16_000.0, 64_000.0)
    others = [StepShape(4, 8, True, 4000.0, 8000.0), StepShape(64, 256, True, 64_000.0, 256_000.0)]
    for _ in range(30):
        model.observe(slow, 2.0 * law(slow))
        for other in others:
            model.observe(other, law(other))
    assert model.predict([slow])[0] == pytest.approx(2.0 * law(slow), rel=0.02)
    assert model.predict(others) == pytest.approx([law(other) for other in others], rel=0.05)


def test_what_drafting_costs_at_least_is_that_of_the_quickest_steps():
    model = CostModel([1, 8], [1, 8, 64])
    assert model.least_extra == 0.0
    model.observe(StepShape(1, 1, False), 0.004)
    assert model.least_extra == 0.0
    for seconds in (0.007, 0.006, 0.5):
        model.observe(StepShape(1, 8, True), seconds)
    assert model.least_extra == pytest.approx(0.002)


def test_errors_are_of_predictions_made_before_the_step():
    model = CostModel([1], [1])
    model.observe(StepShape(1, 1, False), 0.010)
    assert model.errors.steps == 0
    model.observe(StepShape(1, 1, False), 0.020)
    assert model.errors.steps == 1
    assert model.errors.measured == pytest.approx(0.020)
    assert model.errors.predicted == pytest.approx(0.010, rel=0.01)
    assert model.errors.absolute == pytest.approx(0.010, rel=0.02)


def test_past_the_last_tier_time_goes_straight_on():
    model = CostModel([1], [10, 20])
    model.seed([(StepShape(1, t, True), 1e-3 * t) for t in (10, 12, 15, 20)] * 20)
    assert model.predict([StepShape(1, 40, True)])[0] == pytest.approx(0.040, rel=0.02)


def test_what_rounds_take_says_nothing_of_plain_steps():
    model = seeded()
    plain, rounds = StepShape(64, 64, False, 8192.0, 8192.0), StepShape(64, 256, True, 8192.0, 32768.0)
    before = model.predict([plain])[0]
    for _ in range(200):
        model.observe(rounds, 5.0 * law(rounds))
    assert model.predict([rounds])[0] == pytest.approx(5.0 * law(rounds), rel=0.02)
    assert model.predict([plain])[0] == pytest.approx(before, rel=0.1)


def test_a_table_is_kept_by_model_device_and_graphs(tmp_path):
    model = seeded()
    path = tmp_path / "cost.json"
    model.save(path, KEY)
    tested = list(shapes(20, 7))
    assert np.array_equal(CostModel.load(path, KEY).predict(tested), model.predict(tested))
    for other in (CostKey(model="n", device="d", graphs="1,2,4"), CostKey(model="m", device="d", graphs="1,2")):
        with pytest.raises(InvalidRequest, match=r"cost\.json"):
            CostModel.load(path, other)
    path.write_text("{}")
    with pytest.raises(InvalidRequest, match="stored cost table"):
        CostModel.load(path, KEY)


def test_what_was_learnt_is_kept_and_found_again(tmp_path, monkeypatch):
    """After the sweep, then ever more rarely; a file in the cache that is no table is measured anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file, shape = CostFile(None, KEY, on_gpu=True), StepShape(1, 1, False)
    assert file.load() is None and CostFile(None, KEY, on_gpu=False).path is None
    model = CostModel([1, 8], [1, 8])
    model.on_observed = file.keep
    model.seed([(shape, 0.01)] * 3)
    assert file.path is not None
    written = []
    for step in range(2000):
        model.observe(shape, 0.01)
        if file.path.exists():
            file.path.rename(file.path.with_suffix(".old"))
            written.append(step)
    assert written == [0, 512, 1536]
    file.path.with_suffix(".old").rename(file.path)
    stored = CostFile(None, KEY, on_gpu=True).load()
    assert stored is not None and stored.observed == 3 + 1537
    assert stored.predict([shape])[0] == pytest.approx(0.01, rel=1e-3)
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]
    file.path.write_text("{")
    assert CostFile(None, KEY, on_gpu=True).load() is None
    with pytest.raises(InvalidRequest, match="cost table"):
        CostFile(file.path, KEY, on_gpu=True).load()


def test_a_batchs_steps_are_predicted_together_as_alone():
    model, rng = CostModel([1, 4, 16], [1, 8, 64]), np.random.default_rng(3)
    for rows, tier in rng.integers(1, 90, (60, 2)).tolist():
        shape = StepShape(rows, tier, bool(tier % 2), 100.0 * rows, 50.0 * tier)
        model.observe(shape, 0.01 + 1e-4 * rows + 2e-5 * tier)
    tiers = np.array([1, 3, 8, 40, 64, 100])
    for rows in (1, 3, 16, 20):
        for share in (0.3, 1.0):
            weights = model.weights(np.full(6, rows), tiers, np.full(6, share))
            together = model.times(weights, 700.0, 9.0 * tiers)
            alone = model.predict([StepShape(rows, int(tier), True, 700.0, 9.0 * tier, share) for tier in tiers])
            np.testing.assert_allclose(together, alone)
