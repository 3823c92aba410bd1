"""What counts as text.

Owns the refusal of strings that have no UTF-8 form. Ignores lengths.
"""

from __future__ import annotations

from engine.errors import InvalidRequest


def utf8(text: str, field: str) -> bytes:
    """The text's bytes. Half of a surrogate pair is no character: `InvalidRequest` naming `field`."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        shown = text[max(0, error.start - 8) : error.start + 8]
        raise InvalidRequest(field=field, expected="text without lone surrogates", actual=shown) from error
