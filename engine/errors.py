"""The exceptions users meet, and the closed set of codes they carry.

Owns the error taxonomy shared by every layer. Ignores transport: `rollout.protocol` maps
codes onto HTTP statuses. Programming mistakes are asserts, never these.
"""

from __future__ import annotations

from typing import Any, Literal

ErrorCode = Literal[
    "INVALID",
    "UNAUTH",
    "NOT_FOUND",
    "CONFLICT",
    "TOO_LARGE",
    "UNSUPPORTED",
    "OVERLOADED",
    "CORRUPT",
    "PAUSED",
    "DRAINING",
    "UNREACHABLE",
    "TIMEOUT",
    "INTERNAL",
]

_SHOWN = 200


def _show(value: Any) -> str:
    """A bounded, ASCII-safe rendering: an error about a bad value must itself be encodable."""
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


class SparkrollError(Exception):
    """A refusal or failure that a caller can act on.

    `code` is the class of the fault, `retryable` says whether the same call may succeed later,
    `field`, `expected` and `actual` name what was wrong where there is such a thing.
    Instances pickle, so they cross process borders whole.
    """

    code: ErrorCode = "CORRUPT"
    retryable: bool = False

    def __init__(
        self,
        message: str = "",
        *,
        field: str | None = None,
        expected: Any = None,
        actual: Any = None,
        retry_after_ms: int | None = None,
    ) -> None:
        self.field = field
        self.expected = None if expected is None else str(expected)
        self.actual = None if actual is None else _show(actual)
        self.retry_after_ms = retry_after_ms
        self.message = message or f"{field}: expected {self.expected}, got {self.actual}"
        super().__init__(self.message)

    def __reduce__(self):
        return _rebuild, (type(self), self.__dict__.copy())


def _rebuild(kind: type[SparkrollError], state: dict[str, Any]) -> SparkrollError:
    error = kind.__new__(kind, state["message"])
    error.__dict__.update(state)
    return error


class InvalidRequest(SparkrollError):
    """A field's value is outside what it may be."""

    code = "INVALID"


class Unauthorized(SparkrollError):
    """The key is missing or does not open this route."""

    code = "UNAUTH"


class NotFound(SparkrollError):
    """The named thing does not exist."""

    code = "NOT_FOUND"


class Conflict(SparkrollError):
    """The call does not fit the present state (open transaction, wrong base version, busy id)."""

    code = "CONFLICT"


class TooLarge(SparkrollError):
    """A body, prompt or batch is over its limit."""

    code = "TOO_LARGE"


class Unsupported(SparkrollError):
    """A combination of features that this engine refuses by name."""

    code = "UNSUPPORTED"


class Overloaded(SparkrollError):
    """The queue is full; come back later."""

    code = "OVERLOADED"
    retryable = True


class Corrupt(SparkrollError):
    """The engine is fenced: its weights may be mixed and it serves nothing until a full update."""

    code = "CORRUPT"


class Paused(SparkrollError):
    """Generation is paused, or memory has been released."""

    code = "PAUSED"
    retryable = True


class Draining(SparkrollError):
    """The engine is shutting down."""

    code = "DRAINING"
    retryable = True


class DeadlineExceeded(SparkrollError):
    """The deadline passed before the work was done."""

    code = "TIMEOUT"
    retryable = True


class InternalError(SparkrollError):
    """A fault of the service itself; its log has the details."""

    code = "INTERNAL"


ERRORS_BY_CODE: dict[str, type[SparkrollError]] = {
    kind.code: kind
    for kind in (
        InvalidRequest,
        Unauthorized,
        NotFound,
        Conflict,
        TooLarge,
        Unsupported,
        Overloaded,
        Corrupt,
        Paused,
        Draining,
        DeadlineExceeded,
        InternalError,
    )
}
