"""A fleet is at one policy version, whatever fails on the way to the next."""

from __future__ import annotations

import asyncio
import time

import msgspec
import numpy as np
import pytest

from engine.errors import Conflict, Corrupt, InvalidRequest, NotFound, Unsupported
from engine.types import GroupRequest, NamedTensor, SamplingParams, TensorSpec, UpdateBegin
from rollout.protocol import GenerateCall, SampleEnd
from rollout.routing.recipe import PolicyRecipe
from tests.unit.rollout.router_fixture import make_fleet

DATA = np.arange(8, dtype=np.uint8)
SPEC = TensorSpec(name="w", dtype="F32", shape=[2])
TENSOR = NamedTensor(name="w", dtype="F32", shape=[2], data=DATA)


def begin(new: int = 1, base: int = 0, txn: str = "t", **fields) -> UpdateBegin:
    return UpdateBegin(txn=txn, base_version=base, new_version=new, manifest=[SPEC], **fields)


async def update(router, new: int, base: int) -> None:
    await router.update_begin(begin(new, base, f"t{new}"))
    await router.update_tensors(f"t{new}", [TENSOR])
    await router.update_commit(f"t{new}")


async def served_versions(router, count: int) -> list[int]:
    async def one(i: int) -> list[int]:
        request = GroupRequest(
            group_id=f"g{i}", prompt_ids=np.arange(i + 1, dtype=np.uint32), sampling=SamplingParams(seed=i)
        )
        events = [event async for event in router.generate(GenerateCall(op_id=f"g{i}", request=request))]
        return [span.policy_version for event in events if isinstance(event, SampleEnd) for span in event.sample.spans]

    return [version for versions in await asyncio.gather(*map(one, range(count))) for version in versions]


def test_case_i5_an_engine_that_fails_the_commit_is_fenced_and_never_served() -> None:
    async def run() -> None:
        services, router, membership = make_fleet(3)
        out = []
        membership.on_out = lambda replica, reason: out.append(replica.engine_id)
        services[1].refuse_commit = Corrupt("copy failed")
        await router.update_begin(begin())
        await router.update_tensors("t", [TENSOR])
        report = await router.update_commit("t")
        assert report.engines == {"e0": 1, "e2": 1} and report.fenced == ["e1"] and out == ["e1"]
        assert report.policy_version == 1 == membership.policy_version
        assert (await router.version()).engines == {"e0": 1, "e2": 1}
        calls = len(services[1].calls)
        assert set(await served_versions(router, 30)) == {1} and len(services[1].calls) == calls

    asyncio.run(run())


def test_case_i5_a_commit_that_nobody_made_leaves_all_on_the_old_version() -> None:
    async def run() -> None:
        services, router, membership = make_fleet(3)
        for service in services:
            service.refuse_commit = InvalidRequest(field="manifest", expected="all tensors", actual=0)
        await router.update_begin(begin())
        with pytest.raises(InvalidRequest):
            await router.update_commit("t")
        assert len(membership.routable()) == 3 and set(await served_versions(router, 10)) == {0}
        for service in services:
            service.refuse_commit = None
        await update(router, 1, 0)
        assert set(await served_versions(router, 10)) == {1}

    asyncio.run(run())


def test_a_failed_staging_rolls_everyone_back_and_the_next_update_works() -> None:
    async def run() -> None:
        services, router, membership = make_fleet(3)
        services[2].refuse_stage = InvalidRequest(field="w", expected="[2]", actual="[3]")
        await router.update_begin(begin())
        with pytest.raises(InvalidRequest, match="w"):
            await router.update_tensors("t", [TENSOR])
        assert all(service.open is None for service in services) and len(membership.routable()) == 3
        with pytest.raises(NotFound):
            await router.update_commit("t")
        services[2].refuse_stage = None
        await update(router, 1, 0)
        assert [service.policy_version for service in services] == [1, 1, 1]

    asyncio.run(run())


def test_engines_that_disagree_about_the_bytes_are_fenced() -> None:
    async def run() -> None:
        services, router, _ = make_fleet(2)
        commit = services[1].update_commit

        async def other(txn):
            return msgspec.structs.replace(await commit(txn), digest="different")

        services[1].update_commit = other
        await router.update_begin(begin())
        assert (await router.update_commit("t")).fenced == ["e1"]

    asyncio.run(run())


def test_case_i4_versions_never_go_backwards_and_refusals_are_counted() -> None:
    async def run() -> None:
        services, router, _ = make_fleet(2, version=57)
        for new, base in ((1, 0), (57, 57), (56, 57), (58, 56)):
            with pytest.raises(Conflict):
                await router.update_begin(begin(new, base))
        assert "sparkroll_router_updates_refused_total 4.0" in await router.metrics()
        await update(router, 58, 57)
        assert [service.policy_version for service in services] == [58, 58]

    asyncio.run(run())


def test_case_b2_a_silent_transaction_gives_way_and_the_old_policy_stays() -> None:
    async def run() -> None:
        services, router, _ = make_fleet(2)
        await router.update_begin(begin(txn="silent", timeout_s=0.05))
        with pytest.raises(Conflict, match="silent"):
            await router.update_begin(begin())
        assert (await router.health()).pending_update == "silent"
        time.sleep(0.06)
        assert (await router.health()).pending_update is None
        assert set(await served_versions(router, 4)) == {0}
        await update(router, 1, 0)
        assert [service.policy_version for service in services] == [1, 1]

    asyncio.run(run())


def test_an_engine_lost_while_staging_does_not_stop_the_others() -> None:
    async def run() -> None:
        services, router, membership = make_fleet(3)
        await router.update_begin(begin())
        services[0].kill()
        await router.update_tensors("t", [TENSOR])
        report = await router.update_commit("t")
        assert report.engines == {"e1": 1, "e2": 1} and membership.policy_version == 1
        assert set(await served_versions(router, 6)) == {1}

    asyncio.run(run())


def test_resume_waits_for_the_open_update_and_other_modules_are_refused() -> None:
    async def run() -> None:
        _, router, _ = make_fleet(2)
        with pytest.raises(Unsupported, match="module"):
            await router.update_begin(begin(module="drafter"))
        await router.update_begin(begin())
        with pytest.raises(Conflict, match="update"):
            await router.resume(None)
        await router.update_rollback("t")
        await router.resume(None)

    asyncio.run(run())


def test_the_recipe_replays_the_newest_committed_update_and_nothing_else(tmp_path) -> None:
    recipe = PolicyRecipe(tmp_path / "spool")
    rng = np.random.default_rng(0)

    def tensors() -> list[NamedTensor]:
        return [
            NamedTensor(name=f"t{i}", dtype="BF16", shape=[i + 1], data=rng.integers(0, 256, 2 * i + 2, dtype=np.uint8))
            for i in range(5)
        ]

    old, new, dropped = tensors(), tensors(), tensors()
    for batch in (old, new):
        recipe.begin()
        recipe.add_tensors(batch[:2])
        recipe.add_tensors(batch[2:])
        recipe.commit()
    recipe.begin()
    recipe.add_tensors(dropped)
    recipe.rollback()
    assert not recipe.empty and len(list((tmp_path / "spool").iterdir())) == 2, "superseded files are gone"
    with recipe.reading() as committed:
        recipe.begin()
        recipe.add_tensors(tensors())
        recipe.commit()
        assert [(spec.name, spec.dtype, spec.shape) for spec in committed.manifest()] == [
            (tensor.name, tensor.dtype, tensor.shape) for tensor in new
        ]
        buckets = list(committed.buckets(limit=8))
    assert len(list((tmp_path / "spool").iterdir())) == 1, "a reader's files go when it is through"
    assert max(sum(tensor.data.nbytes for tensor in bucket) for bucket in buckets) <= 10 and len(buckets) > 1
    replayed = [tensor for bucket in buckets for tensor in bucket]
    assert all(np.array_equal(a.data, b.data) for a, b in zip(replayed, new, strict=True))


def test_the_recipe_keeps_a_folder_that_is_removed_later(tmp_path) -> None:
    import torch
    from safetensors.torch import save_file

    folder = tmp_path / "checkpoint"
    folder.mkdir()
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    save_file(weights, folder / "model.safetensors")
    recipe = PolicyRecipe(tmp_path / "spool")
    recipe.begin()
    recipe.add_folder(folder)
    recipe.commit()
    (folder / "model.safetensors").unlink()
    with recipe.reading() as committed:
        replayed = {tensor.name: tensor for bucket in committed.buckets() for tensor in bucket}
    assert replayed["a"].data.tobytes() == weights["a"].numpy().tobytes() and replayed["b"].dtype == "BF16"
