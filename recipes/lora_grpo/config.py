"""The presets of GRPO with an adapter: a GRPO run whose `adapter` is set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from lora.config import AdapterConfig as ServedAdapters
from recipes.arithmetic import SumsConfig
from recipes.grpo.config import AdapterConfig, GrpoConfig, RandomModel, RolloutConfig, WarmupConfig
from recipes.grpo.config import smollm2 as whole_smollm2
from trainer_bridge.config import LossConfig, OptimConfig


def tiny() -> GrpoConfig:
    """A minute on two cores: a base of 100,000 weights that knows small sums and is careless with them, taught
    care by an adapter of rank 8. Rates are those of adapters, several times a whole model's."""
    return GrpoConfig(
        output=Path("outputs/lora_tiny"),
        trainer_threads=1,
        steps=16,
        task=SumsConfig(largest=6, held_out=64),
        model=RandomModel(hidden_size=64, intermediate_size=192, initializer_range=0.1),
        adapter=AdapterConfig(rank=8, alpha=16),
        warmup=WarmupConfig(
            steps=120,
            batch=32,
            optim=OptimConfig(learning_rate=4e-3, warmup_steps=20, decay_steps=120, betas=(0.9, 0.98)),
        ),
        rollout=RolloutConfig(
            groups=16,
            release=("kv",),
            where="colocated",
            engine=EngineConfig(
                num_threads=1,
                cache=CacheConfig(page_size=4, kv_tokens=16384),
                scheduler=SchedulerConfig(max_running=128, prefill_tokens=1024),
                adapters=ServedAdapters(device_mib=16, host_mib=64),
            ),
        ),
        loss=LossConfig(kind="dr_grpo"),
        optim=OptimConfig(learning_rate=2e-2, warmup_steps=2, eps=1e-2, decay_steps=16),
    )


def smollm2() -> GrpoConfig:
    """The real model of `recipes.grpo`, taught the same by an adapter of rank 16 on all linear layers, at ten
    times the rate."""
    whole = whole_smollm2()
    return replace(
        whole,
        output=Path("outputs/lora_smollm2"),
        adapter=AdapterConfig(rank=16, alpha=32),
        rollout=replace(whole.rollout, release=("kv",), offload_trainer=False),
        optim=replace(whole.optim, learning_rate=3e-4),
    )


PRESETS = {"tiny": tiny, "smollm2": smollm2}
