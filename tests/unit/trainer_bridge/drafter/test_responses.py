"""Answers the target writes, turn after turn, and the file they are kept in."""

import json
from dataclasses import replace

import numpy as np
import pytest

from engine import Engine
from engine.errors import InvalidRequest
from tests.unit.trainer_bridge.drafter.worlds import parts_of
from trainer_bridge.drafter.config import SamplingConfig
from trainer_bridge.drafter.examples import ExampleLog, keep_supervised, read_examples, stretches
from trainer_bridge.drafter.given import GivenAnswers
from trainer_bridge.drafter.responses import Dialogue, Responder, regenerate
from trainer_bridge.environment import Message

END = 7


class Codes:
    """A codec whose text is a list of ids; every message ends with 500."""

    def render(self, messages, *, first):
        asked = [message for message in messages if message.role == "user"]
        ids = [int(word) for message in asked for word in message.content.split()] + [500]
        begun = [int(word) for message in messages[len(asked) :] for word in message.content.split()]
        return [499, *ids, *begun] if first else ids + begun

    def decode(self, ids):
        return " ".join(map(str, ids))


def dialogue(key, *turns):
    opening, *following = (Message("user", turn) for turn in turns)
    return Dialogue(key, "numbers", (opening,), tuple(following))


def responder(world, **config):
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new": 6} | config
    return Responder(Engine(parts_of(world.folder)), Codes(), SamplingConfig(**settings), [END])


def test_every_answer_is_supervised_and_nothing_else(world):
    stops = [n for n in range(512) if n not in (499, 500)]
    speaker = responder(world)
    speaker._stop_ids = stops  # every answer ends by itself, after one token
    (got,) = speaker.respond([dialogue("a", "1 2", "3", "4 5")])
    ids, mask = got.ids.tolist(), got.mask.tolist()
    spans = stretches(got.mask)
    assert len(spans) == 3 and [end - start for start, end in spans] == [1, 1, 1]
    assert [i for i, on in zip(ids, mask, strict=True) if not on] == [499, 1, 2, 500, 3, 500, 4, 5, 500]
    assert got.key == "a/0" and got.domain == "numbers"


def test_given_answers_are_supervised_as_sampled_ones_are():
    answers = GivenAnswers(Codes(), END, max_new=4)
    talk = Dialogue("a", "numbers", (Message("user", "1 2"),), (Message("user", "3"),), ("8 9", "10 11 12 13 14"))
    got, cut = answers.respond(
        [talk, Dialogue("n", "d", (Message("user", "1"),)), replace(talk, given=("8 9 10 11 12",))]
    )
    assert got.ids[got.mask].tolist() == [8, 9, END, 10, 11, 12, 13] and len(stretches(got.mask)) == 2
    assert got.ids[~got.mask].tolist() == [499, 1, 2, 500, 3, 500]
    assert cut.ids.tolist() == [499, 1, 2, 500, 8, 9, 10, 11] and got.key == "a/0"


def test_an_answer_cut_by_its_length_ends_the_conversation(world):
    (got,) = responder(world, max_new=2).respond([dialogue("a", "1", "2")])
    assert len(stretches(got.mask)) == 1 or got.ids[got.mask][0] == END


def test_answers_depend_on_key_and_seed_alone(world):
    both = responder(world).respond([dialogue("a", "1 2"), dialogue("b", "1 2")])
    alone = responder(world).respond([dialogue("b", "1 2")])
    assert np.array_equal(both[1].ids, alone[0].ids) and not np.array_equal(both[0].ids, both[1].ids)
    other = responder(world, seed=1).respond([dialogue("b", "1 2")])
    assert not np.array_equal(other[0].ids, alone[0].ids)
    twins = responder(world, samples=2).respond([dialogue("b", "1 2")])
    assert [t.key for t in twins] == ["b/0", "b/1"] and not np.array_equal(twins[0].ids, twins[1].ids)


def test_some_conversations_are_answered_greedily(world):
    dialogues = [dialogue(str(i), f"{i} {i}", "3") for i in range(12)]  # greedy in every turn, or in none
    every, none, some = (responder(world, greedy=share).respond(dialogues) for share in (1.0, 0.0, 0.5))
    cold = responder(world, temperature=0.0).respond(dialogues)
    for one, other in zip(every, cold, strict=True):
        assert np.array_equal(one.ids, other.ids)
    kept = [np.array_equal(one.ids, other.ids) for one, other in zip(some, none, strict=True)]
    assert 0 < sum(kept) < 12
    for mixed, hot, greedy in zip(some, none, every, strict=True):
        assert any(np.array_equal(mixed.ids, other.ids) for other in (hot, greedy))


def test_a_prompt_that_leaves_no_room_is_passed_over(world):
    long = dialogue("long", " ".join(["3"] * 300))
    assert [e.key for e in responder(world).respond([long, dialogue("a", "1")])] == ["a/0"]


def test_regeneration_goes_on_where_it_was_stopped(world, tmp_path):
    dialogues = [dialogue(str(i), f"{i} {i}") for i in range(7)]
    whole = ExampleLog(tmp_path / "whole.jsonl")
    assert regenerate(responder(world), dialogues, whole, 3, lambda done, fresh: True)
    path = tmp_path / "parts.jsonl"
    assert not regenerate(responder(world), dialogues, ExampleLog(path), 3, lambda done, fresh: done < 3)
    assert len(list(read_examples(path))) == 3
    with path.open("a") as file:
        file.write('{"key": "torn')
    seen = []
    assert regenerate(responder(world), dialogues, ExampleLog(path), 2, lambda done, fresh: not seen.append(done))
    assert seen == [5, 7]
    for one, other in zip(read_examples(path), read_examples(whole.path), strict=True):
        assert one.key == other.key and np.array_equal(one.ids, other.ids) and np.array_equal(one.mask, other.mask)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"answers": [[0, 2]]}, "answers"),
        ({"answers": [[1, 9]]}, "answers"),
        ({"ids": [-1, 2]}, "ids"),
        ({"x": 1}, "x"),
    ],
)
def test_a_bad_line_is_named_by_file_line_and_field(tmp_path, change, named):
    good = {"key": "a", "domain": "d", "ids": [1, 2], "answers": [[1, 2]]}
    path = tmp_path / "e.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps(good | change) + "\n")
    with pytest.raises(InvalidRequest, match=rf"e\.jsonl:2.*{named}"):
        list(read_examples(path))


def test_case_j6_what_teaches_nothing_is_dropped_and_counted(tmp_path):
    path = tmp_path / "e.jsonl"
    lines = [{"key": k, "domain": "d", "ids": [1, 2], "answers": a} for k, a in (("a", [[1, 2]]), ("b", []))]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    kept, dropped = keep_supervised(read_examples(path))
    assert [example.key for example in kept] == ["a"] and dropped == 1
    with pytest.raises(InvalidRequest, match="supervised"):
        keep_supervised(list(read_examples(path))[1:])


def test_an_empty_conversation_is_refused_by_key():
    with pytest.raises(InvalidRequest, match="conversation c"):
        Dialogue("c", "d", (Message("user", ""),))
