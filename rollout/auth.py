"""Who may call what.

Owns the keys, the access levels and where a server without keys may listen. Ignores routes,
which only name their level, and encryption, which belongs to a proxy in front.
"""

from __future__ import annotations

import hmac
import ipaddress
from typing import Literal

from engine.errors import InvalidRequest, Unauthorized

Access = Literal["open", "user", "admin"]


class Key(str):
    """A secret that does not show itself when configuration is printed."""

    def __repr__(self) -> str:
        return "'(hidden)'"


class KeyRing:
    """Checks `Authorization: Bearer KEY`. The admin key opens user routes too.

    Without any key every route is open, and only to this machine.
    """

    def __init__(self, user_key: str | None, admin_key: str | None) -> None:
        for name, key in (("user_key", user_key), ("admin_key", admin_key)):
            if key is not None and (not key.strip() or not key.isascii()):
                raise InvalidRequest(field=name, expected="a non-empty ASCII key", actual="something else")
        if user_key is not None and admin_key is None:
            raise InvalidRequest(field="admin_key", expected="an admin key beside the user key", actual="none")
        if user_key is not None and user_key == admin_key:
            raise InvalidRequest(field="admin_key", expected="another key than user_key", actual="the same")
        self._user = user_key.encode() if user_key is not None else None
        self._admin = admin_key.encode() if admin_key is not None else None

    @property
    def empty(self) -> bool:
        return self._admin is None

    def check_bind(self, host: str) -> None:
        """Refuse to listen beyond this machine without keys."""
        if self.empty and not _is_loopback(host):
            raise InvalidRequest(
                field="host", expected="a loopback address (or set admin_key and user_key)", actual=host
            )

    def check(self, access: Access, authorization: str | None, host: str | None) -> None:
        """Raise `Unauthorized` unless the headers open a route of this level."""
        if access == "open":
            return
        if self.empty:
            # A web page may resolve its own name to this machine; it cannot fake the Host header.
            if not _is_loopback(_host_name(host or "")):
                raise Unauthorized(field="host", expected="a loopback name while no keys are set", actual=host)
            return
        scheme, _, key = (authorization or "").partition(" ")
        given = key.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else b""
        accepted = [self._admin] if access == "admin" or self._user is None else [self._admin, self._user]
        # Every accepted key is compared, so that the time taken says nothing about which one is near.
        matches = [hmac.compare_digest(given, known) for known in accepted if known is not None]
        if not any(matches):
            raise Unauthorized(field="authorization", expected=f"a key for {access} routes", actual="no such key")


def _host_name(header: str) -> str:
    """A Host header without its port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
