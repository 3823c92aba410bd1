"""Which blocks are trained, and on which labels (case J1)."""

import numpy as np
import pytest

from trainer_bridge.drafter.anchors import anchor_rng, counted, draw_anchors, draw_lengths, eligible

CHAT = np.array([0] * 6 + [1] * 5 + [0] * 2 + [1] * 4, bool)


def supervised(mask, anchors, drafts):
    return {
        a: [a + 1 + k for k, on in enumerate(row) if on]
        for a, row in zip(anchors, counted(mask, anchors, drafts), strict=True)
    }


def test_case_j1_every_answer_token_is_a_label_and_nothing_else_is():
    anchors = eligible(CHAT, 3, 100)
    labels = supervised(CHAT, anchors, 3)
    assert anchors[0] == 5, "the last prompt token is the anchor a server meets first"
    assert sorted({label for own in labels.values() for label in own}) == [6, 7, 8, 9, 10, 13, 14, 15, 16]
    assert all(own for own in labels.values())
    assert labels[5] == [6, 7, 8]
    assert labels[9] == [10], "counting ends where the mask does, though 13 is supervised again"
    assert 10 not in labels and 16 not in labels and 12 in labels


def test_a_block_never_passes_the_context():
    assert eligible(CHAT, 4, 16).max() == 12


def test_draws_are_sorted_distinct_and_depend_on_step_and_key_alone():
    anchors = np.arange(100)
    first = draw_anchors(anchors, 10, anchor_rng(0, 3, "a"))
    assert len(set(first)) == 10 and sorted(first) == first.tolist()
    assert np.array_equal(first, draw_anchors(anchors, 10, anchor_rng(0, 3, "a")))
    for other in (anchor_rng(1, 3, "a"), anchor_rng(0, 4, "a"), anchor_rng(0, 3, "b")):
        assert not np.array_equal(first, draw_anchors(anchors, 10, other))
    assert np.array_equal(draw_anchors(anchors, 200, anchor_rng(0, 0, "a")), anchors)


def test_weights_favour_anchors():
    weights = np.where(np.arange(100) < 10, 1000.0, 1.0)
    drawn = draw_anchors(np.arange(100), 10, anchor_rng(0, 0, "a"), weights)
    assert (drawn < 10).sum() >= 8
    only = np.where(np.arange(100) < 5, 1.0, 0.0)
    assert len(draw_anchors(np.arange(100), 10, anchor_rng(0, 0, "a"), only)) == 10


def test_blocks_end_early_as_often_as_asked_anywhere():
    lengths = draw_lengths(4000, 7, 0.5, anchor_rng(0, 0, "a"))
    assert np.mean(lengths < 7) == pytest.approx(0.5 * 6 / 7, abs=0.03) and set(lengths) == set(range(1, 8))
    assert set(draw_lengths(50, 7, 0.0, anchor_rng(0, 0, "a"))) == {7}
