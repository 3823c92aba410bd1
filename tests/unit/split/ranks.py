"""Ranks of an engine whose layers are divided, for tests: each serves and writes down what came out.

Ranks are forked, which saves them most of their start; nothing here may touch a GPU before.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from engine import Engine
from engine.context_parallel import ALONE, ContextParallel
from engine.memory.layer_split import SplitLatents
from engine.memory.needs import token_bytes
from engine.types import GroupOutput, ScoreRequest
from tests.support import ask, make_config, prompt
from tests.unit.engine.lora_cases import ask_with


def serve(folder: Path, ranks: ContextParallel, deterministic: bool = False) -> dict:
    """Prompts that hit each other's prefixes, forks whose pages end inside a page, a pool too small for all."""
    engine = Engine.from_pretrained(
        folder, make_config(kv_tokens=96, prefill_tokens=24, deterministic=deterministic), ranks
    )
    groups = []
    for turn in range(2):
        requests = [ask(f"{turn}-{i}", prompt(6 + 7 * i, start=10 + 60 * (i % 2)), n=2, max_new=14) for i in range(4)]
        requests.append(ask(f"{turn}-drawn", prompt(11), n=3, max_new=6, temperature=1.0, seed=7))
        groups += engine.generate(requests)
    return told(engine, groups)


def glance(folder: Path, ranks: ContextParallel) -> dict:
    """A prompt in chunks, then two samples of one that begins with it."""
    engine = Engine.from_pretrained(folder, make_config(kv_tokens=256, prefill_tokens=8), ranks)
    groups = engine.generate([ask("a", prompt(13), max_new=2)])
    return told(engine, groups + engine.generate([ask("b", prompt(19), n=2, max_new=3, temperature=0.5)]), drawn=1)


def adapted(folder: Path, ranks: ContextParallel) -> dict:
    """Two policies and the base side by side, twice; then a sequence is scored."""
    engine = Engine.from_pretrained(folder, make_config(prefill_tokens=16), ranks)
    for name in "ab":
        engine.adapters.register_folder(name, folder / f"adapter-{name}")
    groups = []
    for turn in range(2):
        names = ("a", None, "b")
        groups += engine.generate([ask_with(name, f"{turn}{name}", prompt(11), n=2, max_new=5) for name in names])
    scored = engine.score(ScoreRequest(sequences=[prompt(30)], start=3))
    return told(engine, groups) | {"scored": np.asarray(scored.sequences[0].logprobs).tolist()}


def told(engine: Engine, groups: list[GroupOutput], drawn: int = 0) -> dict:
    """What is compared; the last `drawn` groups have seeds of their own in every run, and are not."""
    engine.check()
    pool = engine._parts.pages.pool
    split = pool if isinstance(pool, SplitLatents) else None
    kept = groups[: len(groups) - drawn]
    return {
        "ids": [[sample.ids.tolist() for sample in group.samples] for group in kept],
        "drawn": [[sample.ids.tolist() for sample in group.samples] for group in groups[len(kept) :]],
        "logprobs": [[np.asarray(sample.logprobs).tolist() for sample in group.samples] for group in kept],
        "hits": [group.hit.usable for group in groups if group.hit is not None],
        "retractions": engine.counters.retractions,
        "bytes": pool.bytes,
        "step_bytes": 0 if split is None else split.step.bytes,
        "sent": {} if split is None else asdict(split.step.sent),
        "whole": 0 if split is None else engine.counters.steps * whole_bytes(engine),
    }


def whole_bytes(engine: Engine) -> int:
    """What it takes to send every page of every layer."""
    pages = engine._parts.pages
    return token_bytes(engine._parts.model.spec, torch.float32) * pages.pool.num_pages * pages.page_size


def disagree(folder: Path, ranks: ContextParallel) -> dict:
    """The last rank is asked for one more token's prompt than the others, from the second request on."""
    engine = Engine.from_pretrained(folder, make_config(), ranks)
    engine.generate([ask("same", prompt(9), max_new=2)])
    other = ranks.rank == ranks.size - 1
    try:
        engine.generate([ask("g", prompt(9, start=90 + other), max_new=2)])
    except Exception as error:
        return {"kind": type(error).__name__, "message": str(error)}
    return {"kind": "none"}


WORK = {"serve": serve, "glance": glance, "adapted": adapted, "disagree": disagree}


def run(rank: int, size: int, folders: list[str], out: str, work: str, deterministic: bool) -> None:
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=size)
    try:
        ranks = ContextParallel.of_world() if size > 1 else ALONE
        options = {"deterministic": deterministic} if deterministic else {}
        for place, folder in enumerate(folders):
            found = WORK[work](Path(folder), ranks, **options)
            Path(out, f"{place}-{size}-{rank}.json").write_text(json.dumps(found))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def results(
    folders: list[Path], out: Path, size: int, work: str = "serve", deterministic: bool = False
) -> list[list[dict]]:
    """By folder and rank."""
    out.mkdir(exist_ok=True)
    arguments = (size, [str(folder) for folder in folders], str(out), work, deterministic)
    if size == 1:
        run(0, *arguments)
    else:
        start_processes(run, args=arguments, nprocs=size, start_method="fork")
    paths = [[out / f"{place}-{size}-{rank}.json" for rank in range(size)] for place in range(len(folders))]
    return [[json.loads(path.read_text()) for path in of_folder] for of_folder in paths]
