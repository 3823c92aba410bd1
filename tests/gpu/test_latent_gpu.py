"""Latent attention and the choice of tokens on a CUDA device against the definition, and served against
transformers. Index inputs are small integers, so that scores are exact and full of ties."""

from __future__ import annotations

import pytest
import torch

from engine.attention.mla import LatentReference
from engine.attention.mla_triton import TritonLatent
from engine.batch import ForwardBatch
from engine.memory.latent_pool import LatentPool
from engine.models.spec import spec_from_config
from tests.oracle import test_generate_latent as served
from tests.oracle.ties import stable_ties  # noqa: F401

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16, FP32 = torch.bfloat16, torch.float32
LENGTHS, CHUNK = [1, 63, 64, 65, 700, 4097], 70
"""Of decode rows; then come the last tokens of a prompt as long as the longest."""


def make_spec(heads: int, rank: int, index_heads: int, top_k: int):
    sizes = dict(kv_lora_rank=rank, qk_rope_head_dim=rank // 8, qk_nope_head_dim=32, v_head_dim=32, q_lora_rank=32)
    index = dict(
        index_n_heads=index_heads, index_head_dim=rank // 4, index_topk=top_k, indexer_types=["full", "shared"]
    )
    shape = dict(vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2, first_k_dense_replace=2)
    return spec_from_config(
        {"model_type": "glm_moe_dsa", "num_attention_heads": heads, "max_position_embeddings": 8192}
        | shape | sizes | index
    )  # fmt: skip


class Scene:
    def __init__(self, spec, dtype: torch.dtype, page: int = 64) -> None:
        self.noise = torch.Generator("cuda").manual_seed(1)
        lengths, queries = [*LENGTHS, max(LENGTHS)], [*([1] * len(LENGTHS)), CHUNK]
        columns = -(-max(lengths) // page)
        self.pool = LatentPool(spec, len(lengths) * columns + 1, page, dtype, "cuda")
        self.pool.fill(float("nan"))
        tables = (torch.randperm(len(lengths) * columns) + 1).view(len(lengths), columns).int().cuda()
        positions, slots = [], []
        for row, (length, count) in enumerate(zip(lengths, queries, strict=True)):
            position = torch.arange(length, device="cuda")
            slot = tables[row, position // page].long() * page + position % page
            for layer in range(2):
                self.pool.tokens(layer)[slot] = self.normal(length, spec.latent.row).to(dtype)
            self.pool.index_keys(0)[slot] = self.integers(length, spec.latent.index.head_dim).to(dtype)
            positions.append(position[-count:])
            slots.append(slot[-count:])
        ids, tokens = torch.cat(positions), sum(queries)
        rows = torch.arange(tokens, device="cuda")
        self.batch = ForwardBatch(
            ids, ids, torch.cat(slots), queries, lengths, tables, list(range(len(lengths))), len(LENGTHS), rows
        )
        index = spec.latent.index
        self.index = (
            self.integers(tokens, index.heads, index.head_dim).to(dtype),
            self.integers(tokens, index.heads) / 64,
            self.integers(tokens, index.head_dim).to(dtype),
        )
        self.q = self.normal(tokens, spec.num_heads, spec.latent.row).to(dtype)
        self.rows = self.normal(tokens, 1, spec.latent.row).to(dtype)
        self.rank = spec.latent.rank

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.noise, device="cuda") / 4

    def integers(self, *shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=self.noise, device="cuda").float()

    def run(self, backend) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of the layer that chooses and of the one that shares its choice."""
        backend.plan(self.batch, self.pool)
        backend.choose(*self.index, 0)
        first, second = (backend.run(self.q, self.rows, self.rows[..., : self.rank], layer) for layer in range(2))
        return first, second


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("heads", "rank", "index_heads", "top_k", "dtype"),
    [(128, 512, 64, 2048, BF16), (16, 512, 4, 512, BF16), (5, 64, 7, 100, FP32), (64, 512, 32, 8192, BF16)],
)
def test_kernels_equal_the_definition(heads, rank, index_heads, top_k, dtype, deterministic) -> None:
    spec = make_spec(heads, rank, index_heads, top_k)
    scene, reference, kernels = Scene(spec, dtype), LatentReference(spec), TritonLatent(spec, deterministic)
    expected, actual = scene.run(reference), scene.run(kernels)
    if reference.chosen_TK is not None:
        assert kernels.chosen_TK is not None
        chose_T = (reference.chosen_TK >= 0).any(dim=1)
        assert torch.equal(kernels.chosen_TK[chose_T], reference.chosen_TK[chose_T])
    for out, wanted in zip(actual, expected, strict=True):
        tolerance = 1e-5 if dtype == FP32 else 1e-2
        torch.testing.assert_close(out.float(), wanted.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("stable_ties")
@pytest.mark.parametrize("loop", ["serial", "overlapped"])
@pytest.mark.parametrize("kind", served.KINDS)
def test_served_tokens_are_those_of_transformers(kind, loop, tmp_path, monkeypatch) -> None:
    plain = served.make_engine
    monkeypatch.setattr(served, "make_engine", lambda folder, **fields: plain(folder, device="cuda", **fields))
    folders = {kind: served.save(tmp_path, kind, seed=4)}
    served.test_every_hit_depth(folders, kind, loop)
    served.test_forks_retraction_and_eviction(folders, kind, loop)
