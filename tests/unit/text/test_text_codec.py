"""Encoding, chat and decoding of whole texts and of texts as they come."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from engine.errors import InvalidRequest, Unsupported
from rollout.protocol import ChatMessage
from rollout.text import IncrementalDetokenizer, TextCodec
from rollout.text.token_bytes import TableStream
from tests.unit.text.tiny_tokenizers import (
    a_b_ab,
    byte_level,
    characters,
    codec_of,
    metaspace,
    sentencepiece_like,
    word_pieces,
    words,
)

FAMILIES = {
    "byte_level": (byte_level, "naïve 🙂 text\0 with  spaces\n", True),
    "sentencepiece": (sentencepiece_like, "ab  a é 🙂ab", True),
    "characters": (characters, "12+7=19? é🙂", True),
    "words": (words, "one two three", False),
    "word_pieces": (word_pieces, "he played playing .", False),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    build, text, table = FAMILIES[request.param]
    return codec_of(build(), tmp_path_factory.mktemp(request.param)), build(), text, table


def test_ids_and_text_agree_with_the_tokenizer(family) -> None:
    codec, tokenizer, text, table = family
    ids = codec.encode(text)
    assert ids.dtype == np.uint32 and ids.tolist() == tokenizer.encode(text).ids
    assert codec.decode(ids) == tokenizer.decode(ids.tolist())
    assert isinstance(codec.byte_stream(), TableStream) is table
    if table:
        assert codec.decode(ids) == text


def test_deltas_join_to_the_whole_text_for_any_ids(family) -> None:
    codec, tokenizer, _, _ = family
    rng = random.Random(5)
    for _ in range(50):
        ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randrange(20))]
        one, blocks = IncrementalDetokenizer(codec), IncrementalDetokenizer(codec)
        singly = [one.push([token]) for token in ids]
        cut = rng.randrange(len(ids) + 1)
        assert "".join(singly) == blocks.push(ids[:cut]) + blocks.push(ids[cut:]) == codec.decode(ids)


def test_metaspace_drops_one_leading_space(tmp_path: Path) -> None:
    codec, tokenizer = codec_of(metaspace(), tmp_path), metaspace()
    for ids in ([2, 3, 1, 4], [3, 2], [1, 2], [1, 1, 4]):
        assert codec.decode(ids) == tokenizer.decode(ids)


def test_special_and_unknown_ids_add_nothing(tmp_path: Path) -> None:
    codec = codec_of(byte_level(), tmp_path)
    assert codec.decode([65, 256, 66, 99999]) == "AB"
    assert codec.encode("A<|end|>").tolist() == [65, 256]


@pytest.mark.parametrize("size", [1, 4])
def test_case_d7_characters_that_span_tokens(tmp_path: Path, size: int) -> None:
    codec = codec_of(byte_level(), tmp_path)
    ids = [0xF0, 0x9F, 0x99, 0x82, 0x41]
    detokenizer = IncrementalDetokenizer(codec)
    deltas = [detokenizer.push(ids[start : start + size]) for start in range(0, len(ids), size)]
    assert "".join(deltas) == codec.decode(ids) == "🙂A"
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(deltas)


def test_case_d7_a_cut_character_is_not_shown(tmp_path: Path) -> None:
    codec = codec_of(byte_level(), tmp_path)
    assert codec.decode([0x41, 0xF0, 0x9F]) == "A"
    assert codec.decode([0xF0, 0x9F, 0x41]) == "\N{REPLACEMENT CHARACTER}A"
    assert codec.decode([0x99]) == "\N{REPLACEMENT CHARACTER}"
    sentencepiece = codec_of(sentencepiece_like(), tmp_path / "sp")
    assert sentencepiece.decode([1 + byte for byte in "🙂".encode()] + [1 + 0xF0]) == "🙂"


def test_case_d8_ids_are_never_spelt_anew(tmp_path: Path) -> None:
    codec = codec_of(a_b_ab(), tmp_path)
    assert codec.decode([1, 2, 1, 2]) == "abab"
    assert codec.encode("abab").tolist() == [3, 3]


SURROGATES = ["\ud83d", "a\udc97b", json.loads('"\\ud83d"')]


@pytest.mark.parametrize("text", SURROGATES)
def test_case_h8_lone_surrogates_are_refused_by_name(tmp_path: Path, text: str) -> None:
    codec = templated(tmp_path)
    with pytest.raises(InvalidRequest) as error:
        codec.encode(text, field="text")
    assert error.value.field == "text" and str(error.value).isascii()
    with pytest.raises(InvalidRequest) as error:
        codec.apply_chat([ChatMessage(role="user", content="x"), ChatMessage(role="user", content=text)])
    assert error.value.field == "messages[1].content"
    with pytest.raises(InvalidRequest) as error:
        codec.apply_chat([{"role": text, "content": "x"}])
    assert error.value.field == "messages[0].role"


@pytest.mark.parametrize("text", [json.loads('"\\ud83c\\udf78"'), "a\0b", "e" + "\u0301" * 100_000])
def test_case_h8_odd_but_whole_texts_pass(tmp_path: Path, text: str) -> None:
    codec = codec_of(byte_level(), tmp_path)
    ids = codec.encode(text)
    assert ids.tolist() == list(text.encode())
    assert codec.decode(ids) == text


def templated(folder: Path, template: str | None = None) -> TextCodec:
    tokenizer = byte_level()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (folder / "chat_template.jinja").write_text(
        template
        or "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return TextCodec(folder)


def test_chat_is_rendered_by_the_models_template(tmp_path: Path) -> None:
    codec = templated(tmp_path)
    expected = [*b"user: hi", 256, *b"assistant: "]
    assert codec.has_chat_template and codec.eos_id == 256 and codec.vocab_size == 257
    assert codec.apply_chat([ChatMessage(role="user", content="hi")]).tolist() == expected
    assert codec.apply_chat([{"role": "user", "content": "hi"}]).tolist() == expected
    assert codec.apply_chat([{"role": "user", "content": "hi"}], add_generation_prompt=False).tolist() == expected[:9]


def test_chat_faults_are_typed(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="chat template"):
        codec_of(byte_level(), tmp_path / "plain").apply_chat([ChatMessage(role="user", content="hi")])
    codec = templated(tmp_path / "raising", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        codec.apply_chat([ChatMessage(role="user", content="hi")])
    with pytest.raises(InvalidRequest, match="at least one"):
        codec.apply_chat([])
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(InvalidRequest):
        templated(tmp_path / "escape", escape).apply_chat([ChatMessage(role="user", content="hi")])


def test_folders_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
        TextCodec(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="tokenizer"):
        TextCodec(tmp_path)
