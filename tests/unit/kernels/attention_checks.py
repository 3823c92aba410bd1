"""Attention's small kernels against their references, on the device given: interpreted on the CPU."""

from __future__ import annotations

import random

import torch

from engine.attention.triton import TritonAttention
from engine.batch import SharedPrefix
from engine.kernels.decode_attention import States
from engine.kernels.decode_pieces import cut_pieces, cut_pieces_reference
from engine.kernels.decode_work import cut_rows, cut_rows_reference
from engine.kernels.merge_states import merge_reference, merge_states
from engine.kernels.verify_pieces import list_pieces, list_pieces_reference
from engine.memory.kv_pool import KVPool
from engine.models.spec import ModelSpec


def check_cuts(device: torch.device) -> None:
    """Random batches, cut into shares of one sum and into fixed numbers."""
    generator = random.Random(0)
    for case in range(12):
        fixed, window = case % 2 * 4, case % 3 * 20
        rows, extra = generator.randrange(1, 20), generator.randrange(1, 30)
        lengths = torch.tensor([generator.choice([0, 1, 15, 16, 17, 300, 5000]) for _ in range(rows)])
        start = torch.tensor([generator.randrange(0, int(n) + 1) // 16 * 16 for n in lengths])
        start = torch.minimum(start, (lengths - 1).clamp(min=0))
        parts = torch.tensor([generator.randrange(0, 3) for _ in range(rows)])
        columns = [column.to(torch.int32) for column in (lengths, start, parts)]
        size = (rows * fixed if fixed else rows + extra, 8)
        items = torch.full(size, -7, dtype=torch.int32, device=device)
        arguments = (extra, 32, 16, fixed, window)
        cut_rows(*(column.to(device) for column in columns), items, *arguments)
        expected = cut_rows_reference(*columns, items.shape[0], *arguments)
        used = expected[:, 0] >= 0
        items = items.cpu()
        assert items[:, 0].tolist() == expected[:, 0].tolist()
        assert items[used, :6].tolist() == expected[used, :6].tolist()


def check_pieces(device: torch.device) -> None:
    """Every token before a tail is in one piece of its row, listed or shared; tails follow from lengths."""
    lengths = [0, 1, 256, 257, 5_000, 4_097, 9_217, 700, 513]
    shared = [0, 0, 0, 1, 3, 0, 17, 2, 2]
    pieces = torch.full((80, 8), -7, dtype=torch.int32)
    pieces[:2] = torch.tensor([[7, 2, 0, 256, 7, 0, 0, 0], [7, 2, 256, 512, 7, 1, 0, 0]])
    columns = [torch.tensor(values, dtype=torch.int32) for values in (lengths, shared)]
    starts, parts, expected = cut_pieces_reference(*columns, pieces, 2)
    assert starts.tolist() == [0, 0, 0, 256, 4_096, 4_096, 8_192, 512, 512]
    assert parts.tolist() == [0, 0, 0, 1, 16, 16, 18, 2, 2]
    given = [column.to(device) for column in (*columns, pieces, torch.tensor([2, -1], dtype=torch.int32))]
    out = [torch.full_like(column, -7).to(device) for column in (starts, parts)]
    cut_pieces(*given, *out)
    assert out[0].tolist() == starts.tolist() and out[1].tolist() == parts.tolist()
    assert given[3].tolist() == [2, len(expected)]
    assert given[2][:2].tolist() == pieces[:2].tolist()
    listed = given[2][2 : len(expected)].cpu()
    assert sorted(listed[:, :6].tolist()) == sorted(expected[2:, :6].tolist())
    assert (given[2][len(expected) :] == -7).all()


def check_merges(device: torch.device, sink: bool) -> None:
    """Empty states are not read, nor are those past the last; a token without any gets zeros."""
    noise = torch.Generator().manual_seed(0)
    means = torch.randn(8, 3, 10, 24, generator=noise)
    states = States(means, torch.randn(8, 3, 10, generator=noise) * 6)
    states.lse_IN[1, 0] = states.lse_IN[2, :, 7] = states.lse_IN[:, 2] = float("-inf")
    states.mean_INH[states.lse_IN == float("-inf")] = float("nan")
    sink_N = torch.randn(10, generator=noise) if sink else None
    for count in (1, 3, 4, 6):
        expected = merge_reference(states.mean_INH[:count], states.lse_IN[:count], sink_N)
        given = States(states.mean_INH.clone().to(device), states.lse_IN.clone().to(device))
        given.mean_INH[count], given.lse_IN[count] = float("nan"), 99.0
        out_TNH = torch.full((3, 10, 24), float("nan"), device=device)
        merge_states(given, count, out_TNH, None if sink_N is None else sink_N.to(device))
        torch.testing.assert_close(out_TNH.cpu().double(), expected, atol=1e-5, rtol=0)
        assert not out_TNH[2].any()


def check_verify_pieces(device: torch.device) -> None:
    """Ranges of rows of any number of queries, nested, without queries, and padding; one tile and many."""
    counts = torch.tensor([3, 0, 16, 1, 0, 0, 7, 300, 2, 0])
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    ranges = [[0, 4, 0, 64, 0, 0], [0, 4, 64, 128, 0, 1], [0, 2, 128, 192, 0, 2], [4, 2, 0, 32, 4, 0]]
    ranges += [[6, 4, 0, 16, 7, 0], [0] * 6, [0] * 6]
    ranges_E8 = torch.nn.functional.pad(torch.tensor(ranges, dtype=torch.int32), (0, 2))
    for queries in (4, 16):
        expected = list_pieces_reference(starts, ranges_E8, queries)
        pieces_X8 = torch.full((len(expected) + 3, 8), -7, dtype=torch.int32, device=device)
        count_1 = torch.zeros(1, dtype=torch.int32, device=device)
        list_pieces(starts.to(device), ranges_E8.to(device), pieces_X8, count_1, queries)
        assert count_1.tolist() == [len(expected)]
        assert pieces_X8[: len(expected), :6].tolist() == [piece[:6] for piece in expected]
        assert (pieces_X8[len(expected) :] == -7).all()


def check_blocks(pool: KVPool, spec: ModelSpec, tables_BP: torch.Tensor, common: int, tolerance: float) -> None:
    """A drafter's blocks, which see all of their rows, beside a row without one; five of six rows have `common`
    tokens in common."""
    queries, prefixes = [5, 2, 0, 3, 5, 4], [SharedPrefix(0, 5, common // pool.page_size)]
    lengths = [common + 5, common + 17, 0, common + 29, common + 28, common - 3]
    buffers = VerifyRounds(spec, pool, tables_BP.shape[1], 6, 24, each=5, at_end=True)
    tables_BP[:5, : prefixes[0].num_pages] = tables_BP[0, : prefixes[0].num_pages].clone()
    buffers.fill(tables_BP, lengths, queries, prefixes)
    noise = torch.Generator().manual_seed(0)
    buffers.q_RNH.copy_(torch.randn(buffers.q_RNH.shape, generator=noise))
    buffers.launch(plain=True)
    expected_RNH = buffers.out_RNH[: sum(queries)].clone()
    assert expected_RNH.any(-1).all()
    buffers.launch()
    assert buffers.plan.shared is not None and int(buffers.plan.shared.count_1) > 0
    torch.testing.assert_close(buffers.out_RNH[: sum(queries)], expected_RNH, atol=tolerance, rtol=0)


class VerifyRounds:
    """The buffers of a captured round of up to `rows` rows of up to `each` queries, `most` in all, which share
    prefixes. With `at_end` they are a drafter's blocks."""

    def __init__(
        self, spec: ModelSpec, pool: KVPool, columns: int, rows: int, most: int, each: int = 16, at_end: bool = False
    ) -> None:
        self._backend = TritonAttention(spec)
        self._pool = pool

        def column(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=pool.device)

        self._tables_BP = column(rows * columns).view(rows, columns)
        self._lens_B, self._starts_B1, self._ends_R = column(rows), column(rows + 1), column(most, torch.int64)
        given = (self._tables_BP, self._lens_B, self._starts_B1, each, pool, at_end)
        self.plan = self._backend.plan_round_buffers(*given, ends_R=self._ends_R)
        shape = (most, spec.num_heads, spec.head_dim)
        self.q_RNH = torch.zeros(shape, dtype=pool.dtype, device=pool.device)
        self.out_RNH = torch.zeros_like(self.q_RNH)

    def fill(
        self, tables_BP: torch.Tensor, lengths: list[int], queries: list[int], prefixes: list[SharedPrefix] | None
    ) -> None:
        """Of the prefixes None leaves those that were set."""
        counts, ends = torch.tensor(queries), torch.tensor(lengths)
        rows, tokens = len(lengths), int(counts.sum())
        self._tables_BP.zero_()
        self._tables_BP[:rows, : tables_BP.shape[1]] = tables_BP
        self._lens_B.zero_()
        self._lens_B[:rows] = ends
        self._starts_B1.fill_(tokens)
        self._starts_B1[: rows + 1] = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        self._ends_R.zero_()
        places = [end - count + 1 + k for end, count in zip(lengths, queries, strict=True) for k in range(count)]
        self._ends_R[:tokens] = torch.tensor(places)
        if prefixes is not None:
            assert self.plan.shared is not None
            assert self.plan.shared.set(prefixes, tokens / rows) == len(prefixes)

    def launch(self, sink_N: torch.Tensor | None = None, plain: bool = False) -> None:
        """`plain` reads everything row by row."""
        shared = self.plan.shared
        assert shared is not None
        if plain:
            self.plan.shared = None
        else:
            shared.list()
        self._backend.run_prefill(self.q_RNH, self._pool.tokens(0), self.plan, self.out_RNH, 0, sink_N)
        self.plan.shared = shared
