"""The Triton attention backend on a CUDA device against the definition in double precision."""

from __future__ import annotations

import random

import pytest
import torch

from engine.attention.registry import make_attention, resolve_attention
from engine.attention.triton import TritonAttention
from engine.batch import ForwardBatch, SharedPrefix
from engine.kernels.decode_attention import LayerShape
from engine.kernels.prefill_attention import prefill_reference
from engine.memory.kv_pool import KVPool
from engine.models.spec import LayerSpec, ModelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SINK, WINDOW, SOFTCAP = {"sink": True}, {"window": 100}, {"softcap": 20.0}
ALL = SINK | WINDOW | SOFTCAP
LONG = [32_000, 1, 640, 17]
SHORT = [1, 2, 15, 16, 17, 31, 63, 64, 65, 300]
# head size, key/value heads, group, page size, lengths, dtype, layer: every pair of the values that
# matter together appears once.
SHAPES = [
    (64, 3, 3, 16, LONG, BF16, {}),
    (64, 2, 16, 1, SHORT, FP16, SINK),
    (64, 8, 1, 64, SHORT, FP32, WINDOW),
    (96, 2, 4, 4, LONG, FP16, {}),
    (96, 4, 2, 16, SHORT, BF16, ALL),
    (96, 1, 8, 64, SHORT, FP32, SOFTCAP),
    (128, 8, 4, 16, LONG, BF16, {}),
    (128, 8, 2, 64, SHORT, BF16, WINDOW),
    (128, 1, 16, 4, LONG, BF16, SOFTCAP),
    (128, 2, 5, 1, SHORT, FP32, {}),
    (256, 1, 8, 16, LONG, BF16, WINDOW),
    (256, 2, 2, 64, SHORT, FP16, SOFTCAP),
    (256, 4, 1, 1, SHORT, BF16, SINK),
    (256, 1, 4, 4, SHORT, FP32, ALL),
]


def make_spec(size: int, kv_heads: int, group: int, layer: dict) -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=32,
        context_len=65_536,
        hidden=64,
        intermediate=32,
        num_layers=1,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=size,
        layers=(LayerSpec(**layer),),
        tied=True,
        eos_ids=(),
        dtype=BF16,
    )


class Scene:
    """Rows whose context is in the pool except their last `queries` tokens, which come with the step."""

    def __init__(self, spec: ModelSpec, lengths, queries, page_size, dtype, prefixes=(), columns=None) -> None:
        self.spec, self.lengths, self.queries, self.prefixes = spec, lengths, queries, list(prefixes)
        columns = columns or max(1, *(-(-length // page_size) for length in lengths))
        used = [-(-length // page_size) for length in lengths]
        pages = list(range(1, sum(used) + 1))
        random.Random(0).shuffle(pages)
        tables = torch.zeros(len(lengths), columns, dtype=torch.int32)
        for row, count in enumerate(used):
            tables[row, :count] = torch.tensor([pages.pop() for _ in range(count)], dtype=torch.int32)
        for prefix in sorted(self.prefixes, key=lambda prefix: -prefix.num_pages):
            tables[prefix.start : prefix.end, : prefix.num_pages] = tables[prefix.start, : prefix.num_pages].clone()
        self.pool = KVPool(spec, sum(used) + 1, page_size, dtype, DEVICE)
        self.pool.fill(float("nan"))
        slots, stored = [], []
        for row, (length, count) in enumerate(zip(lengths, queries, strict=True)):
            position = torch.arange(length)
            slot = tables[row, position // page_size].long() * page_size + position % page_size
            slots.append(slot[length - count :] if length else slot)
            stored.append(slot[: max(0, length - count)])
        stored = torch.cat(stored).unique().to(DEVICE)
        width = (2 * spec.num_kv_heads, spec.head_dim)
        self.pool.tokens(0)[stored] = torch.randn(stored.shape[0], *width, device=DEVICE).to(dtype)
        self.slots = torch.cat(slots).to(DEVICE)
        self.tables = tables.to(DEVICE)
        heads = spec.num_heads + width[0]
        self.qkv = torch.randn(self.slots.shape[0], heads, spec.head_dim, device=DEVICE).to(dtype)
        self.sink = torch.randn(spec.num_heads, device=DEVICE) if spec.layers[0].sink else None
        self.shape = LayerShape(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            page_size,
            spec.layers[0].window or 0,
            spec.layers[0].softcap or 0.0,
            spec.layers[0].sink,
        )

    def parts(self):
        return self.qkv.split((self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads), dim=1)

    def write(self) -> None:
        self.pool.tokens(0)[self.slots] = self.qkv[:, self.spec.num_heads :]

    def batch(self, num_decode: int) -> ForwardBatch:
        return ForwardBatch(
            input_ids_T=torch.zeros_like(self.slots),
            positions_T=torch.zeros_like(self.slots),
            write_slots_T=self.slots,
            query_lens=list(self.queries),
            seq_lens=list(self.lengths),
            page_tables_BP=self.tables,
            row_keys=list(range(len(self.lengths))),
            num_decode=num_decode,
            logit_rows_R=self.slots[:0],
            shared_prefixes=self.prefixes,
        )

    def expected(self) -> torch.Tensor:
        """Of the queries, with their keys in the pool."""
        q_TNH, layer_kv = self.parts()[0], self.pool.tokens(0)
        return prefill_reference(q_TNH, layer_kv, self.tables, self.lengths, self.queries, self.shape, self.sink)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = float((actual.double() - expected).norm() / expected.norm())
    assert error < TOLERANCE[actual.dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize("size, kv_heads, group, page_size, lengths, dtype, layer", SHAPES)
def test_decode_rows(size, kv_heads, group, page_size, lengths, dtype, layer) -> None:
    scene = Scene(make_spec(size, kv_heads, group, layer), lengths, [1] * len(lengths), page_size, dtype)
    backend = TritonAttention(scene.spec)
    for deterministic in (False, True):
        backend = TritonAttention(scene.spec, deterministic=deterministic)
        backend.plan(scene.batch(len(lengths)), scene.pool)
        close(backend.run(*scene.parts(), 0, scene.sink), scene.expected())


@pytest.mark.parametrize("size, kv_heads, group, page_size, lengths, dtype, layer", SHAPES)
def test_prefill_and_verify_rows(size, kv_heads, group, page_size, lengths, dtype, layer) -> None:
    """Prompts, chunks after cached context, and rows of 1 to 16 queries."""
    lengths = [min(length, 3_000) for length in lengths]
    for longest in (1_000, 16):
        queries = [min(length, 1 + (row * 331 + 700) % longest) for row, length in enumerate(lengths)]
        scene = Scene(make_spec(size, kv_heads, group, layer), lengths, queries, page_size, dtype)
        backend = TritonAttention(scene.spec)
        backend.plan(scene.batch(0), scene.pool)
        close(backend.run(*scene.parts(), 0, scene.sink), scene.expected())


def test_mixed_batch_with_a_prefix_that_pays() -> None:
    spec = make_spec(128, 8, 4, {})
    lengths, queries = [2100] * 16 + [77, 900], [1] * 17 + [300]
    scene = Scene(spec, lengths, queries, 16, BF16, [SharedPrefix(0, 16, 128)])
    backend = TritonAttention(spec)
    backend.plan(scene.batch(17), scene.pool)
    assert backend._decode is not None and backend._decode.prefix is not None
    close(backend.run(*scene.parts(), 0), scene.expected())


@pytest.mark.parametrize("layer", [{}, ALL])
@pytest.mark.parametrize("kv_heads, group, size", [(8, 4, 128), (3, 3, 64), (1, 16, 96)])
def test_one_captured_graph_serves_any_lengths_and_prefixes(kv_heads, group, size, layer) -> None:
    spec = make_spec(size, kv_heads, group, layer)
    max_rows, columns, page = 48, 256, 16
    backend = TritonAttention(spec)
    shared = plain = None
    q = torch.randn(max_rows, spec.num_heads, size, device=DEVICE, dtype=BF16)
    out = torch.empty_like(q)
    rounds = [
        ([700] * 48, [SharedPrefix(0, 24, 40), SharedPrefix(24, 48, 32)]),
        ([4000, *[1030 + row for row in range(40)]], [SharedPrefix(1, 41, 20), SharedPrefix(1, 17, 60)]),
        ([5, 0, 33, 0, 1], []),
        ([2000 + row for row in range(20)], [SharedPrefix(0, 20, 120)]),
    ]
    static = None
    for lengths, prefixes in rounds:
        live = [row for row, length in enumerate(lengths) if length]
        queries = [1 if length else 0 for length in lengths]
        scene = Scene(spec, lengths, queries, page, BF16, prefixes, columns)
        scene.write()
        q[live] = scene.parts()[0]
        if static is None:
            static = torch.zeros(600_000, *scene.pool.tokens(0).shape[1:], device=DEVICE, dtype=BF16)
            sink = torch.empty(spec.num_heads, device=DEVICE) if scene.sink is not None else None
            graphs = []
            for with_prefix in (True, False):
                metadata = backend.plan_decode_buffers(max_rows, columns, scene.pool, shared=with_prefix)
                for _ in range(2):
                    metadata.cut()
                    backend.run_decode(q, static, metadata, out, 0, sink)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    metadata.cut()
                    backend.run_decode(q, static, metadata, out, 0, sink)
                graphs.append((graph, metadata))
            shared, plain = graphs[0][1], graphs[1][1]
        static[: scene.pool.tokens(0).shape[0]] = scene.pool.tokens(0)
        if sink is not None:
            sink.copy_(scene.sink)
        for graph, metadata in graphs:
            metadata.page_tables_BP.zero_()
            metadata.page_tables_BP[: len(lengths)] = scene.tables
            metadata.seq_lens_B.zero_()
            metadata.seq_lens_B[: len(lengths)] = torch.tensor(lengths)
            if metadata is shared:
                assert metadata.set_prefixes(prefixes) == len(prefixes)
            for _ in range(2):
                out.fill_(float("nan"))
                graph.replay()
                close(out[live], scene.expected())
                idle = [row for row in range(max_rows) if row not in live]
                assert not out[idle].any()
    assert plain is not None


def test_deterministic_rows_keep_their_bits_in_any_batch() -> None:
    spec = make_spec(128, 8, 4, {})
    lengths = [70, 9_000, 3, 641, 2_000]
    scene = Scene(spec, lengths, [1] * 5, 16, BF16)

    def run(rows: list[int]) -> torch.Tensor:
        batch = scene.batch(5)
        batch.write_slots_T, batch.page_tables_BP = scene.slots[rows], scene.tables[rows]
        batch.query_lens, batch.seq_lens = [1] * len(rows), [lengths[row] for row in rows]
        batch.row_keys, batch.num_decode = rows, len(rows)
        backend = TritonAttention(spec, deterministic=True)
        backend.plan(batch, scene.pool)
        return backend.run(*(part[rows] for part in scene.parts()), 0)

    together = run([0, 1, 2, 3, 4])
    assert torch.equal(run([4, 3, 2, 1, 0]).flip(0), together)
    for row in range(5):
        assert torch.equal(run([row])[0], together[row])


def test_auto_picks_it() -> None:
    spec = make_spec(128, 8, 4, {})
    assert resolve_attention("auto", spec, DEVICE) == "triton"
    assert make_attention("auto", spec, DEVICE).name == "triton"
    assert resolve_attention("auto", make_spec(128, 8, 4, {"bias": 4}), DEVICE) == "torch_ref"
