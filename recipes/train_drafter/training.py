"""The training loop, resumable and measured on held-out answers."""

from __future__ import annotations

from collections.abc import Sequence

from recipes.grpo.progress import Display
from recipes.tracking import Tracker
from recipes.train_drafter.config import TrainDrafterConfig
from recipes.train_drafter.ranks import Clock, Ranks
from trainer_bridge.drafter.export import resume_checkpoint, save_checkpoint
from trainer_bridge.drafter.features import FeatureExample
from trainer_bridge.drafter.objective import DraftSums
from trainer_bridge.drafter.stream import ExampleOrder, FeatureSource, stream
from trainer_bridge.drafter.trainer import DrafterTrainer

AXIS = "train_step"


def train(
    config: TrainDrafterConfig,
    trainer: DrafterTrainer,
    source: FeatureSource,
    held_out: Sequence[FeatureExample],
    ranks: Ranks,
    clock: Clock,
    tracker: Tracker,
    display: Display,
) -> tuple[list[tuple[int, float]], int]:
    """Trains from the newest checkpoint to the last step, or to when time is up, and saves. Returns the expected
    accept length on held-out answers by train_step, and how many steps were taken now."""
    root = config.output / "checkpoints"
    run = resume_checkpoint(root, trainer)
    curve = [(int(step), float(value)) for step, value in run["curve"]] if run else []
    steps = config.optim.steps
    order = ExampleOrder(len(source), config.batch, config.seed, ranks.rank, ranks.size)
    phase = display.phase("training", steps, trainer.train_step)
    phase.plain_every = max(1, steps // 10)
    if not curve:
        curve.append(_measure(trainer, held_out, tracker, display))
    first = saved = trainer.train_step
    for prepared in stream(source, order, trainer.train_step, steps, trainer.prepare, config.features.ahead):
        metrics = trainer.take(prepared)
        step = trainer.train_step
        tracker.log(AXIS, step, metrics)
        accepted, length = metrics["drafter/accepted"], metrics["drafter/accept_length"]
        phase.advance(step, f"loss {metrics['drafter/loss']:.3f}  accepted {accepted:.3f}  accept length {length:.2f}")
        if step % config.evaluation.every == 0 or step == steps:
            curve.append(_measure(trainer, held_out, tracker, display))
        over = ranks.any(clock.over, trainer.model.fc.device)
        if over or step % config.checkpoint_every == 0 or step == steps:
            if ranks.first:
                save_checkpoint(root, trainer, {"curve": curve})
            saved = step
        if over:
            break
    assert saved == trainer.train_step, "a run ends with a checkpoint"
    ranks.wait()
    return curve, trainer.train_step - first


def _measure(
    trainer: DrafterTrainer, held_out: Sequence[FeatureExample], tracker: Tracker, display: Display
) -> tuple[int, float]:
    """Every rank measures all of them: they are few, and the answer is the same."""
    sums = DraftSums(trainer.model.spec.num_drafts, trainer.model.fc.device)
    trainer.evaluate(held_out, sums)
    sums = sums.on_host()
    values = {
        "held_out/accept_length": sums.accept_length(),
        "held_out/accepted": sums.overall("accepted"),
        "held_out/argmax_agreement": sums.overall("agreed"),
    }
    values |= {f"held_out/survival_{place}": value for place, value in enumerate(sums.mean("survival").tolist())}
    tracker.log(AXIS, trainer.train_step, values)
    display.say(
        f"held out at step {trainer.train_step}: accept length {values['held_out/accept_length']:.3f}, "
        f"accepted {values['held_out/accepted']:.3f}"
    )
    return trainer.train_step, values["held_out/accept_length"]
