"""Tiny random models, and batches made by hand, for the model and attention oracles.

Owns the harness: it feeds an engine model through arbitrary pages, chunks and batch mates. Ignores
the scheduler and the cache.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.attention.registry import make_attention
from engine.batch import ForwardBatch, SharedPrefix
from engine.memory.latent_pool import make_pool
from engine.memory.state_pool import StatePool
from engine.models.registry import build_model
from engine.models.spec import spec_from_config
from engine.runner.model_runner import ModelRunner

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "bamba": "BambaForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}


def tiny_reference(model_type: str, seed: int = 0, **overrides):
    """A random transformers model in fp32, norms and biases not at their neutral values."""
    torch.manual_seed(seed)
    values = dict(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=False,
        architectures=[ARCHITECTURES[model_type]],
    )
    config = AutoConfig.for_model(model_type, **(values | overrides))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.2)
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def engine_copy(reference, dtype: torch.dtype = torch.float32):
    """The engine's model with the reference's weights, copied through its weight map."""
    spec = spec_from_config(reference.config.to_dict(), reference.generation_config.to_dict())
    model = build_model(spec, dtype)
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.fill_(float("nan"))
    for name, tensor in reference.state_dict().items():
        packed = model.weight_map.packed.get(name)
        if packed is not None:
            param = model.weight_map.placements[packed.names[0]].param
            parameters[param].copy_(tensor.flatten(0, 1).to(dtype))
            continue
        placement = model.weight_map.placements.get(name)
        if placement is None:
            assert name in model.weight_map.aliases or model.weight_map.ignores(name), name
            continue
        assert tuple(tensor.shape) == placement.shape
        rows = slice(placement.row_start, placement.row_start + placement.num_rows)
        parameters[placement.param][rows] = tensor.to(dtype)
    assert not any(parameter.isnan().any() for parameter in parameters.values())
    return model


@torch.no_grad()
def reference_logits(reference, ids: list[int]) -> torch.Tensor:
    """logits [len(ids), V] of one uncached pass."""
    return reference(torch.tensor([ids])).logits[0].float()


@dataclass
class Row:
    """One request: its tokens so far, its pages, and how many tokens are in the pool."""

    key: int
    ids: list[int]
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


class Harness:
    """Drives a model through a pool of shuffled, poisoned pages."""

    def __init__(
        self,
        model,
        page_size: int = 4,
        backend: str = "torch",
        num_tokens: int = 4096,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        deterministic: bool = False,
    ) -> None:
        self.page_size = page_size
        spec = model.spec.attending
        pool = make_pool(spec, num_tokens // page_size + 1, page_size, dtype or model.dtype, "cpu")
        pool.fill(float("nan"))
        self.pool = pool
        self.free = list(range(1, pool.num_pages))
        random.Random(seed).shuffle(self.free)
        self.runner = ModelRunner(model, pool, make_attention(backend, spec, "cpu", deterministic), deterministic)
        if model.spec.recurrent:
            self.runner.states = StatePool(model.spec.state_layout(dtype or model.dtype), 64, page_size, "cpu")
        self.next_key = 0

    def row(self, ids: list[int]) -> Row:
        self.next_key += 1
        if self.runner.states is not None:
            self.runner.states.pair(self.next_key, 63 - self.next_key)
        return Row(self.next_key, list(ids))

    def fork(self, row: Row) -> Row:
        """A row that shares the full pages of `row` and owns a copy of the page begun."""
        twin = self.row(row.ids)
        full = row.cached // self.page_size
        twin.pages = row.pages[:full]
        twin.cached = row.cached
        if row.cached % self.page_size:
            twin.pages.append(self.free.pop())
            self.pool.copy_pages([row.pages[full]], [twin.pages[full]])
        return twin

    def batch(self, decode: list[Row], prefill: list[tuple[Row, int]], shared: list[SharedPrefix] | None = None):
        """Decode rows run their last token, prefill rows their next `count` tokens."""
        work = [(row, 1) for row in decode] + prefill
        ids, positions, slots, queries, lengths = [], [], [], [], []
        for row, count in work:
            end = row.cached + count
            while len(row.pages) * self.page_size < end:
                row.pages.append(self.free.pop())
            ids += row.ids[row.cached : end]
            positions += range(row.cached, end)
            slots += [
                row.pages[p // self.page_size] * self.page_size + p % self.page_size for p in range(row.cached, end)
            ]
            queries.append(count)
            lengths.append(end)
            row.cached = end
        width = max(len(row.pages) for row, _ in work)
        tables = torch.zeros(len(work), width, dtype=torch.int32)
        for index, (row, _) in enumerate(work):
            tables[index, : len(row.pages)] = torch.tensor(row.pages, dtype=torch.int32)
        return ForwardBatch(
            input_ids_T=torch.tensor(ids),
            positions_T=torch.tensor(positions),
            write_slots_T=torch.tensor(slots),
            query_lens=queries,
            seq_lens=lengths,
            page_tables_BP=tables,
            row_keys=[row.key for row, _ in work],
            num_decode=len(decode),
            logit_rows_R=torch.arange(len(ids)),
            shared_prefixes=shared or [],
            state_slots=[row.key for row, _ in work],
        )

    def step(self, decode: list[Row], prefill: list[tuple[Row, int]], shared: list[SharedPrefix] | None = None) -> None:
        """One forward pass; every row receives the logits of its tokens."""
        work = [(row, 1) for row in decode] + prefill
        logits = self.runner.forward(self.batch(decode, prefill, shared))
        start = 0
        for row, count in work:
            row.logits.append(logits[start : start + count])
            start += count

    def prefill(self, row: Row, chunk: int | None = None) -> None:
        while row.cached < len(row.ids):
            self.step([], [(row, min(chunk or len(row.ids), len(row.ids) - row.cached))])

    @staticmethod
    def all_logits(row: Row) -> torch.Tensor:
        return torch.cat(row.logits)


def check_logits(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Logits close, and the greedy token exact wherever the reference is decided."""
    assert not actual.isnan().any()
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)
    top = expected.topk(2, dim=-1).values
    decided = top[:, 0] - top[:, 1] > 10 * tolerance
    assert decided.any()
    assert torch.equal(actual.argmax(-1)[decided], expected.argmax(-1)[decided])


def random_ids(count: int, seed: int, vocab: int = 256) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
