"""The Triton attention backend in Triton's interpreter against the definition, in fp32 on the CPU."""

from __future__ import annotations

import random

import pytest
import torch

from engine.attention.torch_ref import TorchReference
from engine.attention.triton import TritonAttention
from engine.batch import ForwardBatch, SharedPrefix
from engine.errors import Unsupported
from engine.kernels.attention_config import prefix_config
from engine.kernels.decode_attention import LayerShape, States
from engine.kernels.prefix_attention import prefix_attention, prefix_reference
from engine.memory.kv_pool import KVPool
from engine.models.spec import LayerSpec, ModelSpec
from tests.unit.kernels.attention_checks import check_cuts, check_merges, check_pieces


def make_spec(heads=6, kv_heads=2, size=16, **layer) -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=32,
        context_len=512,
        hidden=heads * size,
        intermediate=32,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        layers=(LayerSpec(**layer),),
        tied=True,
        eos_ids=(),
        dtype=torch.float32,
    )


class Scene:
    """Rows with random pages; `prefixes` are made true by copying page-table entries."""

    def __init__(self, spec, lengths, queries, page_size, prefixes=(), seed=0) -> None:
        self.spec, self.page_size, self.prefixes = spec, page_size, list(prefixes)
        self.lengths, self.queries = lengths, queries
        noise = torch.Generator().manual_seed(seed)
        columns = max(2, max(-(-length // page_size) for length in lengths))
        pages = list(range(1, len(lengths) * columns + 1))
        random.Random(seed).shuffle(pages)
        self.tables = torch.zeros(len(lengths), columns, dtype=torch.int32)
        for row, length in enumerate(lengths):
            for column in range(-(-length // page_size)):
                self.tables[row, column] = pages.pop()
        for prefix in sorted(self.prefixes, key=lambda prefix: -prefix.num_pages):
            self.tables[prefix.start : prefix.end, : prefix.num_pages] = self.tables[prefix.start, : prefix.num_pages]
        tokens = sum(queries)
        width = spec.num_heads + 2 * spec.num_kv_heads
        self.qkv = torch.randn(tokens, width, spec.head_dim, generator=noise)
        self.sink = torch.randn(spec.num_heads, generator=noise) if spec.layers[0].sink else None
        self.pool = KVPool(spec, len(lengths) * columns + 1, page_size, torch.float32, "cpu")
        self.pool.fill(float("nan"))
        for row, (length, count) in enumerate(zip(lengths, queries, strict=True)):
            for position in range(max(0, length - count)):
                slot = self.slot(row, position)
                stored = torch.randn(2 * spec.num_kv_heads, spec.head_dim, generator=noise)
                self.pool.tokens(0)[slot] = stored

    def slot(self, row: int, position: int) -> int:
        return int(self.tables[row, position // self.page_size]) * self.page_size + position % self.page_size

    def batch(self, num_decode: int) -> ForwardBatch:
        rows = list(zip(self.lengths, self.queries, strict=True))
        positions = [p for length, count in rows for p in range(length - count, length)]
        slots = [self.slot(row, p) for row, (n, count) in enumerate(rows) for p in range(n - count, n)]
        return ForwardBatch(
            input_ids_T=torch.zeros(len(slots), dtype=torch.long),
            positions_T=torch.tensor(positions),
            write_slots_T=torch.tensor(slots),
            query_lens=list(self.queries),
            seq_lens=list(self.lengths),
            page_tables_BP=self.tables,
            row_keys=list(range(len(rows))),
            num_decode=num_decode,
            logit_rows_R=torch.zeros(0, dtype=torch.long),
            shared_prefixes=self.prefixes,
        )

    def parts(self):
        return self.qkv.split((self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads), dim=1)

    def expected(self) -> torch.Tensor:
        backend = TorchReference(self.spec)
        backend.plan(self.batch(0), self.pool)
        return backend.run(*self.parts(), 0, self.sink)


def check_eager(scene: Scene, num_decode: int, **options) -> TritonAttention:
    expected = scene.expected()
    backend = TritonAttention(scene.spec, **options)
    backend.plan(scene.batch(num_decode), scene.pool)
    torch.testing.assert_close(backend.run(*scene.parts(), 0, scene.sink), expected, atol=2e-5, rtol=0)
    return backend


def check_graph(scene: Scene, max_rows: int, levels: int) -> None:
    """Through the fixed buffers, with rows to spare and a poisoned output."""
    expected = scene.expected()
    backend = TritonAttention(scene.spec)
    columns = scene.tables.shape[1]
    metadata = backend.plan_decode_buffers(max_rows, columns, scene.pool, shared=levels > 0)
    live = [row for row, length in enumerate(scene.lengths) if length]
    rows = len(scene.lengths)
    metadata.page_tables_BP[:rows] = scene.tables
    metadata.seq_lens_B[:rows] = torch.tensor(scene.lengths, dtype=torch.int32)
    if levels:
        assert metadata.set_prefixes(scene.prefixes) == len(scene.prefixes)
        assert int(metadata.own_start_B.max()) == max(p.num_pages for p in scene.prefixes) * scene.page_size
        metadata.prefix.mean_INH.fill_(float("nan"))
    q = torch.full((max_rows, scene.spec.num_heads, scene.spec.head_dim), 3.0)
    q[live] = scene.parts()[0]
    out = torch.full_like(q, float("nan"))
    for _ in range(2):  # the second time over what the first left in the workspace
        metadata.cut()
        backend.run_decode(q, scene.pool.tokens(0), metadata, out, 0, scene.sink)
        torch.testing.assert_close(out[live], expected, atol=2e-5, rtol=0)
        idle = [row for row in range(max_rows) if row not in live]
        assert not out[idle].any()
        assert not metadata.arrived_BK.any()


LAYERS = [{}, {"window": 7}, {"sink": True}, {"softcap": 2.0}, {"window": 5, "sink": True, "softcap": 3.0}]
SLOW = pytest.mark.slow


@pytest.mark.parametrize("layer", [LAYERS[0], *(pytest.param(layer, marks=SLOW) for layer in LAYERS[1:4]), LAYERS[4]])
@pytest.mark.parametrize("page_size", [pytest.param(1, marks=SLOW), 4, pytest.param(16, marks=SLOW)])
def test_mixed_batches(layer: dict, page_size: int) -> None:
    scene = Scene(make_spec(**layer), [33, 1, 9, 16, 40, 5], [1, 1, 1, 7, 3, 5], page_size, seed=page_size)
    check_eager(scene, 3)


@pytest.mark.parametrize(
    "heads, kv_heads, size",
    [(3, 1, 96), *(pytest.param(*shape, marks=SLOW) for shape in ((2, 2, 64), (16, 1, 16), (4, 1, 32)))],
)
def test_shapes(heads: int, kv_heads: int, size: int) -> None:
    check_eager(Scene(make_spec(heads, kv_heads, size), [130, 3, 21], [1, 1, 4], 4), 2)


def test_splits_of_long_rows() -> None:
    scene = Scene(make_spec(2, 1), [1200, 1100], [1, 2], 16)
    backend = check_eager(scene, 1)
    assert backend._prefill.splits > 1 and not backend._prefill.arrived_XK.any()
    assert int(backend._decode.items_W8[0, 4]) > 1


@pytest.mark.parametrize("layer", [LAYERS[1], pytest.param(LAYERS[4], marks=SLOW)])
def test_one_level(layer: dict) -> None:
    prefixes = [SharedPrefix(0, 3, 4), SharedPrefix(4, 6, 2)]
    scene = Scene(make_spec(**layer), [17, 25, 19, 6, 9, 12], [1] * 6, 4, prefixes)
    check_graph(scene, 8, 1)


@pytest.mark.parametrize("layer", [*(pytest.param(layer, marks=SLOW) for layer in LAYERS[:4]), LAYERS[4]])
def test_two_levels(layer: dict) -> None:
    prefixes = [SharedPrefix(0, 5, 2), SharedPrefix(0, 3, 5), SharedPrefix(3, 5, 4)]
    scene = Scene(make_spec(**layer), [24, 21, 40, 17, 20, 3], [1] * 6, 4, prefixes)
    check_graph(scene, 6, 2)


def test_prefixes_in_several_pieces_and_tiles() -> None:
    spec = make_spec(8, 1)
    rows = prefix_config(16, 4, 8).block_m // 8 + 1
    scene = Scene(spec, [601] + [600 + i for i in range(1, rows)], [1] * rows, 16, [SharedPrefix(0, rows, 37)])
    check_graph(scene, rows, 1)


@pytest.mark.parametrize("layer", [{}, {"window": 9, "softcap": 3.0}])
def test_pieces_become_states(layer: dict) -> None:
    """One prefix in two pieces and two tiles, one that starts inside a page, and padding."""
    scene = Scene(make_spec(**layer), [21, 24, 18, 30], [1] * 4, 4, [SharedPrefix(0, 3, 4)])
    shape = LayerShape(6, 2, 16, 4, layer.get("window", 0), layer.get("softcap", 0.0))
    pieces_X8 = torch.tensor(
        [[0, 2, 0, 8, 0, 0], [2, 1, 0, 8, 0, 0], [0, 3, 8, 16, 0, 1], [0] * 6, [3, 1, 5, 13, 3, 0]], dtype=torch.int32
    )
    pieces_X8 = torch.nn.functional.pad(pieces_X8, (0, 2))
    states = States.empty((2, 4), 6, 16, "cpu")
    states.mean_INH.fill_(float("nan"))
    states.lse_IN.fill_(float("nan"))
    arguments = (scene.parts()[0], scene.pool.tokens(0), scene.tables, torch.tensor(scene.lengths), pieces_X8)
    prefix_attention(*arguments, states, shape, prefix_config(16, 4, 3))
    mean_SBNH, lse_SBN = prefix_reference(*arguments, 2, shape)
    assert states.lse_IN[1, 3].isnan().all() and states.mean_INH[1, 3].isnan().all(), "no piece writes there"
    states.lse_IN[1, 3], states.mean_INH[1, 3] = float("-inf"), 0.0
    assert lse_SBN[0, :3].isinf().all() == ("window" in layer), "out of sight of the window"
    torch.testing.assert_close(states.lse_IN.double(), lse_SBN, atol=1e-5, rtol=0)
    torch.testing.assert_close(states.mean_INH.double(), mean_SBNH, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sink", [False, True])
def test_stored_states_are_merged(sink: bool) -> None:
    check_merges(torch.device("cpu"), sink)


def test_empty_rows() -> None:
    scene = Scene(make_spec(sink=True), [0, 21, 0, 18, 0], [0, 1, 0, 1, 0], 4, [SharedPrefix(1, 4, 4)])
    check_graph(scene, 5, 0)
    check_graph(scene, 7, 1)


def test_eager_takes_prefixes_that_pay(monkeypatch) -> None:
    import engine.attention.decode_metadata as decode_metadata

    prefixes = [SharedPrefix(0, 3, 4)]
    scene = Scene(make_spec(), [17, 25, 19, 6], [1, 1, 1, 2], 4, prefixes)
    assert check_eager(scene, 3)._decode.prefix is None
    monkeypatch.setattr(decode_metadata, "MIN_SAVED_BYTES", 1)
    monkeypatch.setattr(decode_metadata, "MIN_SAVED_SEGMENT_BYTES", 1)
    backend = check_eager(scene, 3)
    assert backend._decode.own_start_B.tolist() == [16] * 3


def test_prefixes_that_do_not_fit_are_left_out() -> None:
    prefixes = [SharedPrefix(0, 4, 2), SharedPrefix(0, 2, 4), SharedPrefix(2, 4, 5)]
    scene = Scene(make_spec(), [24, 21, 40, 21], [1] * 4, 4, prefixes)
    backend = TritonAttention(scene.spec)
    metadata = backend.plan_decode_buffers(4, 10, scene.pool, shared=True)
    metadata.pieces_X8 = metadata.pieces_X8[:2]
    assert metadata.set_prefixes(prefixes) == 2
    assert metadata.own_start_B.tolist() == [8, 8, 20, 20]


def test_rows_are_cut_as_the_definition_says() -> None:
    check_cuts(torch.device("cpu"))


PIECES = [SharedPrefix(0, 5, 17), SharedPrefix(0, 3, 40)]
"""Of 16 tokens a page: one piece and a part of the next for five rows, two and a half for three."""


@pytest.mark.parametrize("layer", [{}, pytest.param({"window": 300, "sink": True, "softcap": 3.0}, marks=SLOW)])
def test_deterministic_rows_keep_their_bits_in_any_batch(layer: dict) -> None:
    """With any neighbours. Read together, pieces are the same but for the interpreter's products, whose
    bits depend on a row's place in its tile; `tests/gpu` compares those bits."""
    lengths = [900, 700, 641, 280, 513, 3, 256, 257]
    scene = Scene(make_spec(2, 1, **layer), lengths, [1] * 8, 16, PIECES)
    everyone = list(range(len(lengths)))
    apart = _run_rows(scene, everyone, [])
    torch.testing.assert_close(apart, scene.expected(), atol=2e-5, rtol=0)
    assert torch.equal(_run_rows(scene, everyone[::-1], []).flip(0), apart)
    for row in (0, 3, 6, 7):
        assert torch.equal(_run_rows(scene, [row], [])[0], apart[row])
    torch.testing.assert_close(_run_rows(scene, everyone, PIECES), apart, atol=2e-7, rtol=0)
    torch.testing.assert_close(_run_rows(scene, [0, 1, 2], [SharedPrefix(0, 2, 30)]), apart[:3], atol=2e-7, rtol=0)


def _run_rows(scene: Scene, rows: list[int], prefixes: list[SharedPrefix]) -> torch.Tensor:
    """Through the fixed buffers, with rows to spare and what a step before left in them."""
    scene.expected()  # writes the step's keys and values
    backend = TritonAttention(scene.spec, deterministic=True)
    metadata = backend.plan_decode_buffers(len(rows) + 2, scene.tables.shape[1], scene.pool)
    metadata.page_tables_BP[: len(rows)] = scene.tables[rows]
    assert metadata.prefix is not None
    metadata.prefix.mean_INH.fill_(float("nan"))
    q = torch.full((len(rows) + 2, scene.spec.num_heads, scene.spec.head_dim), 3.0)
    q[: len(rows)] = scene.parts()[0][rows]
    out = torch.full_like(q, float("nan"))
    lengths = torch.tensor([scene.lengths[row] for row in rows], dtype=torch.int32)
    for now in ((lengths - 300).clamp(min=0), lengths) if len(rows) == 3 else (lengths,):
        metadata.seq_lens_B[: len(rows)] = now
        metadata.set_prefixes(prefixes if now is lengths else [])
        metadata.cut()
        backend.run_decode(q, scene.pool.tokens(0), metadata, out, 0, scene.sink)
    assert not out[len(rows) :].any() and not metadata.arrived_BK.any()
    return out[: len(rows)]


def test_deterministic_rows_eagerly() -> None:
    scene = Scene(make_spec(2, 1), [600, 30, 290, 7], [1, 1, 1, 3], 16, [SharedPrefix(0, 2, 1)])
    check_eager(scene, 3, deterministic=True)


def test_pieces_lie_at_fixed_positions() -> None:
    check_pieces(torch.device("cpu"))


def test_a_bias_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match=r"layers\[0\]\.bias"):
        TritonAttention(make_spec(bias=4))
