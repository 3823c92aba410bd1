"""What a step's draw says of its rows, and the columns that only some callers want.

Owns the result's form, the three definitions of a log-probability, alternatives and entropy, for the rows that want
more than drawing yields. Ignores how tokens were drawn.

Shapes: R rows, M of them in work, V vocabulary, N kept ids, K alternatives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.sampling.draw import Drawn
from engine.sampling.logprobs import entropy, highest
from engine.sampling.params import RowSampling
from engine.types import LogprobDefinition

_CHUNK_ELEMENTS = 1 << 22


@dataclass(slots=True)
class SampleResult:
    """One step's columns, all over the R rows in the order given.

    `logprobs` follow each row's `want.logprobs`; `extra_logprobs[d]` and `entropy` are NaN in rows
    that did not ask. `top_ids`/`top_logprobs` are [R, K] for the largest K asked; a row's own are
    its first `want.top_logprobs` columns, the others hold id 0 and NaN. Columns nobody asked for
    are None or missing. In a `bad` row (logits with NaN or +inf, or without any finite one) the
    id is 0 and everything else NaN.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    bad: torch.Tensor
    extra_logprobs: dict[str, torch.Tensor] = field(default_factory=dict)
    entropy: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None


def fill_columns(result: SampleResult, drawn: Drawn, logits_RV: torch.Tensor, rows: Sequence[RowSampling]) -> None:
    """Add to `result` what the rows that are not `bare` want."""
    _allocate(result, rows)
    bad = result.bad.tolist()
    needed: dict[LogprobDefinition, dict[int, list[LogprobDefinition]]] = defaultdict(lambda: defaultdict(list))
    for r, row in enumerate(rows):
        if not row.bare and not bad[r]:
            for definition in (row.want.logprobs, *row.want.extra_logprobs):
                needed[_simplest(definition, r, row, drawn)][r].append(definition)
    size = max(1, _CHUNK_ELEMENTS // logits_RV.shape[1])
    for simplest, by_row in needed.items():
        members = list(by_row)
        for start in range(0, len(members), size):
            part = members[start : start + size]
            whole_MV = _logprobs(simplest, part, logits_RV, rows, drawn)
            _fill_chosen(result, part, [by_row[r] for r in part], whole_MV, rows)
            named = [m for m, r in enumerate(part) if rows[r].want.logprobs in by_row[r]]
            _fill_distribution(result, part, named, whole_MV, rows)


def _allocate(result: SampleResult, rows: Sequence[RowSampling]) -> None:
    def nan_column(*width: int) -> torch.Tensor:
        return torch.full((len(rows), *width), float("nan"), dtype=torch.float32, device=result.ids.device)

    wants = [row.want for row in rows]
    for definition in sorted({d for want in wants for d in want.extra_logprobs}):
        result.extra_logprobs[definition] = nan_column()
    if any(want.entropy for want in wants):
        result.entropy = nan_column()
    most = max(want.top_logprobs for want in wants)
    if most:
        result.top_ids = result.ids.new_zeros(len(rows), most)
        result.top_logprobs = nan_column(most)


def _simplest(definition: LogprobDefinition, r: int, row: RowSampling, drawn: Drawn) -> LogprobDefinition:
    """The definition that names the same distribution with the least work."""
    if row.greedy or definition == "raw":
        return "raw"
    if definition == "processed" and (r in drawn.edited or r in drawn.kept):
        return "processed"
    return "raw" if row.temperature == 1.0 else "temperature"


def _logprobs(
    definition: LogprobDefinition, part: list[int], logits_RV: torch.Tensor, rows: Sequence[RowSampling], drawn: Drawn
) -> torch.Tensor:
    """float32 [M, V], -inf at ids cut off."""
    values_MV = logits_RV[part]
    if definition == "processed":
        for m, r in enumerate(part):
            source_V = drawn.edited.get(r, values_MV[m])
            if r in drawn.kept:
                kept_N = drawn.kept[r]
                remaining_N = source_V[kept_N]
                values_MV[m] = float("-inf")
                values_MV[m, kept_N] = remaining_N
            else:
                values_MV[m] = source_V
    if definition != "raw":
        values_MV /= torch.tensor([[rows[r].temperature] for r in part], device=values_MV.device)
    return torch.log_softmax(values_MV, -1)


def _fill_chosen(
    result: SampleResult,
    part: list[int],
    definitions: list[list[LogprobDefinition]],
    whole_MV: torch.Tensor,
    rows: Sequence[RowSampling],
) -> None:
    chosen_M = whole_MV.gather(1, result.ids[part, None])[:, 0]
    for definition in {d for names in definitions for d in names}:
        for column, asked in (
            (result.logprobs, [rows[r].want.logprobs == definition for r in part]),
            (result.extra_logprobs.get(definition), [definition in rows[r].want.extra_logprobs for r in part]),
        ):
            hits = [m for m, names in enumerate(definitions) if asked[m] and definition in names]
            if hits and column is not None:
                column[[part[m] for m in hits]] = chosen_M[hits]


def _fill_distribution(
    result: SampleResult, part: list[int], named: list[int], whole_MV: torch.Tensor, rows: Sequence[RowSampling]
) -> None:
    """Entropy and alternatives of the rows whose own definition this is."""
    hits = [m for m in named if rows[part[m]].want.entropy]
    if hits and result.entropy is not None:
        result.entropy[[part[m] for m in hits]] = entropy(whole_MV[hits])
    by_count: dict[int, list[int]] = defaultdict(list)
    for m in named:
        by_count[rows[part[m]].want.top_logprobs].append(m)
    for count, hits in by_count.items():
        if count and result.top_ids is not None and result.top_logprobs is not None:
            ids_MK, values_MK = highest(whole_MV[hits], count)
            members = [part[m] for m in hits]
            result.top_ids[members, :count] = ids_MK
            result.top_logprobs[members, :count] = values_MK
