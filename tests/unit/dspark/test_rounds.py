"""Whole rounds over a real model: capture, commit, propose, verify, in the smallest loop there is."""

import numpy as np
import pytest
import torch

from engine.attention.torch_ref import TorchReference
from engine.batch import ForwardBatch
from engine.dspark.acceptance import Round, verify_coupled, verify_rejection
from engine.dspark.block_drafter import BlockDrafter
from engine.dspark.block_model import shared_ends
from engine.dspark.drafter import Committed, DraftRows, Proposal
from engine.dspark.ngram import NgramDrafter
from engine.dspark.picks import CoupledPick, RejectionPick
from engine.dspark.round_noise import RoundNoise
from engine.memory.kv_pool import KVPool
from engine.models.registry import build_model
from engine.models.spec import read_spec
from engine.runner.model_runner import ModelRunner
from engine.runner.round_plan import tiers_of_verify_rows
from engine.sampling.params import RowSampling
from engine.sampling.sampler import Sampler
from engine.types import SamplingParams, Want
from engine.weights.loader import load_weights
from tests.support import TOLERANCE, VOCAB, prompt, reference_greedy, reference_logprobs
from tests.unit.dspark.drafters import random_drafter

PAGE, COLUMNS, NEW = 4, 16, 16
PROMPTS = [prompt(12), prompt(3, 40), prompt(9, 200)]


class Loop:
    """A target, its pool and a drafter; every row owns its pages, which hold NaN until written."""

    def __init__(self, folder, kind, params, rule):
        spec = read_spec(folder)
        model = build_model(spec, torch.float32)
        load_weights(model, folder)
        pages = 1 + COLUMNS * len(PROMPTS)
        pool = KVPool(spec, pages, PAGE, torch.float32, "cpu")
        pool.fill(float("nan"))
        self.runner = ModelRunner(model, pool, TorchReference(spec))
        order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(1)) + 1
        self.tables = order.view(len(PROMPTS), COLUMNS).int()
        if kind == "ngram":
            self.drafter = NgramDrafter(4, shortest=1)
        else:
            drafter = random_drafter(num_target_layers=2, target_layer_ids=[0])
            drafts = KVPool(drafter.spec.backbone, pages, PAGE, torch.float32, "cpu")
            drafts.fill(float("nan"))
            backend = TorchReference(drafter.spec.backbone)
            self.drafter = BlockDrafter(drafter, shared_ends(model), drafts, backend)
        self.rule, self.sampler = rule, Sampler(VOCAB, "cpu")
        self.rows = [RowSampling(params, Want(), 70 + b, p) for b, p in enumerate(PROMPTS)]
        self.tokens = [p.tolist() for p in PROMPTS]
        self.logprobs = [[] for _ in PROMPTS]
        self.accepted = 0

    def forward(self, pieces, starts):
        """Logits of all tokens, and what `commit` needs of them."""
        counts = [len(piece) for piece in pieces]
        rows = torch.repeat_interleave(torch.arange(len(pieces)), torch.tensor(counts))
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        slots = self.tables[rows, positions // PAGE].long() * PAGE + positions % PAGE
        ids = torch.tensor([token for piece in pieces for token in piece])
        lens = [s + n for s, n in zip(starts, counts, strict=True)]
        batch = ForwardBatch(ids, positions, slots, counts, lens, self.tables, [1, 2, 3], 0, torch.arange(len(ids)))
        features = {layer: torch.empty(0) for layer in self.drafter.traits.captured_layers}
        hidden = self.runner.hidden(batch, features)
        return self.runner.logits(hidden), (ids, positions, slots, features), counts

    def commit(self, computed, counts, keep):
        """The first `keep[b]` tokens of every piece are part of their request now."""
        starts = np.cumsum([0, *counts[:-1]])
        places = torch.tensor([s + i for s, n in zip(starts, keep, strict=True) for i in range(n)])
        ids, positions, slots, features = computed
        part = {layer: value[places] for layer, value in features.items()}
        self.drafter.commit(Committed(range(3), keep, ids[places], positions[places], slots[places], part))

    def start(self):
        for slot, tokens in enumerate(self.tokens):
            self.drafter.admit(slot, np.array(tokens))
        logits, computed, counts = self.forward(self.tokens, [0, 0, 0])
        self.commit(computed, counts, counts)
        result = self.sampler.sample(logits[np.cumsum(counts) - 1], self.rows, counts)
        self.take([0, 0, 0], result)

    def round(self, lens):
        anchors = [len(tokens) - 1 for tokens in self.tokens]
        noise = RoundNoise([70, 71, 72], range(3), anchors, "cpu")
        rejecting = self.rule == "rejection"
        pick = RejectionPick(self.rows, anchors, noise) if rejecting else CoupledPick(self.rows, anchors, self.sampler)
        last = torch.tensor([tokens[-1] for tokens in self.tokens])
        proposal = self.drafter.propose(DraftRows(range(3), last, torch.tensor(anchors), self.tables, pick))
        lens = [min(a, b) for a, b in zip(lens, proposal.lens, strict=True)]
        drafts = proposal.ids_BG.tolist()
        pieces = [[t[-1], *d[:n]] for t, d, n in zip(self.tokens, drafts, lens, strict=True)]
        logits, computed, counts = self.forward(pieces, anchors)
        played = Round(self.rows, anchors, proposal.ids_BG, lens, proposal.logits_BGV if rejecting else None)
        verdict = verify_rejection(logits, played, noise) if rejecting else verify_coupled(logits, played, self.sampler)
        self.commit(computed, counts, [kept + 1 for kept in verdict.num_accepted])
        self.accepted += sum(verdict.num_accepted)
        self.take(verdict.num_accepted, verdict.emitted)

    def take(self, num_accepted, emitted):
        ids, logprobs, start = emitted.ids.tolist(), emitted.logprobs.tolist(), 0
        for b, kept in enumerate(num_accepted):
            for token, logprob in zip(ids[start : start + kept + 1], logprobs[start : start + kept + 1], strict=True):
                self.tokens[b].append(token)
                self.logprobs[b].append(logprob)
                self.rows[b].observe(token)
            start += kept + 1

    def run(self):
        self.start()
        for number in range(NEW):
            self.round([(number + 2 * b) % 5 for b in range(3)])
        return [tokens[len(p) : len(p) + NEW] for tokens, p in zip(self.tokens, PROMPTS, strict=True)]


@pytest.mark.parametrize("kind", ["block", "ngram"])
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_greedy_rounds_equal_the_reference(t_full, kind, rule):
    loop = Loop(t_full, kind, SamplingParams(temperature=0.0), rule)
    assert loop.run() == [reference_greedy(t_full, p, NEW) for p in PROMPTS]


@pytest.mark.parametrize("kind", ["block", "ngram"])
def test_coupled_rounds_equal_plain_sampling(t_full, kind):
    params = SamplingParams(temperature=0.7, top_p=0.9, frequency_penalty=0.5)
    loop = Loop(t_full, kind, params, "coupled")
    speculated = loop.run()
    plain = Loop(t_full, "ngram", params, "coupled")
    plain.start()
    for _ in range(NEW):
        plain.round([0, 0, 0])
    assert speculated == [tokens[len(p) : len(p) + NEW] for tokens, p in zip(plain.tokens, PROMPTS, strict=True)]


@pytest.mark.parametrize("kind", ["block", "ngram"])
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_case_c3_log_probabilities_equal_teacher_forced_scores(t_full, kind, rule):
    loop = Loop(t_full, kind, SamplingParams(temperature=0.5), rule)
    loop.run()
    for tokens, logprobs, p in zip(loop.tokens, loop.logprobs, PROMPTS, strict=True):
        expected = reference_logprobs(t_full, tokens, temperature=0.5)[len(p) :]
        np.testing.assert_allclose(logprobs, expected, atol=TOLERANCE)
        assert len(logprobs) == len(tokens) - len(p)


class TruthTeller:
    """D-SCRIPT: the target's own ids, of which the first `right` are left as they are."""

    def __init__(self, texts, prompts, right):
        self.texts, self.prompts, self.right = texts, prompts, right
        self.traits = NgramDrafter(4).traits

    def admit(self, slot, ids): ...

    def commit(self, committed): ...

    def release(self, slot): ...

    def propose(self, rows):
        drafts = []
        for slot, position in zip(rows.slots, rows.positions_B.tolist(), strict=True):
            start = position + 1 - len(self.prompts[slot])
            ids = [*self.texts[slot], 1, 1, 1, 1][start : start + 4]
            drafts.append([token if k < self.right else (token + 1) % VOCAB for k, token in enumerate(ids)])
        return Proposal(torch.tensor(drafts), [4] * len(drafts))


@pytest.mark.parametrize("right", [0, 2, 4])
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_scripted_drafts_are_kept_exactly_as_far_as_they_are_right(t_full, right, rule):
    texts = [reference_greedy(t_full, p, NEW + 5) for p in PROMPTS]
    loop = Loop(t_full, "ngram", SamplingParams(temperature=0.0), rule)
    loop.drafter = TruthTeller(texts, PROMPTS, right)
    loop.start()
    for _ in range(3):
        loop.round([4, 4, 4])
    assert [len(logprobs) for logprobs in loop.logprobs] == [1 + 3 * (right + 1)] * 3
    for tokens, p, text in zip(loop.tokens, PROMPTS, texts, strict=True):
        assert tokens[len(p) :] == text[: len(tokens) - len(p)]
    assert loop.accepted == 9 * right


def test_every_whole_window_has_a_tier():
    """Planned windows keep to the tiers there are; windows that nobody plans must all fit."""
    assert tiers_of_verify_rows(256, 7)[-1] == 1024
    assert tiers_of_verify_rows(256, 7, whole=True)[-1] == 256 * 8
    assert tiers_of_verify_rows(8, 7) == tiers_of_verify_rows(8, 7, whole=True)
