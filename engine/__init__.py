"""Generation engine: `from engine import Engine, EngineConfig, GroupRequest`.

Names are imported when first used, so that clients which only need the request types do not
load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import CacheConfig, EngineConfig, SchedulerConfig
    from engine.engine import Engine
    from engine.errors import SparkrollError
    from engine.types import GroupOutput, GroupRequest, SamplingParams, ScoreRequest, Want

_HOMES = {
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "CacheConfig": "engine.config",
    "SchedulerConfig": "engine.config",
    "SparkrollError": "engine.errors",
    "GroupOutput": "engine.types",
    "GroupRequest": "engine.types",
    "SamplingParams": "engine.types",
    "ScoreRequest": "engine.types",
    "Want": "engine.types",
}

__all__ = [
    "CacheConfig",
    "Engine",
    "EngineConfig",
    "GroupOutput",
    "GroupRequest",
    "SamplingParams",
    "SchedulerConfig",
    "ScoreRequest",
    "SparkrollError",
    "Want",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
