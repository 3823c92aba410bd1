"""What the sampling kernels read and write.

Owns the parameter columns indexed by slot, the output columns, and the workspace. Ignores how rows
are drawn (`engine.kernels.sample_epilogue`).

Shapes: B rows of a step, S slots, V vocabulary (of this shard), T tiles of the vocabulary, C count rows,
M bias rows, L candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TILE = 2048
"""Token ids one program of the scan reads."""
PARTS = 8
"""Equal parts of a tile whose maxima are noted for truncated rows."""
SHORT = 1024
"""Ids of a list in which a truncated row is cut and drawn at once, and fewer for small vocabularies."""
LONGER = 8
"""Times as many ids of a list in which it is cut alone."""
NUM_STATS = 9
RECORD = 10


@dataclass(slots=True)
class EditColumns:
    """Edits of logits, by slot: which rows of counts, biases and masks apply, -1 for none.

    `counts_CV` (int16 or int32) holds, per id, twice the times the sample produced it, and may be
    odd where the prompt has it (which matters to `repetition` alone). A row of `bias_MV`
    is added to the logits; the one that `mask_row_S` names holds -inf at stop ids and applies while
    the position is below `min_until_S`. `ahead_SG` int32 are tokens to be counted beside those in the counts, -1
    for none: where rows stand behind drafts.
    """

    repetition_S: torch.Tensor
    frequency_S: torch.Tensor
    presence_S: torch.Tensor
    count_row_S: torch.Tensor
    counts_CV: torch.Tensor
    bias_row_S: torch.Tensor
    mask_row_S: torch.Tensor
    bias_MV: torch.Tensor
    min_until_S: torch.Tensor
    ahead_SG: torch.Tensor | None = None


def edit_arguments(edits: EditColumns | None, nothing: torch.Tensor) -> tuple:
    """What `engine.kernels.sample_edits.edits_of` is given, in order."""
    if edits is None:
        return (nothing,) * 10 + (0,)
    ahead = (edits.count_row_S, 0) if edits.ahead_SG is None else (edits.ahead_SG, edits.ahead_SG.shape[1])
    return (
        edits.repetition_S, edits.frequency_S, edits.presence_S, edits.count_row_S, edits.counts_CV, edits.bias_row_S,
        edits.mask_row_S, edits.bias_MV, edits.min_until_S, *ahead,
    )  # fmt: skip


@dataclass(slots=True)
class SampleColumns:
    """Parameters by slot: `temperature_S`, `top_p_S`, `min_p_S` float64, `top_k_S` int32, `seed_S` the
    uint64 seed's bits as int64, `position_S` int64 the position of the token to draw, `active_S` uint8.

    Temperatures below `engine.sampling.params.GREEDY_BELOW` mean argmax. `slots_B` maps rows to
    slots, -1 for padding; None means row b is slot b. Rows of padding and of inactive slots write
    nothing. Token ids of a vocabulary shard start at `first_id`, a multiple of 8. `definition_S`
    (int32, an index of `engine.memory.device_table.DEFINITIONS`) names the distribution whose entropy
    and alternatives a row wants; without it that is the processed one.
    """

    temperature_S: torch.Tensor
    top_k_S: torch.Tensor
    top_p_S: torch.Tensor
    min_p_S: torch.Tensor
    seed_S: torch.Tensor
    position_S: torch.Tensor
    active_S: torch.Tensor
    slots_B: torch.Tensor | None = None
    edits: EditColumns | None = None
    first_id: int = 0
    definition_S: torch.Tensor | None = None


@dataclass(slots=True)
class SampleOut:
    """Columns by row. `bad_B` is 1 where logits have NaN or +inf or nothing finite: id 0, the rest NaN.

    `raw_B`, `temperature_B`, `processed_B` are the drawn token's log-probability by definition,
    `lse_B` the log-sum-exp of the raw logits, `score_B` float64 the winning perturbed logit (with
    the id it decides between vocabulary shards), `entropy_B` that of the row's definition.
    """

    ids_B: torch.Tensor
    raw_B: torch.Tensor
    temperature_B: torch.Tensor
    processed_B: torch.Tensor
    lse_B: torch.Tensor
    score_B: torch.Tensor
    bad_B: torch.Tensor
    entropy_B: torch.Tensor | None = None

    @staticmethod
    def empty(rows: int, device: torch.device | str, entropy: bool = False) -> SampleOut:
        def column(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(rows, dtype=dtype, device=device)

        return SampleOut(
            ids_B=column(torch.int64),
            raw_B=column(torch.float32),
            temperature_B=column(torch.float32),
            processed_B=column(torch.float32),
            lse_B=column(torch.float32),
            score_B=column(torch.float64),
            bad_B=column(torch.uint8),
            entropy_B=column(torch.float32) if entropy else None,
        )

    def head(self, rows: int, entropy: bool) -> SampleOut:
        """The first rows, with or without the column of entropies."""
        wide = self.entropy_B if entropy else None
        return SampleOut(
            self.ids_B[:rows],
            self.raw_B[:rows],
            self.temperature_B[:rows],
            self.processed_B[:rows],
            self.lse_B[:rows],
            self.score_B[:rows],
            self.bad_B[:rows],
            None if wide is None else wide[:rows],
        )


@dataclass(slots=True)
class SampleWorkspace:
    """Scratch for at most `rows` rows: statistics by tile, maxima by part of a tile, the record of a
    truncated row, and the list of its ids near the cut. The logits themselves are never copied."""

    stats_BNT: torch.Tensor
    maxima_BT: torch.Tensor
    record_BR: torch.Tensor
    found_B: torch.Tensor
    list_ids_BL: torch.Tensor
    list_values_BL: torch.Tensor
    tile: int

    @property
    def short(self) -> int:
        return self.list_ids_BL.shape[1] // LONGER

    @staticmethod
    def empty(rows: int, vocab_size: int, device: torch.device | str, tile: int = TILE) -> SampleWorkspace:
        tiles = -(-vocab_size // tile)
        listed = LONGER * min(SHORT, max(16, 1 << (vocab_size // 16).bit_length()))

        def space(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return SampleWorkspace(
            space(rows, NUM_STATS, tiles),
            space(rows, tiles * PARTS),
            space(rows, RECORD, dtype=torch.float64),
            space(rows, dtype=torch.int32),
            torch.empty(rows, listed, dtype=torch.int32, device=device),
            torch.empty(rows, listed, dtype=torch.float32, device=device),
            tile,
        )
