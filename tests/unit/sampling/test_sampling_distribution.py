"""Draws against exact distributions, by chi-square over many seeds and positions.

Seeds are fixed, so a p-value is a constant of the code: a failure is a change, never bad luck.
"""

import numpy as np
import pytest
import torch
from scipy import stats

from engine.sampling.params import RowSampling
from engine.sampling.sampler import Sampler
from engine.sampling.seeds import derive_seed
from engine.types import SamplingParams, Want

LOGITS = np.array([1.0, 0.2, -0.5, 2.0, 0.0, -3.0, 1.0, -1.2, 0.7, -np.inf])
PROMPT = np.array([0, 3], dtype=np.uint32)
OUTPUT = [6, 6, 2]
SEEDS, POSITIONS = 8, 3_000
LEAST_P = 1e-3


def draws(sampling: SamplingParams, logits=LOGITS, seeds=SEEDS, positions=POSITIONS) -> np.ndarray:
    """ids [seeds, positions]."""
    logits_RV = torch.tensor(np.tile(logits, (positions, 1)), dtype=torch.float32)
    sampler = Sampler(len(logits), "cpu")
    ids = []
    for seed in range(seeds):
        row = RowSampling(sampling, Want(), derive_seed(11, seed), PROMPT, (), OUTPUT)
        ids.append(sampler.sample(logits_RV, [row] * positions, list(range(5, 5 + positions))).ids.numpy())
    return np.stack(ids)


def exact(params: SamplingParams, logits=LOGITS) -> np.ndarray:
    """The definition, written out in float64 on whole vectors."""
    logits = logits.astype(np.float64).copy()
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for token in set(PROMPT.tolist()) | set(OUTPUT):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(OUTPUT):
        logits[token] -= params.frequency_penalty * OUTPUT.count(token) + params.presence_penalty
    p = np.exp(logits / params.temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if params.top_k:
        p[order[params.top_k :]] = 0
        p /= p.sum()
    if params.top_p < 1:
        count = next(n for n in range(1, len(p) + 1) if p[order[:n]].sum() >= params.top_p - 1e-12)
        p[order[count:]] = 0
        p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


def p_value(ids: np.ndarray, expected: np.ndarray) -> float:
    counts = np.bincount(ids.ravel(), minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    if possible.sum() == 1:
        return 1.0
    return stats.chisquare(counts[possible], expected[possible] * ids.size).pvalue


CASES = {
    "temperature_1": SamplingParams(),
    "temperature_0.7": SamplingParams(temperature=0.7),
    "temperature_3": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(top_k=3),
    "top_k_splits_a_tie": SamplingParams(top_k=2),
    "top_p": SamplingParams(top_p=0.85),
    "top_p_keeps_one": SamplingParams(top_p=0.01),
    "min_p": SamplingParams(min_p=0.25),
    "all_filters": SamplingParams(temperature=1.3, top_k=6, top_p=0.9, min_p=0.15),
    "bias": SamplingParams(logit_bias={5: 4.0, 3: -np.inf, 9: 50.0}),
    "penalties": SamplingParams(repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=-0.4),
    "all": SamplingParams(temperature=0.8, repetition_penalty=0.7, logit_bias={1: 1.0}, top_p=0.9, top_k=7),
}


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_exact_distribution(name):
    positions = POSITIONS if name.startswith("temperature") else POSITIONS // 5
    assert p_value(draws(CASES[name], positions=positions), exact(CASES[name])) > LEAST_P


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_many_more_draws_follow_the_exact_distribution(name):
    assert p_value(draws(CASES[name], seeds=2 * SEEDS), exact(CASES[name])) > LEAST_P


def test_a_wrong_distribution_would_be_noticed():
    assert p_value(draws(SamplingParams(temperature=0.9)), exact(SamplingParams())) < 1e-9


def test_a_wide_vocabulary_is_drawn_evenly():
    ids = draws(SamplingParams(), np.zeros(5_003), seeds=2, positions=2_000)
    counts = np.bincount(ids.ravel() * 50 // 5_003, minlength=50)
    widths = np.bincount(np.arange(5_003) * 50 // 5_003)
    assert stats.chisquare(counts, widths / 5_003 * ids.size).pvalue > LEAST_P


def test_rare_tokens_are_drawn_at_their_rate():
    each, others = 2e-5, 200
    logits = np.full(others + 1, np.log(each))
    logits[70] = np.log1p(-others * each)
    rare = np.count_nonzero(draws(SamplingParams(), logits, seeds=4, positions=10_000) != 70)
    assert stats.binomtest(int(rare), 40_000, others * each).pvalue > LEAST_P


def test_neighbouring_positions_and_seeds_are_independent():
    ids = draws(SamplingParams(), np.zeros(4))
    for first, second in ((ids[:, :-1], ids[:, 1:]), (ids[:-1], ids[1:])):
        table = np.bincount((first * 4 + second).ravel(), minlength=16).reshape(4, 4)
        assert stats.chi2_contingency(table).pvalue > LEAST_P


def test_consecutive_plain_seeds_are_independent():
    logits = torch.zeros(4_000, 4)
    rows = [RowSampling(SamplingParams(), Want(), seed, PROMPT) for seed in range(4_000)]
    ids = Sampler(4, "cpu").sample(logits, rows, [9] * 4_000).ids.numpy()
    assert p_value(ids, np.full(4, 0.25)) > LEAST_P
    table = np.bincount(ids[:-1] * 4 + ids[1:], minlength=16).reshape(4, 4)
    assert stats.chi2_contingency(table).pvalue > LEAST_P
