"""Which folder a drafter's name means.

Owns the packed drafters that ship with the project (`recipes/assets/NAME`), their expansion once into a cache, and
the check of names and folders. Ignores loading, and what a packed folder holds (`engine.dspark.packing`). Nothing
is ever downloaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.resources
import json
from collections.abc import Sequence
from pathlib import Path

from engine.config import EngineConfig
from engine.dspark.config import NGRAM
from engine.errors import InvalidRequest, NotFound
from engine.user_cache import build_folder, is_built
from rollout.model_catalog import CatalogConfig

REVISION = 1
"""Of the expansion: it changes when its result does, so that caches of older releases are left alone."""
_PACKAGE, _ASSETS = "recipes", "assets"
_KINDS = ("none", NGRAM)


def named_drafters(config: CatalogConfig | None = None) -> dict[str, Path]:
    """The packed folders that have names."""
    root = (config or CatalogConfig()).drafters
    if root is None:
        try:
            root = Path(str(importlib.resources.files(_PACKAGE))) / _ASSETS
        except ModuleNotFoundError:
            return {}
    if not Path(root).is_dir():
        return {}
    return {path.name: path for path in sorted(Path(root).iterdir()) if is_packed(path)}


def drafter_states(config: CatalogConfig | None = None) -> dict[str, tuple[str, str]]:
    """For each name what it is and whether it is there, in words."""
    settled, found = config or CatalogConfig(), {}
    for name, folder in named_drafters(settled).items():
        stored = json.loads((folder / "config.json").read_text())
        about = f"drafter: {stored.get('num_hidden_layers')} layers, {stored.get('block_size')} slots a block"
        if stored.get("markov_rank"):
            about += f", {stored.get('markov_head_type')} head of rank {stored['markov_rank']}"
        found[name] = (about, "ready" if is_built(_target(folder, settled)) else "expanded on first use")
    return found


def check_drafter(name_or_folder: str, config: CatalogConfig | None = None, field: str = "drafter") -> None:
    """At once, as nothing is read: raises `NotFound` for what names neither a kind of drafter nor a drafter nor a
    folder, `InvalidRequest` where a folder is no drafter's."""
    if name_or_folder not in _KINDS:
        find_drafter(name_or_folder, config, field, _KINDS)


def find_drafter(
    name_or_folder: str, config: CatalogConfig | None = None, field: str = "drafter", kinds: Sequence[str] = ()
) -> Path:
    """The folder, packed or not, of a drafter that has one; raises what `check_drafter` raises. Refusals tell of
    `kinds` too."""
    named = named_drafters(config)
    if name_or_folder in named:
        return named[name_or_folder]
    folder = Path(name_or_folder).expanduser().absolute()
    if "\0" in name_or_folder or not name_or_folder or not folder.is_dir():
        known = [*kinds, *named]
        expected = "a drafter's folder" + (f" or one of {', '.join(known)}" if known else "")
        raise NotFound(field=field, expected=expected, actual=name_or_folder)
    if not (folder / "config.json").is_file():
        raise InvalidRequest(field=field, expected=f"config.json in {folder}", actual="none")
    return folder


def resolve_drafter(name_or_folder: str, config: CatalogConfig | None = None, field: str = "drafter") -> str:
    """What an engine takes as `dspark.drafter`: a kind that is no folder, or a folder in the DeepSpec layout. A
    named drafter, or a packed folder, is expanded on first use.

    Raises what `check_drafter` and `engine.dspark.packing.expand_into` raise.
    """
    if name_or_folder in _KINDS:
        return name_or_folder
    folder = find_drafter(name_or_folder, config, field, _KINDS)
    if not is_packed(folder):
        return str(folder)
    target = _target(folder, config or CatalogConfig())
    if not is_built(target):
        # Imported late: naming what there is needs no torch.
        from engine.dspark.packing import expand_into

        build_folder(target, lambda partial: expand_into(folder, partial))
    return str(target)


def with_drafter(
    engine: EngineConfig, model: Path, config: CatalogConfig | None = None, elsewhere: bool = False
) -> EngineConfig:
    """`engine` with its drafter's folder instead of a name, refused by field where its shape is not of `model`'s
    folder. With `elsewhere` engines run on other machines, where folders may be that are not here."""
    given = engine.dspark.drafter
    if given in _KINDS or (elsewhere and given not in named_drafters(config) and not Path(given).is_dir()):
        return engine
    folder = resolve_drafter(given, config, "engine.dspark.drafter")
    from engine.dspark.block_spec import check_fits, read_drafter_spec
    from engine.models.spec import read_spec

    check_fits(read_drafter_spec(folder), read_spec(model))
    return dataclasses.replace(engine, dspark=dataclasses.replace(engine.dspark, drafter=folder))


def is_packed(folder: Path) -> bool:
    """Whether a folder says that it has to be expanded before it is served."""
    try:
        stored = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(stored, dict) and "packing" in stored


def _target(folder: Path, config: CatalogConfig) -> Path:
    """By content, so that another drafter of the name never meets the folder of this one."""
    total = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        content = path.read_bytes()
        total.update(f"{path.name}\0{len(content)}\0".encode())
        total.update(content)
    name = folder.resolve().name
    return config.folder() / "drafters" / f"{name}-r{REVISION}-{total.hexdigest()[:16]}"
