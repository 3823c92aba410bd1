"""Stops, lengths and minimum lengths on scripted targets."""

import numpy as np
import pytest

from engine import Want
from tests.support import ask, assert_whole, chain, make_engine, prompt, save_chain

EOS, EOS2 = 257, 259

pytestmark = pytest.mark.usefixtures("both_loops")


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """5 -> 10 -> 11 -> 300 -> 20 -> 21 -> 22 -> 23 ...; 6 -> 30 .. 33 -> EOS2 -> 40; 7 -> 50 51 -> EOS."""
    links = chain(5, 10, 11, 300, 20, 21, 22, 23) | chain(6, 30, 31, 32, 33, EOS2, 40, 41, 42, 43, 44)
    links |= chain(7, 50, 51, EOS, 60, 61) | {EOS: 60, 8: EOS}
    return save_chain(tmp_path_factory.mktemp("scripted"), links, eos_ids=[EOS, EOS2])


def run(folder, first, **sampling):
    engine = make_engine(folder)
    (group,) = engine.generate([ask("g", [1, first], want=Want(top_logprobs=1), **sampling)])
    engine.check()
    (sample,) = group.samples
    assert_whole(sample)
    return sample


def test_case_d2_a_stop_wins_over_the_length(scripted):
    sample = run(scripted, 5, max_new=5, stop_ids=[300])
    assert (sample.finish, sample.ids.tolist(), sample.matched) == ("stop", [10, 11, 300], 300)
    sample = run(scripted, 5, max_new=3, stop_ids=[300])
    assert (sample.finish, sample.ids.tolist()) == ("stop", [10, 11, 300])
    sample = run(scripted, 5, max_new=5, stop_ids=[22])
    assert (sample.finish, sample.ids.tolist()) == ("length", [10, 11, 300, 20, 21])


@pytest.mark.parametrize("keep", [True, False])
def test_case_d4_columns_follow_a_trimmed_stop(scripted, keep):
    sample = run(scripted, 6, max_new=9, keep_stop=keep)
    assert (sample.finish, sample.matched) == ("stop", EOS2)
    assert sample.ids.tolist() == [30, 31, 32, 33] + [EOS2] * keep


def test_case_d5_ignore_eos_leaves_the_callers_stops(scripted):
    sample = run(scripted, 6, max_new=8, ignore_eos=True)
    assert (sample.finish, len(sample.ids)) == ("length", 8)
    sample = run(scripted, 6, max_new=20, ignore_eos=True, stop_ids=[42])
    assert (sample.finish, sample.matched) == ("stop", 42)
    assert run(scripted, 7, max_new=8).matched == EOS
    assert run(scripted, 6, max_new=8).matched == EOS2


@pytest.mark.parametrize("min_new", [0, 1, 3, 4, 5])
def test_case_d6_minimum_length(scripted, min_new):
    """The model wants to end at once; it may when `min_new` tokens exist."""
    sample = run(scripted, 8, min_new=min_new, max_new=8, temperature=0.0)
    ends = [i for i, token in enumerate(sample.ids) if token in (EOS, EOS2)]
    if ends:
        assert ends == [len(sample.ids) - 1] and ends[0] >= min_new
    if min_new == 0:
        assert sample.ids.tolist() == [EOS]


@pytest.mark.parametrize("max_new", range(1, 10))
def test_case_d3_delivered_equals_counted(scripted, max_new):
    engine = make_engine(scripted)
    (group,) = engine.generate([ask("g", prompt(4), n=3, max_new=max_new, ignore_eos=True)])
    assert [len(sample.ids) for sample in group.samples] == [max_new] * 3
    assert engine.counters.generated_tokens == 3 * max_new


class StopAfter:
    """A watcher that matches when a given id appears."""

    def __init__(self, token):
        self.token = token
        self.seen = []

    def observe(self, new_ids):
        self.seen += new_ids
        if self.token in new_ids:
            return new_ids.index(self.token) + 1, "text"
        return None


def test_a_watchers_match_ends_ids_columns_and_cache(scripted):
    engine = make_engine(scripted, page_size=1)
    collected = []

    class Sink:
        wants_deltas = True

        def on_delta(self, deltas):
            collected.extend(deltas)

        def on_sample(self, sample):
            self.sample = sample

        def on_group(self, group):
            self.group = group

        def on_error(self, error):
            raise error

    sink, watcher = Sink(), StopAfter(20)
    engine.add_group(ask("g", [1, 5], max_new=20), sink, {0: watcher})
    while engine.has_work:
        engine.step()
        engine.flush_deltas()
    assert sink.sample.ids.tolist() == [10, 11, 300, 20]
    assert (sink.sample.finish, sink.sample.matched) == ("stop", "text")
    assert np.concatenate([delta.ids for delta in collected]).tolist() == sink.sample.ids.tolist()
    # The last token was sampled, never fed back: the cache ends before it.
    match = engine._parts.cache.match(
        engine._namespaces.of_group(type("G", (), {"request": ask("x", [1]), "arrival": 0, "lease": None})()),
        np.array([1, 5, 10, 11, 300, 20, 21], dtype=np.int32).tobytes(),
    )
    assert match.usable == 5
