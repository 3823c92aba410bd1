"""One rank of a data-parallel drafter run, for tests: two steps on its share of four examples."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from tests.unit.trainer_bridge.drafter.worlds import World, example

ANCHORS = (1, 1, 4, 4)


def run_ranks(rank: int, target: str, output: str, cases: dict[str, list[list[int]]]) -> None:
    """`cases` hold, by name, the examples of every rank; one rank alone needs no group."""
    torch.set_num_threads(1)
    size = len(next(iter(cases.values())))
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{output}/rendezvous", rank=rank, world_size=size)
    try:
        world = World(Path(target))
        items = world.scorer.score([example(f"e{i}", 6, count) for i, count in enumerate(ANCHORS)])
        for name, shares in cases.items():
            trainer = world.trainer(learning_rate=1e-3, eps=1e-2)
            for _ in range(2):
                metrics = trainer.step([items[i] for i in shares[rank]])
            state = {"weights": dict(trainer.model.state_dict()), "metrics": metrics}
            torch.save(state, Path(output) / f"{name}-{rank}.pt")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
