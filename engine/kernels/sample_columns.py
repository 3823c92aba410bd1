"""What the sampling kernels read and write.

Owns the parameter columns indexed by slot, the output columns, and the workspace. Ignores how rows
are drawn (`engine.kernels.sample_epilogue`).

Shapes: B rows of a step, S slots, V vocabulary (of this shard), T tiles of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TILE = 2048
"""Token ids one program of the scan reads."""
NUM_STATS = 7


@dataclass(slots=True)
class EditColumns:
    """Edits of logits, by slot. A row with neutral values costs a few loads.

    `counts_SV` holds, per id, twice the times the sample produced it, plus one if the prompt has it
    (prompt ids matter to `repetition` alone). Lists are padded with -1 on the right. Stop ids are
    masked while the position is below `min_until_S`.
    """

    repetition_S: torch.Tensor
    frequency_S: torch.Tensor
    presence_S: torch.Tensor
    counts_SV: torch.Tensor
    bias_ids_SN: torch.Tensor
    bias_SN: torch.Tensor
    stop_ids_SN: torch.Tensor
    min_until_S: torch.Tensor


@dataclass(slots=True)
class SampleColumns:
    """Parameters by slot: `temperature_S`, `top_p_S`, `min_p_S` float64, `top_k_S` int32, `seed_S` the
    uint64 seed's bits as int64, `position_S` int64 the position of the token to draw, `active_S` uint8.

    Temperatures below `engine.sampling.params.GREEDY_BELOW` mean argmax. `slots_B` maps rows to
    slots, -1 for padding; None means row b is slot b. Rows of padding and of inactive slots write
    nothing. Token ids of a vocabulary shard start at `first_id`, a multiple of 8.
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


@dataclass(slots=True)
class SampleOut:
    """Columns by row. `bad_B` is 1 where logits have NaN or +inf or nothing finite: id 0, the rest NaN.

    `raw_B`, `temperature_B`, `processed_B` are the drawn token's log-probability by definition,
    `lse_B` the log-sum-exp of the raw logits, `score_B` float64 the winning perturbed logit (with
    the id it decides between vocabulary shards), `entropy_B` that of the processed distribution.
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


@dataclass(slots=True)
class SampleWorkspace:
    """Scratch for at most `rows` rows: per-tile statistics, the threshold's record of a truncated
    row, and the one fp32 copy of the logits, which only rows with edits fill."""

    stats_BNT: torch.Tensor
    record_B4: torch.Tensor
    edited_BV: torch.Tensor | None
    tile: int

    @staticmethod
    def empty(
        rows: int, vocab_size: int, device: torch.device | str, edits: bool = False, tile: int = TILE
    ) -> SampleWorkspace:
        tiles = -(-vocab_size // tile)
        return SampleWorkspace(
            torch.zeros(rows, NUM_STATS, tiles, dtype=torch.float32, device=device),
            torch.zeros(rows, 4, dtype=torch.float64, device=device),
            torch.zeros(rows, vocab_size, dtype=torch.float32, device=device) if edits else None,
            tile,
        )
