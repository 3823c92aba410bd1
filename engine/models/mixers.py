"""Mixers with a state, as values: what they are, what checkpoints call them, what a slot of state holds.

Owns everything about a mixer that can be known without computing: pools, planners, weight maps and adapters
read it here. How they compute is `engine.layers`' (one file a kind, over `engine.layers.mixer`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


class StateTensor(NamedTuple):
    """One tensor of a layer's state, for one sequence."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Whole(NamedTuple):
    """A parameter that is no product: its name in the layer's module and its shape, which are the
    checkpoint's. `dtype` None is the model's."""

    param: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


class MixerSpec(Protocol):
    """What every kind of mixer says about itself. Names are relative to `name`, the mixer's in checkpoints."""

    @property
    def name(self) -> str: ...

    @property
    def bias(self) -> bool:
        """Whether its products have one."""
        ...

    @property
    def grid(self) -> int:
        """States are only comparable between runs that cut a sequence at multiples of this many tokens: where
        chunks of its prefill end. 1 where any cut gives the same bits."""
        ...

    def inputs(self, hidden: int) -> dict[str, int]:
        """Products of the layer's input and their widths: one parameter `in_proj`, rows in this order."""
        ...

    def output(self, hidden: int) -> tuple[str, int]:
        """The product back to the hidden width, `out_proj`: its name and the width that goes in."""
        ...

    def wholes(self, hidden: int) -> dict[str, Whole]:
        """The other parameters, by their names in checkpoints."""
        ...

    def state(self, hidden: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """What a sequence keeps between two tokens, in the order in which `Mixer` receives it. `dtype` is the
        model's."""
        ...

    def workspace(self, hidden: int, dtype: torch.dtype) -> int:
        """Bytes that a token takes while its prompt is computed, beside its `inputs`, as much again for what they
        become, and what comes out."""
        ...


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A gated convolution over `width` tokens."""

    width: int
    bias: bool = False
    name: str = "conv"
    grid: int = 1

    def inputs(self, hidden: int) -> dict[str, int]:
        return {"in_proj": 3 * hidden}

    def output(self, hidden: int) -> tuple[str, int]:
        return "out_proj", hidden

    def wholes(self, hidden: int) -> dict[str, Whole]:
        taps = {"conv.weight": Whole("weight_D1K", (hidden, 1, self.width))}
        return taps | ({"conv.bias": Whole("bias_D", (hidden,))} if self.bias else {})

    def state(self, hidden: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        return (StateTensor("inputs", (self.width - 1, hidden), dtype),)

    def workspace(self, hidden: int, dtype: torch.dtype) -> int:
        """Sums over taps in fp32: the one so far, what is added, the next."""
        return 3 * 4 * hidden


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """A gated delta net: `value_heads` states of value_dim x key_dim numbers, of which as many share one of the
    `key_heads`, behind a convolution over `width` tokens. Checkpoints have queries, keys, values and gates of a
    key head side by side, and so strengths and decays (`grouped`), or all of one kind after the other."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    eps: float = 1e-6
    grouped: bool = True
    name: str = "linear_attn"
    bias: bool = False
    grid: int = 64

    @property
    def convolved(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.outputs

    @property
    def outputs(self) -> int:
        return self.value_heads * self.value_dim

    def inputs(self, hidden: int) -> dict[str, int]:
        if self.grouped:
            return {"in_proj_qkvz": self.convolved + self.outputs, "in_proj_ba": 2 * self.value_heads}
        own = {"in_proj_b": self.value_heads, "in_proj_a": self.value_heads}
        return {"in_proj_qkv": self.convolved, "in_proj_z": self.outputs} | own

    def output(self, hidden: int) -> tuple[str, int]:
        return "out_proj", self.outputs

    def wholes(self, hidden: int) -> dict[str, Whole]:
        """What each head has of its own stays fp32: decays are exponentials of it."""
        return {
            "A_log": Whole("rate_H", (self.value_heads,), torch.float32),
            "dt_bias": Whole("bias_H", (self.value_heads,), torch.float32),
            "conv1d.weight": Whole("conv_C1K", (self.convolved, 1, self.width)),
            "norm.weight": Whole("norm_V", (self.value_dim,)),
        }

    def state(self, hidden: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        return (
            StateTensor("inputs", (self.width - 1, self.convolved), dtype),
            StateTensor("state", (self.value_heads, self.value_dim, self.key_dim), torch.float32),
        )

    def workspace(self, hidden: int, dtype: torch.dtype) -> int:
        """What the systems of all chunks leave for the scan: values, keys, scores within a chunk and three factors
        of each head."""
        return self.value_heads * ((self.value_dim + self.key_dim + self.grid) * dtype.itemsize + 3 * 4)


class StateLayout(NamedTuple):
    """A slot of a model's states: the tensors of each recurrent layer, by its index among all layers, and the
    grid of tokens on which states are kept."""

    layers: dict[int, tuple[StateTensor, ...]]
    grid: int

    @property
    def slot_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers.values() for tensor in layer)

    def named(self, name: str) -> dict[int, StateTensor]:
        """One kind of tensor, in the layers that have it."""
        return {i: tensor for i, layer in self.layers.items() for tensor in layer if tensor.name == name}
