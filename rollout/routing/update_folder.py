"""Which folder a disk update may read.

Owns the one rule for engines and routers alike: a local folder inside the configured root.
"""

from __future__ import annotations

from pathlib import Path

from engine.errors import InvalidRequest


def resolve_update_folder(uri: str, root: Path | None) -> Path:
    """The folder a disk update names: inside `root`, after links and `..` are followed.

    The refusal is the same whether the path exists or not.
    """
    refusal = InvalidRequest(field="uri", expected="a folder inside the allowed root", actual=uri)
    if root is None:
        raise InvalidRequest(field="uri", expected="no disk updates: no root is configured for them", actual=uri)
    if "\0" in uri or "://" in uri:
        raise refusal
    try:
        folder = (root / uri).resolve()
        inside = folder.is_relative_to(root.resolve()) and folder.is_dir()
    except (OSError, RuntimeError):
        raise refusal from None
    if not inside:
        raise refusal
    return folder
