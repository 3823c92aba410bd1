"""Answers and states: the stages before training.

Owns making them, resumably, and saying beforehand what they will cost. Ignores the trainer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine import Engine
from engine.build import Parts
from engine.errors import TooLarge
from recipes.grpo.progress import Display
from recipes.train_drafter.config import TrainDrafterConfig
from recipes.train_drafter.ranks import Clock
from recipes.train_drafter.target import Target
from trainer_bridge.drafter.examples import DraftExample, ExampleLog, keep_supervised, read_examples
from trainer_bridge.drafter.feature_cache import CacheOrigin, FeatureCache, FeatureCacheWriter, cache_bytes
from trainer_bridge.drafter.features import FeatureScorer
from trainer_bridge.drafter.given import GivenAnswers
from trainer_bridge.drafter.responses import Answers, Dialogue, Responder, mean_length, regenerate
from trainer_bridge.drafter.stream import FeatureSource, KeptFeatures, LiveFeatures

GIB = float(1 << 30)
SHARE_OF_FREE = 0.75
"""Of a GPU's free memory states may take so much: training needs the rest."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run will take, from a probe of a few conversations. `tokens` are those of all examples."""

    conversations: int
    tokens: int
    cache_gib: float
    answer_seconds: float
    score_seconds: float

    def lines(self) -> list[str]:
        return [
            f"conversations {self.conversations:,}",
            f"tokens        {self.tokens:,} (prompts and answers)",
            f"states        {self.cache_gib:.3f} GiB, wherever they are kept",
            f"answering     {self.answer_seconds:,.0f} s",
            f"scoring       {self.score_seconds:,.0f} s",
        ]


def make_responder(config: TrainDrafterConfig, target: Target, parts: Parts, held_out: bool = False) -> Answers:
    """What is held out is always answered by the target: it is what a drafter will meet."""
    if config.prompts.answers == "given" and not held_out:
        return GivenAnswers(target.codec, target.stop_ids[0], config.sampling.max_new)
    return Responder(Engine(parts), target.codec, config.sampling, target.stop_ids)


def estimate(
    responder: Answers,
    scorer: FeatureScorer,
    origin: CacheOrigin,
    dialogues: Sequence[Dialogue],
    probe: int = 32,
) -> Estimate:
    """Answers `probe` conversations and scores them; what they took, scaled to all. Portions of a real run are
    larger, so that it is rather quicker than said here."""
    few = list(dialogues[:probe])
    began = time.monotonic()
    examples = responder.respond(few)
    answered = time.monotonic()
    scorer.score(examples)
    scored = time.monotonic()
    share = len(dialogues) / max(1, len(few))
    tokens = round(sum(example.num_tokens for example in examples) * share)
    return Estimate(
        conversations=len(dialogues),
        tokens=tokens,
        cache_gib=cache_bytes(tokens, origin) / GIB,
        answer_seconds=(answered - began) * share,
        score_seconds=(scored - answered) * share,
    )


def answer(
    config: TrainDrafterConfig,
    responder: Answers,
    dialogues: Sequence[Dialogue],
    path: Path,
    name: str,
    display: Display,
    clock: Clock,
) -> bool:
    """Fill the file at `path`; False where time ran out first."""
    log = ExampleLog(path)
    phase = display.phase(name, len(dialogues), 0)
    phase.plain_every = 1
    began, tokens, last = time.monotonic(), [0], [0]

    def observe(done: int, fresh: list[DraftExample]) -> bool:
        tokens[0] += sum(example.num_supervised for example in fresh)
        last[0] = done
        rate = tokens[0] / max(1e-9, time.monotonic() - began)
        phase.advance(done, f"{tokens[0]:,} new tokens  {rate:,.0f} tok/s  mean length {mean_length(fresh):.0f}")
        return not clock.over

    return regenerate(responder, dialogues, log, config.portion, observe)


def read_answers(path: Path, display: Display) -> list[DraftExample]:
    """The examples that teach something; a line says how many do not."""
    examples, dropped = keep_supervised(read_examples(path))
    display.say(
        f"{path.name}: {len(examples):,} examples, {sum(e.num_tokens for e in examples):,} tokens"
        + (f" ({dropped} without a supervised token dropped)" if dropped else "")
    )
    return examples


def preview(target: Target, example: DraftExample, display: Display) -> None:
    """What is supervised in the first example, to be looked at."""
    shown = " … ".join(target.codec.decode([int(i) for i in answer]) for answer in example.answers())
    display.say(f"supervised text of {example.key}: {shown[:300]!r}")


def cache_states(
    config: TrainDrafterConfig,
    scorer: FeatureScorer,
    origin: CacheOrigin,
    examples: Sequence[DraftExample],
    folder: Path,
    display: Display,
    clock: Clock,
) -> bool:
    """Fill the cache in `folder`; False where time ran out first. Refused before it starts where it would be
    larger than allowed."""
    _checked_size(config, origin, examples, f"in {folder}", display)
    writer = FeatureCacheWriter(folder, origin, config.features.shard_mib << 20)
    left = [example for example in examples if example.key not in writer.keys]
    done = len(examples) - len(left)
    phase = display.phase("states", len(examples), done)
    phase.plain_every = 1
    for start in range(0, len(left), config.portion):
        part = left[start : start + config.portion]
        writer.append(scorer.score(part))
        done += len(part)
        phase.advance(done, f"{sum(e.num_tokens for e in part):,} tokens")
        if clock.over and done < len(examples):
            writer.close()
            return False
    writer.close()
    return True


def keep_states(
    config: TrainDrafterConfig,
    scorer: FeatureScorer,
    origin: CacheOrigin,
    examples: Sequence[DraftExample],
    display: Display,
) -> KeptFeatures:
    """All states, in memory. Refused before they are computed where they would take more than allowed or, on a GPU,
    too much of what is free."""
    size = _checked_size(config, origin, examples, "of memory", display)
    free = scorer.free_bytes()
    if free is not None and size > SHARE_OF_FREE * free / GIB:
        raise TooLarge(
            field="features.source",
            expected=f'"live" or "disk", as {size:.1f} GiB are too much of the {free / GIB:.1f} free on the GPU',
            actual=config.features.source,
        )
    phase, kept = display.phase("states", len(examples), 0), []
    phase.plain_every = 1
    for start in range(0, len(examples), config.portion):
        part = examples[start : start + config.portion]
        kept += scorer.score(part)
        phase.advance(len(kept), f"{sum(e.num_tokens for e in part):,} tokens")
    return KeptFeatures(kept)


def open_source(
    config: TrainDrafterConfig,
    target: Target,
    scorer: FeatureScorer,
    origin: CacheOrigin,
    examples: Sequence[DraftExample],
    folder: Path,
    display: Display,
) -> FeatureSource:
    """Where training gets its examples from."""
    if config.features.source == "memory":
        return keep_states(config, scorer, origin, examples, display)
    if config.features.source == "disk":
        return FeatureCache(folder, origin)
    if config.features.source == "ray":
        from recipes.train_drafter.remote import RayFeatures

        return RayFeatures(target.folder, config.engine, scorer.layers, examples, config.features.workers)
    return LiveFeatures(scorer, examples)


def _checked_size(
    config: TrainDrafterConfig, origin: CacheOrigin, examples: Sequence[DraftExample], where: str, display: Display
) -> float:
    """GiB that the examples' states take, said; refused where that is more than allowed."""
    tokens = sum(example.num_tokens for example in examples)
    size = cache_bytes(tokens, origin) / GIB
    display.say(f"states of {tokens:,} tokens take {size:.3f} GiB {where}")
    if size > config.features.max_gib:
        raise TooLarge(field="features.max_gib", expected=f"at least {size:.1f}", actual=config.features.max_gib)
    return size
