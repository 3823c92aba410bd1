"""Targets, drafters and examples small enough to train in a test. Nothing here imports transformers: the
ranks of a data-parallel run start with this module."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from engine.build import Parts, load_parts
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.dspark.block_model import BlockDrafterModel, SharedEnds
from engine.dspark.block_spec import drafter_spec_from_config
from engine.models.spec import read_spec
from trainer_bridge.drafter.config import DrafterShape, DraftLossConfig, DraftOptimConfig
from trainer_bridge.drafter.ends import training_ends
from trainer_bridge.drafter.examples import DraftExample
from trainer_bridge.drafter.features import FeatureExample, FeatureScorer
from trainer_bridge.drafter.initial import drafter_config, initialise
from trainer_bridge.drafter.trainer import DrafterTrainer

VOCAB = 512
MASK = VOCAB - 1
SHAPE = DrafterShape(layers=1, block=4, target_layers=(0,), intermediate=64, markov_rank=8)


def parts_of(folder: Path, prefill_tokens: int = 64) -> Parts:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        cache=CacheConfig(page_size=4, kv_tokens=4096),
        scheduler=SchedulerConfig(max_running=16, prefill_tokens=prefill_tokens),
    )
    return load_parts(folder, config)


def example(key: str, prompt: int, answer: int, seed: int = 0, domain: str = "d") -> DraftExample:
    rng = np.random.default_rng([seed, len(key), *key.encode()])
    ids = rng.integers(0, VOCAB - 2, prompt + answer).astype(np.uint32)
    return DraftExample(key, domain, ids, np.arange(prompt + answer) >= prompt)


def new_drafter(folder: Path, parts: Parts, seed: int = 0, shape: DrafterShape = SHAPE) -> BlockDrafterModel:
    config = drafter_config(shape, folder, read_spec(folder), MASK)
    model = BlockDrafterModel(drafter_spec_from_config(config), torch.float32)
    initialise(model, parts.model, seed)
    return model


def make_trainer(
    model: BlockDrafterModel, ends: SharedEnds, loss: DraftLossConfig | None = None, seed: int = 0, **optim
) -> DrafterTrainer:
    settings = {"steps": 20, "learning_rate": 1e-3, "warmup": 0.1, "anchors": 6} | optim
    return DrafterTrainer(model, ends, loss or DraftLossConfig(), DraftOptimConfig(**settings), seed)


class World:
    """A target folder with everything around it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts = parts_of(folder)
        self.ends = training_ends(self.parts.model)
        self.scorer = FeatureScorer(self.parts, SHAPE.target_layers)

    def items(self, count: int = 4, answer: int = 9) -> list[FeatureExample]:
        return self.scorer.score([example(f"e{i}", 3 + i, answer + i) for i in range(count)])

    def drafter(self, seed: int = 0, shape: DrafterShape = SHAPE) -> BlockDrafterModel:
        return new_drafter(self.folder, self.parts, seed, shape)

    def trainer(self, loss: DraftLossConfig | None = None, seed: int = 0, **optim) -> DrafterTrainer:
        return make_trainer(self.drafter(), self.ends, loss, seed, **optim)
