"""Latent attention over everything against latent attention over chosen tokens, on one GPU.

Owns one layer's kernels at published head counts, and steps and a prompt's chunk of six layers of GLM-5's heads
(hidden 4,096, no experts: what differs is attention). Ignores whether results are right (tests/gpu/test_latent_gpu.py).

    python -m benchmarks.latent [--json FILE]
"""

from __future__ import annotations

import time
from typing import Any

import torch
import typer

from benchmarks.gpu_timing import BF16, microseconds, noise
from benchmarks.report import Row, report
from engine.attention.mla_triton import TritonLatent
from engine.batch import ForwardBatch
from engine.kernels.decode_attention import States
from engine.kernels.dsa_attention import dsa_attention
from engine.kernels.dsa_index_scores import dsa_index_scores
from engine.kernels.dsa_select import counts_shape, dsa_select, select_pieces
from engine.kernels.mla_decode import mla_decode
from engine.kernels.mla_tile import LatentShape, latent_config, pieces_of
from engine.memory.kv_pool import KVPool
from engine.memory.latent_pool import make_pool
from engine.models.registry import build_model
from engine.models.spec import spec_from_config
from engine.runner.model_runner import ModelRunner

PAGE, RANK, ROPE, CHOSEN, INDEX_DIM = 64, 512, 64, 2048, 128
ROW_BYTES = 2 * (RANK + ROPE)
HEADS = {"V3.2": (128, 64), "GLM-5": (64, 32)}
"""Heads of queries and of the indexer."""
SCENES = ((1, 32768), (1, 131072), (8, 32768), (8, 131072), (32, 32768))
"""Rows and tokens of context."""
LAYERS, CHUNK = 6, 4096
BASE: dict[str, Any] = dict(
    vocab_size=1024, hidden_size=4096, intermediate_size=8192, num_hidden_layers=LAYERS, num_attention_heads=64,
    max_position_embeddings=140000, kv_lora_rank=RANK, q_lora_rank=2048, qk_rope_head_dim=ROPE, qk_nope_head_dim=192,
    v_head_dim=256, first_k_dense_replace=LAYERS, torch_dtype="bfloat16",
)  # fmt: skip
INDEX = dict(index_topk=CHOSEN, index_n_heads=32, index_head_dim=INDEX_DIM)
MODELS: dict[str, dict[str, Any]] = {
    "dense": dict(model_type="deepseek_v3", **BASE),
    "a choice a layer": dict(model_type="deepseek_v32", **BASE, **INDEX),
    "a choice in three": dict(
        model_type="glm_moe_dsa", **BASE, **INDEX, indexer_types=["full", "shared", "shared"] * (LAYERS // 3)
    ),
}


class PlannedOnce(TritonLatent):
    """Plans unless `planned`: inside a capture nothing may be."""

    planned = False

    def plan(self, batch: ForwardBatch, kv_pool: KVPool) -> None:
        if not self.planned:
            super().plan(batch, kv_pool)


def tables(rows: int, context: int) -> tuple[torch.Tensor, int]:
    """Page tables [B, P] of pages in no order, and how many pages there are."""
    pages = -(-context // PAGE)
    return torch.randperm(rows * pages, device="cuda").view(rows, pages).int() + 1, rows * pages + 1


def layer_rows(name: str, rows: int, context: int) -> list[Row]:
    heads, index_heads = HEADS[name]
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    page_tables, pages = tables(rows, context)
    latents, q = noise(pages * PAGE, RANK + ROPE, scale=0.5), noise(rows, heads, RANK + ROPE, scale=0.3)
    keys, index_q = noise(pages * PAGE, INDEX_DIM), noise(rows, index_heads, INDEX_DIM)
    weights = noise(rows, index_heads, dtype=torch.float32)
    owners = torch.arange(rows, device="cuda", dtype=torch.int32)
    visible = torch.full((rows,), context, device="cuda", dtype=torch.int32)
    shape, tile = LatentShape(heads, RANK, ROPE, PAGE, 192**-0.5), latent_config(heads, RANK, 2)
    out, tiles = q.new_empty(rows, heads, RANK), -(-heads // tile.block_m)

    def states(tokens: int) -> tuple[int, States]:
        pieces = pieces_of(tokens, rows, tiles, programs, tile.block_n)
        return pieces, States.empty((pieces, rows), heads, RANK, out.device)

    whole, part = states(context), states(CHOSEN)
    scores = torch.empty(rows, context, device="cuda")
    chosen = torch.empty(rows, CHOSEN, device="cuda", dtype=torch.int32)
    counts = torch.empty(counts_shape(rows, select_pieces(rows, context, programs)), device="cuda", dtype=torch.int32)
    dense = microseconds(lambda _: mla_decode(q, latents, page_tables, owners, visible, out, shape, *whole, tile), 1)
    times = {
        "scores": microseconds(
            lambda _: dsa_index_scores(
                index_q, weights, keys, page_tables, owners, visible, scores, PAGE, context
            ), 1
        ),
        "choice": microseconds(lambda _: dsa_select(scores, visible, chosen, counts), 1),
        "attention": microseconds(
            lambda _: dsa_attention(q, latents, page_tables, owners, visible, chosen, out, shape, *part, tile), 1
        ),
    }  # fmt: skip
    case = f"{name} heads, {rows} x {context:,}"
    found = [Row(case, "dense", dense, "us"), Row(case, "read", rows * context * ROW_BYTES / dense / 1e6, "TB/s")]
    found += [Row(case, part_name, value, "us") for part_name, value in times.items()]
    found.append(Row(case, "dense over chosen", dense / sum(times.values()), "x"))
    return [*found, Row(case, "dense over a shared choice", dense / times["attention"], "x")]


def model_rows(name: str, rows: int, context: int) -> list[Row]:
    """A captured step, and of one row a chunk of a prompt, launch by launch."""
    spec = spec_from_config(MODELS[name])
    model = build_model(spec, BF16, torch.device("cuda"))
    for param in model.parameters():
        param.data.normal_(0, 0.02)
    page_tables, pages = tables(rows, context + PAGE)
    pool = make_pool(spec, pages, PAGE, BF16, "cuda")
    backend = PlannedOnce(spec)
    runner = ModelRunner(model, pool, backend)
    last = torch.full((rows,), context - 1, device="cuda")
    slots = page_tables[:, (context - 1) // PAGE].long() * PAGE + (context - 1) % PAGE
    ids = torch.arange(rows, device="cuda")
    step = ForwardBatch(ids, last, slots, [1] * rows, [context] * rows, page_tables, list(range(rows)), rows, ids)
    backend.plan(step, pool)
    backend.planned = True
    case = f"{name}, {rows} x {context:,}"
    found = [Row(case, "step", microseconds(lambda _: runner.hidden(step), 1) / 1e3, "ms")]
    backend.planned = False
    if rows == 1:
        at = torch.arange(context - CHUNK, context, device="cuda")
        slots = page_tables[0, at // PAGE].long() * PAGE + at % PAGE
        first = torch.arange(1, device="cuda")
        chunk = ForwardBatch(
            torch.arange(CHUNK, device="cuda") % 1024, at, slots, [CHUNK], [context], page_tables, [0], 0, first
        )
        for _ in range(2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            runner.hidden(chunk)
            torch.cuda.synchronize()
        found.append(Row(case, f"chunk of {CHUNK:,}", (time.perf_counter() - began) * 1e3, "ms"))
    return found


def main(json: str | None = None) -> None:
    """Measure and report."""
    rows: list[Row] = []
    with torch.inference_mode():
        for name in HEADS:
            for scene in SCENES:
                rows += layer_rows(name, *scene)
        for scene in SCENES[:4]:
            for name in MODELS:
                rows += model_rows(name, *scene)
                torch.cuda.empty_cache()
    report("latent", rows, json)


if __name__ == "__main__":
    typer.run(main)
