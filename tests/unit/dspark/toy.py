"""Speculation over tables: a target and a drafter whose next-token logits are looked up by context.

Everything but the two networks is real: picks, verification, noise. Many copies of one sample run side
by side, told apart by their sample ids alone.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

from engine.dspark.acceptance import Round, verify_coupled, verify_rejection
from engine.dspark.picks import CoupledPick, RejectionPick
from engine.dspark.round_noise import RoundNoise
from engine.sampling.params import RowSampling
from engine.sampling.sampler import Sampler
from engine.types import SamplingParams, Want

PROMPT = [1, 2]


class Tables:
    """Logits by the last two tokens: [V, V, V]."""

    def __init__(self, vocab=4, seed=0, spread=1.0, distance=1.0):
        generator = torch.Generator().manual_seed(seed)
        shape = (vocab, vocab, vocab)
        self.vocab = vocab
        self.target = torch.randn(shape, generator=generator) * spread
        self.drafter = self.target + torch.randn(shape, generator=generator) * distance


def row_of(params=None, seed=3, output=(), **want):
    return RowSampling(params or SamplingParams(), Want(**want), seed, np.array(PROMPT, dtype=np.uint32), (), output)


class Play:
    """`count` copies. `draft` is "sampled", "argmax" (no q), or a function of (row, context) -> ids;
    `lens(number of the round, drafts, context lengths)` says how many drafts each copy verifies."""

    def __init__(self, tables, params=None, rule="rejection", draft="sampled", lens=None, block=3, count=8000):
        self.tables, self.rule, self.draft, self.block, self.count = tables, rule, draft, block, count
        self.lens = lens or (lambda number, drafts, lengths: [block] * count)
        penalised = row_of(params).ahead([0]) is not row_of(params)
        shared = row_of(params)
        self.rows = [row_of(params) for _ in range(count)] if penalised else [shared] * count
        self.tokens = [list(PROMPT) for _ in range(count)]
        self.logprobs = [[] for _ in range(count)]
        self.accepted = self.proposed = 0
        self.chances = []
        self.sampler = Sampler(tables.vocab, "cpu")

    def run(self, new):
        number = 0
        while min(map(len, self.tokens)) < len(PROMPT) + new:
            self.round(number)
            number += 1
        return np.array([tokens[len(PROMPT) : len(PROMPT) + new] for tokens in self.tokens])

    def round(self, number):
        anchors = [len(tokens) - 1 for tokens in self.tokens]
        noise = RoundNoise([3] * self.count, range(self.count), anchors, "cpu")
        ids, logits = self.propose(anchors, noise)
        lens = self.lens(number, ids.tolist(), [anchor + 1 for anchor in anchors])
        contexts = [[*t, *d[:n]] for t, d, n in zip(self.tokens, ids.tolist(), lens, strict=True)]
        pairs = [
            (c[end - 2], c[end - 1])
            for t, c in zip(self.tokens, contexts, strict=True)
            for end in range(len(t), len(c) + 1)
        ]
        rows = self.tables.target[tuple(torch.tensor(pairs).T)]
        played = Round(self.rows, anchors, ids, lens, logits)
        if self.rule == "coupled":
            verdict = verify_coupled(rows, played, self.sampler)
        else:
            verdict = verify_rejection(rows, played, noise)
        self.take(verdict, lens)

    def propose(self, anchors, noise):
        if callable(self.draft):
            drafts = [self.draft(row, tokens) for row, tokens in enumerate(self.tokens)]
            return torch.tensor(drafts), None
        if self.rule == "coupled":
            pick = CoupledPick(self.rows, anchors, self.sampler)
        else:
            pick = RejectionPick(self.rows, anchors, noise)
        pairs = torch.tensor([tokens[-2:] for tokens in self.tokens])
        ids, kept = [], []
        for slot in range(self.block):
            logits = self.tables.drafter[pairs[:, 0], pairs[:, 1]]
            ids.append(pick(slot, logits) if self.draft == "sampled" else logits.argmax(-1))
            kept.append(logits)
            pairs = torch.stack((pairs[:, 1], ids[-1]), dim=1)
        sampled = self.draft == "sampled" and self.rule == "rejection"
        return torch.stack(ids, dim=1), torch.stack(kept, dim=1) if sampled else None

    def take(self, verdict, lens):
        ids, logprobs, start = verdict.emitted.ids.tolist(), verdict.emitted.logprobs.tolist(), 0
        for row, kept in enumerate(verdict.num_accepted):
            self.tokens[row] += ids[start : start + kept + 1]
            self.logprobs[row] += logprobs[start : start + kept + 1]
            if self.rows[row].ahead([0]) is not self.rows[row]:
                for token in ids[start : start + kept + 1]:
                    self.rows[row].observe(token)
            start += kept + 1
        assert start == len(ids)
        self.accepted += sum(verdict.num_accepted)
        self.proposed += sum(lens)
        self.chances += verdict.chances


def exact_row(logits, params, seen_output=()):
    """The definition of sampling, written out in float64: probabilities of one position."""
    logits = np.asarray(logits, dtype=np.float64).copy()
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for token in set(PROMPT) | set(seen_output):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(seen_output):
        count = list(seen_output).count(token)
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    if params.temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    p = np.exp((logits - logits.max()) / params.temperature)
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


def enumerate_exact(tables, params, new):
    """Probability of every sequence of `new` tokens, as an array of `new` dimensions."""
    out = np.zeros((tables.vocab,) * new)
    for sequence in itertools.product(range(tables.vocab), repeat=new):
        tokens, p = list(PROMPT), 1.0
        for token in sequence:
            row = exact_row(tables.target[tokens[-2], tokens[-1]], params, tokens[len(PROMPT) :])
            p *= row[token]
            tokens.append(token)
        out[sequence] = p
    return out
