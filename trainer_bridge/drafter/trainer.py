"""The drafter as it is trained: one step of data parallelism, an optimiser, and what a resume needs.

Owns the order of a step: anchors, the common divisor, gradients over micro-batches, their sum over ranks,
clipping, AdamW on fp32 masters. Ignores where features come from and when anything is saved.

Every rank holds the whole drafter and takes its share of a step's examples. Gradients are summed, as the
divisor spans all ranks: how examples are shared out changes nothing but rounding. A step whose gradient
is not finite is skipped on all ranks alike and counted; too many in a row end the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.dspark.block_model import BlockDrafterModel, SharedEnds
from engine.errors import InternalError, InvalidRequest
from trainer_bridge.drafter.anchors import anchor_rng, counted, draw_anchors, draw_lengths, eligible
from trainer_bridge.drafter.blocks import Blocks, join, make_blocks, micro_batches
from trainer_bridge.drafter.config import DraftLossConfig, DraftOptimConfig, Trained
from trainer_bridge.drafter.features import FeatureExample
from trainer_bridge.drafter.objective import DraftSums, check_terms, draft_loss, draft_weights
from trainer_bridge.master_weights import MasterWeights


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A step's blocks by micro-batch, and this rank's summand of its divisor."""

    train_step: int
    parts: list[Blocks]
    weight: float


class DrafterTrainer:
    """Trains `model`, which it owns while it exists, with the target's frozen `ends`.

    `trained` "confidence" leaves everything but the confidence head as it is. With `torch.distributed`
    initialised the ranks of the default group work together; their models must be equal at the start.
    """

    def __init__(
        self,
        model: BlockDrafterModel,
        ends: SharedEnds,
        loss: DraftLossConfig,
        optim: DraftOptimConfig,
        seed: int = 0,
        trained: Trained = "all",
    ) -> None:
        if trained == "confidence" and (model.confidence_head is None or not loss.confidence):
            raise InvalidRequest(field="trained", expected="a confidence head whose loss has a weight", actual=trained)
        self.model, self.ends, self.loss, self.optim, self.seed = model, ends, loss, optim, seed
        self.train_step, self.skipped = 0, 0
        self._in_a_row = 0
        self._device = model.fc.device
        for name, param in model.named_parameters():
            param.requires_grad_(trained == "all" or name.startswith("confidence_head."))
        self.weights = MasterWeights(model.parameters())
        self.optimizer = torch.optim.AdamW(
            [master for master, param in self._pairs() if param.requires_grad],
            lr=optim.learning_rate,
            betas=(optim.betas[0], optim.betas[1]),
            weight_decay=optim.weight_decay,
            eps=optim.eps,
            fused=self._device.type == "cuda",
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, optim.rate)

    def prepare(self, examples: Sequence[FeatureExample], train_step: int) -> Prepared:
        """What `take` needs of this rank's share of a step's examples, which may be empty. Reads no weights: another
        thread may prepare a step while this one is at the step before."""
        has_states = all(item.last_TD is not None for item in examples)
        check_terms(self.loss, has_states, self.model.confidence_head is not None)
        spec, chosen = self.model.spec, self._anchors(examples, train_step)
        weight, lengths_A = 0.0, None
        if chosen:
            weights_G = draft_weights(self.loss, spec.num_drafts).double().numpy()
            joined, lengths_A = join(chosen), self._lengths(chosen, train_step)
            given = joined.mask_T, joined.anchors_A, spec.num_drafts, joined.ends_A, lengths_A
            weight = float((counted(*given) * weights_G).sum())
        parts, first = [], 0
        for part in micro_batches(spec, chosen, self.optim.max_slots):
            last = first + sum(len(anchors_A) for _, anchors_A in part)
            own_A = None if lengths_A is None else lengths_A[first:last]
            parts.append(make_blocks(spec, part, self._device, own_A))
            first = last
        return Prepared(train_step, parts, weight)

    def step(self, examples: Sequence[FeatureExample]) -> dict[str, float]:
        """`take` of examples that nobody has prepared."""
        return self.take(self.prepare(examples, self.train_step))

    def take(self, prepared: Prepared) -> dict[str, float]:
        """One update on this rank's share of a step; metrics of all ranks."""
        assert prepared.train_step == self.train_step, f"step {prepared.train_step} is not {self.train_step}"
        divisor = self._divisor(prepared.weight)
        sums = DraftSums(self.model.spec.num_drafts, self._device)
        value = torch.zeros((), dtype=torch.float64, device=self._device)
        for blocks in prepared.parts:
            value += draft_loss(self.model, self.ends, blocks, self.loss, divisor, sums, self.optim.chunk)
            self.weights.gather()
        self._reduce(value)
        self._reduce(sums.values_FG)
        # The one time that the host waits for the device: whether to step is seen from the norm.
        told = torch.cat((torch.stack((value, self._clip().to(value))), sums.values_FG.flatten())).cpu()
        loss, norm = told[:2].tolist()
        self._update(norm)
        sums.values_FG = told[2:].view_as(sums.values_FG)
        return self._metrics(sums, loss, norm)

    @torch.no_grad()
    def evaluate(self, examples: Sequence[FeatureExample], sums: DraftSums) -> None:
        """Adds to `sums` what every eligible anchor of these examples yields; nothing is learnt."""
        spec = self.model.spec
        everywhere = [(item, eligible(item.example.mask, spec.block, spec.backbone.context_len)) for item in examples]
        kept = [(item, anchors_A) for item, anchors_A in everywhere if len(anchors_A)]
        for part in micro_batches(spec, kept, self.optim.max_slots):
            blocks = make_blocks(spec, part, self._device)
            draft_loss(self.model, self.ends, blocks, self.loss, 1.0, sums, self.optim.chunk)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to go on bit for bit; anchors are drawn from the step's number."""
        return {
            "masters": [master.detach() for master in self.weights.masters],
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "train_step": self.train_step,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for master, saved in zip(self.weights.masters, state["masters"], strict=True):
                master.copy_(saved)
        self.weights.write_back()
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.train_step, self.skipped = state["train_step"], state["skipped"]

    def _anchors(self, examples: Sequence[FeatureExample], train_step: int) -> list[tuple[FeatureExample, np.ndarray]]:
        spec, chosen = self.model.spec, []
        for item in examples:
            anchors = eligible(item.example.mask, spec.block, spec.backbone.context_len)
            weights = None if item.anchor_weights_T is None else item.anchor_weights_T[anchors]
            rng = anchor_rng(self.seed, train_step, item.example.key)
            anchors_A = draw_anchors(anchors, self.optim.anchors, rng, weights)
            if len(anchors_A):
                chosen.append((item, anchors_A))
        return chosen

    def _lengths(self, chosen: Sequence[tuple[FeatureExample, np.ndarray]], train_step: int) -> np.ndarray | None:
        """Drafts of each block, by key and step as anchors are; None where all are whole."""
        drafts, share = self.model.spec.num_drafts, self.optim.shortened
        if not share:
            return None
        rngs = [anchor_rng(self.seed, train_step, f"{item.example.key} lengths") for item, _ in chosen]
        pairs = zip(chosen, rngs, strict=True)
        return np.concatenate([draw_lengths(len(anchors_A), drafts, share, rng) for (_, anchors_A), rng in pairs])

    def _divisor(self, weight: float) -> float:
        if not dist.is_initialized():
            return weight
        total = torch.tensor(weight, dtype=torch.float64, device=self._device)
        self._reduce(total)
        return float(total)

    def _clip(self) -> Tensor:
        """Sums gradients over ranks and clips them; returns the norm before clipping."""
        trained = [master for master, param in self._pairs() if param.requires_grad]
        if dist.is_initialized():
            # Ranks without examples have no gradients of their own and still take part.
            for master in trained:
                if master.grad is None:
                    master.grad = torch.zeros_like(master)
            flat = torch.cat([master.grad.flatten() for master in trained if master.grad is not None])
            self._reduce(flat)
            for master, part in zip(trained, flat.split([master.numel() for master in trained]), strict=True):
                master.grad = part.view_as(master)
        return nn.utils.clip_grad_norm_(trained, self.optim.clip_norm)

    def _update(self, norm: float) -> None:
        """Steps, unless the gradients' norm is not finite."""
        if math.isfinite(norm):
            self.optimizer.step()
            self.weights.write_back()
            self._in_a_row = 0
        else:
            self.skipped += 1
            self._in_a_row += 1
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.train_step += 1
        if self._in_a_row >= self.optim.max_skipped:
            raise InternalError(f"no finite gradient in {self._in_a_row} steps up to step {self.train_step}")

    def _metrics(self, sums: DraftSums, loss: float, norm: float) -> dict[str, float]:
        values = {
            "drafter/loss": loss,
            "drafter/ce": sums.overall("ce"),
            "drafter/accepted": sums.overall("accepted"),
            "drafter/accept_length": sums.accept_length(),
            "drafter/argmax_agreement": sums.overall("agreed"),
            "drafter/blocks": float(sums.values_FG[0, 0]),
            "drafter/grad_norm": norm,
            "drafter/lr": float(self.scheduler.get_last_lr()[0]),
            "drafter/skipped_steps": float(self.skipped),
        }
        if self.model.confidence_head is not None:
            values["drafter/confidence_gap"] = sums.overall("gap")
            values["drafter/confidence_bias"] = sums.overall("bias")
        for place, mean in enumerate(sums.mean("accepted").tolist()):
            values[f"drafter/accepted_at_{place}"] = mean
        return values

    def _pairs(self) -> list[tuple[Tensor, nn.Parameter]]:
        return list(zip(self.weights.masters, self.weights.params, strict=True))

    @staticmethod
    def _reduce(values: Tensor) -> None:
        if dist.is_initialized():
            dist.all_reduce(values)
