"""Stop strings.

Owns finding the first completed stop string in a sample's text, and what remains of the text.
Ignores stop ids, lengths and log-probabilities: the engine cuts its columns by the answer.

The rule: a sample's ids end with the token that completes a match. Its text ends before the
match, or after it with `keep_stop`; what that token holds beyond the match is in neither. Of
several matches the one completed first counts, of those completed by the same byte the longest.
A match that completes before `min_new` tokens is text like any other. Matching is over UTF-8
bytes, so a stop string is found inside a token, across tokens and after broken characters alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from engine.errors import InvalidRequest
from rollout.text.detokenizer import decode_whole_characters
from rollout.text.validation import utf8

if TYPE_CHECKING:
    from rollout.text.codec import TextCodec

MAX_STOPS = 64
MAX_STOP_BYTES = 4096


class StopStringWatcher:
    """Watches one sample; implements the engine's `StopWatcher`.

    `stops` may be empty, which only collects text. `min_new` counts the ids of `prime` too.
    """

    def __init__(self, codec: TextCodec, stops: Sequence[str], keep_stop: bool = False, min_new: int = 0) -> None:
        self._stops = check_stops(stops)
        self._codec = codec
        self._stream = codec.byte_stream()
        self._keep_stop = keep_stop
        self._min_new = min_new
        self._seen = 0
        self._data = bytearray()
        self._end: int | None = None
        """Where the text ends once a stop string has matched."""

    def sibling(self) -> StopStringWatcher:
        """A watcher for another sample that shares the checked stops, however many there are."""
        other = StopStringWatcher(self._codec, (), self._keep_stop, self._min_new)
        other._stops = self._stops
        return other

    def prime(self, ids: Iterable[int]) -> None:
        """Take ids that a resumed sample already has: text to match across, never a stop."""
        for token in ids:
            self._data += self._stream.push(int(token))
            self._seen += 1

    def observe(self, new_ids: list[int]) -> tuple[int, str] | None:
        """(How many of `new_ids` to keep, what matched), or None to go on."""
        assert self._end is None, "a matched sample takes no further ids"
        for count, token in enumerate(new_ids, 1):
            self._seen += 1
            piece = self._stream.push(int(token))
            if not piece:
                continue
            known = len(self._data)
            self._data += piece
            found = self._first_match(known) if self._seen >= self._min_new else None
            if found:
                start, end, stop = found
                self._end = end if self._keep_stop else start
                return count, stop
        return None

    def final_text(self) -> str:
        """Text of all ids so far, by the rules of stops and of cut characters."""
        if self._end is None:
            return decode_whole_characters(self._data)
        # Bytes that the match cut off can never become a character any more.
        return self._data[: self._end].decode(errors="replace")

    def _first_match(self, known: int) -> tuple[int, int, str] | None:
        """(start, end, stop) of the match completed first beyond `known` bytes."""
        best: tuple[int, int, str] | None = None
        for text, pattern in self._stops:
            start = self._data.find(pattern, max(0, known - len(pattern) + 1))
            end = start + len(pattern)
            if start >= 0 and (best is None or (end, start) < (best[1], best[0])):
                best = start, end, text
        return best


def check_stops(stops: Sequence[str], field: str = "stop") -> list[tuple[str, bytes]]:
    """Each stop string with its bytes; raises `InvalidRequest` naming the one at fault."""
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(field=field, expected=f"at most {MAX_STOPS} stop strings", actual=len(stops))
    checked = []
    for index, stop in enumerate(stops):
        data = utf8(stop, f"{field}[{index}]")
        if not 0 < len(data) <= MAX_STOP_BYTES:
            raise InvalidRequest(field=f"{field}[{index}]", expected=f"1 to {MAX_STOP_BYTES} bytes", actual=len(data))
        checked.append((stop, data))
    return checked
