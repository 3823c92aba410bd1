"""The fused kernels on a CUDA device: right against their references, then timed beside torch.

`python -m benchmarks.gpu_ops [--json FILE] [--seconds N] [--only NAME ...]`. Every variant runs in
a CUDA graph of repeated launches over rotating inputs (weights and logits exceed the L2 cache,
activations do not, as in a decode step). A share is that of the floor: bytes that must move, at
4.26 TB/s. Variants that come after the time limit are left out and counted.

Shapes: B rows, D width, V vocabulary.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.gpu_timing import BF16, Case, measure, noise, relative, rotating
from benchmarks.report import Row, report
from engine.kernels.embedding_gather import embedding_gather, embedding_gather_reference
from engine.kernels.gemv import GemvConfig, InputNorm, gemv, gemv_reference
from engine.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from engine.kernels.rope_kv_write import QKNorm, QKVShape, rope_kv_write, rope_kv_write_reference
from engine.kernels.sample_columns import SampleColumns, SampleOut, SampleWorkspace
from engine.kernels.sample_epilogue import Warps, sample_rows
from engine.kernels.sample_reference import sample_rows_reference
from engine.kernels.skinny_matmul import SkinnyConfig, skinny_matmul
from engine.kernels.swiglu import silu_and_mul, silu_and_mul_reference

BATCHES = (1, 32, 256, 512)


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    hidden: int
    intermediate: int
    vocab: int
    qkv: QKVShape
    qk_norm: bool = True


MODELS = (
    Model("8b", 4096, 12288, 151_936, QKVShape(32, 8, 128)),
    Model("0.6b", 1024, 3072, 151_936, QKVShape(16, 8, 128)),
    Model("smol", 576, 1536, 49_152, QKVShape(9, 3, 64), False),
)


def norm_cases() -> Iterator[Case]:
    for model in MODELS:
        weight = noise(model.hidden)
        for batch in BATCHES:
            x, residual = noise(batch, model.hidden), noise(batch, model.hidden)
            stream, out = residual.clone(), torch.empty_like(x)

            def check(x=x, residual=residual, stream=stream, out=out, weight=weight) -> float:
                normed, total = add_rms_norm_reference(x, residual, weight, 1e-6)
                return max(relative(out, normed), relative(stream, total))

            yield Case(
                f"add_rms_norm {model.name} b{batch}",
                x.nbytes * 4,
                1,
                {
                    f"w{warps}": lambda i, x=x, stream=stream, out=out, weight=weight, warps=warps: add_rms_norm(
                        x, stream, weight, 1e-6, out, warps
                    )
                    for warps in (4, 8, 16)
                },
                lambda i, x=x, r=residual, w=weight: F.rms_norm(x + r, (x.shape[1],), w, 1e-6),
                lambda out=out, stream=stream, residual=residual: (out.fill_(float("nan")), stream.copy_(residual)),
                check,
            )
    x, weight = noise(256, 4096), noise(4096)
    out = torch.empty_like(x)
    yield Case(
        "rms_norm 8b b256",
        x.nbytes * 2,
        1,
        {f"w{warps}": lambda i, warps=warps: rms_norm(x, weight, 1e-6, out, warps) for warps in (4, 8)},
        lambda i: F.rms_norm(x, (4096,), weight, 1e-6),
        lambda: out.fill_(float("nan")),
        lambda: relative(out, rms_norm_reference(x, weight, 1e-6)),
    )


def gate_cases() -> Iterator[Case]:
    for model in MODELS:
        for batch in BATCHES:
            x, out = noise(batch, 2 * model.intermediate), noise(batch, model.intermediate)
            yield Case(
                f"silu_and_mul {model.name} b{batch}",
                out.nbytes * 3,
                1,
                {
                    f"{block}/w{warps}": lambda i, x=x, out=out, block=block, warps=warps: silu_and_mul(
                        x, out, block, warps
                    )
                    for block, warps in ((512, 2), (1024, 4), (2048, 4))
                },
                lambda i, x=x: silu_and_mul_reference(x),
                lambda out=out: out.fill_(float("nan")),
                lambda x=x, out=out: relative(out, silu_and_mul_reference(x)),
            )


def embedding_cases() -> Iterator[Case]:
    for model in MODELS:
        weight = noise(model.vocab, model.hidden)
        for batch in (1, 256):
            ids = torch.randint(0, model.vocab, (batch,), device="cuda")
            out = noise(batch, model.hidden)
            yield Case(
                f"embedding {model.name} b{batch}",
                out.nbytes * 2,
                1,
                {
                    str(block): lambda i, ids=ids, weight=weight, out=out, block=block: embedding_gather(
                        ids, weight, out, block
                    )
                    for block in (512, 1024)
                },
                lambda i, ids=ids, weight=weight: weight.index_select(0, ids),
                lambda out=out: out.fill_(float("nan")),
                lambda ids=ids, weight=weight, out=out: relative(out, embedding_gather_reference(ids, weight)),
            )


def rope_cases() -> Iterator[Case]:
    for model in MODELS:
        shape, size = model.qkv, model.qkv.head_dim
        norm = QKNorm(noise(size), noise(size), 1e-6) if model.qk_norm else None
        for batch in BATCHES:
            qkv = noise(batch, (shape.num_heads + 2 * shape.num_kv_heads) * size)
            angle = torch.rand(4096, size, device="cuda")
            tables = (angle.cos().to(BF16), angle.sin().to(BF16), torch.randint(0, 4096, (batch,), device="cuda"))
            slots = torch.randperm(4 * batch, device="cuda")[:batch]
            pool, expected_pool = noise(4 * batch, 2 * shape.num_kv_heads, size), None
            expected_pool = pool.clone()
            out = noise(batch, shape.num_heads, size)

            def reference(
                i=0, qkv=qkv, shape=shape, norm=norm, tables=tables, slots=slots, pool=expected_pool
            ) -> torch.Tensor:
                return rope_kv_write_reference(qkv, shape, norm, tables[0], tables[1], tables[2], slots, pool)

            def check(reference=reference, out=out, pool=pool, expected_pool=expected_pool, slots=slots) -> float:
                return max(relative(out, reference()), relative(pool[slots], expected_pool[slots]))

            yield Case(
                f"rope_kv_write {model.name} b{batch}",
                2 * qkv.nbytes,
                1,
                {
                    f"h{heads}/w{warps}": lambda i, q=qkv, s=shape, n=norm, t=tables, sl=slots, p=pool, o=out, h=heads, w=warps: (  # noqa: E501
                        rope_kv_write(q, s, n, *t, sl, p, o, h, w)
                    )
                    for heads, warps in ((4, 2), (8, 4), (16, 4))
                },
                _without_reads(qkv, shape, tables, pool, slots),
                lambda out=out, pool=pool: (out.fill_(float("nan")), pool.fill_(float("nan"))),
                check,
            )


def _without_reads(qkv, shape: QKVShape, tables, pool, slots) -> Callable[[int], object]:
    """Rotation and write in torch, with indexing that a graph can capture."""
    heads, rotated = shape.num_heads, shape.num_heads + shape.num_kv_heads
    qkv_THE = qkv.clone().view(len(qkv), -1, shape.head_dim)

    def run(i: int) -> None:
        cos, sin = tables[0][tables[2]][:, None], tables[1][tables[2]][:, None]
        turned = qkv_THE[:, :rotated]
        turned.copy_(turned * cos + torch.roll(turned, shape.head_dim // 2, -1) * sin)
        pool.index_copy_(0, slots, qkv_THE[:, heads:])

    return run


def sampling_columns(batch: int, **values: float) -> SampleColumns:
    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((batch,), value, dtype=dtype, device="cuda")

    wide = torch.float64
    return SampleColumns(
        column(values.get("temperature", 1.0), wide),
        column(values.get("top_k", 0), torch.int32),
        column(values.get("top_p", 1.0), wide),
        column(values.get("min_p", 0.0), wide),
        torch.arange(batch, device="cuda") * 7919,
        column(100, torch.int64),
        column(1, torch.uint8),
    )


KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "T=1": {},
    "T=0.7": {"temperature": 0.7},
    "top-k 50": {"top_k": 50},
    "top-p 0.95": {"top_p": 0.95},
    "k 50, p 0.95, min-p": {"top_k": 50, "top_p": 0.95, "min_p": 0.02},
    "top-k 1000": {"top_k": 1000},
    "top-p 0.99, T 1.2": {"top_p": 0.99, "temperature": 1.2},
    "min-p 0.05": {"min_p": 0.05},
}


def sampling_cases() -> Iterator[Case]:
    """Peaked rows have the tail of a trained model: a few ids hold most of the mass."""
    plan = [("8b", 151_936, batch, kind, dtype, True) for batch in (256,) for kind in KINDS for dtype in (BF16,)]
    plan += [("8b", 151_936, batch, "T=1", BF16, True) for batch in (1, 32, 512)]
    plan += [("8b", 151_936, 512, "T=1", torch.float32, True), ("8b", 151_936, 1, "top-p 0.95", BF16, True)]
    plan += [("8b flat", 151_936, 256, kind, BF16, False) for kind in list(KINDS)[1:]]
    plan += [("smol", 49_152, batch, kind, BF16, True) for batch in (1, 256) for kind in ("T=1", "top-p 0.95")]
    for name, vocab, batch, kind, dtype, peaked in plan:
        yield sampling_case(f"sample {name} b{batch} {kind} {str(dtype)[6:]}", vocab, batch, kind, dtype, peaked)


def sampling_case(name: str, vocab: int, batch: int, kind: str, dtype: torch.dtype, peaked: bool) -> Case:
    sets = rotating(batch * vocab * dtype.itemsize, 8)
    logits = [noise(batch, vocab, scale=2.5, dtype=dtype) for _ in range(sets)]
    if peaked:
        for x in logits:
            x.scatter_add_(
                1, torch.randint(0, vocab, (batch, 12), device="cuda"), noise(batch, 12, dtype=dtype) * 3 + 12
            )
    columns, out = sampling_columns(batch, **KINDS[kind]), SampleOut.empty(batch, "cuda")
    truncated = not kind.startswith(("T=", "greedy"))
    spaces = {tile: SampleWorkspace.empty(batch, vocab, "cuda", tile=tile) for tile in (1024, 2048, 4096)}
    choices = [(2048, Warps()), (2048, Warps(scan=2, bounds=2)), (2048, Warps(cut=4, threshold=8))]
    if not truncated:
        choices = [(1024, Warps(scan=2)), (2048, Warps(scan=2)), (2048, Warps()), (4096, Warps(scan=4))]
    variants = {}
    for tile, warps in choices:

        def run(i: int, tile: int = tile, warps: Warps = warps) -> object:
            return sample_rows(logits[i], columns, out, spaces[tile], truncated, warps=warps)

        variants[f"{tile}/w{warps.scan}.{warps.cut}.{warps.threshold}.{warps.bounds}"] = run

    def check() -> float:
        few = min(batch, 16)
        narrow = SampleOut.empty(batch, "cuda")
        expected = sample_rows_reference(logits[0][:few], columns, narrow)
        wrong = int((out.ids_B[:few] != expected.ids_B[:few]).sum())
        return wrong + relative(out.processed_B[:few], expected.processed_B[:few])

    def baseline(i: int) -> object:
        wide = logits[i].float()
        ids = (wide - torch.empty_like(wide).exponential_().log_()).argmax(-1)
        return ids, torch.log_softmax(wide, -1).gather(1, ids[:, None])

    def poison() -> None:
        out.ids_B.fill_(-1)
        out.processed_B.fill_(float("nan"))

    return Case(name, batch * vocab * dtype.itemsize, sets, variants, baseline, poison, check, 1e-4)


LAYERS = {
    "8b": (("qkv", 6144, 4096, ""), ("o", 4096, 4096, "residual"), ("gate-up", 24576, 4096, "gated"),
           ("down", 4096, 12288, "residual"), ("head", 151_936, 4096, "")),
    "0.6b": (("qkv", 4096, 1024, "norm"), ("o", 1024, 2048, "residual"), ("gate-up", 6144, 1024, "norm gated"),
             ("down", 1024, 3072, "residual"), ("head", 151_936, 1024, "")),
    "smol": (("qkv", 960, 576, "norm"), ("o", 576, 576, "residual"), ("gate-up", 3072, 576, "norm gated"),
             ("down", 576, 1536, "residual"), ("head", 49_152, 576, "")),
}  # fmt: skip


def gemv_cases() -> Iterator[Case]:
    big = [GemvConfig(2, 4096, 4), GemvConfig(4, 2048, 4), GemvConfig(8, 1024, 4), GemvConfig(2, 2048, 4)]
    big += [GemvConfig(1, 4096, 4), GemvConfig(4, 512, 2)]
    small = [GemvConfig(1, 1024, 2), GemvConfig(2, 1024, 2), GemvConfig(4, 512, 2), GemvConfig(2, 512, 1)]
    for model, layers in LAYERS.items():
        for layer, outputs, inputs, option in layers:
            configs = {f"{c.outputs}x{c.inputs}/w{c.warps}": c for c in (big if model == "8b" else small)}
            yield product_case(f"gemv {model} {layer}", 1, outputs, inputs, option, configs)


def skinny_cases() -> Iterator[Case]:
    """The norm comes scaled from the product before, so that it costs these products nothing."""
    narrow = [(16, 256, 4, 4), (16, 256, 2, 4), (16, 512, 4, 3), (16, 128, 4, 6), (32, 128, 4, 6), (32, 256, 4, 4)]
    wide = [(32, 128, 4, 5), (64, 128, 4, 4), (64, 64, 4, 6), (32, 256, 4, 4), (16, 256, 2, 4), (64, 256, 4, 3)]
    for model in ("0.6b", "smol"):
        for rows in (4, 32, 64):
            for layer, outputs, inputs, option in LAYERS[model][:4]:
                configs = {}
                for columns, chunk, warps, stages in narrow if "residual" in option else wide:
                    config = SkinnyConfig(columns, min(chunk, inputs & -inputs), warps, stages)
                    configs[f"{columns}x{config.inputs}/w{warps}s{stages}"] = config
                kind = "gated" if "gated" in option else option if option == "residual" else ""
                yield product_case(f"skinny {model} {layer}", rows, outputs, inputs, kind, configs)


def product_case(name: str, rows: int, outputs: int, inputs: int, option: str, configs: dict) -> Case:
    gated, sets = "gated" in option, rotating(outputs * inputs * 2)
    weights = [noise(outputs, inputs, scale=inputs**-0.5) for _ in range(sets)]
    x, width = noise(rows, inputs), outputs // 2 if gated else outputs
    out = noise(rows, width)
    norm = InputNorm(noise(inputs), 1e-6) if "norm" in option else None
    residual = noise(rows, width) if "residual" in option else None

    def expected() -> torch.Tensor:
        return gemv_reference(x, weights[0], None, norm, residual, gated)

    variants = {}
    for label, config in configs.items():

        def run(i: int, config: GemvConfig | SkinnyConfig = config) -> object:
            if isinstance(config, GemvConfig):
                return gemv(x, weights[i], None, norm, residual, gated, out, config)
            return skinny_matmul(x, weights[i], None, residual, gated, out, config)

        variants[label] = run
    return Case(
        f"{name} b{rows} {option}".strip(),
        weights[0].nbytes,
        sets,
        variants,
        lambda i: torch.mm(x, weights[i].t()),
        lambda: out.fill_(float("nan")),
        lambda: relative(out, expected()),
    )


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "sample": sampling_cases,
    "gemv": gemv_cases,
    "skinny": skinny_cases,
    "norm": norm_cases,
    "rope": rope_cases,
    "gate": gate_cases,
    "embedding": embedding_cases,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--only", nargs="*", choices=list(GROUPS), default=list(GROUPS))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device")
        return
    torch.manual_seed(time.time_ns() % 2**31)
    deadline, rows, left = time.monotonic() + arguments.seconds, [], 0
    for name in arguments.only:
        for case in GROUPS[name]():
            if time.monotonic() > deadline:
                left += len(case.variants)
                continue
            measured, skipped = measure(case, deadline)
            rows += measured
            left += skipped
    rows.append(Row("all", "variants left out", left, ""))
    report("gpu_ops", rows, arguments.json)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
