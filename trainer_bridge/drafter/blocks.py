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
from trainer_bridge.drafter.anchors import counted
from trainer_bridge.drafter.features import FeatureExample
from trainer_bridge.drafter.packed_attention import packed_attention


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """`previous_AG` are the true tokens before each draft, the anchor first; `labels_AG` the true tokens
    themselves, 0 where `counted_AG` is false. `states_AGD` are the target's final states that predict
    the labels, None where the examples carry none. `sizes` are (blocks, context tokens) by example."""

    features_CMD: torch.Tensor
    positions_C: torch.Tensor
    anchors_A: torch.Tensor
    previous_AG: torch.Tensor
    labels_AG: torch.Tensor
    counted_AG: torch.Tensor
    states_AGD: torch.Tensor | None
    sizes: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.anchors_A)

    def hidden(self, model: BlockDrafterModel, ends: SharedEnds) -> torch.Tensor:
        """Normed states [A, G, D] of the slots that yield drafts; a block sees the context before its anchor
        and itself, never another block."""
        k_LCKH, v_LCKH = model.context_kv(model.context_features(self.features_CMD), self.positions_C)
        spec = model.spec
        attend = packed_attention(
            spec.backbone, spec.block, k_LCKH, v_LCKH, self.anchors_A, self.positions_C, self.sizes
        )
        return model.hidden(self.previous_AG[:, 0], self.anchors_A, ends, attend)


def make_blocks(
    spec: BlockDrafterSpec,
    chosen: Sequence[tuple[FeatureExample, np.ndarray]],
    device: torch.device | str = "cpu",
) -> Blocks:
    """Blocks at the chosen anchors of each example. Context after an example's last anchor is left out:
    nobody may see it."""
    check_features(spec, [item for item, _ in chosen])
    features, positions, anchors, previous, labels, counts, states = ([] for _ in range(7))
    for item, anchors_A in chosen:
        length = int(anchors_A.max())
        ids = item.example.ids.astype(np.int64)
        steps = anchors_A[:, None] + np.arange(spec.num_drafts)
        counted_AG = counted(item.example.mask, anchors_A, spec.num_drafts)
        last = len(ids) - 1
        features.append(item.features_TMD[:length])
        positions.append(np.arange(length))
        anchors.append(anchors_A)
        previous.append(ids[np.minimum(steps, last)])
        labels.append(np.where(counted_AG, ids[np.minimum(steps + 1, last)], 0))
        counts.append(counted_AG)
        if item.last_TD is not None:
            places = torch.from_numpy(np.minimum(steps, last)).to(item.last_TD.device)
            states.append(item.last_TD[places].to(device))

    def joined(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    return Blocks(
        features_CMD=torch.cat([part.to(device) for part in features]),
        positions_C=joined(positions),
        anchors_A=joined(anchors),
        previous_AG=joined(previous),
        labels_AG=joined(labels),
        counted_AG=joined(counts),
        states_AGD=torch.cat(states) if len(states) == len(chosen) else None,
        sizes=tuple((len(anchors_A), int(anchors_A.max())) for _, anchors_A in chosen),
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
