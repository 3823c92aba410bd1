"""The bytes that each token adds to a text.

Owns reading a tokenizer's decoder as a table from ids to bytes, and the slower stream for
decoders that are no such table. Ignores characters: a token may hold part of one.

Special tokens add nothing. The byte view is exact for byte-level tokenizers and for those of
SentencePiece with byte fallback, where decoding token by token is not.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 8
"""Tokens of context a decoder without a table may look back on."""


@dataclass(frozen=True, slots=True)
class ByteTable:
    """`pieces[id]` is what the token adds; the first `strip` spaces of a whole text are dropped."""

    pieces: list[bytes]
    strip: int


@dataclass(frozen=True, slots=True)
class _Rules:
    byte_level: bool = False
    byte_fallback: bool = False
    replace: tuple[tuple[str, str], ...] = ()
    strip: int = 0


class TableStream:
    """One text's bytes, token by token, from a table."""

    def __init__(self, table: ByteTable) -> None:
        self._pieces = table.pieces
        self._strip = table.strip

    def push(self, token: int) -> bytes:
        piece = self._pieces[token] if 0 <= token < len(self._pieces) else b""
        if self._strip and piece:
            kept = piece.lstrip(b" ")
            dropped = min(self._strip, len(piece) - len(kept))
            self._strip = 0 if kept else self._strip - dropped
            return piece[dropped:]
        return piece


class DecodingStream:
    """One text's bytes from a tokenizer whose decoder joins tokens in its own way.

    Decodes a short window with and without the new tokens; what is new is their difference. A
    piece that ends within a character is held back until the character is whole.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._known = 0
        """Tokens of the window whose text has been given."""

    def push(self, token: int) -> bytes:
        self._window.append(token)
        before = self._tokenizer.decode(self._window[: self._known])
        after = self._tokenizer.decode(self._window)
        if after.endswith(_REPLACEMENT):
            return b""
        self._window = self._window[max(0, self._known - _CONTEXT) :]
        self._known = len(self._window)
        return after[len(before) :].encode()


def read_byte_table(tokenizer: Tokenizer) -> ByteTable | None:
    """The tokenizer's decoder as a table, or None where it is none."""
    rules = _read_rules(json.loads(tokenizer.to_str()).get("decoder"))
    if rules is None:
        return None
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    pieces = [b""] * (max(vocab.values(), default=-1) + 1)
    alphabet = _byte_alphabet()
    for text, token in vocab.items():
        if token not in special:
            pieces[token] = _piece(text, rules, alphabet)
    return ByteTable(pieces, rules.strip)


def _piece(text: str, rules: _Rules, alphabet: dict[str, int]) -> bytes:
    if rules.byte_level:
        values = [alphabet.get(character) for character in text]
        return text.encode() if None in values else bytes(value for value in values if value is not None)
    for old, new in rules.replace:
        text = text.replace(old, new)
    match = _BYTE_TOKEN.fullmatch(text) if rules.byte_fallback else None
    return bytes([int(match[1], 16)]) if match else text.encode()


def _read_rules(decoder: dict[str, Any] | None) -> _Rules | None:
    """What a decoder's JSON does to each token, if it treats tokens apart and then joins them."""
    match decoder:
        case {"type": "ByteLevel"}:
            return _Rules(byte_level=True)
        case {"type": "Fuse"}:
            return _Rules()
        case {"type": "Metaspace", "replacement": str(mark)}:
            return _Rules(replace=((mark, " "),), strip=0 if decoder.get("prepend_scheme") == "never" else 1)
        case {"type": "Sequence", "decoders": [*steps]}:
            return _read_sequence(steps)
    return None


def _read_sequence(steps: list[Any]) -> _Rules | None:
    if len(steps) == 1:
        return _read_rules(steps[0])
    replace: list[tuple[str, str]] = []
    byte_fallback = fused = False
    strip = 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not (
                fused or byte_fallback
            ):
                replace.append((old, new))
            case {"type": "ByteFallback"} if not fused:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                strip = start
            case _:
                return None
    return _Rules(byte_fallback=byte_fallback, replace=tuple(replace), strip=strip) if fused else None


def _byte_alphabet() -> dict[str, int]:
    """The printable characters that byte-level vocabularies write bytes with.

    Printable Latin-1 stands for itself, the other bytes for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in set(printable)]
    return {chr(value): value for value in printable} | {chr(256 + i): value for i, value in enumerate(others)}
