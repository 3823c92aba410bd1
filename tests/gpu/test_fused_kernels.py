"""The fused kernels on a CUDA device against their references, in bf16 and fp32."""

import itertools

import numpy as np
import pytest
import torch

from engine.memory.device_edits import DeviceEdits
from engine.sampling.params import RowSampling
from engine.sampling.sampler import Sampler
from engine.types import SamplingParams, Want

pytest.importorskip("triton")
from engine.kernels.embedding_gather import embedding_gather, embedding_gather_reference
from engine.kernels.gemv import InputNorm, gemv, gemv_reference
from engine.kernels.invariant_matmul import Partials, invariant_gated_matmul, invariant_matmul
from engine.kernels.invariant_tiles import segments_of
from engine.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from engine.kernels.rope_kv_write import QKNorm, QKVShape, rope_kv_write, rope_kv_write_reference
from engine.kernels.sample_columns import SampleColumns, SampleOut, SampleWorkspace
from engine.kernels.sample_epilogue import sample_rows
from engine.kernels.skinny_matmul import skinny_matmul, skinny_matmul_then_norm
from engine.kernels.swiglu import silu_and_mul, silu_and_mul_reference
from engine.layers.rotary import Rotary
from engine.models.spec import RopeSpec
from tests.unit.kernels.test_decode_step_interpreted import check_steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DTYPES = [torch.bfloat16, torch.float32]
PROMPT = np.arange(40, dtype=np.uint32)
PARAMS = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_k": 20},
    {"top_p": 0.9, "temperature": 1.2},
    {"min_p": 0.1},
    {"top_k": 500, "top_p": 0.95, "min_p": 0.001, "temperature": 0.8},
    {"top_k": 1},
]
EDITING = [
    {"repetition_penalty": 1.3, "logit_bias": {5: 3.0}},
    {"frequency_penalty": 0.5, "presence_penalty": 0.2, "top_p": 0.8},
    {"min_new": 9, "stop_ids": [1, 2]},
    {"min_new": 9, "stop_ids": [1, 2], "temperature": 0.0, "repetition_penalty": 0.8},
]


def noise(*shape, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def poison(*shape, dtype=torch.bfloat16):
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def close(actual, expected, units=1):
    """Within rounding: bf16 results may differ by a unit in the last place where fp32 sums do."""
    rtol = units * (2.0**-7 if expected.dtype == torch.bfloat16 else 2e-6)
    torch.testing.assert_close(actual, expected, atol=units * 2e-6, rtol=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (513, 576), (33, 1024), (2, 8192)])
def test_norms(rows, width, dtype):
    x, residual, weight = noise(rows, width, dtype=dtype), noise(rows, width, dtype=dtype), noise(width, dtype=dtype)
    close(rms_norm(x, weight, 1e-6, poison(rows, width, dtype=dtype)), rms_norm_reference(x, weight, 1e-6), 2)
    normed, total = add_rms_norm_reference(x, residual, weight, 1e-6)
    out, stream = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(stream, total)
    close(out, normed, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 12288), (257, 1536), (8, 3072)])
def test_gates_and_embeddings(rows, width, dtype):
    gate_up = noise(rows, 2 * width, dtype=dtype, scale=3.0)
    close(silu_and_mul(gate_up, poison(rows, width, dtype=dtype)), silu_and_mul_reference(gate_up), 2)
    ids = torch.randint(-1, rows, (300,), device="cuda")
    out = embedding_gather(ids, gate_up, poison(300, 2 * width, dtype=dtype))
    assert torch.equal(out, embedding_gather_reference(ids, gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "normed", "tokens"),
    [
        (32, 8, 128, True, 257),
        (16, 8, 128, True, 1),
        (9, 3, 64, False, 32),
        (16, 1, 256, False, 5),
        (4, 4, 96, True, 7),
    ],
)
def test_rope_and_kv_write(heads, kv_heads, size, normed, tokens, dtype):
    shape = QKVShape(heads, kv_heads, size)
    rotary = Rotary(RopeSpec(theta=1e6), size, 4096, dtype, torch.device("cuda"))
    norm = QKNorm(noise(size, dtype=dtype), noise(size, dtype=dtype), 1e-6) if normed else None
    qkv = noise(tokens, (heads + 2 * kv_heads) * size, dtype=dtype)
    positions = torch.randint(0, 4096, (tokens,), device="cuda")
    slots = torch.randperm(2 * tokens, device="cuda")[:tokens]
    slots[tokens // 2 + 1 :: 7] = -1
    pools = [poison(2 * tokens, 2 * kv_heads, size, dtype=dtype) for _ in range(2)]
    tables = (rotary.cos_CE, rotary.sin_CE, positions, slots)
    expected = rope_kv_write_reference(qkv.clone(), shape, norm, *tables, pools[0])
    out = rope_kv_write(qkv, shape, norm, *tables, pools[1])
    if normed:
        assert torch.equal(pools[1].isnan(), pools[0].isnan())
        for actual, wanted in ((out, expected), (pools[1].nan_to_num(), pools[0].nan_to_num())):
            error = (actual.double() - wanted.double()).norm() / wanted.double().norm()
            assert error < (4e-3 if dtype == torch.bfloat16 else 1e-6)
    else:
        assert torch.equal(out, expected)
        assert torch.equal(pools[1].isnan(), pools[0].isnan())
        assert torch.equal(pools[1].nan_to_num(), pools[0].nan_to_num())


@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 12288), (1536, 576), (577, 1536)])
def test_gemv(outputs, inputs):
    x, weight = noise(1, inputs), noise(outputs, inputs, scale=inputs**-0.5)
    norm, bias, residual = InputNorm(noise(inputs), 1e-6), noise(outputs), noise(1, outputs)
    for options in ({}, {"bias_N": bias}, {"residual_1N": residual}, {"norm": norm, "gated": outputs % 2 == 0}):
        expected = gemv_reference(x.double(), weight.double(), **doubled(options))
        out = gemv(x, weight, **options, out=poison(*expected.shape))
        assert relative(out, expected) < 6e-3, options.keys()


@pytest.mark.parametrize("rows", [2, 19, 64, 150])
@pytest.mark.parametrize(("width", "inner"), [(576, 1536), (1024, 3072)])
def test_products_of_few_rows_and_the_norm_between(rows, width, inner):
    x, down, gate_up = noise(rows, inner), noise(width, inner, scale=inner**-0.5), noise(2 * inner, width, scale=0.03)
    residual, norm, bias = noise(rows, width), InputNorm(noise(width), 1e-6), noise(width)
    stream = residual.clone()
    unscaled = skinny_matmul_then_norm(x, down, bias, stream, norm)
    total = gemv_reference(x.double(), down.double(), bias.double(), residual_1N=residual.double())
    assert relative(stream, total) < 6e-3
    expected = gemv_reference(stream.double(), gate_up.double(), gated=True, norm=doubled({"norm": norm})["norm"])
    assert relative(skinny_matmul(unscaled, gate_up, gated=True, out=poison(rows, inner)), expected) < 8e-3
    expected = gemv_reference(x.double(), down.double(), bias.double())
    assert relative(skinny_matmul(x, down, bias, out=poison(rows, width)), expected) < 6e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (576, 1536), (9000, 1024), (4096, 12288), (40960, 512)])
def test_invariant_products_keep_a_rows_bits(outputs, inputs, dtype):
    """Over all tiles: rows as columns of the product, few rows, many; segments split and not."""
    x, weight = noise(1100, inputs).to(dtype), noise(outputs, inputs, scale=inputs**-0.5).to(dtype)
    whole = invariant_matmul(x, weight, out=torch.full((1100, outputs), float("nan"), dtype=dtype, device="cuda"))
    error = relative(whole, x.double() @ weight.double().t())
    assert error < (6e-3 if dtype == torch.bfloat16 else 1e-5)
    partials = Partials.empty("cuda")
    for start, rows in ((3, 1), (900, 7), (40, 30), (100, 64), (64, 65), (7, 128), (500, 256), (500, 300), (0, 600)):
        for room in (partials, None):
            part = invariant_matmul(x[start : start + rows], weight, partials=room)
            assert torch.equal(part, whole[start : start + rows]), f"{rows} rows"
    assert not partials.arrived.any()
    if dtype == torch.bfloat16:
        part = invariant_matmul(x, weight[64:320], segments=segments_of(outputs, inputs))
        assert torch.equal(part, whole[:, 64:320]), "a part of the outputs"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "inputs"), [(12288, 4096), (1536, 576), (9000, 1024)])
def test_invariant_gates_keep_a_rows_bits(width, inputs, dtype):
    """With the gate in the product and after it."""
    x, weight = noise(200, inputs).to(dtype), noise(2 * width, inputs, scale=inputs**-0.5).to(dtype)
    whole = silu_and_mul(invariant_matmul(x, weight))
    assert relative(whole, gemv_reference(x.double(), weight.double(), gated=True)) < 1e-2
    for start, rows in ((3, 1), (40, 30), (100, 64), (7, 128), (0, 200)):
        part = invariant_gated_matmul(x[start : start + rows], weight)
        assert torch.equal(part, whole[start : start + rows]), f"{rows} rows"


def doubled(options):
    wide = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    if "norm" in options:
        wide["norm"] = InputNorm(options["norm"].weight_K.double(), options["norm"].eps)
    return wide


def relative(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


def columns_of(rows, positions, vocab, edits):
    def column(values, dtype=torch.float64):
        return torch.tensor(list(values), dtype=dtype, device="cuda")

    params, given = [row.params for row in rows], None
    if edits:
        state = DeviceEdits(len(rows), vocab, 4_096, torch.device("cuda"))
        state.admit(list(range(len(rows))), rows)
        given = state.columns
    seeds = torch.from_numpy(np.array([row.seed for row in rows], dtype=np.uint64).view(np.int64)).cuda()
    return SampleColumns(
        column(p.temperature for p in params),
        column((p.top_k for p in params), torch.int32),
        column(p.top_p for p in params),
        column(p.min_p for p in params),
        seeds,
        column(positions, torch.int64),
        torch.ones(len(rows), dtype=torch.uint8, device="cuda"),
        edits=given,
    )


@pytest.mark.parametrize("edits", [False, True])
@pytest.mark.parametrize(
    ("vocab", "tile", "scale", "dtype"),
    [(1_001, 2048, 3.0, torch.float32), (49_152, 2048, 2.0, torch.bfloat16), (151_936, 4096, 1.0, torch.bfloat16)],
)
def test_sampling_equals_the_host(vocab, tile, scale, dtype, edits):
    kinds = PARAMS + EDITING if edits else PARAMS
    count = 4 * len(kinds)
    logits = torch.randn(count, vocab, device="cuda").mul_(scale).to(dtype)
    logits[9, 7] = float("nan")
    want = Want(extra_logprobs=["raw", "temperature"], entropy=True)
    rows = [RowSampling(SamplingParams(**kinds[i % len(kinds)]), want, 77 + i, PROMPT, (0,)) for i in range(count)]
    positions = [len(PROMPT) + i // len(kinds) for i in range(count)]
    host = Sampler(vocab, "cpu").sample(logits.float().cpu(), rows, positions)
    out = SampleOut.empty(count, "cuda", entropy=True)
    workspace = SampleWorkspace.empty(count, vocab, "cuda", tile)
    sample_rows(logits, columns_of(rows, positions, vocab, edits), out, workspace)
    assert out.bad_B.bool().tolist() == host.bad.tolist()
    assert out.ids_B.tolist() == host.ids.tolist()
    for actual, expected in (
        (out.processed_B, host.logprobs),
        (out.raw_B, host.extra_logprobs["raw"]),
        (out.temperature_B, host.extra_logprobs["temperature"]),
        (out.entropy_B, host.entropy),
    ):
        torch.testing.assert_close(actual.cpu(), expected, atol=5e-5, rtol=2e-5, equal_nan=True)


def test_a_replayed_graph_draws_the_next_position():
    vocab, rows = 49_152, [RowSampling(SamplingParams(), Want(), 5 + i, PROMPT, ()) for i in range(8)]
    logits = noise(8, vocab, scale=3.0)
    columns, out = columns_of(rows, [50] * 8, vocab, False), SampleOut.empty(8, "cuda")
    workspace = SampleWorkspace.empty(8, vocab, "cuda")
    sample_rows(logits, columns, out, workspace, truncated=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_rows(logits, columns, out, workspace, truncated=False)
    sampler = Sampler(vocab, "cpu")
    for position in itertools.islice(itertools.count(60), 3):
        columns.position_S.fill_(position)
        graph.replay()
        host = sampler.sample(logits.float().cpu(), rows, [position] * 8)
        assert out.ids_B.tolist() == host.ids.tolist()


def test_both_ends_of_a_step() -> None:
    check_steps(torch.device("cuda"))
