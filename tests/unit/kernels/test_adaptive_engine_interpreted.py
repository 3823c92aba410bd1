"""What a whole adaptive engine is worth over a device whose times and acceptance are simulated: no time is measured."""

import numpy as np
import pytest

from engine.types import GroupRequest, SamplingParams
from tests.unit.dspark.simulated_device import DRAFTS, SimulatedDevice, simulated_engine

NEW = 160
KEPT = {
    "sure": [0.80, 0.62, 0.51, 0.43, 0.35, 0.30, 0.24],
    "fair": [0.60, 0.34, 0.20, 0.12, 0.07, 0.04, 0.02],
    "poor": [0.30, 0.09, 0.03, 0.01, 0.003, 0.001, 0.0003],
}


def plain(rows):
    return float(np.interp(rows, [1, 8, 32, 64], [0.455, 0.585, 0.655, 0.745])) * 1e-3


def round_seconds(rows, verify, slots):
    base = float(np.interp(rows, [1, 8, 32, 64], [0.82, 0.85, 0.95, 1.02]))
    return (base + 0.95e-3 * (verify - rows) + 0.25e-3 * slots) * 1e-3


class Sink:
    wants_deltas = False
    ended = False

    def on_sample(self, sample):
        self.ended = True

    def on_group(self, group): ...

    on_delta = on_error = on_group


def _prompt(turn, place):
    """Another one for every request."""
    return np.random.default_rng([turn, place]).integers(0, 512, 24).astype(np.uint32)


def rate(engine, device, kinds, count, turn, new=NEW):
    """Tokens per simulated second while all decode."""
    sinks, counters = [Sink() for _ in range(count)], engine.counters
    names = [f"{turn}-{place}" for place in range(count)]
    for place, (name, sink) in enumerate(zip(names, sinks, strict=True)):
        sampling = SamplingParams(temperature=0.0, max_new=4 * new, ignore_eos=True)
        ids, kind = _prompt(turn, place), kinds[place % len(kinds)]
        engine.add_group(GroupRequest(group_id=name, prompt_ids=ids, sampling=sampling, domain=kind), sink)
    while (gauges := engine.gauges()).waiting or gauges.prefilling:
        engine.step()
    device.ran.clear()
    began, tokens = device.now, counters.generated_tokens
    while counters.generated_tokens - tokens < count * new and not any(sink.ended for sink in sinks):
        engine.step()
    seconds = device.now - began
    told = (counters.generated_tokens - tokens) / seconds
    engine.abort(names)
    return told


def best_without_a_choice(kinds, rows):
    """Plain steps, or the best fixed window, per second."""
    windows = [
        (1 + np.mean([sum(KEPT[kind][:window]) for kind in kinds])) / round_seconds(rows, rows * (1 + window), rows * 7)
        for window in (1, 3, 5, 7)
    ]
    return rows * max(1 / plain(rows), *windows)


@pytest.fixture
def device(monkeypatch):
    device = SimulatedDevice(plain, round_seconds, KEPT)
    device.install(monkeypatch)
    return device


def test_no_fixed_choice_does_much_better(device, tmp_path):
    """Batches that ought to draft and such as ought not take turns; each is played until what is worth making has been
    made, whatever that took."""
    engine = simulated_engine(device, tmp_path, 64)
    turn = 0
    for kinds in (("sure",), ("poor",), ("sure", "fair", "poor")):
        for count in (1, 8, 64):
            plays = []
            for _ in range(3):
                plays.append(rate(engine, device, kinds, count, turn))
                turn += 1
            assert max(plays) > 0.93 * best_without_a_choice(kinds[:count], count), (kinds, count, plays, device.ran)
    errors = engine._parts.speculation.cost.errors
    assert errors.absolute / errors.measured < 0.1, "a graph that was made in between is no part of a round"


def test_a_batch_of_others_is_judged_by_what_it_says_of_itself(device, tmp_path):
    engine = simulated_engine(device, tmp_path, 16)
    for turn in range(3):
        rate(engine, device, ("sure",), 8, 2 * turn)
        rate(engine, device, ("poor",), 8, 2 * turn + 1)
    for turn, (kind, drafts) in enumerate((("sure", True), ("poor", False)), start=6):
        rate(engine, device, (kind,), 8, turn, new=80)
        rounds = sum(count for (_, verify), count in device.ran.items() if verify)
        assert (rounds > 0.7 * device.ran.total()) if drafts else (rounds < 0.2 * device.ran.total()), device.ran
    assert engine._parts.speculation.max_drafts == DRAFTS
