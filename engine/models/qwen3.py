"""Qwen3 dense: the dense decoder with a norm per head on queries and keys before rotation."""

from __future__ import annotations

import torch

from engine.models.decoder import DenseDecoderLM
from engine.models.dense_map import dense_weight_map
from engine.models.spec import ModelSpec
from engine.parallel import TensorParallel


def build_qwen3(spec: ModelSpec, dtype: torch.dtype, device: torch.device, parallel: TensorParallel) -> DenseDecoderLM:
    assert spec.qk_norm, "Qwen3 norms queries and keys"
    return DenseDecoderLM(spec, dense_weight_map(spec), dtype, device, parallel)
