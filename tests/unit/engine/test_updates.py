"""Weight updates between steps: what in-flight work, the cache and the labels see."""

import numpy as np
import pytest

from engine.errors import Conflict, DeadlineExceeded, InvalidRequest, NotFound
from tests.support import (
    TOLERANCE,
    ask,
    assert_sample_is_reference,
    assert_whole,
    begin_of,
    make_engine,
    prompt,
    reference_logprobs,
    state_tensors,
    update,
)

pytestmark = pytest.mark.usefixtures("both_loops")


class Sink:
    wants_deltas = False

    def __init__(self):
        self.group = None

    def on_delta(self, deltas):
        pass

    def on_sample(self, sample):
        pass

    def on_group(self, group):
        self.group = group

    def on_error(self, error):
        raise error


def start(engine, group_id, ids, steps, **fields):
    """Queue a group and step until its first sample has `steps` tokens."""
    sink = Sink()
    engine.add_group(ask(group_id, ids, **fields), sink)
    while engine.counters.generated_tokens < steps:
        assert engine.step()
    return sink


def labels(sample):
    return [(span.start, span.end, span.policy_version, span.mixed_kv) for span in sample.spans]


def finish(engine, sink):
    while sink.group is None:
        assert engine.step()
    (sample,) = sink.group.samples
    assert_whole(sample)
    return sample


def test_case_a1_no_hit_crosses_an_update(t_full, t_full_w1):
    engine = make_engine(t_full)
    (before,) = engine.generate([ask("g", prompt(16))])
    assert_sample_is_reference(t_full, prompt(16), before.samples[0], 8)
    report = update(engine, t_full_w1, 1)
    assert report.policy_version == 1 and report.flushed_tokens > 0
    for expected_hit in (0, 12):
        (after,) = engine.generate([ask("g", prompt(16))])
        assert_sample_is_reference(t_full_w1, prompt(16), after.samples[0], 8)
        assert after.samples[0].cached_tokens == after.hit.usable == expected_hit
        assert {span.policy_version for span in after.samples[0].spans} == {1}
    engine.check()


def test_case_a2_frozen_requests_never_share_mixed_state(t_full, t_full_w1):
    engine = make_engine(t_full)
    first = start(engine, "r1", prompt(16), 8, max_new=64)
    engine.pause("in_place")
    update(engine, t_full_w1, 1, kv_policy="namespace")
    engine.resume(expected_policy_version=1)
    second = Sink()
    engine.add_group(ask("r2", prompt(16)), second)
    assert_sample_is_reference(t_full_w1, prompt(16), finish(engine, second), 8)
    sample = finish(engine, first)
    cut = sample.spans[0].end
    assert 8 <= cut < 16 and labels(sample) == [(0, cut, 0, False), (cut, 64, 1, True)]
    ids = [*prompt(16), *sample.ids[:12]]
    (third,) = engine.generate([ask("r3", ids)])
    assert_sample_is_reference(t_full_w1, ids, third.samples[0], 8)
    engine.check()


@pytest.mark.parametrize("kv_policy", ["invalidate", "namespace"])
def test_case_b8_labels_fall_on_the_step(t_full, t_full_w1, kv_policy):
    """Some tokens of v0, then v1 over recomputed state: each span scores under its weights."""
    engine = make_engine(t_full)
    sink = start(engine, "r", prompt(8), 10, max_new=40)
    report = update(engine, t_full_w1, 1, kv_policy=kv_policy)
    assert report.retracted == 1
    sample = finish(engine, sink)
    cut = sample.spans[0].end
    assert 10 <= cut < 18 and labels(sample) == [(0, cut, 0, False), (cut, 40, 1, False)]
    ids = [*prompt(8), *sample.ids]
    np.testing.assert_allclose(sample.logprobs[:cut], reference_logprobs(t_full, ids)[8 : 8 + cut], atol=TOLERANCE)
    np.testing.assert_allclose(sample.logprobs[cut:], reference_logprobs(t_full_w1, ids)[8 + cut :], atol=TOLERANCE)
    engine.check()


def test_case_b8_queued_and_finished_requests(t_full, t_full_w1):
    engine = make_engine(t_full, max_running=1)
    (done,) = engine.generate([ask("done", prompt(8), max_new=4)])
    running = start(engine, "running", prompt(8), 6, max_new=12)
    queued = Sink()
    engine.add_group(ask("queued", prompt(9)), queued)
    update(engine, t_full_w1, 1, kv_policy="keep")
    assert {s.policy_version for s in finish(engine, running).spans} == {0, 1}
    assert_sample_is_reference(t_full_w1, prompt(9), finish(engine, queued), 8)
    assert {s.policy_version for s in queued.group.samples[0].spans} == {1}
    assert {s.policy_version for s in done.samples[0].spans} == {0}


def test_groups_waiting_for_room_start_under_the_new_policy(t_full, t_full_w1):
    """Logits kept for samples that had no room yet belong to the old policy and are dropped."""
    engine = make_engine(t_full, max_running=2)
    sink = start(engine, "g", prompt(8), 6, n=5, max_new=8)
    update(engine, t_full_w1, 1, kv_policy="keep")
    while sink.group is None:
        assert engine.step()
    versions = [[span.policy_version for span in sample.spans] for sample in sink.group.samples]
    assert versions[:2] == [[0, 1], [0, 1]] and versions[2:] == [[1]] * 3
    assert_sample_is_reference(t_full_w1, prompt(8), sink.group.samples[4], 8)
    engine.check()


@pytest.mark.parametrize("fault", ["shape", "unknown", "nan", "missing"])
def test_case_b9_a_failed_update_changes_nothing(t_full, t_full_w1, fault):
    engine = make_engine(t_full)
    digest = engine.digest()
    tensors = state_tensors(t_full_w1)
    bad = tensors[5]
    if fault == "shape":
        bad = type(bad)(name=bad.name, dtype=bad.dtype, shape=[bad.shape[0], 63], data=bad.data)
    elif fault == "unknown":
        bad = type(bad)(name="model.layers.0.mystery", dtype=bad.dtype, shape=bad.shape, data=bad.data)
    elif fault == "nan":
        data = bad.data.copy()
        data[:4] = np.frombuffer(np.float32("nan").tobytes(), np.uint8)
        bad = type(bad)(name=bad.name, dtype=bad.dtype, shape=bad.shape, data=data)
    engine.update_begin(begin_of(tensors, "t", 0, 1))
    engine.update_stage("t", tensors[:5])
    if fault == "missing":
        with pytest.raises(InvalidRequest, match="never came"):
            engine.update_commit("t")
        with pytest.raises(InvalidRequest):
            engine.update_commit("t")
    else:
        with pytest.raises(InvalidRequest) as caught:
            engine.update_stage("t", [bad])
        assert bad.name in str(caught.value)
        engine.update_rollback("t")
    assert engine.digest() == digest and engine.policy.version == 0
    (group,) = engine.generate([ask("g", prompt(8))])
    assert_sample_is_reference(t_full, prompt(8), group.samples[0], 8)
    assert update(engine, t_full_w1, 1).policy_version == 1


def test_case_b2_a_silent_sender_times_out(t_full, t_full_w1):
    engine = make_engine(t_full)
    tensors = state_tensors(t_full_w1)
    engine.update_begin(begin_of(tensors, "t", 0, 1, timeout_s=0.05))
    engine.update_stage("t", tensors[:2])
    engine.policy._last_call -= 1.0
    with pytest.raises(DeadlineExceeded, match="rolled back"):
        engine.update_stage("t", tensors[2:])
    (group,) = engine.generate([ask("g", prompt(8))])
    assert group.policy_version == 0
    assert update(engine, t_full_w1, 1).policy_version == 1


def test_case_b7_update_with_work_in_flight(t_full, t_full_w1):
    """Eight running requests and a flush in one call: no crash, and new requests are the new policy's."""
    engine = make_engine(t_full)
    folders = [t_full, t_full_w1]
    for version in range(1, 7):
        sinks = []
        for i in range(8):
            sinks.append(Sink())
            engine.add_group(ask(f"{version}-{i}", prompt(8, 20 + i), max_new=20), sinks[-1])
        for _ in range(5):
            engine.step()
        if version % 2:
            engine.abort()
        update(engine, folders[version % 2], version)
        (fresh,) = engine.generate([ask("fresh", prompt(8), max_new=4)])
        assert_sample_is_reference(folders[version % 2], prompt(8), fresh.samples[0], 4)
        while any(sink.group is None for sink in sinks):
            assert engine.step()
        engine.flush("all")
        engine.check()


def test_case_i4_versions_never_go_back(t_full, t_full_w1):
    engine = make_engine(t_full)
    update(engine, t_full_w1, 57)
    tensors = state_tensors(t_full)
    for base, new in ((57, 57), (57, 1), (0, 58)):
        with pytest.raises(Conflict):
            engine.update_begin(begin_of(tensors, "t", base, new))
    with pytest.raises(Conflict, match="min_policy_version"):
        engine.generate([ask("g", prompt(4), min_policy_version=58)])


def test_commits_repeat_and_strangers_are_refused(t_full, t_full_w1):
    engine = make_engine(t_full)
    report = update(engine, t_full_w1, 1)
    assert engine.update_commit("to-1") == report
    with pytest.raises(NotFound):
        engine.update_commit("nobody")
    tensors = state_tensors(t_full)
    engine.update_begin(begin_of(tensors, "a", 1, 2))
    with pytest.raises(Conflict):
        engine.update_begin(begin_of(tensors, "b", 1, 2))
    engine.pause("in_place")
    with pytest.raises(Conflict, match="open"):
        engine.resume()
    engine.update_rollback("a")
    engine.update_rollback("a")
    engine.resume()


def test_a_half_applied_update_fences(t_full, t_full_w1, monkeypatch):
    """A fault while parameters change: nothing is served until a full update succeeds."""
    from engine.errors import Corrupt

    engine = make_engine(t_full)
    sink = start(engine, "r", prompt(8), 3, max_new=40)
    tensors = state_tensors(t_full_w1)
    engine.update_begin(begin_of(tensors, "t", 0, 1))
    engine.update_stage("t", tensors)
    transaction = engine.policy.require("t")
    first = next(iter(transaction._layout.params))
    with monkeypatch.context() as patch:
        patch.setitem(transaction._layout.params, first, transaction._layout.params[first][:1])
        with pytest.raises(Corrupt):
            engine.update_commit("t")
    assert sink.group.samples[0].finish == "error"
    with pytest.raises(Corrupt, match="fenced"):
        engine.generate([ask("g", prompt(4))])
    assert engine.state == "fenced" and not engine.step()
    update(engine, t_full_w1, 1)
    (group,) = engine.generate([ask("g", prompt(8))])
    assert_sample_is_reference(t_full_w1, prompt(8), group.samples[0], 8)
    engine.check()
