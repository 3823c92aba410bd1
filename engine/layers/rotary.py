"""Rotary position embedding.

Owns inverse frequencies per kind of scaling and the rotation itself. Ignores which layers rotate.
Frequencies follow the definitions transformers uses: linear and llama3 interpolation, and YaRN
(arxiv.org/abs/2309.00071). Dynamic scaling changes nothing up to the model's context length, which
is the longest sequence served.

Shapes: T tokens, H heads, E head size.
"""

from __future__ import annotations

import math

import torch

from engine.models.shape import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> tuple[torch.Tensor, float]:
    """Float32 [head_dim / 2] on the CPU, and the factor on cosines and sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "none":
        return torch.zeros_like(plain), 1.0
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim), _yarn_attention_factor(rope)
    return plain, 1.0


def _llama3(rope: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are interpolated, short ones kept, those between blended."""
    wavelength = 2 * math.pi / plain
    longest, shortest = rope.original_context / rope.low_freq_factor, rope.original_context / rope.high_freq_factor
    blend = (rope.original_context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - blend) * plain / rope.factor + blend * plain
    scaled = torch.where(wavelength > longest, plain / rope.factor, between)
    return torch.where(wavelength < shortest, plain, scaled)


def _yarn(rope: RopeSpec, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Dimensions that turn often keep their frequency, slow ones are interpolated, with a ramp between."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _yarn_attention_factor(rope: RopeSpec) -> float:
    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


class Rotary:
    """Cosines and signed sines of every position up to the context length.

    The sine's first half is negated, so that rotation is x * cos + (x with halves swapped) * sin.
    The tables are derived, not weights: they are on no checkpoint and never released.
    """

    def __init__(
        self, rope: RopeSpec, head_dim: int, context_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        width = int(head_dim * rope.part)
        frequencies, factor = inverse_frequencies(rope, width)
        angles = torch.arange(context_len, dtype=torch.float32)[:, None] * frequencies[None, :]
        cos, sin = angles.cos() * factor, angles.sin() * factor
        self.half = width // 2
        self.cos_CE = torch.cat((cos, cos), dim=-1).to(device=device, dtype=dtype)
        self.sin_CE = torch.cat((-sin, sin), dim=-1).to(device=device, dtype=dtype)

    def at(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine [T, 1, E] of each token, for all layers of a step."""
        cos_TE, sin_TE = self.cos_CE.index_select(0, positions_T), self.sin_CE.index_select(0, positions_T)
        return cos_TE.unsqueeze(1), sin_TE.unsqueeze(1)

    def rotate_(self, x_THE: torch.Tensor, cos_T1E: torch.Tensor, sin_T1E: torch.Tensor) -> None:
        """Rotate in place, the first numbers of a head alone where the rope says so; each product is rounded
        before the sum."""
        x_THE = x_THE[..., : 2 * self.half]
        swapped = torch.roll(x_THE, self.half, -1).mul_(sin_T1E)
        x_THE.mul_(cos_T1E).add_(swapped)


def by_halves(x: torch.Tensor) -> torch.Tensor:
    """A copy of numbers that rotate in pairs of neighbours, in the order in which halves rotate."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
