"""Where training blocks stand.

Owns which positions may be anchors, which labels of a block count, and the draw. An anchor is the last
committed token a server would draft from; the block after it predicts the tokens that follow. So a
position is eligible by its *label's* mask: the last prompt token, which a server meets first, is an
anchor, and a position that is supervised itself but has no supervised successor is none.

The draw depends on (seed, train_step, example key) alone: neither ranks, micro-batches nor a resume
change it.

Shapes: T tokens, A anchors, G drafts of a block.
"""

from __future__ import annotations

import hashlib

import numpy as np


def eligible(mask_T: np.ndarray, block: int, context_len: int) -> np.ndarray:
    """Anchors int64 in order: positions whose next token is supervised and whose block lies in the context."""
    anchors = np.flatnonzero(mask_T[1:])
    return anchors[anchors + block <= context_len]


def counted(
    mask_T: np.ndarray,
    anchors_A: np.ndarray,
    drafts: int,
    ends_A: np.ndarray | None = None,
    lengths_A: np.ndarray | None = None,
) -> np.ndarray:
    """bool [A, G]: draft k of the block at a counts while tokens a + 1 .. a + 1 + k are all supervised, and its block
    has so many. The mask may be that of several sequences back to back; each anchor's then ends at `ends_A`."""
    places_AG = anchors_A[:, None] + 1 + np.arange(drafts)
    inside_AG = places_AG < (len(mask_T) if ends_A is None else ends_A[:, None])
    supervised_AG = inside_AG & mask_T[np.where(inside_AG, places_AG, 0)]
    if lengths_A is not None:
        supervised_AG &= np.arange(drafts) < lengths_A[:, None]
    return np.logical_and.accumulate(supervised_AG, axis=1)


def draw_anchors(
    anchors: np.ndarray, count: int, rng: np.random.Generator, weights: np.ndarray | None = None
) -> np.ndarray:
    """At most `count` of them, sorted, without replacement; uniform, or in proportion to `weights`."""
    if len(anchors) <= count:
        return anchors
    shares = None if weights is None else weights / weights.sum()
    if shares is not None and np.count_nonzero(shares) < count:
        shares = None
    return np.sort(rng.choice(anchors, count, replace=False, p=shares))


def draw_lengths(anchors: int, drafts: int, shortened: float, rng: np.random.Generator) -> np.ndarray:
    """Drafts of each block, int64 [A]: all, but of the share `shortened` any number from one on."""
    whole_A = np.full(anchors, drafts)
    return np.where(rng.random(anchors) < shortened, rng.integers(1, drafts + 1, anchors), whole_A)


def anchor_rng(seed: int, train_step: int, key: str) -> np.random.Generator:
    digest = hashlib.sha256(key.encode()).digest()[:8]
    return np.random.default_rng([seed, train_step, int.from_bytes(digest, "little")])
