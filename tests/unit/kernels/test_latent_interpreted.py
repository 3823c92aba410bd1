"""The kernels of latent attention in Triton's interpreter against their references."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention import mla_triton
from engine.attention.mla import choose_tokens, index_scores
from engine.attention.registry import make_attention
from engine.kernels.decode_attention import States, TileConfig
from engine.kernels.dsa_attention import dsa_attention
from engine.kernels.dsa_index_scores import dsa_index_scores
from engine.kernels.dsa_select import counts_shape, dsa_select
from engine.kernels.mla_decode import mla_decode
from engine.kernels.mla_tile import LatentShape
from tests.oracle.latent_models import shape
from tests.oracle.model_oracle import Harness, engine_copy, random_ids, tiny_reference
from tests.oracle.test_generate_latent import save
from tests.support import ask, make_engine, prompt

PAGE = 4
SHAPE = LatentShape(5, 24, 12, PAGE, 0.21)
CONFIG = TileConfig(16, 4, 1, block_m=16)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Scene:
    """Two rows in shuffled pages: a decode row, and a prompt's last two tokens. Nobody wrote page 0."""

    def __init__(self, width: int) -> None:
        self.tables = torch.tensor([[3, 1, 7, 5, 9, 0, 0], [2, 8, 4, 6, 10, 11, 12]], dtype=torch.int32)
        self.row_of = torch.tensor([0, 1, 1], dtype=torch.int32)
        self.visible = torch.tensor([19, 26, 27], dtype=torch.int32)
        self.rows = noise(13 * PAGE, width)
        self.rows[:PAGE] = float("nan")

    def context(self, token: int) -> torch.Tensor:
        position = torch.arange(int(self.visible[token]))
        pages = self.tables[self.row_of[token], position // PAGE].long()
        return self.rows[pages * PAGE + position % PAGE].double()


def attend(q_NC: torch.Tensor, rows_SC: torch.Tensor) -> torch.Tensor:
    weights_NS = (q_NC.double() @ rows_SC.t() * SHAPE.scale).softmax(-1)
    return (weights_NS @ rows_SC[:, : SHAPE.rank]).float()


@pytest.mark.parametrize(("pieces", "piece"), [(2, 16), (1, 0), (2, 0)])
def test_dense(pieces, piece):
    scene, q = Scene(36), noise(3, 5, 36, seed=1)
    out = torch.full((3, 5, 24), float("nan"))
    partial = States.empty((2, 3), 5, 24, "cpu")
    mla_decode(q, scene.rows, scene.tables, scene.row_of, scene.visible, out, SHAPE, pieces, partial, CONFIG, piece)
    expected = torch.stack([attend(q[token], scene.context(token)) for token in range(3)])
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("pieces", "piece"), [(2, 16), (1, 0)])
def test_chosen(pieces, piece):
    scene, q = Scene(36), noise(3, 5, 36, seed=1)
    chosen = torch.full((3, 20), -1, dtype=torch.int32)
    chosen[0, :19] = torch.arange(19)
    for token in (1, 2):
        chosen[token] = torch.randperm(int(scene.visible[token]))[:20].sort().values
    out, partial = torch.full((3, 5, 24), float("nan")), States.empty((2, 3), 5, 24, "cpu")
    dsa_attention(
        q, scene.rows, scene.tables, scene.row_of, scene.visible, chosen, out, SHAPE, pieces, partial, CONFIG, piece
    )
    expected = [attend(q[t], scene.context(t)[chosen[t][chosen[t] >= 0].long()]) for t in range(3)]
    torch.testing.assert_close(out, torch.stack(expected), atol=1e-5, rtol=1e-5)


def test_index_scores():
    scene, q, weights = Scene(12), noise(3, 5, 12, seed=1), noise(3, 5, seed=2)
    scores = torch.full((3, 30), 7.0)
    dsa_index_scores(
        q, weights, scene.rows, scene.tables, scene.row_of, scene.visible, scores, PAGE, 27, block_n=16, piece=16
    )
    for token, seen in enumerate(scene.visible.tolist()):
        expected = index_scores(
            q[token : token + 1].double(), weights[token : token + 1].double(), scene.context(token)
        )
        torch.testing.assert_close(scores[token, :seen], expected[0], atol=1e-5, rtol=1e-5)
        assert (scores[token, seen:] == 7.0).all()


@pytest.mark.parametrize(("pieces", "rows"), [(3, slice(0, 5)), (1, slice(1, 2))])
def test_choice(pieces, rows):
    """Ties within, across and at the ends of pieces, zeros of both signs, and rows with nothing to choose."""
    scores = noise(5, 90)
    scores[1] = torch.relu(scores[1] - 0.8)
    scores[2] = torch.where(scores[2] > 0.5, 1.5, -0.0)
    scores[2, ::3] = 0.0
    scores[3] = -3.25
    visible = torch.tensor([90, 90, 83, 49, 10], dtype=torch.int32)
    for position, seen in enumerate(visible.tolist()):
        scores[position, seen:] = 100.0
    scores, visible = scores[rows], visible[rows]
    chosen = torch.full((len(scores), 12), -7, dtype=torch.int32)
    counts = torch.full(counts_shape(len(scores), pieces), -1, dtype=torch.int32)
    dsa_select(scores, visible, chosen, counts, block_n=32)
    assert torch.equal(chosen, choose_tokens(scores, visible, 12))


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_model_through_the_kernels(deterministic, monkeypatch):
    """A decode row beside a prompt's second chunk, with layers that share a choice, equals the reference's way."""
    monkeypatch.setattr(mla_triton, "FIXED_PIECE", 16)
    monkeypatch.setattr(mla_triton, "FIXED_CHOICE", 16)
    monkeypatch.setattr(mla_triton, "SCORE_BYTES", 1 << 10)
    model_type, overrides = shape("glm-4")
    overrides |= dict(num_hidden_layers=2, indexer_types=["full", "shared"], index_topk=6)
    reference = tiny_reference(model_type, **overrides)
    harness = Harness(engine_copy(reference), num_tokens=64, backend="torch_ref")
    rows = harness.row(random_ids(9, 1)), harness.row(random_ids(11, 2))
    harness.step([], [(row, 8) for row in rows])
    runs, spec = [], harness.runner.model.spec
    for backend in ("torch_ref", "triton"):
        harness.runner.backend = make_attention(backend, spec, "cpu", deterministic)
        for row in rows:
            row.cached = 8
        harness.step(list(rows[:1]), [(rows[1], 3)])
        runs.append(torch.cat([row.logits[-1] for row in rows]))
    torch.testing.assert_close(runs[1], runs[0], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_captured_steps_equal_plain_ones(tmp_path):
    """Rows of several lengths, a group, rows that end in the middle of a burst: tokens are the reference's."""
    folder = save(tmp_path, "glm-16", seed=4)
    common = dict(page_size=4, burst=3, loop="overlapped", max_running=3)
    work = [
        ask("greedy", prompt(11), max_new=4),
        ask("group", prompt(6), n=2, max_new=3, temperature=1.0, seed=3),
    ]
    device, plain = make_engine(folder, attention="triton", **common), make_engine(folder, **common)
    for one, other in zip(device.generate(work), plain.generate(work), strict=True):
        for a, b in zip(one.samples, other.samples, strict=True):
            assert a.ids.tolist() == b.ids.tolist(), one.group_id
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
    assert device.counters.graph_rows > 0
    device.check()
