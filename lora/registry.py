"""Names and revisions of adapters, and who still uses them.

Owns two-phase publishing, aliases, reference counts and the host pool's limit. Ignores requests: a
caller acquires a version when it admits one and releases it exactly once when that ends. Ignores the
device but for telling `lora.residency` when a version is gone.

A name is an alias: it is resolved once, by `acquire`, and whoever holds the version keeps it while the
name moves on. Nothing is looked up by name later.
"""

from __future__ import annotations

from collections.abc import Callable

from lora.errors import AdapterConflict, AdapterMemory, UnknownAdapter
from lora.packing import Packed
from lora.versions import AdapterVersion, State


class Registry:
    """`host_bytes` bounds the factors kept on the host; `on_freed` hears of every version that ends."""

    def __init__(self, host_bytes: int, on_freed: Callable[[AdapterVersion], None]) -> None:
        self.host_bytes = host_bytes
        self._on_freed = on_freed
        self._versions: dict[tuple[str, int], AdapterVersion] = {}
        self._current: dict[str, AdapterVersion] = {}
        self._last_rev: dict[str, int] = {}

    # --- publishing -----------------------------------------------------------------------------

    def stage(self, name: str, digest: str, packed: Packed, rev: int | None = None) -> AdapterVersion:
        """Take a checked adapter in without anybody seeing it. `rev` None is the next one."""
        last = self._last_rev.get(name, 0)
        rev = last + 1 if rev is None else rev
        if rev <= last:
            raise AdapterConflict("rev", f"more than {last}, the last revision of {name!r}", rev)
        if self.num_bytes + packed.num_bytes > self.host_bytes:
            raise AdapterMemory(
                "adapter", f"at most {self.host_bytes} bytes of adapters on the host: retire one",
                f"{self.num_bytes} held and {packed.num_bytes} more",
            )  # fmt: skip
        version = AdapterVersion(name, rev, digest, packed)
        self._versions[version.key] = version
        self._last_rev[name] = rev
        return version

    def publish(self, version: AdapterVersion, keep_previous: bool = False) -> AdapterVersion | None:
        """Let the name lead to a staged version from now on: the previous one, if any. It retires
        unless it is to stay addressable by its revision."""
        self.check_publishable(version)
        previous = self._current.get(version.name)
        version.state = State.LIVE
        self._current[version.name] = version
        if previous is not None and not keep_previous:
            self._retire(previous)
        return previous

    def check_publishable(self, version: AdapterVersion) -> None:
        """Raise unless the version is staged and newer than its name's present one."""
        if version.state is not State.STAGED:
            raise AdapterConflict("rev", "a staged revision", version)
        previous = self._current.get(version.name)
        if previous is not None and previous.rev > version.rev:
            raise AdapterConflict("rev", f"more than the current {previous.rev}", version.rev)

    def discard(self, version: AdapterVersion) -> None:
        """Drop a staged version. Its number is not used again."""
        if version.state is not State.STAGED:
            raise AdapterConflict("rev", "a staged revision", version)
        self._free(version)

    def retire(self, name: str, rev: int | None = None) -> list[AdapterVersion]:
        """Let no further request find a revision, or any of a name. Those in use end with their last
        request."""
        ended = [
            v for v in self._versions.values() if v.name == name and v.state is State.LIVE and rev in (None, v.rev)
        ]
        if not ended:
            raise UnknownAdapter("adapter", self._known(), name if rev is None else f"{name}@{rev}")
        for version in ended:
            self._retire(version)
        return ended

    def staged(self, name: str, rev: int) -> AdapterVersion:
        version = self._versions.get((name, rev))
        if version is None or version.state is not State.STAGED:
            raise UnknownAdapter("rev", f"a staged revision of {name!r}", rev)
        return version

    # --- requests -------------------------------------------------------------------------------

    def find(self, name: str, rev: int | None = None) -> AdapterVersion:
        """The current version of a name, or one of its live revisions."""
        version = self._current.get(name) if rev is None else self._versions.get((name, rev))
        if version is None or version.state is not State.LIVE:
            raise UnknownAdapter("adapter", self._known(), name if rev is None else f"{name}@{rev}")
        return version

    def acquire(self, version: AdapterVersion) -> AdapterVersion:
        assert version.state is State.LIVE, f"{version!r} takes no more requests"
        version.references += 1
        return version

    def release(self, version: AdapterVersion) -> None:
        assert version.references > 0, f"{version!r} was released more often than acquired"
        version.references -= 1
        if version.state is State.RETIRING and version.references == 0:
            self._free(version)

    # --- looking --------------------------------------------------------------------------------

    @property
    def versions(self) -> list[AdapterVersion]:
        """All that have not been freed, by name and revision."""
        return [self._versions[key] for key in sorted(self._versions)]

    @property
    def current(self) -> dict[str, int]:
        """Names and the revisions they lead to."""
        return {name: self._current[name].rev for name in sorted(self._current)}

    @property
    def num_bytes(self) -> int:
        return sum(version.num_bytes for version in self._versions.values())

    # --- inside ---------------------------------------------------------------------------------

    def _retire(self, version: AdapterVersion) -> None:
        version.state = State.RETIRING
        if self._current.get(version.name) is version:
            del self._current[version.name]
        if version.references == 0:
            self._free(version)

    def _free(self, version: AdapterVersion) -> None:
        assert version.references == 0, f"{version!r} is freed while requests use it"
        version.state = State.FREED
        del self._versions[version.key]
        self._on_freed(version)
        version.packed = None

    def _known(self) -> str:
        names = list(self.current)
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return f"an adapter that is registered ({shown or 'none is'})"
