"""The run: warm the base up, then rounds in which all members learn at once, then forks.

Owns the order of rounds and who is forked. Every part is somewhere else: a member's step in `member`, fair
turns in `turns`, engines in `serving`.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch
from peft import get_peft_model
from torch import nn

from recipes.arithmetic import SumQuestion, SumsConfig, make_sums
from recipes.digit_pairs import make_digit_pairs
from recipes.grpo.loop import INITIAL, interruptible, threads
from recipes.grpo.policy import Policy, make_policy
from recipes.grpo.progress import Display, summary_table
from recipes.grpo.student import lora_config
from recipes.grpo.warmup import warm_up
from recipes.population.config import PopulationConfig
from recipes.population.member import Member, Shared
from recipes.population.serving import shared_serving
from recipes.population.turns import Turns
from recipes.tasks import Question, Questions
from trainer_bridge.checkpoint import save_policy


def run(config: PopulationConfig, *, display: Display | None = None) -> dict[str, Any]:
    """Runs `config`; returns the results that the last line of output shows."""
    with display or Display() as shown, threads(config.trainer_threads):
        return _Population(config, shown).run()


class _Population:
    def __init__(self, config: PopulationConfig, display: Display) -> None:
        self.config = config
        self.display = display
        device = "cuda" if config.device == "auto" and torch.cuda.is_available() else "cpu"
        self.device = torch.device(device if config.device == "auto" else config.device)
        self.group = uuid.uuid4().hex[:8]
        self.rewards: dict[str, list[float]] = {member.name: [] for member in config.members}
        self.forks: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        config, began = self.config, time.monotonic()
        questions: Questions[Question] = (
            make_sums(config.task, config.seed)
            if isinstance(config.task, SumsConfig)
            else make_digit_pairs(config.task, config.seed)
        )
        policy = make_policy(config.model, config.seed)
        nn.Module.to(policy.model, self.device)
        self._warm_up(policy, questions)
        save_policy(config.output / INITIAL, policy.model, policy.tokenizer)
        torch.manual_seed(config.seed)
        names = [member.name for member in config.members]
        model = get_peft_model(policy.model, lora_config(config.adapter), adapter_name=names[0])  # type: ignore[arg-type]
        for name in names[1:]:
            model.add_adapter(name, lora_config(config.adapter))
        with (
            shared_serving(config.output / INITIAL, config.rollout, self.device, self.display.say) as served,
            interruptible() as interrupted,
        ):
            shared = Shared(config, policy, model, served, questions, self.group, self.display)
            members: list[Member] = []
            try:
                members += (Member(place, settings, shared) for place, settings in enumerate(config.members))
                widest = self._rounds(members, questions, interrupted)
                folders = {member.name: member.save() for member in members}
            finally:
                for member in members:
                    member.tracker.close()
        return self._results(members, folders, widest, time.monotonic() - began)

    def _rounds(self, members: list[Member], questions: Questions[Question], interrupted: list[int]) -> int:
        """All rounds; returns the widest lead of one member over another, in steps."""
        widest = 0
        self._compare(members, questions)
        for number in range(1, self.config.rounds + 1):
            turns = Turns([member.name for member in members], self.config.max_lead)
            self._together(members, lambda member, turns=turns: self._steps(member, turns, interrupted))
            widest = max(widest, turns.widest)
            self._compare(members, questions)
            if interrupted or number == self.config.rounds:
                break
            self._fork(members, number)
        return widest

    def _steps(self, member: Member, turns: Turns, interrupted: list[int]) -> None:
        try:
            for _ in range(self.config.steps):
                turns.begin(member.name)
                if interrupted:
                    break
                member.train_step()
                turns.end(member.name)
        finally:
            turns.leave(member.name)

    def _compare(self, members: list[Member], questions: Questions[Question]) -> None:
        found = self._together(members, lambda member: member.evaluate(questions.held_out))
        for member, reward in zip(members, found, strict=True):
            self.rewards[member.name].append(reward)
        shown = "  ".join(f"{member.name} {self.rewards[member.name][-1]:.3f}" for member in members)
        self.display.say(f"held-out reward at step {members[0].step}: {shown}")

    def _fork(self, members: list[Member], number: int) -> None:
        """The worst become the best, at other rates; equals stay as they are."""
        ranked = sorted(members, key=lambda member: self.rewards[member.name][-1], reverse=True)
        best = ranked[0]
        chance = random.Random(f"{self.config.seed}/fork-{number}")
        for member in ranked[len(ranked) - self.config.forks :]:
            if self.rewards[member.name][-1] >= self.rewards[best.name][-1]:
                continue
            member.become(best, chance.choice(self.config.perturb))
            entry = {"round": number, "from": best.name, "to": member.name, "learning_rate": member.learning_rate}
            self.forks.append(entry)
            self.display.say(f"{member.name} becomes {best.name}, at a rate of {member.learning_rate:.1e}")

    def _together(self, members: list[Member], work: Any) -> list[Any]:
        """`work` of all members at once; the first failure is raised when all have ended."""
        with ThreadPoolExecutor(len(members)) as pool:
            return [future.result() for future in [pool.submit(work, member) for member in members]]

    def _warm_up(self, policy: Policy, questions: Questions[Question]) -> None:
        config = self.config
        if config.warmup.steps and isinstance(config.task, SumsConfig):
            bar = self.display.phase("warm-up", config.warmup.steps)
            training = cast("Sequence[SumQuestion]", questions.training)
            warm_up(
                policy,
                training,
                config.task,
                config.warmup,
                config.seed,
                lambda step, loss: bar.advance(step + 1, f"loss {loss:.3f}"),
            )

    def _results(self, members: list[Member], folders: dict[str, str], widest: int, seconds: float) -> dict[str, Any]:
        tokens = sum(member.tokens for member in members)
        best = max(members, key=lambda member: self.rewards[member.name][-1])
        results: dict[str, Any] = {
            "best": best.name,
            "reward_before": round(self.rewards[best.name][0], 4),
            "reward_after": round(self.rewards[best.name][-1], 4),
            "rewards": {name: [round(value, 4) for value in values] for name, values in self.rewards.items()},
            "forks": self.forks,
            "steps": {member.name: member.step for member in members},
            "widest_lead": widest,
            "token_shares": {member.name: round(member.tokens / max(1, tokens), 4) for member in members},
            "versions": {member.name: member.version for member in members},
            "metrics_lost": sum(member.tracker.lost for member in members),
            "group": self.group,
            "policies": folders,
            "seconds": round(seconds, 1),
        }
        self.display.console.print(summary_table(results))
        return results
