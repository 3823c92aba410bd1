"""What recipes must know of a tokenizer beside its text."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase


def mask_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Id that fills a drafter's block, and no conversation contains: the tokenizer's own mask, else its token for
    unknown text, else the last id that ends nothing."""
    for candidate in (tokenizer.mask_token_id, tokenizer.unk_token_id):
        if isinstance(candidate, int) and candidate != tokenizer.eos_token_id:
            return candidate
    last = len(tokenizer) - 1
    return last - (last == tokenizer.eos_token_id)
