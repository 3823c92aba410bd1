"""Speculation for LoRA policies: exact for each, counted for each, and given up for those it loses at alone."""

from __future__ import annotations

import numpy as np
import pytest

from engine.dspark.kinds import Kinds
from engine.dspark.survival import AcceptanceEstimate, DraftSwitch
from tests.support import prompt, reference_greedy
from tests.unit.dspark.served import Oracle, Scripted, scripted_engine, timeless
from tests.unit.engine.lora_cases import ask_with, greedy_of, logprobs_of, save_adapter

STARTS = {None: 10, "LA": 150, "LB": 300}
"""Prompts of a policy begin here, so that a script knows whose text it goes on with."""


@pytest.fixture(scope="module")
def folders(t_full, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(t_full, root / name, seed) for seed, name in enumerate(("LA", "LB"), start=1)}


class Policies:
    """What each policy says next."""

    def __init__(self, base, folders) -> None:
        self._oracles = {None: Oracle(base)}
        for name, folder in folders.items():
            oracle = self._oracles[name] = Oracle(base)
            oracle.logits = lambda ids, folder=folder: logprobs_of(base, folder, ids)

    def __call__(self, tokens, count):
        name = max((start, name or "") for name, start in STARTS.items() if start <= tokens[0])[1] or None
        return self._oracles[name](tokens, count)


def engine_of(t_full, folders, right, **fields):
    engine = scripted_engine(t_full, Scripted(Policies(t_full, folders), right), **fields)
    for name, folder in folders.items():
        engine.adapters.register_folder(name, folder)
    return engine


def test_case_e7_rows_of_many_policies_accept_each_their_own_number_of_drafts(t_full, folders):
    engine = engine_of(t_full, folders, lambda slot, number: (slot + number) % 4)
    names = [None, "LA", "LB", "LA", None]
    prompts = [prompt(n, STARTS[name]) for name, n in zip(names, (3, 9, 17, 5, 12), strict=True)]
    asked = [ask_with(name, str(i), ids) for i, (name, ids) in enumerate(zip(names, prompts, strict=True))]
    for name, ids, group in zip(names, prompts, engine.generate(asked), strict=True):
        wanted = reference_greedy(t_full, ids, 12) if name is None else greedy_of(t_full, folders[name], ids, 12)
        assert group.samples[0].ids.tolist() == wanted
        assert {span.adapter_rev for span in group.samples[0].spans} == {0 if name is None else 1}
    report = engine._parts.speculation.record.report()
    assert report.adapters == ["", "LA", "LB"]
    for name in report.adapters:
        assert 0 < report.total("accepted", adapter=name) < report.total("verified", adapter=name)
    assert sum(report.by("steps", "adapter").values()) == report.total("steps") > 0
    assert "draft/accept_length/adapter/LA" in report.metrics()
    engine.check()


def test_a_policy_whose_drafts_are_lost_is_left_alone_and_others_are_drafted_for_on(t_full, folders):
    """Confidence throughout, believed whatever comes of it; success under LA and the base, none under LB."""
    engine = engine_of(t_full, folders, lambda slot, number: 4, dspark=dict(mode="compact", least=4))
    speculation = timeless(engine)
    scripted = speculation.drafter
    texts = scripted.texts
    scripted._right = lambda slot, number: 0 if texts[slot][0] >= STARTS["LB"] else 4
    speculation.record.priors = lambda samples, kinds: np.ones((len(samples), 4))
    speculation.record.kept = lambda kinds: np.ones((len(kinds), 4))
    asked = [ask_with(name, str(name), prompt(6, start), max_new=40) for name, start in STARTS.items()]
    groups = engine.generate(asked)
    record, step = speculation.record, speculation._step
    assert "LB" in record.switch.barred(step) and "LA" not in record.switch.barred(step)
    assert record.switch.allows(step, 3), "one policy's losses switch nobody else off"
    lost, won = (record.report().figures(adapter=name) for name in ("LB", "LA"))
    assert lost["accepted"] == 0.0 and won["accepted"] == 1.0
    assert lost["drafting"] < 0.5 < won["drafting"]
    for (name, start), group in zip(STARTS.items(), groups, strict=True):
        if name is not None:
            ids = group.samples[0].ids.tolist()
            assert ids == logprobs_of(t_full, folders[name], [*prompt(6, start), *ids])[5:-1].argmax(-1).tolist()
    engine.check()


def test_a_new_group_starts_from_its_policy():
    estimate = AcceptanceEstimate(1, fade=1.0, leaning=2.0)
    for _ in range(40):
        estimate.observe_kinds(Kinds.of([("near", None), ("far", None)]), np.array([[1.0], [0.0]]))
    names = [("near", None), ("far", None), ("unseen", None)]
    near, far, new = estimate.survivals(["new"] * 3, ["r"] * 3, Kinds.of(names))[:, 0].tolist()
    assert far < 0.1 < new < 0.9 < near


def test_the_alarm_of_a_class_sounds_before_that_of_all():
    """Half the rows are far from what the drafter knows: those alone are left alone."""
    switch, off = DraftSwitch(cooldown=10), []
    for step in range(60):
        barred = switch.barred(step)
        off += [step] * bool(barred)
        alarmed = not barred and switch.observe_class(step, "far", 3.0, 0, 4, 1.0)
        if not (barred or alarmed):
            switch.observe(step, 3.0, 0, 4, 1.0)
        assert not switch.observe_class(step, "near", 4.0, 4, 4, -3.0)
        switch.observe(step, 4.0, 4, 4, -3.0)
        assert switch.allows(step, 1) and switch.barred(step) <= {"far"}
    # Eleven such steps and a pause, eleven and one of twice that length.
    assert off == [*range(12, 21), *range(33, 52)]
    switch.renew()
    assert not switch.barred(35)
