"""Where a run's answers come from: engines of a service, or one engine in this process.

Owns starting and stopping them around the run and who has the device when. Ignores what is asked.
Nothing of the service (Ray, HTTP) is imported unless it is chosen.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from engine.dspark.report import DraftReport
from engine.types import GroupOutput, GroupRequest
from recipes.grpo.config import RolloutConfig
from rollout.drafter_catalog import with_drafter
from trainer_bridge.control import AdapterControl, UpdateControl
from trainer_bridge.transports.base import Transport
from trainer_bridge.transports.body import BodyTransport
from trainer_bridge.transports.in_process import InProcessControl, InProcessTransport

if TYPE_CHECKING:
    from engine import Engine
    from engine.build import Parts
    from rollout.client import Client

CONCURRENT_GROUPS = 64


class Serving(Protocol):
    """Answers and updates. A step calls, in this order: `generate` as often as it likes,
    `release` before the trainer computes, `take_weights` before an update is published, and
    `resume` after it."""

    @property
    def control(self) -> UpdateControl: ...

    @property
    def transport(self) -> Transport: ...

    @property
    def adapters(self) -> AdapterControl: ...

    def generate(self, requests: list[GroupRequest]) -> list[GroupOutput]: ...

    def draft_report(self) -> DraftReport:
        """Sums over speculation; empty where nothing drafts."""
        ...

    def release(self) -> Mapping[str, int]:
        """Bytes given up, by tag."""
        ...

    def take_weights(self) -> None: ...

    def resume(self) -> None: ...


class ServiceServing:
    """Engines with devices of their own: they serve on while the trainer works."""

    def __init__(self, client: Client, timeout_s: float, drafts: bool) -> None:
        self._drafts = drafts
        self.control: UpdateControl = client
        self.adapters: AdapterControl = client
        self.transport: Transport = BodyTransport()
        self._client = client
        self._timeout_s = timeout_s

    def generate(self, requests: list[GroupRequest]) -> list[GroupOutput]:
        def ask(request: GroupRequest) -> GroupOutput:
            return self._client.generate(
                request.prompt_ids,
                n=request.n,
                sampling=request.sampling,
                group_id=request.group_id,
                adapter=request.adapter,
                min_policy_version=request.min_policy_version,
                timeout_s=self._timeout_s,
            )

        with ThreadPoolExecutor(CONCURRENT_GROUPS) as threads:
            return list(threads.map(ask, requests))

    def draft_report(self) -> DraftReport:
        if not self._drafts:
            return DraftReport()
        from rollout.draft_metrics import read_report

        return read_report(self._client.metrics())

    def release(self) -> Mapping[str, int]:
        return {}

    def take_weights(self) -> None:
        pass

    def resume(self) -> None:
        pass


class ColocatedServing:
    """One engine on the trainer's device. Released weights are not kept: every train_step ends in
    an update that brings all of them. (One that brings an adapter alone releases none.)"""

    def __init__(self, engine: Engine, parts: Parts, release: tuple[str, ...]) -> None:
        self.parts = parts
        self.control = InProcessControl(engine)
        self.adapters: AdapterControl = self.control
        self.transport: Transport = InProcessTransport()
        self.engine = engine
        self._tags = list(release)

    def generate(self, requests: list[GroupRequest]) -> list[GroupOutput]:
        return self.engine.generate(requests)

    def draft_report(self) -> DraftReport:
        return self.engine.draft_report()

    def release(self) -> Mapping[str, int]:
        if not self._tags:
            return {}
        before, after = self.engine.release_memory(self._tags, level="discard")
        return {tag: before[tag] - after[tag] for tag in self._tags}

    def take_weights(self) -> None:
        if "weights" in self._tags:
            self.engine.resume_memory(["weights"])

    def resume(self) -> None:
        if self._tags:
            self.engine.resume_memory(self._tags)


@contextmanager
def settled() -> Iterator[None]:
    """What is there now is looked through for garbage no more: that stops a rollout for tenths of a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def serving(folder: Path, config: RolloutConfig, device: torch.device, say: Callable[[str], None]) -> Iterator[Serving]:
    """Engines that serve the policy in `folder`, which must stay as it is: an engine that is
    replaced starts from it. A colocated one is on the trainer's `device`."""
    if config.where == "colocated":
        from engine.build import load_parts
        from engine.engine import Engine

        engine = with_drafter(config.engine, folder)
        parts = load_parts(folder, replace(engine, device=str(device)))
        served = ColocatedServing(Engine(parts), parts, config.release)
        with settled():
            yield served
        return
    from rollout.client import Client
    from rollout.config import FleetConfig, ServeConfig
    from rollout.server_config import ServerConfig
    from rollout.serving import start_service

    settings = ServeConfig(
        model=str(folder.resolve()),
        engine=config.engine,
        fleet=FleetConfig(num_engines=config.engines),
        server=ServerConfig(port=0),
    )
    with (
        start_service(settings, say, config.start_timeout_s) as service,
        Client(service.url, timeout_s=config.timeout_s) as client,
    ):
        yield ServiceServing(client, config.timeout_s, config.engine.dspark.enabled)
