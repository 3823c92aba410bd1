"""Which file builds which architecture.

Owns the table from architecture names to builders. Ignores loading: parameters are uninitialised.
"""

from __future__ import annotations

import torch

from engine.errors import Unsupported
from engine.models.decoder import CausalLM, DenseDecoderLM
from engine.models.llama import build_llama
from engine.models.qwen3 import build_qwen3
from engine.models.spec import ModelSpec
from engine.parallel import SINGLE, TensorParallel

_BUILDERS = {"LlamaForCausalLM": build_llama, "Qwen3ForCausalLM": build_qwen3}


def build_model(
    spec: ModelSpec,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    parallel: TensorParallel = SINGLE,
) -> DenseDecoderLM:
    """A model of the spec's architecture with uninitialised parameters; `dtype` None is the spec's."""
    builder = _BUILDERS.get(spec.architecture)
    if builder is None:
        raise Unsupported(field="architecture", expected=f"one of {sorted(_BUILDERS)}", actual=spec.architecture)
    return builder(spec, dtype or spec.dtype, torch.device(device), parallel)


__all__ = ["CausalLM", "build_model"]
