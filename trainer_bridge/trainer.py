"""The trained policy: a transformers model, its optimiser and one step of each kind.

Owns turning samples into a parameter update and what must be saved to go on later. Ignores where
samples come from and where weights go. A step whose gradient is not finite is skipped and
counted: one bad sample must not end a run, nor reach the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import InvalidRequest
from trainer_bridge.batches import Batch, Denominators, micro_batches, pack, pad
from trainer_bridge.config import LossConfig, OptimConfig
from trainer_bridge.logprobs import entropies, model_logits, token_logprobs
from trainer_bridge.losses.policy import derived_metrics, policy_loss
from trainer_bridge.losses.supervised import supervised_loss
from trainer_bridge.master_weights import MasterWeights
from trainer_bridge.offload import Offload
from trainer_bridge.samples import TrainingSample
from trainer_bridge.tally import Tally


class PolicyTrainer:
    """Owns `model` while it exists; `model` stays in evaluation mode, as dropout would make the
    trainer's log-probabilities differ from the rollout's. Parameters that want no gradient stay as they are.
    Others in 16 bits are trained through fp32 copies (`MasterWeights`)."""

    def __init__(self, model: nn.Module, config: OptimConfig, pad_id: int) -> None:
        self.model = model.eval()
        self.config = config
        self.pad_id = pad_id
        self.updates = 0
        self.skipped = 0
        self._device = next(model.parameters()).device
        self.weights = MasterWeights(param for param in model.parameters() if param.requires_grad)
        self._offload = Offload()
        self.optimizer = torch.optim.AdamW(
            self.weights.masters,
            lr=config.learning_rate,
            betas=(config.betas[0], config.betas[1]),
            weight_decay=config.weight_decay,
            eps=config.eps,
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, config.rate)

    def supervised_step(self, samples: Sequence[TrainingSample]) -> float:
        """One update on given answers; returns the mean cross-entropy per token."""
        denominators = Denominators.of(samples, max_new=1)
        total = 0.0
        for batch in self._batches(samples):
            current_BT, _ = self._forward(batch)
            loss = supervised_loss(current_BT, batch, denominators)
            loss.backward()
            self.weights.gather()
            total += loss.item()
        self._update()
        return total

    def train_step(self, samples: Sequence[TrainingSample], loss: LossConfig, max_new: int) -> dict[str, float]:
        """Updates on one step's samples, which carry their advantages; returns metrics.

        With several updates the proximal log-probabilities are taken once, before the first.
        """
        if not samples:
            raise InvalidRequest(field="samples", expected="at least one", actual=0)
        tally = Tally()
        norms: list[float] = []
        parts = [samples[start :: self.config.updates] for start in range(self.config.updates)]
        staged = [self._stage(part) for part in parts if part]
        for part, batches in zip([part for part in parts if part], staged, strict=True):
            denominators = Denominators.of(part, max_new)
            for batch, proximal_BT in batches:
                current_BT, logits_BTV = self._forward(batch)
                value, metrics = policy_loss(current_BT, batch, denominators, loss, proximal_BT=proximal_BT)
                value.backward()
                self.weights.gather()
                tally.merge(metrics)
                tally.add("actor/pg_loss", value.item(), 0)
                with torch.no_grad():
                    mask_BT = batch.mask_BT[:, batch.start :]
                    entropy_BT = entropies(logits_BTV.detach(), batch.temperature_BT[:, batch.start :])
                    tally.add("actor/entropy", entropy_BT[mask_BT].sum().item(), int(mask_BT.sum()))
            norms.append(self._update())
        metrics = derived_metrics(tally)
        metrics["actor/pg_loss"] = tally.numerator("actor/pg_loss") / len(norms)
        metrics["actor/grad_norm"] = sum(norms) / len(norms)
        metrics["actor/lr"] = float(self.scheduler.get_last_lr()[0])
        metrics["actor/skipped_updates"] = float(self.skipped)
        return metrics

    def score(self, samples: Sequence[TrainingSample]) -> list[Tensor]:
        """The trainer's log-probabilities of each sample's output tokens, fp32 [output length]."""
        scores: dict[int, Tensor] = {}
        with torch.no_grad():
            for part in micro_batches(samples, self.config.max_tokens):
                current_BT, _ = self._forward(pad(part, self.pad_id).to(self._device))
                for sample, current_T in zip(part, current_BT.cpu(), strict=True):
                    first = len(sample.prompt_ids) - 1
                    scores[id(sample)] = current_T[first : first + len(sample.output_ids)]
        return [scores[id(sample)] for sample in samples]

    def scale_learning_rate(self, factor: float) -> None:
        """Go on at so many times the rate, under the same schedule."""
        self.scheduler.base_lrs = [rate * factor for rate in self.scheduler.base_lrs]
        for group in self.optimizer.param_groups:
            group["initial_lr"] *= factor
            group["lr"] *= factor

    @torch.no_grad()
    def copy_from(self, other: PolicyTrainer) -> None:
        """Become the other one: its trained weights, optimiser and schedule, in memory of one's own."""
        for mine, theirs in zip(self.weights.params, other.weights.params, strict=True):
            mine.copy_(theirs)
        self.load_state_dict(copy.deepcopy(other.state_dict()))

    def offload(self) -> int:
        """Leave the device to somebody else: parameters and optimiser go to host memory. Returns
        the bytes freed; nothing but `restore` may be called until then."""
        return self._offload.move_out(self._device_tensors())

    def restore(self) -> None:
        """Come back from `offload`; without effect otherwise."""
        self._offload.move_in()

    def state_dict(self) -> dict[str, Any]:
        return {
            "masters": [master.detach() for master in self.weights.copies],
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "updates": self.updates,
            "skipped": self.skipped,
            "torch_rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights.load(state["masters"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.updates = state["updates"]
        self.skipped = state["skipped"]
        torch.set_rng_state(state["torch_rng"])

    def _batches(self, samples: Sequence[TrainingSample]) -> list[Batch]:
        if self.config.packed:
            return [pack(samples, self.config.max_tokens, self.pad_id).to(self._device)]
        parts = micro_batches(samples, self.config.max_tokens)
        return [pad(part, self.pad_id).to(self._device) for part in parts]

    def _stage(self, samples: Sequence[TrainingSample]) -> list[tuple[Batch, Tensor | None]]:
        batches = self._batches(samples)
        if self.config.updates == 1:
            return [(batch, None) for batch in batches]
        with torch.no_grad():
            return [(batch, self._forward(batch)[0]) for batch in batches]

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probabilities of all columns, 0 before `batch.start`, and the logits from there on."""
        assert not self._offload.is_out, "an offloaded trainer is restored before it is used"
        logits_BTV = model_logits(self.model, batch, batch.start)
        columns = slice(batch.start, None)
        current_BT = token_logprobs(logits_BTV, batch.targets_BT[:, columns], batch.temperature_BT[:, columns])
        return F.pad(current_BT, (batch.start, 0)), logits_BTV

    def _update(self) -> float:
        """Clips, steps and clears the gradient; returns its norm before clipping."""
        norm = float(nn.utils.clip_grad_norm_(self.weights.masters, self.config.clip_norm))
        if norm == norm and norm != float("inf"):
            self.optimizer.step()
            self.weights.write_back()
            self.scheduler.step()
            self.updates += 1
        else:
            self.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _device_tensors(self) -> Iterator[Tensor]:
        yield from self.model.parameters()
        yield from self.weights.copies
        for state in self.optimizer.state.values():
            # Counts of one element stay where AdamW wants them.
            yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim())
