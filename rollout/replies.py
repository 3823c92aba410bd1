"""Refusals on the wire.

Owns how a `SparkrollError` becomes a body and an HTTP status, and back. Ignores which error is
right where.
"""

from __future__ import annotations

from starlette.responses import Response

from engine.errors import ERRORS_BY_CODE, ErrorCode, SparkrollError
from rollout.codec import encode
from rollout.protocol import BODY_TYPE, ErrorReply

STATUS_BY_CODE: dict[ErrorCode, int] = {
    "INVALID": 400,
    "UNAUTH": 401,
    "NOT_FOUND": 404,
    "CONFLICT": 409,
    "TOO_LARGE": 413,
    "UNSUPPORTED": 422,
    "OVERLOADED": 429,
    "CORRUPT": 500,
    "INTERNAL": 500,
    "PAUSED": 503,
    "DRAINING": 503,
    "TIMEOUT": 504,
    "UNREACHABLE": 503,
}


def error_body(error: SparkrollError, state: str = "") -> bytes:
    """The encoded `ErrorReply`. Text that cannot travel is escaped, so that this never fails."""
    return encode(
        ErrorReply(
            code=error.code,
            message=_safe(error.message),
            retryable=error.retryable,
            state=state,
            retry_after_ms=error.retry_after_ms,
            field=_safe_or_none(error.field),
            expected=_safe_or_none(error.expected),
            actual=_safe_or_none(error.actual),
        )
    )


def error_response(error: SparkrollError, state: str = "", status: int | None = None) -> Response:
    headers = {}
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(-(-error.retry_after_ms // 1000))
    return Response(error_body(error, state), status or STATUS_BY_CODE[error.code], headers, media_type=BODY_TYPE)


def error_from_reply(reply: ErrorReply) -> SparkrollError:
    """The exception a reply stands for, as the service raised it."""
    error = ERRORS_BY_CODE[reply.code](
        reply.message,
        field=reply.field,
        expected=reply.expected,
        retry_after_ms=reply.retry_after_ms,
    )
    error.actual = reply.actual
    error.retryable = reply.retryable
    return error


def _safe(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _safe_or_none(text: str | None) -> str | None:
    return None if text is None else _safe(text)
