"""What happens around an engine that speculates: updates of both modules, memory, random schedules."""

import numpy as np
import pytest

from engine.collector import Collector
from engine.errors import Conflict, InvalidRequest, SparkrollError, Unsupported
from tests.support import ask, begin_of, make_engine, prompt, state_tensors, to_named, update
from tests.unit.dspark.drafters import checkpoint, random_drafter
from tests.unit.dspark.served import SHAPE, dspark, save_random, timeless
from tests.unit.engine.schedules import fuzz


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("drafters") / "d0")


def drafter_tensors(seed):
    return [to_named(name, value) for name, value in checkpoint(random_drafter(seed, **SHAPE)).items()]


def publish(engine, seed, new, txn=None):
    tensors, txn = drafter_tensors(seed), txn or f"drafter-{new}"
    engine.update_begin(begin_of(tensors, txn, engine.drafter_version, new, module="drafter"))
    engine.update_stage(txn, tensors)
    return engine.update_commit(txn)


def use(engine, name="g", **fields):
    """Ids, and what was drafted and accepted for them."""
    before = engine.draft_counters()
    engine.flush("all")
    (group,) = engine.generate([ask(name, prompt(10), n=2, max_new=16, **fields)])
    after = engine.draft_counters()
    counts = {key: after[f"draft_{key}"] - before[f"draft_{key}"] for key in ("steps", "verified", "accepted")}
    engine.check()
    return [sample.ids.tolist() for sample in group.samples], counts


def test_cases_b4_and_b5_a_drafter_has_its_own_weights_and_version(t_full, drafter, tmp_path):
    engine = make_engine(t_full, dspark=dspark(drafter))
    ids, _ = use(engine)
    target = engine.digest()
    report = publish(engine, 7, 5)
    assert (report.policy_version, report.drafter_version) == (0, 5)
    assert report.loaded == {"drafter": len(drafter_tensors(7))} and report.flushed_tokens == report.retracted == 0
    assert engine.digest() == target and engine.digest("drafter") == report.digest
    cold = make_engine(t_full, dspark=dspark(save_random(tmp_path / "d7", seed=7)))
    assert cold.digest("drafter") == report.digest, "an update equals a cold load"
    assert use(engine)[0] == ids
    assert use(engine)[1] == use(cold)[1], "drafts are those of the new weights"
    assert engine.update_commit("drafter-5") == report
    assert update(engine, t_full, 1).drafter_version == 5


def test_spans_name_the_drafter(t_full, drafter):
    engine, sink = make_engine(t_full, dspark=dspark(drafter)), Collector()
    engine.add_group(ask("g", prompt(10), max_new=16), sink)
    for _ in range(4):
        engine.step()
    publish(engine, 7, 3)
    while engine.step():
        pass
    (sample,) = sink.result().samples
    assert [(span.policy_version, span.drafter_version) for span in sample.spans] == [(0, 0), (0, 3)]
    assert sample.retractions == 0


def test_what_was_learnt_of_requests_goes_with_them(t_full, drafter):
    """Steps of many requests are summed up a few at a time: after some of those have ended."""
    engine = make_engine(t_full, max_running=32, dspark=dspark(drafter, mode="compact", least=1))
    record = timeless(engine).record
    record._watch = lambda *told: None  # no alarm, whatever random drafts come to
    engine.generate([ask(str(i), prompt(4, i), max_new=3 + i // 2, temperature=1.0) for i in range(24)])
    engine.generate([ask("last", prompt(4), max_new=4)])
    assert set(record._estimate._requests) <= {(25, 0)}
    assert set(record._estimate._groups) <= {25}


def test_case_b6_a_policy_update_leaves_the_drafter_alone(t_full, drafter):
    engine = make_engine(t_full, dspark=dspark(drafter))
    first, digest = use(engine), engine.digest("drafter")
    for version in range(1, 5):
        update(engine, t_full, version)
        assert engine.digest("drafter") == digest
        assert use(engine) == first


def test_updates_of_a_drafter_are_refused_by_name(t_full, drafter):
    plain = make_engine(t_full)
    tensors = drafter_tensors(1)
    with pytest.raises(Unsupported, match="module"):
        plain.update_begin(begin_of(tensors, "d", 0, 1, module="drafter"))
    engine = make_engine(t_full, dspark=dspark(drafter))
    engine.update_begin(begin_of(tensors, "d", 0, 1, module="drafter"))
    with pytest.raises(Conflict):
        engine.update_begin(begin_of(state_tensors(t_full), "p", 0, 1))
    assert engine.state == "updating"
    engine.update_rollback("d")
    engine.update_rollback("d")
    with pytest.raises(SparkrollError):
        engine.update_stage("d", tensors)
    with pytest.raises(InvalidRequest):
        engine.update_begin(begin_of(tensors[1:], "short", 0, 1, module="drafter"))
    assert engine.state == "ready" and engine.drafter_version == 0


def test_a_policy_update_in_the_middle(t_full, t_full_w1, drafter):
    """Tokens before are W0's and after it W1's, with drafts on both sides."""

    def run(**fields):
        engine, sink = make_engine(t_full, **fields), Collector()
        engine.add_group(ask("g", prompt(10), n=2, max_new=24, temperature=1.0, seed=2), sink)
        while not all(len(sample.ids) >= 8 for group in engine._groups.values() for sample in group.samples):
            engine.step()
        update(engine, t_full_w1, 1)
        while engine.step():
            pass
        engine.check()
        return sink.result().samples

    plain = make_engine(t_full)
    (whole,) = plain.generate([ask("g", prompt(10), n=2, max_new=24, temperature=1.0, seed=2)])
    for sample, expected in zip(run(dspark=dspark(drafter)), whole.samples, strict=True):
        (before, after) = sample.spans
        assert sample.ids[: before.end].tolist() == expected.ids[: before.end].tolist()
        assert (before.policy_version, after.policy_version) == (0, 1)
    update(plain, t_full_w1, 1)


@pytest.mark.parametrize("level", ["offload", "discard"])
def test_case_m2_released_memory_brings_the_drafter_back(t_full, drafter, level):
    engine = make_engine(t_full, dspark=dspark(drafter))
    first, digest = use(engine), engine.digest("drafter")
    held = engine._parts.memory.bytes()
    for cycle in range(1, 3):
        engine.release_memory(["weights", "kv"], level)
        assert engine._parts.memory.bytes()["weights"] == engine._parts.memory.bytes()["kv"] == 0
        engine.resume_memory(["kv", "weights"])
        if level == "discard":
            update(engine, t_full, cycle)
        assert engine.digest("drafter") == digest
        assert engine._parts.memory.bytes() == held
        assert use(engine) == first


def test_memory_counts_the_drafter(t_full, drafter):
    with_drafter, plain = make_engine(t_full, dspark=dspark(drafter)), make_engine(t_full)
    mine, theirs = with_drafter._parts.memory.bytes(), plain._parts.memory.bytes()
    assert mine["weights"] > theirs["weights"]
    # Two layers of two heads each, as the target has.
    assert mine["kv"] == 2 * theirs["kv"]


@pytest.mark.parametrize(
    "fields", [dict(drafter="ngram"), dict(), dict(mode="compact", least=1), dict(mode="cap_accept")]
)
def test_random_schedules(t_full, t_full_w1, drafter, fields):
    settings = dspark(**({"drafter": drafter} | fields))
    tally = fuzz([t_full, t_full_w1], range(40, 42), "serial", dspark=settings)
    assert tally.samples > 20


def test_random_schedules_of_bursts_and_rounds(t_full, t_full_w1, drafter):
    settings = dspark(drafter, mode="compact", probe_every=3)
    tally = fuzz([t_full, t_full_w1], range(50, 53), "overlapped", dspark=settings)
    assert tally.samples > 20


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", ["static", "compact", "cap_accept"])
def test_many_random_schedules(t_full, t_full_w1, drafter, mode):
    tally = fuzz([t_full, t_full_w1], range(5000, 5400), "serial", dspark=dspark(drafter, mode=mode, least=1))
    print(tally)
    assert tally.samples > 4000
    assert tally.near_ties < 1e-3 * tally.samples


def test_calibration_and_costs_are_read_where_they_fit(t_full, drafter, tmp_path):
    from engine.dspark.scaling import StoredScaling, SurvivalScaling

    stored = StoredScaling(
        temperatures=[2.0, 1.0, 0.5, 1.0], dataset="d", num_samples=9, ece_before=0.1, ece_after=0.0, rule="coupled"
    )
    SurvivalScaling(4).save(tmp_path / "sts.json", stored)
    engine = make_engine(t_full, dspark=dspark(drafter, calibration=tmp_path / "sts.json"))
    assert engine._parts.speculation.scaling.temperatures_G.tolist() == [2.0, 1.0, 0.5, 1.0]
    with pytest.raises(InvalidRequest, match="rejection"):
        make_engine(t_full, dspark=dspark(drafter, calibration=tmp_path / "sts.json", rule="rejection"))
    file = tmp_path / "cost.json"
    measured = make_engine(t_full, dspark=dspark(drafter, cost=file, sweep_seconds=0.3), max_running=4)
    assert measured._parts.speculation.cost.observed > 3 and file.exists()
    again = make_engine(t_full, dspark=dspark(drafter, cost=file, sweep_seconds=0.0), max_running=4)
    assert again._parts.speculation.cost.observed == measured._parts.speculation.cost.observed
    with pytest.raises(InvalidRequest, match="cost"):
        make_engine(t_full, dspark=dspark("ngram", cost=file))
    assert np.isfinite(again._parts.speculation.cost._coefficients_D).all()
