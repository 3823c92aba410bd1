"""Names to drafters: packed ones are expanded once, by content; folders are taken as they are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.config import EngineConfig
from engine.dspark.block_spec import read_drafter_spec
from engine.dspark.config import DSparkConfig
from engine.dspark.packing import folder_bytes, pack_drafter
from engine.errors import InvalidRequest, NotFound, Unsupported
from rollout.cli import app
from rollout.drafter_catalog import (
    check_drafter,
    drafter_states,
    named_drafters,
    resolve_drafter,
    with_drafter,
)
from rollout.model_catalog import CatalogConfig
from tests.unit.dspark.served import save_random

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def catalog(tmp_path: Path) -> CatalogConfig:
    pack_drafter(save_random(tmp_path / "source"), tmp_path / "assets" / "tiny-dspark")
    (tmp_path / "assets" / "notes").mkdir()
    return CatalogConfig(cache_dir=tmp_path / "cache", drafters=tmp_path / "assets")


def engine_with(drafter: str | Path) -> EngineConfig:
    return EngineConfig(dspark=DSparkConfig(drafter=str(drafter)))


def test_a_name_becomes_a_folder_once_and_another_drafter_of_the_name_another(catalog: CatalogConfig) -> None:
    about = "drafter: 2 layers, 4 slots a block, vanilla head of rank 8"
    assert drafter_states(catalog) == {"tiny-dspark": (about, "expanded on first use")}
    folder = Path(resolve_drafter("tiny-dspark", catalog))
    assert folder.parent == catalog.folder() / "drafters" and read_drafter_spec(folder).num_drafts == 4
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    packed = named_drafters(catalog)["tiny-dspark"]
    assert resolve_drafter("tiny-dspark", catalog) == resolve_drafter(str(packed), catalog) == str(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert drafter_states(catalog)["tiny-dspark"] == (about, "ready")
    (packed / "README.md").write_text("another")
    assert resolve_drafter("tiny-dspark", catalog) != str(folder)
    assert len(list(folder.parent.iterdir())) == 2


def test_kinds_and_folders_stay_and_what_is_not_there_is_refused_with_what_is(
    catalog: CatalogConfig, tmp_path: Path
) -> None:
    for given in ("none", "ngram", str(tmp_path / "source")):
        check_drafter(given, catalog)
        assert resolve_drafter(given, catalog) == given
    for given in ("tiny", "", "a\0b", "someone/some-repo", "http://127.0.0.1:9/x"):
        with pytest.raises(NotFound, match="none, ngram, tiny-dspark") as caught:
            check_drafter(given, catalog, "engine.dspark.drafter")
        assert caught.value.field == "engine.dspark.drafter"
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        resolve_drafter(str(tmp_path / "assets"), catalog)
    (tmp_path / "assets" / "tiny-dspark" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(InvalidRequest, match=r"model\.safetensors"):
        resolve_drafter("tiny-dspark", catalog)
    assert not list((tmp_path / "cache" / "drafters").iterdir())
    assert named_drafters(CatalogConfig(drafters=tmp_path / "nowhere")) == {}


def test_a_drafter_of_another_model_is_refused_before_anything_is_loaded(
    catalog: CatalogConfig, tmp_path: Path, t_full: Path
) -> None:
    ready = with_drafter(engine_with("tiny-dspark"), t_full, catalog)
    assert ready.dspark.drafter == resolve_drafter("tiny-dspark", catalog)
    assert with_drafter(engine_with("ngram"), t_full, catalog) == engine_with("ngram")
    for field, value in (("vocab_size", 600), ("hidden_size", 32), ("num_hidden_layers", 3)):
        shutil.copytree(t_full, tmp_path / field)
        config = json.loads((t_full / "config.json").read_text()) | {field: value}
        (tmp_path / field / "config.json").write_text(json.dumps(config | {"layer_types": None}))
        with pytest.raises(Unsupported, match=f"drafter {field.replace('hidden_layers', 'target_layers')}"):
            with_drafter(engine_with("tiny-dspark"), tmp_path / field, catalog)
    elsewhere = engine_with("/on/another/machine")
    assert with_drafter(elsewhere, t_full, catalog, elsewhere=True) == elsewhere
    with pytest.raises(NotFound):
        with_drafter(elsewhere, t_full, catalog)


def test_commands_pack_expand_and_convert(catalog: CatalogConfig, tmp_path: Path, t_full: Path) -> None:
    def call(*arguments: str | Path) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["drafter", *map(str, arguments)])
        return result.exit_code, result.output

    code, said = call("pack", tmp_path / "source", tmp_path / "packed")
    assert code == 0 and "matrices in 8 bits" in said and ".weight)" in said
    assert call("expand", tmp_path / "packed", tmp_path / "expanded")[0] == 0
    assert call("convert", tmp_path / "expanded", tmp_path / "converted", "--model", t_full)[0] == 0
    assert read_drafter_spec(tmp_path / "converted") == read_drafter_spec(tmp_path / "expanded")
    for command in (("expand", tmp_path / "packed"), ("pack", tmp_path / "source")):
        code, said = call(*command, tmp_path / "expanded")
        assert code == 1 and "does not exist yet" in said
    assert call("expand", "nothing", tmp_path / "x")[0] == 1 and not (tmp_path / "x").exists()


def test_drafters_that_ship_are_small_whole_and_name_their_target(tmp_path: Path) -> None:
    import recipes

    shipped = named_drafters()
    assert all(folder.parent == Path(recipes.__file__).parent / "assets" for folder in shipped.values())
    for name, folder in shipped.items():
        assert folder_bytes(folder) <= 16 * 2**20, name
        stored = json.loads((folder / "config.json").read_text())
        assert len(stored["target_digest"]) == 64, name
        assert {path.name for path in folder.iterdir()} >= {"README.md", "sts-coupled.json", "sts-rejection.json"}
        assert Path(resolve_drafter(name, CatalogConfig(cache_dir=tmp_path))).is_dir()


@pytest.mark.slow
def test_an_installed_wheel_brings_its_drafters(catalog: CatalogConfig, tmp_path: Path) -> None:
    source, wheels, installed = tmp_path / "tree", tmp_path / "wheels", tmp_path / "site"
    for name in ("engine", "lora", "trainer_bridge", "rollout", "recipes", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "assets"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copyfile(ROOT / name, source / name)
    shutil.copytree(tmp_path / "assets" / "tiny-dspark", source / "recipes" / "assets" / "tiny-dspark")
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(wheels)!r})"
    wheels.mkdir()
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        wheel.extractall(installed)
    code = "from rollout.drafter_catalog import resolve_drafter; print(resolve_drafter('tiny-dspark'))"
    environment = os.environ | {"PYTHONPATH": str(installed), "XDG_CACHE_HOME": str(tmp_path / "user")}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert Path(ran.stdout.strip()).parent == tmp_path / "user" / "sparkroll" / "drafters"
