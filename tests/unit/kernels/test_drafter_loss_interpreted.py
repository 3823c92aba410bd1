"""The drafter's loss kernels in Triton's interpreter against torch: terms, gradients, what is written where."""

from __future__ import annotations

import pytest
import torch

from trainer_bridge.drafter.fused_loss import fused_terms, launch_gradient, launch_terms
from trainer_bridge.drafter.row_terms import row_terms_reference

NEVER = float("-inf")


def rows(vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits with a reduced vocabulary, the target's, labels: a plain row, one that is nearly the target's, a label
    that is left out, a row that nothing is learnt of."""
    generator = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(4, vocab, generator=generator)
    target = logits + 3 * torch.randn(4, vocab, generator=generator)
    target[1] = logits[1]
    logits[:, 3::4] = NEVER
    target[1, 3::4] = 2.0
    return logits, target, torch.tensor([4, vocab - 2 if vocab % 4 == 1 else 0, 7, 0])


@pytest.mark.parametrize(("vocab", "temperature"), [(64, 1.0), (4133, 0.7)])
@pytest.mark.parametrize("with_target", [True, False])
def test_terms_and_gradients_equal_torch(vocab, temperature, with_target):
    logits, target, labels = rows(vocab)
    weights = torch.tensor([[0.3, 1.0, 2.0, 0.0], [0.9, 0.5, 1.5, 0.0]])
    found = []
    for terms in (fused_terms, row_terms_reference):
        given = logits.clone().requires_grad_()
        # As a head's product would be: no leaf, and not kept by what made it.
        own = terms(given + 0.0, target if with_target else None, labels, temperature)
        loss = (own.ce_R * weights[0]).sum()
        if own.distance_R is not None:
            loss = loss + (own.distance_R * weights[1]).sum()
        loss.backward()
        found.append((*own, given.grad))
    for fused, plain in zip(*found, strict=True):
        assert (fused is None) == (plain is None)
        torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)
    assert found[0][0][2] == 0 and not found[0][3][3].any() and not found[0][3][:, 3::4].any()


def test_rows_may_lie_apart_and_gradients_elsewhere():
    logits, target, labels = rows(65)
    wide = torch.full((4, 80), float("nan"))
    wide[:, :65] = logits
    ce, distance, agreed, notes = launch_terms(wide[:, :65], target, labels, 1.0, block=32)
    plain = row_terms_reference(logits, target, labels, 1.0)
    for one, other in zip((ce, distance, agreed), plain, strict=True):
        torch.testing.assert_close(one, other)
    out = torch.full((4, 70), 5.0)
    launch_gradient(wide[:, :65], target, labels, 1.0, notes, ce, distance, out[:, :65], block=32)
    inner = launch_gradient(wide[:, :65], target, labels, 1.0, notes, ce, distance, wide[:, :65], block=32)
    assert torch.equal(out[:, :65], inner) and bool((out[:, 65:] == 5).all()) and bool(wide[:, 65:].isnan().all())


def test_argmax_ties_go_to_the_lowest_token():
    logits, target = torch.zeros(2, 40), torch.zeros(2, 40)
    logits[0, [5, 30]], target[0, [5, 9]] = 1.0, 2.0
    logits[1, [6, 30]], target[1, [30, 35]] = 1.0, 2.0
    terms = fused_terms(logits, target, torch.zeros(2, dtype=torch.int64), 1.0)
    assert terms.agreed_R is not None and terms.agreed_R.tolist() == [True, False]
