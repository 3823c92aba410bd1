"""Random schedules: whatever happens around a sample, its tokens are those of an undisturbed run.

Arrivals, aborts, stops, retractions, pauses, flushes and weight updates in random order, on a pool
that is always too small. Every finished sample is compared with a fresh engine that runs it alone:
span by span, under the weights each span names. No page is lost at any time.
"""

import random

import msgspec
import numpy as np
import pytest

from engine.errors import Conflict, SparkrollError
from engine.types import SampleResume
from tests.support import ask, assert_whole, make_engine, prompt, update
from tests.unit.engine.test_updates import Sink

KV_POLICIES = ["invalidate", "namespace", "keep"]


class Fuzz:
    """One engine under fire. `folders[v % 2]` are the weights of policy version v."""

    def __init__(self, folders, seed, loop):
        self.random = random.Random(seed)
        self.folders = folders
        page_size = self.random.choice([1, 2, 4])
        self.engine = make_engine(
            folders[0],
            page_size=page_size,
            kv_tokens=self.random.choice([64, 96, 160]),
            max_running=self.random.choice([2, 5, 12]),
            prefill_tokens=self.random.choice([3, 16, 64]),
            lookahead=self.random.choice([0, 3, 8]),
            burst=self.random.choice([1, 2, 3]),
            loop=loop,
        )
        self.live = {}
        self.done = []
        self.count = 0

    def run(self, operations):
        actions = [self.add] * 4 + [self.step] * 12 + [self.abort, self.update, self.pause, self.resume, self.flush]
        for _ in range(operations):
            self.random.choice(actions)()
            self.collect()
            if self.random.random() < 0.2:
                self.engine.check()
        self.engine.resume()
        while self.live:
            assert self.engine.step(), f"stuck with {list(self.live)}"
            self.collect()
        self.engine.check()
        assert self.engine.flush("all") >= 0
        gauges = self.engine.gauges()
        assert gauges.pages_free == gauges.pages_total, "a page was lost"

    def add(self):
        self.count += 1
        start = self.random.choice([10, 10, 10, 40, 70])
        sampling = dict(
            temperature=self.random.choice([0.0, 1.0, 1.0]),
            max_new=self.random.randint(1, 14),
            seed=self.random.randint(0, 10**6),
            stop_ids=self.random.sample(range(512), self.random.choice([0, 0, 40])),
        )
        if self.random.random() < 0.2:
            sampling |= dict(top_k=7, repetition_penalty=1.2)
        request = ask(
            f"g{self.count}", prompt(self.random.randint(1, 24), start), n=self.random.choice([1, 1, 3, 6]), **sampling
        )
        sink = Sink()
        try:
            self.engine.add_group(request, sink)
            self.live[request.group_id] = (request, sink)
        except SparkrollError as error:
            assert error.code in ("TOO_LARGE", "OVERLOADED")

    def step(self):
        self.engine.step()

    def abort(self):
        if self.live:
            self.engine.abort([self.random.choice(list(self.live))])

    def update(self):
        version = self.engine.policy.version + 1
        update(self.engine, self.folders[version % 2], version, kv_policy=self.random.choice(KV_POLICIES))

    def pause(self):
        self.engine.pause(self.random.choice(["retract", "in_place", "drain"]))

    def resume(self):
        self.engine.resume()

    def flush(self):
        self.engine.flush(self.random.choice(["all", "stale"]))

    def collect(self):
        for group_id, (request, sink) in list(self.live.items()):
            if sink.group is not None:
                del self.live[group_id]
                self.done.append((request, sink.group))


class Judge:
    """Runs samples alone, each span under the weights it names."""

    def __init__(self, folders):
        self.engines = [make_engine(folder, page_size=4, kv_tokens=4096) for folder in folders]

    def check(self, request, sample):
        assert_whole(sample)
        assert sample.finish in ("stop", "length", "abort")
        ids = np.empty(0, dtype=np.uint32)
        for span in sample.spans:
            if span.mixed_kv:
                return
            whole = self.rest(request, sample, span.policy_version, ids)
            expected = whole.ids[: span.end - span.start]
            assert sample.ids[span.start : span.end].tolist() == expected.tolist()
            np.testing.assert_allclose(
                sample.logprobs[span.start : span.end], whole.logprobs[: len(expected)], atol=1e-4
            )
            ids = sample.ids[: span.end]
        if sample.finish != "abort" and sample.spans:
            assert sample.finish == whole.finish and len(sample.ids) == len(ids)

    def rest(self, request, sample, policy_version, ids):
        resume = [SampleResume(index=sample.index, ids=ids)]
        alone = msgspec.structs.replace(request, resume=resume)
        (group,) = self.engines[policy_version % 2].generate([alone])
        return group.samples[0]


def fuzz(folders, seeds, loop, operations=60):
    judge = Judge(folders)
    compared = 0
    for seed in seeds:
        run = Fuzz(folders, seed, loop)
        run.run(operations)
        for request, group in run.done:
            for sample in group.samples:
                judge.check(request, sample)
                compared += 1
    return compared


@pytest.mark.parametrize("loop", ["serial", "overlapped"])
def test_random_schedules(t_full, t_full_w1, loop):
    assert fuzz([t_full, t_full_w1], range(8), loop) > 50


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("loop", ["serial", "overlapped"])
def test_two_thousand_random_schedules(t_full, t_full_w1, loop):
    assert fuzz([t_full, t_full_w1], range(100, 1100), loop) > 5000


def test_the_judge_notices(t_full, t_full_w1):
    """The comparison would fail for tokens of the wrong weights."""
    run = Fuzz([t_full, t_full], 1, "serial")
    run.run(40)
    judge = Judge([t_full_w1, t_full_w1])
    samples = [(request, sample) for request, group in run.done for sample in group.samples if len(sample.ids) > 3]
    with pytest.raises(AssertionError):
        for request, sample in samples:
            judge.check(request, sample)


def test_updates_are_refused_while_one_is_open(t_full):
    engine = make_engine(t_full)
    update(engine, t_full, 1)
    with pytest.raises(Conflict):
        update(engine, t_full, 1)
