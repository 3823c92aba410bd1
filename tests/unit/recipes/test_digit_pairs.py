"""Sums and products of digits: split, verifier, and how a chat model is asked them."""

from __future__ import annotations

import pytest

from engine.errors import InvalidRequest
from recipes.chat_codec import ChatCodec
from recipes.digit_pairs import DigitPairsConfig, PairQuestion, make_digit_pairs
from tests.unit.recipes.chat_model import chat_tokenizer
from trainer_bridge.environment import Action, Message


@pytest.mark.parametrize("seed", range(4))
def test_no_pair_is_on_both_sides_of_the_split_in_either_order(seed: int) -> None:
    questions = make_digit_pairs(DigitPairsConfig(held_out=12), seed)
    held_out, training = ({frozenset((q.a, q.b)) for q in side} for side in (questions.held_out, questions.training))
    assert len(held_out) == 12 and len(training) == 33 and held_out.isdisjoint(training)
    assert len(questions.held_out) + len(questions.training) == 2 * 81
    assert len({q.text for q in [*questions.held_out, *questions.training]}) == 2 * 81
    assert make_digit_pairs(DigitPairsConfig(held_out=12), seed) == questions
    with pytest.raises(InvalidRequest, match=r"task\.held_out"):
        DigitPairsConfig(held_out=45)


@pytest.mark.parametrize(
    ("text", "finish", "reward"),
    [("24", "stop", 1.0), ("24", "length", 0.0), ("24.", "stop", 0.0), (" 24", "stop", 0.0), ("024", "stop", 0.0),
     ("11", "stop", 0.0), ("24 24", "stop", 0.0), ("", "stop", 0.0)],
)  # fmt: skip
def test_reward_is_for_exactly_the_result(text: str, finish, reward: float) -> None:
    config = DigitPairsConfig()
    environment = PairQuestion(3, "*", 8, config.prompt, config.begun).environment()
    assert environment.reset().messages == (Message("user", "What is 3 * 8?"), Message("assistant", "3 * 8 = "))
    assert environment.step(Action(ids=(), text=text, finish=finish)).reward == reward
    assert PairQuestion(3, "+", 8, config.prompt, config.begun).answer == 11


def test_of_several_at_once_the_share_of_right_lines_counts() -> None:
    config = DigitPairsConfig(held_out=12, prompt="Work out: {all}", chain=3)
    questions = make_digit_pairs(config, 0)
    pairs = [
        {frozenset((p.a, p.b)) for q in side for p in (q, *q.others)}
        for side in (questions.held_out, questions.training)
    ]
    assert len(pairs[0]) == 12 and pairs[0].isdisjoint(pairs[1]) and len(questions.held_out[0].others) == 2
    seven, two = (PairQuestion(a, "+", 1, config.prompt, config.begun) for a in (7, 2))
    environment = PairQuestion(3, "*", 8, config.prompt, config.begun, (seven, two)).environment()
    assert environment.reset().messages[0] == Message("user", "Work out: 3 * 8, 7 + 1, 2 + 1")
    texts = {
        "24\n7 + 1 = 8\n2 + 1 = 3": 1.0,
        "24\n7 + 1 = 9\n2 + 1 = 3": 2 / 3,
        "24\n2 + 1 = 3\n7 + 1 = 8": 1 / 3,
        "24\n7 + 1 = 8\n2 + 1 = 3\n": 3 / 4,
        "24": 1 / 3,
        "": 0.0,
    }
    for text, reward in texts.items():
        assert environment.step(Action(ids=(), text=text, finish="length")).reward == pytest.approx(reward), text
    with pytest.raises(InvalidRequest, match=r"task\.chain"):
        DigitPairsConfig(chain=0)


def test_a_conversation_of_turns_reads_as_the_template_writes_it_at_once() -> None:
    tokenizer = chat_tokenizer()
    codec = ChatCodec(tokenizer)
    ids = codec.render([Message("user", "3+8?"), Message("assistant", "3+8 = ")], first=True)
    assert tokenizer.decode(ids) == "<user>3+8?<end>\n<assistant>3+8 = "
    ids += [*tokenizer.encode("12", add_special_tokens=False), tokenizer.eos_token_id]
    ids += codec.render([Message("user", "no")], first=False)
    said = [("user", "3+8?"), ("assistant", "3+8 = 12"), ("user", "no")]
    whole = [{"role": role, "content": content} for role, content in said]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    assert codec.decode([*tokenizer.encode("12", add_special_tokens=False), tokenizer.eos_token_id]) == "12"
