"""Names, revisions, requests and device slots against a model of what they promise."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from lora.device_pool import DevicePool
from lora.errors import AdapterConflict, AdapterMemory, UnknownAdapter
from lora.packing import Packed, pack
from lora.registry import Registry
from lora.residency import Residency
from lora.versions import State
from tests.unit.lora.toy_geometry import geometry, weights

WHERE = geometry()
NAMES = ("a", "b", "c")
RANKS = (4, 8, 16, 30)


@functools.cache
def packed_of(rank: int) -> Packed:
    return pack(weights({"model.layers.0.self_attn.q_proj": rank}, WHERE, rank), WHERE, torch.float32)


class Lifecycle(RuleBasedStateMachine):
    """The host holds about ten of the middle size, the device four and three slots."""

    staged = Bundle("staged")
    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        unit = packed_of(16).num_bytes
        self.pool = DevicePool(WHERE, torch.float32, torch.device("cpu"), 4 * unit, 3)
        self.residency = Residency(self.pool)
        self.freed: set[tuple[str, int]] = set()
        self.registry = Registry(10 * unit, self._on_freed)
        self.revs: dict[str, int] = dict.fromkeys(NAMES, 0)
        self.alias: dict[str, object] = {}
        self.held: list = []
        self.running: set = set()

    def _on_freed(self, version) -> None:
        assert version.key not in self.freed
        self.freed.add(version.key)
        self.residency.drop(version)

    @rule(target=staged, name=st.sampled_from(NAMES), rank=st.sampled_from(RANKS))
    def stage(self, name, rank):
        packed, full = packed_of(rank), self.registry.num_bytes
        try:
            version = self.registry.stage(name, "digest", packed)
        except AdapterMemory:
            assert full + packed.num_bytes > self.registry.host_bytes
            return multiple()
        assert version.rev == self.revs[name] + 1
        self.revs[name] = version.rev
        with pytest.raises(AdapterConflict):
            self.registry.stage(name, "digest", packed, rev=version.rev)
        self.residency.prefetch(version)
        return version

    @rule(version=consumes(staged), keep=st.booleans())
    def publish(self, version, keep):
        previous = self.alias.get(version.name)
        if previous is not None and previous.rev > version.rev:
            with pytest.raises(AdapterConflict):
                self.registry.publish(version, keep)
            self.registry.discard(version)
            return
        assert self.registry.publish(version, keep) is previous
        self.alias[version.name] = version
        if previous is not None and not keep:
            assert previous.state is (State.RETIRING if previous.references else State.FREED)

    @rule(version=consumes(staged))
    def discard(self, version):
        self.registry.discard(version)
        assert version.state is State.FREED and version.slot is None

    @rule(target=requests, name=st.sampled_from(NAMES))
    def admit(self, name):
        version = self.alias.get(name)
        if version is None:
            with pytest.raises(UnknownAdapter):
                self.registry.find(name)
            return multiple()
        assert self.registry.acquire(self.registry.find(name)) is version
        self.held.append(version)
        return version

    @rule(version=consumes(requests))
    def end(self, version):
        self.held.remove(version)
        if version not in self.held:
            self.running.discard(version)
        self.registry.release(version)

    @rule(version=requests)
    def run(self, version):
        """Whoever is referenced may become busy; busy ones are never evicted."""
        slots = {other: other.slot for other in self.running}
        order = {other: place for place, other in enumerate(self.held)}
        fits = self.residency.ensure(version, self.running, order)
        assert all(other.slot == slot for other, slot in slots.items())
        assert fits or self.running, "an empty device has room for anybody"
        if fits:
            self.running.add(version)

    @precondition(lambda self: self.alias)
    @rule(data=st.data())
    def retire(self, data):
        name = data.draw(st.sampled_from(sorted(self.alias)))
        ended = self.registry.retire(name)
        assert self.alias.pop(name) in ended
        for version in ended:
            assert version.state is (State.RETIRING if version.references else State.FREED)
        with pytest.raises(UnknownAdapter):
            self.registry.find(name)

    @invariant()
    def nothing_leaks(self):
        self.residency.check()
        versions = self.registry.versions
        assert {version.key for version in versions}.isdisjoint(self.freed)
        for version in versions:
            assert version.references == self.held.count(version) >= 0
            assert version.packed is not None
            assert version.state is not State.RETIRING or version.references > 0
        assert self.registry.current == {name: self.alias[name].rev for name in sorted(self.alias)}
        assert self.registry.num_bytes <= self.registry.host_bytes
        assert set(self.residency.resident) <= set(versions)
        for version in self.residency.resident:
            first = self.pool.factors(version.slot, 1)[0][0]
            rank = version.packed.sites[1].rank
            start = version.packed.sites[1].a
            assert torch.equal(first.reshape(-1), version.packed.values_U[start : start + first.numel()]), rank


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_a_released_reference_cannot_be_released_again():
    registry = Registry(1 << 20, lambda version: None)
    version = registry.stage("a", "d", packed_of(4))
    registry.publish(version)
    registry.release(registry.acquire(version))
    with pytest.raises(AssertionError, match="more often"):
        registry.release(version)


def test_a_thousand_revisions_leave_nothing_behind():
    pool = DevicePool(WHERE, torch.float32, torch.device("cpu"), 4 * packed_of(16).num_bytes, 3)
    residency = Residency(pool)
    registry = Registry(4 * packed_of(16).num_bytes, residency.drop)
    request = None
    for number in range(1000):
        version = registry.stage("pol", str(number), packed_of(RANKS[number % 3]))
        residency.prefetch(version)
        registry.publish(version)
        if request is not None:
            registry.release(request)
        request = registry.acquire(registry.find("pol"))
        assert residency.ensure(version, {request}, {})
    assert [v.rev for v in registry.versions] == [1000] and residency.resident == registry.versions
    residency.check()


def test_the_one_wanted_last_leaves_first():
    unit = packed_of(16).num_bytes
    residency = Residency(DevicePool(WHERE, torch.float32, torch.device("cpu"), 3 * unit, 3))
    registry = Registry(10 * unit, residency.drop)
    soon, late, never, new = (registry.stage(name, "d", packed_of(16)) for name in ("soon", "late", "never", "new"))
    assert all(residency.prefetch(version) for version in (soon, late, never))
    assert not residency.prefetch(new)
    assert residency.ensure(new, {never}, {soon: 0, late: 5}) and late.slot is None
    assert residency.ensure(late, {new}, {soon: 0}) and never.slot is None
    assert not residency.ensure(never, {new, late, soon}, {})
