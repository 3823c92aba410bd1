"""One step of sampling: definitions, columns, isolation of rows."""

import math

import numpy as np
import pytest
import torch

from engine.sampling.params import RowSampling
from engine.sampling.sampler import Sampler
from engine.sampling.seeds import derive_seed
from engine.types import SamplingParams, Want

LOGITS = [2.0, 1.0, 0.0, -1.0]
PROMPT = np.array([1, 2, 3], dtype=np.uint32)
DEFINITIONS = ("processed", "temperature", "raw")


def make_row(seed=5, want=None, prompt=PROMPT, eos=(), output=(), **sampling) -> RowSampling:
    return RowSampling(SamplingParams(**sampling), Want(**want or {}), seed, prompt, eos, output)


def logits_of(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def draw(logits_RV, rows, positions):
    return Sampler(logits_RV.shape[1], "cpu").sample(logits_RV, rows, positions)


def test_case_c1_logprobs_follow_the_temperature():
    row = make_row(temperature=0.5, want={"extra_logprobs": ["temperature", "raw"]})
    result = draw(logits_of(LOGITS), [row], [3])
    chosen = int(result.ids[0])
    processed = [-0.1451, -2.1451, -4.1451, -6.1451]
    assert result.logprobs[0].item() == pytest.approx(processed[chosen], abs=1e-4)
    assert result.extra_logprobs["temperature"][0].item() == pytest.approx(processed[chosen], abs=1e-4)
    raw = [-0.4402, -1.4402, -2.4402, -3.4402]
    assert result.extra_logprobs["raw"][0].item() == pytest.approx(raw[chosen], abs=1e-4)


def test_case_c2_truncated_and_untruncated_are_both_there():
    rows = [make_row(seed=s, top_p=0.8, want={"extra_logprobs": ["raw", "temperature"]}) for s in range(40)]
    result = draw(logits_of(*[LOGITS] * 40), rows, [3] * 40)
    assert set(result.ids.tolist()) == {0, 1}
    for r, chosen in enumerate(result.ids.tolist()):
        assert result.logprobs[r].item() == pytest.approx([-0.3133, -1.3133][chosen], abs=1e-4)
        for name in ("raw", "temperature"):
            assert result.extra_logprobs[name][r].item() == pytest.approx([-0.4402, -1.4402][chosen], abs=1e-4)


def test_temperature_leaves_out_bias_and_penalties():
    want = {"logprobs": "temperature", "extra_logprobs": ["processed"]}
    result = draw(logits_of(LOGITS), [make_row(temperature=2.0, logit_bias={3: 9.0}, want=want)], [3])
    chosen = int(result.ids[0])
    model = torch.log_softmax(torch.tensor(LOGITS) / 2, -1)
    drawn = torch.log_softmax(torch.tensor([2.0, 1.0, 0.0, 8.0]) / 2, -1)
    assert result.logprobs[0].item() == pytest.approx(model[chosen].item(), abs=1e-6)
    assert result.extra_logprobs["processed"][0].item() == pytest.approx(drawn[chosen].item(), abs=1e-6)


@pytest.mark.parametrize("definition", DEFINITIONS)
@pytest.mark.parametrize("temperature", [0.0, 1e-40])
def test_greedy_takes_the_edited_maximum_and_reports_raw(definition, temperature):
    others = [d for d in DEFINITIONS if d != definition]
    want = {"logprobs": definition, "extra_logprobs": others}
    row = make_row(temperature=temperature, logit_bias={2: 5.0}, top_k=1, want=want)
    result = draw(logits_of(LOGITS), [row], [3])
    assert int(result.ids[0]) == 2
    assert result.logprobs[0].item() == pytest.approx(-2.4402, abs=1e-4)
    assert all(result.extra_logprobs[d][0].item() == pytest.approx(-2.4402, abs=1e-4) for d in others)


def test_greedy_ties_go_to_the_lowest_id():
    logits = torch.zeros(1, 5_000)
    logits[0, [17, 900, 4_999]] = 3.0
    assert int(draw(logits, [make_row(temperature=0.0)], [3]).ids[0]) == 17


def test_a_low_temperature_agrees_with_greedy():
    logits = torch.randn(64, 101, generator=torch.Generator().manual_seed(0))
    result = draw(logits, [make_row(seed=s, temperature=2e-5) for s in range(64)], list(range(64)))
    assert result.ids.tolist() == logits.argmax(-1).tolist()
    assert torch.isfinite(result.logprobs).all()


def test_case_c6_impossible_ids_harm_nothing():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    logits[:, 7] = -math.inf
    want = {"top_logprobs": 50, "entropy": True, "extra_logprobs": ["raw"]}
    rows = [make_row(temperature=t, top_p=0.3, want=want) for t in (0.01, 1.0, 0.0)]
    result = draw(logits, rows, [3, 3, 3])
    assert not result.bad.any()
    assert 7 not in result.ids.tolist()
    assert torch.isfinite(result.logprobs).all() and torch.isfinite(result.entropy).all()
    assert torch.isfinite(result.extra_logprobs["raw"]).all()
    assert not torch.isnan(result.top_logprobs).any()
    assert result.top_logprobs[2, -1].item() == -math.inf and int(result.top_ids[2, -1]) == 7


def test_case_c8_alternatives_are_apart_from_the_sampled_id():
    logits = torch.randn(20, 60, generator=torch.Generator().manual_seed(2)).repeat_interleave(8, 0)
    rows = [make_row(seed=s, temperature=1.5, want={"top_logprobs": 2}) for s in range(20) for _ in range(8)]
    result = draw(logits, rows, list(range(3, 11)) * 20)
    reference = torch.log_softmax(logits.double() / 1.5, -1)
    outside = 0
    for r, chosen in enumerate(result.ids.tolist()):
        outside += chosen not in result.top_ids[r].tolist()
        assert result.logprobs[r].item() == pytest.approx(reference[r, chosen].item(), abs=1e-5)
    assert outside > 20


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_columns_equal_a_float64_reference(definition):
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(3)) * 3
    want = {"logprobs": definition, "top_logprobs": 5, "entropy": True}
    rows = [make_row(seed=s, temperature=0.7, logit_bias={3: 4.0}, want=want) for s in range(6)]
    result = draw(logits, rows, [3] * 6)
    edited = logits.double()
    if definition == "processed":
        edited[:, 3] += 4.0
    reference = torch.log_softmax(edited / (1.0 if definition == "raw" else 0.7), -1)
    chosen = reference.gather(1, result.ids[:, None])[:, 0]
    torch.testing.assert_close(result.logprobs.double(), chosen, atol=2e-6, rtol=0)
    values, ids = reference.topk(5, -1)
    assert result.top_ids.tolist() == ids.tolist()
    torch.testing.assert_close(result.top_logprobs.double(), values, atol=2e-6, rtol=0)
    torch.testing.assert_close(result.entropy.double(), -(reference.exp() * reference).sum(-1), atol=5e-6, rtol=0)


def test_entropy_and_alternatives_of_a_truncated_row_know_only_kept_ids():
    result = draw(logits_of(LOGITS), [make_row(top_k=2, want={"top_logprobs": 3, "entropy": True})], [3])
    p = math.e / (1 + math.e)
    assert result.entropy[0].item() == pytest.approx(-(p * math.log(p) + (1 - p) * math.log(1 - p)), abs=1e-6)
    assert result.top_logprobs[0].tolist()[:2] == pytest.approx([-0.3133, -1.3133], abs=1e-4)
    assert result.top_logprobs[0, 2].item() == -math.inf and int(result.top_ids[0, 2]) == 2


def test_wants_of_different_rows_do_not_mix():
    rows = [
        make_row(want={"top_logprobs": 1}),
        make_row(),
        make_row(want={"entropy": True, "extra_logprobs": ["raw"], "top_logprobs": 3}),
    ]
    result = draw(logits_of(LOGITS, LOGITS, LOGITS), rows, [3, 3, 3])
    assert result.top_ids.shape == result.top_logprobs.shape == (3, 3)
    assert torch.isnan(result.top_logprobs).tolist() == [[False, True, True], [True] * 3, [False] * 3]
    assert torch.isnan(result.entropy).tolist() == [True, True, False]
    assert torch.isnan(result.extra_logprobs["raw"]).tolist() == [True, True, False]
    plain = draw(logits_of(LOGITS), [make_row()], [3])
    assert plain.entropy is plain.top_ids is plain.top_logprobs is None and plain.extra_logprobs == {}


@pytest.mark.parametrize("eos", [(2, 5), ()])
def test_case_d6_no_stop_id_before_min_new_tokens(eos):
    logits = torch.full((1, 8), -5.0)
    logits[0, [2, 5]] = 20.0
    row = make_row(temperature=0.0, min_new=3, stop_ids=[6], eos=eos)
    ids = [int(draw(logits, [row], [len(PROMPT) + new]).ids[0]) for new in range(5)]
    assert ids == ([0, 0, 0, 2, 2] if eos else [2] * 5)


def test_ignored_eos_is_not_masked_but_stop_ids_are():
    logits = logits_of([0.0, 0.0, 9.0, 0.0, 0.0, 8.0])
    row = make_row(temperature=0.0, min_new=2, stop_ids=[2], ignore_eos=True, eos=(5,))
    assert int(draw(logits, [row], [3]).ids[0]) == 5


def test_case_f8_penalties_are_those_of_the_field():
    logits = logits_of([4.0, 3.0, -2.0, 1.0, 0.5])
    params = {"repetition_penalty": 2.0, "presence_penalty": 0.25, "frequency_penalty": 0.5}
    row = make_row(prompt=np.array([1, 2], dtype=np.uint32), output=[0], want={"top_logprobs": 5}, **params)
    row.observe(0)
    row.observe(4)
    result = draw(logits, [row], [5])
    edited = torch.tensor([4 / 2 - 2 * 0.5 - 0.25, 3 / 2, -2 * 2.0, 1.0, 0.5 / 2 - 0.5 - 0.25])
    reference = torch.log_softmax(edited, -1)
    assert dict(zip(result.top_ids[0].tolist(), result.top_logprobs[0].tolist(), strict=True)) == pytest.approx(
        dict(enumerate(reference.tolist())), abs=1e-6
    )


def test_bias_comes_before_the_repetition_penalty():
    row = make_row(prompt=np.array([0], dtype=np.uint32), repetition_penalty=2.0, logit_bias={0: 3.0})
    logits = logits_of([-1.0, 0.0])
    result = draw(logits, [row], [1])
    assert result.logprobs[0].item() == pytest.approx(torch.log_softmax(torch.tensor([1.0, 0.0]), -1)[result.ids[0]])
    assert logits.tolist() == [[-1.0, 0.0]], "the model's logits were written to"


def test_a_resumed_row_equals_one_that_observed_its_tokens():
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(4))
    tokens = [*range(0, 300, 2), 4, 4, 8]
    resumed = make_row(output=tokens, frequency_penalty=1.0, repetition_penalty=1.2)
    grown = make_row(frequency_penalty=1.0, repetition_penalty=1.2)
    for token in tokens:
        grown.observe(token)
    a, b = draw(logits, [resumed], [200]), draw(logits, [grown], [200])
    assert a.ids.tolist() == b.ids.tolist() and a.logprobs.tolist() == b.logprobs.tolist()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"logit_bias": {1: 1.0}}])
def test_an_unusable_row_touches_no_other(poison, sampling):
    logits = torch.randn(5, 33, generator=torch.Generator().manual_seed(5))
    rows = [make_row(seed=s, want={"entropy": s % 2 == 0, "top_logprobs": 2 * (s % 2)}, **sampling) for s in range(5)]
    clean = draw(logits, rows, [3] * 5)
    logits[2, 11] = poison
    result = draw(logits, rows, [3] * 5)
    assert result.bad.tolist() == [False, False, True, False, False]
    assert int(result.ids[2]) == 0 and math.isnan(result.logprobs[2])
    others = [0, 1, 3, 4]
    assert result.ids[others].tolist() == clean.ids[others].tolist()
    assert result.logprobs[others].tolist() == clean.logprobs[others].tolist()
    torch.testing.assert_close(result.entropy[others], clean.entropy[others], equal_nan=True, atol=0, rtol=0)


def test_a_row_with_nothing_left_to_draw_is_bad():
    nothing = torch.full((1, 4), -math.inf)
    assert draw(nothing, [make_row()], [3]).bad.tolist() == [True]
    banned = make_row(logit_bias=dict.fromkeys(range(4), -math.inf))
    assert draw(logits_of(LOGITS), [banned], [3]).bad.tolist() == [True]


def test_a_mask_does_not_hide_an_unusable_logit():
    logits = logits_of([1.0, 2.0, math.nan, 0.0])
    row = make_row(min_new=5, eos=(2,))
    assert draw(logits, [row], [3]).bad.tolist() == [True]


MATES = [
    {"top_p": 0.9},
    {"temperature": 0.0},
    {"top_k": 3, "temperature": 0.6},
    {"min_p": 0.2},
    {"repetition_penalty": 1.3},
    {"temperature": 1.7},
    {"min_new": 9, "stop_ids": [4]},
]


@pytest.mark.parametrize("vocab", [33, 512, 5_003])
def test_case_k1_batch_mates_and_order_never_enter(vocab):
    generator = torch.Generator().manual_seed(vocab)
    steps = [torch.randn(9, vocab, generator=generator) for _ in range(6)]
    subject = make_row(seed=5, want={"extra_logprobs": ["raw"]})
    mates = [make_row(seed=100 + i, **kwargs) for i, kwargs in enumerate(MATES)]
    for step, logits in enumerate(steps):
        position = 8 + step
        alone = draw(logits[:1], [subject], [position])
        for place, others in [(0, mates), (3, mates), (7, mates), (1, mates[:1]), (1, mates[1:2])]:
            rows = [*others[:place], subject, *others[place:]]
            order = [*range(1, place + 1), 0, *range(place + 1, len(rows))]
            batch = draw(logits[order], rows, [position] * len(rows))
            assert batch.ids[place] == alone.ids[0]
            assert batch.logprobs[place] == alone.logprobs[0]
            assert batch.extra_logprobs["raw"][place] == alone.extra_logprobs["raw"][0]


def test_every_kind_of_row_is_independent_of_the_order():
    logits = torch.randn(7, 301, generator=torch.Generator().manual_seed(6))
    rows = [make_row(seed=i, **kwargs) for i, kwargs in enumerate(MATES)]
    positions = list(range(3, 10))
    forward = draw(logits, rows, positions)
    order = [4, 2, 6, 0, 5, 1, 3]
    mixed = draw(logits[order], [rows[i] for i in order], [positions[i] for i in order])
    assert mixed.ids.tolist() == forward.ids[order].tolist()
    assert mixed.logprobs.tolist() == forward.logprobs[order].tolist()


def stream(seed: int, length: int = 16) -> list[int]:
    logits = torch.zeros(length, 512)
    return draw(logits, [make_row(seed=seed)] * length, list(range(8, 8 + length))).ids.tolist()


def test_case_k2_samples_of_a_group_differ_and_repeat():
    group = [stream(derive_seed(5, i)) for i in range(8)]
    assert len({tuple(ids) for ids in group}) == 8
    assert group == [stream(derive_seed(5, i)) for i in range(8)]
    split = [stream(derive_seed(5, i)) for worker in ([0, 1, 2, 3], [4, 5, 6, 7]) for i in worker]
    assert split == group


def test_a_changing_set_of_rows_keeps_each_to_its_own_parameters():
    sampler = Sampler(64, "cpu")
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(7))
    a, b, c = make_row(seed=1, temperature=0.3), make_row(seed=2, temperature=3.0), make_row(seed=3, top_k=1)
    for rows in ([a, b, c], [a, c], [c, b], [b], [a, b, c]):
        expected = [int(draw(logits[:1], [row], [9]).ids[0]) for row in rows]
        result = sampler.sample(logits[:1].expand(len(rows), 64), rows, [9] * len(rows))
        assert result.ids.tolist() == expected


def test_an_empty_batch_is_fine():
    assert Sampler(8, "cpu").sample(torch.empty(0, 8), [], []).ids.shape == (0,)


def test_wrong_shapes_are_programming_errors():
    with pytest.raises(AssertionError, match="logits"):
        Sampler(8, "cpu").sample(torch.zeros(1, 9), [make_row()], [0])
    with pytest.raises(AssertionError, match="float32"):
        Sampler(4, "cpu").sample(torch.zeros(1, 4, dtype=torch.bfloat16), [make_row()], [0])
