"""Training blocks as tensors.

Owns the packing of examples and their anchors: contexts back to back, blocks back to back, and who
belongs to whom. Attention is that of examples by themselves (`trainer_bridge.drafter.packed_attention`): its
cost grows with the square of an example, not of a batch. Ignores losses and where features come from.

Shapes: C context tokens of all examples, M captured layers, D hidden, A blocks, G drafts of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.dspark.block_model import BlockDrafterModel, SharedEnds
from engine.dspark.block_spec import BlockDrafterSpec
from engine.errors import InvalidRequest
from engine.memory.transfer import send_together
from trainer_bridge.drafter.anchors import counted
from trainer_bridge.drafter.features import FeatureExample
from trainer_bridge.drafter.packed_attention import packed_attention


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """`previous_AG` are the true tokens before each draft, the anchor first; `labels_AG` the true tokens
    themselves, 0 where `counted_AG` is false. `states_AGD` are the target's final states that predict
    the labels, None where the examples carry none. `sizes` are (blocks, context tokens) by example. `lengths_A` are
    the drafts of each block, None where all are whole: of slots behind them nobody knows."""

    features_CMD: torch.Tensor
    positions_C: torch.Tensor
    anchors_A: torch.Tensor
    previous_AG: torch.Tensor
    labels_AG: torch.Tensor
    counted_AG: torch.Tensor
    states_AGD: torch.Tensor | None
    sizes: tuple[tuple[int, int], ...]
    lengths_A: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.anchors_A)

    def hidden(self, model: BlockDrafterModel, ends: SharedEnds) -> torch.Tensor:
        """Normed states [A, G, D] of the slots that yield drafts; a block sees the context before its anchor
        and itself, never another block."""
        k_LCKH, v_LCKH = model.context_kv(model.context_features(self.features_CMD), self.positions_C)
        spec = model.spec
        slots_A = None if self.lengths_A is None else self.lengths_A + (spec.block - spec.num_drafts)
        attend = packed_attention(
            spec.backbone, spec.block, k_LCKH, v_LCKH, self.anchors_A, self.positions_C, self.sizes, slots_A
        )
        return model.hidden(self.previous_AG[:, 0], self.anchors_A, ends, attend)


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """Sequences back to back, T tokens in all; anchors and the ends of their sequences count from the first."""

    ids_T: np.ndarray
    mask_T: np.ndarray
    anchors_A: np.ndarray
    ends_A: np.ndarray


def join(chosen: Sequence[tuple[FeatureExample, np.ndarray]]) -> Joined:
    lengths = np.array([item.example.num_tokens for item, _ in chosen])
    ends, counts = lengths.cumsum(), np.array([len(anchors_A) for _, anchors_A in chosen])
    return Joined(
        ids_T=np.concatenate([item.example.ids for item, _ in chosen]),
        mask_T=np.concatenate([item.example.mask for item, _ in chosen]),
        anchors_A=np.concatenate([anchors_A for _, anchors_A in chosen]) + np.repeat(ends - lengths, counts),
        ends_A=np.repeat(ends, counts),
    )


def make_blocks(
    spec: BlockDrafterSpec,
    chosen: Sequence[tuple[FeatureExample, np.ndarray]],
    device: torch.device | str = "cpu",
    lengths_A: np.ndarray | None = None,
) -> Blocks:
    """Blocks at the chosen anchors of each example, of `lengths_A` drafts each. Context after an example's last
    anchor is left out: nobody may see it."""
    check_features(spec, [item for item, _ in chosen])
    sizes = tuple((len(anchors_A), int(anchors_A.max())) for _, anchors_A in chosen)
    contexts = np.array([context for _, context in sizes])
    joined = join(chosen)
    steps_AG = joined.anchors_A[:, None] + np.arange(spec.num_drafts)
    counted_AG = counted(joined.mask_T, joined.anchors_A, spec.num_drafts, joined.ends_A, lengths_A)
    last_A1 = joined.ends_A[:, None] - 1
    places_AG = np.minimum(steps_AG, last_A1)
    labels_AG = np.where(counted_AG, joined.ids_T[np.minimum(steps_AG + 1, last_A1)], 0)
    numbers = (
        np.arange(contexts.sum()) - np.repeat(contexts.cumsum() - contexts, contexts),
        np.concatenate([anchors_A for _, anchors_A in chosen]),
        joined.ids_T[places_AG],
        labels_AG,
        counted_AG,
        places_AG,
        *(() if lengths_A is None else (lengths_A,)),
    )
    positions, anchors, previous, labels, counts, places, *lengths = send_together(numbers, torch.device(device))
    features = [item.features_TMD[:context] for (item, _), context in zip(chosen, contexts, strict=True)]
    lasts = [item.last_TD for item, _ in chosen if item.last_TD is not None]
    states_AGD = None
    if len(lasts) == len(chosen):
        states_AGD = torch.cat(lasts).to(device).index_select(0, places.flatten()).unflatten(0, places.shape)
    return Blocks(
        features_CMD=torch.cat(features).to(device),
        positions_C=positions,
        anchors_A=anchors,
        previous_AG=previous,
        labels_AG=labels,
        counted_AG=counts.bool(),
        states_AGD=states_AGD,
        sizes=sizes,
        lengths_A=lengths[0] if lengths else None,
    )


def check_features(spec: BlockDrafterSpec, items: Sequence[FeatureExample]) -> None:
    """Refuse features that another drafter's capture made, naming the example."""
    for item in items:
        expected = (item.example.num_tokens, len(spec.target_layers), spec.backbone.hidden)
        actual = tuple(item.features_TMD.shape)
        if actual != expected:
            raise InvalidRequest(field=f"{item.example.key}.features", expected=f"shape {expected}", actual=actual)
        if item.last_TD is not None and tuple(item.last_TD.shape) != (expected[0], expected[2]):
            shape = (expected[0], expected[2])
            raise InvalidRequest(
                field=f"{item.example.key}.last", expected=f"shape {shape}", actual=tuple(item.last_TD.shape)
            )


def micro_batches(
    spec: BlockDrafterSpec, chosen: Sequence[tuple[FeatureExample, np.ndarray]], max_slots: int
) -> Iterator[list[tuple[FeatureExample, np.ndarray]]]:
    """Parts with at most `max_slots` block slots and context tokens together, at least one example each."""
    part: list[tuple[FeatureExample, np.ndarray]] = []
    size = 0
    for item, anchors_A in chosen:
        own = len(anchors_A) * spec.block + int(anchors_A.max())
        if part and size + own > max_slots:
            yield part
            part, size = [], 0
        part.append((item, anchors_A))
        size += own
    if part:
        yield part
