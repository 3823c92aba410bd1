"""A drafter's context of a burst of captured steps, written when the burst is over.

Owns the tokens that wait for it, and the launches that commit them: a step puts its own aside by one launch, and
those of all steps take what a drafter does with tokens once, where each step would take it for a few rows. Nobody
asks for the context before: whatever does is enqueued behind the burst. Ignores what a step computes and what a
drafter makes of tokens.

Shapes: B rows of a tier, M captured layers, D hidden, T = places * B tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.dspark.speculation import Speculation
from engine.kernels.keep_features import KeptTokens, keep_features
from engine.metrics import EngineCounters
from engine.runner.graph_pool import GraphPool


class BurstContext:
    """Tiers take turns in one set of buffers, for `burst` steps of `max_rows` rows. Between bursts no token waits:
    all write slots are -1."""

    def __init__(
        self,
        speculation: Speculation,
        graphs: GraphPool,
        counters: EngineCounters,
        max_rows: int,
        burst: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = speculation.captured_layers
        self._speculation = speculation
        self._graphs = graphs
        self._counters = counters
        self._burst = burst
        self._kept = KeptTokens.empty(burst * max_rows, len(self.layers), hidden, dtype, device)
        self._places = 1
        self._commits: dict[tuple[int, int], Callable[[], None]] = {}

    def forget(self) -> None:
        """Drop all graphs."""
        self._commits.clear()

    def keep(
        self,
        ids_B: torch.Tensor,
        positions_B: torch.Tensor,
        write_slots_B: torch.Tensor,
        features: dict[int, torch.Tensor],
    ) -> None:
        """Put one token of every row aside, as a step's last use of `features`. Rows that have finished have no
        slot (-1)."""
        keep_features(self._kept, [features[layer] for layer in self.layers], ids_B, positions_B, write_slots_B)

    def begin(self, tier: int, steps: int) -> int:
        """How many of these steps may run before each `commit`. A single one, as there are while prompts wait, has
        room for itself only, so that its commit is of no more tokens."""
        places = 1 if steps == 1 else self._burst
        if places != self._places:
            self._places = places
            self._kept.places_1.fill_(places)
        if (tier, places) not in self._commits:
            # Now, while no token waits: what is captured may run first.
            self._commits[tier, places] = self._capture(tier, places)
        return places

    def commit(self, tier: int) -> None:
        """Give the drafter all tokens that wait."""
        self._commits[tier, self._places]()

    def _capture(self, tier: int, places: int) -> Callable[[], None]:
        tokens, kept = places * tier, self._kept
        ids_T, positions_T, slots_T = (each[:tokens] for each in (kept.ids_T, kept.positions_T, kept.slots_T))
        features = {layer: kept.features_TMD[:tokens, index] for index, layer in enumerate(self.layers)}

        def commit() -> None:
            self._speculation.absorb(ids_T, positions_T, slots_T, features)
            # Whose pages these were may be without them by the next time.
            slots_T.fill_(-1)

        replay = self._graphs.record(commit, "a drafter's context")
        self._counters.graph_captures += 1
        return replay or commit
