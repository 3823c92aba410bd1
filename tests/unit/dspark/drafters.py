"""Tiny random block drafters and their checkpoints (D-RAND of the case book)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.dspark.block_model import BlockDrafterModel, SharedEnds
from engine.dspark.block_spec import drafter_spec_from_config

VOCAB, HIDDEN, MASK = 512, 64, 511


def drafter_config(**overrides) -> dict:
    """D-RAND for a target of the case book's size with four layers: block 4, Markov and confidence heads."""
    config = dict(
        architectures=["Qwen3DSparkModel"],
        model_type="qwen3",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        num_target_layers=4,
        target_layer_ids=[0, 2],
        block_size=4,
        mask_token_id=MASK,
        markov_rank=8,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        torch_dtype="float32",
    )
    return {key: value for key, value in (config | overrides).items() if value is not None}


def random_drafter(seed: int = 0, **overrides) -> BlockDrafterModel:
    model = BlockDrafterModel(drafter_spec_from_config(drafter_config(**overrides)), torch.float32)
    randomise(model, seed)
    return model


def randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        value.data.copy_(1 + 0.1 * noise if "norm" in name else 0.2 * noise)


def random_ends(seed: int = 5, vocab: int = VOCAB) -> SharedEnds:
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(vocab, HIDDEN, generator=generator)
    head = torch.randn(vocab, HIDDEN, generator=generator) * 0.3
    return SharedEnds(lambda ids: embedding[ids], lambda hidden: hidden @ head.T)


def checkpoint(model: BlockDrafterModel) -> dict[str, torch.Tensor]:
    """The model's weights under their published names."""
    params = dict(model.named_parameters())
    return {
        name: params[place.param].detach().narrow(0, place.row_start, place.num_rows).clone()
        for name, place in model.weight_map.placements.items()
    }


def save_drafter(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def argmax_pick(slot: int, logits_BV: torch.Tensor) -> torch.Tensor:
    return logits_BV.argmax(-1)
