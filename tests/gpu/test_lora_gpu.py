"""Adapters on a GPU: kernels against the loop in torch, bits, fences, and an engine against the CPU's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.types import AdapterRef, GroupRequest, SamplingParams
from lora.device_pool import DevicePool
from lora.kernel_step import KernelStep
from lora.packing import pack
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
    together = add(KernelStep(pool, SLOTS), site, x)
    for row in range(0, len(SLOTS), 5):
        alone = add(KernelStep(pool, SLOTS[row : row + 1]), site, x[row : row + 1])
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


def test_an_engine_equals_the_cpus(tmp_path):
    """Base and two policies in one batch, before, while and after anybody has an adapter."""
    folder = save_tiny(tmp_path, seed=0)
    engines = [make_engine(folder, device=device, dtype="float32") for device in ("cpu", "cuda")]
    where = engines[0]._parts.model.adapter_sites
    for engine in engines:
        for name, rank in (("a", 4), ("b", 20)):
            given = tensors(all_linear(where, rank), where, rank)
            scaled = {key: value * 0.5 / value.shape[-1] ** 0.5 for key, value in given.items()}
            engine.adapters.register(name, {"r": rank, "lora_alpha": rank}, scaled)
    for names in ((None, None), (None, "a", "b", "a"), (None, None)):
        asked = [
            GroupRequest(
                group_id=str(number),
                prompt_ids=prompt(7 + number),
                n=2,
                sampling=SamplingParams(max_new=12, seed=number),
                adapter=None if name is None else AdapterRef(name=name),
            )
            for number, name in enumerate(names)
        ]
        on_cpu, on_gpu = (engine.generate(asked) for engine in engines)
        for one, other in zip(on_cpu, on_gpu, strict=True):
            for a, b in zip(one.samples, other.samples, strict=True):
                assert a.ids.tolist() == b.ids.tolist(), one.group_id
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-3)
        engines[1].check()
