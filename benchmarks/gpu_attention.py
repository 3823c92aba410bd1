"""Attention kernels on one GPU: right on fresh random inputs, then how fast in CUDA graphs.

Owns the shapes of targets.md and the variants of tile sizes among which the defaults are chosen.
Ignores the rest of a step. Bandwidth counts each key and value once; the share is of 4.26 TB/s, what
a device copy reaches on an H200.

`python -m benchmarks.gpu_attention [--json FILE] [--quick]`
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from benchmarks.report import Row, report
from engine.attention.decode_metadata import AttentionSize, DecodeMetadata, Workspace, decode_buffers, processors
from engine.attention.triton import PREFIX_PROGRAMS
from engine.attention.verify_prefixes import VerifyPrefixes
from engine.batch import SharedPrefix
from engine.kernels.attention_config import decode_config, prefill_config, prefix_config, verify_prefix_config
from engine.kernels.attention_tile import ceil_div
from engine.kernels.decode_attention import LayerShape, TileConfig, decode_attention, decode_reference
from engine.kernels.prefill_attention import Before, cut_tiles, prefill_attention, prefill_reference
from engine.kernels.prefix_attention import prefix_attention

BANDWIDTH = 4.26e12
PAGE = 16
SHAPES = {"8B": (32, 8, 128), "0.6B": (16, 8, 128), "SmolLM2": (9, 3, 64)}
OTHERS = ((64, 2, 5), (64, 2, 3), (64, 1, 5), (32, 1, 5), (32, 1, 7), (32, 2, 5), (16, 1, 7), (64, 4, 5))
"""Tokens, warps and stages of a tile."""
Launch = Callable[[int], None]
"""Launches the work of one layer, whose number says which storage it reads."""


@dataclass
class Scene:
    """Rows on random pages of several layers; rows of a group share their first pages."""

    shape: LayerShape
    lengths: list[int]
    layers: list[torch.Tensor]
    tables: torch.Tensor
    prefixes: list[SharedPrefix]

    @classmethod
    def build(cls, name: str, lengths: list[int], prefixes: list[SharedPrefix] | None = None) -> Scene:
        heads, kv_heads, size = SHAPES[name]
        prefixes = prefixes or []
        columns = ceil_div(max(lengths), PAGE)
        pages = torch.randperm(len(lengths) * columns, device="cuda", dtype=torch.int32) + 1
        tables = pages.view(len(lengths), columns)
        for prefix in sorted(prefixes, key=lambda prefix: -prefix.num_pages):
            tables[prefix.start : prefix.end, : prefix.num_pages] = tables[prefix.start, : prefix.num_pages].clone()
        used, dense = tables.unique(return_inverse=True)
        tables = (torch.randperm(used.shape[0], device="cuda")[dense] + 1).to(torch.int32)
        slots = (used.shape[0] + 1) * PAGE
        layer_bytes = slots * 2 * kv_heads * size * 2
        # More than the level-2 cache holds, so that every layer comes from memory.
        count = max(2, min(36, ceil_div(400 << 20, layer_bytes)))
        layers = [torch.randn(slots, 2 * kv_heads, size, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        return cls(LayerShape(heads, kv_heads, size, PAGE), lengths, layers, tables, prefixes)

    @property
    def size(self) -> AttentionSize:
        shape = self.shape
        return AttentionSize(
            shape.num_heads, shape.num_kv_heads, shape.head_dim, PAGE, 2, processors(torch.device("cuda"))
        )

    def queries(self, tokens: int) -> torch.Tensor:
        """A view into a fused projection's output, as the model gives it."""
        width = self.shape.num_heads + 2 * self.shape.num_kv_heads
        both = torch.randn(tokens, width, self.shape.head_dim, device="cuda", dtype=torch.bfloat16)
        return both[:, : self.shape.num_heads]

    def metadata(self, tiles: tuple[TileConfig, TileConfig], waves: int | None = None) -> DecodeMetadata:
        rows, device = len(self.lengths), torch.device("cuda")
        metadata = decode_buffers(
            self.size, Workspace(device), tiles, rows, device, self.tables, shared=bool(self.prefixes)
        )
        if waves is not None:
            metadata.extra = min(metadata.extra, ceil_div(waves * self.size.processors, self.shape.num_kv_heads))
        metadata.seq_lens_B.copy_(torch.tensor(self.lengths))
        if self.prefixes:
            assert metadata.set_prefixes(self.prefixes) == len(self.prefixes)
            assert metadata.prefix is not None
            metadata.prefix.mean_INH.fill_(float("nan"))
        metadata.cut()
        return metadata


def time_us(launch: Launch, layers: int) -> float:
    """Median microseconds of one layer in a captured graph over all layers."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            launch(layer)
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(15):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / layers)
    return statistics.median(times)


def error(launch: Launch, out: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error of layer 0 over a poisoned output."""
    out.fill_(float("nan"))
    launch(0)
    torch.cuda.synchronize()
    return float((out.double() - expected).norm() / expected.norm())


class Table:
    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.failed: list[str] = []

    def add(
        self, case: str, variant: str, scene: Scene, launch: Launch, out, expected, work: float, unit: str
    ) -> float:
        """`work` is bytes (shown as a share of the bandwidth) or operations (shown as a rate)."""
        try:
            wrong = error(launch, out, expected)
            us = time_us(launch, len(scene.layers))
        except Exception as problem:  # a variant may ask for more than this GPU has
            print(f"{case:26} {variant:44} failed: {str(problem).splitlines()[0][:80]}", flush=True)
            return float("inf")
        if not wrong < 1e-2:
            self.failed.append(f"{case} {variant}: error {wrong:.2e}")
        rate = work / us * 1e6
        shown = f"{rate / 1e9:7.0f} GB/s {rate / BANDWIDTH:4.0%}" if unit == "bytes" else f"{rate / 1e12:7.0f} TFLOP/s"
        print(f"{case:26} {variant:44} {us:8.1f} us {shown} err {wrong:.1e}", flush=True)
        self.rows.append(Row(f"{case} {variant}", "layer", us, "us"))
        self.rows.append(Row(f"{case} {variant}", "error", wrong, ""))
        return us

    def best(self, case: str, timed: dict[str, float], floor_us: float | None = None) -> None:
        variant = min(timed, key=lambda name: timed[name])
        share = f", {floor_us / timed[variant]:.0%} of the floor" if floor_us else ""
        print(f"{case:26} best: {variant} {timed[variant]:.1f} us{share}\n", flush=True)
        self.rows.append(Row(case, f"best ({variant})", timed[variant], "us"))


def label(tiles: TileConfig, rows: bool = False) -> str:
    return (
        f"{tiles.block_m}x{tiles.block_n}" * rows
        + f"n{tiles.block_n}" * (not rows)
        + f",w{tiles.num_warps},s{tiles.num_stages}"
    )


def decode_case(
    table: Table, name: str, batch: int, length: int, quick: bool, lengths: list[int] | None = None
) -> None:
    scene = Scene.build(name, lengths or [length] * batch)
    shape = scene.shape
    q = scene.queries(batch)
    out = torch.empty(batch, shape.num_heads, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    lengths_B = torch.tensor(scene.lengths, device="cuda")
    expected = decode_reference(q, scene.layers[0], scene.tables, lengths_B, shape)
    default = decode_config(shape.block_d, 2)
    tiles = [
        default,
        *(
            TileConfig(n, w, s)
            for n, w, s in OTHERS
            if (n, w, s) != (default.block_n, default.num_warps, default.num_stages)
        ),
    ]
    case = f"decode {name} b{batch} @{length}" + (" skewed" if lengths else "")
    timed = {}
    for config in tiles[:1] if quick else tiles:
        for waves in (2,) if quick or batch > 128 else (1, 2, 4):
            metadata = scene.metadata((config, prefix_config(shape.block_d, 2, shape.group)), waves)

            def launch(layer: int, metadata=metadata, config=config) -> None:
                decode_attention(
                    q,
                    scene.layers[layer],
                    metadata.page_tables_BP,
                    metadata.seq_lens_B,
                    metadata.items_W8,
                    out,
                    metadata.partial,
                    metadata.arrived_BK,
                    shape,
                    config,
                )

            variant = f"{label(config)},waves{waves}"
            work = sum(scene.lengths) * scene.size.token_bytes
            timed[variant] = table.add(case, variant, scene, launch, out, expected, work, "bytes")
    table.best(case, timed, sum(scene.lengths) * scene.size.token_bytes / BANDWIDTH * 1e6)


def group_case(table: Table, groups: int, samples: int, shared: int, own: int, quick: bool, system: int = 0) -> None:
    rows = groups * samples
    prefixes = [SharedPrefix(g * samples, (g + 1) * samples, (system + shared) // PAGE) for g in range(groups)]
    if system:
        prefixes.append(SharedPrefix(0, rows, system // PAGE))
    scene = Scene.build("8B", [system + shared + own] * rows, prefixes)
    shape = scene.shape
    q = scene.queries(rows)
    out = torch.empty(rows, shape.num_heads, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    expected = decode_reference(q, scene.layers[0], scene.tables, torch.tensor(scene.lengths), shape)
    work = (system + groups * shared + rows * own) * scene.size.token_bytes
    case = f"group {groups}x{samples} @{system}+{shared}+{own}"
    own_tiles = decode_config(shape.block_d, 2)
    small_own = replace(own_tiles, block_n=own_tiles.block_n // 2)
    wide = replace(own_tiles, num_stages=3)
    default = prefix_config(shape.block_d, 2, shape.group)
    pairs = [(default, own_tiles)]
    if not quick:
        half = default.block_n // 2
        others = [replace(default, block_n=half, num_stages=5), TileConfig(default.block_n, 8, 3, 128)]
        others += [TileConfig(2 * default.block_n, 8, 3, 128), replace(default, block_n=half, num_stages=3)]
        pairs += [(other, own_tiles) for other in others]
        pairs += [(default, small_own), (others[0], small_own), (default, wide)]
    timed = {}
    for above, below in pairs:
        metadata = scene.metadata((below, above))
        states = metadata.prefix
        assert states is not None

        def launch_prefix(layer: int, metadata=metadata, states=states, above=above) -> None:
            tables, lengths = metadata.page_tables_BP, metadata.seq_lens_B
            prefix_attention(q, scene.layers[layer], tables, lengths, metadata.pieces_X8, states, shape, above)

        def launch_own(layer: int, metadata=metadata, states=states, below=below) -> None:
            decode_attention(
                q,
                scene.layers[layer],
                metadata.page_tables_BP,
                metadata.seq_lens_B,
                metadata.items_W8,
                out,
                metadata.partial,
                metadata.arrived_BK,
                shape,
                below,
                None,
                states,
            )

        def launch(layer: int, first=launch_prefix, second=launch_own) -> None:
            first(layer)
            second(layer)

        variant = f"{label(above, True)} + {label(below)}"
        timed[variant] = table.add(case, variant, scene, launch, out, expected, work, "bytes")
        if len(timed) == 1:
            for part, only in (("prefix alone", launch_prefix), ("own alone", launch_own)):
                print(f"{case:26} {part:44} {time_us(only, len(scene.layers)):8.1f} us", flush=True)
    table.best(case, timed, work / BANDWIDTH * 1e6)


def prefill_case(table: Table, name: str, queries: list[int], context: int, quick: bool, splits: int = 1) -> None:
    lengths = [context + count for count in queries]
    scene = Scene.build(name, lengths)
    scene.layers = scene.layers[:8]
    shape, tokens = scene.shape, sum(queries)
    q = scene.queries(tokens)
    out = torch.empty(tokens, shape.num_heads, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    expected = prefill_reference(q, scene.layers[0], scene.tables, lengths, queries, shape)
    pairs = sum(count * (context + (count + 1) / 2) for count in queries)
    work = 4 * pairs * shape.num_heads * shape.head_dim
    case = f"prefill {name} {len(queries)}x{queries[0]} ctx {context}"
    default = prefill_config(shape.block_d, 2, shape.group, max(queries))
    tiles = [default]
    if not quick and max(queries) > 64:
        tiles += [TileConfig(128, 8, 3, 128), TileConfig(64, 4, 3, 64), TileConfig(128, 4, 3, 64)]
        tiles += [TileConfig(64, 8, 5, 128), TileConfig(64, 4, 4, 64)]
    timed = {}
    for config in tiles:
        rows_X, queries_X = cut_tiles(queries, lengths, config.block_m // shape.group)
        starts = torch.tensor([0, *queries]).cumsum(0)
        values = (lengths, starts, rows_X, queries_X)
        arrays = [torch.as_tensor(value, dtype=torch.int32, device="cuda") for value in values]

        def launch(layer: int, config=config, arrays=arrays) -> None:
            lens, offsets, tile_rows, tile_queries = arrays
            prefill_attention(
                q, scene.layers[layer], scene.tables, lens, offsets, tile_rows, tile_queries, out, shape, config
            )

        variant = label(config, True)
        timed[variant] = table.add(case, variant, scene, launch, out, expected, work, "operations")
    table.best(case, timed)


def verify_case(table: Table, groups: int, samples: int, shared: int, own: int, each: int) -> None:
    """Rows of `each` queries that verify drafts: their whole contexts each, and what they share once."""
    rows, length = groups * samples, shared + own + each
    prefixes = [SharedPrefix(g * samples, (g + 1) * samples, shared // PAGE) for g in range(groups)]
    scene = Scene.build("8B", [length] * rows, prefixes)
    scene.layers = scene.layers[:8]
    shape, tokens = scene.shape, rows * each
    q = scene.queries(tokens)
    out = torch.empty(tokens, shape.num_heads, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    expected = prefill_reference(q, scene.layers[0], scene.tables, scene.lengths, [each] * rows, shape)
    config = prefill_config(shape.block_d, 2, shape.group, each)
    above = verify_prefix_config(shape.block_d, 2, shape.group)
    starts = torch.arange(0, tokens + 1, each, dtype=torch.int32, device="cuda")
    tiles = cut_tiles([each] * rows, scene.lengths, config.block_m // shape.group)
    lens, rows_X, queries_X = (
        torch.tensor(values, dtype=torch.int32, device="cuda") for values in (scene.lengths, *tiles)
    )
    ends = torch.arange(length - each + 1, length + 1, device="cuda").repeat(rows)
    together = VerifyPrefixes.empty(scene.size, above, Workspace(torch.device("cuda")), starts, ends)
    assert together.set(prefixes, each) == groups
    together.list()
    programs = ceil_div(PREFIX_PROGRAMS * scene.size.processors, shape.num_kv_heads)

    def launch(layer: int, before: Before | None = None) -> None:
        kv = scene.layers[layer]
        rest = (lens, starts, rows_X, queries_X, out, shape, config)
        prefill_attention(q, kv, scene.tables, *rest, before=before)

    def launch_shared(layer: int) -> None:
        pieces, states = together.pieces_X8, together.before.states
        given = (q, scene.layers[layer], scene.tables, ends, pieces, states, shape, above)
        prefix_attention(*given, together.count_1, programs)
        launch(layer, together.before)

    case, timed = f"verify {groups}x{samples} @{shared}+{own} q{each}", {}
    work = (groups * shared + rows * (own + each)) * scene.size.token_bytes
    for variant, run in (("each row alone", launch), ("prefixes once", launch_shared)):
        timed[variant] = table.add(case, variant, scene, run, out, expected, work, "bytes")
    table.best(case, timed, work / BANDWIDTH * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--quick", action="store_true", help="only the default tile sizes")
    arguments = parser.parse_args()
    assert torch.cuda.is_available(), "needs a CUDA device"
    torch.manual_seed(0)
    quick, table = arguments.quick, Table()
    for batch in (256, 128, 32, 1):
        decode_case(table, "8B", batch, 640, quick)
    group_case(table, 32, 16, 1024, 128, quick)
    group_case(table, 8, 64, 4096, 128, quick)
    group_case(table, 16, 16, 512, 128, True, system=1024)
    prefill_case(table, "8B", [4096], 0, quick)
    prefill_case(table, "8B", [512] * 8, 0, quick)
    prefill_case(table, "8B", [512], 4096, True)
    prefill_case(table, "8B", [6] * 64, 640, True)
    for each in (2, 4, 8):
        verify_case(table, 32, 16, 1024, 128, each)
        verify_case(table, 8, 64, 2048, 128, each)
    decode_case(table, "0.6B", 256, 640, quick)
    decode_case(table, "SmolLM2", 256, 640, quick)
    decode_case(table, "SmolLM2", 32, 640, True)
    decode_case(table, "8B", 64, 1100, True, lengths=[30_000, *[640] * 63])
    report("gpu_attention", table.rows, arguments.json)
    if table.failed:
        raise SystemExit("wrong results:\n" + "\n".join(table.failed))


if __name__ == "__main__":
    main()
