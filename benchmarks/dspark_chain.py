"""A target that says what it is told, and a drafter that knows it with a given chance.

Owns weights of a published shape under which simulated acceptance is real: every kernel does its full work,
drafts are made, verified and rejected as ever, and nothing in the engine knows of it. Ignores what is measured.

The vocabulary is cut into classes, and in each of them every id has one successor, along one cycle. The
target's layers add nothing to the residual stream (their last products are zero, which costs as much), so
its final state is the last token's embedding, and the head's row of a successor is that embedding. The
drafter's Markov head names the true successor of a share of each class's ids and another id for the rest;
its confidence head reads the class, so that it is calibrated.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.dspark_simulation import CLASSES
from benchmarks.shapes import SHAPES, fill_random
from engine.dspark.block_model import BlockDrafterModel
from engine.dspark.block_spec import drafter_spec_from_config
from engine.errors import Unsupported
from engine.models.decoder import DenseDecoderLM
from engine.models.spec import ModelSpec
from trainer_bridge.drafter.export import published_tensors
from trainer_bridge.drafter.initial import spaced_layers

DRAFT_LAYERS, RANK = 5, 256
_SURE, _CERTAIN = 80.0, 200.0
"""Logits of a true successor in the target's head, and of the id that the Markov head names."""


class Chain:
    """Successors by id, and which of them a drafter gets right."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.classes = np.arange(vocab_size) % len(CLASSES)
        self.successor, self.drafted = np.zeros((2, vocab_size), dtype=np.int64)
        for number, chance in enumerate(CLASSES.values()):
            members = rng.permutation(np.flatnonzero(self.classes == number))
            self.successor[members] = np.roll(members, -1)
            right = rng.random(len(members)) < chance
            self.drafted[members] = np.where(right, np.roll(members, -1), np.roll(members, -2))

    def prompts(self, name: str, count: int, length: int, seed: int) -> list[np.ndarray]:
        """Random ids of which the last is of the class."""
        rng = np.random.default_rng([seed, list(CLASSES).index(name)])
        ids = rng.integers(0, len(self.classes), (count, length))
        ids[:, -1] = rng.choice(np.flatnonzero(self.classes == list(CLASSES).index(name)), count)
        return list(ids.astype(np.uint32))


def chain_spec(shape: str, layers: int | None = None) -> ModelSpec:
    spec = SHAPES[shape]
    if spec.tied:
        raise Unsupported(field="shape", expected="a model with a head of its own", actual=shape)
    return spec if layers is None else dataclasses.replace(spec, num_layers=layers, layers=spec.layers[:layers])


@torch.no_grad()
def fill_target(model: DenseDecoderLM, chain: Chain) -> None:
    fill_random(model, 0)
    for name, param in model.named_parameters():
        if name.endswith(("o_proj", "down_proj", "o_proj.weight", "down_proj.weight")):
            param.zero_()
    assert model.lm_head is not None, "the shape has a head of its own"
    embedding_VD, head_VD = model.model.embed_tokens.weight, model.lm_head.weight
    successor_V = torch.from_numpy(chain.successor).to(embedding_VD.device)
    # A state is an embedding of unit mean square, so that a row's product with it is their length.
    spread = float(embedding_VD[:64].float().square().mean().sqrt())
    head_VD.index_copy_(0, successor_V, embedding_VD * (_SURE / (spread * embedding_VD.shape[1])))


@torch.no_grad()
def save_drafter(folder: Path, spec: ModelSpec, chain: Chain, block: int, device: str, rank: int = RANK) -> Path:
    """A drafter of the published shape with `block` drafts a round."""
    config = _config(spec, block, rank)
    model = BlockDrafterModel(drafter_spec_from_config(config), spec.dtype, device)
    fill_random(model, 1)
    classes = len(CLASSES)
    generator = torch.Generator(device=device).manual_seed(2)
    signs_VR = torch.randint(0, 2, (spec.vocab_size, rank - classes), generator=generator, device=device) * 2.0 - 1.0
    first_VR = torch.zeros(spec.vocab_size, rank, device=device)
    first_VR[torch.arange(spec.vocab_size), torch.from_numpy(chain.classes).to(device)] = 1.0
    first_VR[:, classes:] = signs_VR
    second_VR = torch.zeros_like(first_VR)
    drafted_V = torch.from_numpy(chain.drafted).to(device)
    second_VR[:, classes:].index_add_(0, drafted_V, signs_VR * (_CERTAIN / (rank - classes)))
    odds = [float(np.log(chance / (1 - chance))) for chance in CLASSES.values()]
    for name, param in model.named_parameters():
        if name.endswith(("o_proj", "down_proj", "confidence_head.weight", "confidence_head.bias")):
            param.zero_()
        if name == "markov_head.w1":
            param.copy_(first_VR)
        if name == "markov_head.w2":
            param.copy_(second_VR)
        if name == "confidence_head.weight":
            reads_D = param[0, spec.hidden : spec.hidden + classes]
            reads_D.copy_(torch.tensor(odds))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(published_tensors(model, spec.dtype), folder / "model.safetensors")
    return folder


def _config(spec: ModelSpec, block: int, rank: int) -> dict:
    return dict(
        architectures=["Qwen3DSparkModel"],
        model_type="qwen3",
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=DRAFT_LAYERS,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.context_len,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        hidden_act="silu",
        layer_types=["full_attention"] * DRAFT_LAYERS,
        tie_word_embeddings=False,
        num_target_layers=spec.num_layers,
        target_layer_ids=list(spaced_layers(spec.num_layers, 5)),
        block_size=block,
        mask_token_id=0,
        sample_from_anchor=True,
        markov_rank=rank,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        torch_dtype=str(spec.dtype).removeprefix("torch."),
    )
