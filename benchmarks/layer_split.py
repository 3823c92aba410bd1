"""A prompt's chunk on one GPU and on several that share its latents by layers.

    torchrun --nproc-per-node 2 -m benchmarks.layer_split [--json FILE]

Owns a model of GLM-5's heads (12 layers, a choice of tokens made in one of three, no experts), chunks and single
tokens behind contexts of several lengths, and what ranks sent. Every rank holds the whole pool beside its share, so
that both sides run on the same values; their difference is reported. Ignores tiny models' tokens, which tests
compare. Needs a GPU a rank.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.report import Row, report
from engine.attention.mla_triton import TritonLatent
from engine.batch import ForwardBatch
from engine.context_parallel import ContextParallel
from engine.memory.latent_pool import LatentPool, make_pool
from engine.memory.layer_split import SplitLatents
from engine.models.registry import build_model
from engine.models.spec import spec_from_config
from engine.runner.layer_split import SplitRunner
from engine.runner.model_runner import ModelRunner

PAGE, CHUNK, CONTEXT, LAYERS = 64, 8192, 131072, 12
CASES = ((0, CHUNK), (32768, CHUNK), (CONTEXT - PAGE, CHUNK), (32768, 8), (CONTEXT - PAGE, 1))
"""Tokens of context and of the chunk."""
SENT = ("pages", "rows", "queries")
CONFIG = dict(
    model_type="glm_moe_dsa", vocab_size=1024, hidden_size=6144, intermediate_size=12288, num_hidden_layers=LAYERS,
    num_attention_heads=64, max_position_embeddings=140000, kv_lora_rank=512, q_lora_rank=2048, qk_rope_head_dim=64,
    qk_nope_head_dim=192, v_head_dim=256, first_k_dense_replace=LAYERS, torch_dtype="bfloat16", index_topk=2048,
    index_n_heads=32, index_head_dim=128, indexer_types=["full", "shared", "shared"] * (LAYERS // 3),
)  # fmt: skip


class Scene:
    def __init__(self, ranks: ContextParallel, device: torch.device) -> None:
        spec = spec_from_config(CONFIG)
        model = build_model(spec, torch.bfloat16, device)
        for number, param in enumerate(model.parameters()):
            generator = torch.Generator(device).manual_seed(number)
            _ = param.data.normal_(0, 0.02, generator=generator) if param.dim() > 1 else param.data.fill_(1.0)
        pages = (CONTEXT + CHUNK) // PAGE + 65
        self.device = device
        self.whole = make_pool(spec, pages, PAGE, torch.bfloat16, device)
        self.split = SplitLatents(spec, pages, PAGE, torch.bfloat16, device, ranks)
        assert isinstance(self.whole, LatentPool)
        generator = torch.Generator(device).manual_seed(9)
        chooses = [layer.index == "own" for layer in spec.layers]
        for layer in range(LAYERS):
            places = [(self.whole.tokens(layer), self.split.stored(layer))]
            if chooses[layer]:
                places.append((self.whole.index_keys(layer), self.split.stored_index(layer)))
            for rows, stored in places:
                rows.normal_(0, 0.5, generator=generator)
                if stored is not None:
                    stored.copy_(rows)
        self.alone = ModelRunner(model, self.whole, TritonLatent(spec))
        self.together = SplitRunner(model, self.split, TritonLatent(spec))
        order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(3)) + 1
        self._table = order.int().to(device)

    def batch(self, context: int, tokens: int) -> ForwardBatch:
        at = torch.arange(context, context + tokens, device=self.device)
        table = self._table[: -(-(context + tokens) // PAGE)][None].contiguous()
        slots = table[0, at // PAGE].long() * PAGE + at % PAGE
        first = torch.arange(1, device=self.device)
        return ForwardBatch(at % 1024, at, slots, [tokens], [context + tokens], table, [0], 0, first)

    def sent(self) -> tuple[int, int, int]:
        counted = self.split.step.sent
        return counted.pages, counted.rows, counted.queries

    def milliseconds(self, run: Callable[[], object]) -> float:
        """The best of two, after one that counts for nothing."""
        run()
        best = float("inf")
        for _ in range(2):
            torch.cuda.synchronize(self.device)
            dist.barrier()
            began = time.perf_counter()
            run()
            torch.cuda.synchronize(self.device)
            best = min(best, time.perf_counter() - began)
        return best * 1e3


def rows_of(scene: Scene, ranks: int, context: int, tokens: int) -> list[Row]:
    batch, case = scene.batch(context, tokens), f"{tokens:,} behind {context:,}"
    expected = scene.alone.hidden(batch).float()
    difference = (scene.together.hidden(batch).float() - expected).norm() / expected.norm()
    before = scene.sent()
    together = scene.milliseconds(lambda: scene.together.hidden(batch))
    sent = [(now - then) / 3 / 2**20 for now, then in zip(scene.sent(), before, strict=True)]
    alone = scene.milliseconds(lambda: scene.alone.hidden(batch))
    return [
        Row(case, "one GPU", alone, "ms"),
        Row(case, f"{ranks} GPUs", together, "ms"),
        Row(case, "faster", alone / together, "x"),
        *(Row(case, f"sent: {name}", value, "MiB") for name, value in zip(SENT, sent, strict=True)),
        Row(case, "relative difference", float(difference), "", 0.05, bool(difference < 0.05)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(minutes=2), device_id=device)
    ranks = ContextParallel.of_world()
    with torch.inference_mode():
        scene = Scene(ranks, device)
        sizes = scene.whole.bytes, scene.split.bytes
        rows = [Row("pool", "on one GPU", sizes[0] / 2**20, "MiB"), Row("pool", "a rank", sizes[1] / 2**20, "MiB")]
        for context, tokens in CASES:
            rows += rows_of(scene, ranks.size, context, tokens)
    if ranks.rank == 0:
        report("layer_split", rows, args.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
