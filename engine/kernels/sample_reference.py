"""What the sampling kernels must give, row by row in plain torch.

Owns the reading of the parameter columns; edits, noise, truncation and their order are those of
`engine.sampling`. Materialises the noise and loops over rows.

Shapes: B rows, V vocabulary, N kept ids.
"""

from __future__ import annotations

import torch

from engine.kernels.sample_columns import EditColumns, SampleColumns, SampleOut
from engine.sampling.noise import WORD_SCALE, device_words
from engine.sampling.params import GREEDY_BELOW
from engine.sampling.truncate import kept_in_order
from engine.types import SamplingParams


def sample_rows_reference(logits_BV: torch.Tensor, columns: SampleColumns, out: SampleOut) -> SampleOut:
    """Fill `out`, including entropy where it has that column; rows of inactive slots stay as they are."""
    for b, raw_V in enumerate(logits_BV.float()):
        slot = b if columns.slots_B is None else int(columns.slots_B[b])
        if slot >= 0 and bool(columns.active_S[slot]):
            _draw(raw_V, columns, slot, out, b)
    return out


def _draw(raw_V: torch.Tensor, columns: SampleColumns, slot: int, out: SampleOut, b: int) -> None:
    position = int(columns.position_S[slot])
    temperature = float(columns.temperature_S[slot])
    greedy = temperature < GREEDY_BELOW
    temperature = 1.0 if greedy else temperature
    edited_V = raw_V if columns.edits is None else _edited(raw_V, columns.edits, slot, position)
    bad = not bool(torch.isfinite(raw_V.amax()) & torch.isfinite(edited_V.amax()))
    out.bad_B[b] = bad
    if bad:
        out.ids_B[b] = 0
        for column in (out.raw_B, out.temperature_B, out.processed_B, out.lse_B, out.score_B, out.entropy_B):
            if column is not None:
                column[b] = float("nan")
        return
    wide_V, scaled_V = raw_V.double(), edited_V.double() / temperature
    score_V, drawn_V = scaled_V, wide_V
    if not greedy:
        params = SamplingParams(
            top_k=int(columns.top_k_S[slot]), top_p=float(columns.top_p_S[slot]), min_p=float(columns.min_p_S[slot])
        )
        kept_N = kept_in_order(scaled_V, params)
        drawn_V = torch.full_like(scaled_V, float("-inf"))
        drawn_V[kept_N] = scaled_V[kept_N]
        last = columns.first_id + len(raw_V)
        words_V = device_words(columns.seed_S[slot : slot + 1], columns.position_S[slot : slot + 1], last)[0]
        score_V = drawn_V - torch.log(-torch.log1p((words_V[columns.first_id :].double() + 0.5) * -WORD_SCALE))
    token = int(score_V.argmax())
    out.ids_B[b] = token + columns.first_id
    out.score_B[b] = score_V[token]
    out.lse_B[b] = torch.logsumexp(wide_V, -1)
    out.raw_B[b] = torch.log_softmax(wide_V, -1)[token]
    out.temperature_B[b] = torch.log_softmax(wide_V / temperature, -1)[token]
    logprobs_V = torch.log_softmax(drawn_V, -1)
    out.processed_B[b] = logprobs_V[token]
    if out.entropy_B is not None:
        definition = 0 if columns.definition_S is None else int(columns.definition_S[slot])
        values_V = (drawn_V, wide_V / temperature, wide_V)[2 if greedy else definition]
        logprobs_V = torch.log_softmax(values_V, -1)
        out.entropy_B[b] = -(logprobs_V.exp() * logprobs_V.clamp(min=-1e300)).sum()


def _edited(raw_V: torch.Tensor, edits: EditColumns, slot: int, position: int) -> torch.Tensor:
    values_V = raw_V.clone()
    count_row, bias_row, mask_row = (
        int(rows_S[slot]) for rows_S in (edits.count_row_S, edits.bias_row_S, edits.mask_row_S)
    )
    if bias_row >= 0:
        values_V += edits.bias_MV[bias_row]
    if count_row >= 0:
        counts_V = edits.counts_CV[count_row].int()
        if edits.ahead_SG is not None:
            ahead_N = edits.ahead_SG[slot][edits.ahead_SG[slot] >= 0].long()
            counts_V = counts_V + 2 * torch.bincount(ahead_N, minlength=len(counts_V)).int()
        repetition, frequency, presence = edits.repetition_S[slot], edits.frequency_S[slot], edits.presence_S[slot]
        repeated_V = torch.where(values_V > 0, values_V / repetition, values_V * repetition)
        values_V = torch.where(counts_V > 0, repeated_V, values_V)
        produced_V = counts_V >> 1
        values_V = torch.where(produced_V > 0, values_V - frequency * produced_V.float(), values_V)
        values_V = torch.where(produced_V > 0, values_V - presence, values_V)
    if mask_row >= 0 and position < int(edits.min_until_S[slot]):
        values_V += edits.bias_MV[mask_row]
    return values_V
