"""Where files that can be made again are kept between runs.

Owns the folder's place. Ignores what is kept there.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`sparkroll` under the user's cache directory; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "sparkroll"
