"""Log-probabilities, alternatives and entropy against float64."""

import math

import pytest
import torch

from engine.sampling.logprobs import entropy, highest, score_parts


def some_logits(rows=7, vocab=301) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)) * 4


@pytest.mark.parametrize("width", [1, 77, 150, 301])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.5])
def test_targets_score_as_log_softmax_does(temperature, width):
    logits = some_logits()
    targets = torch.tensor([0, 300, 5, 5, 77, 12, 1])
    reference = torch.log_softmax(logits.double() / temperature, -1).gather(1, targets[:, None])[:, 0]
    values, ids, tops = score_parts(logits.split(width, 1), targets, temperature)
    torch.testing.assert_close(values.double(), reference, atol=3e-6, rtol=0)
    assert ids.shape == tops.shape == (7, 0)


def test_temperature_zero_scores_raw():
    logits, targets = some_logits(2), torch.tensor([3, 4])
    assert score_parts([logits], targets, 0.0)[0].tolist() == score_parts([logits], targets)[0].tolist()


def test_no_rows_score_to_nothing():
    assert score_parts([torch.empty(0, 9)], torch.empty(0, dtype=torch.int64))[0].shape == (0,)


@pytest.mark.parametrize("width", [3, 100, 301])
@pytest.mark.parametrize("k", [1, 5, 301])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_alternatives_equal_a_full_sort(k, temperature, width):
    logits = some_logits().round()  # many ties
    reference = (logits.double() / temperature).sort(dim=-1, descending=True, stable=True)
    lse = torch.logsumexp(logits.double() / temperature, -1, keepdim=True)
    targets = torch.zeros(7, dtype=torch.int64)
    _, ids, values = score_parts(logits.split(width, 1), targets, temperature, k)
    assert ids.tolist() == reference.indices[:, :k].tolist()
    torch.testing.assert_close(values.double(), reference.values[:, :k] - lse, atol=3e-6, rtol=0)


def test_impossible_parts_change_nothing():
    logits = torch.tensor([[-math.inf, -math.inf, 0.0, 1.0]])
    values, ids, _ = score_parts(logits.split(2, 1), torch.tensor([3]), k=3)
    torch.testing.assert_close(values, torch.log_softmax(logits, -1)[:, 3])
    assert ids.tolist() == [[3, 2, 0]]


def test_tied_alternatives_go_by_lower_id():
    values = torch.tensor([[1.0, 2.0, 2.0, 1.0, 1.0, 0.0], [0.0] * 6])
    ids, tops = highest(values, 4)
    assert ids.tolist() == [[1, 2, 0, 3], [0, 1, 2, 3]]
    assert tops.tolist() == [[2.0, 2.0, 1.0, 1.0], [0.0] * 4]


def test_entropy_counts_impossible_ids_as_nothing():
    logprobs = torch.log_softmax(torch.tensor([[0.0, 0.0, -math.inf], [5.0, -math.inf, -math.inf]]), -1)
    assert entropy(logprobs).tolist() == pytest.approx([math.log(2), 0.0], abs=1e-7)
