"""Named model shapes with random weights, made on the device.

Owns the shapes of published models and their random filling. Ignores what is measured on them.
Weights are normal with the usual spread, norms one, so that activations stay in range.
"""

from __future__ import annotations

import torch

from engine import Engine, EngineConfig
from engine.build import build_parts
from engine.models.spec import LayerSpec, ModelSpec, RopeSpec


def _dense(
    architecture: str,
    vocab: int,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    tied: bool,
    theta: float,
    context: int,
) -> ModelSpec:
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocab,
        context_len=context,
        hidden=hidden,
        intermediate=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=(LayerSpec(),) * layers,
        tied=tied,
        eos_ids=(),
        dtype=torch.bfloat16,
        qk_norm=architecture == "Qwen3ForCausalLM",
        rope=RopeSpec(theta=theta),
    )


SHAPES = {
    "smollm2-135m": _dense("LlamaForCausalLM", 49152, 576, 1536, 30, 9, 3, 64, True, 1e5, 8192),
    "qwen3-0.6b": _dense("Qwen3ForCausalLM", 151936, 1024, 3072, 28, 16, 8, 128, True, 1e6, 40960),
    "qwen3-4b": _dense("Qwen3ForCausalLM", 151936, 2560, 9728, 36, 32, 8, 128, True, 1e6, 40960),
    "qwen3-8b": _dense("Qwen3ForCausalLM", 151936, 4096, 12288, 36, 32, 8, 128, False, 1e6, 40960),
}


def random_engine(shape: str, config: EngineConfig, seed: int = 0) -> Engine:
    """An engine of a named shape, its weights drawn where they live."""
    return Engine(build_parts(SHAPES[shape], config, lambda model: fill_random(model, seed)))


@torch.no_grad()
def fill_random(model: torch.nn.Module, seed: int) -> None:
    for number, (name, param) in enumerate(model.named_parameters()):
        generator = torch.Generator(device=param.device).manual_seed(seed * 100003 + number)
        if param.dim() == 1 and name.endswith("bias"):
            param.zero_()
        elif param.dim() == 1:
            param.fill_(1.0)
        else:
            param.normal_(0.0, 0.02, generator=generator)
