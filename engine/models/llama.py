"""Llama: the dense decoder as it is, with biases where the configuration has them."""

from __future__ import annotations

import torch

from engine.models.decoder import DenseDecoderLM
from engine.models.dense_map import dense_weight_map
from engine.models.spec import ModelSpec
from engine.parallel import TensorParallel


def build_llama(spec: ModelSpec, dtype: torch.dtype, device: torch.device, parallel: TensorParallel) -> DenseDecoderLM:
    assert not spec.qk_norm, "Llama has no norm on queries and keys"
    return DenseDecoderLM(spec, dense_weight_map(spec), dtype, device, parallel)
