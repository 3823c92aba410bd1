"""Conversations from files and data sets, as dialogues whose assistant turns are to be written anew.

Owns the formats, the readers and their errors, which name file, line and field. Local JSONL is read here,
line by line; Parquet files and hub names go through `datasets`. Given assistant turns are kept apart: the
target answers for itself. Ignores templates and tokens.

A record holds one of `messages` [{role, content}], `conversations` [{from, value}] (ShareGPT), `turns`
[text, ...] (user turns) or `prompt` (text); optionally `domain`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.errors import InvalidRequest
from trainer_bridge.drafter.responses import Dialogue
from trainer_bridge.environment import Message

_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
FORMATS = ("messages", "conversations", "turns", "prompt")


def read_conversations(source: str, domain: str | None = None, limit: int | None = None) -> list[Dialogue]:
    """At most `limit` dialogues of a .jsonl file, a .parquet file or a data set `name[:split]`. Their domain is
    the record's own, or `domain`, or the source's name. Raises `InvalidRequest`."""
    name = Path(source).stem if Path(source).suffix else source.split("/")[-1]
    dialogues = []
    for number, (place, record) in enumerate(_records(source)):
        if limit is not None and number >= limit:
            break
        dialogues.append(to_dialogue(record, place, f"{name}-{number}", domain or name))
    if not dialogues:
        raise InvalidRequest(field=source, expected="at least one conversation", actual="none")
    return dialogues


def to_dialogue(record: Any, place: str, key: str, domain: str) -> Dialogue:
    """`place` is what errors name."""
    if not isinstance(record, Mapping):
        raise InvalidRequest(field=place, expected="an object", actual=record)
    given = [field for field in FORMATS if record.get(field) is not None]
    if len(given) != 1:
        raise InvalidRequest(field=place, expected=f"one of {list(FORMATS)}", actual=sorted(map(str, record)))
    messages = _messages(record[given[0]], f"{place} {given[0]}")
    said = [message for message in messages if message.role != "assistant"]
    system = [message for message in said if message.role == "system"]
    users = [message for message in said if message.role == "user"]
    if not users:
        raise InvalidRequest(field=f"{place} {given[0]}", expected="a user turn", actual=len(messages))
    if system and (len(system) > 1 or said[0].role != "system"):
        raise InvalidRequest(field=f"{place} {given[0]}", expected="one system message, in front", actual=len(system))
    if not isinstance(own := record.get("domain", domain), str) or not own:
        raise InvalidRequest(field=f"{place} domain", expected="a text", actual=own)
    return Dialogue(key, own, (*system, users[0]), tuple(users[1:]), _given(messages))


def _given(messages: list[Message]) -> tuple[str, ...]:
    """Answers to the first user turn, the second, and so on, as far as each has one right behind it."""
    given = []
    for place, message in enumerate(messages):
        if message.role == "user":
            if place + 1 == len(messages) or messages[place + 1].role != "assistant":
                break
            given.append(messages[place + 1].content)
    return tuple(given)


def _messages(value: Any, place: str) -> list[Message]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, (list, tuple)) or not value:
        raise InvalidRequest(field=place, expected="turns", actual=value)
    return [_message(turn, f"{place}[{number}]") for number, turn in enumerate(value)]


def _message(turn: Any, place: str) -> Message:
    if isinstance(turn, str):
        role, text = "user", turn
    elif isinstance(turn, Mapping):
        role, text = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    else:
        raise InvalidRequest(field=place, expected="a text or an object", actual=turn)
    if role not in _ROLES:
        raise InvalidRequest(field=f"{place}.role", expected=f"one of {sorted(_ROLES)}", actual=role)
    if not isinstance(text, str) or not text.strip():
        raise InvalidRequest(field=f"{place}.content", expected="a text that says something", actual=text)
    return Message(_ROLES[role], text)


def _records(source: str) -> Iterator[tuple[str, Any]]:
    """(place, record) of everything in a source."""
    path = Path(source)
    if path.suffix in (".jsonl", ".parquet") and not path.is_file():
        raise InvalidRequest(field=source, expected="an existing file", actual="no such file")
    if path.suffix == ".jsonl":
        yield from _lines(path)
        return
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise InvalidRequest(field=source, expected="the package datasets, to read it", actual=error) from error
    try:
        if path.suffix == ".parquet":
            rows = load_dataset("parquet", data_files=str(path), split="train")
        else:
            name, _, split = source.partition(":")
            rows = load_dataset(name, split=split or "train", streaming=True)
    except Exception as error:  # the library raises a dozen kinds, its own and its file systems'
        raise InvalidRequest(field=source, expected="a data set that can be read", actual=error) from error
    for number, row in enumerate(rows):
        yield f"{source} row {number}", row


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield f"{path}:{number}", json.loads(line)
            except ValueError as error:
                raise InvalidRequest(field=f"{path}:{number}", expected="one JSON object", actual=error) from error
