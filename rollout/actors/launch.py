"""Starting engine actors on Ray.

Owns the Ray session, names and placement. Names are unique to a fleet and an incarnation, and
live in a namespace of the fleet, so that fleets and jobs never meet; no actor is detached, so
none outlives its owner. Engines on GPUs get one bundle each. Ignores what actors do.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import uuid
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.config import EngineConfig
from engine.errors import Overloaded
from rollout.actors.engine_actor import EngineActor, EngineActorConfig
from rollout.config import ServeConfig

_MAX_CALLS = 10_000
"""Calls an actor holds at once; an admission waits for a step, so thousands can be waiting."""


def ensure_ray(address: str | None) -> bool:
    """Join or start a Ray session. True when it was started here and is to be shut down here."""
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray gives its head 30 seconds, which one on a busy machine exceeds.
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")
    try:
        ray.init(address=address or "local", include_dashboard=False, logging_level=logging.ERROR, log_to_driver=True)
    except Exception as error:  # Ray says most of what can go wrong here in plain exceptions
        where = f"the cluster at {address}" if address else "a Ray session on this machine, which may be busy"
        raise Overloaded(f"Ray did not start: {where}; {error}") from error
    return True


class Launcher:
    """Makes the actors of one fleet."""

    def __init__(self, config: ServeConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self.fleet_id = uuid.uuid4().hex[:12]
        self._gpus = self._gpus_per_engine()
        self._group = self._reserve() if self._gpus else None

    @property
    def namespace(self) -> str:
        return f"sparkroll-{self.fleet_id}"

    def engine_id(self, index: int) -> str:
        return f"engine-{index}"

    def create(self, index: int, incarnation: int) -> Any:
        """A new actor's handle; it has not loaded its model yet."""
        config = self._config
        actor = EngineActorConfig(
            engine_id=self.engine_id(index),
            incarnation=incarnation,
            folder=self._folder.resolve(),
            engine=self._engine_config(),
            delta_interval_s=config.fleet.delta_interval_ms / 1e3,
            update_root=None if config.update_root is None else config.update_root.resolve(),
        )
        options: dict[str, Any] = {
            "name": f"{self.engine_id(index)}.{incarnation}",
            "namespace": self.namespace,
            "num_cpus": config.fleet.cpus_per_engine,
            "max_concurrency": _MAX_CALLS,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        if self._group is not None:
            options["num_gpus"] = self._gpus
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group, index)
        return ray.remote(EngineActor).options(**options).remote(actor)

    def close(self) -> None:
        if self._group is not None:
            remove_placement_group(self._group)

    def _engine_config(self) -> EngineConfig:
        """Engines that share a machine's cores share them out, unless told otherwise."""
        engine = self._config.engine
        if engine.num_threads is None and not self._gpus:
            threads = max(1, (os.cpu_count() or 1) // self._config.fleet.num_engines)
            engine = dataclasses.replace(engine, num_threads=threads)
        return engine

    def _gpus_per_engine(self) -> float:
        wanted = self._config.fleet.gpus_per_engine
        if not isinstance(wanted, str):
            return wanted
        device = self._config.engine.device
        on_gpu = device.startswith("cuda") or (device == "auto" and _cluster_gpus() > 0)
        return 1.0 if on_gpu else 0.0

    def _reserve(self) -> PlacementGroup:
        fleet = self._config.fleet
        if _cluster_gpus() < self._gpus * fleet.num_engines:
            raise Overloaded(
                field="fleet.num_engines", expected=f"{self._gpus * fleet.num_engines} GPUs", actual=_cluster_gpus()
            )
        bundle = {"GPU": self._gpus, "CPU": fleet.cpus_per_engine}
        group = placement_group([{k: v for k, v in bundle.items() if v}] * fleet.num_engines, strategy="SPREAD")
        ray.get(group.ready(), timeout=fleet.start_timeout_s)
        return group


def _cluster_gpus() -> float:
    return ray.cluster_resources().get("GPU", 0.0)
