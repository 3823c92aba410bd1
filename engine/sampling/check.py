"""Whether sampling parameters make sense.

Owns every range check on `SamplingParams` and `Want`. Ignores prompts, context length and the
rest of a request (`engine.validation`). Checks are two-sided, so NaN passes none of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NoReturn, get_args

import numpy as np

from engine.errors import InvalidRequest
from engine.sampling.seeds import U64_MAX
from engine.types import LogprobDefinition, SamplingParams, Want

MAX_TEMPERATURE = 100.0
MAX_PENALTY = 100.0
MAX_COUNT = 2**31 - 1


def validate_sampling(params: SamplingParams, want: Want, vocab_size: int, n: int) -> None:
    """Raise `InvalidRequest` naming the first field that is outside what it may be.

    `top_k` may exceed the vocabulary (it then keeps all); `top_logprobs` may not. A bias of -inf
    forbids an id; +inf is refused. Stop ids and bias ids must be in the vocabulary.
    """
    _number("sampling.temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    _integer("sampling.top_k", params.top_k, 0, MAX_COUNT)
    _number("sampling.top_p", params.top_p, 0.0, 1.0, above_low=True)
    _number("sampling.min_p", params.min_p, 0.0, 1.0)
    _number("sampling.repetition_penalty", params.repetition_penalty, 0.0, MAX_PENALTY, above_low=True)
    _number("sampling.presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _number("sampling.frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _integer("sampling.max_new", params.max_new, 1, MAX_COUNT)
    _integer("sampling.min_new", params.min_new, 0, params.max_new)
    _token_ids("sampling.stop_ids", params.stop_ids, vocab_size)
    _check_bias(params.logit_bias, vocab_size)
    _check_seeds(params, n)
    _check_want(want, vocab_size)


def _refuse(field: str, expected: str, actual: Any) -> NoReturn:
    raise InvalidRequest(field=field, expected=expected, actual=actual)


def _number(field: str, value: Any, low: float, high: float, *, above_low: bool = False) -> None:
    expected = f"a number in {'(' if above_low else '['}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        _refuse(field, expected, value)
    if not (low <= value <= high) or (above_low and value == low):
        _refuse(field, expected, value)


def _integer(field: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        _refuse(field, f"an integer in [{low}, {high}]", value)


def _token_ids(field: str, ids: Iterable[Any], vocab_size: int) -> None:
    for place, token in enumerate(ids):
        _integer(f"{field}[{place}]", token, 0, vocab_size - 1)


def _check_bias(bias: dict[int, float], vocab_size: int) -> None:
    for token, value in bias.items():
        _integer("sampling.logit_bias key", token, 0, vocab_size - 1)
        if value != -math.inf:
            largest = float(np.finfo(np.float32).max)
            _number(f"sampling.logit_bias[{token}]", value, -largest, largest)


def _check_seeds(params: SamplingParams, n: int) -> None:
    if params.seed is not None:
        _integer("sampling.seed", params.seed, 0, U64_MAX)
    if params.seeds is None:
        return
    if params.seed is not None:
        _refuse("sampling.seeds", "seed or seeds, not both", params.seeds)
    if len(params.seeds) != n:
        _refuse("sampling.seeds", f"{n} seeds, one per sample", f"{len(params.seeds)} seeds")
    for place, seed in enumerate(params.seeds):
        _integer(f"sampling.seeds[{place}]", seed, 0, U64_MAX)


def _check_want(want: Want, vocab_size: int) -> None:
    known = get_args(LogprobDefinition)
    if want.logprobs not in known:
        _refuse("want.logprobs", f"one of {', '.join(known)}", want.logprobs)
    for place, definition in enumerate(want.extra_logprobs):
        if definition not in known:
            _refuse(f"want.extra_logprobs[{place}]", f"one of {', '.join(known)}", definition)
    if len(set(want.extra_logprobs)) != len(want.extra_logprobs):
        _refuse("want.extra_logprobs", "no definition twice", want.extra_logprobs)
    _integer("want.top_logprobs", want.top_logprobs, 0, vocab_size)
    if want.prompt_logprobs_from is not None:
        _integer("want.prompt_logprobs_from", want.prompt_logprobs_from, 0, MAX_COUNT)
