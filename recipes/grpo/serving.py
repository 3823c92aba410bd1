"""The rollout service of a run: a fleet on Ray behind an HTTP server, in a thread of its own.

Owns starting and stopping it around the run. Ignores what it is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recipes.grpo.config import RolloutConfig
from rollout.client import Client
from rollout.config import FleetConfig, ServeConfig
from rollout.server import ServerConfig
from rollout.serving import start_service


@contextmanager
def serving(folder: Path, config: RolloutConfig) -> Iterator[Client]:
    """A client of engines that serve the policy in `folder`, which must stay as it is: an engine
    that is replaced starts from it."""
    settings = ServeConfig(
        model=str(folder.resolve()),
        engine=config.engine,
        fleet=FleetConfig(num_engines=config.engines),
        server=ServerConfig(port=0),
    )
    with (
        start_service(settings, start_timeout_s=config.start_timeout_s) as service,
        Client(service.url, timeout_s=config.timeout_s) as client,
    ):
        yield client
