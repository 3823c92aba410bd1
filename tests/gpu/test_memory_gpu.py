"""Slabs on a GPU: the driver has the memory back, and it returns where it was."""

from __future__ import annotations

import pytest
import torch

from engine.dspark.config import DSparkConfig
from engine.errors import TooLarge
from engine.memory.slab import make_slab, part
from tests.support import ask, make_engine, prompt
from tests.unit.dspark.recurrent_models import save_recurrent

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda")
SIZE = 1 << 30
NOISE = 128 << 20
"""What kernels that are loaded meanwhile and torch's own blocks may take."""


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def test_a_slab_goes_and_comes_back_at_its_address() -> None:
    slab = make_slab(SIZE, DEVICE, "test")
    view = part(slab, SIZE // 2, (1024, 1024), torch.bfloat16)
    place, held = view.data_ptr(), free_bytes()
    for value in (1.0, 2.0):
        slab.unmap()
        slab.unmap()
        assert not slab.mapped and free_bytes() >= held + SIZE - NOISE
        slab.map()
        slab.map()
        assert slab.mapped and view.data_ptr() == place and free_bytes() <= held + NOISE
        view.fill_(value)
        assert view.float().sum().item() == value * 1024 * 1024


def test_a_captured_graph_outlives_the_memory_it_reads() -> None:
    slab = make_slab(SIZE, DEVICE, "test")
    a = part(slab, 0, (512, 512), torch.float32)
    b = part(slab, SIZE // 2, (512, 512), torch.float32)
    out = torch.zeros(512, 512, device=DEVICE)
    a.fill_(1)
    b.fill_(1)
    torch.mm(a, b, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mm(a, b, out=out)
    for factor in (2.0, 3.0):
        slab.unmap()
        taken = torch.full((SIZE // 4,), float("nan"), device=DEVICE)
        slab.map()
        a.fill_(factor)
        b.fill_(1)
        graph.replay()
        assert bool((out == 512 * factor).all())
        del taken


def test_memory_is_the_drivers_once_the_last_view_is_gone() -> None:
    torch.cuda.empty_cache()
    before = free_bytes()
    slab = make_slab(SIZE, DEVICE, "test")
    view = part(slab, 0, (4,), torch.float32).fill_(7)
    assert free_bytes() <= before - SIZE + NOISE
    del slab
    assert view.sum().item() == 28
    del view
    assert free_bytes() >= before - NOISE


def test_too_little_memory_is_named_and_changes_nothing() -> None:
    slab = make_slab(SIZE, DEVICE, "kv")
    slab.unmap()
    with pytest.raises(TooLarge, match="kv"):
        make_slab(1 << 50, DEVICE, "kv")
    slab.map()
    assert part(slab, 0, (8,), torch.float32).fill_(1).sum().item() == 8


@pytest.mark.parametrize("drafter", [None, "ngram"])
@pytest.mark.parametrize("kind", ["falcon_h1", "qwen3_5_text"])
def test_states_and_rings_are_the_drivers_while_released(tmp_path, kind, drafter) -> None:
    """Captured steps find them where they were, empty."""
    folder = save_recurrent(tmp_path, kind)
    dspark = DSparkConfig() if drafter is None else DSparkConfig(drafter=drafter, drafts=4, sweep_seconds=0)
    fields = dict(loop="overlapped", burst=8, page_size=16, kv_tokens=8192, max_running=16, state_slots=20_000)
    engine = make_engine(folder, device="cuda", dspark=dspark, **fields)
    work = [ask(f"g{i}", prompt(40 + 9 * i, 7 * i), n=2, max_new=40, temperature=1.0, seed=i) for i in range(4)]
    for _ in range(3):  # what is captured only when it comes back is captured now
        engine.flush("all")
        before = engine.generate(work)
    states, captures = engine._parts.pages.states, engine.counters.graph_captures
    assert states is not None
    pool = states.pool
    places = [tensor.data_ptr() for tensor in pool.tensors]
    assert pool.bytes > 128 << 20 and (pool.rings is None) == (drafter is None)
    for _ in range(2):
        torch.cuda.empty_cache()
        free, held = free_bytes(), engine._parts.memory.bytes()["kv"]
        _, after = engine.release_memory(["kv"])
        assert after["kv"] == 0 and free_bytes() >= free + held
        taken = torch.full((held // 4,), float("nan"), device=DEVICE)
        del taken
        torch.cuda.empty_cache()
        assert engine.resume_memory(["kv"])[1]["kv"] == held and free_bytes() <= free + NOISE
        assert [tensor.data_ptr() for tensor in pool.tensors] == places and not any(t.any() for t in pool.tensors)
        pool.fill(float("nan"))
        for one, other in zip(engine.generate(work), before, strict=True):
            assert one.hit.usable == 0
            assert [s.ids.tolist() for s in one.samples] == [s.ids.tolist() for s in other.samples]
        engine.check()
    assert engine.counters.graph_captures == captures
