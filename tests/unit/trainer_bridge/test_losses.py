"""Losses against a scalar reference written out token by token, gradients included. Case J9."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.errors import InvalidRequest
from trainer_bridge.batches import Denominators, pad
from trainer_bridge.config import LossConfig
from trainer_bridge.losses import policy_loss, supervised_loss
from trainer_bridge.losses.policy import derived_metrics
from trainer_bridge.tally import Tally

MAX_NEW = 9
KINDS = ["grpo", "dr_grpo", "dapo"]


def samples_of(make_sample):
    return [
        make_sample(2, 1, index=0, advantage=1.3),
        make_sample(3, 4, index=1, advantage=-0.7, mask=[True, False, True, True]),
        make_sample(1, 7, index=2, advantage=0.4),
        make_sample(4, 2, index=3, advantage=-2.0),
    ]


def columns(samples, seed: int, scale: float) -> list[np.ndarray]:
    """Invented trainer log-probabilities near the rollout's, one array per sample."""
    rng = np.random.default_rng(seed)
    return [(s.rollout_logprobs + rng.normal(0, scale, len(s.output_ids))).astype(np.float64) for s in samples]


def reference(samples, current, proximal, config: LossConfig, reference_logprobs=None):
    """The formulas of the module's docstring with `math` alone: loss, and d loss / d current."""
    total_tokens = sum(int(s.loss_mask.sum()) for s in samples)
    loss, gradients = 0.0, []
    for i, s in enumerate(samples):
        gradient = np.zeros(len(s.output_ids))
        for t in range(len(s.output_ids)):
            if not s.loss_mask[t]:
                continue
            divisor = {
                "grpo": len(samples) * int(s.loss_mask.sum()),
                "dr_grpo": len(samples) * MAX_NEW,
                "dapo": total_tokens,
            }[config.kind]
            weight = math.exp(proximal[i][t] - float(s.rollout_logprobs[t]))
            weight = 1.0 if config.is_cap is None else min(weight, config.is_cap)
            ratio = math.exp(current[i][t] - proximal[i][t])
            clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            plain = ratio * s.advantage
            value = -weight * min(plain, clipped * s.advantage)
            slope = -weight * plain if plain <= clipped * s.advantage else 0.0
            if config.kl_coef:
                gap = reference_logprobs[i][t] - current[i][t]
                value += config.kl_coef * (math.exp(gap) - gap - 1)
                slope += config.kl_coef * (1 - math.exp(gap))
            loss += value / divisor
            gradient[t] = slope / divisor
        gradients.append(gradient)
    return loss, gradients


def spread(batch, samples, values) -> torch.Tensor:
    """Per-sample columns at the positions of a padded batch."""
    out = torch.zeros(batch.mask_BT.shape, dtype=torch.float64)
    for row, (sample, column) in enumerate(zip(samples, values, strict=True)):
        first = len(sample.prompt_ids) - 1
        out[row, first : first + len(column)] = torch.tensor(column)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"is_cap": None}, {"is_cap": 1.0, "clip_high": 0.28}, {"kl_coef": 0.1}, {"clip_low": 0.0, "clip_high": 0.0}],
)
def test_loss_and_gradient_equal_the_scalar_reference(make_sample, kind, options) -> None:
    samples = samples_of(make_sample)
    config = LossConfig(kind=kind, **options)
    proximal, current, policy_0 = (columns(samples, seed, scale) for seed, scale in ((1, 0.8), (2, 0.9), (3, 0.5)))
    expected, gradients = reference(samples, current, proximal, config, policy_0)
    batch = pad(samples, 0)
    leaf = spread(batch, samples, current).requires_grad_()
    loss, _ = policy_loss(
        leaf,
        batch,
        Denominators.of(samples, MAX_NEW),
        config,
        proximal_BT=spread(batch, samples, proximal),
        reference_BT=spread(batch, samples, policy_0),
    )
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(leaf.grad, spread(batch, samples, gradients), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3], [0, 1, 2]]])
def test_case_j9_gradient_does_not_depend_on_the_split(make_sample, kind, split) -> None:
    samples = samples_of(make_sample)
    config = LossConfig(kind=kind)
    current = columns(samples, 2, 0.3)
    everything = Denominators.of(samples, MAX_NEW)
    parts = [Denominators.of([samples[i] for i in part], MAX_NEW) for part in split]
    assert parts[0] + parts[1] == everything

    def gradient(part: list[int]) -> dict[int, torch.Tensor]:
        chosen = [samples[i] for i in part]
        batch = pad(chosen, 0)
        leaf = spread(batch, chosen, [current[i] for i in part]).requires_grad_()
        policy_loss(leaf, batch, everything, config)[0].backward()
        return {i: leaf.grad[row][batch.mask_BT[row]] for row, i in enumerate(part)}

    whole = gradient([0, 1, 2, 3])
    for part in split:
        for i, value in gradient(part).items():
            torch.testing.assert_close(value, whole[i], rtol=1e-6, atol=1e-9)
    if kind != "grpo":  # dividing by each part's own count would not have added up
        assert parts[0].tokens != parts[1].tokens


def test_masked_positions_have_no_gradient_even_where_values_are_not_finite(make_sample) -> None:
    samples = samples_of(make_sample)
    batch = pad(samples, 0)
    current = spread(batch, samples, columns(samples, 2, 0.3))
    current[~batch.mask_BT] = float("-inf")
    leaf = current.requires_grad_()
    loss, metrics = policy_loss(leaf, batch, Denominators.of(samples, MAX_NEW), LossConfig())
    loss.backward()
    assert math.isfinite(loss.item()) and torch.isfinite(leaf.grad).all()
    assert not leaf.grad[~batch.mask_BT].any()
    assert all(math.isfinite(value) for value in derived_metrics(metrics).values())


def test_metrics_are_those_of_the_field_and_count_every_token(make_sample) -> None:
    samples = samples_of(make_sample)
    batch = pad(samples, 0)
    proximal = columns(samples, 1, 0.8)
    loss_columns = spread(batch, samples, proximal)
    _, tally = policy_loss(loss_columns, batch, Denominators.of(samples, MAX_NEW), LossConfig(is_cap=1.5))
    pairs = [
        (p, float(s.rollout_logprobs[t]))
        for s, column in zip(samples, proximal, strict=True)
        for t, p in enumerate(column)
        if s.loss_mask[t]
    ]
    weights = [math.exp(p - b) for p, b in pairs]
    count = len(pairs)
    assert count == 13
    expected = {
        "actor/ppo_kl": 0.0,
        "actor/pg_clipfrac": 0.0,
        "train/train_rollout_logprob_abs_diff": sum(abs(p - b) for p, b in pairs) / count,
        "train/tis_clipfrac": sum(w > 1.5 for w in weights) / count,
        "training/rollout_probs_diff_mean": sum(abs(math.exp(p) - math.exp(b)) for p, b in pairs) / count,
        "rollout_corr/rollout_is_mean": sum(weights) / count,
        "rollout_corr/k3_kl": sum(w - math.log(w) - 1 for w in weights) / count,
        "rollout_corr/chi2_token": sum(w * w for w in weights) / count - 1,
        "rollout_corr/rollout_is_eff_sample_size": sum(weights) ** 2 / (count * sum(w * w for w in weights)),
    }
    actual = derived_metrics(tally)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value, rel=1e-5, abs=1e-9), name


def test_supervised_loss_is_the_mean_over_all_tokens_of_the_step(make_sample) -> None:
    samples = samples_of(make_sample)
    values = columns(samples, 5, 0.2)
    expected = -sum(v[s.loss_mask].sum() for s, v in zip(samples, values, strict=True)) / 13
    total = 0.0
    for part in ([0, 3], [1, 2]):
        chosen = [samples[i] for i in part]
        batch = pad(chosen, 0)
        column = spread(batch, chosen, [values[i] for i in part])
        total += supervised_loss(column, batch, Denominators.of(samples, 1)).item()
    assert total == pytest.approx(expected, rel=1e-9)


def test_tallies_add_up_and_absence_is_not_zero() -> None:
    first, second = Tally(), Tally()
    first.add("x", 3, 2)
    second.add("x", 1, 6)
    first.merge(second)
    assert first.mean("x") == 0.5 and math.isnan(first.mean("y"))


@pytest.mark.parametrize(
    "options", [{"clip_low": 1.5}, {"clip_high": -0.1}, {"is_cap": 0.0}, {"kl_coef": float("nan")}, {"kind": "ppo"}]
)
def test_bad_settings_are_refused_by_name(options) -> None:
    (name,) = options
    with pytest.raises(InvalidRequest, match=f"^loss.{name}:"):
        LossConfig(**options)
