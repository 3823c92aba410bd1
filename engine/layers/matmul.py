"""The product every linear layer uses.

Owns the choice of how x @ w.T is computed on a device. Ignores parameters and sharding.

On CPUs without bfloat16 instructions torch multiplies bfloat16 row by row. From a few rows on it is
several times faster to widen the weights a slab at a time, into a buffer that stays in the cache,
and to let the fp32 product do the work; the sums are fp32 either way.

Shapes: T tokens, D input features, O output features.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

SLAB_ELEMENTS = 192 * 576
MIN_WIDENED_ROWS = 3


@cache
def widens_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 faster by way of fp32."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is None or not supported()


def linear(x_TD: torch.Tensor, weight_OD: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """x @ w.T + b in the inputs' dtype, accumulated in fp32: y_TO."""
    if (
        x_TD.shape[0] >= MIN_WIDENED_ROWS
        and weight_OD.dtype is torch.bfloat16
        and weight_OD.device.type == "cpu"
        and not x_TD.requires_grad
        and widens_bfloat16()
    ):
        return _widened(x_TD, weight_OD, bias_O)
    return F.linear(x_TD, weight_OD, bias_O)


def _widened(x_TD: torch.Tensor, weight_OD: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    outputs, inputs = weight_OD.shape
    slab = max(16, SLAB_ELEMENTS // inputs)
    wide_TD = x_TD.float()
    y_TO = torch.empty(x_TD.shape[0], outputs)
    buffer = torch.empty(min(slab, outputs), inputs)
    for start in range(0, outputs, slab):
        end = min(outputs, start + slab)
        part = buffer[: end - start]
        part.copy_(weight_OD[start:end])
        torch.mm(wide_TD, part.t(), out=y_TO[:, start:end])
    if bias_O is not None:
        y_TO += bias_O
    return y_TO.to(x_TD.dtype)
