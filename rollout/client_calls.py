"""Bodies of a client's calls.

Owns what a caller's arguments become on the wire. Ignores sending (`rollout.client`).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from engine.types import AdapterRef, DraftWindow, GroupRequest, NamedTensor, SampleResume, SamplingParams, Want
from rollout.codec import as_ids
from rollout.protocol import ChatMessage, GenerateCall

Ids = Sequence[int] | np.ndarray


def new_id() -> str:
    return uuid.uuid4().hex


def generate_call(
    prompt_ids: Ids | None = None,
    *,
    text: str | None = None,
    messages: Sequence[ChatMessage | dict[str, str]] | None = None,
    n: int = 1,
    sampling: SamplingParams | None = None,
    want: Want | None = None,
    stop: Sequence[str] = (),
    keep_stop: bool = False,
    want_text: bool | None = None,
    adapter: AdapterRef | None = None,
    cache_salt: str = "",
    session_id: str | None = None,
    min_policy_version: int | None = None,
    group_id: str | None = None,
    resume: list[SampleResume] | None = None,
    draft_window: DraftWindow | None = None,
    domain: str = "",
    op_id: str | None = None,
    timeout_s: float | None = None,
) -> GenerateCall:
    """The body of a generation. The prompt is given once: as ids, as text, or as messages.

    `want_text` None asks for text where the prompt was not given as ids.
    """
    request = GroupRequest(
        group_id=group_id or new_id(),
        prompt_ids=as_ids("prompt_ids", [] if prompt_ids is None else prompt_ids),
        n=n,
        sampling=sampling or SamplingParams(),
        want=want or Want(),
        adapter=adapter,
        cache_salt=cache_salt,
        session_id=session_id,
        min_policy_version=min_policy_version,
        resume=resume,
        draft_window=draft_window,
        domain=domain,
    )
    chat = None
    if messages is not None:
        chat = [item if isinstance(item, ChatMessage) else ChatMessage(**item) for item in messages]
    return GenerateCall(
        **envelope(op_id, timeout_s),
        request=request,
        text=text,
        messages=chat,
        stop=list(stop),
        keep_stop=keep_stop,
        want_text=prompt_ids is None if want_text is None else want_text,
    )


def envelope(op_id: str | None, timeout_s: float | None) -> dict[str, Any]:
    """What every body has: an id of its own, and the time after which nobody waits."""
    deadline_ms = None if timeout_s is None else max(1, round(timeout_s * 1000))
    return {"op_id": op_id or new_id(), "deadline_ms": deadline_ms}


def body_parts(tensors: Sequence[NamedTensor], limit: int) -> Iterator[list[NamedTensor]]:
    """Consecutive tensors, as many together as the limit allows."""
    part: list[NamedTensor] = []
    size = 0
    for item in tensors:
        if part and size + item.data.nbytes > limit:
            yield part
            part, size = [], 0
        part.append(item)
        size += item.data.nbytes
    if part:
        yield part
