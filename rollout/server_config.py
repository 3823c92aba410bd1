"""Settings of the HTTP server.

Owns their defaults and what is refused before anything listens. Ignores how they are used (`rollout.server`,
`rollout.endpoint`), and imports neither.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import InvalidRequest
from rollout.auth import Key, KeyRing
from rollout.wire_limits import WireLimits


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """`port` 0 takes a free one. Without keys only loopback is served.

    `grace_s`: how long generation goes on after its last caller is gone, so that a retry can
    attach. `reply_ttl_s` and `reply_bytes` bound the replies kept for repeats, `replay_bytes` the
    frames of one stream kept for resuming. `inflight_bytes` bounds all bodies being read or
    decoded at one time. `body_timeout_s` and `send_timeout_s` bound the silence of a caller.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    user_key: str | None = None
    admin_key: str | None = None
    limits: WireLimits = WireLimits()
    grace_s: float = 0.5
    ping_s: float = 10.0
    reply_ttl_s: float = 300.0
    reply_bytes: int = 256 * 2**20
    replay_bytes: int = 16 * 2**20
    inflight_bytes: int = 2**30
    body_timeout_s: float = 60.0
    send_timeout_s: float = 60.0
    shutdown_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("user_key", "admin_key"):
            key = getattr(self, name)
            if key is not None:
                object.__setattr__(self, name, Key(key))
        KeyRing(self.user_key, self.admin_key).check_bind(self.host)
        if not 0 <= self.port < 65536:
            raise InvalidRequest(field="port", expected="a port in [0, 65535]", actual=self.port)
