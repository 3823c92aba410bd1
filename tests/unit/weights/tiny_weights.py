"""A tiny module with fused and tied parameters, and helpers to make and send its checkpoints."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from engine.types import NamedTensor, TensorSpec, UpdateBegin
from engine.weights.loader import load_weights
from engine.weights.mapping import Placement, WeightMap

HIDDEN, INTERMEDIATE, VOCAB, LAYERS, Q_ROWS, KV_ROWS = 8, 12, 32, 2, 8, 4
DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class Rank:
    """The part of a tensor-parallel group that loading reads."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype, size: int) -> None:
        super().__init__()

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)

        self.norm = empty(HIDDEN)
        self.qkv = empty((Q_ROWS + 2 * KV_ROWS) // size, HIDDEN)
        self.out = empty(HIDDEN, Q_ROWS // size)
        self.gate_up = empty(2 * INTERMEDIATE // size, HIDDEN)


class TinyModel(nn.Module):
    """Embedding, blocks and a head that is tied unless `tied` is false."""

    def __init__(self, dtype: torch.dtype = torch.float32, tied: bool = True, parallel: Rank | None = None) -> None:
        super().__init__()
        self.parallel = parallel or Rank(0, 1)
        size = self.parallel.size
        self.embed = nn.Parameter(torch.zeros(VOCAB // size, HIDDEN, dtype=dtype), requires_grad=False)
        if not tied:
            self.head = nn.Parameter(torch.zeros(VOCAB // size, HIDDEN, dtype=dtype), requires_grad=False)
        self.blocks = nn.ModuleList(Block(dtype, size) for _ in range(LAYERS))
        self.register_buffer("rotary", torch.arange(4.0), persistent=False)
        self.weight_map = _weight_map(tied)


def _weight_map(tied: bool) -> WeightMap:
    places = {"model.embed_tokens.weight": Placement("embed", 0, VOCAB, (VOCAB, HIDDEN), 0)}
    if not tied:
        places["lm_head.weight"] = Placement("head", 0, VOCAB, (VOCAB, HIDDEN), 0)
    for i in range(LAYERS):
        source, param = f"model.layers.{i}", f"blocks.{i}"
        places[f"{source}.norm.weight"] = Placement(f"{param}.norm", 0, HIDDEN, (HIDDEN,))
        places[f"{source}.self_attn.o_proj.weight"] = Placement(f"{param}.out", 0, HIDDEN, (HIDDEN, Q_ROWS), 1)
        attention = [("self_attn.q_proj", Q_ROWS), ("self_attn.k_proj", KV_ROWS), ("self_attn.v_proj", KV_ROWS)]
        fused = {
            f"{param}.qkv": attention,
            f"{param}.gate_up": [("mlp.gate_proj", INTERMEDIATE), ("mlp.up_proj", INTERMEDIATE)],
        }
        for target, parts in fused.items():
            start = 0
            for part, rows in parts:
                places[f"{source}.{part}.weight"] = Placement(target, start, rows, (rows, HIDDEN), 0)
                start += rows
    aliases = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
    ignored = frozenset(f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(LAYERS))
    return WeightMap(places, aliases, ignored)


def checkpoint(seed: int, dtype: torch.dtype = torch.float32, tied: bool = True) -> dict[str, torch.Tensor]:
    """Random values for every name the tiny model takes."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: place.shape for name, place in _weight_map(tied).placements.items()}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().copy()


def named(name: str, tensor: torch.Tensor) -> NamedTensor:
    return NamedTensor(name=name, dtype=DTYPE_NAMES[tensor.dtype], shape=list(tensor.shape), data=raw(tensor))


def named_all(tensors: dict[str, torch.Tensor]) -> list[NamedTensor]:
    return [named(name, tensor) for name, tensor in tensors.items()]


def begin_for(tensors: dict[str, torch.Tensor], digests: bool = False) -> UpdateBegin:
    manifest = [
        TensorSpec(
            name=name,
            dtype=DTYPE_NAMES[tensor.dtype],
            shape=list(tensor.shape),
            digest=hashlib.sha256(raw(tensor).tobytes()).hexdigest() if digests else None,
        )
        for name, tensor in tensors.items()
    ]
    return UpdateBegin(txn="t", base_version=0, new_version=1, manifest=manifest)


def save_single(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def save_sharded(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Two shards, split so that a fused parameter straddles them."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    parts = {"a.safetensors": names[0::2], "b.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    index = {"weight_map": {name: file for file, members in parts.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def loaded(
    folder: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32, tied: bool = True
) -> TinyModel:
    """A model cold-loaded from `tensors`."""
    fresh = TinyModel(dtype, tied)
    load_weights(fresh, save_single(folder, tensors))
    return fresh
