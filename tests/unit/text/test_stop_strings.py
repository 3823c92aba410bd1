"""Stop strings: the same answer for every way the ids arrive."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from rollout.text import StopStringWatcher, TextCodec
from tests.unit.text.tiny_tokenizers import byte_level, codec_of, sentencepiece_like, words

PX, STOP_AND_MORE = 256, 257


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return codec_of(byte_level(extra=("Px", "xSTOPyEND")), tmp_path_factory.mktemp("bytes"))


def run(
    codec: TextCodec, ids: list[int], stops: list[str], size: int, keep_stop: bool = False, min_new: int = 0
) -> tuple[list[int], str | None, str]:
    watcher = StopStringWatcher(codec, stops, keep_stop, min_new)
    kept: list[int] = []
    for start in range(0, len(ids), size):
        block = ids[start : start + size]
        answer = watcher.observe(block)
        if answer is not None:
            return kept + block[: answer[0]], answer[1], watcher.final_text()
        kept += block
    return kept, None, watcher.final_text()


@pytest.mark.parametrize("size", [1, 2, 8, 100])
@pytest.mark.parametrize("keep_stop", [False, True])
def test_case_d1_ids_end_with_the_completing_token(codec: TextCodec, size: int, keep_stop: bool) -> None:
    text = "abSTOP" if keep_stop else "ab"
    assert run(codec, list(b"abSTOPxyz"), ["STOP"], size, keep_stop) == (list(b"abSTOP"), "STOP", text)
    straddling = [*b"abSTO", PX, *b"yz"]
    assert run(codec, straddling, ["STOP"], size, keep_stop) == (straddling[:6], "STOP", text)
    inside = [97, STOP_AND_MORE, 98]
    assert run(codec, inside, ["END", "STOP"], size, keep_stop) == (inside[:2], "STOP", "axSTOP" if keep_stop else "ax")


@pytest.mark.parametrize("size", [1, 3, 100])
def test_without_a_match_the_text_is_whole(codec: TextCodec, size: int) -> None:
    assert run(codec, list(b"abSTO"), ["STOP"], size) == (list(b"abSTO"), None, "abSTO")
    assert run(codec, [*b"ab", 0xF0, 0x9F], ["STOP"], size) == ([*b"ab", 0xF0, 0x9F], None, "ab")
    assert run(codec, list(b"ab"), [], size) == (list(b"ab"), None, "ab")
    assert run(codec, [], ["x"], size) == ([], None, "")


@pytest.mark.parametrize("size", [1, 4, 100])
def test_case_d7_an_emoji_across_tokens_stops(codec: TextCodec, size: int) -> None:
    ids = [*b"hi", 0xF0, 0x9F, 0x99, 0x82, 0x41]
    assert run(codec, ids, ["🙂"], size) == (ids[:6], "🙂", "hi")
    assert run(codec, ids, ["🙂"], size, keep_stop=True) == (ids[:6], "🙂", "hi🙂")
    broken = [0xF0, 0x9F, *b"STOP"]
    assert run(codec, broken, ["STOP"], size) == (broken, "STOP", "\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize("size", [1, 5, 100])
def test_the_first_completion_wins_and_the_longest_of_equals(codec: TextCodec, size: int) -> None:
    assert run(codec, list(b"abcdef"), ["bcde", "cd"], size)[1:] == ("cd", "ab")
    assert run(codec, list(b"abcdef"), ["cd", "abcd", "bcd"], size)[1:] == ("abcd", "")
    assert run(codec, list(b"aaab"), ["aab"], size)[1:] == ("aab", "a")


@pytest.mark.parametrize("size", [1, 3, 100])
def test_matches_before_min_new_are_text(codec: TextCodec, size: int) -> None:
    ids = list(b"SSxSS")
    assert run(codec, ids, ["SS"], size, min_new=2) == (ids[:2], "SS", "")
    assert run(codec, ids, ["SS"], size, min_new=3) == (ids, "SS", "SSx")
    assert run(codec, ids, ["SS"], size, min_new=6) == (ids, None, "SSxSS")
    assert run(codec, list(b"SSS"), ["SS"], size, min_new=3) == (list(b"SSS"), "SS", "S")


def test_special_tokens_are_no_text(codec: TextCodec) -> None:
    end = 258
    assert run(codec, [97, end, 98, 99], ["<|end|>"], 1)[1:] == (None, "abc")
    assert run(codec, [97, end, 98, 99], ["ab"], 1) == ([97, end, 98], "ab", "")


def test_a_resumed_sample_matches_across_the_seam(codec: TextCodec) -> None:
    watcher = StopStringWatcher(codec, ["STOP"], min_new=5)
    watcher.prime(list(b"STOPST"))
    assert watcher.observe(list(b"OPxx")) == (2, "STOP")
    assert watcher.final_text() == "STOP"


@pytest.mark.parametrize("build", [sentencepiece_like, words])
def test_other_tokenizers_stop_on_their_text(tmp_path: Path, build) -> None:
    codec = codec_of(build(), tmp_path)
    text, stop = ("ab a ab", "a a") if build is sentencepiece_like else ("one two three one", "o thr")
    ids = codec.encode(text).tolist()
    answers = {
        (tuple(kept), matched, shown) for kept, matched, shown in (run(codec, ids, [stop], n) for n in (1, 2, 9))
    }
    ((kept, matched, shown),) = answers
    assert matched == stop and shown == text[: text.index(stop)] and len(kept) < len(ids)


@pytest.mark.parametrize("stop", ["\ud83d", "a\udc97b"])
def test_case_h8_lone_surrogates_in_a_stop_are_refused(codec: TextCodec, stop: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        StopStringWatcher(codec, ["fine", stop])
    assert error.value.field == "stop[1]" and str(error.value).isascii()


@pytest.mark.parametrize("stops", [[""], ["x" * 4097], ["x"] * 65])
def test_stops_that_cannot_be_are_refused(codec: TextCodec, stops: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="stop"):
        StopStringWatcher(codec, stops)


def reference(codec: TextCodec, ids: list[int], stops: list[str], min_new: int) -> tuple[int, str, int] | None:
    """(ids kept, matched, bytes before the match), by looking at every prefix from scratch."""
    pieces = [{PX: b"Px", STOP_AND_MORE: b"xSTOPyEND"}.get(token, bytes([token % 256])) for token in ids]
    for count in range(max(1, min_new), len(ids) + 1):
        before, data = b"".join(pieces[: count - 1]), b"".join(pieces[:count])
        ends = [
            (end, end - len(stop.encode()), stop)
            for end in range(len(before) + 1, len(data) + 1)
            for stop in stops
            if data[:end].endswith(stop.encode())
        ]
        if ends:
            _, start, stop = min(ends)
            return count, stop, start
    return None


TOKENS = st.sampled_from([97, 98, 0xC3, 0xA9, PX, STOP_AND_MORE, ord("S"), ord("T"), ord("O"), ord("P")])


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(TOKENS, max_size=24),
    stops=st.lists(st.text("abSTOPxéy", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    min_new=st.integers(0, 10),
    size=st.integers(1, 9),
)
def test_any_blocks_give_the_answer_of_the_definition(
    codec: TextCodec, ids: list[int], stops: list[str], min_new: int, size: int
) -> None:
    kept, matched, text = run(codec, ids, stops, size, min_new=min_new)
    expected = reference(codec, ids, stops, min_new)
    if expected is None:
        assert (kept, matched, text) == (ids, None, codec.decode(ids))
        return
    count, stop, start = expected
    data = b"".join({PX: b"Px", STOP_AND_MORE: b"xSTOPyEND"}.get(token, bytes([token % 256])) for token in ids)
    assert (kept, matched, text) == (ids[:count], stop, data[:start].decode(errors="replace"))
