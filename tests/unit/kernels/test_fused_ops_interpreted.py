"""The elementwise kernels and small products in Triton's interpreter against their references."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from engine.kernels.embedding_gather import embedding_gather, embedding_gather_reference
from engine.kernels.embedding_norm import embedding_norm, embedding_norm_reference
from engine.kernels.gemv import GemvConfig, InputNorm, gemv, gemv_reference
from engine.kernels.invariant_matmul import (
    Partials,
    invariant_gated_matmul,
    invariant_matmul,
    invariant_matmul_reference,
)
from engine.kernels.invariant_tiles import SEGMENT_MULTIPLE, InvariantTile, segments_of, tile_for
from engine.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from engine.kernels.rope_kv_write import QKNorm, QKVShape, rope_kv_write, rope_kv_write_reference
from engine.kernels.skinny_matmul import SkinnyConfig, skinny_matmul, skinny_matmul_then_norm
from engine.kernels.swiglu import silu_and_mul, silu_and_mul_reference
from engine.layers.norm import RMSNorm, UnitRMSNorm
from engine.layers.rotary import Rotary
from engine.models.spec import RopeSpec


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def poison(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("width", [64, 96, 576])
def test_rms_norm(width):
    x, weight = noise(3, width) * 4, noise(width, seed=1)
    x[1] = 0.0
    layer = RMSNorm(width, 1e-5, torch.float32, torch.device("cpu"))
    layer.weight.copy_(weight)
    out = rms_norm(x, weight, 1e-5, poison(3, width))
    close(out, layer(x))
    close(out, rms_norm_reference(x, weight, 1e-5))
    unit = UnitRMSNorm(width, 1e-5, torch.float32, torch.device("cpu"))
    unit.weight.copy_(weight)
    close(rms_norm(x, weight, 1e-5, unit=True), unit(x))


def test_add_rms_norm_replaces_the_residual():
    x, residual, weight = noise(3, 96), noise(3, 96, seed=1), noise(96, seed=2)
    normed, total = add_rms_norm_reference(x, residual, weight, 1e-6)
    kept = residual.clone()
    out, stream = add_rms_norm(x, kept, weight, 1e-6, poison(3, 96))
    assert stream is kept and torch.equal(kept, total)
    close(out, normed)
    elsewhere = poison(3, 96)
    assert add_rms_norm(x, residual, weight, 1e-6, total=elsewhere)[1] is elsewhere
    assert torch.equal(elsewhere, total) and not torch.equal(residual, total)


@pytest.mark.parametrize("width", [32, 1100])
def test_silu_and_mul(width):
    gate_up = noise(2, 2 * width) * 6
    close(silu_and_mul(gate_up, poison(2, width)), silu_and_mul_reference(gate_up))


def test_embedding_gather():
    weight, ids = noise(11, 96), torch.tensor([3, -1, 10, 0])
    out = embedding_gather(ids, weight, poison(4, 96), max_block=64)
    assert torch.equal(out, embedding_gather_reference(ids, weight))
    assert torch.equal(out[1], torch.zeros(96))
    norm = noise(96, seed=1)
    rows, normed = embedding_norm(ids, weight, norm, 1e-6)
    assert torch.equal(rows, out)
    close(normed, embedding_norm_reference(ids, weight, norm, 1e-6)[1])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(9, 3, 12), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((4, 2, 16), (5, 1, 64)))],
)
def test_rope_kv_write(heads, kv_heads, size, normed):
    shape = QKVShape(heads, kv_heads, size)
    qkv = noise(4, (heads + 2 * kv_heads) * size)
    rotary = Rotary(RopeSpec(theta=100.0), size, 32, torch.float32, torch.device("cpu"))
    norm = QKNorm(noise(size, seed=1), noise(size, seed=2), 1e-6) if normed else None
    positions, slots = torch.tensor([0, 31, 7, 7]), torch.tensor([5, 1, -1, 8])
    pool, expected_pool = poison(10, 2 * kv_heads, size), poison(10, 2 * kv_heads, size)
    tables = (rotary.cos_CE, rotary.sin_CE, positions, slots)
    expected = rope_kv_write_reference(qkv.clone(), shape, norm, *tables, expected_pool)
    out = rope_kv_write(qkv.clone(), shape, norm, *tables, pool, poison(4, heads, size), heads_per_program=4)
    assert out[2].isnan().all()
    close(out[slots >= 0], expected[slots >= 0])
    torch.testing.assert_close(pool, expected_pool, atol=2e-6, rtol=2e-5, equal_nan=True)
    in_place = rope_kv_write(qkv, shape, norm, *tables, pool)
    assert in_place.data_ptr() == qkv.data_ptr()
    close(in_place, expected)


OPTIONS = [{}, {"bias"}, {"residual"}, {"norm"}, {"norm", "gated"}, {"bias", "residual", "norm"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gemv(options):
    x, weight = noise(1, 80), noise(22, 80, seed=1)
    given = dict(
        bias_N=noise(22, seed=2) if "bias" in options else None,
        norm=InputNorm(noise(80, seed=3), 1e-6) if "norm" in options else None,
        residual_1N=noise(1, 22, seed=4) if "residual" in options else None,
        gated="gated" in options,
    )
    expected = gemv_reference(x, weight, **given)
    out = gemv(x, weight, **given, out=poison(*expected.shape), config=GemvConfig(4, 32))
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("config", [SkinnyConfig(16, 16, 2, 2), SkinnyConfig(64, 32, 4, 3)], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 20, 70])
def test_products_of_few_rows_and_the_norm_between(rows, config):
    """Two products with a norm between them, as a layer has them, then the gated and the plain kind."""
    x, first, second = noise(rows, 64), noise(80, 64, seed=1), noise(36, 80, seed=2)
    residual, norm, bias = noise(rows, 80, seed=3), InputNorm(noise(80, seed=4), 1e-6), noise(80, seed=5)
    expected = gemv_reference(x, first, bias, residual_1N=residual)
    second_config = replace(config, inputs=16)
    before, apart = residual.clone(), poison(rows, 80)
    skinny_matmul_then_norm(x, first, bias, residual, norm, config, out=apart)
    assert torch.equal(residual, before)
    unscaled = skinny_matmul_then_norm(x, first, bias, residual, norm, config)
    assert torch.equal(residual, apart)
    torch.testing.assert_close(residual, expected, atol=1e-4, rtol=1e-5)
    gated = skinny_matmul(unscaled, second, gated=True, out=poison(rows, 18), config=second_config)
    torch.testing.assert_close(gated, gemv_reference(expected, second, norm=norm, gated=True), atol=1e-4, rtol=1e-4)
    plain = skinny_matmul(unscaled, second, bias[:36], out=poison(rows, 36), config=second_config)
    torch.testing.assert_close(plain, gemv_reference(expected, second, bias[:36], norm), atol=1e-4, rtol=1e-4)


INVARIANT_TILES = [
    InvariantTile(16, 16, 16, 2, 2),
    InvariantTile(16, 64, 32, 4, 2, swapped=True),
    InvariantTile(16, 32, 16, 4, 2, split=True),
    InvariantTile(16, 64, 16, 4, 2, swapped=True, split=True, boxed=True),
    InvariantTile(16, 32, 16, 4, 2, boxed=True, stream=True),
]


@pytest.mark.parametrize("tile", INVARIANT_TILES, ids=str)
@pytest.mark.parametrize(("rows", "segments"), [(1, 1), (33, 3)])
def test_invariant_products(rows, segments, tile):
    x, weight, bias = noise(rows, 96), noise(72, 96, seed=1), noise(72, seed=2)
    partials = Partials.empty("cpu")
    for _ in range(1 + tile.split):  # the second time over what the first left
        out = invariant_matmul(x, weight, bias, poison(rows, 72), partials, segments, tile)
        torch.testing.assert_close(out, invariant_matmul_reference(x, weight, bias), atol=1e-4, rtol=1e-5)
        assert not partials.arrived.any()


def test_who_sums_a_segment_changes_no_bits():
    """The same segments, each by a program of its own, in one program, and without room to split."""
    x, weight = noise(33, 96), noise(40, 96, seed=1)
    tile = InvariantTile(16, 16, 16, 4, 2, split=True)
    split = invariant_matmul(x, weight, None, poison(33, 40), Partials.empty("cpu"), 3, tile)
    for boxed, stream in ((False, False), (True, False), (True, True)):
        other = replace(tile, split=False, boxed=boxed, stream=stream)
        assert torch.equal(invariant_matmul(x, weight, None, poison(33, 40), None, 3, other), split)
    assert torch.equal(invariant_matmul(x, weight, None, poison(33, 40), None, 3, tile), split)
    assert not torch.equal(invariant_matmul(x, weight, None, poison(33, 40), None, 1, tile), split)


@pytest.mark.parametrize("tile", [INVARIANT_TILES[1], replace(INVARIANT_TILES[1], boxed=True), None], ids=str)
@pytest.mark.parametrize("rows", [21, 65])
def test_invariant_gated_products(rows, tile):
    """In one launch, and in two where rows are many."""
    x, weight = noise(rows, 80), noise(140, 80, seed=1)
    out = invariant_gated_matmul(x, weight, tile=tile)
    torch.testing.assert_close(out, gemv_reference(x, weight, gated=True), atol=1e-4, rtol=1e-5)


def test_segments_follow_from_the_weight():
    assert [segments_of(*shape) for shape in ((4096, 4096), (4096, 12288), (6144, 4096))] == [4, 4, 4]
    assert [segments_of(*shape) for shape in ((24576, 4096), (151936, 4096), (576, 576), (1024, 1024))] == [1, 1, 1, 2]
    for rows, inputs in itertools.product((1, 64, 65, 200, 9000), (4096, 12288)):
        for segments in (1, 4):
            for itemsize, boxed in ((2, True), (2, False), (4, False)):
                tile = tile_for(rows, 4096, inputs, segments, itemsize, boxed, 132)
                assert SEGMENT_MULTIPLE % tile.inputs == 0, "segments are whole tiles"
                assert boxed or not (tile.boxed or tile.stream)
