"""Rejection on the device against the host's, which is proven by enumeration: same noise, same verdicts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.dspark.acceptance import Round, verify_rejection
from engine.dspark.picks import RejectionPick
from engine.dspark.round_noise import RoundNoise
from engine.kernels.round_judge import DraftDraw, JudgeBuffers, draft_seeds, judge_rows, settle_rows
from engine.kernels.round_rows import pack_rows_reference
from engine.kernels.row_columns import drawn_at, empty_columns, gather_columns
from engine.kernels.sample_columns import SampleOut, SampleWorkspace
from engine.kernels.sample_epilogue import sample_rows
from engine.memory.device_edits import DeviceEdits
from engine.memory.device_table import DEFINITIONS, DeviceTable, RowState
from engine.sampling.params import RowSampling
from engine.types import SamplingParams, Want

VOCAB, DRAFTS, CPU = 40, 3, torch.device("cpu")
PARAMS = [
    dict(temperature=1.0),
    dict(temperature=0.0),
    dict(temperature=0.7, top_k=6),
    dict(temperature=1.3, top_p=0.8, min_p=0.02),
    dict(temperature=1.0, logit_bias={3: 2.0, 5: -4.0}),
    dict(temperature=0.9, min_new=30, stop_ids=[1, 2, 3, 4]),
]


class Scene:
    """Rows of every kind, some with the same seed, at different anchors; with q from the device, or without."""

    def __init__(self, number: int, has_q: bool) -> None:
        noise = torch.Generator().manual_seed(number)
        count = self.count = len(PARAMS)
        self.rows = [RowSampling(SamplingParams(**p), Want(), 2**63 + 5, np.array([1])) for p in PARAMS]
        self.anchors, self.ids = [4 + 3 * b for b in range(count)], [2**64 - 1 - b for b in range(count)]
        self.noise = RoundNoise([row.seed for row in self.rows], self.ids, self.anchors, CPU)
        self.table = DeviceTable(count, 8, CPU)
        self.table.edits = DeviceEdits(count, VOCAB, 100, CPU)
        self.table.admit([self._state(b) for b in range(count)])
        self.slots, self.at = torch.arange(count, dtype=torch.int32), torch.tensor(self.anchors)
        self.workspace = SampleWorkspace.empty(count * (1 + DRAFTS), VOCAB, CPU)
        self.q = torch.randn(count, DRAFTS, VOCAB, generator=noise) * 1.5
        lens = torch.randint(0, DRAFTS + 1, (count,), generator=noise, dtype=torch.int32)
        self.draw, drafts = self._draft(), torch.randint(0, VOCAB, (count, DRAFTS), generator=noise)
        self.drafts = self.picked if has_q else drafts
        self.has_q = has_q
        pages = torch.zeros(count, 16, dtype=torch.int32)
        self.packed = pack_rows_reference(
            self.slots, lens, lens, self.at, self.at, self.drafts, pages, 4, count * (1 + DRAFTS)
        )
        self.lens = lens.tolist()
        verify = int(self.packed.starts_B1[-1])
        self.p = torch.randn(count * (1 + DRAFTS), VOCAB, generator=noise)
        for r in range(verify):  # near q, so that some drafts pass
            b = int(self.packed.owner_R[r])
            k = r - int(self.packed.starts_B1[b])
            self.p[r] = self.p[r] * 0.7 + (self.q[b, k] if k < DRAFTS else 0.0)
        self.verify = verify

    def _state(self, b: int) -> RowState:
        params, row = self.rows[b].params, self.rows[b]
        temperature = 0.0 if row.greedy else params.temperature
        cuts = (params.top_k, params.top_p, params.min_p, DEFINITIONS.index("processed"), ())
        return RowState(b, 1, self.anchors[b], 1, 99, row.seed, temperature, *cuts, row, self.ids[b])

    def _draft(self) -> DraftDraw:
        assert self.table.edits is not None
        columns = empty_columns(self.count, CPU, self.table.edits.columns)
        gather_columns(self.table, self.slots, self.at, columns)
        seeds, cuts = torch.zeros(DRAFTS, self.count, dtype=torch.int64), torch.zeros(DRAFTS, self.count, 2).double()
        draft_seeds(self.table, self.slots, self.at, seeds)
        ids, log_q = [], []
        for k in range(DRAFTS):
            drawn = SampleOut.empty(self.count, CPU)
            at = drawn_at(columns, self.at + 1 + k, seeds[k])
            sample_rows(self.q[:, k], at, drawn, self.workspace, every=False)
            cuts[k] = self.workspace.record_BR[: self.count, :2]
            ids.append(drawn.ids_B)
            log_q.append(drawn.processed_B)
        self.picked = torch.stack(ids, 1)
        return DraftDraw(self.q, torch.stack(log_q, 1).contiguous(), cuts)

    def on_device(self):
        assert self.table.edits is not None
        packed, columns = self.packed, empty_columns(len(self.p), CPU, self.table.edits.columns)
        gather_columns(self.table, packed.slots_R, packed.ends_R, columns)
        drawn = SampleOut.empty(len(self.p), CPU)
        sample_rows(self.p, columns, drawn, self.workspace, every=False)
        out = JudgeBuffers.empty(self.count, len(self.p), empty_columns(self.count, CPU), torch.zeros(9, VOCAB))
        keep = torch.tensor(self.lens, dtype=torch.int32)
        given = (self.p, packed, columns, drawn, self.workspace)
        draw = self.draw if self.has_q else None
        judge_rows(self.table, *given, self.at, self.drafts, keep, draw, out, truncated=True)
        sample_rows(out.residual_BV, out.columns, out.emitted, self.workspace, truncated=False, every=False)
        settle_rows(*given, self.drafts, keep, out)
        return out, drawn


@pytest.mark.slow
@pytest.mark.parametrize("has_q", [True, False])
def test_verdicts_are_those_of_the_host(has_q):
    accepted, replaced = 0, 0
    for number in range(3):
        scene = Scene(number, has_q)
        host = RejectionPick(scene.rows, scene.anchors, scene.noise)
        picked = torch.stack([host(k, scene.q[:, k].clone()) for k in range(DRAFTS)], 1)
        assert scene.picked.tolist() == picked.tolist(), "drafts are drawn with the host's noise"
        edited = scene.q.clone()
        for b, row in enumerate(scene.rows):
            for k in range(DRAFTS):
                if row.edits_at(scene.anchors[b] + 1 + k):
                    row.edit(edited[b, k], scene.anchors[b] + 1 + k)
        played = Round(scene.rows, scene.anchors, scene.drafts, scene.lens, edited if has_q else None)
        verdict = verify_rejection(scene.p[: scene.verify], played, scene.noise)
        out, drawn = scene.on_device()
        assert out.accepted_B.tolist() == verdict.num_accepted
        starts = scene.packed.starts_B1.tolist()
        rows = [starts[b] + k for b, kept in enumerate(verdict.num_accepted) for k in range(kept + 1)]
        assert drawn.ids_B[rows].tolist() == verdict.emitted.ids.tolist()
        np.testing.assert_allclose(drawn.processed_B[rows], verdict.emitted.logprobs, atol=2e-5)
        for b, chances in enumerate(verdict.chances):
            np.testing.assert_allclose(out.chance_R[starts[b] : starts[b] + len(chances)], chances, atol=1e-5)
        accepted += sum(verdict.num_accepted)
        replaced += sum(kept < count for kept, count in zip(verdict.num_accepted, scene.lens, strict=True))
    assert replaced > 2 and (accepted > 2 or not has_q)
