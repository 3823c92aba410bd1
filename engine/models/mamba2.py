"""Mamba2 mixers as values, and their fields in configurations.

Owns what is known of one without computing. How it computes is `engine.layers.mamba2`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from engine.errors import InvalidRequest
from engine.models import config_fields as fields
from engine.models.mixers import StateTensor, Whole


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """`heads` of `head_dim` with states of `state` numbers for each of these; `groups` of heads share B and C. A
    convolution over `width` tokens comes before. What is put out is gated, and normed behind the gate or before
    it. Step sizes lie between `low` and `high`. `scales` multiply the product's five parts: gate, x, B, C, steps.

    States are kept at any page's end: where a sequence was cut moves fp32 sums by a few bits, and none where steps
    are computed one after the other (`StateStep.sequential`)."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    width: int
    norm: Literal["none", "behind", "before"] = "behind"
    eps: float = 1e-5
    bias: bool = False
    conv_bias: bool = True
    low: float = 0.0
    high: float = float("inf")
    scales: tuple[float, float, float, float, float] | None = None
    name: str = "mamba"
    grid: int = 1

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        return self.inner + 2 * self.groups * self.state_size

    def inputs(self, hidden: int) -> dict[str, int]:
        return {"in_proj": self.inner + self.convolved + self.heads}

    def output(self, hidden: int) -> tuple[str, int]:
        return "out_proj", self.inner

    def wholes(self, hidden: int) -> dict[str, Whole]:
        """What each head has of its own stays fp32: decays are exponentials of it."""
        own = {"A_log": "a_log_H", "dt_bias": "step_bias_H", "D": "skip_H"}
        found = {name: Whole(param, (self.heads,), torch.float32) for name, param in own.items()}
        found["conv1d.weight"] = Whole("conv_C1K", (self.convolved, 1, self.width))
        if self.conv_bias:
            found["conv1d.bias"] = Whole("conv_bias_C", (self.convolved,))
        if self.norm != "none":
            found["norm.weight"] = Whole("norm_I", (self.inner,))
        return found

    def state(self, hidden: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        return (
            StateTensor("inputs", (self.width - 1, self.convolved), dtype),
            StateTensor("state", (self.heads, self.head_dim, self.state_size), torch.float32),
        )

    def workspace(self, hidden: int, dtype: torch.dtype) -> int:
        """Inputs that are scaled are a copy."""
        return 0 if self.scales is None else sum(self.inputs(hidden).values()) * dtype.itemsize


def read_mamba2(config: dict[str, Any], **own: Any) -> Mamba2Spec:
    """From the fields that Bamba, Falcon-H1 and Granite share; `own` are a family's."""
    heads, inner = fields.integer(config, "mamba_n_heads"), config.get("mamba_d_ssm")
    inner = inner or int(config.get("mamba_expand", 2) * fields.integer(config, "hidden_size"))
    head_dim = config.get("mamba_d_head", "auto")
    head_dim = inner // heads if head_dim == "auto" else head_dim
    groups = config.get("mamba_n_groups", 1)
    if heads * head_dim != inner:
        raise InvalidRequest(field="mamba_d_head", expected=f"{inner} numbers over {heads} heads", actual=head_dim)
    check_groups("mamba_n_groups", groups, heads)
    low, high = read_limits(config.get("time_step_limit"))
    common: dict[str, Any] = dict(
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_size=fields.integer(config, "mamba_d_state"),
        width=fields.integer(config, "mamba_d_conv"),
        eps=float(config.get("rms_norm_eps", 1e-5)),
        bias=bool(config.get("mamba_proj_bias", False)),
        conv_bias=bool(config.get("mamba_conv_bias", True)),
        low=low,
        high=high,
    )
    return Mamba2Spec(**(common | own))


def check_groups(field: str, groups: Any, heads: int) -> None:
    if not isinstance(groups, int) or groups < 1 or heads % groups:
        raise InvalidRequest(field=field, expected=f"a divisor of {heads} heads", actual=groups)


def read_limits(given: Any) -> tuple[float, float]:
    """Two numbers; infinity is written as such or, by newer files, as a named float."""
    if given is None:
        return 0.0, float("inf")
    low, high = (float(each["__float__"] if isinstance(each, dict) else each) for each in given)
    return low, high
