"""What can be wrong with an adapter, as exceptions that name it.

Owns the kinds of refusal. Ignores how a service reports them: the engine turns each kind into its own.
"""

from __future__ import annotations

from typing import Any

_SHOWN = 300


class AdapterError(Exception):
    """`field`, `expected` and `actual` name what was wrong. Nothing was changed."""

    def __init__(self, field: str, expected: Any, actual: Any) -> None:
        shown = ascii(actual)
        self.field = field
        self.expected = str(expected)
        self.actual = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}... ({len(shown)} characters)"
        super().__init__(f"{field}: expected {self.expected}, got {self.actual}")

    def __reduce__(self):
        return _rebuild, (type(self), self.__dict__.copy())


def _rebuild(kind: type[AdapterError], state: dict[str, Any]) -> AdapterError:
    error = kind.__new__(kind)
    error.__dict__.update(state)
    error.args = (f"{error.field}: expected {error.expected}, got {error.actual}",)
    return error


class InvalidAdapter(AdapterError):
    """Its configuration or tensors do not fit each other or the model."""


class UnsupportedAdapter(AdapterError):
    """It asks for arithmetic that is not built; `field` is the setting that asks."""


class UnknownAdapter(AdapterError):
    """No such name, or no such revision of it."""


class AdapterConflict(AdapterError):
    """The call does not fit the version's state."""


class AdapterMemory(AdapterError):
    """No room, and nothing idle that could go."""
