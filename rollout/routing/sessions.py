"""Open sessions and their lifetimes.

Owns which session ids a generation may name. A session is dropped when closed or `ttl_s` after
its last use.
"""

from __future__ import annotations

import math
import time

from engine.errors import Conflict, InvalidRequest, NotFound, Overloaded

MAX_SESSIONS = 100_000


class SessionTable:
    def __init__(self, limit: int = MAX_SESSIONS) -> None:
        self._limit = limit
        self._sessions: dict[str, tuple[float, float]] = {}
        """Deadline and lifetime by id."""

    def open(self, session_id: str, ttl_s: float) -> None:
        if not session_id:
            raise InvalidRequest(field="session_id", expected="a non-empty name", actual=session_id)
        if not (math.isfinite(ttl_s) and ttl_s > 0):
            raise InvalidRequest(field="ttl_s", expected="a finite positive number of seconds", actual=ttl_s)
        self._expire()
        if session_id in self._sessions:
            raise Conflict(field="session_id", expected="a session that is not open", actual=session_id)
        if len(self._sessions) >= self._limit:
            raise Overloaded(f"{self._limit} sessions are open", retry_after_ms=1000)
        self._sessions[session_id] = (time.monotonic() + ttl_s, ttl_s)

    def close(self, session_id: str) -> None:
        if self._sessions.pop(session_id, None) is None:
            raise NotFound(field="session_id", expected="an open session", actual=session_id)

    def use(self, session_id: str | None) -> None:
        """Check that the session is open, and renew it. None names no session."""
        if session_id is None:
            return
        now = time.monotonic()
        deadline, ttl_s = self._sessions.get(session_id, (-math.inf, 0.0))
        if deadline <= now:
            raise NotFound(field="session_id", expected="an open session", actual=session_id)
        self._sessions[session_id] = (now + ttl_s, ttl_s)

    def __len__(self) -> int:
        return len(self._sessions)

    def _expire(self) -> None:
        now = time.monotonic()
        for session_id in [key for key, (deadline, _) in self._sessions.items() if deadline <= now]:
            del self._sessions[session_id]
