"""The fast torch backend against the definition: lanes, shared prefixes, gathers, isolation.

Random schedules run step by step through both backends on separate pools with the same random
queries, keys and values.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
import torch

from engine.attention.registry import make_attention, resolve_attention
from engine.attention.torch_fast import TorchAttention
from engine.attention.torch_ref import TorchReference
from engine.batch import ForwardBatch, SharedPrefix
from engine.errors import InvalidRequest, Unsupported
from engine.memory.kv_pool import KVPool
from engine.models.spec import LayerSpec, ModelSpec

LAYERS, HEADS, KV_HEADS, SIZE = 2, 6, 2, 16


def make_spec(**layer) -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=32,
        context_len=512,
        hidden=96,
        intermediate=32,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=SIZE,
        layers=(LayerSpec(**layer),) * LAYERS,
        tied=True,
        eos_ids=(),
        dtype=torch.float32,
    )


SPEC = make_spec()


@dataclass
class FakeRow:
    key: int
    pages: list[int] = field(default_factory=list)
    length: int = 0


class Duel:
    """Runs every batch through both backends and compares."""

    def __init__(self, page_size: int, seed: int, dtype=torch.float32, num_pages: int | None = None, **options) -> None:
        self.page_size = page_size
        num_pages = num_pages or 6000 // page_size
        self.random = random.Random(seed)
        self.noise = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.pools = [KVPool(SPEC, num_pages, page_size, dtype, "cpu") for _ in range(2)]
        for pool in self.pools:
            pool.fill(float("nan"))
        self.backends = [TorchReference(SPEC), TorchAttention(SPEC, **options)]
        self.free = list(range(1, num_pages))
        self.random.shuffle(self.free)
        self.next_key = 0

    def new_row(self, parent: FakeRow | None = None) -> FakeRow:
        """A row, empty or sharing the full pages of `parent`."""
        self.next_key += 1
        if parent is None:
            return FakeRow(self.next_key)
        full = parent.length // self.page_size
        return FakeRow(self.next_key, parent.pages[:full], full * self.page_size)

    def step(self, decode: list[FakeRow], prefill: list[tuple[FakeRow, int]], shared=(), nan_equal=False):
        work = [(row, 1) for row in decode] + prefill
        slots, positions = [], []
        for row, count in work:
            start, row.length = row.length, row.length + count
            while len(row.pages) * self.page_size < row.length:
                row.pages.append(self.free.pop())
            positions += range(start, row.length)
            slots += [
                row.pages[p // self.page_size] * self.page_size + p % self.page_size for p in range(start, row.length)
            ]
        tables = torch.zeros(len(work), max(len(row.pages) for row, _ in work), dtype=torch.int32)
        for index, (row, _) in enumerate(work):
            tables[index, : len(row.pages)] = torch.tensor(row.pages)
        batch = ForwardBatch(
            input_ids_T=torch.zeros(len(slots), dtype=torch.long),
            positions_T=torch.tensor(positions),
            write_slots_T=torch.tensor(slots),
            query_lens=[count for _, count in work],
            seq_lens=[row.length for row, _ in work],
            page_tables_BP=tables,
            row_keys=[row.key for row, _ in work],
            num_decode=len(decode),
            logit_rows_R=torch.zeros(0, dtype=torch.long),
            shared_prefixes=list(shared),
        )
        for backend, pool in zip(self.backends, self.pools, strict=True):
            backend.plan(batch, pool)
        for layer in range(LAYERS):
            qkv = torch.randn(len(slots), HEADS + 2 * KV_HEADS, SIZE, generator=self.noise).to(self.dtype)
            parts = (qkv[:, :HEADS], qkv[:, HEADS:-KV_HEADS], qkv[:, -KV_HEADS:])
            expected, actual = (backend.run(*parts, layer) for backend in self.backends)
            tolerance = 2e-5 if self.dtype == torch.float32 else 3e-2
            torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0, equal_nan=nan_equal)
        return actual

    def groups(self, rows: list[FakeRow]) -> list[SharedPrefix]:
        """Neighbouring rows with equal full leading pages."""
        found, start = [], 0
        while start < len(rows):
            end, depth = start + 1, rows[start].length // self.page_size
            while end < len(rows):
                both = zip(rows[start].pages, rows[end].pages, strict=False)
                equal = next((i for i, (a, b) in enumerate(both) if a != b), min(len(rows[end].pages), depth))
                equal = min(equal, depth, rows[end].length // self.page_size)
                if not equal:
                    break
                depth, end = equal, end + 1
            if end - start > 1:
                found.append(SharedPrefix(start, end, depth))
            start = end
        return found


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [0, 5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3, 4))])
def test_random_schedules(page_size: int, dtype: torch.dtype, seed: int) -> None:
    duel = Duel(page_size, seed, dtype, min_saved_tokens=1, lane_fraction=0.05 if seed % 2 else 0.5)
    running: list[FakeRow] = []
    for _ in range(40):
        prefill = []
        if duel.random.random() < 0.3 and len(running) < 12:
            if running and duel.random.random() < 0.7:
                at = duel.random.randrange(len(running))
                for _ in range(duel.random.randrange(1, 4)):
                    row = duel.new_row(running[at])
                    prefill.append((row, duel.random.randrange(1, 9)))
                    running.insert(at + 1, row)
            else:
                row = duel.new_row()
                prefill.append((row, duel.random.randrange(1, 80)))
                running.append(row)
        joining = [row for row, _ in prefill]
        decode = [row for row in running if row not in joining]
        if decode and duel.random.random() < 0.2:
            decode.pop(duel.random.randrange(len(decode)))  # sits this step out
        if decode or prefill:
            duel.step(decode, prefill, duel.groups(decode))
        if running and duel.random.random() < 0.15:
            running.pop(duel.random.randrange(len(running)))
        if running and duel.random.random() < 0.1:
            row = duel.random.choice(running)  # takes tokens back, as a rejected draft does
            shared_pages = max(
                (
                    sum(a == b for a, b in zip(row.pages, other.pages, strict=False))
                    for other in running
                    if other != row
                ),
                default=0,
            )
            row.length -= duel.random.randrange(0, max(1, min(5, row.length - shared_pages * page_size)))


def test_a_group_reads_its_prefix_as_one_tile() -> None:
    duel = Duel(4, 0, min_saved_tokens=64)
    prompt = duel.new_row()
    duel.step([], [(prompt, 64)])
    rows = [duel.new_row(prompt) for _ in range(5)]
    other = duel.new_row()
    duel.step([], [(other, 10)])
    batch_rows = [*rows, other]
    for _ in range(70):
        duel.step(batch_rows, [], [SharedPrefix(0, 5, 16)])
    plan = duel.backends[1]._decode
    assert [tile.rows_LM.tolist() for tile in plan.shared] == [[[0, 1, 2, 3, 4]]]
    assert sorted(context.length for tile in plan.own for context in tile.arena.contexts) == [70] * 5 + [80]
    assert not plan.gathered


def test_lanes_stay_within_their_budget() -> None:
    duel = Duel(4, 0, num_pages=120, lane_fraction=0.3)
    rows = [duel.new_row() for _ in range(6)]
    duel.step([], [(row, 60) for row in rows])
    for _ in range(3):
        duel.step(rows, [])
    backend, pool = duel.backends[1], duel.pools[1]
    assert backend._decode.gathered and backend._decode.own
    assert backend._planner.bytes <= 0.6 * pool.bytes


def test_a_poisoned_row_touches_no_other() -> None:
    """Neither beside it nor in the lane it leaves."""
    duel = Duel(4, 0)
    rows = [duel.new_row() for _ in range(3)]
    duel.step([], [(row, 9) for row in rows])
    for pool in duel.pools:
        for layer in range(LAYERS):
            pool.tokens(layer)[rows[1].pages[0] * 4] = float("nan")
    out = duel.step(rows, [], nan_equal=True)
    assert [bool(row.isnan().any()) for row in out] == [False, True, False]
    healthy = duel.new_row()
    duel.step([], [(healthy, 5)])
    out = duel.step([rows[0], healthy, rows[2]], [])
    assert not out.isnan().any()


@pytest.mark.parametrize("seed", range(3))
def test_deterministic_rows_keep_their_bits_in_any_batch(seed: int) -> None:
    lengths = [70, 3, 200, 41, 16, 129, 17]
    duel = Duel(4, seed, deterministic=True)
    rows = [duel.new_row() for _ in lengths]
    duel.step([], [(row, length) for row, length in zip(rows, lengths, strict=True)])
    backend, pool = duel.backends[1], duel.pools[1]
    qkv = torch.randn(len(rows), HEADS + 2 * KV_HEADS, SIZE)

    def run(chosen: list[int]) -> torch.Tensor:
        tables = torch.zeros(len(chosen), 60, dtype=torch.int32)
        for index, row in enumerate(chosen):
            tables[index, : len(rows[row].pages)] = torch.tensor(rows[row].pages)
        last = torch.tensor([lengths[row] - 1 for row in chosen])
        slots = tables.gather(1, (last // 4)[:, None])[:, 0].long() * 4 + last % 4
        batch = ForwardBatch(
            input_ids_T=last,
            positions_T=last,
            write_slots_T=slots,
            query_lens=[1] * len(chosen),
            seq_lens=[lengths[row] for row in chosen],
            page_tables_BP=tables,
            row_keys=[rows[row].key for row in chosen],
            num_decode=len(chosen),
            logit_rows_R=last,
        )
        backend.plan(batch, pool)
        part = qkv[chosen]
        return backend.run(part[:, :HEADS], part[:, HEADS:-KV_HEADS], part[:, -KV_HEADS:], 0)

    together = run(list(range(len(rows))))
    backwards = run(list(reversed(range(len(rows))))).flip(0)
    assert torch.equal(together, backwards)
    for row in range(len(rows)):
        assert torch.equal(run([row])[0], together[row])


@pytest.mark.parametrize("field", [{"window": 8}, {"sink": True}, {"softcap": 30.0}, {"bias": 4}])
def test_special_layers_are_refused_by_name_and_left_to_the_reference(field) -> None:
    spec = replace(make_spec(), layers=(LayerSpec(), LayerSpec(**field)))
    name = next(iter(field))
    with pytest.raises(Unsupported, match=rf"layers\[1\]\.{name}"):
        make_attention("torch", spec, "cpu")
    assert resolve_attention("auto", spec, "cpu") == "torch_ref"
    assert resolve_attention("auto", SPEC, "cpu") == "torch"
    with pytest.raises(InvalidRequest, match="attention"):
        resolve_attention("fast", SPEC, "cpu")
