"""A depthwise causal convolution with silu behind it, in torch: the reference of `engine.kernels.causal_conv`.

Shapes: T tokens of R rows back to back, I columns of a product, C channels, K the convolution's width, S slots, L
a row's tokens.
"""

from __future__ import annotations

import torch

from engine.layers.pointwise import silu


def causal_conv_reference(
    x_TI: torch.Tensor,
    columns_C: torch.Tensor | None,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    state_SKC: torch.Tensor,
    slots_R: torch.Tensor,
    ends_R1: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `causal_conv_step` and, with `ends_R1`, `causal_conv`."""
    input_TC = x_TI if columns_C is None else x_TI.index_select(1, columns_C)
    taps = weight_CK.shape[1]
    if ends_R1 is None:
        window_RKC = torch.cat((state_SKC[slots_R], input_TC[:, None]), dim=1)
        state_SKC[slots_R] = window_RKC[:, 1:]
        return _sum(list(window_RKC.unbind(1)), weight_CK, bias_C).to(x_TI.dtype)
    out_TC = torch.empty_like(input_TC)
    for slot, start, end in zip(slots_R.tolist(), ends_R1[:-1].tolist(), ends_R1[1:].tolist(), strict=True):
        known_LC = torch.cat((state_SKC[slot], input_TC[start:end]))
        shifted = [known_LC[tap : tap + end - start] for tap in range(taps)]
        out_TC[start:end] = _sum(shifted, weight_CK, bias_C)
        state_SKC[slot] = known_LC[end - start :]
    return out_TC


def _sum(taps_LC: list[torch.Tensor], weight_CK: torch.Tensor, bias_C: torch.Tensor | None) -> torch.Tensor:
    weights_CK = weight_CK.float()
    total_LC = taps_LC[0] * weights_CK[:, 0]
    for tap, input_LC in enumerate(taps_LC[1:], 1):
        total_LC = torch.addcmul(total_LC, input_LC.float(), weights_CK[:, tap])
    return silu(total_LC if bias_C is None else total_LC + bias_C)
