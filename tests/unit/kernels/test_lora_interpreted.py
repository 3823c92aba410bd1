"""The adapters' kernels in Triton's interpreter against their references and the loop in torch."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import Engine
from engine.kernels.adapted_gate import adapted_gate, adapted_gate_reference
from engine.kernels.adapted_rope import Rotation, adapted_rope, adapted_rope_reference
from engine.kernels.adapted_sum import Adapted, adapted_sum, adapted_sum_reference
from engine.kernels.rope_kv_write import QKNorm, QKVShape
from engine.kernels.swiglu import silu_and_mul_reference
from engine.runner.step_plan import StepPlan
from lora.config import AdapterConfig
from lora.device_pool import DevicePool
from lora.geometry import Kind
from lora.kernel_step import KernelStep, Variant
from lora.kernels.expand import lora_expand, lora_expand_reference
from lora.kernels.shrink import lora_shrink, lora_shrink_reference, workspace_shape
from lora.kernels.stack import Rooms, stack_factors_reference
from lora.segments import Segments, Tiles
from lora.stack import Stack, StackRoom
from lora.step import LoopStep
from tests.support import make_engine, prompt, reference_greedy
from tests.unit.engine.lora_cases import ask_with, greedy_of, logprobs_of, save_adapter
from tests.unit.lora.toy_geometry import VOCAB, all_linear, geometry, make_pool, weights

GEOMETRY = geometry()
SLOTS = np.array([2, 0, 1, 3, 2, 1, 0, 2, 3, 1, 1])


def pool():
    """Ranks 3, 8, 20 and a bias, of different modules."""
    mixed = all_linear(GEOMETRY, 3) | {"model.layers.0.self_attn.k_proj": 20, "model.embed_tokens": 5, "lm_head": 2}
    some = {"model.layers.0.self_attn.v_proj": 16, "model.layers.0.mlp.up_proj": 16, "model.layers.0.mlp.down_proj": 9}
    return make_pool(
        GEOMETRY,
        weights(mixed, GEOMETRY, 1),
        weights(some, GEOMETRY, 2),
        weights(all_linear(GEOMETRY, 8), GEOMETRY, 3, bias=True),
    )


def inputs_of(where, site: int, rows: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(site)
    if where.sites[site].kind is Kind.EMBEDDING:
        return torch.randint(0, VOCAB, (rows,), generator=source)
    return torch.randn(rows, where.inputs(site), generator=source)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-5)


@pytest.mark.parametrize("site", [0, 1, 2, 3, 4, 5])
def test_a_step_of_kernels_equals_the_loop(site):
    adapters, slots = pool(), SLOTS
    x, width = inputs_of(GEOMETRY, site, len(slots)), sum(GEOMETRY.widths(site))
    start = torch.randn(len(slots), width)
    results = []
    for step in (LoopStep(adapters, slots), KernelStep(adapters, slots)):
        y = start.clone()
        add = step.add_embedding_ if GEOMETRY.sites[site].kind is Kind.EMBEDDING else step.add_
        add(site, x, y)
        results.append(y)
    close(results[1], results[0])
    assert torch.equal(results[1][slots == 0], start[slots == 0])
    assert not torch.equal(results[1], start)


@pytest.mark.parametrize("inputs", [64, 2100])
def test_each_kernel_equals_its_reference(inputs):
    """2,100 inputs are cut in two, unevenly for the tiles."""
    from lora.geometry import Geometry, Part, Site

    where = Geometry((Site(inputs, (Part("a", 40), Part("b", 24))),))
    adapters = make_pool(where, weights({"a": 16, "b": 7}, where, 1), weights({"b": 30}, where, 2))
    slots = np.array([1] * 18 + [0] + [2] * 3)
    segments = Segments.of(slots)
    tiles = Tiles(len(slots), 4, 16, torch.device("cpu"))
    tiles.fill(segments)
    x, y = inputs_of(where, 0, len(slots)) / inputs**0.5, torch.randn(len(slots), 64)
    h = torch.full(workspace_shape(inputs, 2, len(segments.rows_A), 32), float("nan"))
    expected, kept = torch.empty_like(h), y.clone()
    lora_shrink(adapters, 0, x, tiles, h)
    lora_shrink_reference(adapters, 0, x, tiles, expected)
    close(h, expected)
    lora_expand(adapters, 0, h, tiles, y)
    lora_expand_reference(adapters, 0, expected, tiles, kept)
    close(y, kept)


def test_parts_of_the_head_and_large_tiles(monkeypatch):
    """A part of the vocabulary gets its part of the sum; tiles of many rows add the same."""
    adapters, slots = pool(), SLOTS
    x, expected = inputs_of(GEOMETRY, 5, len(slots)), torch.zeros(len(slots), VOCAB)
    LoopStep(adapters, slots).add_(5, x, expected)
    monkeypatch.setattr("lora.kernel_step.MANY_ROWS", 4)
    step = KernelStep(adapters, slots)
    for start, end in ((0, 1), (1, 40), (40, 136)):
        part = slice(start, end)
        y = torch.zeros(len(slots), len(range(VOCAB)[part]))
        step.add_(5, x, y, part)
        close(y, expected[:, part])
    assert step.tiles.block == 64


def test_uniform_ranks_take_the_path_without_masks():
    adapters = make_pool(GEOMETRY, *(weights(all_linear(GEOMETRY, 16), GEOMETRY, seed) for seed in range(2)))
    slots, x = np.array([1, 2, 0, 1]), inputs_of(GEOMETRY, 1, 4)
    loop, kernels = torch.zeros(4, 80), torch.zeros(4, 80)
    LoopStep(adapters, slots).add_(1, x, loop)
    step = KernelStep(adapters, slots)
    assert not step.variant.mixed
    step.add_(1, x, kernels)
    close(kernels, loop)


def test_a_row_keeps_its_bits_whatever_shares_its_batch():
    """Of equal ranks: products of other shapes are other sums in the interpreter, unlike on a device."""
    adapters = make_pool(GEOMETRY, *(weights(all_linear(GEOMETRY, rank), GEOMETRY, rank) for rank in (16, 9, 12)))
    for site in (1, 4):
        x = inputs_of(GEOMETRY, site, len(SLOTS))
        together = torch.zeros(len(SLOTS), sum(GEOMETRY.widths(site)))
        KernelStep(adapters, SLOTS, True).add_(site, x, together)
        for row, slot in enumerate(SLOTS):
            alone = torch.zeros(1, together.shape[1])
            KernelStep(adapters, SLOTS[row : row + 1], True).add_(site, x[row : row + 1], alone)
            assert torch.equal(alone[0], together[row]), f"row {row} of slot {slot}"


def test_not_a_number_in_one_slot_reaches_no_other_row():
    adapters = pool()
    clean, dirty = torch.zeros(len(SLOTS), 80), torch.zeros(len(SLOTS), 80)
    x = inputs_of(GEOMETRY, 1, len(SLOTS))
    KernelStep(adapters, SLOTS).add_(1, x, clean)
    for factors in adapters.factors(3, 1):
        for factor in factors:
            factor.fill_(float("nan"))
    KernelStep(adapters, SLOTS).add_(1, x, dirty)
    assert torch.equal(dirty[SLOTS != 3], clean[SLOTS != 3])
    assert bool(dirty[SLOTS == 3].isnan().all())


def shrunk(step: KernelStep, site: int) -> Adapted:
    """What the first kernel leaves, poisoned where rows are the base's, whom nobody may read for."""
    h = step.shrunk(site, inputs_of(GEOMETRY, site, len(SLOTS)))
    h[:, :, : int((SLOTS == 0).sum())] = float("nan")
    return Adapted(site, h.clone())


def products_close(step: KernelStep, actual: Adapted | None, expected: Adapted | None) -> None:
    """Of the ranks that slots have; others are left as they were."""
    assert actual is not None and expected is not None and actual.site == expected.site
    actual_GAR, expected_GAR = actual.h_PGAR.sum(0), expected.h_PGAR.sum(0)
    for slot, start, count in step.tiles.tiles_N3.tolist():
        rank = step.pool.layout(slot, actual.site).rank
        entries = slice(start, start + count)
        close(actual_GAR[:, entries, :rank], expected_GAR[:, entries, :rank])


def stacked_step(adapters: DevicePool, slots: np.ndarray) -> tuple[KernelStep, dict[int, torch.Tensor]]:
    """With room for four adapters of rank 32 behind random weights, and those."""
    source = torch.Generator().manual_seed(0)
    wide = {}
    for site in range(1, 5):
        widths = GEOMETRY.widths(site)
        wide[site] = torch.randn(sum(widths) + 128 * len(widths), GEOMETRY.inputs(site), generator=source)
    stack = Stack(adapters, StackRoom(wide, 128, lambda: 0))
    variant = Variant.of(adapters, slots, stack=stack)
    assert variant.stacked == 4 and variant.rank == 32 and variant.mixed and variant.biased
    return KernelStep(adapters, slots, variant=variant, stack=stack), wide


def test_first_products_that_stand_behind_the_models():
    """What lies between products takes them from there, for rows of three adapters and of none."""
    step, wide = stacked_step(pool(), SLOTS)
    assert step.stack is not None
    expected = {site: weight.clone() for site, weight in wide.items()}
    moves = torch.tensor([[int(step.stack.places_S[slot]), slot] for slot in (1, 2, 3)])
    stack_factors_reference(step.pool, Rooms(step.pool, expected), moves, 32)
    products = {}
    for site, weight in wide.items():
        parts = len(GEOMETRY.widths(site))
        used = step.weight(site, weight[: sum(GEOMETRY.widths(site))])
        assert used.shape[0] == sum(GEOMETRY.widths(site)) + 4 * parts * 32 and torch.equal(
            used, expected[site][: len(used)]
        )
        weight[len(used) :] = float("nan")
        used[len(used) - parts * 32 :] = float("nan")  # the fourth place is nobody's
        products[site] = inputs_of(GEOMETRY, site, len(SLOTS)) @ used.T
    loop = LoopStep(step.pool, SLOTS)
    plain = {}
    for site, y in products.items():
        own = y[:, : sum(GEOMETRY.widths(site))].clone()
        loop.add_(site, inputs_of(GEOMETRY, site, len(SLOTS)), own)
        plain[site] = own
    residual, weight = torch.randn(len(SLOTS), 64), torch.randn(64)
    kept = residual.clone()
    stream = adapted_sum(step, products[2], Adapted(2), kept, weight, None, block=64)
    assert stream.adapted is None
    close(kept, residual + plain[2])
    ones, unit = torch.full((len(SLOTS), 1), 64.0), (64, 1e-9)
    inner, following = adapted_gate(step, Adapted(3), products[3], ones, *unit, block=64)
    assert following is None
    close(inner, silu_and_mul_reference(plain[3]))
    squares, tables = torch.rand(len(SLOTS), 3) * 64, torch.randn(2, 20, 16)
    results, slots = [], torch.arange(len(SLOTS))
    for run in (adapted_rope, adapted_rope_reference):
        rotation = Rotation(tables[0], tables[1], slots, slots, torch.zeros(len(SLOTS), 2, 16))
        shape = QKVShape(3, 1, 16)
        q = run(step, Adapted(1), products[1].clone(), None, squares, 64, 1e-6, shape, None, rotation)
        results.append((q, rotation.kv_S2KH))
    close(results[0][0], results[1][0])
    close(results[0][1], results[1][1])


@pytest.mark.parametrize(("site", "following"), [(2, 3), (4, 1), (4, None)])
def test_the_residual_stream_between_adapted_products(site, following):
    """In one piece of the columns, in several, and in several by one program."""
    step = KernelStep(pool(), SLOTS)
    y, residual, weight = torch.randn(len(SLOTS), 64), torch.randn(len(SLOTS), 64), torch.randn(64)
    before, expected_residual = shrunk(step, site), residual.clone()
    expected = adapted_sum_reference(step, y, before, expected_residual, weight, following)
    for block, steps in ((64, 1), (32, 1), (16, 3)):
        kept = residual.clone()
        stream = adapted_sum(step, y, before, kept, weight, following, block=block, steps=steps)
        close(kept, expected_residual)
        close(stream.x_TD, expected.x_TD)
        close(stream.squares_TP.sum(1), expected.squares_TP.sum(1))
        if following is not None:
            products_close(step, stream.adapted, expected.adapted)


def test_the_gate_of_adapted_rows_and_others():
    """Alone, and with the factor of a norm and the next first product."""
    step = KernelStep(pool(), SLOTS)
    gate_up, squares, adapted = torch.randn(len(SLOTS), 160), torch.rand(len(SLOTS), 3) * 64, shrunk(step, 3)
    for steps, rest in ((1, ()), (2, (squares, 64, 1e-6, 4)), (1, (squares, 64, 1e-6, 4))):
        expected = adapted_gate_reference(step, adapted, gate_up, *rest)
        inner, following = adapted_gate(step, adapted, gate_up, *rest, block=32, steps=steps)
        close(inner, expected[0])
        if rest:
            assert following is not None and following.h_PGAR is not None and len(following.h_PGAR) == 4 - steps
            products_close(step, following, expected[1])


@pytest.mark.parametrize("plain", [True, False])
def test_queries_and_keys_of_adapted_rows_and_others(plain):
    """With and without norms of heads and biases, in programs of one head and of two; one token is padding."""
    step, (heads, size) = KernelStep(pool(), SLOTS), (1, 16) if plain else (2, 8)
    shape = QKVShape(3 * heads, heads, size)
    qkv, squares, adapted = torch.randn(len(SLOTS), 80), torch.rand(len(SLOTS), 3) * 64, shrunk(step, 1)
    norm = None if plain else QKNorm(torch.rand(size), torch.rand(size), 1e-6)
    bias = None if plain else torch.randn(80)
    slots = torch.arange(len(SLOTS))
    slots[4] = -1
    results = []
    for run in (partial(adapted_rope, steps=heads), adapted_rope_reference):
        kv, tables = torch.zeros(len(SLOTS), 2 * heads, size), torch.rand(2, 20, size)
        rotation = Rotation(tables[0], tables[1], slots + 3, slots, kv)
        torch.manual_seed(0)
        rotation.cos_CH.normal_()
        rotation.sin_CH.normal_()
        q = run(step, adapted, qkv.clone(), bias, squares, 64, 1e-6, shape, norm, rotation)
        results.append((q[slots >= 0], rotation.kv_S2KH))
    close(results[0][0], results[1][0])
    close(results[0][1], results[1][1])


def device_engine(folder: Path, **fields) -> Engine:
    fields = {"max_running": 4} | fields
    return make_engine(folder, page_size=4, burst=2, attention="triton", loop="overlapped", **fields)


def test_steps_of_many_policies_are_replayed(t_full, tmp_path):
    """The base, an adapter of all ends and one of projections alone, the last as a group; then the base alone. A
    decoded plan is all that a stepper needs."""
    options = {"all ends": {"target_modules": ["q_proj", "down_proj", "embed_tokens", "lm_head"]}, "linear": {"r": 9}}
    engine, folders = device_engine(t_full), {}
    for seed, (name, chosen) in enumerate(options.items()):
        folders[name] = save_adapter(t_full, tmp_path / name, seed, **chosen)
        engine.adapters.register_folder(name, folders[name])
    stepper = engine._loop._stepper
    launch = stepper.launch
    stepper.launch = lambda plan: launch(StepPlan.decode(plan.encode()))
    serial = []
    engine._loop._serial.step = lambda: serial.append(True)
    asked = [ask_with(None, "base", prompt(5), max_new=3), ask_with("all ends", "ends", prompt(7), max_new=3)]
    asked.append(ask_with("linear", "group", prompt(9), n=2, max_new=2))
    base, ends, group = engine.generate(asked)
    assert base.samples[0].ids.tolist() == reference_greedy(t_full, prompt(5), 3)
    assert ends.samples[0].ids.tolist() == greedy_of(t_full, folders["all ends"], prompt(7), 3)
    whole = logprobs_of(t_full, folders["all ends"], [*prompt(7), *ends.samples[0].ids])
    picked = [float(whole[6 + place, token]) for place, token in enumerate(ends.samples[0].ids)]
    np.testing.assert_allclose(ends.samples[0].logprobs, picked, atol=1e-4)
    for sample in group.samples:
        assert sample.ids.tolist() == greedy_of(t_full, folders["linear"], prompt(9), 2)
        assert {span.adapter_rev for span in sample.spans} == {1}
    variants = {variant for _, _, _, variant in stepper._captured}
    assert not serial and variants and None not in variants and all(variant.stacked for variant in variants)
    engine.generate([ask_with(None, "alone", prompt(5), max_new=2)])
    assert None in {variant for _, _, _, variant in stepper._captured}
    engine.check()


@pytest.mark.slow
def test_policies_take_turns_behind_the_weights(t_full, tmp_path):
    """In two slots, with room for two behind the weights, whose memory goes and comes back between."""
    config = AdapterConfig(max_resident=2, stacked_ranks=32, device_mib=8)
    engines = device_engine(t_full, adapters=config), make_engine(t_full)
    for seed, name in enumerate("abc"):
        folder = save_adapter(t_full, tmp_path / name, seed, r=8 * (1 + seed % 2))
        for engine in engines:
            engine.adapters.register_folder(name, folder)
    for names in ("ab", "bc", "c"):
        asked = [ask_with(name, name, prompt(6), max_new=3) for name in names]
        for one, other in zip(*(engine.generate(asked) for engine in engines), strict=True):
            assert one.samples[0].ids.tolist() == other.samples[0].ids.tolist()
            np.testing.assert_allclose(one.samples[0].logprobs, other.samples[0].logprobs, atol=1e-5)
        engines[0].release_memory(["weights"])
        engines[0].resume_memory(["weights"])
        engines[0].check()
    # One adapter of rank 16 takes two places too: rows of products stay aligned.
    assert {variant.stacked for _, _, _, variant in engines[0]._loop._stepper._captured} == {2}
    counted = engines[0].counters
    assert counted.adapter_steps == counted.stacked_steps > 5 and counted.stack_copies == 5
    assert engines[0].gauges().adapters_resident == 2


@pytest.mark.slow
def test_deterministic_rows_are_those_of_any_step(t_full, tmp_path):
    """Rows of two policies and of the base, together and each alone; the base's equal an engine's without any. That
    all bits are equal holds on a device: the interpreter sums products of other shapes otherwise."""
    engine = device_engine(t_full, deterministic=True)
    for seed, name in enumerate(("LA", "LB")):
        engine.adapters.register_folder(name, save_adapter(t_full, tmp_path / name, seed))
    names = (None, "LA", "LB")
    asked = [ask_with(name, f"{name}", prompt(6, seed), max_new=4) for seed, name in enumerate(names)]
    together = engine.generate(asked)
    for request, reply in zip(asked, together, strict=True):
        engine.flush()
        (alone,) = engine.generate([request])
        assert alone.samples[0].ids.tolist() == reply.samples[0].ids.tolist()
        np.testing.assert_allclose(alone.samples[0].logprobs, reply.samples[0].logprobs, atol=1e-5)
    (plain,) = device_engine(t_full, deterministic=True).generate(asked[:1])
    np.testing.assert_allclose(plain.samples[0].logprobs, together[0].samples[0].logprobs, atol=1e-5)


@pytest.mark.slow
def test_a_poisoned_slot_spoils_no_other_row(t_full, tmp_path):
    """Through whole steps: rows of the base and of the other policy go on, though the poisoned one ends at once."""
    engine = device_engine(t_full)
    for seed, name in enumerate(("LA", "LB")):
        engine.adapters.register_folder(name, save_adapter(t_full, tmp_path / name, seed))
    asked = [ask_with(name, f"{name}", prompt(6), max_new=3) for name in (None, "LA", "LB")]
    clean = engine.generate(asked)
    engine.flush()
    pool = engine.adapters.residency.pool
    slot = next(v.slot for v in engine.adapters.versions if v.name == "LB")
    for site, layout in enumerate(pool._held[slot][1].sites):
        for factor in (factor for pair in pool.factors(slot, site) for factor in pair) if layout.rank else ():
            factor.fill_(float("nan"))
    dirty = engine.generate(asked)
    assert dirty[2].samples[0].finish == "error"
    for one, other in zip(clean[:2], dirty[:2], strict=True):
        assert one.samples[0].ids.tolist() == other.samples[0].ids.tolist()
        np.testing.assert_allclose(other.samples[0].logprobs, one.samples[0].logprobs, atol=1e-5)
    engine.check()
