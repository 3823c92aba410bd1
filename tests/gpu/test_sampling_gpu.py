"""Sampling on a CUDA device against the host, and its noise against Triton's generator."""

import numpy as np
import pytest
import torch

from engine.sampling.noise import HostNoise, device_words
from engine.sampling.params import RowSampling
from engine.sampling.sampler import Sampler
from engine.sampling.seeds import NoiseKey
from engine.types import SamplingParams, Want

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PARAMS = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_k": 20},
    {"top_p": 0.9, "temperature": 1.2},
    {"min_p": 0.1},
    {"repetition_penalty": 1.3, "logit_bias": {5: 3.0}},
    {"min_new": 9, "stop_ids": [1, 2]},
]


def test_noise_equals_the_host():
    words = device_words(torch.tensor([7, -3], device="cuda"), torch.tensor([5, 6], device="cuda"), 1_001)
    noise = HostNoise()
    assert words[0].tolist() == noise.words(NoiseKey(7, 5), 1_001).tolist()
    assert words[1].tolist() == noise.words(NoiseKey(2**64 - 3, 6), 1_001).tolist()


@pytest.mark.parametrize("vocab", [101, 49_152])
def test_tokens_and_columns_equal_the_host(vocab):
    logits = torch.randn(64, vocab, generator=torch.Generator().manual_seed(0)) * 3
    logits[13, 7] = float("nan")
    want = Want(extra_logprobs=["raw", "temperature"], top_logprobs=4, entropy=True)
    prompt = np.arange(40, dtype=np.uint32)
    rows = [RowSampling(SamplingParams(**PARAMS[i % 8]), want, 1_000 + i, prompt, (0,)) for i in range(64)]
    positions = list(range(40, 104))
    host = Sampler(vocab, "cpu").sample(logits, rows, positions)
    device = Sampler(vocab, "cuda").sample(logits.cuda(), rows, positions)
    assert device.bad.tolist() == host.bad.tolist() and host.bad.sum() == 1
    assert device.ids.tolist() == host.ids.tolist()
    assert device.top_ids.tolist() == host.top_ids.tolist()
    for name in ("logprobs", "entropy", "top_logprobs"):
        torch.testing.assert_close(getattr(device, name).cpu(), getattr(host, name), atol=3e-5, rtol=0, equal_nan=True)
    for name, column in host.extra_logprobs.items():
        torch.testing.assert_close(device.extra_logprobs[name].cpu(), column, atol=3e-5, rtol=0, equal_nan=True)


def test_triton_computes_the_same_words():
    triton = pytest.importorskip("triton")
    import triton.language as tl

    @triton.jit
    def words_kernel(seed_ptr, position, out_ptr, BLOCKS: tl.constexpr):
        seed = tl.load(seed_ptr).to(tl.uint64)
        block = tl.arange(0, BLOCKS).to(tl.uint64)
        zero = block * 0
        w0, w1, w2, w3 = tl.philox(seed, block + 1, zero + position, zero, zero)
        at = out_ptr + tl.arange(0, BLOCKS) * 4
        tl.store(at, w0.to(tl.int64, bitcast=True))
        tl.store(at + 1, w1.to(tl.int64, bitcast=True))
        tl.store(at + 2, w2.to(tl.int64, bitcast=True))
        tl.store(at + 3, w3.to(tl.int64, bitcast=True))

    seed = 2**63 + 12_345
    out = torch.zeros(16 * 4, dtype=torch.int64, device="cuda")
    words_kernel[(1,)](torch.tensor([seed - 2**64], device="cuda"), 77, out, BLOCKS=16)
    assert out.cpu().numpy().view(np.uint32).tolist() == HostNoise().words(NoiseKey(seed, 77), 128).tolist()
