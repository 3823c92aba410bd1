"""The loss of a drafter and its confidence head.

Owns the formula (arXiv 2607.05147) and its divisor. With q the drafter's distribution after the true
tokens before it, p the target's, x the true token and z the confidence logit of draft k,

    l_k = ce * -log q(x) + l1 * sum_v |q(v) - p(v)| + confidence * BCE(z, c*)
    c*  = 1 - 1/2 sum_v |q(v) - p(v)|, the chance that a draft from q is accepted; no gradient
    w_k = exp(-k / decay), k = 0 for the first draft of a block
    L   = sum w_k l_k / W,  W = sum w_k over every counted draft of the train_step

W is one number for all terms, fixed before the step is split: it spans all ranks and micro-batches, so
that neither changes a gradient. A draft counts while all labels of its block up to it are supervised.
`l1` weighs the whole L1 distance, twice the total variation. A label outside a reduced vocabulary has
no cross-entropy; it stays counted, and p keeps the mass it has there, which q can never match.

Everything is computed in fp32 from logits, in chunks of blocks that are computed again in the backward
pass: at most `chunk` blocks' [G, V] distributions exist at once.

Shapes: A blocks, G drafts, V vocabulary, D hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine.dspark.block_model import BlockDrafterModel, SharedEnds
from engine.errors import InvalidRequest
from trainer_bridge.drafter.blocks import Blocks
from trainer_bridge.drafter.config import DraftLossConfig


def draft_weights(config: DraftLossConfig, drafts: int, device: torch.device | str = "cpu") -> Tensor:
    """w_k, float32 [G]."""
    places = torch.arange(drafts, dtype=torch.float32, device=device)
    return torch.ones_like(places) if config.decay is None else torch.exp(-places / config.decay)


class DraftSums:
    """Sums by draft position of a train_step, float64 [F, G]; they add up over micro-batches and ranks.

    `accepted` is the chance of acceptance after the true tokens, `survival` its product along the block,
    `agreed` counts drafts whose argmax is the target's; `gap` and `bias` are |c - c*| and c - c*."""

    FIELDS = ("count", "ce", "accepted", "survival", "agreed", "bce", "gap", "bias")

    def __init__(self, drafts: int, device: torch.device | str = "cpu") -> None:
        self.values_FG = torch.zeros(len(self.FIELDS), drafts, dtype=torch.float64, device=device)

    def add(self, name: str, values_AG: Tensor, counted_AG: Tensor) -> None:
        self.values_FG[self.FIELDS.index(name)] += torch.where(counted_AG, values_AG.double(), 0.0).sum(0)

    def mean(self, name: str) -> Tensor:
        """float64 [G] on the CPU, NaN where nothing counted."""
        values = self.values_FG.cpu()
        return values[self.FIELDS.index(name)] / values[0]

    def overall(self, name: str) -> float:
        values = self.values_FG.cpu()
        return float(values[self.FIELDS.index(name)].sum() / values[0].sum())

    def accept_length(self) -> float:
        """Expected tokens of a step, the bonus among them: 1 + the sum of mean survivals. Each mean is over the
        blocks that reach that far within an answer, so that real steps, the last of an answer among them,
        yield less."""
        return 1.0 + float(self.mean("survival").nan_to_num(0.0).sum())


def check_terms(config: DraftLossConfig, has_states: bool, has_confidence: bool) -> None:
    """Raise `InvalidRequest` before the first step where a weighted term could never be computed."""
    if config.needs_states and not has_states:
        named = "loss.l1" if config.l1 else "loss.confidence"
        raise InvalidRequest(
            field=named, expected="0, as the examples hold no final states of the target", actual=config
        )
    if config.confidence and not has_confidence and not (config.ce or config.l1):
        raise InvalidRequest(field="loss.confidence", expected="a drafter with a confidence head", actual="none")


def draft_loss(
    model: BlockDrafterModel,
    ends: SharedEnds,
    blocks: Blocks,
    config: DraftLossConfig,
    divisor: float,
    sums: DraftSums,
    chunk: int = 128,
) -> Tensor:
    """This part's share of L with W = `divisor`; adds to `sums`."""
    hidden_AGD = blocks.hidden(model, ends)
    weights_G = draft_weights(config, hidden_AGD.shape[1], hidden_AGD.device)
    total = hidden_AGD.new_zeros((), dtype=torch.float32)
    for start in range(0, len(blocks), chunk):
        part = slice(start, start + chunk)
        states_AGD = None if blocks.states_AGD is None else blocks.states_AGD[part]
        labels = (blocks.previous_AG[part], blocks.labels_AG[part], blocks.counted_AG[part])
        # Sums are taken when the loss is: the second computation, in the backward pass, must not add again.
        first = [True]

        def terms(
            hidden_AGD: Tensor,
            labels: tuple[Tensor, Tensor, Tensor] = labels,
            states_AGD: Tensor | None = states_AGD,
            first: list[bool] = first,
        ) -> Tensor:
            seen = sums if first[0] else None
            first[0] = False
            return _terms(model, ends, hidden_AGD, labels, states_AGD, config, weights_G, seen)

        if torch.is_grad_enabled():
            value = checkpoint(terms, hidden_AGD[part], use_reentrant=False, preserve_rng_state=False)
            assert isinstance(value, Tensor)
        else:
            value = terms(hidden_AGD[part])
        total = total + value
    return total / divisor


def _terms(
    model: BlockDrafterModel,
    ends: SharedEnds,
    hidden_AGD: Tensor,
    labels: tuple[Tensor, Tensor, Tensor],
    states_AGD: Tensor | None,
    config: DraftLossConfig,
    weights_G: Tensor,
    sums: DraftSums | None,
) -> Tensor:
    """sum w_k l_k of some blocks."""
    previous_AG, labels_AG, counted_AG = labels
    logits_AGV, confidence_AG = model.teacher_forced(hidden_AGD, previous_AG, ends, config.detach_confidence)
    log_q_AGV = torch.log_softmax(logits_AGV.float() / config.temperature, dim=-1)
    picked_AG = log_q_AGV.gather(-1, labels_AG[..., None])[..., 0]
    ce_AG = torch.where(counted_AG & picked_AG.isneginf(), 0.0, -picked_AG)
    loss_AG = config.ce * ce_AG
    accepted_AG = None
    if states_AGD is not None and (config.needs_states or sums is not None):
        with torch.no_grad():
            target_AGV = ends.head(states_AGD.flatten(0, 1)).unflatten(0, states_AGD.shape[:2]).float()
            p_AGV = torch.softmax(target_AGV / config.temperature, dim=-1)
        distance_AG = (log_q_AGV.exp() - p_AGV).abs().sum(-1)
        accepted_AG = (1.0 - 0.5 * distance_AG).detach()
        loss_AG = loss_AG + config.l1 * distance_AG
        if sums is not None:
            agreed_AG = logits_AGV.detach().argmax(-1) == target_AGV.argmax(-1)
            sums.add("agreed", agreed_AG, counted_AG)
    if confidence_AG is not None and accepted_AG is not None and config.confidence:
        bce_AG = F.binary_cross_entropy_with_logits(confidence_AG.float(), accepted_AG, reduction="none")
        loss_AG = loss_AG + config.confidence * bce_AG
        if sums is not None:
            gap_AG = torch.sigmoid(confidence_AG.detach().float()) - accepted_AG
            for name, values_AG in (("bce", bce_AG.detach()), ("gap", gap_AG.abs()), ("bias", gap_AG)):
                sums.add(name, values_AG, counted_AG)
    if sums is not None:
        sums.add("count", torch.ones_like(picked_AG.detach()), counted_AG)
        sums.add("ce", ce_AG.detach(), counted_AG)
        if accepted_AG is not None:
            sums.add("accepted", accepted_AG, counted_AG)
            sums.add("survival", torch.cumprod(accepted_AG, dim=1), counted_AG)
    return torch.where(counted_AG, loss_AG * weights_G, 0.0).sum()
