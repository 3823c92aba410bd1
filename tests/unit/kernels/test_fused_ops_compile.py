"""Every fused kernel compiles for the GPUs it may meet, as its launcher specialises it."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.decode_step import advance_rows, gather_rows
from engine.kernels.embedding_gather import embedding_gather
from engine.kernels.gemv import InputNorm, gemv
from engine.kernels.rms_norm import add_rms_norm, rms_norm
from engine.kernels.rope_kv_write import QKNorm, QKVShape, rope_kv_write
from engine.kernels.sample_columns import EditColumns, SampleColumns, SampleOut, SampleWorkspace
from engine.kernels.sample_epilogue import sample_rows
from engine.kernels.swiglu import silu_and_mul
from engine.memory.device_table import DeviceTable
from tests.launches import build, recorded

BF16 = torch.bfloat16
CAPABILITIES = [80, 90, 100]


def elementwise() -> None:
    x = torch.zeros(2, 4096, dtype=BF16)
    rms_norm(x, x[0], 1e-6)
    add_rms_norm(x, x.clone(), x[0], 1e-6)
    silu_and_mul(x)
    embedding_gather(torch.zeros(2, dtype=torch.int64), x)


def rope() -> None:
    for shape, normed in ((QKVShape(32, 8, 128), True), (QKVShape(9, 3, 64), False)):
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        table = torch.zeros(8, shape.head_dim, dtype=BF16)
        norm = QKNorm(table[0], table[1], 1e-6) if normed else None
        pool = torch.zeros(16, 2 * shape.num_kv_heads, shape.head_dim, dtype=BF16)
        token = torch.zeros(2, dtype=torch.int64)
        rope_kv_write(torch.zeros(2, width, dtype=BF16), shape, norm, table, table, token, token, pool)


def products() -> None:
    x = torch.zeros(4, 1024, dtype=BF16)
    weight = torch.zeros(2048, 1024, dtype=BF16)
    norm = InputNorm(x[0], 1e-6)
    gemv(x[:1], weight)
    gemv(x, weight, residual_MN=torch.zeros(4, 2048, dtype=BF16))
    gemv(x[:1], weight, norm=norm, gated=True)


def step_ends() -> None:
    table = DeviceTable(4, 16, torch.device("cpu"))
    slots = torch.zeros(2, dtype=torch.int64)
    pages = torch.zeros(2, 8, dtype=torch.int32)
    gather_rows(table, slots, pages, 16, slots, slots, torch.zeros(2, dtype=torch.int32), slots)
    advance_rows(table, slots, SampleOut.empty(2, "cpu"))


def sampling(dtype: torch.dtype, edits: bool) -> None:
    def column(kind: torch.dtype) -> torch.Tensor:
        return torch.ones(2, dtype=kind)

    vocab = 151_936
    given, wide, single = None, torch.float64, torch.float32
    if edits:
        lists = torch.zeros(2, 4, dtype=torch.int32)
        counts = torch.zeros(2, vocab, dtype=torch.int16)
        penalties = (column(single) for _ in range(3))
        given = EditColumns(*penalties, counts, lists, lists.float(), lists, column(torch.int64))
    columns = SampleColumns(
        column(wide), column(torch.int32), column(wide), column(wide), column(torch.int64), column(torch.int64),
        column(torch.uint8), column(torch.int64) if edits else None, given,
    )  # fmt: skip
    workspace = SampleWorkspace.empty(2, vocab, "cpu", edits)
    sample_rows(torch.zeros(2, vocab, dtype=dtype), columns, SampleOut.empty(2, "cpu", edits), workspace, count=edits)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("launcher", [elementwise, rope, products, step_ends])
def test_fused_kernels_compile(launcher, capability):
    with recorded() as launches:
        launcher()
    assert launches
    for launch in launches:
        compiled = build(launch, capability)
        assert len(compiled.asm["cubin"]) > 1_000


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(capability, marks=pytest.mark.slow) for capability in (80, 100))]
)
@pytest.mark.parametrize("edits", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_sampling_kernels_compile(edits, capability):
    with recorded() as launches:
        sampling(BF16, edits)
    assert [kernel.__name__.split("_")[1] for kernel, _ in launches] == ["scan", "threshold", "pick"]
    for launch in launches:
        build(launch, capability)
