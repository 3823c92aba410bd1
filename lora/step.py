"""What adapters add to the products of one step.

Owns the interface that a model's layers call, and its plain form: one adapter after another in torch,
which is the reference and the CPU's path. Ignores how a model is put together.

Inputs are taken in the factors' dtype, and what is added is scaled in fp32. Each row meets its own adapter's
factors alone.

Shapes: T rows of the step, S of them with one adapter, K inputs, N outputs of a site's parts side by side, R
padded rank, D hidden, G groups of O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from lora.device_pool import DevicePool
from lora.packing import SiteLayout
from lora.segments import Run, Segments

ROW_MULTIPLE = 4


class AdapterStep(Protocol):
    """Rows beyond those the step was made for are nobody's."""

    def add_(self, site: int, x_TK: torch.Tensor, y_TN: torch.Tensor, outputs: slice = ...) -> None:
        """Add to a product of `x_TK` in place. `outputs` says which outputs of a single part y has."""
        ...

    def add_embedding_(self, site: int, ids_T: torch.Tensor, y_TD: torch.Tensor) -> None: ...

    def rows(self, rows_R: np.ndarray) -> AdapterStep:
        """The same for some of the rows, in a new order."""
        ...


class LoopStep:
    """`slots_T` is each row's slot. With `even_rows`, products take a multiple of four rows, as the model's do
    where a row must not depend on its batch."""

    def __init__(self, pool: DevicePool, slots_T: np.ndarray, even_rows: bool = False) -> None:
        self._pool = pool
        self._slots_T = slots_T
        self._even_rows = even_rows
        self._segments = Segments.of(slots_T)
        self._rows_A = torch.from_numpy(self._segments.rows_A).to(pool.device)
        pool.await_ready(self._segments.slots)

    def add_(self, site: int, x_TK: torch.Tensor, y_TN: torch.Tensor, outputs: slice = slice(None)) -> None:
        for run, layout in self._adapted(site):
            rows_S = self._rows_A[run.start : run.end]
            x_SK = self._even(x_TK.index_select(0, rows_S).to(self._pool.dtype))
            first = 0
            firsts, seconds = self._pool.factors(run.slot, site)
            for part, (a_RK, b_NR) in enumerate(zip(firsts, seconds, strict=True)):
                b_NR = b_NR[outputs]
                if layout.scales[part]:
                    self._add_part(
                        y_TN[:, first : first + b_NR.shape[0]], rows_S, F.linear(x_SK, a_RK), b_NR, layout, part
                    )
                first += b_NR.shape[0]

    def add_absorbed_(self, site: int, x_TGO: torch.Tensor, y_TGK: torch.Tensor, part: slice) -> None:
        """Add to what was multiplied by a product's weight from the other side, group by group of its outputs:
        y[t, g] += x[t, g] times the rows `part` of group g."""
        for rows_S, a_RK, b_GOR, scale, _ in self._groups(site, x_TGO.shape[1]):
            h_GSR = self._rows_first(x_TGO, rows_S) @ b_GOR[:, part]
            self._add_groups(y_TGK, rows_S, h_GSR @ a_RK, scale)

    def add_groups_(self, site: int, x_TGK: torch.Tensor, y_TGO: torch.Tensor, part: slice) -> None:
        """Add to a product that takes each group of outputs from an input of its own: the rows `part` of group g
        meet x[t, g]."""
        for rows_S, a_RK, b_GOR, scale, one in self._groups(site, x_TGK.shape[1]):
            h_GSR = self._rows_first(x_TGK, rows_S) @ a_RK.t()
            if one >= 0:
                h_GSR[..., one] = 1.0
            self._add_groups(y_TGO, rows_S, h_GSR @ b_GOR[:, part].transpose(1, 2), scale)

    def _groups(self, site: int, groups: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, int]]:
        """Per adapter: rows, first factor, second by groups of outputs, scale, and which column of ones it has."""
        for run, layout in self._adapted(site):
            (a_RK,), (b_NR,) = self._pool.factors(run.slot, site)
            b_GOR = b_NR.unflatten(0, (groups, -1))
            yield self._rows_A[run.start : run.end], a_RK, b_GOR, layout.scales[0], layout.ones[0]

    def _rows_first(self, x_TGK: torch.Tensor, rows_S: torch.Tensor) -> torch.Tensor:
        """x_GSK, in the factors' dtype."""
        x_SGK = x_TGK.index_select(0, rows_S).to(self._pool.dtype)
        return self._even(x_SGK.flatten(1)).view(-1, *x_TGK.shape[1:]).transpose(0, 1)

    @staticmethod
    def _add_groups(y_TGN: torch.Tensor, rows_S: torch.Tensor, delta_GSN: torch.Tensor, scale: float) -> None:
        delta_SGN = delta_GSN.transpose(0, 1)[: len(rows_S)].float() * scale
        y_TGN[rows_S] = (y_TGN[rows_S].float() + delta_SGN).to(y_TGN.dtype)

    def add_embedding_(self, site: int, ids_T: torch.Tensor, y_TD: torch.Tensor) -> None:
        for run, layout in self._adapted(site):
            rows_S = self._rows_A[run.start : run.end]
            (a_RV,), (b_DR,) = self._pool.factors(run.slot, site)
            h_SR = self._even(a_RV.t().index_select(0, ids_T.index_select(0, rows_S)))
            self._add_part(y_TD, rows_S, h_SR, b_DR, layout, 0)

    def rows(self, rows_R: np.ndarray) -> LoopStep:
        return LoopStep(self._pool, self._slots_T[rows_R], self._even_rows)

    def _adapted(self, site: int) -> list[tuple[Run, SiteLayout]]:
        pairs = [(run, self._pool.layout(run.slot, site)) for run in self._segments.runs]
        return [(run, layout) for run, layout in pairs if layout.rank]

    def _even(self, x_SK: torch.Tensor) -> torch.Tensor:
        extra = -x_SK.shape[0] % ROW_MULTIPLE if self._even_rows else 0
        return F.pad(x_SK, (0, 0, 0, extra)) if extra else x_SK

    def _add_part(
        self,
        y_TN: torch.Tensor,
        rows_S: torch.Tensor,
        h_SR: torch.Tensor,
        b_NR: torch.Tensor,
        layout: SiteLayout,
        part: int,
    ) -> None:
        if layout.ones[part] >= 0:
            h_SR[:, layout.ones[part]] = 1.0
        delta_SN = F.linear(h_SR, b_NR)[: len(rows_S)].float() * layout.scales[part]
        y_TN[rows_S] = (y_TN[rows_S].float() + delta_SN).to(y_TN.dtype)
