"""What one architecture adds to the common reading of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """`describe` gives the fields of a `ModelSpec` that the common ones lack or have otherwise, `layers`
    and `rope` among them. `own_fields` are those of the configuration that it judges itself."""

    architecture: str
    model_type: str
    describe: Callable[[dict[str, Any]], dict[str, Any]]
    own_fields: frozenset[str] = frozenset()
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = dict
    """The configuration as the common reading expects it."""
