"""Adapters on a GPU: kernels against the loop in torch, bits, fences, and an engine against the CPU's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.kernels.adapted_gate import adapted_gate, adapted_gate_reference
from engine.kernels.adapted_rope import Rotation, adapted_rope, adapted_rope_reference
from engine.kernels.adapted_sum import Adapted, adapted_sum, adapted_sum_reference
from engine.kernels.rope_kv_write import QKNorm, QKVShape
from engine.types import AdapterRef, GroupRequest, SamplingParams
from lora.config import AdapterConfig
from lora.device_pool import DevicePool
from lora.geometry import Geometry
from lora.kernel_step import KernelStep, Variant
from lora.kernels.stack import Rooms, stack_factors, stack_factors_reference
from lora.packing import pack
from lora.stack import Stack, StackRoom
from lora.step import LoopStep
from tests.support import make_engine, prompt, save_tiny
from tests.unit.lora.toy_geometry import all_linear, geometry, tensors, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WHERE = geometry()
RANKS = (3, 8, 16, 40, 64)
SLOTS = np.random.default_rng(0).integers(0, len(RANKS) + 1, 100)


def make_pool(dtype: torch.dtype) -> DevicePool:
    """Every rank in a slot of its own; the second has a bias."""
    packed = [
        pack(weights(all_linear(WHERE, rank), WHERE, rank, bias=rank == 8), WHERE, dtype, pinned=True) for rank in RANKS
    ]
    room = sum(p.num_bytes + 512 for p in packed)
    pool = DevicePool(WHERE, dtype, torch.device("cuda"), room, len(RANKS))
    assert sorted(pool.load(p) for p in packed) == list(range(1, len(RANKS) + 1))
    return pool


def inputs(site: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(site)
    return torch.randn(len(SLOTS), WHERE.inputs(site), device="cuda", dtype=dtype)


def add(step, site: int, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(x.shape[0], sum(WHERE.widths(site)), device="cuda", dtype=x.dtype)
    step.add_(site, x, y)
    return y


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("site", [1, 2, 3, 4])
def test_kernels_equal_the_loop(dtype, tolerance, site):
    pool, x = make_pool(dtype), inputs(site, dtype)
    expected = add(LoopStep(pool, SLOTS), site, x)
    torch.testing.assert_close(add(KernelStep(pool, SLOTS), site, x), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("site", [1, 4])
def test_a_row_keeps_its_bits_beside_any_other_ranks(site):
    pool, x = make_pool(torch.bfloat16), inputs(site, torch.bfloat16)
    together = add(KernelStep(pool, SLOTS, True), site, x)
    for row in range(0, len(SLOTS), 5):
        alone = add(KernelStep(pool, SLOTS[row : row + 1], True), site, x[row : row + 1])
        assert torch.equal(alone[0], together[row]), f"row {row} of slot {SLOTS[row]}"


def test_not_a_number_in_one_slot_reaches_no_other_row():
    pool, x = make_pool(torch.bfloat16), inputs(1, torch.bfloat16)
    clean = add(KernelStep(pool, SLOTS), 1, x)
    for factors in pool.factors(3, 1):
        for factor in factors:
            factor.fill_(float("nan"))
    dirty = add(KernelStep(pool, SLOTS), 1, x)
    others = torch.from_numpy(SLOTS != 3).cuda()
    assert torch.equal(dirty[others], clean[others]) and bool(dirty[~others].isnan().all())


def test_first_factors_are_copied_behind_weights():
    """All bits of them, and nothing else, in both dtypes."""
    for dtype in (torch.float32, torch.bfloat16):
        pool = make_pool(dtype)
        wide = {
            site: torch.randn(sum(WHERE.widths(site)) + 256 * len(WHERE.widths(site)), WHERE.inputs(site))
            .cuda()
            .to(dtype)
            for site in (1, 2, 3, 4)
        }
        expected = {site: weight.clone() for site, weight in wide.items()}
        moves = torch.tensor([[2, 1], [0, 4], [3, 5]], dtype=torch.int32, device="cuda")
        stack_factors(pool, Rooms(pool, wide), moves, 64)
        stack_factors_reference(pool, Rooms(pool, expected), moves, 64)
        assert all(torch.equal(wide[site], weight) for site, weight in expected.items())


def test_memory_is_overwritten_only_behind_its_readers():
    """A reader is queued behind slow work, then its slot is freed and filled anew: it still sees its own."""
    first, second = (
        pack(weights(all_linear(WHERE, 16), WHERE, seed), WHERE, torch.float32, pinned=True) for seed in (1, 2)
    )
    pool = DevicePool(WHERE, torch.float32, torch.device("cuda"), first.num_bytes + 256, 1)
    x, slots = inputs(1, torch.float32)[:8], np.ones(8, dtype=np.int64)
    slot = pool.load(first)
    assert slot == 1
    expected = add(KernelStep(pool, slots), 1, x)
    big = torch.randn(4096, 4096, device="cuda")
    step = KernelStep(pool, slots)
    for _ in range(50):
        big = big @ big * 1e-3
    late = add(step, 1, x)
    pool.free(slot)
    assert pool.load(second) == slot
    other = add(KernelStep(pool, slots), 1, x)
    torch.cuda.synchronize()
    assert torch.equal(late, expected)
    assert not torch.equal(other, expected)


def fused_pool() -> tuple[DevicePool, Geometry]:
    """A layer of heads of 64 and a following one, with ranks of all widths that ride along, and a bias."""
    where = geometry(2, hidden=512, heads=512, kv=128, inner=768)
    chosen = [(16, False), (8, True), (64, False), (16, False)]
    packed = [
        pack(weights(all_linear(where, rank), where, seed, bias=bias), where, torch.bfloat16, pinned=True)
        for seed, (rank, bias) in enumerate(chosen)
    ]
    pool = DevicePool(where, torch.bfloat16, torch.device("cuda"), sum(p.num_bytes + 512 for p in packed), len(packed))
    assert sorted(pool.load(p) for p in packed) == [1, 2, 3, 4]
    return pool, where


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, most: float = 1e-2) -> None:
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert float(error) <= most, f"relative error {float(error):.2e}"


@pytest.mark.parametrize("rows", [100, 9], ids=["tiles of many rows", "of few"])
@pytest.mark.parametrize("slots", [(0, 1, 4), (0, 1, 2, 3, 4)], ids=["one rank", "any rank"])
def test_what_lies_between_products_equals_its_references(slots, rows):
    """Sum, gate, and rotation of adapted rows and others, in the order in which a layer has them."""
    torch.manual_seed(0)
    pool, _ = fused_pool()
    step = KernelStep(pool, np.resize(slots, rows))
    assert step.variant.block == (16 if rows > 16 else 4)
    residual, y, weight = noise(rows, 512), noise(rows, 512), noise(512)
    before = Adapted(2, step.shrunk(2, noise(rows, 512)).clone())
    kept, expected_residual = residual.clone(), residual.clone()
    stream = adapted_sum(step, y, before, kept, weight, 3)
    expected = adapted_sum_reference(step, y, before, expected_residual, weight, 3)
    close(kept, expected_residual)
    close(stream.x_TD, expected.x_TD)
    assert stream.adapted is not None and expected.adapted is not None
    gates, gate_up = Adapted(3, stream.adapted.h_PGAR.clone()), noise(rows, 2 * 768)
    norm = stream.squares_TP, 512, 1e-6
    inner, down = adapted_gate(step, gates, gate_up, *norm, next_site=4)
    expected_inner, expected_down = adapted_gate_reference(step, gates, gate_up, *norm, 4)
    close(inner, expected_inner)
    assert down is not None and expected_down is not None
    for actual, wanted in ((gates, expected.adapted), (down, expected_down)):
        for slot, start, count in step.tiles.tiles_N3.tolist():
            rank, entries = pool.layout(slot, actual.site).rank, slice(start, start + count)
            if count and rank:
                one, other = (h.h_PGAR.sum(0)[:, entries, :rank] for h in (actual, wanted))
                close(one, other, 2e-2)
    following = adapted_sum(step, y, Adapted(4, down.h_PGAR.clone()), kept, weight, 5)
    assert following.adapted is not None
    queries, qkv, table = Adapted(5, following.adapted.h_PGAR.clone()), noise(rows, 768), noise(rows + 8, 64)
    places, results = torch.arange(rows, device="cuda"), []
    for run in (adapted_rope, adapted_rope_reference):
        rotation = Rotation(table, table, places + 5, places, torch.zeros(rows, 4, 64, device="cuda").bfloat16())
        head = QKNorm(weight[:64].contiguous(), weight[64:128].contiguous(), 1e-6)
        shape = QKVShape(8, 2, 64)
        q = run(step, queries, qkv.clone(), qkv[0].clone(), following.squares_TP, 512, 1e-6, shape, head, rotation)
        results.append((q, rotation.kv_S2KH))
    close(results[0][0], results[1][0])
    close(results[0][1], results[1][1])


@pytest.mark.parametrize("slots", [(0, 1, 4), (0, 1, 2, 3, 4)], ids=["one rank", "any rank"])
def test_first_products_behind_the_models_equal_references(slots):
    """As above, for products of bf16 that bring the adapters' first ones along."""
    torch.manual_seed(0)
    (pool, where), rows = fused_pool(), 100
    wide = {
        site: noise(sum(where.widths(site)) + 256 * len(where.widths(site)), where.inputs(site)) * 0.05
        for site in range(1, 9)
    }
    stack = Stack(pool, StackRoom(wide, 256, lambda: 0))
    variant = Variant.of(pool, np.resize(slots, rows), stack=stack)
    # Two of rank 16 take as many places as keep rows aligned.
    assert variant.stacked == 4
    step = KernelStep(pool, np.resize(slots, rows), variant=variant, stack=stack)

    def product(site: int, x: torch.Tensor) -> torch.Tensor:
        return x @ step.weight(site, wide[site]).T

    y, residual, weight = product(2, noise(rows, 512)), noise(rows, 512), noise(512)
    kept, expected_residual = residual.clone(), residual.clone()
    stream = adapted_sum(step, y, Adapted(2), kept, weight, None)
    expected = adapted_sum_reference(step, y, Adapted(2), expected_residual, weight, None)
    close(kept, expected_residual)
    close(stream.x_TD, expected.x_TD)
    norm, gate_up = (stream.squares_TP, 512, 1e-6), product(3, stream.x_TD)
    close(
        adapted_gate(step, Adapted(3), gate_up, *norm)[0], adapted_gate_reference(step, Adapted(3), gate_up, *norm)[0]
    )
    qkv, table, places, results = product(5, stream.x_TD), noise(rows + 8, 64), torch.arange(rows, device="cuda"), []
    for run in (adapted_rope, adapted_rope_reference):
        rotation = Rotation(table, table, places + 5, places, torch.zeros(rows, 4, 64, device="cuda").bfloat16())
        head = QKNorm(weight[:64].contiguous(), weight[64:128].contiguous(), 1e-6)
        results.append((run(step, Adapted(5), qkv.clone(), None, *norm, QKVShape(8, 2, 64), head, rotation), rotation))
    close(results[0][0], results[1][0])
    close(results[0][1].kv_S2KH, results[1][1].kv_S2KH)


def adapted_engine(folder, ranks=(("a", 4), ("b", 20)), ends: bool = False, **fields):
    """An engine with random policies; with `ends` they adapt the embedding and the head too."""
    engine = make_engine(folder, **fields)
    where = engine._parts.model.adapter_sites
    for name, rank in ranks:
        modules = dict.fromkeys(where.places, rank) if ends else all_linear(where, rank)
        given = tensors(modules, where, rank)
        scaled = {key: value * 0.5 / value.shape[-1] ** 0.5 for key, value in given.items()}
        engine.adapters.register(name, {"r": rank, "lora_alpha": rank}, scaled)
    return engine


def asked(names, n: int = 2, max_new: int = 12) -> list[GroupRequest]:
    return [
        GroupRequest(
            group_id=str(number),
            prompt_ids=prompt(7 + number),
            n=n,
            sampling=SamplingParams(max_new=max_new, seed=number),
            adapter=None if name is None else AdapterRef(name=name),
        )
        for number, name in enumerate(names)
    ]


@pytest.mark.parametrize("ends", [False, True], ids=["linear", "all ends"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["plain", "deterministic"])
def test_an_engine_equals_the_cpus(tmp_path, ends, deterministic):
    """Base and two policies in one batch, before, while and after anybody has an adapter, in captured steps."""
    folder = save_tiny(tmp_path, seed=0)
    fields = dict(ends=ends, dtype="float32", deterministic=deterministic)
    on_cpu, on_gpu = (adapted_engine(folder, device=device, **fields) for device in ("cpu", "cuda"))
    serial = on_gpu._loop._serial
    serial.step = lambda: pytest.fail("steps with adapters run ahead like all others")
    for names in ((None, None), (None, "a", "b", "a"), (None, None)):
        for one, other in zip(on_cpu.generate(asked(names)), on_gpu.generate(asked(names)), strict=True):
            for a, b in zip(one.samples, other.samples, strict=True):
                assert a.ids.tolist() == b.ids.tolist(), one.group_id
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-3)
        on_gpu.check()
    assert on_gpu.counters.graph_eager_steps == 0
    variants = {variant for _, _, _, variant in on_gpu._loop._stepper._captured}
    assert None in variants and len(variants) > 1
    assert all((variant.stacked == 0) == deterministic for variant in variants if variant is not None)


@pytest.mark.parametrize("residents", [2, 8], ids=["slots are loaded anew", "steps of two stand behind weights"])
def test_policies_that_take_turns_equal_the_cpus(tmp_path, residents):
    """There is room for two behind the weights; steps of three take planes."""
    folder, ranks = save_tiny(tmp_path, seed=0), (("a", 9), ("b", 16), ("c", 16))
    config = AdapterConfig(max_resident=residents, stacked_ranks=32)
    on_cpu, on_gpu = (
        adapted_engine(folder, ranks, device=device, dtype="float32", adapters=config) for device in ("cpu", "cuda")
    )
    for names in (("a", "b"), ("b", "c"), (None, "c", "a"), ("a", "b", "c"), ("c",), ("b", "a")):
        for one, other in zip(on_cpu.generate(asked(names)), on_gpu.generate(asked(names)), strict=True):
            for a, b in zip(one.samples, other.samples, strict=True):
                assert a.ids.tolist() == b.ids.tolist(), (names, one.group_id)
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-3)
        on_gpu.check()
        if names == ("b", "c"):
            on_gpu.release_memory(["weights"])
            on_gpu.resume_memory(["weights"])
    stacked = {variant.stacked for _, _, _, variant in on_gpu._loop._stepper._captured}
    assert 2 in stacked and (residents == 2 or 0 in stacked)


def test_deterministic_rows_keep_every_bit(tmp_path):
    """A row of any policy has the bits of its solo run; one of the base those of an engine without any adapter."""
    folder = save_tiny(tmp_path, seed=0)
    fields = dict(device="cuda", dtype="bfloat16", deterministic=True)
    engine = adapted_engine(folder, **fields)
    together = engine.generate(asked((None, "a", "b", None, "a")))
    for request, reply in zip(asked((None, "a", "b", None, "a")), together, strict=True):
        engine.flush()
        (alone,) = engine.generate([request])
        for one, other in zip(alone.samples, reply.samples, strict=True):
            assert one.ids.tolist() == other.ids.tolist() and np.array_equal(one.logprobs, other.logprobs)
    plain = make_engine(folder, **fields)
    for number in (0, 3):
        (reply,) = plain.generate(asked((None,) * 5)[number : number + 1])
        for one, other in zip(reply.samples, together[number].samples, strict=True):
            assert one.ids.tolist() == other.ids.tolist() and np.array_equal(one.logprobs, other.logprobs)


def test_a_poisoned_slot_spoils_no_other_row_of_an_engine(tmp_path):
    """Not even a bit, where rows do not depend on each other's number."""
    engine = adapted_engine(save_tiny(tmp_path, seed=0), device="cuda", dtype="bfloat16", deterministic=True)
    names = (None, "a", "b", "a")
    clean = engine.generate(asked(names))
    engine.flush()
    pool = engine.adapters.residency.pool
    slot = next(version.slot for version in engine.adapters.versions if version.name == "b")
    for site in range(1, len(pool.geometry.sites) - 1):
        for factors in pool.factors(slot, site):
            for factor in factors:
                factor.fill_(float("nan"))
    dirty = engine.generate(asked(names))
    assert {sample.finish for sample in dirty[2].samples} == {"error"}
    for number in (0, 1, 3):
        for one, other in zip(clean[number].samples, dirty[number].samples, strict=True):
            assert one.ids.tolist() == other.ids.tolist() and np.array_equal(one.logprobs, other.logprobs)
    engine.check()


@pytest.mark.parametrize("tag", ["adapters", "weights"])
def test_captured_steps_outlive_the_memory_of_adapters_and_weights(tmp_path, tag):
    engine = adapted_engine(save_tiny(tmp_path, seed=0), device="cuda", dtype="float32")
    before = engine.generate(asked(("a", "b")))
    engine.flush()
    again = engine.generate(asked(("a", "b")))
    captures = engine.counters.graph_captures
    held, released = engine.release_memory([tag])
    assert held[tag] > 0 and released[tag] == 0
    engine.resume_memory([tag])
    engine.flush()
    after = engine.generate(asked(("a", "b")))
    assert engine.counters.graph_captures == captures
    for replies in (again, after):
        for one, other in zip(before, replies, strict=True):
            assert [s.ids.tolist() for s in one.samples] == [s.ids.tolist() for s in other.samples]


def test_what_is_loaded_at_once_outlives_the_first_zeros_of_the_tables():
    """Copies run on a stream of their own, which must not overtake what the pool's making has queued."""
    packed = pack(weights(all_linear(WHERE, 8), WHERE, 8), WHERE, torch.bfloat16, pinned=True)
    torch.cuda._sleep(200_000_000)  # the device is busy while both are queued
    pool = DevicePool(WHERE, torch.bfloat16, torch.device("cuda"), 2 * packed.num_bytes, 2)
    slot = pool.load(packed)
    assert slot is not None
    pool.await_ready({slot})
    assert bool(pool.ranks_SX4[slot].any()) and bool(pool.offsets_SX2[slot].any())


def test_a_group_reads_its_prefix_together(tmp_path, monkeypatch):
    """Samples of one policy share their prompt's pages; another policy's of the same prompt do not."""
    for name in ("MIN_SAVED_BYTES", "MIN_SAVED_SEGMENT_BYTES"):
        monkeypatch.setattr(f"engine.attention.decode_metadata.{name}", 1)
    engine = adapted_engine(save_tiny(tmp_path, seed=0), device="cuda", dtype="float32")
    plans, launch = [], engine._loop._stepper.launch
    engine._loop._stepper.launch = lambda plan: plans.append(plan) or launch(plan)
    work = [
        GroupRequest(
            group_id=name,
            prompt_ids=prompt(64),
            n=4,
            sampling=SamplingParams(max_new=8, seed=3),
            adapter=AdapterRef(name=name),
        )
        for name in ("a", "b")
    ]
    together = engine.generate(work)
    assert max(len(plan.prefixes) for plan in plans) == 2
    for plan in plans:
        for prefix in plan.prefixes:
            assert len(set(plan.adapters[prefix.start : prefix.end])) == 1
    for request, reply in zip(work, together, strict=True):
        engine.flush()
        (alone,) = engine.generate([request])
        assert [s.ids.tolist() for s in alone.samples] == [s.ids.tolist() for s in reply.samples]
