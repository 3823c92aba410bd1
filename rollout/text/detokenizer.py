"""From ids to text as they come.

Owns the rule for characters that span tokens. Ignores stop strings.

The rule: text grows by whole characters. A character whose bytes are not all there yet is not
shown, and where a sample ends within one its text ends before it (the ids are untouched). Bytes
that can never become a character give U+FFFD, as everywhere in UTF-8 decoding.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout.text.codec import TextCodec


class IncrementalDetokenizer:
    """One sample's text. The deltas, joined, are `TextCodec.decode` of all ids."""

    def __init__(self, codec: TextCodec) -> None:
        self._stream = codec.byte_stream()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The characters that these ids complete."""
        push = self._stream.push
        return self._decoder.decode(b"".join([push(int(token)) for token in ids]))


def decode_whole_characters(data: bytes | bytearray) -> str:
    """Text of `data` by the rule above."""
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data)
