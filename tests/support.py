"""The case book's fixtures and the reference that everything is compared with.

T-FULL and T-TIED are tiny random Llama models saved as ordinary folders; REF is transformers,
one sequence at a time, no cache, float32.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine import CacheConfig, Engine, EngineConfig, GroupRequest, SamplingParams, SchedulerConfig, Want
from engine.types import NamedTensor, TensorSpec, UpdateBegin

VOCAB = 512
CONTEXT = 256
TOLERANCE = 1e-4
DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def prompt(n: int, start: int = 10) -> np.ndarray:
    """P(n) of the case book: ids start, start + 1, ..."""
    return np.arange(start, start + n, dtype=np.uint32)


def save_tiny(folder: Path, seed: int = 0, kind: str = "llama", **overrides) -> Path:
    """A random model of the case book's size as a Hugging Face folder."""
    torch.manual_seed(seed)
    shape = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    config = AutoConfig.for_model(kind, **(shape | overrides))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


@lru_cache(maxsize=16)
def reference_model(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@lru_cache(maxsize=128)
@torch.inference_mode()
def _logits(folder: Path, ids: tuple[int, ...]) -> torch.Tensor:
    return reference_model(folder)(torch.tensor([ids]), use_cache=False).logits[0].float()


@lru_cache(maxsize=8192)
def _greedy_id(folder: Path, ids: tuple[int, ...]) -> int:
    return int(_logits(folder, ids)[-1].argmax())


def reference_logits(folder: Path, ids) -> torch.Tensor:
    """float32 [len(ids), vocabulary], computed from all ids at once; the same ids are computed once."""
    return _logits(folder, tuple(map(int, ids))).clone()


def reference_logprobs(folder: Path, ids, temperature: float = 1.0) -> np.ndarray:
    """float32 [len(ids)]: log p of each id given those before it; NaN at 0."""
    ids = [int(i) for i in ids]
    logprobs = torch.log_softmax(reference_logits(folder, ids) / temperature, -1)
    column = [float("nan")] + [float(logprobs[p - 1, ids[p]]) for p in range(1, len(ids))]
    return np.asarray(column, dtype=np.float32)


def reference_greedy(folder: Path, ids, num: int) -> list[int]:
    """`num` greedy ids, each from a whole forward pass."""
    sequence = tuple(int(i) for i in ids)
    for _ in range(num):
        sequence += (_greedy_id(folder, sequence),)
    return list(sequence[len(ids) :])


def engine_config(**fields) -> EngineConfig:
    return EngineConfig(**({"device": "cpu", "dtype": "float32"} | fields))


def make_engine(folder: Path, **fields) -> Engine:
    return Engine.from_pretrained(folder, make_config(**fields))


def make_config(
    *,
    page_size: int = 4,
    kv_tokens: int = 4096,
    state_slots: int | Literal["auto"] = "auto",
    window_tokens: int | Literal["auto"] = "auto",
    canary: int = 0,
    host_mib: int = 0,
    max_running: int = 16,
    prefill_tokens: int = 64,
    lookahead: int = 4,
    burst: int = 2,
    max_waiting: int = 512,
    prefix_cache: bool = True,
    **engine,
) -> EngineConfig:
    """A small engine: what makes it work is met in few tokens."""
    return engine_config(
        **engine,
        cache=CacheConfig(
            page_size=page_size,
            kv_tokens=kv_tokens,
            window_tokens=window_tokens,
            state_slots=state_slots,
            prefix_cache=prefix_cache,
            canary=canary,
            host_mib=host_mib,
        ),
        scheduler=SchedulerConfig(
            max_running=max_running,
            prefill_tokens=prefill_tokens,
            lookahead=lookahead,
            burst=burst,
            max_waiting=max_waiting,
        ),
    )


def ask(group_id: str, ids, n: int = 1, want: Want | None = None, **sampling) -> GroupRequest:
    """Greedy by default, as most cases are."""
    extra = {key: sampling.pop(key) for key in ("cache_salt", "resume", "min_policy_version") if key in sampling}
    sampling = {"temperature": 0.0, "max_new": 8} | sampling
    return GroupRequest(
        group_id=group_id,
        prompt_ids=np.asarray(ids, dtype=np.uint32),
        n=n,
        sampling=SamplingParams(**sampling),
        want=want or Want(),
        **extra,
    )


def assert_sample_is_reference(folder: Path, prompt_ids, sample, num: int) -> None:
    """A greedy sample equals REF: ids exact, log-probabilities within tolerance, columns whole."""
    expected = reference_greedy(folder, prompt_ids, num)
    assert sample.ids.tolist() == expected
    whole = reference_logprobs(folder, [*prompt_ids, *expected])
    np.testing.assert_allclose(sample.logprobs, whole[len(prompt_ids) :], atol=TOLERANCE)
    assert_whole(sample)


def assert_whole(sample) -> None:
    """All columns are as long as the ids, and the spans partition them."""
    length = len(sample.ids)
    assert len(sample.logprobs) == length
    for column in (sample.entropy, sample.top_ids, sample.top_logprobs, *sample.extra_logprobs.values()):
        assert column is None or len(column) == length
    position = sample.spans[0].start if sample.spans else 0
    start = position
    for span in sample.spans:
        assert span.start == position
        position = span.end
    assert position - start == length


def state_tensors(folder: Path, dtype: torch.dtype = torch.float32) -> list[NamedTensor]:
    """A folder's weights as an update's tensors."""
    return [to_named(name, value.to(dtype)) for name, value in reference_model(folder).state_dict().items()]


def to_named(name: str, value: torch.Tensor) -> NamedTensor:
    data = value.contiguous().view(torch.uint8).reshape(-1).numpy()
    return NamedTensor(name=name, dtype=DTYPE_NAMES[value.dtype], shape=list(value.shape), data=data)


def begin_of(tensors: list[NamedTensor], txn: str, base: int, new: int, **fields) -> UpdateBegin:
    manifest = [TensorSpec(name=t.name, dtype=t.dtype, shape=t.shape) for t in tensors]
    return UpdateBegin(txn=txn, base_version=base, new_version=new, manifest=manifest, **fields)


def update(engine: Engine, folder: Path, new: int, **fields):
    """Publish a folder's weights to an engine in one go."""
    tensors = state_tensors(folder)
    engine.update_begin(begin_of(tensors, f"to-{new}", engine.policy.version, new, **fields))
    engine.update_stage(f"to-{new}", tensors)
    return engine.update_commit(f"to-{new}")


def save_chain(folder: Path, successor: dict[int, int], eos_ids: list[int] | None = None) -> Path:
    """A scripted target: a real model that always continues id i with `successor[i]`, or i + 1.

    Attention and blocks add nothing, so the final state is the last token's embedding, and the
    head's row of a successor is that embedding.
    """
    torch.manual_seed(7)
    save_tiny(folder, seed=7, eos_token_id=eos_ids, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = torch.nn.functional.normalize(torch.randn(VOCAB, 64), dim=-1) * 8
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.zero_()
        for token in range(VOCAB):
            model.lm_head.weight[successor.get(token, (token + 1) % VOCAB)] += embedding[token]
    model.save_pretrained(folder)
    return folder


def chain(*ids: int) -> dict[int, int]:
    """The successors that make a model emit ids[1:] after ids[0]."""
    return dict(pairwise(ids))
