"""What a draw hands on, whichever device made it.

Owns the record between drawing and the columns that only some rows want. Ignores both sides.

Shapes: R rows, V vocabulary, N kept ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class Drawn:
    """Ids int64 [R], processed log-probabilities float32 [R] (`raw` for greedy rows), bad bool [R].

    `edited` holds the edited logits [V] and `kept` the ids [N] left by truncation, each only for
    rows that have them and whose `bare` is false.
    """

    ids_R: torch.Tensor
    logprobs_R: torch.Tensor
    bad_R: torch.Tensor
    edited: dict[int, torch.Tensor] = field(default_factory=dict)
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
