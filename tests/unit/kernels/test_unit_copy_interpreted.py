"""Units of several tensors to rows and back, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.unit_copy import UnitAddresses, gather_units_reference, scatter_units_reference, unit_copy


@pytest.mark.parametrize("scatter", [False, True])
def test_units_travel_whole(scatter):
    """Units wider than all programs' blocks and narrower than one, of odd widths, in any order."""
    tensors = [
        torch.randn(5, 4, 3, 2).bfloat16(),
        torch.randn(5, 9000),
        torch.randint(0, 99, (5, 7), dtype=torch.int16),
    ]
    starts, ids = [0, 64, 36_080], torch.tensor([4, 1, 3])
    rows = torch.randint(0, 255, (3, 36_352), dtype=torch.uint8)
    mine, expected = [tensor.clone() for tensor in tensors], [tensor.clone() for tensor in tensors]
    copied, wanted = rows.clone(), rows.clone()
    unit_copy(UnitAddresses(mine, starts), ids, copied, scatter)
    (scatter_units_reference if scatter else gather_units_reference)(expected, starts, ids, wanted)
    assert torch.equal(copied, wanted) and torch.equal(copied, rows) == scatter
    for one, other, before in zip(mine, expected, tensors, strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))
        assert torch.equal(one.view(torch.int16), before.view(torch.int16)) != scatter
        assert torch.equal(one[0], before[0]) and torch.equal(one[2], before[2])
