"""A router over arithmetic engines."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rollout.router import Router
from rollout.routing.adapter_store import AdapterStore
from rollout.routing.adapters import FleetAdapters
from rollout.routing.recipe import PolicyRecipe
from rollout.routing.replica import Membership, Replica
from tests.unit.rollout.counting_service import CountingService


def make_fleet(count: int, version: int = 0, **options) -> tuple[list[CountingService], Router, Membership]:
    membership = Membership(policy_version=version)
    services = [CountingService(f"e{i}", version) for i in range(count)]
    for i, service in enumerate(services):
        membership.admit(Replica(engine_id=f"e{i}", incarnation=1, service=service, policy_version=version))
    spool = Path(tempfile.mkdtemp(prefix="sparkroll-test-"))
    adapters = FleetAdapters(membership, AdapterStore(spool / "adapters"))
    return services, Router(membership, PolicyRecipe(spool / "policy"), adapters, **options), membership
