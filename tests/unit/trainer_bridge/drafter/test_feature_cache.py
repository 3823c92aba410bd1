"""States on disk and on their way to the trainer."""

import threading

import numpy as np
import pytest
import torch

from engine.errors import InvalidRequest
from tests.unit.trainer_bridge.drafter.worlds import example
from trainer_bridge.drafter.feature_cache import CacheOrigin, FeatureCache, FeatureCacheWriter, cache_bytes
from trainer_bridge.drafter.stream import ExampleOrder, LiveFeatures, stream

ORIGIN = CacheOrigin(target_digest="d", layers=(0,), hidden=64, dtype="float32")


def examples(count=6):
    return [example(f"group/{i}", 3, 4 + i, domain="ab"[i % 2]) for i in range(count)]


def build(world, folder, count=6, shard_bytes=6000):
    writer = FeatureCacheWriter(folder, ORIGIN, shard_bytes)
    writer.append(world.scorer.score(examples(count)))
    writer.close()
    return FeatureCache(folder, ORIGIN)


def assert_same(one, other):
    assert (one.example.key, one.example.domain) == (other.example.key, other.example.domain)
    assert np.array_equal(one.example.ids, other.example.ids) and np.array_equal(one.example.mask, other.example.mask)
    assert torch.equal(one.features_TMD, other.features_TMD) and torch.equal(one.last_TD, other.last_TD)


def test_what_is_stored_is_what_was_computed(world, tmp_path):
    cache = build(world, tmp_path)
    assert len(cache.manifest.shards) > 1 and len(cache) == 6
    live = LiveFeatures(world.scorer, examples())
    for place in (5, 0, 3):
        assert_same(cache.fetch([place])[0], live.fetch([place])[0])
    expected = cache_bytes(cache.num_tokens, ORIGIN)
    assert expected <= cache.num_bytes <= expected * 1.2 + 2000 * len(cache.manifest.shards)


def test_a_build_that_was_cut_short_goes_on(world, tmp_path):
    items = world.scorer.score(examples())
    first = FeatureCacheWriter(tmp_path, ORIGIN, shard_bytes=1)
    first.append(items[:2])
    (tmp_path / ".shard-000002.safetensors.partial").write_bytes(b"half a shard")
    again = FeatureCacheWriter(tmp_path, ORIGIN, shard_bytes=1 << 20)
    assert again.keys == {"group/0", "group/1"}
    again.append(items)
    again.close()
    cache = FeatureCache(tmp_path, ORIGIN)
    assert cache.keys == [f"group/{i}" for i in range(6)]
    for item, stored in zip(items, cache.fetch(range(6)), strict=True):
        assert_same(item, stored)


@pytest.mark.parametrize(
    ("field", "value"), [("target_digest", "other"), ("layers", (0, 1)), ("hidden", 32), ("dtype", "bfloat16")]
)
def test_states_of_something_else_are_refused_by_field(world, tmp_path, field, value):
    build(world, tmp_path, 1)
    other = CacheOrigin(**{name: getattr(ORIGIN, name) for name in ORIGIN.__struct_fields__} | {field: value})
    with pytest.raises(InvalidRequest, match=field):
        FeatureCache(tmp_path, other)
    with pytest.raises(InvalidRequest, match=field):
        FeatureCacheWriter(tmp_path, other)


def test_a_damaged_cache_is_refused_by_file(world, tmp_path):
    cache = build(world, tmp_path, 1)
    (tmp_path / cache.manifest.shards[0].file).write_bytes(b"no safetensors")
    with pytest.raises(InvalidRequest, match=r"shard-000000.*group/0"):
        cache.fetch([0])
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(InvalidRequest, match=r"manifest\.json"):
        FeatureCache(tmp_path, ORIGIN)


def test_steps_share_an_epoch_out_and_follow_from_their_number():
    order = ExampleOrder(10, 4, seed=1)
    epoch = [place for step in range(order.steps_per_epoch) for place in order.at(step)]
    assert sorted(epoch) == list(range(10)) and order.steps_per_epoch == 3
    assert order.at(0) != order.at(3) and order.at(4) == ExampleOrder(10, 4, seed=1).at(4)
    ranks = [ExampleOrder(10, 4, 1, rank, 2) for rank in range(2)]
    for step in range(6):
        assert sorted(ranks[0].at(step) + ranks[1].at(step)) == sorted(order.at(step))


class Counting:
    def __init__(self, fail_at=None):
        self.fetched, self.fail_at = 0, fail_at

    def __len__(self):
        return 100

    def fetch(self, places):
        if self.fail_at == self.fetched:
            raise InvalidRequest(field="shard", expected="readable", actual="broken")
        self.fetched += 1
        return [places]


def numbered(examples, step):
    return step, examples


def test_the_stream_fetches_a_bounded_number_ahead_and_ends_with_its_reader():
    source = Counting()
    steps = stream(source, ExampleOrder(100, 2), 0, 50, numbered, ahead=2)
    order = ExampleOrder(100, 2)
    for step in range(3):
        assert next(steps) == (step, [order.at(step)])
    for _ in range(100):
        if source.fetched == 6:
            break
        threading.Event().wait(0.01)
    threading.Event().wait(0.05)
    assert source.fetched <= 6, "three taken, two waiting, one in hand"
    steps.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "drafter-features"]
    assert list(stream(Counting(), order, 48, 50, numbered)) == [(48, [order.at(48)]), (49, [order.at(49)])]


def test_a_fault_of_the_source_reaches_the_trainer():
    with pytest.raises(InvalidRequest, match="broken"):
        list(stream(Counting(fail_at=2), ExampleOrder(100, 2), 0, 50, numbered))
