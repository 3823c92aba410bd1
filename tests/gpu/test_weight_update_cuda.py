"""Weights on a CUDA device: same bits as on the CPU, in place, staged on either side."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.weights.digest import model_digest
from engine.weights.loader import load_weights
from engine.weights.transaction import UpdateTransaction
from tests.unit.weights.tiny_weights import TinyModel, begin_for, checkpoint, loaded, named_all, save_single

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("staging", [None, "cpu"])
def test_device_parameters_equal_those_of_the_cpu(tmp_path: Path, dtype: torch.dtype, staging: str | None) -> None:
    tensors = checkpoint(1)
    expected = model_digest(loaded(tmp_path / "cpu", tensors, dtype))
    cold = TinyModel(dtype).cuda()
    assert load_weights(cold, save_single(tmp_path / "cold", tensors)).digest == model_digest(cold) == expected
    live = TinyModel(dtype).cuda()
    addresses = [parameter.data_ptr() for parameter in live.parameters()]
    transaction = UpdateTransaction(live, begin_for(tensors, digests=True), staging_device=staging)
    for tensor in reversed(named_all(tensors)):
        transaction.stage([tensor])
    assert transaction.prepare().digest == expected
    transaction.apply()
    assert model_digest(live) == expected
    assert [parameter.data_ptr() for parameter in live.parameters()] == addresses
