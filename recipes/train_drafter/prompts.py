"""What the target is asked, for training and for evaluation.

Owns the split: conversations that are held out are never answered for training, whatever is asked for
later. Ignores answers.
"""

from __future__ import annotations

from pathlib import Path

from engine.errors import InvalidRequest
from recipes.arithmetic import SumsConfig, make_sums
from recipes.conversations import read_conversations
from recipes.prompt_sets import SETS, prompt_set
from recipes.train_drafter.config import PromptConfig
from trainer_bridge.drafter.responses import Dialogue
from trainer_bridge.environment import Message


def make_prompts(prompts: PromptConfig, task: SumsConfig | None, seed: int) -> tuple[list[Dialogue], list[Dialogue]]:
    """(training, held out): of each source the first `held_out` conversations are held out, so that asking for
    more training ones moves none across. Training ones of several sources alternate. `task` is what "sums"
    asks."""
    training, held_out = [], []
    for source in prompts.sources:
        found = _read(source, prompts, task, seed)
        if len(found) <= prompts.held_out:
            raise InvalidRequest(
                field=f"prompts.sources {source}",
                expected=f"more than the {prompts.held_out} held out",
                actual=len(found),
            )
        held_out += found[: prompts.held_out]
        training.append(found[prompts.held_out :])
    turns = max(map(len, training))
    mixed = [own[turn] for turn in range(turns) for own in training if turn < len(own)]
    keys = [dialogue.key for dialogue in (*mixed, *held_out)]
    if len(set(keys)) != len(keys):
        raise InvalidRequest(field="prompts.sources", expected="different conversations", actual=prompts.sources)
    return mixed, held_out


def _read(source: str, prompts: PromptConfig, task: SumsConfig | None, seed: int) -> list[Dialogue]:
    count = prompts.training + prompts.held_out
    if source == "sums":
        if task is None:
            raise InvalidRequest(field="prompts.sources", expected="sums only of a target taught them", actual=source)
        questions = make_sums(task, seed)
        texts = [question.text for question in (*questions.held_out, *questions.training)]
        return [Dialogue(f"sums-{text}", "sums", (Message("user", text),)) for text in texts[:count]]
    if source in SETS:
        return prompt_set(source, count, seed)
    if not Path(source).suffix and "/" not in source:
        raise InvalidRequest(field="prompts.sources", expected=f"a file, a/dataset or {sorted(SETS)}", actual=source)
    return read_conversations(source, limit=count)
