"""The block drafter over pages equals itself over dense context."""

import pytest
import torch

from engine.attention.torch_ref import TorchReference
from engine.dspark.block_drafter import BlockDrafter
from engine.dspark.dense_attention import dense_attention
from engine.dspark.drafter import Committed, DraftRows
from engine.memory.kv_pool import KVPool
from tests.unit.dspark.drafters import HIDDEN, argmax_pick, random_drafter, random_ends

LENGTHS = [9, 1, 14]


class Paged:
    """Rows of a shuffled pool that holds NaN wherever nobody has written."""

    def __init__(self, page_size, **overrides):
        self.model, self.ends = random_drafter(**overrides), random_ends()
        shape = self.model.spec.backbone
        self.pool = KVPool(shape, 96, page_size, torch.float32, "cpu")
        self.pool.fill(float("nan"))
        self.drafter = BlockDrafter(self.model, self.ends, self.pool, TorchReference(shape))
        columns = -(-28 // page_size)
        pages = torch.randperm(95, generator=torch.Generator().manual_seed(2))[: columns * len(LENGTHS)] + 1
        self.tables = pages.view(len(LENGTHS), columns).int()
        generator = torch.Generator().manual_seed(3)
        self.features = [torch.randn(24, 2, HIDDEN, generator=generator) for _ in LENGTHS]
        self.page_size = page_size

    def commit(self, row, start, end):
        positions = torch.arange(start, end)
        slots = self.tables[row, positions // self.page_size].long() * self.page_size + positions % self.page_size
        captured = {layer: self.features[row][start:end, place] for place, layer in enumerate((0, 2))}
        self.drafter.commit(Committed([row], [end - start], positions, positions, slots, captured))

    def propose(self, lengths):
        anchors = torch.tensor([7, 8, 9])
        rows = DraftRows([0, 1, 2], anchors, torch.tensor(lengths), self.tables, argmax_pick)
        return self.drafter.propose(rows)

    def dense(self, row, length, anchor):
        context = self.model.context_features(self.features[row][:length])
        positions = torch.arange(length)
        k, v = self.model.context_kv(context, positions)
        at = torch.tensor([length])
        attend = dense_attention(self.model.spec.backbone, self.model.spec.block, k, v, at, positions)
        hidden = self.model.hidden(torch.tensor([anchor]), at, self.ends, attend)
        return self.model.draw(hidden, torch.tensor([anchor]), self.ends, argmax_pick)

    def assert_dense(self, lengths):
        proposal = self.propose(lengths)
        for row, length in enumerate(lengths):
            ids, logits, confidence = self.dense(row, length, 7 + row)
            torch.testing.assert_close(proposal.logits_BGV[row], logits[0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(proposal.confidence_BG[row], confidence[0], atol=1e-4, rtol=1e-4)
            assert torch.equal(proposal.ids_BG[row], ids[0])


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("window", [None, 6])
def test_pages_give_what_dense_context_gives(page_size, window):
    sliding = {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention"] * 2}
    paged = Paged(page_size, **(sliding if window else {}))
    for row, length in enumerate(LENGTHS):
        paged.commit(row, 0, length)
    paged.assert_dense(LENGTHS)


@pytest.mark.parametrize("page_size", [1, 4])
def test_case_f3_rounds_chunks_and_plain_steps_leave_the_same_context(page_size):
    """What is committed in pieces, between rounds whose blocks were rejected, equals one cold commit."""
    warm = Paged(page_size)
    for row, length in enumerate(LENGTHS):
        for start in range(0, length, 4):
            warm.commit(row, start, min(start + 4, length))
    lengths = list(LENGTHS)
    for accepted in (0, 3, 1):
        warm.propose(lengths)
        for row in range(3):
            warm.commit(row, lengths[row], lengths[row] + accepted + 1)
            lengths[row] += accepted + 1
    warm.assert_dense(lengths)
    cold = Paged(page_size)
    for row, length in enumerate(lengths):
        cold.commit(row, 0, length)
    assert torch.equal(warm.propose(lengths).ids_BG, cold.propose(lengths).ids_BG)


def test_case_f3_a_copied_page_brings_the_context_along():
    paged = Paged(4)
    paged.commit(0, 0, 9)
    source, target = paged.tables[0, :3].tolist(), paged.tables[1, :3].tolist()
    paged.pool.copy_pages(source, target)
    paged.commit(2, 0, 14)
    proposal = paged.propose([9, 9, 14])
    expected = paged.dense(0, 9, 8)[0]
    assert torch.equal(proposal.ids_BG[1], expected[0])


def test_case_f7_beyond_the_drafters_context_commits_harm_nothing_and_blocks_are_not_asked_for():
    paged = Paged(4, max_position_embeddings=16)
    for row in range(3):
        paged.commit(row, 0, 20)
    paged.assert_dense([9, 1, 12])
    with pytest.raises(AssertionError, match="block ends at 17"):
        paged.propose([9, 1, 13])
