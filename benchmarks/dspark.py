"""Speculation against none, side by side in one run.

    python -m benchmarks.dspark [--model smollm2-135m] [--drafter ngram] [--rows 1 4] [--json FILE]

Owns whole engines that differ in nothing but their drafter, over prompts of which some make a model
repeat itself and some do not. Engines take turns, so that a busy machine slows all of them; the best
turn of each counts. On the CPU time is the process's own, which others on the machine hardly touch.
Output tokens per second, prefill included, and how they relate; whether tokens are the same, which in
16 bits they need not be wherever two ids are nearly as probable.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import Row, at_least, report
from engine import CacheConfig, Engine, EngineConfig, GroupRequest, SamplingParams
from engine.dspark.config import DSparkConfig
from rollout.model_catalog import resolve_model
from rollout.text.codec import TextCodec

NEW = 96
LINES = ["red apples cost 3 coins", "green pears cost 4 coins", "ripe plums cost 5 coins", "sweet figs cost 6 coins"]
PROMPTS = {
    "repetitive": "Repeat this list word for word, twice:\n" + "\n".join(LINES) + "\n" + "\n".join(LINES),
    "prose": "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
}


@dataclass(slots=True)
class Side:
    """One engine, its best time by case, and what it said."""

    name: str
    engine: Engine
    seconds: float = float("inf")
    ids: list[list[int]] | None = None


def run(side: Side, prompts: list[list[int]], temperature: float, turn: int) -> None:
    side.engine.flush("all")
    sampling = SamplingParams(temperature=temperature, max_new=NEW, ignore_eos=True, seed=7)
    requests = [
        GroupRequest(group_id=f"{turn}-{i}", prompt_ids=np.asarray(ids, dtype=np.uint32), sampling=sampling)
        for i, ids in enumerate(prompts)
    ]
    clock = time.process_time if side.engine.config.device == "cpu" else time.perf_counter
    began = clock()
    groups = side.engine.generate(requests)
    side.seconds = min(side.seconds, clock() - began)
    side.ids = [sample.ids.tolist() for group in groups for sample in group.samples]


def measure(sides: list[Side], prompt: list[int], rows: int, temperature: float, repeats: int, case: str) -> list[Row]:
    """Rows of one case; the first side is the one without drafts."""
    prompts = [[*prompt, *prompt[-1 - row :]] if row else prompt for row in range(rows)]
    before = {}
    for side in sides:
        side.seconds = float("inf")
        run(side, prompts, temperature, -1)
        before[side.name] = side.engine.draft_counters()
    for turn in range(repeats):
        for side in sides:
            run(side, prompts, temperature, turn)
    plain = sides[0]
    lines = [Row(case, "no drafts", rows * NEW / plain.seconds, "tok/s")]
    for side in sides[1:]:
        lines.append(at_least(case, f"{side.name} / no drafts", plain.seconds / side.seconds, "x", 0.98))
        assert side.ids is not None and plain.ids is not None
        equal = sum(
            a == b for mine, other in zip(side.ids, plain.ids, strict=True) for a, b in zip(mine, other, strict=True)
        )
        lines.append(Row(case, f"{side.name}: same tokens", equal / (rows * NEW), ""))
        lines += _counted(case, side, before[side.name])
    return lines


def _counted(case: str, side: Side, before: dict[str, float]) -> list[Row]:
    counts = {name: value - before[name] for name, value in side.engine.draft_counters().items()}
    steps, plain = counts["draft_steps"], counts["draft_plain_steps"]
    rows = [Row(case, f"{side.name}: share of rows' steps with drafts", steps / max(1, steps + plain), "")]
    if steps:
        rows.append(Row(case, f"{side.name}: accept length", counts["draft_emitted"] / steps, "tokens"))
        rows.append(
            Row(
                case,
                f"{side.name}: committed / verified rows",
                counts["draft_emitted"] / counts["draft_verify_rows"],
                "",
            )
        )
    if counts["draft_cost_steps"]:
        error = counts["draft_cost_absolute_error_seconds"] / counts["draft_cost_measured_seconds"]
        planning = counts["draft_planning_seconds"] / counts["draft_cost_measured_seconds"]
        rows.append(Row(case, f"{side.name}: error of predicted step times", error, ""))
        rows.append(Row(case, f"{side.name}: planning / step time", planning, "", 0.02, planning <= 0.02))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a preset or a Hugging Face folder")
    parser.add_argument("--drafter", default="ngram", help="ngram, or a drafter's folder")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--fixed", type=int, nargs="*", default=[4], help="whole windows of so many drafts, too")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--loop", default="auto", help="of the engines with drafts: serial or overlapped")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--simulate", action="store_true", help="the planner alone, over simulated acceptance")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--noise", type=float, default=0.5, help="of simulated confidences, in log-odds")
    args = parser.parse_args()
    if args.simulate:
        from benchmarks.dspark_simulation import H200_QWEN3_8B, simulate

        print(H200_QWEN3_8B.name)
        report("dspark_simulated", simulate(H200_QWEN3_8B, args.concurrency, args.noise), args.json)
        return
    torch.set_num_threads(args.threads)
    folder = resolve_model(args.model)

    def engine(**fields) -> Engine:
        config = EngineConfig(
            device=args.device,
            dtype=args.dtype,
            loop=args.loop if fields else "auto",
            cache=CacheConfig(kv_tokens=16384),
            dspark=DSparkConfig(**fields),
        )
        return Engine.from_pretrained(folder, config)

    sides = [Side("none", engine()), Side("adaptive", engine(drafter=args.drafter))]
    sides += [Side(f"fixed {k}", engine(drafter=args.drafter, mode="static", drafts=k)) for k in args.fixed]
    codec, rows = TextCodec(folder), [Row("setting", "threads", args.threads, "")]
    for name, text in PROMPTS.items():
        prompt = list(codec.apply_chat([{"role": "user", "content": text}]))
        for count in args.rows:
            for temperature in args.temperature:
                case = f"{name}, {count} rows, T = {temperature:g}"
                rows += measure(sides, prompt, count, temperature, args.repeats, case)
    report("dspark", rows, args.json)


if __name__ == "__main__":
    main()
