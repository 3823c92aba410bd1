"""Linear layers split over a tensor-parallel group, and the embedding.

Owns parameters' shapes, where the ranks' parts meet and where adapters add to a product. Ignores how
weights arrive (`engine.weights`) and what adapters add (`lora.step`). Fused projections are one parameter
whose rows are the parts' rows in order. `site` is a layer's place in the model's adapter geometry.

Shapes: T tokens, D hidden, O output features (this rank's), V vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.layers.matmul import linear
from engine.parallel import TensorParallel
from lora.step import AdapterStep


def _empty(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class ColumnParallelLinear(nn.Module):
    """Several projections of one input in one product: y_TO, the parts side by side.

    `parts` are the unsharded widths; each rank holds its share of every part.
    """

    site = -1

    def __init__(
        self,
        width: int,
        parts: tuple[int, ...],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        parallel: TensorParallel,
    ) -> None:
        super().__init__()
        self.num_parts = len(parts)
        rows = sum(parallel.share(part, "projection width") for part in parts)
        self.weight = _empty(rows, width, dtype=dtype, device=device)
        self.bias = _empty(rows, dtype=dtype, device=device) if bias else None

    def forward(self, x_TD: torch.Tensor, adapters: AdapterStep | None = None) -> torch.Tensor:
        y_TO = linear(x_TD, self.weight, self.bias)
        if adapters is not None:
            adapters.add_(self.site, x_TD, y_TO)
        return y_TO

    __call__ = forward  # no hooks: a layer is called hundreds of times a token


class RowParallelLinear(nn.Module):
    """A projection whose input is split over ranks; the partial sums are reduced once.

    The bias is added after the reduction, once, as every rank holds all of it. Adapters add to the partial
    sums, so that they cost no reduction of their own.
    """

    site = -1
    num_parts = 1

    def __init__(
        self,
        width: int,
        out: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        parallel: TensorParallel,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.weight = _empty(out, parallel.share(width, "projection width"), dtype=dtype, device=device)
        self.bias = _empty(out, dtype=dtype, device=device) if bias else None

    def forward(self, x_TO: torch.Tensor, adapters: AdapterStep | None = None) -> torch.Tensor:
        alone = self.parallel.size == 1
        y_TD = linear(x_TO, self.weight, self.bias if alone else None)
        if adapters is not None:
            adapters.add_(self.site, x_TO, y_TD)
        if alone:
            return y_TD
        y_TD = self.parallel.all_reduce(y_TD)
        return y_TD if self.bias is None else y_TD + self.bias

    __call__ = forward


class Embedding(nn.Module):
    """Token embeddings, whole on every rank; also the head of a tied model. Each use is a site of its own."""

    def __init__(self, vocab_size: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = _empty(vocab_size, width, dtype=dtype, device=device)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        return self.weight.index_select(0, ids_T)

    __call__ = forward

    def project(self, hidden_RD: torch.Tensor, part: slice = slice(None)) -> torch.Tensor:
        """Logits, of a part of the vocabulary if so asked, in the weights' dtype."""
        return linear(hidden_RD, self.weight[part], None)
