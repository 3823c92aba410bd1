"""What is compiled of every kernel: launches on CPU tensors, of which the kernel is kept and none runs.

Owns one entry per family of kernels; those of adapters, mixers and experts are in `compile_layer_entries`. An
entry takes a compute capability and calls the launchers as a model would; where variants are many, each
capability gets another, so that together they cover what differs. A kernel that no entry launches fails
`test_every_kernel_has_an_entry`: add it to an entry, or write one and list it in ENTRIES. Ignores how a launch
is compiled (`tests.launches`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.kernels.attention_config import decode_config, prefill_config, prefix_config, verify_prefix_config
from engine.kernels.block_rows import pack_blocks
from engine.kernels.decode_attention import LayerShape, States, decode_attention
from engine.kernels.decode_pieces import cut_pieces
from engine.kernels.decode_step import advance_rows, gather_rows
from engine.kernels.decode_work import cut_rows
from engine.kernels.draft_context import ContextLayers, write_context
from engine.kernels.draft_notes import ConfidenceWeights, DraftNotes, note_drafts
from engine.kernels.dsa_attention import dsa_attention
from engine.kernels.dsa_index_scores import dsa_index_scores
from engine.kernels.dsa_select import counts_shape, dsa_select
from engine.kernels.embedding_gather import embedding_gather
from engine.kernels.embedding_norm import embedding_norm
from engine.kernels.gemv import InputNorm, gemv
from engine.kernels.invariant_matmul import Partials, invariant_gated_matmul, invariant_matmul
from engine.kernels.invariant_tiles import InvariantTile, gated_tile, segments_of, tile_for
from engine.kernels.keep_features import KeptTokens, keep_features
from engine.kernels.markov_bias import markov_bias
from engine.kernels.merge_states import merge_states
from engine.kernels.mla_decode import mla_decode
from engine.kernels.mla_tile import LatentShape, latent_config
from engine.kernels.prefill_attention import Before, prefill_attention
from engine.kernels.prefix_attention import prefix_attention
from engine.kernels.rms_norm import add_rms_norm, rms_norm
from engine.kernels.rope_kv_write import QKNorm, QKVShape, rope_kv_write
from engine.kernels.round_adapters import tile_adapters
from engine.kernels.round_commit import Drafted, Judged, commit_rounds, record_width
from engine.kernels.round_judge import DraftDraw, JudgeBuffers, draft_seeds, judge_rows, settle_rows
from engine.kernels.round_places import Places, find_places
from engine.kernels.round_rows import BlockRows, RoundLimits, VerifyRows, open_rows, pack_rows
from engine.kernels.round_spend import Calibration, spend_rows
from engine.kernels.row_columns import empty_columns, gather_columns
from engine.kernels.sample_columns import EditColumns, SampleColumns, SampleOut, SampleWorkspace
from engine.kernels.sample_epilogue import sample_rows
from engine.kernels.sample_top import sample_top
from engine.kernels.skinny_matmul import SkinnyConfig, skinny_matmul, skinny_matmul_then_norm
from engine.kernels.swiglu import silu_and_mul
from engine.kernels.verify_pieces import list_pieces
from engine.memory.device_table import DeviceTable
from engine.types import Want
from lora.segments import Tiles
from tests.unit.kernels.compile_layer_entries import adapted_layers, adapters, experts, gated_delta, mamba2, units
from trainer_bridge.drafter.fused_loss import launch_gradient, launch_terms

BF16 = torch.bfloat16
LAYERS = {
    80: LayerShape(9, 3, 64, 16, window=512, softcap=30.0, sink=True),
    90: LayerShape(32, 8, 128, 16),
    100: LayerShape(16, 2, 128, 64, window=4096),
}


def elementwise(capability: int) -> None:
    x = torch.zeros(2, 4096, dtype=BF16)
    rms_norm(x, x[0], 1e-6, unit=capability == 90)
    add_rms_norm(x, x.clone(), x[0], 1e-6)
    silu_and_mul(x)
    embedding_gather(torch.zeros(2, dtype=torch.int64), x)
    embedding_norm(torch.zeros(2, dtype=torch.int64), x, x[0], 1e-6)


def rope(capability: int) -> None:
    normed = capability != 80
    shape = QKVShape(32, 8, 128) if normed else QKVShape(9, 3, 64)
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    table = torch.zeros(8, shape.head_dim, dtype=BF16)
    norm = QKNorm(table[0], table[1], 1e-6) if normed else None
    pool = torch.zeros(16, 2 * shape.num_kv_heads, shape.head_dim, dtype=BF16)
    token = torch.zeros(2, dtype=torch.int64)
    rope_kv_write(torch.zeros(2, width, dtype=BF16), shape, norm, table, table, token, token, pool)


def products(capability: int) -> None:
    x, weight = torch.zeros(4, 1024, dtype=BF16), torch.zeros(2048, 1024, dtype=BF16)
    gated = capability == 90
    norm = InputNorm(x[0], 1e-6)
    gemv(x[:1], weight, norm=norm, gated=gated)
    unscaled = skinny_matmul_then_norm(x, weight[:1024], None, x.clone(), norm)
    skinny_matmul(unscaled, weight, gated=gated, config=SkinnyConfig(64, 64, 4, 4) if gated else None)


def invariant_products(capability: int) -> None:
    """One row, a step's rows, a prompt; tensor maps from compute capability 9.0 on."""
    partials, boxed = Partials.empty("cpu"), capability >= 90
    for rows, outputs in ((1, 2048), (200, 2048), (2000, 16384)):
        x, weight = torch.zeros(rows, 2048, dtype=BF16), torch.zeros(outputs, 2048, dtype=BF16)
        tile = tile_for(rows, outputs, 2048, segments_of(outputs, 2048), 2, boxed, 132)
        invariant_matmul(x, weight, partials=partials, tile=tile)
    x, weight = torch.zeros(33, 1024, dtype=BF16), torch.zeros(32768, 1024, dtype=BF16)
    invariant_gated_matmul(x, weight, partials=partials, tile=gated_tile(33, 2, boxed))
    tile = InvariantTile(16, 64, 64, 4, 2, boxed=True, stream=True)  # where there are no tensor maps, plain loads
    invariant_matmul(torch.zeros(600, 1024, dtype=BF16), torch.zeros(512, 1024, dtype=BF16), segments=1, tile=tile)


def step_ends(capability: int) -> None:
    table = DeviceTable(4, 16, torch.device("cpu"))
    slots = torch.zeros(2, dtype=torch.int64)
    pages = torch.zeros(2, 8, dtype=torch.int32)
    for window in (None, (pages, slots)):
        gather_rows(table, slots, pages, 16, slots, slots, torch.zeros(2, dtype=torch.int32), slots, window)
    advance_rows(table, slots, SampleOut.empty(2, "cpu"))


def rounds(capability: int) -> None:
    """Rows of 8 drafts by a block drafter, judged, for the newest; from the host elsewhere."""
    device, block = torch.device("cpu"), 8 if capability == 100 else 0
    table, slots, long = (
        DeviceTable(4, 16, device),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int64),
    )
    pages, drafts = torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, 8, dtype=torch.int64)
    rows, part = VerifyRows.empty(16, 2, device), torch.zeros(2, 8)
    opened = BlockRows.empty(2, block, device) if block else None
    packs = capability == 90
    limits = RoundLimits(99, 99, 16, 8 if packs else block, 0, 1, packs)
    open_rows(table, slots, slots, slots, pages, limits, slots, long, long, opened)
    pack_blocks(slots, slots, long, long, pages, limits, BlockRows.packed(2, 16, 7, device))
    spend_rows(part, slots, slots, slots[:1], slots, Calibration(part, part[:2]) if block else None)
    pack_rows(slots, slots, slots, long, long, drafts, pages, 16, rows)
    tile_adapters(slots, slots, slots, slots, 16, Tiles(16, 4, 4 if block else 16, device))
    gather_columns(table, rows.slots_R, rows.ends_R, empty_columns(16, device))
    drafted = Drafted(drafts, slots, slots, *((part, part, part) if block else (None, None, None)))
    judged = Judged(slots, torch.zeros(16)) if block else None
    record = torch.zeros(2, record_width(8), dtype=torch.int32)
    drawn, columns = SampleOut.empty(16, "cpu"), empty_columns(16, device)
    commit_rounds(table, rows, drafted, drawn, record, judged)
    draft_seeds(table, slots, long, torch.zeros(8, 2, dtype=torch.int64))
    logits, workspace = torch.zeros(16, 4096, dtype=BF16), SampleWorkspace.empty(16, 4096, device)
    draw = None
    if capability != 80:
        cuts = torch.zeros(8, 2, 2, dtype=torch.float64) if block else None
        draw = DraftDraw(torch.zeros(2, 8, 4096, dtype=BF16), part, cuts)
    out = JudgeBuffers.empty(2, 16, empty_columns(2, device), torch.zeros(2, 4096))
    find_places(rows, drafts, long, slots, Places.empty(2, device), slots if block else None)
    judge_rows(table, logits, rows, columns, drawn, workspace, long, drafts, slots, draw, out, block > 0)
    settle_rows(logits, rows, columns, drawn, workspace, drafts, slots, out)


def drafting(capability: int) -> None:
    """Few rows and many of a block drafter, with norms and without."""
    rows, width, rank = {80: (3, 576, 96), 90: (1, 4096, 256), 100: (200, 4096, 256)}[capability]
    size, kv_heads = (64, 3) if capability == 80 else (128, 8)
    table, token = torch.zeros(8, size, dtype=BF16), torch.zeros(rows, dtype=torch.int64)
    pools = [torch.zeros(32, 2 * kv_heads, size, dtype=BF16) for _ in range(2)]
    layers = ContextLayers.of(pools, [] if capability == 80 else [table[0], table[1]], 1e-6, table, table)
    write_context(layers, torch.zeros(2, rows, 2 * kv_heads * size, dtype=BF16), token, token)
    kept = KeptTokens.empty(8 * rows, capability // 10, width, BF16, "cpu")
    keep_features(kept, [torch.zeros(rows, width, dtype=BF16)] * (capability // 10), token, token, token)
    logits, weights = torch.zeros(rows, 7, 4000, dtype=BF16), torch.zeros(4000, rank, dtype=BF16)
    markov_bias(logits[:, 0], token, weights, weights)
    if capability != 80:
        markov_bias(logits[:, 0], token, weights, weights, torch.zeros(rows, dtype=torch.int32), logits[:, 1])
    ids, log_q = torch.zeros(7, rows, dtype=torch.int64), torch.zeros(7, rows)
    head = ConfidenceWeights(torch.zeros(1, width + rank, dtype=BF16), table[0], weights)
    out = DraftNotes(ids.t().contiguous(), log_q.t().contiguous(), None if capability == 90 else log_q)
    note_drafts(torch.zeros(rows, 7, width, dtype=BF16), token, ids, log_q, head, out)
    if capability == 90:
        note_drafts(torch.zeros(9, width, dtype=BF16), token, ids, log_q, head, out, ids.int())


def latents(capability: int) -> None:
    """Index scores, the choice, and attention: many heads over what was chosen, few over whole contexts in pieces."""
    heads, index_heads = {80: (16, 4), 90: (128, 64), 100: (64, 32)}[capability]
    shape, config = LatentShape(heads, 512, 64, 64, 0.1), latent_config(heads, 512, 2, capability)
    q, out = torch.zeros(2, heads, 576, dtype=BF16), torch.zeros(2, heads, 512, dtype=BF16)
    rows, tables = torch.zeros(64, 576, dtype=BF16), torch.zeros(2, 128, dtype=torch.int32)
    row_of, visible = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    queries, weights = torch.zeros(2, index_heads, 128, dtype=BF16), torch.zeros(2, index_heads)
    scores, chosen = torch.zeros(2, 8192), torch.zeros(2, 2048, dtype=torch.int32)
    dsa_index_scores(queries, weights, rows[:, :128].contiguous(), tables, row_of, visible, scores, 64, 8192)
    dsa_select(scores, visible, chosen, torch.zeros(counts_shape(2, 8), dtype=torch.int32))
    if capability == 80:
        partial = States.empty((4, 2), heads, 512, "cpu")
        mla_decode(q, rows, tables, row_of, visible, out, shape, 4, partial, config)
    else:
        dsa_attention(q, rows, tables, row_of, visible, chosen, out, shape, 1, None, config)


def decode_rows(capability: int, shape: LayerShape | None = None, dtype: torch.dtype = BF16) -> None:
    """With the cut of rows and, for the newest, shared prefixes."""
    shape = shape or LAYERS[capability]
    q, kv, tables, sink = _rows(shape, dtype)
    numbers = torch.zeros(4, 8, dtype=torch.int32)
    cut_rows(numbers[0], numbers[1], numbers[2], torch.zeros(16, 8, dtype=torch.int32), 8, 64, 64, window=shape.window)
    states = [States.empty(leading, shape.num_heads, shape.head_dim, "cpu") for leading in ((4,), (2, 2))]
    prefix_tiles = prefix_config(shape.block_d, dtype.itemsize, shape.group)
    prefix_attention(q, kv, tables, numbers[0], numbers, states[1], shape, prefix_tiles)
    counts, column = numbers[3, :2], torch.zeros(4, dtype=torch.int32)
    cut_pieces(numbers[0], column, numbers, counts, column, column)
    prefix_attention(q, kv, tables, numbers[0], numbers, states[1], shape, prefix_tiles, counts[1:], 2)
    shared = capability == 100
    tiles = decode_config(shape.block_d, dtype.itemsize, shared)
    rest = (states[0], numbers, shape, tiles, sink, states[1] if shared else None)
    decode_attention(q, kv, tables, numbers[0], numbers, torch.zeros_like(q), *rest)


def prefill_rows(capability: int, shape: LayerShape | None = None, dtype: torch.dtype = BF16) -> None:
    """Prompts; rows of a few queries that share prefixes, with split keys for the newest; the merge of states by
    itself."""
    shape = shape or LAYERS[capability]
    q, kv, tables, sink = _rows(shape, dtype)
    splits, longest = (4, 4) if capability == 100 else (1, 4096)
    partial = States.empty((splits, 2), shape.num_heads, shape.head_dim, "cpu")
    numbers = torch.zeros(4, dtype=torch.int32)
    tiles = prefill_config(shape.block_d, dtype.itemsize, shape.group, longest)
    rows = (tables, numbers, numbers, numbers, numbers, torch.zeros_like(q))
    arrived = torch.zeros(4, shape.num_kv_heads, dtype=torch.int32)
    before, pieces = None, torch.zeros(4, 8, dtype=torch.int32)
    prefix_tiles = verify_prefix_config(shape.block_d, dtype.itemsize, shape.group)
    list_pieces(numbers, pieces, pieces, numbers, prefix_tiles.block_m // shape.group)
    if capability >= 90:
        before = Before(numbers, numbers, States.empty((2, 2), shape.num_heads, shape.head_dim, "cpu"))
        prefix_attention(q, kv, tables, numbers.long(), pieces, before.states, shape, prefix_tiles, numbers, 2)
    prefill_attention(q, kv, *rows, shape, tiles, sink, splits, partial, arrived, False, before)
    merge_states(partial, splits, torch.zeros_like(q), sink)


def sampling(capability: int, edits: bool | None = None, vocab: int = 900, tile: int = 512) -> None:
    """Few tiles and candidates, since sorting many takes long to compile."""
    edits = capability == 90 if edits is None else edits

    def column(kind: torch.dtype) -> torch.Tensor:
        return torch.ones(2, dtype=kind)

    given, wide, single = None, torch.float64, torch.float32
    if edits:
        counts, bias = torch.zeros(2, vocab, dtype=torch.int16), torch.zeros(2, vocab)
        penalties = (column(single) for _ in range(3))
        rows = [column(torch.int32) for _ in range(3)]
        given = EditColumns(*penalties, rows[0], counts, rows[1], rows[2], bias, column(torch.int64))
    columns = SampleColumns(
        column(wide), column(torch.int32), column(wide), column(wide), column(torch.int64), column(torch.int64),
        column(torch.uint8), column(torch.int64) if edits else None, given,
    )  # fmt: skip
    workspace = SampleWorkspace.empty(2, vocab, "cpu", tile)
    logits, out = torch.zeros(2, vocab, dtype=BF16), SampleOut.empty(2, "cpu", edits)
    columns.definition_S = column(torch.int32)
    sample_rows(logits, columns, out, workspace, every=edits)
    table = DeviceTable(2, 4, torch.device("cpu"))
    table.columns.admit([0], [Want(top_logprobs=5, entropy=True)])
    places = Places.empty(2, torch.device("cpu")) if capability == 100 else None
    sample_top(logits, table, columns, out, workspace, places=places)


def drafter_loss(capability: int) -> None:
    """With and without a target; in place."""
    logits = torch.zeros(2, 4096 if capability == 90 else 5001, dtype=torch.float32 if capability == 80 else BF16)
    target, labels = None if capability == 100 else logits.clone(), torch.zeros(2, dtype=torch.int64)
    ce, distance, _, notes = launch_terms(logits, target, labels, 0.7)
    launch_gradient(logits, target, labels, 0.7, notes, ce, distance, logits)


def _rows(
    shape: LayerShape, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Two queries, a layer's keys and values, page tables, sinks."""
    q_BNH = torch.zeros(2, shape.num_heads, shape.head_dim, dtype=dtype)
    kv = torch.zeros(4 * shape.page_size, 2 * shape.num_kv_heads, shape.head_dim, dtype=dtype)
    return q_BNH, kv, torch.zeros(2, 8, dtype=torch.int32), torch.zeros(shape.num_heads) if shape.sink else None


ENTRIES: tuple[Callable[[int], None], ...] = (
    elementwise,
    adapters,
    adapted_layers,
    rope,
    products,
    invariant_products,
    step_ends,
    rounds,
    drafting,
    decode_rows,
    prefill_rows,
    sampling,
    mamba2,
    gated_delta,
    experts,
    units,
    latents,
    drafter_loss,
)
