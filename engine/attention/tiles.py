"""One attention product, with what it takes to merge it with others over more keys.

Owns softmax(q k' / sqrt(H) + mask) v and its log-sum-exp. Ignores pages, rows and lanes.

Shapes: B tiles, K heads, Q queries, S keys, H head size.
"""

from __future__ import annotations

import torch

_CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend(
    q_BKQH: torch.Tensor,
    k_BKSH: torch.Tensor,
    v_BKSH: torch.Tensor,
    mask_BKQS: torch.Tensor | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out_BKQH in q's dtype and lse_BKQ in fp32.

    `mask` is added to the scores, broadcasts, and has q's dtype. `causal` needs Q = S. Keys that
    are masked for every query must still be finite.
    """
    if q_BKQH.device.type == "cpu":
        out, lse = _CPU_FLASH(q_BKQH, k_BKSH, v_BKSH, is_causal=causal, attn_mask=mask_BKQS)
        return out, lse
    scores = q_BKQH.float() @ k_BKSH.float().transpose(-1, -2) * q_BKQH.shape[-1] ** -0.5
    if mask_BKQS is not None:
        scores = scores + mask_BKQS
    if causal:
        scores = scores + causal_mask(q_BKQH.shape[2], q_BKQH.shape[2], torch.float32, q_BKQH.device)
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.exp(scores - lse.unsqueeze(-1)) @ v_BKSH.float()
    return out.to(q_BKQH.dtype), lse


def causal_mask(queries: int, context: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[queries, context], 0 where the last `queries` positions of a context may look, else -inf."""
    mask = torch.full((queries, context), float("-inf"), dtype=dtype, device=device)
    return mask.triu_(context - queries + 1)


def merge(
    out_TNH: torch.Tensor, lse_TN: torch.Tensor, other_TNH: torch.Tensor, other_lse_TN: torch.Tensor
) -> torch.Tensor:
    """Attention over both sets of keys, from attention over each; an `other_lse` of -inf is no keys."""
    share_TN1 = torch.sigmoid(other_lse_TN - lse_TN).unsqueeze(-1)
    return torch.lerp(out_TNH.float(), other_TNH.float(), share_TN1).to(out_TNH.dtype)
