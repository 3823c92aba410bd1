"""The part of a cache key that is not tokens.

Owns the fields that keep entries apart. Ignores tokens and pages. Fields are compared one by one
and never joined into a string: whatever a caller chooses as salt cannot equal another field.
"""

from __future__ import annotations

from typing import NamedTuple


class Namespace(NamedTuple):
    """Two requests may share pages only if all of this is equal.

    `epoch` is the cache's weight epoch, `adapter` and `adapter_rev` the LoRA policy and its load
    generation ("" and 0 for the base policy), `salt` the caller's own separation, `layout` the
    dtype and arrangement of the stored states.
    """

    epoch: int = 0
    adapter: str = ""
    adapter_rev: int = 0
    salt: str = ""
    layout: str = ""
