"""Slabs and what lies in them: memory that goes and comes back where it was."""

from __future__ import annotations

import os
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from engine.memory.slab import ALIGNMENT, aligned, make_slab, part
from engine.weights.arena import WeightArena
from engine.weights.digest import model_digest

CPU = torch.device("cpu")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_really_goes_and_comes_back_at_its_address() -> None:
    size = 64 << 20
    slab = make_slab(size, CPU, "test")
    view = part(slab, ALIGNMENT, (1000, 7), torch.float32)
    slab.data_U.fill_(3)
    held, place = resident_bytes(), view.data_ptr()
    slab.unmap()
    slab.unmap()
    assert not slab.mapped and resident_bytes() <= held - size * 9 // 10
    slab.map()
    slab.map()
    assert slab.mapped and view.data_ptr() == place == slab.data_U.data_ptr() + ALIGNMENT
    view.fill_(2.5)
    assert bool((part(slab, ALIGNMENT, (1000, 7), torch.float32) == 2.5).all())
    assert slab.data_U[ALIGNMENT - 1] == slab.data_U[ALIGNMENT + 28_000] == 0


class Block(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.eps = torch.tensor(1e-5, device=device)
        self.odd = nn.Parameter(torch.empty(3, 5, dtype=torch.bfloat16, device=device), requires_grad=False)
        self.child = nn.ModuleList(
            nn.Linear(17, 9, device=device, dtype=torch.float32).requires_grad_(False) for _ in range(2)
        )


def test_an_arena_holds_every_parameter_and_nothing_else() -> None:
    arena = WeightArena(Block, CPU)
    model = arena.model
    sizes = [parameter.nbytes for parameter in model.parameters()]
    assert arena.num_bytes == sum(map(aligned, sizes)) and model.eps.item() == pytest.approx(1e-5)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    assert all(place % ALIGNMENT == 0 for place in places)
    gaps = [b - a for a, b in pairwise(places)]
    assert gaps == [aligned(size) for size in sizes[:-1]]
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number)
    arena.release(keep=True)
    arena.release(keep=False)
    assert arena.num_bytes == 0
    arena.restore()
    arena.restore()
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert all(bool((p == number).all()) for number, p in enumerate(model.parameters()))
    arena.release(keep=False)
    arena.restore()
    assert all(bool(parameter.isnan().all()) for parameter in model.parameters())


def test_room_behind_weights_is_seen_by_nobody_else() -> None:
    """A weight is the first rows of a longer one: the same parameter to whoever loads, updates or digests it."""
    plain, roomy = (
        WeightArena(Block, CPU, room=lambda module, rows=rows: rows * isinstance(module, nn.Linear)) for rows in (0, 3)
    )
    with torch.no_grad():
        for one, other in zip(plain.model.parameters(), roomy.model.parameters(), strict=True):
            assert one.shape == other.shape and other.is_contiguous()
            one.normal_()
            other.copy_(one)
    weights = [module.weight for module in roomy.model.child]
    assert not plain.wide and [roomy.wide[weight].shape for weight in weights] == [(12, 17)] * 2
    for weight in weights:
        assert roomy.wide[weight].data_ptr() == weight.data_ptr()
        roomy.wide[weight][9:] = float("nan")
    assert model_digest(roomy.model) == model_digest(plain.model)
    roomy.release(keep=True)
    roomy.release(keep=True)
    roomy.restore()
    assert roomy.releases == 1 and model_digest(roomy.model) == model_digest(plain.model)


def test_modules_made_meanwhile_by_other_threads_are_not_taken_in() -> None:
    others: list[nn.Linear] = []

    def build(device: torch.device) -> nn.Module:
        thread = threading.Thread(target=lambda: others.append(nn.Linear(4, 4)))
        thread.start()
        thread.join()
        return Block(device)

    arena = WeightArena(build, CPU)
    first, last = arena.model.odd.data_ptr(), arena.model.odd.data_ptr() + arena.num_bytes
    assert len(others) == 2 and not any(first <= p.data_ptr() < last for m in others for p in m.parameters())
    nn.Linear(4, 4)
    assert arena.num_bytes == last - first
