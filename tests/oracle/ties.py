"""One rule for ties in references: the highest score, of equal ones the lowest position.

Owns the patch. transformers' models choose by `topk`, which leaves ties to the library; index scores are sums
of ReLUs, so that exact ties at the cut occur.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


def stable_topk(self: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True):
    values, indices = self.sort(dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


@contextmanager
def lowest_positions() -> Iterator[None]:
    """While it is entered, `Tensor.topk` follows the rule."""
    plain = torch.Tensor.topk
    torch.Tensor.topk = stable_topk  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.topk = plain  # type: ignore[method-assign]


@pytest.fixture(scope="session")
def stable_ties() -> Iterator[None]:
    with lowest_positions():
        yield
