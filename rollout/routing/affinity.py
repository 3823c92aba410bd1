"""Which replica a group goes to: sticky while balanced, least loaded otherwise.

Owns the choice and its memory. A group's key is its session where it has one; otherwise its
prompt, adapter and salt, always together with the policy version, since no cache entry survives
that. The home replica keeps a key as long as
`load(home) <= SLACK * load(least loaded) + max(MARGIN, n)`, in samples; otherwise the key moves to
the least loaded replica and stays there.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from rollout.protocol import GenerateCall
from rollout.routing.replica import Replica

SLACK = 1.25
MARGIN = 8
_REMEMBERED = 65_536


def affinity_key(call: GenerateCall, policy_version: int) -> bytes:
    """What decides where the group's prefix is likely to be cached."""
    request = call.request
    if request.session_id is not None:
        return _session_key(request.session_id)
    digest = hashlib.blake2b(digest_size=16)
    adapter = request.adapter
    digest.update(msgspec.msgpack.encode([policy_version, adapter, request.cache_salt, call.text, call.messages]))
    digest.update(request.prompt_ids.tobytes())
    return digest.digest()


class Affinity:
    """Remembers homes, oldest forgotten first."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._homes: OrderedDict[bytes, str] = OrderedDict()
        self._remembered = remembered

    def choose(self, key: bytes, n: int, candidates: Sequence[Replica]) -> Replica:
        """Pick among `candidates` (at least one) for `n` more samples."""
        least = min(candidates, key=lambda replica: (replica.load, replica.engine_id))
        home_id = self._homes.get(key)
        home = next((replica for replica in candidates if replica.engine_id == home_id), None)
        if home is not None and home.load <= SLACK * least.load + max(MARGIN, n):
            chosen = home
        else:
            chosen = least
        self._homes[key] = chosen.engine_id
        self._homes.move_to_end(key)
        while len(self._homes) > self._remembered:
            self._homes.popitem(last=False)
        return chosen

    def forget_session(self, session_id: str) -> None:
        self._homes.pop(_session_key(session_id), None)


def _session_key(session_id: str) -> bytes:
    return b"session\0" + session_id.encode()
