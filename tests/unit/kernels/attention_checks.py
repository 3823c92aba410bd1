"""Attention's small kernels against their references, on the device given: interpreted on the CPU."""

from __future__ import annotations

import random

import torch

from engine.kernels.decode_attention import States
from engine.kernels.decode_pieces import cut_pieces, cut_pieces_reference
from engine.kernels.decode_work import cut_rows, cut_rows_reference
from engine.kernels.merge_states import merge_reference, merge_states


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
