"""Configuration from TOML and overrides."""

import pickle
from pathlib import Path

import pytest

from engine import Engine
from engine.config import EngineConfig, SchedulerConfig, describe, load_config
from engine.errors import InvalidRequest
from engine.models.spec import read_spec
from engine.resolve import resolve
from tests.support import CONTEXT


def test_toml_then_overrides(tmp_path):
    file = tmp_path / "engine.toml"
    file.write_text('dtype = "float32"\n[cache]\npage_size = 4\nkv_tokens = 1024\n')
    config = load_config(EngineConfig, file, ["cache.kv_tokens=64", "scheduler.lookahead = 2", "device=cpu"])
    assert (config.dtype, config.device) == ("float32", "cpu")
    assert (config.cache.page_size, config.cache.kv_tokens, config.scheduler.lookahead) == (4, 64, 2)
    assert load_config(EngineConfig, None, ["cache.kv_tokens=auto"]).cache.kv_tokens == "auto"
    assert load_config(EngineConfig, None, ["cache.memory_fraction=0.25"]).cache.memory_fraction == 0.25
    assert load_config(EngineConfig, None, ["num_threads=none"], EngineConfig(num_threads=2)).num_threads is None
    assert pickle.loads(pickle.dumps(config)) == config
    assert "cache.page_size = 4" in describe(config)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("cache.pagesize=4", "cache.pagesize: there is no such setting; did you mean cache.page_size?"),
        ("page_size=4", "page_size: there is no such setting; did you mean cache.page_size?"),
        ("cache.zzz=4", "cache.zzz: there is no such setting; cache has canary, "),
        ("cache.page_size=big", "cache.page_size: expected int, got 'big'"),
        ("cache.kv_tokens=big", "cache.kv_tokens: expected int or 'auto', got 'big'"),
        ("cache.page_size=true", "cache.page_size"),
        ("cache=4", "cache"),
        ("dtype", "dtype"),
        ("nothing.at.all=1", "nothing"),
    ],
)
def test_mistakes_are_named(override, named):
    with pytest.raises(InvalidRequest) as caught:
        load_config(EngineConfig, None, [override])
    assert named in str(caught.value)


def test_missing_and_broken_files_are_named(tmp_path):
    for file in (Path("nowhere.toml"), tmp_path):
        with pytest.raises(InvalidRequest, match="TOML"):
            load_config(EngineConfig, file)
    broken = tmp_path / "x.toml"
    broken.write_text("a = = 1")
    with pytest.raises(InvalidRequest, match=r"x\.toml"):
        load_config(EngineConfig, broken)


@pytest.mark.parametrize(
    "override",
    [
        "cache.page_size=0",
        "scheduler.max_running=0",
        "dtype=int8",
        "device=nowhere",
        "attention=magic",
        "adapters.max_rank=257",
        "adapters.device_mib=0",
        "adapters.stacked_ranks=24",
        "adapters.stacked_ranks=1040",
        "adapters.stacked_ranks=-16",
    ],
)
def test_resolving_refuses_what_cannot_run(t_full, override):
    with pytest.raises(InvalidRequest) as caught:
        resolve(load_config(EngineConfig, None, [override]), read_spec(t_full))
    name, value = override.split("=")
    assert caught.value.field == name and value in caught.value.actual


def test_resolved_configurations_have_no_auto_but_what_waits_for_the_weights(t_full):
    config = resolve(EngineConfig(), read_spec(t_full))
    waiting = [f"cache.{name} = 'auto'" for name in ("kv_tokens", "window_tokens", "state_slots")]
    waiting.append("adapters.device_mib = 'auto'")
    assert [line for line in describe(config) if "auto" in line] == waiting


@pytest.mark.parametrize(
    ("overrides", "rows", "tokens"),
    [
        ([], 64, 512),
        (["scheduler.max_running=3", "scheduler.prefill_tokens=7"], 3, 7),
        (["cache.kv_tokens=100"], 64, 50),
        (["cache.kv_tokens=1", "scheduler.max_running=5"], 5, 1),
    ],
)
def test_auto_rows_and_tokens(t_full, overrides, rows, tokens):
    config = resolve(load_config(EngineConfig, None, ["device=cpu", *overrides]), read_spec(t_full))
    assert (config.scheduler.max_running, config.scheduler.prefill_tokens) == (rows, tokens)
    config = resolve(EngineConfig(device="meta", dtype="float32", attention="torch"), read_spec(t_full))
    assert (config.scheduler.max_running, config.scheduler.prefill_tokens) == (512, 8192)


def test_an_engine_says_how_large_its_pool_is(t_full, capsys):
    """All the pool can be of use for: every row at its whole context."""
    engine = Engine.from_pretrained(t_full, EngineConfig(device="cpu", scheduler=SchedulerConfig(max_running=3)))
    assert not [line for line in describe(engine.config) if "auto" in line]
    assert engine.config.cache.kv_tokens == engine.limits.pool_tokens == 3 * CONTEXT
    assert f"kv: {3 * CONTEXT} tokens" in capsys.readouterr().err
