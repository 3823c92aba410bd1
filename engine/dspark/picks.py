"""How drafts are chosen from a drafter's logits.

Owns the two ways, one for each rule of verification, both with the row's own temperature, truncation
and edits along the draft prefix. Ignores drafters and verification.

Shapes: B rows, G drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.dspark.config import Rule
from engine.dspark.distribution import distribution
from engine.dspark.drafter import Pick
from engine.dspark.round_noise import RoundNoise, noise_of
from engine.request import Sample
from engine.sampling.params import RowSampling
from engine.sampling.sampler import Sampler
from engine.sampling.seeds import USE_DRAFT


class _Prefixes:
    """Rows as they will be once the drafts chosen so far are committed."""

    def __init__(self, rows: Sequence[RowSampling], anchors: Sequence[int]) -> None:
        self._rows, self._anchors = rows, anchors
        self._drafts: list[list[int]] = [[] for _ in rows]

    def at(self, slot: int) -> tuple[list[RowSampling], list[int]]:
        """Rows and the positions of draft number `slot`."""
        rows = [row.ahead(drafts) for row, drafts in zip(self._rows, self._drafts, strict=True)]
        return rows, [anchor + 1 + slot for anchor in self._anchors]

    def note(self, ids_B: torch.Tensor) -> torch.Tensor:
        for drafts, token in zip(self._drafts, ids_B.tolist(), strict=True):
            drafts.append(token)
        return ids_B


class RejectionPick:
    """Draws drafts with a round's own noise. Edits are left in the logits, in their dtype: what stays
    there is exactly the q that was drawn from."""

    def __init__(self, rows: Sequence[RowSampling], anchors: Sequence[int], noise: RoundNoise) -> None:
        self._prefixes = _Prefixes(rows, anchors)
        self._noise = noise

    def __call__(self, slot: int, logits_BV: torch.Tensor) -> torch.Tensor:
        rows, positions = self._prefixes.at(slot)
        for b, row in enumerate(rows):
            if row.edits_at(positions[b]):
                edited_V = logits_BV[b].float()
                row.edit(edited_V, positions[b])
                logits_BV[b] = edited_V
        scaled_BV = distribution(logits_BV, rows).scaled_MV
        ids_B = scaled_BV.argmax(-1)
        drawn = [b for b, row in enumerate(rows) if not row.greedy]
        if drawn:
            weights_MV = torch.softmax(scaled_BV[drawn], -1).nan_to_num(0.0).double()
            noise_MV = self._noise.exponential(drawn, [slot] * len(drawn), USE_DRAFT, logits_BV.shape[1])
            ids_B[drawn] = (weights_MV / noise_MV).argmax(-1)
        return self._prefixes.note(ids_B)


class CoupledPick:
    """Draws each draft as the target would draw the token at that position: same noise, same edits."""

    def __init__(self, rows: Sequence[RowSampling], anchors: Sequence[int], sampler: Sampler) -> None:
        self._prefixes = _Prefixes(rows, anchors)
        self._sampler = sampler

    def __call__(self, slot: int, logits_BV: torch.Tensor) -> torch.Tensor:
        rows, positions = self._prefixes.at(slot)
        return self._prefixes.note(self._sampler.sample(logits_BV.float(), rows, positions).ids)


def pick_of(
    rule: Rule, samples: Sequence[Sample], anchors: Sequence[int], sampler: Sampler, device: torch.device
) -> Pick:
    """How drafts behind these samples' anchors are chosen where drafts are verified by `rule`."""
    rows = [sample.row for sample in samples]
    if rule == "coupled":
        return CoupledPick(rows, anchors, sampler)
    return RejectionPick(rows, anchors, noise_of(samples, anchors, device))
