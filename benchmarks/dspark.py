"""Speculation against none and against fixed windows, over concurrency.

    python -m benchmarks.dspark --model smollm2-135m --drafter DRAFTER [--json FILE]  # a real drafter
    python -m benchmarks.dspark --shape qwen3-8b [--json FILE]                          # simulated acceptance
    python -m benchmarks.dspark --simulate [--json FILE]                                # the planner alone

Owns the sweep: one engine after another that differ in nothing but how they speculate ("none", fixed
windows, "adaptive"), each with so many requests in flight, mixed domains in equal shares. Output tokens per
second while all of them decode: from a fifth of `--new` tokens a request on, up to `--new` more or until the first
request ends, so that neither prompts nor the last requests of a batch are in it. The rate is that of all repeats
together, each with the next prompts while there are any, after a play that warms up: few greedy requests are so many
texts, and what those happen to say is most of what sides would differ by. The baseline with window k drafts k slots.
With `--shape` targets and drafters are made (`benchmarks.dspark_chain`) so that acceptance follows classes. A real
drafter is asked what it was not trained on: named prompt sets begin after `--skip`. Ignores what is made of it
(`benchmarks.dspark_rows`) and exactness, which tests prove.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.dspark_rows import Bounds, Measured, rows_of
from benchmarks.report import report
from engine import CacheConfig, Engine, EngineConfig, GroupRequest, SamplingParams, SchedulerConfig
from engine.collector import Collector
from engine.dspark.config import NGRAM, DSparkConfig
from engine.errors import InvalidRequest

LONGEST = 4
"""Tokens of a request at most, in units of what requests say on average while they are measured: those that
accept more say more."""
Prompts = Callable[[str, int], list[np.ndarray]]
"""(domain, how many) -> ids of each."""


@dataclass(slots=True)
class Sweep:
    """`make(name)` builds the engine of a side."""

    make: Callable[[str], Engine]
    prompts: Prompts
    domains: Sequence[str]
    new: int
    """Tokens of a request that are measured, on average."""
    repeats: int
    most: int
    """Prompts of a domain that there are."""
    warm_up: int | None = None
    """The same of the play that is not measured; None: as many as in the others."""
    found: dict[tuple[str, int, float], Measured] = field(default_factory=dict)

    def run(self, sides: Sequence[str], concurrency: Sequence[int], temperatures: Sequence[float]) -> None:
        for side in sides:
            engine = self.make(side)
            # Reading them brings libraries along that take long to collect.
            self._requests(max(concurrency), temperatures[0], 0)
            gc.collect()
            gc.freeze()  # as an engine's actor does
            for count in concurrency:
                for temperature in temperatures:
                    made = engine.counters.graph_captures
                    measured = self.found[side, count, temperature] = self._measure(engine, count, temperature)
                    made = engine.counters.graph_captures - made
                    case = f"{side:>10}  {count:>4} requests  T = {temperature:g}"
                    print(f"{case}  {measured.rate:>10,.1f} tok/s  ({made} graphs made)", flush=True)
            del engine
            gc.unfreeze()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _measure(self, engine: Engine, count: int, temperature: float) -> Measured:
        self._play(engine, count, temperature, -1, self.warm_up or self.new)
        before, counters = engine.draft_report(), engine.counters
        idle, busy = counters.round_idle_seconds, counters.round_busy_seconds
        plays = [self._play(engine, count, temperature, turn, self.new) for turn in range(self.repeats)]
        tokens, seconds = (sum(part) for part in zip(*(play[:2] for play in plays), strict=True))
        idle, busy = counters.round_idle_seconds - idle, counters.round_busy_seconds - busy
        told = engine.draft_report().since(before)
        return Measured(tokens / seconds, plays[-1][2], told, idle / busy if busy else None)

    def _play(
        self, engine: Engine, count: int, temperature: float, turn: int, new: int
    ) -> tuple[int, float, list[list[int]]]:
        """Tokens, their seconds, and what each request said until then. Fewer requests in flight than domains: one
        domain after another."""
        engine.flush("all")
        requests = self._requests(count, temperature, turn)
        tokens, seconds, said = 0, 0.0, []
        for start in range(0, len(requests), count):
            ids, fresh, took = self._decode(engine, requests[start : start + count], new)
            tokens, seconds, said = tokens + fresh, seconds + took, said + ids
        return tokens, seconds, said

    def _decode(self, engine: Engine, requests: list[GroupRequest], new: int) -> tuple[list[list[int]], int, float]:
        """What was said, tokens that were measured, and their seconds."""
        sinks, counters = [Collector() for _ in requests], engine.counters
        clock = time.process_time if engine.config.device == "cpu" else time.perf_counter

        def run(tokens: int) -> int:
            began = counters.generated_tokens
            while counters.generated_tokens - began < tokens and not any(sink.ended for sink in sinks):
                engine.step()
            return counters.generated_tokens - began

        for request, sink in zip(requests, sinks, strict=True):
            engine.add_group(request, sink)
        while (gauges := engine.gauges()).waiting or gauges.prefilling:
            engine.step()
        run(len(requests) * new // 5)
        began = clock()
        tokens = run(len(requests) * new)
        seconds = clock() - began
        engine.abort([request.group_id for request in requests])
        return [sample.ids.tolist() for sink in sinks for sample in sink.result().samples], tokens, seconds

    def _requests(self, count: int, temperature: float, turn: int) -> list[GroupRequest]:
        total = max(count, len(self.domains))
        share = -(-total // len(self.domains))
        first = max(0, turn) * share % max(1, self.most - share + 1)
        asked = [
            [
                (domain.rsplit("/", 1)[-1].removesuffix(".jsonl"), ids)
                for ids in self.prompts(domain, first + share)[first:]
            ]
            for domain in self.domains
        ]
        mixed = list(itertools.chain.from_iterable(zip(*asked, strict=True)))[:total]
        sampling = SamplingParams(temperature=temperature, max_new=LONGEST * self.new, ignore_eos=True, seed=7)
        return [
            GroupRequest(group_id=f"{turn}-{i}", prompt_ids=ids, sampling=sampling, domain=domain)
            for i, (domain, ids) in enumerate(mixed)
        ]


def _config(args: argparse.Namespace, dspark: DSparkConfig, tokens: int) -> EngineConfig:
    most = max(args.concurrency)
    return EngineConfig(
        device=args.device,
        dtype=args.dtype,
        loop=args.loop,
        cache=CacheConfig(kv_tokens=most * (tokens + 64) + 8192),
        scheduler=SchedulerConfig(max_running=most, prefill_tokens="auto"),
        dspark=dspark,
    )


def _dspark(args: argparse.Namespace, side: str, drafter: Callable[[int | None], str]) -> DSparkConfig:
    if side == "none":
        return DSparkConfig()
    if side == "adaptive":
        return DSparkConfig(drafter=drafter(None), rule=args.rule)
    window = int(side.split()[1])
    return DSparkConfig(drafter=drafter(window), rule=args.rule, mode="static", drafts=window)


def of_shape(args: argparse.Namespace, folder: Path) -> Sweep:
    """Made targets and drafters of a published shape."""
    from benchmarks.dspark_chain import Chain, chain_spec, fill_target, save_drafter
    from benchmarks.dspark_simulation import CLASSES, CONTEXT, DRAFTS, NEW
    from engine.build import build_parts

    spec = chain_spec(args.shape, args.layers)
    chain, new = Chain(spec.vocab_size), args.new or NEW // 2
    # While it is measured a request has said seven tenths of `new` on average.
    prompt = CONTEXT - 7 * new // 10

    def drafter(window: int | None) -> str:
        block = window or DRAFTS
        path = folder / f"block-{block}"
        if not path.is_dir():
            save_drafter(path, spec, chain, block, args.device)
        return str(path)

    def make(side: str) -> Engine:
        config = _config(args, _dspark(args, side, drafter), prompt + LONGEST * new)
        return Engine(build_parts(spec, config, lambda model: fill_target(model, chain)))

    def prompts(domain: str, count: int) -> list[np.ndarray]:
        return chain.prompts(domain, count, prompt, 0)

    return Sweep(make, prompts, list(CLASSES), new, args.repeats, _prompts_of(args, CLASSES), args.warm_up)


def of_model(args: argparse.Namespace, folder: Path) -> Sweep:
    """A real target with its drafter, over prompts of the recipes' sets or of files."""
    from recipes.conversations import read_conversations
    from recipes.prompt_sets import SETS, prompt_set
    from rollout.drafter_catalog import resolve_drafter
    from rollout.model_catalog import resolve_model
    from rollout.text.codec import TextCodec

    model, drafter = resolve_model(args.model), resolve_drafter(args.drafter)
    codec, new = TextCodec(model), args.new or 192
    most = _prompts_of(args, args.domains)

    @functools.cache
    def every(domain: str) -> list[np.ndarray]:
        skip = args.skip if domain in SETS else 0
        asked = prompt_set(domain, skip + most, 0) if domain in SETS else read_conversations(domain, limit=most)
        if len(asked) < skip + most:
            raise InvalidRequest(field=f"domains {domain}", expected=f"{skip + most} prompts", actual=len(asked))
        return [
            np.asarray(codec.apply_chat([{"role": m.role, "content": m.content} for m in dialogue.opening]), np.uint32)
            for dialogue in asked[skip:]
        ]

    def make(side: str) -> Engine:
        config = _config(
            args, _dspark(args, side, lambda window: shortened(drafter, window, folder)), 512 + LONGEST * new
        )
        return Engine.from_pretrained(model, config)

    def prompts(domain: str, count: int) -> list[np.ndarray]:
        return every(domain)[:count]

    return Sweep(make, prompts, args.domains, new, args.repeats, most, args.warm_up)


def _prompts_of(args: argparse.Namespace, domains: Collection[str]) -> int:
    """Prompts of each domain for the most requests, and for each play of a few."""
    return -(-max(*args.concurrency, args.repeats * min(16, *args.concurrency), len(domains)) // len(domains))


def shortened(drafter: str, window: int | None, folder: Path) -> str:
    """The drafter with blocks of `window` drafts, fewer than it makes: its weights, and a configuration of its own
    under `folder`. (Other layouts than DeepSpec's stay as they are.)"""
    if window is None or drafter == NGRAM:
        return drafter
    source, made = Path(drafter), folder / f"block-{window}"
    config = json.loads((source / "config.json").read_text())
    if not config.get("sample_from_anchor", True) or window >= config.get("block_size", 0):
        return drafter
    made.mkdir(exist_ok=True)
    # Temperatures of confidences are left behind: fixed windows ask for none.
    (made / "config.json").write_text(json.dumps(config | {"block_size": window}))
    for weights in source.glob("*.safetensors*"):
        (made / weights.name).unlink(missing_ok=True)
        (made / weights.name).symlink_to(weights.resolve())
    return str(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a preset or a Hugging Face folder")
    parser.add_argument("--drafter", default="ngram", help="ngram, or a drafter's folder or name")
    parser.add_argument("--shape", help="made weights of this shape instead of a model")
    parser.add_argument("--layers", type=int, help="of the shape: fewer, to try things out")
    parser.add_argument(
        "--domains", nargs="+", default=["math", "chat", "poetry"], help="prompt sets, or files of prompts"
    )
    parser.add_argument("--skip", type=int, default=6032, help="of named sets: first prompts, which drafters know")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--fixed", type=int, nargs="*", default=[1, 3, 5, 7], help="windows of the other sides")
    parser.add_argument("--sides", nargs="+", help="only these: none, adaptive, 'fixed 3' ...")
    parser.add_argument("--rule", default="coupled", choices=["coupled", "rejection"])
    parser.add_argument("--new", type=int, help="tokens of a request that are measured, on average")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--warm-up", type=int, help="the same of the play before those")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--loop", default="auto")
    parser.add_argument("--simulate", action="store_true", help="the planner alone, over simulated acceptance")
    parser.add_argument("--noise", type=float, default=0.5, help="of simulated confidences, in log-odds")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.simulate:
        from benchmarks.dspark_simulation import H200_QWEN3_8B, simulate

        print(H200_QWEN3_8B.name)
        report("dspark_simulated", simulate(H200_QWEN3_8B, args.concurrency, args.noise), args.json)
        return
    sides = args.sides or ["none", *(f"fixed {k}" for k in args.fixed), "adaptive"]
    with tempfile.TemporaryDirectory() as scratch:
        sweep = (of_model if args.shape is None else of_shape)(args, Path(scratch))
        sweep.run(sides, args.concurrency, args.temperature)
    if args.shape is not None:
        bounds = Bounds(fixed_at_256=1.06)
    else:
        bounds = Bounds(single=0.98 if args.drafter == NGRAM else 1.8)
    report("dspark", rows_of(sweep.found, sides, bounds), args.json)


if __name__ == "__main__":
    main()
