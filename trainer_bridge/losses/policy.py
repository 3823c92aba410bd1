"""GRPO, Dr.GRPO and DAPO losses with truncated importance sampling.

Owns the formula from three log-probabilities of a token to its loss, and the divisors. Ignores
models and optimisers. The three are kept apart: behaviour (`rollout_logprobs`, what sampled the
token), proximal (the trainer's before the step, which clipping is relative to) and current.

    w_t = min(exp(proximal_t - behaviour_t), is_cap)                    no gradient
    r_t = exp(current_t - proximal_t)
    l_t = -w_t min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A) + kl_coef k3_t

    grpo     sum over samples of (sum_t l_t / tokens of the sample) / samples of the step
    dr_grpo  sum_t l_t / (samples of the step x max_new)
    dapo     sum_t l_t / tokens of the step

All counts come from `Denominators`, so micro-batches and ranks simply add up. Tokens whose weight
is truncated, or whose gradient is clipped away, stay counted.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.errors import InvalidRequest
from trainer_bridge.batches import Batch, Denominators
from trainer_bridge.config import LossConfig, LossKind
from trainer_bridge.tally import Tally


def policy_loss(
    current_BT: Tensor,
    batch: Batch,
    denominators: Denominators,
    config: LossConfig,
    *,
    proximal_BT: Tensor | None = None,
    reference_BT: Tensor | None = None,
) -> tuple[Tensor, Tally]:
    """This batch's share of the step's loss, and its metrics.

    `proximal_BT` None means that the step is taken at once, where proximal equals current.
    """
    mask_BT = batch.mask_BT
    proximal_BT = current_BT.detach() if proximal_BT is None else proximal_BT.detach()
    behaviour_BT = batch.rollout_logprobs_BT
    zero = torch.zeros((), device=current_BT.device)
    log_ratio_BT = torch.where(mask_BT, current_BT - proximal_BT, zero)
    log_weight_BT = torch.where(mask_BT, proximal_BT - behaviour_BT, zero)
    ratio_BT = log_ratio_BT.exp()
    raw_weight_BT = log_weight_BT.exp()
    weight_BT = torch.ones_like(raw_weight_BT) if config.is_cap is None else raw_weight_BT.clamp(max=config.is_cap)
    plain_BT = ratio_BT * batch.advantages_BT
    clipped_BT = ratio_BT.clamp(1 - config.clip_low, 1 + config.clip_high) * batch.advantages_BT
    loss_BT = -weight_BT * torch.minimum(plain_BT, clipped_BT)
    if config.kl_coef:
        if reference_BT is None:
            raise InvalidRequest(field="reference_BT", expected="log-probabilities, as kl_coef is set", actual=None)
        gap_BT = torch.where(mask_BT, reference_BT.detach() - current_BT, zero)
        loss_BT = loss_BT + config.kl_coef * (gap_BT.exp() - gap_BT - 1)
    loss = _reduce(torch.where(mask_BT, loss_BT, zero), batch, denominators, config.kind)
    with torch.no_grad():
        metrics = _measure(batch, log_ratio_BT, log_weight_BT, raw_weight_BT, clipped_BT < plain_BT, config)
    return loss, metrics


def _reduce(loss_BT: Tensor, batch: Batch, denominators: Denominators, kind: LossKind) -> Tensor:
    if kind == "grpo":
        return (loss_BT / batch.sample_tokens_BT.clamp(min=1)).sum() / denominators.samples
    if kind == "dr_grpo":
        return loss_BT.sum() / (denominators.samples * denominators.max_new)
    return loss_BT.sum() / denominators.tokens


def _measure(
    batch: Batch,
    log_ratio_BT: Tensor,
    log_weight_BT: Tensor,
    raw_weight_BT: Tensor,
    is_clipped_BT: Tensor,
    config: LossConfig,
) -> Tally:
    """Sums over masked tokens under the names the field uses."""
    mask_BT = batch.mask_BT
    count = float(mask_BT.sum())
    tally = Tally()

    def add(name: str, values_BT: Tensor) -> None:
        tally.add(name, values_BT[mask_BT].double().sum().item(), count)

    cap = math.inf if config.is_cap is None else config.is_cap
    behaviour_BT = batch.rollout_logprobs_BT
    trainer_BT = behaviour_BT + log_weight_BT
    add("actor/ppo_kl", -log_ratio_BT)
    add("actor/pg_clipfrac", is_clipped_BT.float())
    add("train/train_rollout_logprob_abs_diff", log_weight_BT.abs())
    add("train/tis_clipfrac", (raw_weight_BT > cap).float())
    add("training/rollout_probs_diff_mean", (trainer_BT.exp() - behaviour_BT.exp()).abs())
    add("rollout_corr/rollout_is_mean", raw_weight_BT)
    add("rollout_corr/rollout_is_sq", raw_weight_BT.square())
    add("rollout_corr/k3_kl", raw_weight_BT - log_weight_BT - 1)
    return tally


def derived_metrics(tally: Tally) -> dict[str, float]:
    """All means, the squared weights turned into the effective sample size (a share of 1) and the
    token-level chi-square."""
    means = tally.means()
    square = means.pop("rollout_corr/rollout_is_sq")
    mean = means["rollout_corr/rollout_is_mean"]
    means["rollout_corr/rollout_is_eff_sample_size"] = mean * mean / square if square else float("nan")
    means["rollout_corr/chi2_token"] = square - 1
    return means
