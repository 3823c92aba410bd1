"""Requests of many policies in one engine: each as peft has it, whoever shares its batch."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine.collector import Collector
from engine.dspark.config import DSparkConfig
from engine.errors import Conflict, InvalidRequest, NotFound, Paused, TooLarge, Unsupported
from engine.types import AdapterRef, ScoreRequest
from lora.config import AdapterConfig
from lora.folder import read_folder
from tests.support import TOLERANCE, assert_whole, make_engine, prompt, reference_greedy, reference_logprobs
from tests.unit.engine.lora_cases import ask_with, greedy_of, logprobs_of, save_adapter
from tests.unit.lora.toy_geometry import tensors

PROMPTS = [prompt(3), prompt(9, 40), prompt(17), prompt(5, 100), prompt(12)]


@pytest.fixture(scope="module")
def folders(t_full, tmp_path_factory):
    """LA, LB, and LC with every kind of module at another rank."""
    root = tmp_path_factory.mktemp("adapters")
    ends = {"target_modules": ["q_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"], "use_rslora": True}
    return {
        "LA": save_adapter(t_full, root / "LA", 1),
        "LB": save_adapter(t_full, root / "LB", 2),
        "LC": save_adapter(t_full, root / "LC", 3, r=20, rank_pattern={"up_proj": 33}, **ends),
    }


def with_adapters(t_full, folders, *names, **fields):
    engine = make_engine(t_full, **fields)
    for name in names:
        engine.adapters.register_folder(name, folders[name])
    return engine


def small(residents: int, host_mib: int = 64) -> AdapterConfig:
    return AdapterConfig(max_resident=residents, device_mib=8, host_mib=host_mib)


def drain(engine) -> None:
    while engine.step():
        pass
    engine.check()


def expect(sample, t_full, folder, ids, num=12) -> None:
    """Tokens and log-probabilities as peft has them."""
    wanted = reference_greedy(t_full, ids, num) if folder is None else greedy_of(t_full, folder, ids, num)
    assert sample.ids.tolist() == wanted
    if folder is not None:
        whole = logprobs_of(t_full, folder, [*ids, *wanted])
        picked = [float(whole[len(ids) - 1 + place, token]) for place, token in enumerate(wanted)]
        np.testing.assert_allclose(sample.logprobs, picked, atol=TOLERANCE)
    assert_whole(sample)


@pytest.mark.usefixtures("both_loops")
def test_case_e7_a_mixed_batch_is_each_request_alone(t_full, folders):
    engine = with_adapters(t_full, folders, "LA", "LB", "LC")
    names = [None, "LA", "LB", "LC", None]
    asked = [ask_with(name, str(i), ids) for i, (name, ids) in enumerate(zip(names, PROMPTS, strict=True))]
    for name, ids, group in zip(names, PROMPTS, engine.generate(asked), strict=True):
        expect(group.samples[0], t_full, folders.get(name), ids)
        assert {span.adapter_rev for span in group.samples[0].spans} == {0 if name is None else 1}
    engine.check()


def test_drafts_are_verified_by_the_adapted_policy(t_full, folders):
    drafts = DSparkConfig(drafter="ngram", mode="static", sweep_seconds=0)
    engine = with_adapters(t_full, folders, "LA", "LC", dspark=drafts)
    loop = [5, 6, 7, 8] * 4
    names = [None, "LA", "LC", "LA"]
    asked = [ask_with(name, str(i), loop[i:], max_new=16) for i, name in enumerate(names)]
    for i, (name, group) in enumerate(zip(names, engine.generate(asked), strict=True)):
        expect(group.samples[0], t_full, folders.get(name), loop[i:], 16)
    assert engine.draft_counters()["draft_verified"] > 0
    engine.check()


def test_deterministic_rows_keep_their_bits(t_full, folders):
    """Alone or in a mixed batch: the same tokens and the very same log-probabilities, for base rows those of
    an engine without adapters."""
    names = [None, "LA", "LB", "LC", None]
    engine = with_adapters(t_full, folders, "LA", "LB", "LC", deterministic=True)
    asked = [
        ask_with(name, str(i), ids, temperature=1.0, seed=i)
        for i, (name, ids) in enumerate(zip(names, PROMPTS, strict=True))
    ]
    together = engine.generate(asked)
    for request, group in zip(asked, together, strict=True):
        fresh = make_engine(t_full, deterministic=True)
        if request.adapter is not None:
            fresh.adapters.register_folder(request.adapter.name, folders[request.adapter.name])
        (alone,) = fresh.generate([request])
        assert alone.samples[0].ids.tolist() == group.samples[0].ids.tolist()
        assert alone.samples[0].logprobs.tobytes() == group.samples[0].logprobs.tobytes()


def test_scores_and_prompt_logprobs_include_the_head(t_full, folders):
    engine = with_adapters(t_full, folders, "LA", "LC")
    ids = np.concatenate([prompt(20), prompt(9, 300)])
    for name in ("LC", "LA"):
        request = ScoreRequest(sequences=[ids, ids[:7]], adapter=AdapterRef(name=name))
        output = engine.score(request)
        whole = logprobs_of(t_full, folders[name], ids)
        wanted = [float(whole[p - 1, ids[p]]) for p in range(1, len(ids))]
        np.testing.assert_allclose(output.sequences[0].logprobs[1:], wanted, atol=TOLERANCE)
        assert output.sequences[1].adapter_rev == 1
    engine.check()


def test_case_e1_a_new_revision_shares_nothing_with_the_old(t_full, folders):
    engine = make_engine(t_full)
    for number in range(20):
        name = "LA" if number % 2 == 0 else "LB"
        report = engine.adapters.register_folder("pol", folders[name])
        assert report.rev == number + 1
        (group,) = engine.generate([ask_with("pol", "g", max_new=4)])
        expect(group.samples[0], t_full, folders[name], prompt(24), 4)
        assert group.hit.usable == 0 and group.samples[0].spans[-1].adapter_rev == number + 1
    (again,) = engine.generate([ask_with("pol", "g", max_new=4)])
    assert again.hit.usable > 0
    engine.adapters.retire("pol")
    assert engine.adapters.register_folder("pol", folders["LA"]).rev == 21
    (group,) = engine.generate([ask_with("pol", "g", max_new=4)])
    assert group.hit.usable == 0
    engine.check()


def test_case_a_adapter_names_are_no_salts(t_full, folders):
    engine = with_adapters(t_full, folders, "LA")
    engine.generate([ask_with("LA", "warm")])
    (version,) = engine.adapters.versions
    for salt in ("LA", "1", "LA@1", version.digest, repr(version.key)):
        request = ask_with(None, "g")
        (group,) = engine.generate([type(request)(**{**_fields(request), "cache_salt": salt})])
        expect(group.samples[0], t_full, None, prompt(24))
        assert group.hit.usable == 0


def _fields(request) -> dict:
    return {name: getattr(request, name) for name in request.__struct_fields__}


def test_case_e3_unknown_names_are_errors(t_full, folders):
    engine = with_adapters(t_full, folders, "LA")
    for name in ("nobody", "default", "la"):
        with pytest.raises(NotFound, match=r"adapter.*LA"):
            engine.generate([ask_with(name, "g")])
    with pytest.raises(NotFound):
        engine.generate([ask_with("LA", "g", rev=2)])
    with pytest.raises(NotFound):
        engine.score(ScoreRequest(sequences=[prompt(3)], adapter=AdapterRef(name="nobody")))
    with pytest.raises(InvalidRequest, match="adapter"):
        engine.generate([ask_with("", "g")])
    (group,) = engine.generate([ask_with(None, "g")])
    expect(group.samples[0], t_full, None, prompt(24))
    engine.check()


def test_case_e4_a_refused_adapter_disturbs_nobody(t_full, folders):
    engine = with_adapters(t_full, folders, "LA")
    config, given = read_folder(folders["LB"])
    sinks = _start(engine, [ask_with("LA", "a"), ask_with(None, "b")])
    engine.step()
    whole = {"base_model.model.lm_head.modules_to_save.weight": torch.zeros(512, 64)}
    with pytest.raises(Unsupported, match="modules_to_save"):
        engine.adapters.register("LA", config, given | whole)
    with pytest.raises(Unsupported, match="use_dora"):
        engine.adapters.register("LA", config | {"use_dora": True}, given)
    with pytest.raises(InvalidRequest, match="finite"):
        engine.adapters.register("new", config, {name: tensor * float("nan") for name, tensor in given.items()})
    assert engine.adapters.current == {"LA": 1}
    drain(engine)
    expect(sinks[0].result().samples[0], t_full, folders["LA"], prompt(24))
    expect(sinks[1].result().samples[0], t_full, None, prompt(24))


def test_case_e5_revisions_come_and_go(t_full, folders):
    """Of one name, the old ones end; of many names, the limit is said and nothing is dropped behind anybody."""
    engine = make_engine(t_full, adapters=small(4))
    for _ in range(50):
        engine.adapters.register_folder("pol", folders["LA"])
        engine.generate([ask_with("pol", "g", max_new=2)])
    assert [version.rev for version in engine.adapters.versions] == [50]
    held = engine.adapters.versions[0].num_bytes
    many = make_engine(t_full, adapters=AdapterConfig(max_resident=4, device_mib=8, host_mib=1))
    fits = (1 << 20) // held
    for number in range(fits):
        many.adapters.register_folder(f"pol-v{number}", folders["LA"])
        many.generate([ask_with(f"pol-v{number}", "g", max_new=2)])
    with pytest.raises(TooLarge, match="retire one"):
        many.adapters.register_folder("one more", folders["LA"])
    assert len(many.adapters.residency.resident) == 4 < len(many.adapters.versions) == fits
    many.adapters.retire("pol-v0")
    many.adapters.register_folder("one more", folders["LB"])
    many.check()


@pytest.mark.usefixtures("both_loops")
def test_more_adapters_than_places_take_turns(t_full, folders):
    engine = make_engine(t_full, adapters=small(2), max_running=4)
    order = ["LA", "LB", "LC"] * 3
    for number, name in enumerate(order):
        engine.adapters.register_folder(f"{name}-{number}", folders[name])
    asked = [ask_with(f"{name}-{number}", str(number), n=2, max_new=5) for number, name in enumerate(order)]
    for name, group in zip(order, engine.generate(asked), strict=True):
        for sample in group.samples:
            expect(sample, t_full, folders[name], prompt(24), 5)
    assert len(engine.adapters.residency.resident) == 2
    engine.check()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 30))])
def test_case_e6_publishing_while_others_generate(t_full, folders, seed):
    """Every sample is one revision's from end to end, and the one its spans name."""
    chance = random.Random(seed)
    engine = with_adapters(t_full, folders, "LA", adapters=small(3), loop=("serial", "overlapped")[seed % 2])
    held = {1: folders["LA"]}
    sinks = _start(engine, [ask_with("LA" if i % 2 else None, str(i), max_new=20) for i in range(6)])
    plan = ["publish", "publish", "retire", "other"]
    while engine.step() or plan:
        if plan and chance.random() < 0.3:
            action = plan.pop(0)
            if action == "publish":
                folder = folders[chance.choice(["LB", "LC"])]
                held[engine.adapters.register_folder("LA", folder).rev] = folder
                sinks += _start(engine, [ask_with("LA", f"late-{len(plan)}", max_new=6)])
            elif action == "retire":
                engine.adapters.retire("LA")
                with pytest.raises(NotFound):
                    engine.generate([ask_with("LA", "gone")])
            else:
                engine.adapters.register_folder("other", folders["LB"])
    for sink in sinks:
        (sample,) = sink.result().samples
        revs = {span.adapter_rev for span in sample.spans}
        assert len(revs) == 1
        expect(sample, t_full, held.get(revs.pop()), prompt(24), len(sample.ids))
    assert engine.adapters.current == {"other": 1}
    assert [version.name for version in engine.adapters.versions] == ["other"]
    engine.check()


@pytest.mark.usefixtures("both_loops")
@pytest.mark.parametrize("on_publish", ["keep_kv", "reprefill"])
def test_requests_may_follow_a_new_revision(t_full, folders, on_publish):
    engine = with_adapters(t_full, folders, "LA", adapters=small(1))
    sinks = _start(engine, [ask_with("LA", "a", max_new=12, on_publish=on_publish), ask_with("LA", "b", max_new=12)])
    while len(engine._groups["a"].samples[0].ids) < 4:
        engine.step()
    if on_publish == "keep_kv":
        # The other request keeps the only place: keys and values cannot be kept where the new revision is not.
        engine.abort(["b"])
    engine.adapters.register_folder("LA", folders["LB"])
    drain(engine)
    (followed,) = sinks[0].result().samples
    first, second = followed.spans
    assert (first.adapter_rev, second.adapter_rev) == (1, 2) and second.end == 12
    assert second.mixed_kv == (on_publish == "keep_kv") and not first.mixed_kv
    assert followed.ids[: first.end].tolist() == greedy_of(t_full, folders["LA"], prompt(24), first.end)
    if on_publish == "reprefill":
        start = [*prompt(24), *followed.ids[: first.end]]
        assert followed.ids[first.end :].tolist() == greedy_of(t_full, folders["LB"], start, 12 - first.end)
        expect(sinks[1].result().samples[0], t_full, folders["LA"], prompt(24))
    assert engine.adapters.current == {"LA": 2} and len(engine.adapters.versions) == 1


def test_a_stage_is_seen_by_nobody_until_published(t_full, folders):
    engine = with_adapters(t_full, folders, "LA")
    staged = engine.adapters.stage("LA", engine.adapters.prepare_folder(folders["LB"]))
    (group,) = engine.generate([ask_with("LA", "g", max_new=4)])
    expect(group.samples[0], t_full, folders["LA"], prompt(24), 4)
    with pytest.raises(NotFound):
        engine.generate([ask_with("LA", "g", rev=staged.rev)])
    engine.adapters.publish("LA", staged.rev)
    (group,) = engine.generate([ask_with("LA", "g", max_new=4)])
    expect(group.samples[0], t_full, folders["LB"], prompt(24), 4)
    with pytest.raises(Conflict):
        engine.adapters.register("LA", *read_folder(folders["LB"]), rev=staged.rev)
    dropped = engine.adapters.stage("LA", engine.adapters.prepare_folder(folders["LC"]))
    engine.adapters.discard("LA", dropped.rev)
    assert engine.adapters.current == {"LA": 2} and len(engine.adapters.versions) == 1


def test_not_a_number_in_one_adapter_reaches_nobody_else(t_full, folders):
    engine = with_adapters(t_full, folders, "LA", "LB")
    spoilt = next(version for version in engine.adapters.versions if version.name == "LB")
    engine.adapters.make_resident(spoilt)
    for site in range(1, 9):
        for factors in engine.adapters.residency.pool.factors(spoilt.slot, site):
            for factor in factors:
                factor.fill_(float("nan"))
    groups = engine.generate([ask_with(name, str(i)) for i, name in enumerate([None, "LB", "LA"])])
    expect(groups[0].samples[0], t_full, None, prompt(24))
    expect(groups[2].samples[0], t_full, folders["LA"], prompt(24))
    assert groups[1].samples[0].finish == "error"
    engine.check()


def test_aborted_requests_let_go(t_full, folders):
    engine = with_adapters(t_full, folders, "LA")
    _start(engine, [ask_with("LA", str(i), n=3, max_new=50) for i in range(8)])
    for _ in range(4):
        engine.step()
    assert engine.adapters.versions[0].references == 8
    engine.abort()
    assert engine.adapters.versions[0].references == 0
    engine.adapters.retire("LA")
    assert engine.adapters.versions == []
    engine.check()


def _start(engine, requests):
    sinks = [Collector() for _ in requests]
    for request, sink in zip(requests, sinks, strict=True):
        engine.add_group(request, sink)
    return sinks


@pytest.mark.slow
@pytest.mark.usefixtures("both_loops")
def test_a_thousand_revisions_under_load_leave_nothing_behind(t_full, folders):
    engine = make_engine(t_full, adapters=small(4), kv_tokens=1024)
    prepared = [engine.adapters.prepare_folder(folders[name]) for name in ("LA", "LB", "LC")]
    wanted = [greedy_of(t_full, folders[name], prompt(24), 6) for name in ("LA", "LB", "LC")]
    sinks: list[Collector] = []
    for number in range(1000):
        rev = engine.adapters.stage("pol", prepared[number % 3]).rev
        engine.adapters.publish("pol", rev)
        assert rev == number + 1
        sinks += _start(engine, [ask_with("pol", f"{number}", max_new=6)])
        engine.step()
        engine.step()
        assert len(engine.adapters.versions) < 20
    drain(engine)
    for number, sink in enumerate(sinks):
        (sample,) = sink.result().samples
        assert sample.ids.tolist() == wanted[number % 3]
        assert {span.adapter_rev for span in sample.spans} == {number + 1}
    assert [version.rev for version in engine.adapters.versions] == [1000]
    assert len(engine.adapters.residency.resident) == 1
    assert engine._parts.cache.stats().roots < 300


def test_an_adapter_larger_than_the_device_pool_is_refused(t_full, folders):
    engine = make_engine(t_full, adapters=AdapterConfig(device_mib=1, max_rank=128))
    where = engine._parts.model.adapter_sites
    everything = dict.fromkeys(where.places, 128)
    with pytest.raises(TooLarge, match="device_mib"):
        engine.adapters.register("big", {"r": 128}, tensors(everything, where))
    with pytest.raises(InvalidRequest, match="rank"):
        engine.adapters.register("wide", {"r": 129}, tensors({"lm_head": 129}, where))
    for field in ("max_rank", "max_resident", "device_mib", "host_mib"):
        with pytest.raises(InvalidRequest, match=f"adapters.{field}"):
            make_engine(t_full, adapters=AdapterConfig(**{field: 0}))


def test_bfloat16_weights_under_an_adapter(t_full, folders):
    """Nearer to fp32 than the difference an adapter makes, by far."""
    engine = with_adapters(t_full, folders, "LC", dtype="bfloat16")
    ids = prompt(40)
    (scored,) = engine.score(ScoreRequest(sequences=[ids], adapter=AdapterRef(name="LC"))).sequences
    whole, base = logprobs_of(t_full, folders["LC"], ids), reference_logprobs(t_full, ids)
    exact = np.asarray([float(whole[p - 1, ids[p]]) for p in range(1, len(ids))])
    assert np.abs(scored.logprobs[1:] - exact).mean() < 0.05 < 0.5 < np.abs(base[1:] - exact).mean()


def test_adapters_memory_goes_and_comes_back(t_full, folders):
    """Its addresses stay, and what was there is copied from the host again, published meanwhile or not."""
    engine = with_adapters(t_full, folders, "LA")
    asked = ask_with("LA", "before", PROMPTS[0])
    (before,) = engine.generate([asked])
    values = engine.adapters.residency.pool.values_U
    held, released = engine.release_memory(["adapters"])
    assert (held["adapters"], released["adapters"]) == (1024 << 20, 0) and not engine.adapters.residency.resident
    with pytest.raises(Paused, match="adapters"):
        engine.generate([asked])
    engine.adapters.register_folder("LB", folders["LB"])
    engine.resume_memory(["adapters"])
    assert engine.gauges().adapters_bytes == 1024 << 20 and engine.adapters.residency.pool.values_U is values
    after, other = engine.generate([ask_with("LA", "after", PROMPTS[0]), ask_with("LB", "other", PROMPTS[2])])
    assert after.samples[0].ids.tolist() == before.samples[0].ids.tolist()
    expect(other.samples[0], t_full, folders["LB"], PROMPTS[2])
    engine.check()
