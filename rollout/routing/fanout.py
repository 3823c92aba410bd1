"""One call to many engines, and what became of each.

Owns the gathering. An engine that is lost on the way is taken out of the fleet and left out of
the answer; it comes back, if at all, as a new incarnation that catches up first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from engine.errors import SparkrollError
from rollout.routing.errors import EngineLost
from rollout.routing.replica import Membership, Replica
from rollout.service import EngineService

R = TypeVar("R")


async def outcomes(
    membership: Membership, replicas: Sequence[Replica], call: Callable[[EngineService], Awaitable[R]]
) -> dict[Replica, R | SparkrollError]:
    """Call all of them at once; a value or a typed error for each that is still there.

    Raises `EngineLost` when none is left."""

    async def one(replica: Replica) -> R | SparkrollError:
        try:
            return await call(replica.service)
        except EngineLost as error:
            membership.take_out(replica, error)
            return error
        except SparkrollError as error:
            return error

    results = dict(zip(replicas, await asyncio.gather(*(one(replica) for replica in replicas)), strict=True))
    kept = {replica: result for replica, result in results.items() if not isinstance(result, EngineLost)}
    if not kept:
        raise EngineLost("no engine of the fleet answers", retry_after_ms=1000)
    return kept


async def everyone(
    membership: Membership, replicas: Sequence[Replica], call: Callable[[EngineService], Awaitable[R]]
) -> dict[Replica, R]:
    """Like `outcomes`, but the first refusal is raised, after all have answered."""
    results = await outcomes(membership, replicas, call)
    values: dict[Replica, R] = {}
    for replica, result in results.items():
        if isinstance(result, SparkrollError):
            raise result
        values[replica] = result
    return values
