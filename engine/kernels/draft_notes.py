"""What a round's drafts come to once they are chosen, in one launch.

Owns their ids and log q by row instead of by draft, and the confidence head (`engine.dspark.heads`): how sure
the drafter is of each, before it is chosen. The head's sums are fp32. Ignores what confidences are good for
(`engine.kernels.round_spend`).

Shapes: B rows, G drafts, D hidden, R rank.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.attention_tile import power_of_two
from engine.kernels.early import await_inputs, is_early, options, release_next

CHUNK = 1024


@dataclass(frozen=True, slots=True)
class ConfidenceWeights:
    """`weight_1E` over a draft's state [D] and, with `w1_VR`, that row of the token before."""

    weight_1E: torch.Tensor
    bias_1: torch.Tensor
    w1_VR: torch.Tensor | None


@dataclass(slots=True)
class DraftNotes:
    """Filled by `note_drafts`: int64 [B, G]; float32 [B, G], None where nobody asks."""

    ids_BG: torch.Tensor
    confidence_BG: torch.Tensor | None
    log_q_BG: torch.Tensor | None


def note_drafts_reference(
    hidden_BGD: torch.Tensor,
    anchor_ids_B: torch.Tensor,
    ids_GB: torch.Tensor,
    log_q_GB: torch.Tensor,
    head: ConfidenceWeights,
) -> DraftNotes:
    seen_BGE = hidden_BGD.float()
    if head.w1_VR is not None:
        previous_GB = torch.cat((anchor_ids_B.clamp(min=0)[None], ids_GB[:-1]))
        seen_BGE = torch.cat((seen_BGE, head.w1_VR[previous_GB.t()].float()), dim=-1)
    confidence_BG = seen_BGE @ head.weight_1E[0].float() + head.bias_1.float()
    return DraftNotes(ids_GB.t().contiguous(), confidence_BG, log_q_GB.t().contiguous())


@triton.jit(do_not_specialize=["rows"])
def _notes_kernel(
    hidden_ptr, anchor_ids_ptr, ids_ptr, log_q_ptr, weight_ptr, bias_ptr, w1_ptr, ids_out, confidence_out, log_q_out,
    at_ptr, rows, row_stride, draft_stride,
    G: tl.constexpr, D: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr, RANK: tl.constexpr,
    CONFIDENCE: tl.constexpr, LOG_Q: tl.constexpr, PACKED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    release_next(EARLY)
    row, draft = tl.program_id(0), tl.program_id(1)
    at, out = draft * rows + row, row.to(tl.int64) * G + draft
    tl.store(ids_out + out, tl.load(ids_ptr + at))
    if LOG_Q:
        tl.store(log_q_out + out, tl.load(log_q_ptr + at))
    if CONFIDENCE:
        token = row
        if PACKED:
            token = tl.load(at_ptr + at)
            if token < 0:
                tl.store(confidence_out + out, 0.0)
                return
        hidden_ptr += token.to(tl.int64) * row_stride + draft * draft_stride
        total = tl.load(bias_ptr).to(tl.float32)
        for first in range(0, D, CHUNK):
            k = first + tl.arange(0, CHUNK)
            hidden = tl.load(hidden_ptr + k, mask=k < D, other=0.0).to(tl.float32)
            total += tl.sum(hidden * tl.load(weight_ptr + k, mask=k < D, other=0.0).to(tl.float32), 0)
        if R > 0:
            r = tl.arange(0, RANK)
            previous = tl.load(anchor_ids_ptr + row)
            if draft > 0:
                previous = tl.load(ids_ptr + at - rows)
            code = tl.load(w1_ptr + tl.maximum(previous, 0) * R + r, mask=r < R, other=0.0).to(tl.float32)
            total += tl.sum(code * tl.load(weight_ptr + D + r, mask=r < R, other=0.0).to(tl.float32), 0)
        tl.store(confidence_out + out, total)


def note_drafts(
    hidden_BGD: torch.Tensor,
    anchor_ids_B: torch.Tensor,
    ids_GB: torch.Tensor,
    log_q_GB: torch.Tensor,
    head: ConfidenceWeights | None,
    out: DraftNotes,
    at_GB: torch.Tensor | None = None,
) -> None:
    """`hidden_BGD` are the states that drafts were made from, `ids_GB` int64 and `log_q_GB` float32 the drafts;
    `anchor_ids_B` int64 are below 0 in idle rows. With `at_GB` int32 states are packed, [T, D], and those are the
    rows of drafts among them, below 0 where none was made: their confidence is 0."""
    (drafts, rows), width = ids_GB.shape, hidden_BGD.shape[-1]
    assert hidden_BGD.stride(-1) == 1 and ids_GB.is_contiguous() and log_q_GB.is_contiguous()
    assert out.confidence_BG is None or head is not None, "confidence needs a head"
    w1_VR = None if head is None else head.w1_VR
    rank = 0 if w1_VR is None else w1_VR.shape[1]
    assert head is None or head.weight_1E.shape == (1, width + rank), "a weight a value"
    early = is_early(hidden_BGD)
    _notes_kernel[(rows, drafts)](
        hidden_BGD,
        anchor_ids_B,
        ids_GB,
        log_q_GB,
        hidden_BGD if head is None else head.weight_1E,
        hidden_BGD if head is None else head.bias_1,
        hidden_BGD if w1_VR is None else w1_VR,
        out.ids_BG,
        log_q_GB if out.confidence_BG is None else out.confidence_BG,
        log_q_GB if out.log_q_BG is None else out.log_q_BG,
        anchor_ids_B if at_GB is None else at_GB,
        rows,
        hidden_BGD.stride(0),
        hidden_BGD.stride(1) if at_GB is None else 0,
        G=drafts,
        D=width,
        R=rank,
        CHUNK=min(CHUNK, power_of_two(width)),
        RANK=power_of_two(max(1, rank)),
        CONFIDENCE=out.confidence_BG is not None,
        LOG_Q=out.log_q_BG is not None,
        PACKED=at_GB is not None,
        EARLY=early,
        num_warps=4,
        **options(early),
    )
