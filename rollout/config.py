"""What a service is made of: the model, its engines, and where they listen.

Owns the settings of the fleet and the tree that `sparkroll serve` reads. Settings of engines
and of the server live with their owners.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import InvalidRequest
from rollout.model_catalog import CatalogConfig
from rollout.server_config import ServerConfig


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """`ray_address` None uses the Ray session of this process, or starts one on this machine.

    `gpus_per_engine` "auto" is 1 where the engines run on GPUs. `delta_interval_ms` is how often
    running samples report tokens: a lost engine costs at most what it decoded since.
    An engine that fails to come up `max_failed_starts` times in a row is given up.
    An engine is replaced that three times in a row does not answer within `health_timeout_s`, or
    whose loop has stood still for `stuck_s`. `replacement_s` is how long a group waits when no
    engine can take it. `spool_dir` holds the last committed update for
    engines that are replaced (None: a temporary folder).
    """

    num_engines: int = 1
    ray_address: str | None = None
    cpus_per_engine: float = 0.0
    gpus_per_engine: float | str = "auto"
    delta_interval_ms: float = 30.0
    start_timeout_s: float = 600.0
    max_failed_starts: int = 3
    health_interval_s: float = 1.0
    health_timeout_s: float = 10.0
    stuck_s: float = 120.0
    replacement_s: float = 120.0
    spool_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.num_engines < 1:
            raise InvalidRequest(field="fleet.num_engines", expected="1 or more", actual=self.num_engines)
        if isinstance(self.gpus_per_engine, str) and self.gpus_per_engine != "auto":
            raise InvalidRequest(
                field="fleet.gpus_per_engine", expected="a number or auto", actual=self.gpus_per_engine
            )


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """`model` is a preset's name or a Hugging Face folder. `update_root` is the only folder that
    disk updates may name (None: none are taken). `adapters` are LoRA policies to serve from the start: folders
    that peft saved, by name."""

    model: str = "smollm2-135m"
    update_root: Path | None = None
    adapters: dict[str, str] = field(default_factory=dict)
    engine: EngineConfig = EngineConfig()
    fleet: FleetConfig = FleetConfig()
    server: ServerConfig = ServerConfig()
    catalog: CatalogConfig = CatalogConfig()

    def __post_init__(self) -> None:
        for name, folder in self.adapters.items():
            if not name or not isinstance(folder, str) or not folder:
                raise InvalidRequest(field=f"adapters.{name}", expected="a name and a folder", actual=folder)
