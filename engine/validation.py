"""Is a request one this engine can serve?

Owns every check made before a request touches a queue, so that nothing inside the scheduler can
be surprised. Ignores wire types (`rollout.codec`) and sampling values, which
`engine.sampling.check` judges.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.errors import InvalidRequest, TooLarge, Unsupported
from engine.sampling.check import validate_sampling
from engine.types import AdapterRef, DraftWindow, GroupRequest, SampleResume, ScoreRequest

MAX_ID_BYTES = 512
MAX_SAMPLES = 4096


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one sequence may be. `pool_tokens` is what the key/value pool can hold at all, `max_drafts` the
    most drafts of a step, 0 without a drafter."""

    vocab_size: int
    context_len: int
    pool_tokens: int
    max_waiting: int
    max_drafts: int = 0


def validate_group(request: GroupRequest, limits: EngineLimits) -> None:
    """Raise a typed error naming the first field that cannot be served."""
    check_id("group_id", request.group_id)
    _check_label("cache_salt", request.cache_salt)
    _check_label("domain", request.domain)
    check_samples(request.n)
    check_ids("prompt_ids", request.prompt_ids, limits.vocab_size)
    validate_sampling(request.sampling, request.want, limits.vocab_size, request.n)
    check_length("prompt_ids", len(request.prompt_ids), request.sampling.max_new, limits)
    _check_adapter(request.adapter)
    if request.draft_window is not None:
        _check_window(request.draft_window, limits.max_drafts)
    start = request.want.prompt_logprobs_from
    if start is not None and not 0 <= start <= len(request.prompt_ids):
        raise InvalidRequest(
            field="want.prompt_logprobs_from", expected=f"0 to {len(request.prompt_ids)}", actual=start
        )
    if request.resume is not None:
        _check_resume(request, request.resume, limits)


def validate_score(request: ScoreRequest, limits: EngineLimits) -> None:
    """Raise a typed error naming the first field that cannot be served."""
    if not request.sequences:
        raise InvalidRequest(field="sequences", expected="at least one sequence", actual=0)
    if not 1e-4 <= request.temperature <= 1e4:
        raise InvalidRequest(field="temperature", expected="1e-4 to 1e4", actual=request.temperature)
    if not 0 <= request.top_logprobs <= limits.vocab_size:
        raise InvalidRequest(field="top_logprobs", expected=f"0 to {limits.vocab_size}", actual=request.top_logprobs)
    if request.start < 0:
        raise InvalidRequest(field="start", expected="0 or more", actual=request.start)
    for number, ids in enumerate(request.sequences):
        check_ids(f"sequences[{number}]", ids, limits.vocab_size)
        check_length(f"sequences[{number}]", len(ids), 0, limits)
        if request.start > len(ids):
            raise InvalidRequest(field="start", expected=f"at most {len(ids)}", actual=request.start)
    _check_adapter(request.adapter)


def check_id(field: str, value: str) -> None:
    """Ids name things in logs and tables: short, printable, no control characters."""
    _check_label(field, value)
    if not value:
        raise InvalidRequest(field=field, expected="1 or more characters", actual=value)


def check_samples(n: int) -> None:
    if not 1 <= n <= MAX_SAMPLES:
        raise InvalidRequest(field="n", expected=f"1 to {MAX_SAMPLES}", actual=n)


def check_ids(field: str, ids: np.ndarray, vocab_size: int) -> None:
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise InvalidRequest(field=field, expected="a one-dimensional array of integers", actual=type(ids).__name__)
    if len(ids) == 0:
        raise InvalidRequest(field=field, expected="1 or more ids", actual=0)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        raise InvalidRequest(
            field=f"{field}[{outside[0]}]", expected=f"an id in [0, {vocab_size})", actual=int(ids[outside[0]])
        )


def check_length(field: str, prompt: int, new: int, limits: EngineLimits) -> None:
    """The last sampled token is never fed back, yet counts: prompt + new <= context exactly."""
    if prompt + new > limits.context_len:
        raise TooLarge(
            f"{field}: {prompt} tokens and {new} new ones exceed the context of {limits.context_len}",
            field=field,
            expected=f"prompt + max_new <= {limits.context_len}",
            actual=f"{prompt} + {new}",
        )
    if prompt + new > limits.pool_tokens:
        raise TooLarge(
            f"{field}: {prompt} tokens and {new} new ones exceed the key/value pool of {limits.pool_tokens}",
            field=field,
            expected=f"prompt + max_new <= {limits.pool_tokens}",
            actual=f"{prompt} + {new}",
        )


def _check_label(field: str, value: str) -> None:
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(field=field, expected="valid Unicode", actual=value) from None
    if size > MAX_ID_BYTES:
        raise InvalidRequest(field=field, expected=f"at most {MAX_ID_BYTES} bytes", actual=f"{size} bytes")
    if any(ord(character) < 32 or ord(character) == 127 for character in value):
        raise InvalidRequest(field=field, expected="no control characters", actual=value)


def _check_adapter(adapter: AdapterRef | None) -> None:
    if adapter is not None:
        check_id("adapter.name", adapter.name)


def _check_window(window: DraftWindow, max_drafts: int) -> None:
    """Without a drafter a window may only say that nothing be drafted."""
    for name, value in (("least", window.least), ("most", window.most)):
        if value is None:
            continue
        if value > max_drafts == 0:
            raise Unsupported(field=f"draft_window.{name}", expected="0, as there is no drafter", actual=value)
        if not 0 <= value <= max_drafts:
            raise InvalidRequest(field=f"draft_window.{name}", expected=f"0 to {max_drafts}", actual=value)
    if window.most is not None and window.least > window.most:
        raise InvalidRequest(field="draft_window.least", expected=f"at most {window.most}", actual=window.least)


def _check_resume(request: GroupRequest, resume: list[SampleResume], limits: EngineLimits) -> None:
    if not resume:
        raise InvalidRequest(field="resume", expected="1 or more samples", actual=0)
    if request.sampling.seed is None and request.sampling.seeds is None:
        raise InvalidRequest(
            field="sampling.seed", expected="the seed the samples began with, to resume them", actual=None
        )
    seen: set[int] = set()
    for number, entry in enumerate(resume):
        where = f"resume[{number}]"
        if not 0 <= entry.index < request.n or entry.index in seen:
            raise InvalidRequest(
                field=f"{where}.index", expected=f"distinct indices in [0, {request.n})", actual=entry.index
            )
        seen.add(entry.index)
        if len(entry.ids):
            check_ids(f"{where}.ids", entry.ids, limits.vocab_size)
        if len(entry.ids) >= request.sampling.max_new:
            raise InvalidRequest(
                field=f"{where}.ids", expected=f"fewer than max_new = {request.sampling.max_new}", actual=len(entry.ids)
            )
