"""Verification against exact distributions: whole sequences, enumerated.

Seeds are fixed, so a p-value is a constant of the code: a failure is a change, never bad luck.
"""

import numpy as np
import pytest
import torch
from scipy import stats

from engine.dspark.acceptance import Round, verify_coupled, verify_rejection
from engine.dspark.picks import CoupledPick, RejectionPick
from engine.dspark.round_noise import RoundNoise
from engine.sampling.sampler import Sampler
from engine.types import SamplingParams
from tests.unit.dspark.toy import PROMPT, Play, Tables, enumerate_exact, exact_row, row_of

LEAST_P = 1e-3
NEW = 3

PARAMS = {
    "temperature_1": SamplingParams(),
    "temperature_0.6": SamplingParams(temperature=0.6),
    "temperature_2": SamplingParams(temperature=2.0),
    "top_k": SamplingParams(top_k=2),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.3),
    "all_filters": SamplingParams(temperature=1.4, top_k=3, top_p=0.9, min_p=0.1),
    "bias": SamplingParams(logit_bias={0: 1.5, 3: -np.inf}),
}
PENALTIES = {
    "repetition": SamplingParams(repetition_penalty=3.0),
    "frequency_and_presence": SamplingParams(frequency_penalty=2.0, presence_penalty=-0.5),
    "with_filters": SamplingParams(temperature=1.3, repetition_penalty=2.5, frequency_penalty=-1.5, top_p=0.9),
}


def p_value(sequences, expected):
    """Of observed sequences [N, new] under the exact distribution; rare ones are pooled."""
    shape = expected.shape
    counts = np.zeros(shape)
    np.add.at(counts, tuple(sequences.T), 1)
    counts, wanted = counts.ravel(), expected.ravel() * len(sequences)
    assert counts[wanted == 0].sum() == 0, "an impossible sequence came out"
    common = wanted >= 5
    counts = np.append(counts[common], counts[~common & (wanted > 0)].sum())
    wanted = np.append(wanted[common], wanted[~common].sum())
    possible = wanted > 1e-9
    return stats.chisquare(counts[possible], wanted[possible]).pvalue if possible.sum() > 1 else 1.0


def ragged(number, drafts, lengths):
    """Windows of 0 to 3 that follow round and length: history only."""
    return [(number * 7 + length * 3) % 4 for length in lengths]


def assert_exact(params, draft, count):
    tables = Tables()
    play = Play(tables, params, draft=draft, lens=ragged, count=count)
    assert p_value(play.run(NEW), enumerate_exact(tables, params, NEW)) > LEAST_P
    assert 0 < play.accepted < play.proposed


@pytest.mark.parametrize(
    ("name", "draft", "count"),
    [
        ("temperature_1", "sampled", 1200),
        ("temperature_1", "argmax", 1200),
        ("all_filters", "sampled", 400),
        ("top_p", "argmax", 400),
    ],
)
def test_sequences_follow_the_targets_distribution(name, draft, count):
    assert_exact(PARAMS[name], draft, count)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["sampled", "argmax"])
@pytest.mark.parametrize("name", PARAMS)
def test_many_more_sequences_follow_the_targets_distribution(name, draft):
    assert_exact(PARAMS[name], draft, 6000)


def assert_penalised(params, draft, count):
    tables = Tables(vocab=3, seed=1, spread=0.5)
    play = Play(tables, params, draft=draft, count=count, block=2)
    sequences = play.run(2)
    assert p_value(sequences, enumerate_exact(tables, params, 2)) > LEAST_P
    plain = SamplingParams(temperature=params.temperature, top_p=params.top_p)
    assert p_value_or_zero(sequences, enumerate_exact(tables, plain, 2)) < 1e-6


@pytest.mark.parametrize(("name", "draft"), [("frequency_and_presence", "sampled"), ("with_filters", "argmax")])
def test_penalties_follow_the_draft_prefix(name, draft):
    assert_penalised(PENALTIES[name], draft, 500)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["sampled", "argmax"])
@pytest.mark.parametrize("name", PENALTIES)
def test_many_more_penalised_sequences_follow_the_draft_prefix(name, draft):
    assert_penalised(PENALTIES[name], draft, 3000)


def p_value_or_zero(sequences, expected):
    try:
        return p_value(sequences, expected)
    except AssertionError:
        return 0.0


@pytest.mark.parametrize("wanted", [0, 3])
def test_forced_drafters_are_always_accepted_or_never(wanted):
    """D-ORACLE and D-WRONG at T = 1: a point target either is the draft or never is."""
    tables = Tables()
    tables.target[:] = -np.inf
    for a in range(4):
        for b in range(4):
            tables.target[a, b, (a + b) % 4] = 0.0

    def oracle(row, tokens):
        out = list(tokens)
        for _ in range(3):
            out.append((out[-2] + out[-1]) % 4)
        drafts = out[len(tokens) :]
        return drafts if wanted else [(token + 1) % 4 for token in drafts]

    play = Play(tables, draft=oracle, count=5)
    play.run(12)
    assert play.accepted == (play.proposed if wanted else 0)
    expected = list(PROMPT)
    for _ in range(12):
        expected.append((expected[-2] + expected[-1]) % 4)
    assert all(tokens[: len(expected)] == expected for tokens in play.tokens)


def test_acceptance_rate_is_one_minus_the_distance():
    tables = Tables(seed=4)
    play = Play(tables, count=3000, lens=lambda number, drafts, lengths: [1] * 3000)
    play.round(0)
    p = exact_row(tables.target[1, 2], SamplingParams())
    q = exact_row(tables.drafter[1, 2], SamplingParams())
    expected = np.minimum(p, q).sum()
    assert abs(play.accepted / 3000 - expected) < 4 * np.sqrt(expected * (1 - expected) / 3000)
    assert abs(np.mean(play.chances) - expected) < 4 * np.std(play.chances) / np.sqrt(3000)


def test_the_same_draws_judged_without_q_follow_the_target_too():
    """Sampled drafts whose probabilities are unknown: target-only is exact for any proposal."""
    tables = Tables(seed=2)

    def random_drafts(row, tokens):
        return np.random.default_rng((row, len(tokens))).integers(0, 4, 3).tolist()

    play = Play(tables, draft=random_drafts, count=1200)
    assert p_value(play.run(NEW), enumerate_exact(tables, SamplingParams(), NEW)) > LEAST_P


def one_round(target, drafter, count, params=None, bfloat=False, sampled=True):
    """First tokens of `count` rounds of one draft, from fixed logits."""
    row, anchors = row_of(params), list(range(count))
    noise = RoundNoise([3] * count, [0] * count, anchors, "cpu")
    logits = torch.tensor(drafter, dtype=torch.bfloat16 if bfloat else torch.float32).repeat(count, 1)
    pick = RejectionPick([row] * count, anchors, noise)
    ids = pick(0, logits) if sampled else logits.argmax(-1)
    rows = torch.tensor([target] * (2 * count))
    played = Round([row] * count, anchors, ids[:, None], [1] * count, logits[:, None] if sampled else None)
    verdict = verify_rejection(rows, played, noise)
    kept = np.array(verdict.num_accepted)
    firsts = np.cumsum(kept + 1) - kept - 1
    return verdict.emitted.ids.numpy()[firsts], kept, ids.numpy()


def test_case_f1_low_precision_draft_logits_bias_nothing():
    near_ties = [1.000, 1.003, 0.998, 1.001, 0.999, 1.002, 0.997, 1.004]
    target = [0.3, 1.0, -0.2, 0.9, 0.1, 0.5, 1.1, 0.0]
    ids, _, drafts = one_round(target, near_ties, 8_000, bfloat=True)
    p = np.exp(np.float64(target)) / np.exp(np.float64(target)).sum()
    assert stats.chisquare(np.bincount(ids, minlength=8), p * len(ids)).pvalue > LEAST_P
    q = torch.tensor(near_ties).bfloat16().double().exp().numpy()
    assert stats.chisquare(np.bincount(drafts, minlength=8), q / q.sum() * len(ids)).pvalue > LEAST_P


def test_case_f1_rejections_redraw_what_the_draft_lacked():
    p, q = np.log([0.5, 0.3, 0.2]).tolist(), np.log([0.2, 0.3, 0.5]).tolist()
    ids, kept, _ = one_round(p, q, 40_000)
    assert abs(kept.mean() - 0.7) < 0.01
    assert set(ids[kept == 0].tolist()) == {0}
    assert stats.chisquare(np.bincount(ids), np.array([0.5, 0.3, 0.2]) * len(ids)).pvalue > LEAST_P


def test_case_f2_argmax_drafts_leave_the_distribution_alone():
    p, q = np.log([0.5, 0.3, 0.2]).tolist(), np.log([0.2, 0.3, 0.5]).tolist()
    ids, _, drafts = one_round(p, q, 8_000, sampled=False)
    assert set(drafts.tolist()) == {2}
    counts = np.bincount(ids, minlength=3)
    assert stats.chisquare(counts, np.array([0.5, 0.3, 0.2]) * len(ids)).pvalue > LEAST_P
    bug = np.array([0.6, 1e-9, 0.4])
    assert stats.chisquare(counts, bug / bug.sum() * len(ids)).pvalue < 1e-6


def test_equal_distributions_have_no_residual_and_lose_nothing():
    logits = [0.2, -1.0, 0.7]
    ids, kept, drafts = one_round(logits, logits, 2000)
    assert kept.all() and (ids == drafts).all()


def test_a_draft_that_the_target_cuts_off_is_never_kept():
    params = SamplingParams(top_k=1)
    ids, kept, drafts = one_round([0.0, 3.0, 1.0], [2.0, 1.0, 0.0], 500, params)
    assert set(drafts.tolist()) == {0}, "the drafter is cut like the target: to its own best"
    assert not kept.any() and set(ids.tolist()) == {1}


class TestGreedy:
    @pytest.mark.parametrize("rule", ["rejection", "coupled"])
    @pytest.mark.parametrize("name", ["plain", *PENALTIES, "bias"])
    def test_case_f8_ids_equal_plain_decoding(self, rule, name):
        edits = {"plain": SamplingParams()} | PENALTIES | {"bias": SamplingParams(logit_bias={2: 100.0})}
        fields = {f: getattr(edits[name], f) for f in ("repetition_penalty", "frequency_penalty", "presence_penalty")}
        params = SamplingParams(temperature=0.0, logit_bias=edits[name].logit_bias, **fields)
        tables = Tables(vocab=8, seed=6, distance=0.5)
        play = Play(tables, params, rule=rule, lens=ragged, count=4)
        sequences = play.run(10)
        expected = list(PROMPT)
        for _ in range(10):
            row = exact_row(tables.target[expected[-2], expected[-1]], params, expected[2:])
            expected.append(int(row.argmax()))
        assert (sequences == expected[2:]).all()
        assert play.accepted > 0

    def test_greedy_and_drawing_rows_share_a_round(self):
        tables = Tables(seed=8)
        plays = [Play(tables, params, count=1) for params in (SamplingParams(), SamplingParams(temperature=0.0))]
        alone = [play.run(6)[0].tolist() for play in plays]
        mixed = Play(tables, count=2)
        mixed.rows = [row_of(SamplingParams()), row_of(SamplingParams(temperature=0.0))]
        # Greedy rows need no noise, so that only the first copy's sample id matters.
        together = mixed.run(6).tolist()
        assert together == alone


class TestCoupled:
    @pytest.mark.parametrize("name", ["temperature_1", "all_filters", "bias", "repetition", "with_filters"])
    @pytest.mark.parametrize("draft", ["sampled", "argmax"])
    def test_tokens_and_log_probabilities_equal_plain_sampling_bit_for_bit(self, name, draft):
        tables, params = Tables(vocab=8, seed=5), (PARAMS | PENALTIES)[name]
        play = Play(tables, params, rule="coupled", draft=draft, lens=ragged, count=3)
        # Same seed, same position, same token: copies with one seed are one sample.
        sequences = play.run(30)
        row, sampler, tokens, logprobs = row_of(params), Sampler(8, "cpu"), list(PROMPT), []
        for _ in range(30):
            result = sampler.sample(tables.target[tokens[-2], tokens[-1]][None], [row], [len(tokens)])
            tokens.append(int(result.ids[0]))
            logprobs.append(float(result.logprobs[0]))
            row.observe(tokens[-1])
        assert (sequences == tokens[2:]).all()
        assert [values[:30] for values in play.logprobs] == [logprobs] * 3
        assert play.accepted > 0

    def test_acceptance_follows_its_formula(self):
        """Per position the sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x)."""
        tables, count, agreed = Tables(seed=1), 2000, 0
        row, sampler = row_of(), Sampler(4, "cpu")
        anchors = list(range(1, count + 1))
        p, q = tables.target[1, 2], tables.drafter[1, 2]
        pick = CoupledPick([row] * count, anchors, sampler)
        drafts = pick(0, q.repeat(count, 1))
        verdict = verify_coupled(
            p.repeat(2 * count, 1), Round([row] * count, anchors, drafts[:, None], [1] * count), sampler
        )
        agreed = np.mean(verdict.num_accepted)
        p, q = (np.exp(v.double().numpy()) / np.exp(v.double().numpy()).sum() for v in (p, q))
        expected = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(4))
        assert abs(agreed - expected) < 4 * np.sqrt(expected * (1 - expected) / count)


class TestNoise:
    def test_a_position_drafted_again_meets_fresh_noise(self):
        """The published leak needs noise that an earlier draft of the position has shown."""
        first, again = (RoundNoise([3], [9], [anchor], "cpu") for anchor in (10, 11))
        # Draft number 2 after anchor 10 and number 1 after anchor 11 stand at one position.
        for use in (1, 2, 3):
            assert not torch.equal(first.exponential([0], [2], use, 16), again.exponential([0], [1], use, 16))
        assert first.uniform([0], [2]) != again.uniform([0], [1])

    def test_twins_with_one_seed_differ_by_sample_id(self):
        noise = RoundNoise([3, 3], [1, 2], [10, 10], "cpu")
        pair = noise.exponential([0, 1], [0, 0], 1, 16)
        assert not torch.equal(pair[0], pair[1])
        assert noise.uniform([0], [0]) != noise.uniform([1], [0])

    def test_uses_and_slots_are_apart_and_rows_do_not_matter(self):
        noise = RoundNoise([4, 3], [1, 1], [10, 10], "cpu")
        words = {(use, slot): noise.exponential([1], [slot], use, 16) for use in (1, 2, 3) for slot in range(3)}
        assert len({tuple(value[0].tolist()) for value in words.values()}) == 9
        alone = RoundNoise([3], [1], [10], "cpu")
        assert all(torch.equal(alone.exponential([0], [slot], use, 16), value) for (use, slot), value in words.items())

    def test_host_and_device_words_agree(self):
        wide = RoundNoise([2**64 - 1], [2**63 + 5], [10], "cpu")
        assert torch.equal(wide.exponential([0], [3], 2, 300)[:, :200], wide.exponential([0], [3], 2, 200))


class TestColumns:
    @pytest.mark.parametrize("rule", ["rejection", "coupled"])
    @pytest.mark.parametrize("name", ["temperature_0.6", "all_filters", "with_filters", "bias", "greedy"])
    def test_case_c3_every_token_has_the_targets_log_probability(self, rule, name):
        params = (PARAMS | PENALTIES | {"greedy": SamplingParams(temperature=0.0)})[name]
        tables = Tables(vocab=8, seed=3)
        play = Play(tables, params, rule=rule, count=6)
        wanting = dict(extra_logprobs=["raw", "temperature", "processed"], entropy=True, top_logprobs=2)
        play.rows = [row_of(params, **(wanting if row % 2 else {})) for row in range(6)]
        raw_logs, seen = [], []
        take = play.take
        play.take = lambda verdict, lens: (seen.append(verdict), take(verdict, lens))
        play.run(8)
        for tokens, logprobs in zip(play.tokens, play.logprobs, strict=True):
            for place in range(2, len(tokens)):
                logits = tables.target[tokens[place - 2], tokens[place - 1]]
                p = exact_row(logits, params, tokens[2:place])[tokens[place]]
                raw = float(torch.log_softmax(logits.double(), -1)[tokens[place]])
                raw_logs.append(raw)
                expected = raw if params.temperature == 0 else np.log(p)
                assert abs(logprobs[place - 2] - expected) < 1e-5
        for verdict in seen:
            assert set(verdict.emitted.extra_logprobs) == {"raw", "temperature", "processed"}
            asked = ~torch.isnan(verdict.emitted.extra_logprobs["raw"])
            torch.testing.assert_close(
                verdict.emitted.extra_logprobs["processed"][asked], verdict.emitted.logprobs[asked], atol=1e-5, rtol=0
            )
            owners = np.repeat(np.arange(6), np.array(verdict.num_accepted) + 1)
            assert asked.tolist() == (owners % 2 == 1).tolist()
            assert verdict.emitted.entropy is not None and verdict.emitted.top_ids is not None

    @pytest.mark.parametrize("rule", ["rejection", "coupled"])
    def test_unusable_logits_end_a_row_after_what_was_good(self, rule):
        tables = Tables()
        rows = torch.zeros(7, 4)
        rows[:, 2] = 50.0
        rows[1] = float("nan")
        drafts = torch.tensor([[2, 2], [2, 2], [0, 0]])
        row = row_of()
        played = Round([row] * 3, [5, 5, 5], drafts, [2, 2, 0])
        if rule == "coupled":
            verdict = verify_coupled(rows, played, Sampler(4, "cpu"))
        else:
            verdict = verify_rejection(rows, played, RoundNoise([3] * 3, [0, 1, 2], [5] * 3, "cpu"))
        assert verdict.num_accepted == [1, 2, 0]
        assert verdict.emitted.bad.tolist() == [False, True, False, False, False, False]
        assert verdict.emitted.ids.tolist() == [2, 0, 2, 2, 2, 2]
        assert tables.vocab == 4
