"""From a spec to a model.

Owns the one way a model is built. Architectures differ in their specs alone (`engine.models.spec`
lists them). Ignores loading: parameters are uninitialised.
"""

from __future__ import annotations

import torch

from engine.models.decoder import CausalLM, DenseDecoderLM
from engine.models.shape import ModelSpec
from engine.models.weight_map import decoder_weight_map
from engine.parallel import SINGLE, TensorParallel


def build_model(
    spec: ModelSpec,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    parallel: TensorParallel = SINGLE,
) -> DenseDecoderLM:
    """A model of the spec with uninitialised parameters; `dtype` None is the spec's."""
    return DenseDecoderLM(spec, decoder_weight_map(spec), dtype or spec.dtype, torch.device(device), parallel)


__all__ = ["CausalLM", "build_model"]
