"""What an engine's settings and a model's shape make of the memory there is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.errors import InvalidRequest
from engine.layers.gated_delta_reference import GatedDeltaShape
from engine.memory import budget as budgets
from engine.memory.budget import ADAPTER_SHARE, adapter_mib, free_bytes, plan_memory, planned
from engine.memory.needs import DraftShape
from engine.models.mamba2 import Mamba2Spec
from engine.models.mixers import GatedDeltaSpec
from engine.models.spec import LayerSpec
from lora.config import AdapterConfig
from lora.packing import pack, room_for
from rollout.cli import app
from rollout.metrics import merge_exposition, plan_exposition, read_plans
from tests.unit.lora.toy_geometry import all_linear, geometry, weights
from tests.unit.memory.test_kv_pool import SPEC

GPU = torch.device("cuda")
MAMBA = Mamba2Spec(heads=4, head_dim=8, groups=2, state_size=4, width=4)


def config(rows: int = 4, tokens: int = 64, **cache) -> EngineConfig:
    return EngineConfig(
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(max_running=rows, prefill_tokens=tokens),
        adapters=AdapterConfig(device_mib=3),
    )


def plan(settings: EngineConfig, spec=SPEC, device=GPU, **more):
    return plan_memory(spec, settings, torch.bfloat16, device, **more)


@pytest.fixture(autouse=True)
def memory(monkeypatch) -> None:
    monkeypatch.setattr(budgets, "free_bytes", lambda device: 2 << 30)


def test_every_part_has_its_reserve_and_is_counted() -> None:
    settings = config()
    shape = DraftShape(drafts=3, block=4, shape=SPEC, rejection=True, captured=2)
    made = plan(settings, draft_kv=SPEC, draft=shape, ring_bytes=1000)
    names = [share.name for share in made.shares]
    assert names == [
        "kv", "draft_kv", "prefill_step", "decode_step", "prefix_states", "rounds", "draft_context", "rings",
        "adapters", "graphs",
    ]  # fmt: skip
    assert made.units("kv") == made.units("draft_kv") and made.units("rings") == 4 and made.units("adapters") == 3
    reserved = sum(share.bytes for share in made.shares[2:])
    token = 2 * 2 * 2 * 2 * 4 * 2
    assert made.units("kv") == int((made.available_bytes - reserved) * 0.5) // token // 16 * 16
    assert made.planned_bytes == reserved + made.units("kv") * token
    told = made.to_dict()
    assert told["planned_bytes"] == made.planned_bytes and len(told["shares"]) == len(names)  # type: ignore[arg-type]
    assert all(any(f"{name}:" in line for line in made.lines()) for name in names)
    more = plan(config(rows=8), draft_kv=SPEC, draft=shape, ring_bytes=1000)
    more_tokens = plan(config(tokens=128))
    assert more.units("kv") < made.units("kv") and more_tokens.units("kv") < plan(settings).units("kv")
    fixed, free = (replace(settings, deterministic=flag) for flag in (True, False))
    assert plan(fixed).units("kv") != plan(free).units("kv"), "fixed pieces of shared prefixes need other room"


def test_prompts_of_recurrent_layers_have_room_for_their_chunks() -> None:
    """As much as the launcher takes where no workspace is passed."""
    from engine.kernels.gdn_prefill import PrefillSpace

    mixer, tokens = GatedDeltaSpec(2, 4, 6, 5, 4), 64
    spec, other = (replace(SPEC, layers=(LayerSpec(), LayerSpec(attends=False, mixer=m))) for m in (mixer, None))
    space = PrefillSpace.empty(tokens, GatedDeltaShape(2, 4, 6, 5), torch.empty(0, dtype=torch.bfloat16), mixer.grid)
    taken = sum(getattr(space, name).nbytes for name in space.__slots__)
    assert taken == tokens * mixer.workspace(SPEC.hidden, torch.bfloat16)
    shares = [{share.name: share for share in plan(config(tokens=tokens), each).shares} for each in (spec, other)]
    with_space, without = (each["prefill_step"].bytes for each in shares)
    assert with_space >= taken + tokens * 2 * (mixer.convolved + 2 * mixer.outputs + sum(mixer.inputs(16).values()))
    assert with_space > without and "recurrences" in shares[0]["prefill_step"].why
    scaled = replace(MAMBA, scales=(1.0, 2.0, 1.0, 1.0, 1.0))
    assert MAMBA.workspace(16, torch.bfloat16) == 0
    assert scaled.workspace(16, torch.bfloat16) == 2 * sum(MAMBA.inputs(16).values())
    beside = replace(SPEC, layers=(LayerSpec(mixer=scaled),))
    assert plan(config(), beside).units("states") > 0


def test_on_the_host_pools_grow_to_what_can_be_of_use() -> None:
    made = plan(config(), device=torch.device("cpu"))
    assert made.units("kv") == 4 * SPEC.context_len and "of use" in made.lines()[1]
    assert made.units("graphs") == made.units("adapters") == 0
    assert free_bytes(torch.device("cpu")) > 1 << 20


def test_adapters_get_a_share_or_all_that_can_be_resident(monkeypatch) -> None:
    where = geometry()
    packed = pack(weights(all_linear(where, 64), where), where, torch.bfloat16)
    assert room_for(where, 64, torch.bfloat16) == packed.num_bytes
    monkeypatch.setattr(budgets, "free_bytes", lambda device: 1 << 30)
    many = AdapterConfig(max_resident=4096)
    assert adapter_mib(many, where, torch.bfloat16, GPU) == 1024 // ADAPTER_SHARE
    few = AdapterConfig(max_resident=40)
    assert adapter_mib(few, where, torch.bfloat16, GPU) == 40 * packed.num_bytes >> 20
    assert adapter_mib(AdapterConfig(device_mib=7), where, torch.bfloat16, GPU) == 7


def test_windowed_layers_have_pages_of_their_own() -> None:
    spec = replace(SPEC, layers=(LayerSpec(), LayerSpec(window=20)))
    assert plan(config(), spec).units("window_kv") == 0, "one table, one pool"
    made = plan(config(), spec, split_windows=True)
    full, window = made.units("kv"), made.units("window_kv")
    assert window == full // 2 // 16 * 16 and {share.name: share.unit_bytes for share in made.shares}["kv"] == 32
    few = plan(config(kv_tokens=160), spec, split_windows=True)
    assert few.units("window_kv") == 160, "a sequence never needs more window pages than pages"
    assert plan(config(kv_tokens=1600, window_tokens=320), spec, split_windows=True).units("window_kv") == 320


def test_services_show_their_engines_plans(tmp_path) -> None:
    made = plan(config(rows=5))
    texts = [plan_exposition(made.to_dict(), {"engine": name, "incarnation": "1"}) for name in ("a", "b")]
    read = read_plans(merge_exposition(texts))
    assert set(read) == {"a", "b"} and list(read["b"]) == [share.name for share in made.shares]
    assert read["a"]["decode_step"] == (5, "rows", made.shares[2].bytes)
    file = tmp_path / "metrics.txt"
    file.write_text(texts[0])
    ran = CliRunner().invoke(app, ["inspect", "memory", "--metrics", str(file)])
    assert ran.exit_code == 0 and "engine a" in ran.output and "5 rows" in ran.output
    file.write_text("other_total 3.0\n")
    ran = CliRunner().invoke(app, ["inspect", "memory", "--metrics", str(file)])
    assert ran.exit_code == 1 and "memory plan" in ran.output


def test_the_settings_take_the_plans_sizes() -> None:
    settings = config()
    made = plan(settings)
    told = planned(settings, made)
    assert told.cache.kv_tokens == made.units("kv") and told.cache.state_slots == told.cache.window_tokens == 0
    assert plan(told).units("kv") == made.units("kv"), "planned once, planned the same"


def test_what_cannot_be_is_refused_with_numbers() -> None:
    with pytest.raises(InvalidRequest) as error:
        plan(config(kv_tokens=100_000_000))
    assert error.value.field == "cache.kv_tokens" and error.value.actual == "100000000"
    fits = int(str(error.value.expected).split()[2])
    assert plan(config(kv_tokens=fits)).units("kv") == fits // 16 * 16
    with pytest.raises(InvalidRequest, match=r"cache.kv_tokens: expected at most"):
        plan(config(kv_tokens=fits + 32))
    with pytest.raises(InvalidRequest, match=r"cache.kv_tokens: expected at least 16 tokens, got 15"):
        plan(config(kv_tokens=15))
    many = 90_000_000
    with pytest.raises(InvalidRequest, match=rf"scheduler.max_running: expected fewer rows.*decode_step .*got {many}"):
        plan(config(rows=many))
    fewer = plan(config(rows=many), spare_rows=True)
    assert 1 <= fewer.max_running < many and fewer.units("kv") > 0
