"""From logits to tokens and their log-probabilities.

Owns a step's draw over rows of mixed parameters: the columns asked for, the isolation of rows
with unusable logits. Ignores stops, lengths, who the rows belong to, and the draw itself: that is
`engine.sampling.draw_host` on the CPU and `engine.sampling.draw_device`, by kernels, on a GPU.

A token is argmax over ids of edited logit / T + Gumbel noise of (seed, position, id), compared in
float64, the lower id winning a tie; so a row's token depends on nothing but its own logits,
parameters, seed and position.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.sampling.columns import SampleResult, fill_columns
from engine.sampling.draw import Drawn
from engine.sampling.draw_host import HostDraw
from engine.sampling.params import RowSampling


class Sampler:
    """Draws one token per row. One per engine thread; keeps scratch memory between calls."""

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._host = HostDraw(vocab_size) if self.device.type == "cpu" else None

    def sample(self, logits_RV: torch.Tensor, rows: Sequence[RowSampling], positions: Sequence[int]) -> SampleResult:
        """Draw the token at `positions[r]` (sequence position of the new token) for each row.

        `logits_RV` float32 are the model's logits; they are read, never written.
        """
        expected = (len(rows), self.vocab_size)
        assert tuple(logits_RV.shape) == expected, f"logits {tuple(logits_RV.shape)}, expected {expected}"
        assert logits_RV.dtype == torch.float32, f"logits are {logits_RV.dtype}, expected float32"
        assert len(positions) == len(rows), f"{len(positions)} positions for {len(rows)} rows"
        drawn = self._draw(logits_RV, rows, positions)
        result = SampleResult(drawn.ids_R, drawn.logprobs_R, drawn.bad_R)
        if not all(row.bare for row in rows):
            fill_columns(result, drawn, logits_RV, rows)
        return result

    def _draw(self, logits_RV: torch.Tensor, rows: Sequence[RowSampling], positions: Sequence[int]) -> Drawn:
        if self._host is not None:
            return self._host.draw(logits_RV, rows, positions)
        from engine.sampling.draw_device import draw_on_device

        return draw_on_device(logits_RV, rows, positions)
