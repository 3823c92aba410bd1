"""From a verify step's logits to the tokens that are kept.

Owns the two rules. *Rejection* (Leviathan et al. 2023): draft x is accepted with probability
min(1, p(x) / q(x)); the first rejected one is replaced by a draw from (p - q)+ normalised, and after
the last accepted one a bonus is drawn from p. Without q a draft is a point mass, which accepts with
p(x) and redraws from p without x. *Coupled* (Daliri, Musco, Suresh 2024): the target draws its token
in every row as it would without drafts, and drafts are kept while they equal it. Greedy rows keep
drafts while they equal the argmax, under either rule.

Both are exact for whatever the row asks of sampling, penalties and biases included, provided the number
of verified drafts never depends on the value of a draft that it decides about. The log-probability of
every token is that of p in its own row, for kept drafts, replacements and bonuses alike. Nothing here
is lossy. Ignores who decides how many drafts are verified, stops and lengths.

Verify rows are packed: row b has 1 + lens[b] of them, the first for the token after the anchor.
Reference form: the host steers, and rows are taken a bounded number at a time.

Shapes: B rows, G drafts, R verify rows, M rows in work, E emitted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from engine.dspark.distribution import Distribution, distribution
from engine.dspark.round_noise import RoundNoise
from engine.sampling.columns import SampleResult, fill_columns
from engine.sampling.draw import Drawn
from engine.sampling.params import RowSampling
from engine.sampling.sampler import Sampler
from engine.sampling.seeds import USE_EMIT

_CHUNK_ELEMENTS = 1 << 22
_NO_RESIDUAL = 1e-8
"""Residual mass below this is rounding: p and q are equal, and p itself is drawn from."""


@dataclass(slots=True)
class Round:
    """What was drafted. `anchors[b]` is the position of row b's last committed token, `lens[b]` the drafts of
    `ids_BG` that were verified. `logits_BGV` are those that `RejectionPick` drew from, None without q."""

    rows: Sequence[RowSampling]
    anchors: Sequence[int]
    ids_BG: torch.Tensor
    lens: Sequence[int]
    logits_BGV: torch.Tensor | None = None


@dataclass(slots=True)
class Verdict:
    """`num_accepted[b]` drafts of row b are kept and one token follows them: `emitted` has
    num_accepted[b] + 1 rows for it, back to back. `chances[b]` holds, for each verified draft, how
    probable its acceptance was given its prefix: soft labels for calibration; under the coupled rule
    0 or 1, and only up to the first draft that was not kept."""

    num_accepted: list[int]
    emitted: SampleResult
    chances: list[list[float]]


class _Packing:
    """Where each row's verify rows lie, and the rows as they are along their draft prefixes."""

    def __init__(self, logits_RV: torch.Tensor, round: Round) -> None:
        self.starts = [0, *accumulate(1 + count for count in round.lens)]
        assert logits_RV.shape[0] == self.starts[-1], f"{logits_RV.shape[0]} verify rows, expected {self.starts[-1]}"
        self.drafts = [ids[:count] for ids, count in zip(round.ids_BG.tolist(), round.lens, strict=True)]
        self.rows: list[RowSampling] = []
        self.positions: list[int] = []
        for row, anchor, drafts in zip(round.rows, round.anchors, self.drafts, strict=True):
            for index in range(1 + len(drafts)):
                self.rows.append(row.ahead(drafts[:index]))
                self.positions.append(anchor + 1 + index)

    def members(self) -> list[tuple[int, int, int]]:
        """(row, draft number, verify row) of every verified draft."""
        return [(b, k, self.starts[b] + k) for b, drafts in enumerate(self.drafts) for k in range(len(drafts))]


def verify_coupled(logits_RV: torch.Tensor, round: Round, sampler: Sampler) -> Verdict:
    """`logits_RV` float32 are the model's. Equals plain sampling token by token, whatever was drafted."""
    packing = _Packing(logits_RV, round)
    drawn = sampler.sample(logits_RV, packing.rows, packing.positions)
    targets, bad = drawn.ids.tolist(), drawn.bad.tolist()
    num_accepted, chances = [], []
    for start, drafts in zip(packing.starts[:-1], packing.drafts, strict=True):
        kept = 0
        while kept < len(drafts) and not bad[start + kept] and targets[start + kept] == drafts[kept]:
            kept += 1
        num_accepted.append(kept)
        chances.append([1.0] * kept + [0.0] * (kept < len(drafts)))
    return Verdict(num_accepted, _take(drawn, _emitting(packing, num_accepted)), chances)


def verify_rejection(logits_RV: torch.Tensor, round: Round, noise: RoundNoise) -> Verdict:
    """`logits_RV` are the model's, in any floating dtype."""
    packing = _Packing(logits_RV, round)
    judged = _Judged(logits_RV, round, packing, noise)
    num_accepted = []
    for b, drafts in enumerate(packing.drafts):
        kept = 0
        while kept < len(drafts) and judged.accepted[packing.starts[b] + kept]:
            kept += 1
        num_accepted.append(kept)
    emit = [start + kept for start, kept in zip(packing.starts[:-1], num_accepted, strict=True)]
    last = distribution(logits_RV[emit], [packing.rows[r] for r in emit], [packing.positions[r] for r in emit])
    ids_B = _emit(last, round, packing, num_accepted, noise).masked_fill(last.bad_M, 0)
    logprobs_B = last.logprob(ids_B).masked_fill(last.bad_M, float("nan"))
    emitted = _columns(logits_RV, packing, num_accepted, judged, (ids_B, logprobs_B, last))
    spans = zip(packing.starts[:-1], packing.drafts, strict=True)
    return Verdict(num_accepted, emitted, [judged.chances[start : start + len(drafts)] for start, drafts in spans])


class _Judged:
    """By verify row: whether its draft passes, how likely that was, and log p of the draft."""

    def __init__(self, logits_RV: torch.Tensor, round: Round, packing: _Packing, noise: RoundNoise) -> None:
        count, vocab_size = logits_RV.shape
        self.accepted, self.chances, self.logprobs = [False] * count, [0.0] * count, [0.0] * count
        self.bad = [False] * count
        members = packing.members()
        size = max(1, _CHUNK_ELEMENTS // vocab_size)
        for start in range(0, len(members), size):
            self._judge(members[start : start + size], logits_RV, round, packing, noise)

    def _judge(
        self,
        part: list[tuple[int, int, int]],
        logits_RV: torch.Tensor,
        round: Round,
        packing: _Packing,
        noise: RoundNoise,
    ) -> None:
        owners, numbers, places = (list(column) for column in zip(*part, strict=True))
        rows, device = [packing.rows[r] for r in places], logits_RV.device
        p = distribution(logits_RV[places], rows, [packing.positions[r] for r in places])
        ids_M = torch.tensor([packing.drafts[b][k] for b, k, _ in part], device=device)
        log_p_M = p.logprob(ids_M)
        log_chance_M = log_p_M.double()
        drawn = [m for m, row in enumerate(rows) if not row.greedy]
        if round.logits_BGV is not None and drawn:
            logits_MV = round.logits_BGV[[owners[m] for m in drawn], [numbers[m] for m in drawn]]
            q = distribution(logits_MV, [rows[m] for m in drawn])
            log_chance_M[drawn] -= q.logprob(ids_M[drawn]).double()
        greedy = [m for m, row in enumerate(rows) if row.greedy]
        if greedy:
            hit_M = p.scaled_MV[greedy].argmax(-1) == ids_M[greedy]
            log_chance_M[greedy] = torch.where(hit_M, 0.0, float("-inf")).double()
        log_chance_M = log_chance_M.clamp(max=0.0).masked_fill(p.bad_M | log_chance_M.isnan(), float("-inf"))
        accepted_M = noise.uniform(owners, numbers).log() < log_chance_M
        columns = (accepted_M.tolist(), log_chance_M.exp().tolist(), log_p_M.tolist(), p.bad_M.tolist())
        for r, accepted, chance, logprob, bad in zip(places, *columns, strict=True):
            self.accepted[r], self.chances[r], self.logprobs[r], self.bad[r] = accepted, chance, logprob, bad


def _emit(
    p: Distribution, round: Round, packing: _Packing, num_accepted: Sequence[int], noise: RoundNoise
) -> torch.Tensor:
    """The token after the kept drafts of every row, int64 [B]."""
    ids_B = p.scaled_MV.argmax(-1)
    drawn = [b for b, row in enumerate(round.rows) if not row.greedy]
    if not drawn:
        return ids_B
    mass_BV = (p.scaled_MV - p.lse_M[:, None]).exp_()
    replaced = [b for b in drawn if num_accepted[b] < len(packing.drafts[b])]
    if replaced:
        numbers = [num_accepted[b] for b in replaced]
        whole_MV = mass_BV[replaced]
        if round.logits_BGV is not None:
            q = distribution(round.logits_BGV[replaced, numbers], [round.rows[b] for b in replaced])
            residual_MV = (whole_MV - (q.scaled_MV - q.lse_M[:, None]).exp_()).clamp_(min=0.0)
        else:
            refused_M = torch.tensor([[packing.drafts[b][num_accepted[b]]] for b in replaced], device=mass_BV.device)
            residual_MV = whole_MV.scatter(1, refused_M, 0.0)
        empty_M1 = residual_MV.sum(-1, keepdim=True) <= _NO_RESIDUAL
        mass_BV[replaced] = torch.where(empty_M1, whole_MV, residual_MV)
    noise_MV = noise.exponential(drawn, [num_accepted[b] for b in drawn], USE_EMIT, mass_BV.shape[1])
    ids_B[drawn] = (mass_BV[drawn].nan_to_num(0.0).double() / noise_MV).argmax(-1)
    return ids_B


def _emitting(packing: _Packing, num_accepted: Sequence[int]) -> list[int]:
    """Verify rows whose tokens are kept, in order."""
    spans = zip(packing.starts[:-1], num_accepted, strict=True)
    return [start + k for start, kept in spans for k in range(kept + 1)]


def _columns(
    logits_RV: torch.Tensor,
    packing: _Packing,
    num_accepted: Sequence[int],
    judged: _Judged,
    last: tuple[torch.Tensor, torch.Tensor, Distribution],
) -> SampleResult:
    """The columns rows asked for, of all emitted tokens."""
    last_ids, last_logprobs, last_bad = last[0].tolist(), last[1].tolist(), last[2].bad_M.tolist()
    ids, logprobs, bad = [], [], []
    for b, kept in enumerate(num_accepted):
        start = packing.starts[b]
        ids += [*packing.drafts[b][:kept], last_ids[b]]
        logprobs += [*judged.logprobs[start : start + kept], last_logprobs[b]]
        bad += [*judged.bad[start : start + kept], last_bad[b]]
    device = logits_RV.device
    drawn = Drawn(
        torch.tensor(ids, dtype=torch.int64, device=device),
        torch.tensor(logprobs, dtype=torch.float32, device=device),
        torch.tensor(bad, dtype=torch.bool, device=device),
    )
    places = _emitting(packing, num_accepted)
    rows = [packing.rows[r] for r in places]
    result = SampleResult(drawn.ids_R, drawn.logprobs_R, drawn.bad_R)
    if not all(row.bare for row in rows):
        for e, r in enumerate(places):
            if not rows[e].bare:
                # What was cut and edited is derived again for the few rows that show it.
                own = distribution(logits_RV[r : r + 1], rows[e : e + 1], packing.positions[r : r + 1])
                drawn.edited.update((e, value) for value in own.edited.values())
                drawn.kept.update((e, value) for value in own.kept.values())
        fill_columns(result, drawn, logits_RV[places].float(), rows)
    return result


def _take(result: SampleResult, places: list[int]) -> SampleResult:
    def part(column: torch.Tensor | None) -> torch.Tensor | None:
        return None if column is None else column[places]

    return SampleResult(
        result.ids[places],
        result.logprobs[places],
        result.bad[places],
        {name: column[places] for name, column in result.extra_logprobs.items()},
        part(result.entropy),
        part(result.top_ids),
        part(result.top_logprobs),
    )
