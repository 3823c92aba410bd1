"""Which adapters' first factors lie behind the weights, copied by the interpreted kernel."""

from __future__ import annotations

import numpy as np
import torch

from lora.kernel_step import Variant
from lora.packing import pack
from lora.stack import Stack, StackRoom
from tests.unit.lora.toy_geometry import all_linear, geometry, make_pool, weights

GEOMETRY = geometry()


def test_places_behind_weights_are_those_of_who_came_last():
    """Whoever is missing takes the place used longest ago; who left a slot, or was there before memory was given
    back, is not taken for who is there now."""
    given = [weights(all_linear(GEOMETRY, 16), GEOMETRY, seed) for seed in range(5)]
    adapters, releases = make_pool(GEOMETRY, *given), [0]
    wide = {site: torch.zeros(sum(GEOMETRY.widths(site)) + 64, GEOMETRY.inputs(site)) for site in (2, 4)}
    stack = Stack(adapters, StackRoom(wide, 64, lambda: releases[0]))
    assert [stack.places_for(count, 16) for count in range(6)] == [0, 4, 4, 4, 4, 0]
    assert [stack.places_for(2, rank) for rank in (32, 64)] == [2, 0]

    copied: list[int] = []

    def places(slots: set[int], most: int = 4, rank: int = 16) -> list[int]:
        """After a step of these, whose factors are where the table says."""
        copied.append(stack.ensure(slots, most, rank))
        for site, weight in wide.items():
            for slot in slots:
                first = sum(GEOMETRY.widths(site)) + int(stack.places_S[slot]) * rank
                assert torch.equal(weight[first : first + 16], adapters.factors(slot, site)[0][0])
                assert not weight[first + 16 : first + rank].any()
        return stack.places_S[1:6].tolist()

    assert places({1, 2, 3}) == [0, 1, 2, -1, -1]
    assert places({4}) == [0, 1, 2, 3, -1]
    assert places({1, 5}) == [0, -1, 2, 3, 1]
    assert places({3}, most=1) == [-1, -1, 0, 3, 1]
    adapters.free(4)
    assert adapters.load(pack(weights(all_linear(GEOMETRY, 16), GEOMETRY, 9), GEOMETRY, torch.float32)) == 4
    assert places({4, 5}) == [-1, -1, 0, 2, 1]
    for weight in wide.values():
        weight.fill_(float("nan"))
    releases[0] += 1
    assert places({1, 4, 5}) == [0, -1, -1, 1, 2]
    assert places({5}, most=2, rank=32) == [-1, -1, -1, -1, 0]
    assert copied == [3, 1, 1, 1, 1, 3, 1]


def test_adapters_too_wide_to_ride_along_take_no_place():
    adapters = make_pool(GEOMETRY, *(weights(all_linear(GEOMETRY, rank), GEOMETRY, rank) for rank in (64, 65)))
    wide = {2: torch.zeros(sum(GEOMETRY.widths(2)) + 512, GEOMETRY.inputs(2))}
    stack = Stack(adapters, StackRoom(wide, 512, lambda: 0))
    assert [Variant.of(adapters, np.array([slot]), stack=stack).stacked for slot in (1, 2)] == [1, 0]
