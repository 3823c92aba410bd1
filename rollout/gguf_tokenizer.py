"""The tokenizer inside a GGUF file as a Hugging Face one.

Owns both kinds that presets have: byte-level pairs, and SentencePiece's pairs with byte fallback.
Ignores weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.decoders import Sequence as Decoders
from tokenizers.models import BPE
from tokenizers.normalizers import Replace as ReplaceBefore
from tokenizers.pre_tokenizers import ByteLevel, Digits
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from engine.errors import Unsupported

SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "▁"


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Tokenizer files and chat template. Raises `Unsupported` for other kinds of tokenizer."""
    makers = {"gpt2": _byte_level, "llama": _sentence_pieces}
    kind = fields["tokenizer.ggml.model"]
    if kind not in makers:
        raise Unsupported(field="tokenizer.ggml.model", expected=f"one of {sorted(makers)}", actual=kind)
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    tokenizer = makers[kind](fields)
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [AddedToken(tokens[i], special=special, normalized=False) for i, k in enumerate(kinds) if k == kind]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    ids = {key: fields.get(f"tokenizer.ggml.{name}_token_id") for key, name in SPECIAL.items()}
    bos = ids["bos_token"]
    if fields.get("tokenizer.ggml.add_bos_token") and bos is not None:
        tokenizer.post_processor = TemplateProcessing(single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        **{key: tokens[index] for key, index in ids.items() if index is not None},
    )
    wrapped.chat_template = fields.get("tokenizer.chat_template")
    wrapped.save_pretrained(folder)


def _byte_level(fields: dict[str, Any]) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    single_digits = [Digits(individual_digits=True)] if fields.get("tokenizer.ggml.pre") == "smollm" else []
    tokenizer.pre_tokenizer = PreTokenizers([*single_digits, ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer


def _sentence_pieces(fields: dict[str, Any]) -> Tokenizer:
    """Spaces are letters of the pieces, and what no piece spells is spelled in bytes."""
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        raise Unsupported(field="tokenizer.ggml.add_space_prefix", expected="false", actual=True)
    tokens, unknown = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.unknown_token_id"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = BPE(vocab=vocabulary, merges=_merges(fields), unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = ReplaceBefore(" ", _SPACE)
    tokenizer.decoder = Decoders([Replace(_SPACE, " "), ByteFallback(), Fuse()])
    return tokenizer


def _merges(fields: dict[str, Any]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, the pieces with the best scores first: SentencePiece
    joins whichever neighbours make the best-scored piece."""
    tokens, scores = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"]
    kinds = fields["tokenizer.ggml.token_type"]
    known = {token for token, kind in zip(tokens, kinds, strict=True) if kind == _NORMAL}
    merges = []
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        if kind == _NORMAL:
            cuts = range(1, len(token))
            merges += [(-score, token[:i], token[i:]) for i in cuts if token[:i] in known and token[i:] in known]
    merges.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in merges]
