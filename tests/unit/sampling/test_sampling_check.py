"""Refusal of senseless sampling parameters, by name."""

import json
import math

import msgspec
import pytest

from engine.errors import InvalidRequest
from engine.sampling.check import validate_sampling
from engine.types import SamplingParams, Want

VOCAB = 512
NAN, INF = math.nan, math.inf


def check(sampling=None, want=None, n=2):
    validate_sampling(SamplingParams(**sampling or {}), Want(**want or {}), VOCAB, n)


def refused(sampling=None, want=None, n=2) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        check(sampling, want, n)
    error = caught.value
    assert error.expected and error.actual
    json.dumps([error.field, error.expected, error.actual, error.message], allow_nan=False)
    return error


def test_defaults_pass():
    check()


@pytest.mark.parametrize(
    "good",
    [
        {"temperature": 0.0},
        {"temperature": 1e-40},
        {"temperature": 100.0},
        {"top_k": 0},
        {"top_k": 10**6},
        {"top_p": 1.0},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"repetition_penalty": 0.5},
        {"frequency_penalty": -2.0},
        {"logit_bias": {0: -INF, 511: 100.0}},
        {"stop_ids": [0, 511]},
        {"min_new": 16, "max_new": 16},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"seeds": [1, 1]},
    ],
)
def test_values_at_the_edge_pass(good):
    check(good)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [NAN, INF, -INF, -1.0, 1e30, True, "1"]),
        ("top_p", [NAN, 0.0, -0.1, 1.5, INF]),
        ("top_k", [-1, -2, 1.5, True, 2**40]),
        ("min_p", [NAN, -0.1, 1.1]),
        ("repetition_penalty", [NAN, 0.0, -1.0, INF]),
        ("presence_penalty", [NAN, INF, -INF]),
        ("frequency_penalty", [NAN, INF, -INF]),
        ("max_new", [0, -1, True, 2**31]),
        ("min_new", [-1, 17, True]),
        ("seed", [-1, 2**64, 1.5, True]),
    ],
)
def test_case_h5_senseless_values_are_refused_by_name(field, values):
    for value in values:
        assert refused({field: value}).field == f"sampling.{field}"


def test_case_f8_a_zero_repetition_penalty_is_refused():
    assert refused({"repetition_penalty": 0.0}).field == "sampling.repetition_penalty"


def test_case_h5_a_nan_decoded_from_the_wire_is_refused():
    wire = msgspec.msgpack.encode({"top_p": NAN})
    with pytest.raises(InvalidRequest, match=r"sampling\.top_p"):
        validate_sampling(msgspec.msgpack.decode(wire, type=SamplingParams), Want(), VOCAB, 1)


@pytest.mark.parametrize("bad", [9_999_999, -5, 512, True, 1.5])
@pytest.mark.parametrize("min_new", [0, 5])
def test_case_h2_stop_ids_outside_the_vocabulary_are_refused(bad, min_new):
    assert refused({"stop_ids": [3, bad], "min_new": min_new}).field == "sampling.stop_ids[1]"


@pytest.mark.parametrize(
    "bias", [{512: 1.0}, {-1: 1.0}, {True: 1.0}, {"7": 1.0}, {3: NAN}, {3: INF}, {3: 1e39}, {3: True}]
)
def test_bias_must_be_finite_or_minus_infinity_within_the_vocabulary(bias):
    assert "logit_bias" in str(refused({"logit_bias": bias}).field)


@pytest.mark.parametrize("count", [513, 10**9, -1, True, 1.0])
def test_case_h3_alternatives_beyond_the_vocabulary_are_refused(count):
    assert refused(want={"top_logprobs": count}).field == "want.top_logprobs"


def test_case_h3_none_and_the_whole_vocabulary_are_allowed():
    check(want={"top_logprobs": 0})
    check(want={"top_logprobs": 512})


def test_seeds_must_fit_the_group():
    assert refused({"seeds": [1]}).field == "sampling.seeds"
    assert refused({"seeds": [1, 2], "seed": 3}).field == "sampling.seeds"
    assert refused({"seeds": [1, -2]}).field == "sampling.seeds[1]"


def test_definitions_must_be_known_and_single():
    assert refused(want={"logprobs": "mine"}).field == "want.logprobs"
    assert refused(want={"extra_logprobs": ["raw", "mine"]}).field == "want.extra_logprobs[1]"
    assert refused(want={"extra_logprobs": ["raw", "raw"]}).field == "want.extra_logprobs"
    assert refused(want={"prompt_logprobs_from": -1}).field == "want.prompt_logprobs_from"
