"""Where files that can be made again are kept between runs, and how a folder of them appears.

Owns the cache's place and folders that exist whole or not at all. Ignores what is kept there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """`sparkroll` under the user's cache directory; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "sparkroll"


def is_built(target: Path) -> bool:
    return (target / "config.json").is_file()


def build_folder(target: Path, build: Callable[[Path], None]) -> Path:
    """`target`, filled by `build` unless it is there already. Built aside and renamed, so that a folder which
    exists is whole; where `build` fails nothing is left."""
    if is_built(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        build(partial)
        partial.chmod(0o755)
        try:
            partial.rename(target)
        except OSError:
            # Another process finished the same folder first.
            if not is_built(target):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target
