"""The fingerprint of parameters: what it sees, and what it does not depend on."""

import pytest
import torch

from engine.weights.digest import CHUNK, A, B, fingerprint

MASK = (1 << 64) - 1


def by_hand(data: bytes) -> list[int]:
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    first = sum(word * ((2 * i + 1) * A) for i, word in enumerate(words)) & MASK
    second = sum(word * ((2 * i + 1) ** 2 * B) for i, word in enumerate(words)) & MASK
    return [value - (1 << 64) if value >> 63 else value for value in (first, second)]


@pytest.mark.parametrize("shape", [(0,), (1,), (3,), (4, 5), (17, 33)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_the_sums_it_says(shape, dtype):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    data = tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    assert fingerprint(tensor).tolist() == by_hand(data)


def test_chunks_and_views_do_not_show(monkeypatch):
    tensor = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    whole = fingerprint(tensor).tolist()
    monkeypatch.setattr("engine.weights.digest.CHUNK", 100)
    assert CHUNK != 100 and fingerprint(tensor).tolist() == whole
    padded = torch.zeros(1 + tensor.numel(), dtype=torch.bfloat16)
    padded[1:] = tensor.view(-1)
    assert fingerprint(padded[1:].view(64, 96)).tolist() == whole
    assert fingerprint(tensor.t().contiguous().t()).tolist() == whole


def test_every_small_change_shows():
    tensor = torch.randn(257, generator=torch.Generator().manual_seed(0))
    seen = {tuple(fingerprint(tensor).tolist())}
    for at in range(0, 257, 8):
        changed = tensor.clone()
        changed[at] = -changed[at]
        seen.add(tuple(fingerprint(changed).tolist()))
    swapped = tensor.clone()
    swapped[[0, 200]] = swapped[[200, 0]]
    seen.add(tuple(fingerprint(swapped).tolist()))
    assert len(seen) == 2 + len(range(0, 257, 8))
    assert all(len({pair[lane] for pair in seen}) == len(seen) for lane in (0, 1))
