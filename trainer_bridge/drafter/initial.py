"""A drafter that has learnt nothing yet.

Owns the choice of a shape for a target and the first weights. Ignores training.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from engine.dspark.block_model import BlockDrafterModel
from engine.dspark.block_spec import drafter_spec_from_config
from engine.errors import InvalidRequest
from engine.models.decoder import DenseDecoderLM
from engine.models.spec import ModelSpec
from trainer_bridge.drafter.config import DrafterShape

_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")


def spaced_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers evenly from the second to the fourth from the end, as published drafters choose; the
    middle one where there is one."""
    if count == 1 or num_layers < 5:
        return (min(num_layers // 2, num_layers - 2),)
    first, last = 1, num_layers - 3
    count = min(count, last - first + 1)
    return tuple(sorted({round(first + (last - first) * i / (count - 1)) for i in range(count)}))


def drafter_config(shape: DrafterShape, target: Path, spec: ModelSpec, mask_id: int) -> dict[str, Any]:
    """`config.json` in the DeepSpec layout, checked by its reader. Raises what the reader raises."""
    if spec.num_layers < 2:
        raise InvalidRequest(field="target", expected="at least 2 layers", actual=spec.num_layers)
    source = json.loads((target / "config.json").read_text())
    config: dict[str, Any] = {
        "architectures": [shape.family],
        "model_type": "qwen3" if shape.family.startswith("Qwen3") else "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden,
        "intermediate_size": shape.intermediate or spec.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.num_heads or spec.num_heads,
        "num_key_value_heads": shape.num_kv_heads or spec.num_kv_heads,
        "head_dim": shape.head_dim or spec.head_dim,
        "max_position_embeddings": shape.context or spec.context_len,
        "rms_norm_eps": spec.rms_eps,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * shape.layers,
        "tie_word_embeddings": False,
        "num_target_layers": spec.num_layers,
        "target_layer_ids": list(shape.target_layers or spaced_layers(spec.num_layers, shape.captured)),
        "block_size": shape.block,
        "mask_token_id": mask_id,
        "sample_from_anchor": True,
        "markov_rank": shape.markov_rank,
        "markov_head_type": shape.markov_head,
        "enable_confidence_head": shape.confidence,
        "confidence_head_with_markov": shape.confidence and shape.confidence_reads_markov and shape.markov_rank > 0,
        "torch_dtype": str(spec.dtype).removeprefix("torch."),
    }
    config |= {name: source[name] for name in _ROPE if source.get(name) is not None}
    if shape.draft_ids:
        config |= {"draft_vocab_size": len(shape.draft_ids), "draft_vocab_ids": list(shape.draft_ids)}
    drafter_spec_from_config(config)
    return config


@torch.no_grad()
def initialise(model: BlockDrafterModel, target: DenseDecoderLM, seed: int) -> None:
    """Random projections; branches into the residual stream start small, the Markov bias and the confidence
    at nothing. The last norm starts as the target's: the head that follows it expects that scale."""
    generator = torch.Generator().manual_seed(seed)
    layers = model.spec.backbone.num_layers
    for name, param in sorted(model.named_parameters()):
        if name == "norm.weight":
            param.copy_(target.model.norm.weight)
        elif "norm" in name:
            param.fill_(1.0)
        elif name.startswith("confidence_head.") or name == "markov_head.w2" or name.endswith("_bias"):
            param.zero_()
        else:
            std = param.shape[-1] ** -0.5
            if name.endswith(("o_proj", "down_proj")):
                std *= (2 * layers) ** -0.5
            param.copy_(torch.randn(param.shape, generator=generator) * std)
