"""Requests and replies of the engine, the same in one process and on the wire.

Owns the vocabulary of generation: what a caller may ask and what comes back. Ignores how these
structs are encoded (`rollout.codec`), how requests are checked against a model
(`engine.validation`), and text: the engine takes and gives token ids only.

Columns are one-dimensional NumPy arrays over a sample's new tokens, all of one length T:
`ids` uint32, `logprobs` and `entropy` float32 in nats; `top_ids`/`top_logprobs` are [T, K].
Replies leave fields at their default value off the wire; reading puts them back.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

LogprobDefinition = Literal["processed", "temperature", "raw"]
"""The distribution a log-probability refers to.

`raw`: softmax of the model's logits. `temperature`: softmax of logits / T, nothing else.
`processed`: the distribution actually sampled (bias and penalties, then temperature, top-k,
top-p, min-p). At temperature 0 all three report `raw`, and the reply says so.
"""

FinishReason = Literal["stop", "length", "abort", "error"]
PauseMode = Literal["drain", "abort", "retract", "in_place"]
KvPolicy = Literal["invalidate", "namespace", "keep"]


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How tokens are drawn.

    Order: logits -> bias and penalties -> temperature -> top-k -> top-p -> min-p.
    `temperature` 0 is argmax (lowest id wins a tie). `top_k` 0 switches it off. Penalties are
    those of the field: repetition divides positive and multiplies negative logits of every id
    seen in prompt or output; presence and frequency subtract from ids seen in the output.
    Lengths count new tokens. A stop id ends the sample and is kept as its last id unless
    `keep_stop` is false; before `min_new` tokens no stop id is sampled and no stop string stops.
    `ignore_eos` drops the model's own end ids, never the caller's `stop_ids`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    min_new: int = 0
    max_new: int = 16
    stop_ids: list[int] = msgspec.field(default_factory=list)
    ignore_eos: bool = False
    keep_stop: bool = True
    seed: int | None = None
    """The group's seed; sample i draws from `derive_seed(seed, i)`. None: a fresh random one."""
    seeds: list[int] | None = None
    """Final per-sample seeds, used as they are; excludes `seed`."""


class Want(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which columns a reply carries beside ids and log-probabilities."""

    logprobs: LogprobDefinition = "processed"
    extra_logprobs: list[LogprobDefinition] = msgspec.field(default_factory=list)
    top_logprobs: int = 0
    """Alternatives per token under the definition of `logprobs`; the sampled id is not implied."""
    entropy: bool = False
    """Entropy in nats of the distribution named by `logprobs`."""
    prompt_logprobs_from: int | None = None
    """Position of the first prompt token to score, always under `raw`; None scores nothing."""


class AdapterRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Names a LoRA policy; `rev` None binds the newest at admission.

    `on_publish` is what a newer revision does to a request that is under way: `finish` on the one it has,
    go on with the new one and the keys and values it has (`keep_kv`, marked `mixed_kv`), or have
    those computed again first (`reprefill`). With a `rev` it is always `finish`.
    """

    name: str
    rev: int | None = None
    on_publish: Literal["finish", "keep_kv", "reprefill"] = "finish"


class AdapterReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One revision of a LoRA policy. `digest` is the SHA-256 of all it computes with, `num_bytes` what it
    takes on this rank, `references` how many requests hold it."""

    name: str
    rev: int
    digest: str
    num_bytes: int
    state: str
    references: int = 0


class AdapterUpdateReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a new revision did. `pause_ms` is how long steps waited for it. One that was staged for an open
    update is `staged` until that commits. A fleet's report also gives the revision each engine has and
    the engines that failed to take it and serve nothing until replaced."""

    adapter: AdapterReport
    pause_ms: float
    engines: dict[str, int] = msgspec.field(default_factory=dict)
    fenced: list[str] = msgspec.field(default_factory=list)


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """New tokens [start, end) that one policy version sampled.

    `mixed_kv` marks tokens computed over attention state of an earlier version.
    """

    start: int
    end: int
    policy_version: int
    adapter_rev: int = 0
    drafter_version: int = 0
    mixed_kv: bool = False


class SampleResume(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):
    """What a sample has already produced, so that another engine can go on from there.

    The continuation draws exactly what the undisturbed sample would have drawn: randomness
    depends on (seed, position) alone. `max_new`, `min_new` and penalties count these ids.
    """

    index: int
    ids: np.ndarray
    spans: list[Span] = msgspec.field(default_factory=list)


class DraftWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Bounds of the drafts that a step verifies for each sample of a request. At least `least` wherever it
    is drafted for at all, as far as its end and the pages allow; at most `most` (None: what the engine
    allows, 0: none are made). They change speed and no token of the coupled rule."""

    least: int = 0
    most: int | None = None


class GroupRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):
    """`n` samples of one prompt.

    `prompt_ids` is uint32 [P], P >= 1. `group_id` names the group while it lives; samples are
    `group_id/index`. `cache_salt` separates cache entries between callers and is never joined
    with any other part of the cache key. With `resume`, exactly the listed sample indices of
    the group run, each from where it was left; the reply then holds only the continuation.
    `domain` names the kind of traffic that speculation counts it as.
    """

    group_id: str
    prompt_ids: np.ndarray
    n: int = 1
    sampling: SamplingParams = SamplingParams()
    want: Want = Want()
    adapter: AdapterRef | None = None
    cache_salt: str = ""
    session_id: str | None = None
    min_policy_version: int | None = None
    resume: list[SampleResume] | None = None
    draft_window: DraftWindow | None = None
    domain: str = ""


class CacheHit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Prompt tokens found in the cache.

    `structural` is how deep the tree knows the prompt, `usable` how deep every attention state
    can resume, `limited_by` the component that made the difference ("" where there is none).
    """

    structural: int = 0
    usable: int = 0
    limited_by: str = ""


class ErrorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Why one sample ended in `error`."""

    code: str
    message: str


class DraftUse(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What speculation did for one sample: its `steps` that verified drafts, drafts `verified` in them and
    `accepted`. Each of those steps yielded one token beside the accepted ones, unless a stop came first."""

    steps: int = 0
    verified: int = 0
    accepted: int = 0


class SampleDelta(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, eq=False):
    """Tokens [start, start + T) of one sample, in order, never to be taken back."""

    index: int
    start: int
    ids: np.ndarray
    logprobs: np.ndarray
    spans: list[Span]
    """Spans over exactly these tokens, in absolute new-token positions."""
    extra_logprobs: dict[str, np.ndarray] = msgspec.field(default_factory=dict)
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    entropy: np.ndarray | None = None


class SampleOutput(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, eq=False):
    """One finished sample. Every column has the length of `ids`, and spans partition it."""

    index: int
    ids: np.ndarray
    logprobs: np.ndarray
    logprob_definition: LogprobDefinition
    spans: list[Span]
    finish: FinishReason
    seed: int
    matched: int | str | None = None
    """The stop id or stop string that ended the sample."""
    error: ErrorInfo | None = None
    extra_logprobs: dict[str, np.ndarray] = msgspec.field(default_factory=dict)
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    entropy: np.ndarray | None = None
    retractions: int = 0
    cached_tokens: int = 0
    """Prompt tokens this sample did not compute (0 <= cached <= prompt)."""
    text: str | None = None
    """Filled by the text layer where the caller asked for text."""
    draft_use: DraftUse | None = None
    """None where no draft was verified."""


class GroupOutput(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, eq=False):
    """The reply to a `GroupRequest`, samples in index order."""

    group_id: str
    samples: list[SampleOutput]
    prompt_tokens: int
    hit: CacheHit
    policy_version: int
    """The engine's policy version when the reply was made; tokens carry theirs in spans."""
    prompt_logprobs: np.ndarray | None = None
    """float32 `raw` over positions [prompt_logprobs_from, P); NaN at position 0, which has none."""


class ScoreRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):
    """Teacher-forced log-probabilities of given sequences; nothing is sampled.

    `temperature` 1 scores the raw distribution. `start` is the first position scored.
    """

    sequences: list[np.ndarray]
    start: int = 0
    temperature: float = 1.0
    top_logprobs: int = 0
    adapter: AdapterRef | None = None


class ScoredSequence(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, eq=False):
    """float32 log-probabilities over [start, length); NaN at position 0, which has none.
    `policy_version` and `adapter_rev` are the ones that computed them."""

    logprobs: np.ndarray
    policy_version: int = 0
    adapter_rev: int = 0
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    cached_tokens: int = 0


class ScoreOutput(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, eq=False):
    """`policy_version` is the engine's when the reply was made."""

    sequences: list[ScoredSequence]
    policy_version: int


class AbortOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What became of one group that was asked to abort."""

    group_id: str
    outcome: Literal["aborted", "finished", "unknown"]


class PauseReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Samples in each state once the engine is quiescent."""

    in_flight: int
    retracted: int
    aborted: int


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One checkpoint tensor announced by an update.

    `dtype` is a safetensors name (F32, F16, BF16). `digest`, where given, is the SHA-256 hex of
    the little-endian bytes as sent.
    """

    name: str
    dtype: str
    shape: list[int]
    digest: str | None = None


class UpdateBegin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Opens the one update transaction an engine can have.

    `new_version` must exceed the engine's version and `base_version` equal it. `module` is what
    the tensors belong to. `timeout_s` bounds the silence between calls of the transaction.
    """

    txn: str
    base_version: int
    new_version: int
    manifest: list[TensorSpec]
    module: Literal["policy", "drafter"] = "policy"
    kv_policy: KvPolicy = "invalidate"
    timeout_s: float = 60.0


class NamedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):
    """Raw little-endian bytes of one tensor, C order; uint8 [num_bytes]."""

    name: str
    dtype: str
    shape: list[int]
    data: np.ndarray


class AdapterUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):
    """One revision of a LoRA policy, whole. `config` is peft's configuration, `tensors` have the names peft
    saves them under. `rev` None is the next one."""

    name: str
    config: dict[str, Any]
    tensors: list[NamedTensor]
    rev: int | None = None


class UpdateProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """State of the open transaction after a staging call."""

    txn: str
    staged: int
    announced: int
    staged_bytes: int


class UpdateReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a commit did. For `pause_ms` nothing ran: from the end of the steps in flight. `digest` is that of the
    module's parameters after it (`engine.weights.digest`).

    A fleet's report also gives the policy version each engine is at (`engines`) and the engines
    that failed the commit and serve nothing until replaced (`fenced`).
    """

    policy_version: int
    drafter_version: int
    loaded: dict[str, int]
    """Tensors taken, by module."""
    pause_ms: float
    flushed_tokens: int
    retracted: int
    digest: str
    engines: dict[str, int] = msgspec.field(default_factory=dict)
    fenced: list[str] = msgspec.field(default_factory=list)
