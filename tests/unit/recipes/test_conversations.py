"""Conversations from files, and the sets that need no network."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from engine.errors import InvalidRequest
from recipes.conversations import read_conversations, to_dialogue
from recipes.prompt_sets import SETS, prompt_set, whole_objects

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]


def write(path, *records):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    return str(path)


def test_all_formats_say_the_same():
    shared = [
        {"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]), "value": m["content"]} for m in CHAT
    ]
    one = to_dialogue({"messages": CHAT}, "p", "k", "d")
    assert one == to_dialogue({"conversations": shared}, "p", "k", "d")
    assert [m.content for m in one.opening] == ["Be brief.", "Hi"] and [m.content for m in one.following] == ["Bye"]
    assert to_dialogue({"turns": ["Hi", "Bye"]}, "p", "k", "d").following == one.following
    assert one.given == ("Hello",) and to_dialogue({"messages": CHAT[1::2]}, "p", "k", "d").given == ()
    assert to_dialogue({"prompt": "Hi", "domain": "own"}, "p", "k", "d").domain == "own"


def test_files_of_both_kinds_are_read_and_keys_differ(tmp_path):
    records = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}]
    lines = read_conversations(write(tmp_path / "asked.jsonl", *records))
    table = pyarrow.Table.from_pylist(records)
    pyarrow.parquet.write_table(table, tmp_path / "asked.parquet")
    assert read_conversations(str(tmp_path / "asked.parquet")) == lines
    assert len({d.key for d in lines}) == 3 and lines[0].domain == "asked"
    assert len(read_conversations(str(tmp_path / "asked.jsonl"), limit=2)) == 2


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ("{not json", "JSON"),
        ("[1]", "an object"),
        ({"text": "x"}, "messages"),
        ({"prompt": "x", "turns": ["y"]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, r"messages\[0\]\.role"),
        ({"messages": [{"role": "user", "content": "  "}]}, r"messages\[0\]\.content"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "a user turn"),
        ({"messages": [*CHAT, CHAT[0]]}, "system"),
        ({"turns": [3]}, r"turns\[0\]"),
        ({"prompt": "x", "domain": 3}, "domain"),
    ],
)
def test_a_bad_record_is_named_by_file_line_and_field(tmp_path, record, named):
    source = write(tmp_path / "asked.jsonl", {"prompt": "fine"}, "", record)
    with pytest.raises(InvalidRequest, match=rf"asked\.jsonl:3.*{named}"):
        read_conversations(source)


def test_sources_that_are_not_there_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for source in (str(tmp_path / "none.jsonl"), str(tmp_path / "none.parquet"), str(tmp_path / "no" / "dataset")):
        with pytest.raises(InvalidRequest, match=r"none|no"):
            read_conversations(source)
    with pytest.raises(InvalidRequest, match="at least one"):
        read_conversations(write(tmp_path / "empty.jsonl"))


@pytest.mark.parametrize("name", ["math", "chat", "poetry"])
def test_sets_are_seeded_distinct_and_grow_at_the_end(name):
    few, many = prompt_set(name, 20, 0), prompt_set(name, 60, 0)
    assert many[:20] == few and len({d.key for d in many}) == len({d.opening[0].content for d in many}) == 60
    assert all(d.domain == name for d in many)
    assert prompt_set(name, 20, 1) != few


def test_a_set_that_does_not_exist_or_is_not_installed_is_refused_by_name(monkeypatch):
    with pytest.raises(InvalidRequest, match="prompts"):
        prompt_set("sonnets", 1, 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in sorted(set(SETS) - {"chat", "poetry"}):
        with pytest.raises(InvalidRequest, match="package"):
            prompt_set(name, 1, 0)


def test_an_array_that_is_cut_off_yields_what_is_whole(tmp_path):
    whole = [{"id": i, "text": "[{" * i} for i in range(40)]
    text = json.dumps(whole, indent=1)
    (tmp_path / "cut.json").write_text(text[: text.index('"id": 37') + 9])
    assert list(whole_objects(tmp_path / "cut.json", portion=50)) == whole[:37]
