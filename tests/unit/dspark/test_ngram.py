"""N-gram drafts against a search of the whole past."""

import numpy as np
import torch

from engine.dspark.drafter import Committed, DraftRows
from engine.dspark.ngram import NgramDrafter


def feed(drafter, slot, ids, start):
    positions = torch.arange(start, start + len(ids))
    drafter.commit(Committed([slot], [len(ids)], torch.tensor(ids), positions, positions, {}))


def drafts(drafter, *anchors):
    def never(slot, logits):
        raise AssertionError("an n-gram table has no logits to draw from")

    rows = DraftRows(list(range(len(anchors))), torch.tensor(anchors), torch.zeros(len(anchors)), torch.empty(0), never)
    proposal = drafter.propose(rows)
    assert proposal.logits_BGV is None and proposal.confidence_BG is None
    return [ids[:count].tolist() for ids, count in zip(proposal.ids_BG, proposal.lens, strict=True)]


def searched(ids, most, shortest, longest):
    """Copy what followed the last earlier place where the longest run up to the end occurs."""
    for length in range(longest, shortest - 1, -1):
        if len(ids) >= length:
            for end in range(len(ids) - 1, length - 1, -1):
                if ids[end - length : end] == ids[-length:]:
                    out = list(ids)
                    for place in range(most):
                        out.append(out[end + place])
                    return out[len(ids) :]
    return []


def test_drafts_equal_a_search_of_the_past():
    random = np.random.default_rng(0)
    found = 0
    for trial in range(60):
        ids = random.integers(0, 3 + trial % 4, size=int(random.integers(1, 40))).tolist()
        drafter = NgramDrafter(6, shortest=1 + trial % 2, longest=3)
        split = int(random.integers(1, len(ids) + 1))
        drafter.admit(0, np.array(ids[:split]))
        feed(drafter, 0, ids[split - 1 : -1], split - 1)
        expected = searched(ids, 6, 1 + trial % 2, 3)
        assert drafts(drafter, ids[-1]) == [expected]
        found += bool(expected)
    assert found > 30


def test_tokens_given_at_admission_count_once_though_their_state_is_computed_later():
    drafter = NgramDrafter(3)
    drafter.admit(0, np.array([1, 2, 3, 1, 2]))
    feed(drafter, 0, [1, 2, 3, 1, 2], 0)
    assert drafts(drafter, 3) == [[1, 2, 3]]


def test_slots_are_apart_and_a_released_slot_starts_anew():
    drafter = NgramDrafter(2)
    drafter.admit(0, np.array([1, 2, 3, 1, 2]))
    drafter.admit(1, np.array([4, 5, 6, 4, 5]))
    assert drafts(drafter, 2, 5) == [[3, 1], [6, 4]]
    drafter.release(0)
    drafter.admit(0, np.array([9, 9]))
    assert drafts(drafter, 2, 5) == [[], [6, 4]]
