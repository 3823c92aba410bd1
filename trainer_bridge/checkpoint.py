"""Checkpoints that a run can be resumed from.

Owns the layout of a checkpoint folder: `policy/` (a Hugging Face folder with its tokenizer, or an
adapter that peft saved), `trainer.pt` (optimiser, schedule, random state; tensors and plain values only) and `run.json`
(whatever the recipe needs to go on). A checkpoint appears whole or not at all. Ignores when to
save.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.errors import InvalidRequest
from trainer_bridge.trainer import PolicyTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_NAME = re.compile(r"step-(\d{6})$")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    run: dict[str, Any]

    @property
    def policy(self) -> Path:
        return self.folder / "policy"

    def restore(self, trainer: PolicyTrainer) -> None:
        """Brings optimiser, schedule, counters and random state back; the model is loaded by `load_policy`."""
        state = torch.load(self.folder / "trainer.pt", map_location="cpu", weights_only=True)
        trainer.load_state_dict(state)


def save_policy(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """A Hugging Face folder with weights, configuration and tokenizer, put in place whole."""
    partial = partial_folder(folder)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    put_in_place(partial, folder)


def load_policy(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM  # takes long, and settings are read without it

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)


def save_checkpoint(
    root: Path,
    step: int,
    trainer: PolicyTrainer,
    save: Callable[[Path], None],
    run: dict[str, Any],
    keep: int = 2,
) -> Path:
    """Saves step `step` under `root` and removes all but the newest `keep` checkpoints. `save` writes the
    policy into a folder."""
    folder = root / f"step-{step:06d}"
    partial = partial_folder(folder)
    save(partial / "policy")
    torch.save(trainer.state_dict(), partial / "trainer.pt")
    (partial / "run.json").write_text(json.dumps(run, indent=1))
    put_in_place(partial, folder)
    for _, old in sorted(numbered(root))[:-keep]:
        shutil.rmtree(old)
    return folder


def latest_checkpoint(root: Path) -> Checkpoint:
    """The newest checkpoint under `root`; raises `InvalidRequest` where there is none."""
    found = sorted(numbered(root))
    if not found:
        raise InvalidRequest(field="resume", expected="a folder with a checkpoint", actual=root)
    folder = found[-1][1]
    return Checkpoint(folder, json.loads((folder / "run.json").read_text()))


def numbered(root: Path) -> list[tuple[int, Path]]:
    """Checkpoints under `root` by their step."""
    if not root.is_dir():
        return []
    matches = [(match, path) for path in root.iterdir() if (match := _NAME.match(path.name))]
    return [(int(match.group(1)), path) for match, path in matches]


def partial_folder(folder: Path) -> Path:
    """A fresh place beside `folder` to build it in."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def put_in_place(partial: Path, folder: Path) -> None:
    """`partial` becomes `folder`, which exists whole or not at all."""
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(partial, folder)
