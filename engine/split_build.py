"""What an engine is built with where ranks divide its layers.

Owns which settings such an engine takes and what its ranks must have in common: sizes of pools, and where the seeds
that nobody chose come from. Ignores how steps are taken (`engine.runner.layer_split`).
"""

from __future__ import annotations

import dataclasses
import random
import secrets
from collections.abc import Callable

import torch

from engine.config import EngineConfig, number
from engine.context_parallel import ContextParallel
from engine.errors import Unsupported
from engine.models.spec import ModelSpec
from engine.sampling.seeds import fresh_seed


def split_config(config: EngineConfig, spec: ModelSpec, ranks: ContextParallel) -> EngineConfig:
    """The configuration of every one of several ranks. What decides by the clock or by itself on a device would have
    them part ways."""
    if ranks.size == 1:
        return config
    if spec.latent is None:
        raise Unsupported(field="ranks", expected="1: this model stores no latents", actual=ranks.size)
    if config.dspark.enabled:
        raise Unsupported(field="dspark", expected="no drafter where ranks divide the layers", actual="a drafter")
    if config.cache.host_mib:
        actual = config.cache.host_mib
        raise Unsupported(field="cache.host_mib", expected="0 where ranks divide the layers", actual=actual)
    if config.loop == "overlapped":
        raise Unsupported(field="loop", expected="'auto' or 'serial' where ranks divide the layers", actual=config.loop)
    return dataclasses.replace(config, loop="serial")


def agreed(config: EngineConfig, ranks: ContextParallel, device: torch.device) -> EngineConfig:
    """A planned configuration with the least that any rank has room for."""
    tokens, rows = number(config.cache.kv_tokens), number(config.scheduler.max_running)
    tokens, rows = (min(ranks.gather_numbers(each, device)) for each in (tokens, rows))
    return dataclasses.replace(
        config,
        cache=dataclasses.replace(config.cache, kv_tokens=tokens),
        scheduler=dataclasses.replace(config.scheduler, max_running=rows),
    )


def seed_source(ranks: ContextParallel, device: torch.device) -> Callable[[], int]:
    """Seeds that nobody has chosen, the same on every rank."""
    if ranks.size == 1:
        return fresh_seed
    stream = random.Random(ranks.gather_numbers(secrets.randbits(62), device)[0])
    return lambda: stream.getrandbits(64)
