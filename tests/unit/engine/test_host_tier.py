"""What is evicted and comes back from the host: as if it had never gone, or not at all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.errors import InvalidRequest
from engine.memory.host_lanes import HostLanes
from tests.oracle.latent_models import index, shape
from tests.support import TOLERANCE, ask, make_engine, save_tiny, update
from tests.unit.dspark.served import dspark, save_random, timeless
from tests.unit.engine.schedules import fuzz
from tests.unit.engine.test_updates import Sink

SLIDING, FULL = "sliding_attention", "full_attention"
PROMPTS, LENGTH = 9, 54
POOL = PROMPTS * 60 // 3
"""A third of what the prompts and their answers fill."""
KINDS: dict[str, dict] = {
    "full": {},
    "windows": {"window_tokens": 96},
    "states": {"state_slots": 14, "page_size": 8},
    "index": {},
}


def make_folder(root, kind: str):
    if kind == "windows":
        return save_tiny(
            root,
            seed=4,
            kind="gemma3_text",
            sliding_window=8,
            layer_types=[SLIDING, FULL, SLIDING],
            num_hidden_layers=3,
        )
    if kind == "states":
        layers = ["conv", "full_attention", "conv"]
        return save_tiny(root, seed=4, kind="lfm2", layer_types=layers, num_hidden_layers=3, block_multiple_of=32)
    if kind == "index":
        model, fields = shape("v32-4")
        return save_tiny(root, seed=4, kind=model, **(fields | index(4, 8) | {"num_hidden_layers": 2}))
    return save_tiny(root, seed=4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: make_folder(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def prompts() -> list[np.ndarray]:
    """Half of them share their first half."""
    random = np.random.default_rng(3)
    heads = [random.integers(1, 500, LENGTH // 2) for _ in range(PROMPTS // 2 + 1)]
    return [np.concatenate([heads[i // 2], random.integers(1, 500, LENGTH - LENGTH // 2)]) for i in range(PROMPTS)]


def make(folder, kind: str, host: bool, **fields):
    """Deterministic: attention on the CPU is otherwise computed in ways that depend on the pool's size."""
    settings = {"kv_tokens": POOL, "max_running": 2, "host_mib": int(host), "deterministic": True}
    return make_engine(folder, **(settings | KINDS[kind] | fields))


def serve(engine, turns: int = 2, check: bool = True, count: int = PROMPTS, **sampling) -> list:
    """Every prompt in every turn, one after the other."""
    samples = []
    for turn in range(turns):
        for i, ids in enumerate(prompts()[:count]):
            (group,) = engine.generate([ask(f"{turn} {i}", ids, **({"max_new": 4} | sampling))])
            samples += group.samples
            if check:
                engine.check()
    return samples


def bits(samples) -> list:
    return [(sample.ids.tolist(), sample.logprobs.tobytes()) for sample in samples]


def cached(samples) -> int:
    return sum(sample.cached_tokens for sample in samples[PROMPTS:])


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("windows", "states") else pytest.mark.slow) for kind in KINDS]
)
def test_a_working_set_of_three_pools_keeps_its_hits(folders, kind):
    """As in an engine whose memory holds it all, bit for bit; without the tier next to nothing is found again. No
    page ends with a prompt: it would be computed again, and the tree's own be kept by the large engine alone."""
    engine, alone = make(folders[kind], kind, True, canary=1), make(folders[kind], kind, False)
    large = {"kv_tokens": 4096, "window_tokens": "auto", "state_slots": "auto"}
    whole = serve(make(folders[kind], kind, False, **large), check=False)
    restored, cold = serve(engine), serve(alone, check=False)
    assert bits(restored) == bits(whole)
    for a, b in zip(restored, cold, strict=True):
        assert a.ids.tolist() == b.ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=TOLERANCE)
    assert cached(restored) == cached(whole) > 3 * cached(cold)
    counters = engine.counters
    assert counters.host_restored > 40 and counters.host_failed == 0
    assert 0 < counters.host_hit_tokens <= counters.hit_tokens
    assert 0 < engine.gauges().host_bytes <= engine.gauges().host_limit_bytes == 1 << 20


def test_drafts_are_accepted_as_before(folders, tmp_path):
    """A drafter's context comes back with the pages: acceptance is that of an engine that never evicts."""
    settings = dspark(save_random(tmp_path / "drafter"))
    reports = []
    for host, tokens in ((True, 80), (False, 4096)):
        engine = make(folders["full"], "full", host, kv_tokens=tokens, dspark=settings)
        timeless(engine)
        samples = serve(engine, max_new=7, check=host, count=3)
        counters = engine.draft_counters()
        hits = [sample.cached_tokens for sample in samples]
        reports.append((bits(samples), hits, counters["draft_verified"], counters["draft_accepted"]))
        assert counters["draft_verified"] > 30 and (engine.counters.host_restored > 20) == host
    assert reports[0] == reports[1] and min(reports[0][1][3:]) > 40


class Torn(HostLanes):
    """Copies fail before they begin (`out`, `back`), or bring less than all or something else (`short`, `other`)."""

    fault = ""

    def keep(self, layout, ids, rows, arena):
        if self.fault == "out":
            raise RuntimeError("no copy")
        super().keep(layout, ids, rows, arena)

    def bring(self, layout, rows, arena):
        if self.fault == "back":
            raise RuntimeError("no copy")
        for row in rows[1::2]:
            row_X = arena.data_UX[row.slot]
            if self.fault == "short":
                row_X[len(row_X) // 2 :] = 0
            elif self.fault == "other":
                row_X.copy_(arena.data_UX[rows[0].slot])
            elif self.fault == "bit":
                row_X[7] ^= 4
        return super().bring(layout, rows, arena)


class Late(HostLanes):
    """Copies of three rows at most, two at a time, that take their time as a device's do."""

    flying = 0

    def most(self, layout):
        return 3

    @property
    def ready(self):
        return self.flying < 2

    def bring(self, layout, rows, arena):
        arrival, self.flying = super().bring(layout, rows, arena), self.flying + 1
        arrival.event = Later()
        return arrival

    def end(self, arrival):
        self.flying -= 1


class Later:
    def __init__(self):
        self.asked = 0

    def query(self):
        self.asked += 1
        return self.asked > 3

    def synchronize(self):
        self.asked = 3


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "full" else pytest.mark.slow) for kind in KINDS]
)
def test_hits_wait_for_what_is_on_its_way(folders, kind):
    """Others run meanwhile; somebody gives up; flushes and updates find copies in the air."""
    engine = make(folders[kind], kind, True, max_running=3)
    engine._parts.pages.restores.tier.lanes.__class__ = Late
    cold = [sample.ids.tolist() for sample in serve(make(folders[kind], kind, False), 1, check=False)]
    serve(engine, 1)
    for turn in range(3):
        sinks = [Sink() for _ in range(PROMPTS)]
        for i, ids in enumerate(prompts()):
            engine.add_group(ask(f"{turn} {i}", ids, max_new=4), sinks[i])
        engine.abort([f"{turn} 1"])
        while not all(sink.group for sink in sinks):
            assert engine.step()
            engine.check()
            if turn == 1 and sinks[4].group:
                engine.flush()
        assert [sink.group.samples[0].ids.tolist() for i, sink in enumerate(sinks) if i != 1] == cold[:1] + cold[2:]
        if turn == 0:
            assert engine.counters.host_hit_tokens > 150
    engine.add_group(ask("late", prompts()[0], max_new=4), Sink())
    update(engine, folders[kind], 1, kv_policy="namespace")
    assert [sample.ids.tolist() for sample in serve(engine, 1)] == cold
    assert engine.flush() > 0 and engine.gauges().pages_free == engine.gauges().pages_total


FAULTS = ["out", "back", "short", "other", "bit"]


@pytest.mark.parametrize(
    ("kind", "faults"),
    [
        ("full", ["out", "back", "short"]),
        *(pytest.param(kind, FAULTS, marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_what_goes_wrong_costs_hits_alone(folders, kind, faults):
    engine = make(folders[kind], kind, True)
    tier = engine._parts.pages.restores.tier
    tier.lanes.__class__ = Torn
    cold = [sample.ids.tolist() for sample in serve(make(folders[kind], kind, False), 1, check=False)]
    serve(engine, 1)
    for fault in faults:
        tier.lanes.fault, failed = fault, engine.counters.host_failed
        assert [sample.ids.tolist() for sample in serve(engine, 1)] == cold
        assert engine.counters.host_failed > failed, fault
    tier.lanes.fault = ""
    hits = engine.counters.host_hit_tokens
    assert [sample.ids.tolist() for sample in serve(engine)] == cold + cold
    assert engine.counters.host_hit_tokens > hits


def test_what_is_kept_goes_with_its_namespace(folders, tmp_path_factory):
    """Updates, flushes and salts: nothing of another namespace is ever found."""
    engine, ids = make(folders["full"], "full", True), prompts()[0]
    other = save_tiny(tmp_path_factory.mktemp("w1"), seed=1)

    def hit(name: str, **fields) -> int:
        (group,) = engine.generate([ask(name, ids, max_new=1, **fields)])
        return group.hit.usable

    def evicted() -> None:
        assert engine._parts.cache.evict(1000) > 0

    for salt in ("", "a"):
        assert (hit("cold", cache_salt=salt), evicted(), hit("warm", cache_salt=salt)) == (0, None, 52)
    evicted()
    assert hit("other", cache_salt="b") == 0
    update(engine, other, 1, kv_policy="namespace")
    kept = engine.counters.host_spilled
    evicted()  # also what is of the version before: it is not kept
    assert engine.counters.host_spilled == kept and hit("new") == 0
    evicted()
    assert hit("again") == 52
    evicted()
    engine.flush()
    assert hit("flushed") == 0
    evicted()
    engine.release_memory(["kv"])
    engine.resume_memory(["kv"])
    assert hit("resumed") == 0
    engine.check()
    for mib, expected in ((-1, "0 or more"), (1 << 40, "at most")):
        with pytest.raises(InvalidRequest, match=rf"cache.host_mib.*{expected}"):
            make(folders["full"], "full", False, host_mib=mib)
    with pytest.raises(InvalidRequest, match=r"cache.host_mib.*without cache.prefix_cache"):
        make(folders["full"], "full", True, prefix_cache=False)
    with pytest.raises(InvalidRequest, match=r"cache.host_mib.*at least [2-9]"):
        make(folders["full"], "full", True, page_size=2048, kv_tokens=4096)
    assert any("on the host" in line for line in engine.memory_plan.lines())


@pytest.mark.parametrize(("loop", "seed"), [("serial", 20), ("overlapped", 21)])
def test_random_schedules(t_full, t_full_w1, loop, seed):
    tally = fuzz([t_full, t_full_w1], [seed], loop, host_mib=1)
    assert tally.samples > 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("loop", ["serial", "overlapped"])
def test_many_random_schedules(t_full, t_full_w1, loop):
    tally = fuzz([t_full, t_full_w1], range(5000, 5150), loop, host_mib=1)
    assert tally.samples > 1500


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["windows", "states", "index"])
def test_many_random_schedules_of_all_states(folders, tmp_path, kind):
    both = [folders[kind], make_folder(tmp_path, kind)]
    fields = {"windows": {"window_tokens": 48}, "states": {"state_slots": 40}, "index": {}}[kind]
    tally = fuzz(both, range(6000, 6060), "serial", host_mib=1, **fields)
    assert tally.samples > 300


def test_a_row_tells_any_change_of_itself(folders):
    """Each of its words and its tag, and that it is another's."""
    engine = make(folders["full"], "full", True)
    layout = engine._parts.pages.restores.tier.layouts["full"]
    for tensor in layout._tensors:
        tensor.copy_(torch.randn(tensor.shape))
    tags, rows = torch.tensor([5, -6]), torch.empty(2, layout.row_bytes, dtype=torch.uint8)
    layout.pack(torch.tensor([3, 9]), tags, rows)
    assert layout.whole(rows, tags).tolist() == [True, True]
    assert layout.whole(rows.flip(0), tags).tolist() == [False, False]
    words = rows.view(torch.int32)
    for word in range(0, words.shape[1], 5):
        words[0, word] += 1
        assert layout.whole(rows, tags).tolist() == [False, True], word
        words[0, word] -= 1
    assert layout.whole(torch.zeros_like(rows), torch.zeros_like(tags)).tolist() == [False, False]
