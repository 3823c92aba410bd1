"""Random schedules on a GPU, in a process of its own: engines are small, and their host work is what
takes the time."""

from __future__ import annotations

from pathlib import Path

import torch

import engine.attention.decode_metadata as decode_metadata
from tests.unit.engine.schedules import Tally, fuzz


def fuzz_on_gpu(folders: list[Path], seeds: range, seconds: float) -> Tally:
    """Every prefix that rows share is read once, however short it is."""
    torch.set_num_threads(1)
    decode_metadata.MIN_SAVED_BYTES = decode_metadata.MIN_SAVED_SEGMENT_BYTES = 0
    return fuzz(folders, seeds, "overlapped", seconds=seconds, atol=2e-4, device="cuda", attention="triton")
