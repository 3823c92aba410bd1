"""Waiting for a change of the fleet, and being called off meanwhile."""

import asyncio

import pytest

from rollout.routing.replica import Membership


def test_a_cancellation_survives_a_change_in_the_same_moment() -> None:
    async def run() -> None:
        membership = Membership()
        waiting = asyncio.create_task(membership.changed(10))
        await asyncio.sleep(0)
        membership.notify()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(run())


def test_waiting_says_whether_anything_changed() -> None:
    async def run() -> None:
        membership = Membership()
        waiting = asyncio.create_task(membership.changed(10))
        await asyncio.sleep(0)
        membership.notify()
        assert await waiting
        assert not await membership.changed(0.01)

    asyncio.run(run())
