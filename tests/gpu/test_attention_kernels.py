"""The Triton attention backend on a CUDA device against the definition in double precision."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from engine.attention.registry import make_attention, resolve_attention
from engine.attention.triton import TritonAttention
from engine.batch import ForwardBatch, SharedPrefix
from engine.kernels.decode_attention import LayerShape
from engine.kernels.prefill_attention import prefill_reference
from engine.memory.kv_pool import KVPool
from engine.models.spec import LayerSpec, ModelSpec
from engine.runner.compile_ahead import compile_all, missing_kernels
from tests.pairwise import pairwise
from tests.unit.kernels.attention_checks import (
    VerifyRounds,
    check_cuts,
    check_merges,
    check_pieces,
    check_verify_pieces,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
BF16 = torch.bfloat16
ALL = {"sink": True, "window": 100, "softcap": 20.0}
KV_HEADS = {1: 4, 3: 3, 4: 2, 8: 2, 16: 1}
"""Key/value heads, by the query heads that share one."""
CASES = [
    pytest.param(case, id="-".join(str(value) for value in case.values()))
    for case in pairwise(
        {
            "size": (64, 96, 128, 256),
            "group": (1, 3, 4, 8, 16),
            "page": (1, 4, 16, 64),
            "reach": ("short", "long"),
            "dtype": (torch.bfloat16, torch.float16, torch.float32),
            "kind": ("plain", "window", "sink-softcap", "all"),
        }
    )
]
LAYERS = {"plain": {}, "window": {"window": 100}, "sink-softcap": {"sink": True, "softcap": 20.0}, "all": ALL}
LENGTHS = {"short": [1, 2, 15, 16, 17, 31, 63, 64, 65, 300], "long": [32_768, 1, 640, 17]}


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


Check = tuple[Scene, Callable[[], torch.Tensor]]
"""A scene, and what computes its queries' outputs."""


def decode_rows(case: dict) -> Iterator[Check]:
    """In any batch, and cut the same whatever the batch."""
    spec, lengths = spec_of(case), LENGTHS[case["reach"]]
    for deterministic in (False, True):
        scene = Scene(spec, lengths, [1] * len(lengths), case["page"], case["dtype"])
        yield scene, partial(run_eager, scene, len(lengths), deterministic)


def prompt_rows(case: dict) -> Iterator[Check]:
    """Whole prompts, and chunks behind cached context."""
    lengths = LENGTHS[case["reach"]]
    queries = [min(length, 64 if length > 3_000 else 1 + (row * 331 + 700) % 640) for row, length in enumerate(lengths)]
    scene = Scene(spec_of(case), lengths, queries, case["page"], case["dtype"])
    yield scene, partial(run_eager, scene, 0)


def verify_rows(case: dict) -> Iterator[Check]:
    """1 to 16 queries a row, one of them without context."""
    lengths, queries = [], []
    for row, length in enumerate(LENGTHS[case["reach"]] * 4):
        queries.append(1 + row * 7 % 16)
        lengths.append(max(length, queries[-1]))
    assert sorted(set(queries[:16])) == list(range(1, 17))
    scene = Scene(spec_of(case), lengths[:16], queries[:16], case["page"], case["dtype"])
    yield scene, partial(run_eager, scene, 0)


def shared_rows(case: dict) -> Iterator[Check]:
    """Two levels of shared prefixes, and rows of length 0 before, between and after."""
    page, long = case["page"], case["reach"] == "long"
    outer, inner = (8_192, 12_288) if long else (128, 320)
    lengths = [0, *(inner + 1 + 37 * row for row in range(5)), 0, *(outer + 1 + 29 * row for row in range(4)), 5, 0]
    prefixes = [SharedPrefix(1, 11, outer // page), SharedPrefix(1, 6, inner // page)]
    for deterministic in (False, True):
        scene = Scene(spec_of(case), lengths, [min(1, length) for length in lengths], page, case["dtype"], prefixes)
        yield scene, partial(run_buffers, scene, deterministic)


def shared_verify_rows(case: dict) -> Iterator[Check]:
    """The same of rows of up to 16 queries, all in one round."""
    page, long = case["page"], case["reach"] == "long"
    outer, inner = (8_192, 12_288) if long else (128, 320)
    queries = [0, 3, 16, 1, 8, 5, 0, 2, 16, 11, 4, 5, 0]
    behind = [0, *(inner + 37 * row for row in range(5)), 0, *(outer + 29 * row for row in range(4)), 0, 0]
    prefixes = [SharedPrefix(1, 11, outer // page), SharedPrefix(1, 6, inner // page)]
    lengths = [context + count for context, count in zip(behind, queries, strict=True)]
    scene = Scene(spec_of(case), lengths, queries, page, case["dtype"], prefixes)
    yield scene, partial(run_round, scene)


def run_round(scene: Scene) -> torch.Tensor:
    rows, tokens = len(scene.lengths), sum(scene.queries)
    buffers = VerifyRounds(scene.spec, scene.pool, scene.tables.shape[1], rows + 3, tokens + 5)
    buffers.fill(scene.tables, scene.lengths, scene.queries, scene.prefixes)
    buffers.q_RNH[:tokens] = scene.parts()[0]
    scene.write()
    buffers.launch(scene.sink)
    return buffers.out_RNH[:tokens]


def run_eager(scene: Scene, num_decode: int, deterministic: bool = False) -> torch.Tensor:
    backend = TritonAttention(scene.spec, deterministic=deterministic)
    backend.plan(scene.batch(num_decode), scene.pool)
    return backend.run(*scene.parts(), 0, scene.sink)


def run_buffers(scene: Scene, deterministic: bool = False) -> torch.Tensor:
    """Through the buffers of a captured graph, which have more rows than there are."""
    rows, live = len(scene.lengths), [row for row, length in enumerate(scene.lengths) if length]
    backend = TritonAttention(scene.spec, deterministic)
    metadata = backend.plan_decode_buffers(rows + 3, scene.tables.shape[1], scene.pool, shared=True)
    metadata.page_tables_BP[:rows] = scene.tables
    metadata.seq_lens_B[:rows] = torch.tensor(scene.lengths, dtype=torch.int32)
    assert metadata.set_prefixes(scene.prefixes) == len(scene.prefixes)
    q_TNH = scene.parts()[0]
    q_BNH = torch.zeros(rows + 3, *q_TNH.shape[1:], device=DEVICE, dtype=q_TNH.dtype)
    q_BNH[live] = q_TNH
    out_BNH = torch.full_like(q_BNH, float("nan"))
    scene.write()
    metadata.cut()
    backend.run_decode(q_BNH, scene.pool.tokens(0), metadata, out_BNH, 0, scene.sink)
    idle = [row for row in range(rows + 3) if row not in live]
    # Rows that are not there become zeros, or the others will be wrong too.
    return out_BNH[live] + out_BNH[idle].abs().sum()


KINDS = [decode_rows, prompt_rows, verify_rows, shared_rows, shared_verify_rows]


def spec_of(case: dict) -> ModelSpec:
    return make_spec(case["size"], KV_HEADS[case["group"]], case["group"], LAYERS[case["kind"]])


@pytest.fixture(scope="module")
def compiled() -> None:
    """Compile what all cases need side by side, rather than each kernel when it is reached."""
    with missing_kernels() as missing:
        for case in CASES:
            for kind in KINDS:
                for _, run in kind(case.values[0]):
                    run()
    torch.cuda.synchronize()
    compile_all(missing, torch.device(DEVICE, torch.cuda.current_device()))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_rows(compiled, kind: Callable[[dict], Iterator[Check]], case: dict) -> None:
    for scene, run in kind(case):
        close(run(), scene.expected())


def test_rows_are_cut_as_the_definition_says() -> None:
    check_cuts(torch.device(DEVICE))
    check_pieces(torch.device(DEVICE))
    check_verify_pieces(torch.device(DEVICE))


@pytest.mark.parametrize("sink", [False, True])
def test_stored_states_are_merged(sink: bool) -> None:
    check_merges(torch.device(DEVICE), sink)


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


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(("size", "layer"), [(128, {}), (64, {}), (128, {"window": 300, "sink": True, "softcap": 9.0})])
def test_deterministic_rows_keep_their_bits_in_any_batch(size: int, layer: dict, dtype: torch.dtype) -> None:
    """With any neighbours, on either path, and whether pieces are read together, in tiles and at places of
    a tile that differ, or alone."""
    spec = make_spec(size, 8, 4, layer)
    lengths = [*(8_200 + 97 * row for row in range(21)), 70, 3, 641, 2_000]
    prefixes = [SharedPrefix(0, 21, 40), SharedPrefix(2, 20, 512)]
    scene = Scene(spec, lengths, [1] * len(lengths), 16, dtype, prefixes)
    scene.write()
    everyone = list(range(len(lengths)))
    together = run_rows(scene, everyone, prefixes)
    close(together, scene.expected())
    assert torch.equal(run_rows(scene, everyone, []), together)
    assert torch.equal(run_rows(scene, everyone[::-1], []).flip(0), together)
    assert torch.equal(run_rows(scene, everyone, [SharedPrefix(0, 5, 40), SharedPrefix(7, 20, 300)]), together)
    for row in (0, 5, 20, 21, 22, 23, 24):
        assert torch.equal(run_rows(scene, [row], [])[0], together[row])
    batch = scene.batch(len(lengths))
    backend = TritonAttention(spec, deterministic=True)
    backend.plan(batch, scene.pool)
    assert torch.equal(backend.run(*scene.parts(), 0, scene.sink), together)


def run_rows(scene: Scene, rows: list[int], prefixes: list[SharedPrefix]) -> torch.Tensor:
    backend = TritonAttention(scene.spec, deterministic=True)
    metadata = backend.plan_decode_buffers(len(rows), scene.tables.shape[1], scene.pool)
    metadata.page_tables_BP.copy_(scene.tables[rows])
    metadata.seq_lens_B.copy_(torch.tensor([scene.lengths[row] for row in rows]))
    metadata.set_prefixes(prefixes)
    q_BNH = scene.parts()[0][rows]
    out_BNH = torch.full_like(q_BNH, float("nan"))
    metadata.cut()
    backend.run_decode(q_BNH, scene.pool.tokens(0), metadata, out_BNH, 0, scene.sink)
    return out_BNH


def test_auto_picks_it() -> None:
    spec = make_spec(128, 8, 4, {})
    assert resolve_attention("auto", spec, DEVICE) == "triton"
    assert make_attention("auto", spec, DEVICE).name == "triton"
    assert resolve_attention("auto", make_spec(128, 8, 4, {"bias": 4}), DEVICE) == "torch_ref"
