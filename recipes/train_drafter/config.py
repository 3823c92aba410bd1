"""The whole configuration of a drafter's training, one function per preset."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.dspark.config import Rule
from engine.errors import InvalidRequest
from recipes.arithmetic import SumsConfig
from recipes.grpo.config import ChatModel, RandomModel, WarmupConfig
from recipes.tracking import TrackingConfig
from trainer_bridge.config import OptimConfig
from trainer_bridge.drafter.config import DrafterShape, DraftLossConfig, DraftOptimConfig, SamplingConfig, Trained


@dataclass(frozen=True, slots=True)
class TaughtModel:
    """A small target that does not exist yet: a random model taught sums of three numbers."""

    shape: RandomModel = RandomModel(hidden_size=96, intermediate_size=256, num_layers=3)
    task: SumsConfig = SumsConfig(careless=0.3)
    warmup: WarmupConfig = WarmupConfig(
        steps=200, optim=OptimConfig(learning_rate=3e-3, warmup_steps=20, decay_steps=200, betas=(0.9, 0.98))
    )


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """`sources` are named sets (`recipes.prompt_sets`), .jsonl or .parquet files, or data sets on a hub. Of each,
    `training` conversations are answered for training and `held_out` others are kept for evaluation. With
    "sums" the target's own task is asked. `answers` to learn from are "sampled" from the target, or those "given"
    in the data, which somebody else wrote: a drafter of those accepts less."""

    sources: tuple[str, ...] = ("math", "chat", "poetry")
    training: int = 4000
    held_out: int = 32
    answers: Literal["sampled", "given"] = "sampled"

    def __post_init__(self) -> None:
        for name in ("training", "held_out"):
            if getattr(self, name) < 1:
                raise InvalidRequest(field=f"prompts.{name}", expected="at least 1", actual=getattr(self, name))
        if self.answers not in ("sampled", "given"):
            raise InvalidRequest(field="prompts.answers", expected="sampled or given", actual=self.answers)
        if not self.sources:
            raise InvalidRequest(field="prompts.sources", expected="at least one", actual=())


Source = Literal["disk", "memory", "live", "ray"]


@dataclass(frozen=True, slots=True)
class FeatureConfig:
    """Where the target's states come from while training. "disk" computes them once into `features/`, in shards
    of `shard_mib`; "memory" computes them before training and keeps them on the target's device; both are
    refused beyond `max_gib`. "live" computes them anew for every step; "ray" does so in `workers` other processes
    with an engine each. `ahead` steps of examples wait at most."""

    source: Source = "disk"
    shard_mib: int = 256
    max_gib: float = 32.0
    ahead: int = 2
    workers: int = 1

    def __post_init__(self) -> None:
        if self.source not in get_args(Source):
            raise InvalidRequest(field="features.source", expected=f"one of {get_args(Source)}", actual=self.source)
        if not self.max_gib > 0:
            raise InvalidRequest(field="features.max_gib", expected="more than 0", actual=self.max_gib)
        for name in ("shard_mib", "ahead", "workers"):
            if getattr(self, name) < 1:
                raise InvalidRequest(field=f"features.{name}", expected="at least 1", actual=getattr(self, name))


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """Every `every` train_steps acceptance is measured on held-out answers (teacher forcing). At the end held-out
    prompts are played in full-window rounds of `max_new` tokens at each of `temperatures` under each of
    `rules`; temperatures of confidences are fitted at T = `calibrate_at` on `fit_samples` answers to each
    held-out prompt and judged on others."""

    every: int = 100
    max_new: int = 256
    batch: int = 32
    temperatures: tuple[float, ...] = (1.0, 0.0)
    rules: tuple[Rule, ...] = ("rejection", "coupled")
    calibrate_at: float = 1.0
    fit_samples: int = 2

    def __post_init__(self) -> None:
        for name, low in (("every", 1), ("max_new", 1), ("batch", 1), ("fit_samples", 0)):
            if getattr(self, name) < low:
                raise InvalidRequest(field=f"evaluation.{name}", expected=f"{low} or more", actual=getattr(self, name))
        if not set(self.rules) <= set(get_args(Rule)):
            raise InvalidRequest(field="evaluation.rules", expected=f"some of {get_args(Rule)}", actual=self.rules)


@dataclass(frozen=True, slots=True)
class TrainDrafterConfig:
    """`batch` examples a train_step, over all ranks. The drafter computes in `dtype` with fp32 copies behind 16
    bits. `start_from` is an exported drafter to go on with, whose shape then holds instead of `shape`; with
    `trained` "confidence" nothing but its confidence head learns. `portion` conversations are answered
    before they are safe on disk. `max_seconds` ends this process at the next safe point; starting it again
    goes on from there."""

    output: Path = Path("outputs/drafter")
    seed: int = 0
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    target: ChatModel | TaughtModel = ChatModel()
    prompts: PromptConfig = PromptConfig()
    sampling: SamplingConfig = SamplingConfig()
    shape: DrafterShape = DrafterShape()
    start_from: Path | None = None
    trained: Trained = "all"
    loss: DraftLossConfig = DraftLossConfig()
    optim: DraftOptimConfig = DraftOptimConfig()
    features: FeatureConfig = FeatureConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    engine: EngineConfig = EngineConfig()
    tracking: TrackingConfig = TrackingConfig()
    batch: int = 32
    portion: int = 256
    checkpoint_every: int = 200
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "portion", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise InvalidRequest(field=name, expected="at least 1", actual=getattr(self, name))
        if ("sums" in self.prompts.sources) != isinstance(self.target, TaughtModel):
            raise InvalidRequest(
                field="prompts.sources", expected="sums for a target that is taught them", actual=self.prompts.sources
            )


@dataclass(frozen=True, slots=True)
class CalibrateConfig:
    """`target` is a model of the catalogue or a folder. `prompts.held_out` conversations of each source are
    played. With `require_digest` a drafter made for other weights is refused."""

    target: str = "smollm2-135m"
    seed: int = 1
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    require_digest: bool = False
    prompts: PromptConfig = PromptConfig(training=1)
    evaluation: EvaluationConfig = EvaluationConfig()
    engine: EngineConfig = EngineConfig()
    tracking: TrackingConfig = TrackingConfig()


def tiny() -> TrainDrafterConfig:
    """Two minutes on a CPU: a target is taught sums, and a drafter learns to say what it will say."""
    return TrainDrafterConfig(
        output=Path("outputs/drafter_tiny"),
        dtype="float32",
        target=TaughtModel(),
        prompts=PromptConfig(sources=("sums",), training=1000, held_out=96),
        sampling=SamplingConfig(temperature=1.0, top_p=1.0, top_k=0, max_new=12),
        shape=DrafterShape(layers=1, block=4, intermediate=192, markov_rank=16),
        optim=DraftOptimConfig(steps=200, learning_rate=3e-3, anchors=16, max_slots=4096),
        evaluation=EvaluationConfig(every=40, max_new=12, batch=96, rules=("rejection",)),
        engine=EngineConfig(
            device="cpu",
            dtype="float32",
            num_threads=1,
            cache=CacheConfig(page_size=4, kv_tokens=16384),
            scheduler=SchedulerConfig(max_running=256, prefill_tokens=2048),
        ),
        tracking=TrackingConfig(wandb="disabled"),
        batch=32,
        portion=500,
        checkpoint_every=80,
    )


def smollm2() -> TrainDrafterConfig:
    """SmolLM2-135M on one GPU: two layers, block 7, Markov rank 64, answers at T = 1 as rollouts sample them, and some
    greedy ones, in which this model repeats itself; blocks of all lengths, as engines choose those. States
    of 7 kB a token, some 36 GB, stay on the GPU: a step takes less time than computing its states anew would. A
    step is one micro-batch, whose logits of drafter and target take 1.4 GB each."""
    return TrainDrafterConfig(
        output=Path("outputs/drafter_smollm2"),
        target=ChatModel(),
        prompts=PromptConfig(training=6000, held_out=32),
        features=FeatureConfig(source="memory", max_gib=48.0),
        sampling=SamplingConfig(temperature=1.0, top_p=1.0, top_k=0, max_new=384, greedy=0.25),
        shape=DrafterShape(layers=2, captured=5, markov_rank=64, context=8192),
        optim=DraftOptimConfig(steps=4000, learning_rate=1e-3, anchors=64, shortened=0.3, max_slots=131072, chunk=2048),
        evaluation=EvaluationConfig(every=500, max_new=256, batch=96, fit_samples=2),
        engine=EngineConfig(
            dtype="bfloat16",
            cache=CacheConfig(page_size=16, kv_tokens=262144),
            scheduler=SchedulerConfig(max_running=512, prefill_tokens=8192),
        ),
        batch=32,
        portion=1024,
        checkpoint_every=500,
    )


def smollm2_dflash() -> TrainDrafterConfig:
    """The same tokens, steps and seed without a sequential head: what the head is worth."""
    base = smollm2()
    shape = replace(base.shape, markov_rank=0, confidence_reads_markov=False)
    return replace(base, output=Path("outputs/drafter_smollm2_dflash"), shape=shape)


def smollm2_rnn() -> TrainDrafterConfig:
    """The same with a sequential head that carries a state over the block."""
    base = smollm2()
    return replace(base, output=Path("outputs/drafter_smollm2_rnn"), shape=replace(base.shape, markov_head="rnn"))


PRESETS = {"tiny": tiny, "smollm2": smollm2, "smollm2_dflash": smollm2_dflash, "smollm2_rnn": smollm2_rnn}
