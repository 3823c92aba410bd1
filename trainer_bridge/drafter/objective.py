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

Everything is computed in fp32 from logits, in chunks of blocks, each of which goes forward and at once back to the
drafter's states; their gradients then go through the backbone together. So nothing is computed twice, and at most
`chunk` blocks' [G, V] logits exist at once.

Shapes: A blocks, G drafts, V vocabulary, D hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.dspark.block_model import BlockDrafterModel, SharedEnds
from engine.errors import InvalidRequest
from trainer_bridge.drafter.blocks import Blocks
from trainer_bridge.drafter.config import DraftLossConfig
from trainer_bridge.drafter.row_terms import row_terms


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

    def add(self, values: dict[str, Tensor], counted_AG: Tensor) -> None:
        """[A, G] by name, "count" among them; others stay as they are."""
        nothing_AG = torch.zeros_like(values["count"])
        values_FAG = torch.stack([values.get(name, nothing_AG).detach().float() for name in self.FIELDS])
        self.values_FG += torch.where(counted_AG, values_FAG, 0.0).sum(1, dtype=torch.float64)

    def on_host(self) -> DraftSums:
        """A copy to read from: every value of a copy on a device would be waited for by itself."""
        copied = DraftSums(0)
        copied.values_FG = self.values_FG.cpu()
        return copied

    def mean(self, name: str) -> Tensor:
        """float64 [G], NaN where nothing counted."""
        return self.values_FG[self.FIELDS.index(name)] / self.values_FG[0]

    def overall(self, name: str) -> float:
        return float(self.values_FG[self.FIELDS.index(name)].sum() / self.values_FG[0].sum())

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
    """This part's share of L with W = `divisor`, detached; adds to `sums` and, unless torch's gradients are switched
    off, to the `grad` of the parameters that learn."""
    hidden_AGD = blocks.hidden(model, ends)
    weights_G = draft_weights(config, hidden_AGD.shape[1], hidden_AGD.device)
    learns = torch.is_grad_enabled() and any(param.requires_grad for param in model.parameters())
    total = hidden_AGD.new_zeros((), dtype=torch.float32)
    gradients = []
    for start in range(0, len(blocks), chunk):
        part = slice(start, start + chunk)
        own_AGD = hidden_AGD.detach()[part].requires_grad_(learns and hidden_AGD.requires_grad)
        states_AGD = None if blocks.states_AGD is None else blocks.states_AGD[part]
        labels = (blocks.previous_AG[part], blocks.labels_AG[part], blocks.counted_AG[part])
        value = _terms(model, ends, own_AGD, labels, states_AGD, config, weights_G, sums) / divisor
        if learns:
            value.backward()
            gradients.append(own_AGD.grad)
        total += value.detach()
    if learns and hidden_AGD.requires_grad:
        hidden_AGD.backward(torch.cat(gradients))
    return total


def _terms(
    model: BlockDrafterModel,
    ends: SharedEnds,
    hidden_AGD: Tensor,
    labels: tuple[Tensor, Tensor, Tensor],
    states_AGD: Tensor | None,
    config: DraftLossConfig,
    weights_G: Tensor,
    sums: DraftSums,
) -> Tensor:
    """sum w_k l_k of some blocks."""
    previous_AG, labels_AG, counted_AG = labels
    logits_AGV, confidence_AG = model.teacher_forced(hidden_AGD, previous_AG, ends, config.detach_confidence)
    target_RV = None
    if states_AGD is not None:
        with torch.no_grad():
            target_RV = ends.head(states_AGD.flatten(0, 1))
    terms = row_terms(logits_AGV.flatten(0, 1), target_RV, labels_AG.flatten(), config.temperature)
    del logits_AGV, target_RV
    ce_AG, distance_AG, agreed_AG = (
        None if values_R is None else values_R.unflatten(0, labels_AG.shape) for values_R in terms
    )
    assert ce_AG is not None
    loss_AG = config.ce * ce_AG
    found = {"count": torch.ones_like(ce_AG), "ce": ce_AG}
    if distance_AG is not None and agreed_AG is not None:
        accepted_AG = (1.0 - 0.5 * distance_AG).detach()
        loss_AG = loss_AG + config.l1 * distance_AG
        found |= {"accepted": accepted_AG, "survival": torch.cumprod(accepted_AG, dim=1), "agreed": agreed_AG}
        if confidence_AG is not None and config.confidence:
            bce_AG = F.binary_cross_entropy_with_logits(confidence_AG.float(), accepted_AG, reduction="none")
            loss_AG = loss_AG + config.confidence * bce_AG
            gap_AG = torch.sigmoid(confidence_AG.detach().float()) - accepted_AG
            found |= {"bce": bce_AG, "gap": gap_AG.abs(), "bias": gap_AG}
    sums.add(found, counted_AG)
    return torch.where(counted_AG, loss_AG * weights_G, 0.0).sum()
