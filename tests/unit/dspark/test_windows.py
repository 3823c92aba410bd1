"""Windows that requests ask for, and drafting that is off at some lengths."""

import msgspec
import numpy as np
import pytest

from engine.dspark.survival import DraftSwitch, DriftAlarm
from engine.errors import InvalidRequest, Unsupported
from engine.types import DraftWindow
from rollout.client import generate_call
from rollout.codec import decode, encode
from rollout.protocol import GenerateCall
from tests.support import ask, make_engine, prompt
from tests.unit.dspark.served import Oracle, Scripted, dspark, scripted_engine, timeless


def windowed(name, window, **fields):
    return msgspec.structs.replace(ask(name, prompt(6), max_new=13, **fields), draft_window=window)


@pytest.mark.parametrize("mode", ["static", "compact", "cap_accept"])
def test_case_f5_every_request_has_its_own_window(t_full, mode):
    oracle = Oracle(t_full)
    engine = scripted_engine(t_full, Scripted(oracle, lambda slot, number: 4), dspark=dict(mode=mode, least=1))
    bounds = {"none": DraftWindow(most=0), "two": DraftWindow(most=2), "three": DraftWindow(least=3), "any": None}
    groups = engine.generate([windowed(name, window) for name, window in bounds.items()])
    used = {}
    for group in groups:
        (sample,) = group.samples
        assert sample.ids.tolist() == oracle(prompt(6).tolist(), 13)
        used[group.group_id] = sample.draft_use
    assert used["none"] is None
    for name, low, high in (("two", 1, 2), ("three", 3, 4), ("any", 1, 4)):
        use = used[name]
        # The last step of a sample has less room than it may ask for.
        kept = use.accepted if mode == "cap_accept" else use.verified
        assert low * (use.steps - 1) <= kept <= high * use.steps, name
    engine.check()


@pytest.mark.parametrize(
    ("window", "field"),
    [
        (DraftWindow(least=-1), "least"),
        (DraftWindow(least=5), "least"),
        (DraftWindow(most=5), "most"),
        (DraftWindow(most=-1), "most"),
        (DraftWindow(least=3, most=2), "least"),
    ],
)
def test_windows_that_cannot_be_are_refused_by_name(t_full, window, field):
    engine = make_engine(t_full, dspark=dspark("ngram", drafts=4))
    with pytest.raises(InvalidRequest, match=f"draft_window.{field}"):
        engine.generate([windowed("g", window)])
    assert engine.generate([windowed("g", DraftWindow(least=4, most=4))])


def test_without_a_drafter_a_window_may_only_say_none(t_full):
    engine = make_engine(t_full)
    with pytest.raises(Unsupported, match=r"draft_window\.most"):
        engine.generate([windowed("g", DraftWindow(most=3))])
    (group,) = engine.generate([windowed("g", DraftWindow(most=0))])
    assert group.samples[0].draft_use is None


def test_a_window_and_a_domain_travel():
    call = generate_call([1, 2, 3], draft_window=DraftWindow(least=1, most=3), domain="math")
    request = decode(encode(call), GenerateCall).request
    assert (request.draft_window, request.domain) == (DraftWindow(least=1, most=3), "math")
    body = msgspec.msgpack.decode(encode(call), ext_hook=lambda code, data: data)
    body["request"]["draft_window"]["most"] = "all"
    with pytest.raises(InvalidRequest, match="draft_window"):
        decode(msgspec.msgpack.encode(body | {"request": body["request"] | {"prompt_ids": [1]}}), GenerateCall)


def test_a_class_of_which_drafts_are_lost_is_left_alone_and_tried_again():
    switch = DraftSwitch(cooldown=10, alarm=DriftAlarm(threshold=1e9))
    for step in range(24):
        switch.observe_class(step, "short", 4.0, 4, 4, -2.0)
        switch.observe_class(step, "long", 3.0, 0, 4, 1.0)
    assert switch.barred(24) == {"long"}
    off = [step for step in range(24, 200) if switch.barred(step)]
    assert off and off == list(range(24, off[-1] + 1)), "off from now on, for a while"
    for number in range(1100):
        switch.observe_class(24, f"policy {number}", 1.0, 1, 4, -2.0)
    assert switch.barred(24) == {"long"}, "of so many, those that are allowed are forgotten"
    switch.renew()
    assert not switch.barred(24)


def test_drafting_stops_at_long_contexts_alone(t_full):
    """Confidence without success from 33 tokens on; shorter ones are drafted for on and on."""
    oracle = Oracle(t_full)
    drafter = Scripted(oracle, lambda slot, number: 4 if number < 6 else 0)
    engine = scripted_engine(t_full, drafter, dspark=dict(mode="compact", least=4))
    speculation = timeless(engine)
    speculation.record.priors = lambda samples, kinds: np.ones((len(samples), 4))
    engine.generate([ask("long", prompt(40), max_new=90)])
    assert speculation.record.switch.barred(speculation._step) == {7}, "64 to 127 tokens"
    plain = engine.draft_counters()["draft_plain_steps"]
    assert plain > 10
    engine.check()
