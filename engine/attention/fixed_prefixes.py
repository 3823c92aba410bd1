"""Shared prefixes of the deterministic engine, as pieces between fixed positions.

Owns which whole pieces rows read together. Every other piece is read by its row alone, in a tile of
the same shape (`engine.kernels.decode_pieces`), so that what is listed here changes speed only.

Shapes: B rows.
"""

from __future__ import annotations

from engine.batch import SharedPrefix
from engine.kernels.decode_pieces import piece_start, whole_pieces


def lay_out_fixed(
    prefixes: list[SharedPrefix], page_size: int, per_tile: int, num_rows: int
) -> tuple[list[int], list[list[int]]]:
    """(shared_B, pieces): of each row's pieces the first shared_B are in the list, once for each tile of
    at most `per_tile` rows. Nested prefixes as in `lay_out_prefixes`."""
    shared = [0] * num_rows
    pieces: list[list[int]] = []
    for prefix in sorted(prefixes, key=lambda prefix: prefix.num_pages):
        assert prefix.end <= num_rows, f"rows to {prefix.end} of {num_rows}"
        first, whole = shared[prefix.start], whole_pieces(prefix.num_pages * page_size)
        covered = set(shared[prefix.start : prefix.end])
        assert covered == {first}, f"rows {prefix.start} to {prefix.end} share nested prefixes in part only"
        for piece in range(first, whole):
            for row in range(prefix.start, prefix.end, per_tile):
                rows = min(per_tile, prefix.end - row)
                pieces.append([row, rows, piece_start(piece), piece_start(piece + 1), prefix.start, piece, 0, 0])
        if whole > first:
            shared[prefix.start : prefix.end] = [whole] * (prefix.end - prefix.start)
    return shared, pieces
