"""What the parts of an engine take, from a model's shape.

Owns the arithmetic of bytes: a token's keys and values, a state slot, and what steps, rounds of speculation and
shared prefixes hold at once for a number of rows. Ignores how much there is (`engine.memory.budget`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.decode_metadata import FIXED_SPLITS, STATE_BYTES
from engine.attention.verify_prefixes import LEAST_STATES
from engine.kernels.decode_pieces import whole_pieces
from engine.kernels.sample_columns import SampleWorkspace
from engine.memory.plan import Share
from engine.models.mixers import MixerSpec
from engine.models.spec import ModelSpec
from engine.runner.round_plan import tiers_of_verify_rows

GRAPH_BYTES = 512 << 20
"""For what no shape tells: graphs' nodes and page tables by tier, library workspaces, rounding."""

LOGIT_COPIES = 4
"""fp32 copies of a row's logits that the serial sampler holds at once."""


@dataclass(frozen=True, slots=True)
class DraftShape:
    """A drafter at work: `drafts` a round at most; `shape` and `block` where it has layers of its own, `captured` the
    target layers that it is told of; with `rejection` rounds keep a row of residual probabilities."""

    drafts: int
    block: int = 0
    shape: ModelSpec | None = None
    rejection: bool = False
    captured: int = 0


def token_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Keys and values of one token in all of the spec's layers."""
    return spec.token_numbers * dtype.itemsize


def window_of(spec: ModelSpec) -> int:
    """The widest window among the layers, 0 where none has one."""
    return max((layer.window or 0 for layer in spec.layers), default=0)


def split_token_bytes(spec: ModelSpec, dtype: torch.dtype) -> tuple[int, int]:
    """`token_bytes` of the layers that look at everything, and of those that look through a window."""
    windowed = sum(1 for layer in spec.layers if layer.window is not None)
    through = windowed * (token_bytes(spec, dtype) // max(1, spec.num_layers))
    return token_bytes(spec, dtype) - through, through


def step_shares(
    spec: ModelSpec, dtype: torch.dtype, prefill_tokens: int, rows: int, context: int, deterministic: bool
) -> tuple[Share, ...]:
    """A bound on what a prefill step, a captured decode step, its logits and its shared prefixes hold."""
    token, row = _activations(spec, dtype), spec.vocab_size * (dtype.itemsize + 4 * LOGIT_COPIES)
    space = max((mixer.workspace(spec.hidden, dtype) for mixer in _mixers(spec)), default=0)
    why = "activations of scheduler.prefill_tokens" + (f", {space} bytes a token for recurrences" if space else "")
    return (
        Share("prefill_step", prefill_tokens, "tokens", token + space, why),
        Share("decode_step", rows, "rows", token + row, "activations and logits of scheduler.max_running"),
        _prefix_states(spec, rows, context, deterministic),
    )


def round_share(spec: ModelSpec, dtype: torch.dtype, rows: int, draft: DraftShape) -> Share:
    """What captured rounds of speculation hold for their largest tiers: verify rows' activations, logits, states of
    shared prefixes and sampling scratch, and the drafter's block."""
    verify = tiers_of_verify_rows(rows, draft.drafts)[-1]
    logits = spec.vocab_size * dtype.itemsize
    total = verify * (_activations(spec, dtype) + logits + LEAST_STATES * _state(spec))
    total += _sampling_bytes(max(rows, verify), spec.vocab_size)
    if draft.shape is not None:
        total += rows * draft.block * (_activations(draft.shape, dtype) + logits + _state(draft.shape))
    if draft.rejection:
        total += rows * spec.vocab_size * 4
    return Share("rounds", rows, "rows", -(-total // rows), f"{verify} verify rows and {draft.drafts} drafts a row")


def context_share(spec: ModelSpec, dtype: torch.dtype, rows: int, burst: int, draft: DraftShape) -> Share:
    """What a burst of captured steps puts aside for a drafter, and what its commit makes of that: layers' outputs
    next to each other for the context and for kept states, the context, its keys and values."""
    made = 0 if draft.shape is None else draft.shape.token_numbers
    numbers = (3 * draft.captured + 1) * spec.hidden + made
    why = f"{burst} steps of {draft.captured} layers for the drafter"
    return Share("draft_context", rows, "rows", burst * numbers * dtype.itemsize, why)


def _activations(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Of one token in the layer that is being computed."""
    attention = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    if spec.latent is not None:  # queries, absorbed ones, what comes out
        attention = 2 * spec.num_heads * (spec.latent.nope_dim + spec.latent.row + spec.latent.value_dim)
    products = [2 * sum(mixer.inputs(spec.hidden).values()) + mixer.output(spec.hidden)[1] for mixer in _mixers(spec)]
    mixing = max([attention, *products])
    if any(layer.attends and layer.mixer is not None for layer in spec.layers):
        mixing += 2 * spec.hidden  # one's result beside the other's, and their sum
    width, experts = spec.intermediate, spec.experts
    if experts is not None:
        each = spec.intermediate if experts.gate is None else experts.gate.width
        width = max(width, experts.per_token * each + (0 if experts.gate is None else experts.gate.shared))
    return (3 * spec.hidden + mixing + 3 * width) * dtype.itemsize


def _mixers(spec: ModelSpec) -> list[MixerSpec]:
    return [layer.mixer for layer in spec.layers if layer.mixer is not None]


def _prefix_states(spec: ModelSpec, rows: int, context: int, deterministic: bool) -> Share:
    """Partial results of rows' pieces."""
    state = _state(spec)
    if deterministic:
        count = max(1, whole_pieces(context)) + FIXED_SPLITS
        return Share("prefix_states", rows, "rows", count * state, f"{count} fixed pieces of a context, deterministic")
    pieces = max(2, min(64, STATE_BYTES // max(1, rows * state)))
    return Share("prefix_states", rows, "rows", (pieces + 2) * state, f"{pieces} pieces of shared prefixes a row")


def _state(spec: ModelSpec) -> int:
    """Of a query over some tokens: a mean and a log-sum-exp of every head in fp32."""
    return 4 * spec.num_heads * (spec.head_dim + 1)


def _sampling_bytes(rows: int, vocab_size: int) -> int:
    space = SampleWorkspace.empty(rows, vocab_size, "meta")
    tensors = (getattr(space, name) for name in space.__slots__)
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
