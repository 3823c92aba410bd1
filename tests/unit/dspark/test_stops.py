"""Ends in the middle of an accepted block: the same as token by token."""

import pytest

from engine import Want
from engine.collector import Collector
from tests.support import VOCAB, ask, assert_whole, chain, make_engine, save_chain
from tests.unit.dspark.served import Scripted, scripted_engine

EOS, EOS2 = 257, 259
LINKS = chain(5, 10, 11, 300, 20, 21, 22, 23) | chain(6, 30, 31, 32, 33, EOS2, 40, 41, 42, 43, 44) | {8: EOS, EOS: EOS}


END = dict(logit_bias={EOS: 1000.0})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_chain(tmp_path_factory.mktemp("scripted"), LINKS, eos_ids=[EOS, EOS2])


def say(tokens, count):
    said = [tokens[-1]]
    for _ in range(count):
        said.append(LINKS.get(said[-1], (said[-1] + 1) % VOCAB))
    return said[1:]


class Watcher:
    """A stop string of one token, seen when it is committed."""

    def __init__(self, token):
        self._token = token

    def observe(self, new_ids):
        return (len(new_ids), "match") if self._token in new_ids else None


def both(folder, first, watch=None, drafts=8, script=say, **sampling):
    """The sample with an oracle's drafts, which must equal the one without."""
    samples = []
    scripted = scripted_engine(folder, Scripted(script, lambda slot, number: 8, drafts), dspark=dict(drafts=drafts))
    for engine in (scripted, make_engine(folder)):
        sink = Collector()
        watchers = {} if watch is None else {0: Watcher(watch)}
        engine.add_group(ask("g", [1, first], want=Want(top_logprobs=1), **sampling), sink, watchers)
        while engine.step():
            pass
        engine.check()
        samples.append(sink.result().samples[0])
        assert_whole(samples[-1])
    speculated, plain = samples
    for name in ("finish", "matched"):
        assert getattr(speculated, name) == getattr(plain, name)
    assert speculated.ids.tolist() == plain.ids.tolist()
    assert speculated.logprobs.tolist() == pytest.approx(plain.logprobs.tolist(), abs=1e-4)
    return speculated


@pytest.mark.parametrize("keep", [True, False])
def test_case_d1_a_stop_string_completes_inside_a_block(folder, keep):
    sample = both(folder, 5, watch=20, max_new=12, keep_stop=keep)
    assert (sample.ids.tolist(), sample.finish, sample.matched) == ([10, 11, 300, 20], "stop", "match")
    assert (sample.draft_use.steps, sample.draft_use.accepted) == (1, 3)


def test_case_d2_a_stop_wins_over_the_length(folder):
    assert both(folder, 5, max_new=5, stop_ids=[300]).ids.tolist() == [10, 11, 300]
    sample = both(folder, 5, max_new=5, stop_ids=[22])
    assert (sample.finish, sample.ids.tolist()) == ("length", [10, 11, 300, 20, 21])


@pytest.mark.parametrize("keep", [True, False])
def test_case_d4_columns_follow_a_trimmed_stop(folder, keep):
    sample = both(folder, 6, max_new=9, keep_stop=keep)
    assert sample.ids.tolist() == [30, 31, 32, 33] + [EOS2] * keep
    # The trimmed stop had been drafted and accepted, and counts nowhere.
    assert sample.draft_use.accepted == 3 + keep


@pytest.mark.parametrize("min_new", [0, 1, 3, 4, 5])
def test_case_d6_minimum_length(folder, min_new):
    """Drafts and target alike want to end at every step."""
    sample = both(folder, 8, drafts=4, script=lambda tokens, count: [EOS] * count, **END, min_new=min_new, max_new=8)
    assert sample.matched == EOS and len(sample.ids) == min_new + 1
