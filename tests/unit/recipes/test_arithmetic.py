"""The task of the GRPO recipe: questions, verifier, tokenizer, order, configuration, resume."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engine.config import describe
from engine.errors import InvalidRequest
from recipes.arithmetic import (
    CharacterCodec,
    Retries,
    SumQuestion,
    SumsConfig,
    demonstration,
    make_sums,
    make_tokenizer,
)
from recipes.grpo.__main__ import configuration
from recipes.grpo.config import PRESETS, RolloutConfig, demo
from recipes.grpo.order import Order
from recipes.grpo.state import RunState
from trainer_bridge.environment import Action, Message


def test_held_out_questions_are_many_and_disjoint_from_training() -> None:
    config = demo()
    questions = make_sums(config.task, config.seed)
    held_out = {q.text for q in questions.held_out}
    assert len(held_out) == len(questions.held_out) >= 256
    assert held_out.isdisjoint({q.text for q in questions.training})
    assert len(questions.training) + len(held_out) == config.task.largest**3
    assert make_sums(config.task, 0) == questions != make_sums(config.task, 1)


@pytest.mark.parametrize(
    ("text", "finish", "reward"),
    [
        ("19+5=24", "stop", 1.0),
        ("24", "stop", 1.0),
        ("19", "stop", 0.0),
        ("19+5=24", "length", 0.0),
        ("19+5=024", "stop", 0.0),
        ("19+5=24=", "stop", 0.0),
        ("24+5=19", "stop", 0.0),
        ("", "stop", 0.0),
    ],
)
def test_reward_is_an_exact_match_of_a_finished_answer(text: str, finish, reward: float) -> None:
    question = SumQuestion(7, 12, 5)
    environment = question.environment()
    assert environment.reset().messages == (Message("user", "7+12+5="),)
    outcome = environment.step(Action(ids=(), text=text, finish=finish))
    assert (outcome.reward, outcome.done) == (reward, True)


def test_the_careless_teachers_answer_is_never_right() -> None:
    config = SumsConfig()
    questions = make_sums(config, 0).training
    assert not any(q.verify(Action(ids=(), text=q.first_step, finish="stop")) for q in questions)
    assert all(q.verify(Action(ids=(), text=q.worked, finish="stop")) for q in questions)
    rng = random.Random(0)
    stopped = sum(demonstration(q, config, rng) == q.first_step for q in questions) / len(questions)
    assert stopped == pytest.approx(config.careless, abs=0.05)


def test_tokenizer_survives_its_folder_and_gives_one_id_per_character(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    codec = CharacterCodec(tokenizer)
    ids = codec.render([Message("user", "7+12+5=")], first=True)
    assert len(ids) == 8 and ids[0] == tokenizer.bos_token_id
    assert codec.render([Message("assistant", "24")], first=False) == tokenizer.convert_tokens_to_ids(["2", "4"])
    assert codec.decode([*ids, tokenizer.eos_token_id]) == "7+12+5="
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode("7+12+5=") == ids and loaded.eos_token_id == tokenizer.eos_token_id


def test_order_covers_an_epoch_before_repeating_and_goes_on_from_its_count() -> None:
    items = list(range(10))
    order = Order(seed=3)
    first, second = order.take(items, 10), order.take(items, 10)
    assert sorted(first) == sorted(second) == items and first != second
    assert Order(seed=3, asked=7).take(items, 6) == [*first[7:], *second[:3]]


def test_every_preset_takes_overrides_and_keeps_the_rest() -> None:
    for name, preset in PRESETS.items():
        config = configuration(name, ["optim.updates=2", "rollout.engine.cache.page_size=8", "max_steps=3"])
        assert config.optim.updates == 2 and config.optim.eps == preset().optim.eps
        assert config.rollout.engine.cache.page_size == 8 and config.rollout.groups == preset().rollout.groups
        assert config.max_steps == 3 and config.loss == preset().loss
    with pytest.raises(InvalidRequest, match="preset: expected one of"):
        configuration("nope", [])
    with pytest.raises(InvalidRequest, match=r"optim\.lr"):
        configuration("demo", ["optim.lr=1"])
    with pytest.raises(InvalidRequest, match=r"rollout\.temperature"):
        RolloutConfig(temperature=0.0)


def test_a_resume_may_change_how_a_run_is_carried_out_but_not_what_it_is() -> None:
    config = demo()
    state = RunState(run_id="r", settings=describe(config), train_step=4, policy_version=7, asked=128)
    longer = configuration("demo", ["steps=90", "output=elsewhere", "tracking.wandb=disabled"])
    assert RunState.from_dict(state.to_dict(), longer) == state
    with pytest.raises(InvalidRequest, match=r"optim\.learning_rate: expected 0\.0012, as the run began, got '?0\.5"):
        RunState.from_dict(state.to_dict(), configuration("demo", ["optim.learning_rate=0.5"]))


def test_a_wrong_answer_is_asked_again_for_half_the_reward() -> None:
    def act(text: str, finish="stop") -> Action:
        return Action(ids=(), text=text, finish=finish)

    assert SumsConfig(retries=2).turns == 3
    question = SumQuestion(7, 12, 5, retries=2)
    environment = question.environment()
    assert isinstance(environment, Retries)
    opening = environment.reset()
    first = environment.step(act("19"))
    assert (first.reward, first.done, first.observation) == (0.0, False, opening)
    assert environment.step(act("24")).reward == 0.5
    stubborn = question.environment()
    outcomes = [stubborn.step(act("19")) for _ in range(3)]
    assert [outcome.done for outcome in outcomes] == [False, False, True] and outcomes[-1].reward == 0.0
    assert question.environment().step(act("19", "length")).done
    with pytest.raises(InvalidRequest, match=r"task\.retries"):
        SumsConfig(retries=-1)


def test_characters_that_this_model_lacks_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"task: expected questions of '0123456789\+='"):
        CharacterCodec(make_tokenizer()).render([Message("user", "3 * 8")], first=True)
